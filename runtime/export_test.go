package runtime

import (
	"context"
	"errors"
)

// Reconcile does rounds of what the reconciler does every minute.
func Reconcile(ctx context.Context, s *Supervisor, rounds int) error {
	odd := map[oddity]bool{}
	for range rounds {
		var err error
		if odd, err = s.reconcile(ctx, odd); err != nil {
			return err
		}
	}
	return nil
}

// PutRecord writes a record as a daemon does that dies right after it.
func PutRecord(dir string, rec *Record) error {
	r, err := openRecords(dir)
	if err != nil {
		return err
	}
	return errors.Join(r.put(rec), r.close())
}
