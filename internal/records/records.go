// Package records keeps records as files of JSON in one directory. A crash leaves the record of
// before or that of after: each is written to a file beside, synced and renamed.
package records

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// suffix ends the name of each record. Other files of the directory are half written.
const suffix = ".json"

// Path is the file of a record in a directory. The name is one component of a path.
func Path(dir, name string) string { return filepath.Join(dir, name+suffix) }

// Read makes the directory if there is none, removes what was half written, and calls each with the
// name and the record of every file, in the order of the names.
func Read[T any](dir string, each func(name string, rec T) error) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok {
			if err := os.Remove(path); err != nil {
				return err
			}
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var rec T
		if err := json.Unmarshal(data, &rec); err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		if err := each(name, rec); err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
	}
	return nil
}

// Write replaces the record of the name. When it returns without an error the record is on disk.
func Write(dir, name string, rec any) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), Path(dir, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
