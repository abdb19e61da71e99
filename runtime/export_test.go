package runtime

import "errors"

// PutRecord writes a record as a daemon does that dies right after it.
func PutRecord(dir string, rec *Record) error {
	r, err := openRecords(dir)
	if err != nil {
		return err
	}
	return errors.Join(r.put(rec), r.close())
}
