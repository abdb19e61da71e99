package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Removed describes the removed parts of a run.
type Removed struct {
	Run       string   `json:"run"`
	Dir       string   `json:"dir"`
	Snapshots []string `json:"snapshots"`         // IDs
	Size      int64    `json:"snapshot_bytes"`    // size of the files in them
	Sandbox   string   `json:"sandbox,omitempty"` // sandbox that the run had left
	// Hosted is set for a run that the daemon hosted. It does not report removals beside the
	// run.
	Hosted bool `json:"hosted,omitempty"`
}

// RemoveRun removes the run in dir: the snapshots of its turns, a sandbox left by an interrupt or a
// crash, and its directory. With snapshotsOnly it removes only the snapshots. The record then
// stays, but the run cannot be resumed from a snapshot, and forks run the turns again. Existing
// forks are not affected. A run that a process works on is refused.
//
// The directory is removed last: after an error or a crash, the same call completes the removal.
func RemoveRun(ctx context.Context, c *client.Client, dir string, snapshotsOnly bool) (done *Removed, err error) {
	dir = filepath.Clean(dir)
	rec, events, err := openRecord(dir, time.Now, nil) // the lock keeps other processes from resuming the run
	if errors.Is(err, errNotBegun) && !snapshotsOnly {
		err := removeNotBegun(dir)
		if errors.Is(err, unix.EACCES) {
			restoreAccess(dir)
			err = removeNotBegun(dir)
		}
		if err != nil {
			return nil, fmt.Errorf("remove the run %s: %w", filepath.Base(dir), err)
		}
		return &Removed{Run: filepath.Base(dir), Dir: dir, Snapshots: []string{}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rec.close()) }()
	done = &Removed{Run: events[0].Run.ID, Dir: dir, Snapshots: []string{}}
	return done, done.remove(ctx, c, events, snapshotsOnly)
}

// RemoveUnreadable is RemoveRun for a directory of a run whose record cannot be read
// ([ErrUnreadable]). It removes the snapshots and sandboxes that the rest of the record names. If
// not even the record can be opened, the caller must know that no process works on the run.
func RemoveUnreadable(ctx context.Context, c *client.Client, dir string) (done *Removed, err error) {
	dir = filepath.Clean(dir)
	done = &Removed{Run: filepath.Base(dir), Dir: dir, Snapshots: []string{}}
	var events []Event
	f, err := openFile(dir, os.O_RDWR|unix.O_NOFOLLOW) // a link could lead to another run's record
	if err == nil {
		defer func() { err = errors.Join(err, f.Close()) }()
		if err = lock(f); err == nil { // held until the run is removed
			events, err = salvageEvents(f)
		}
	} else if errors.Is(err, ErrUnreadable) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("remove the run %s: %w", done.Run, err)
	}
	return done, done.remove(ctx, c, events, false)
}

// remove removes the run of these events.
func (done *Removed) remove(ctx context.Context, c *client.Client, events []Event, snapshotsOnly bool) error {
	sandboxes := map[string]bool{} // by ID and by name, all unique to the run
	last := ""
	for _, e := range events {
		if e.Sandbox == nil {
			continue
		}
		sandboxes[e.Sandbox.Name] = true
		last = e.Sandbox.Name
		if e.Sandbox.ID != "" {
			sandboxes[e.Sandbox.ID] = true
			last = e.Sandbox.ID
		}
	}
	if last != "" {
		if err := removeKept(ctx, c, sandboxes, last, snapshotsOnly, done); err != nil {
			return fmt.Errorf("remove the run %s: %w", done.Run, err)
		}
	}
	if snapshotsOnly {
		return nil
	}
	err := os.RemoveAll(done.Dir)
	if errors.Is(err, unix.EACCES) {
		restoreAccess(done.Dir)
		err = os.RemoveAll(done.Dir)
	}
	if err != nil {
		return fmt.Errorf("remove the run %s: %w", done.Run, err)
	}
	return syncDir(filepath.Dir(done.Dir))
}

// restoreAccess restores the owner's access to a directory and its subdirectories, which a hostile
// process may have removed. The subsequent removal reports failures.
func restoreAccess(dir string) {
	root, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		return
	}
	defer root.Close()
	restoreAccessBelow(root, filepath.Base(dir))
}

func restoreAccessBelow(root *os.Root, name string) {
	info, err := root.Lstat(name)
	if err != nil || !info.IsDir() { // never follow a link
		return
	}
	if info.Mode()&0o700 != 0o700 {
		_ = root.Chmod(name, info.Mode()|0o700)
	}
	dir, err := root.OpenRoot(name)
	if err != nil {
		return
	}
	defer dir.Close()
	f, err := dir.Open(".")
	if err != nil {
		return
	}
	entries, _ := f.ReadDir(-1)
	_ = f.Close()
	for _, e := range entries {
		if e.IsDir() {
			restoreAccessBelow(dir, e.Name())
		}
	}
}

// removeNotBegun removes the directory of a run that had not begun, which holds only an unlocked
// record. Any other directory may not be a run's.
func removeNotBegun(dir string) (err error) {
	f, err := os.OpenFile(filepath.Join(dir, RecordName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := lock(f); err != nil { // held until the run is removed
		return err
	}
	if _, _, err := readEvents(f); !errors.Is(err, errNotBegun) {
		return errors.Join(errors.New("it has begun meanwhile"), err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) != 1 {
		return fmt.Errorf("%w, and yet %s has more in it than its record: remove it by hand", errNotBegun, dir)
	}
	if err := errors.Join(os.Remove(filepath.Join(dir, RecordName)), os.Remove(dir)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// removeKept removes the objects of a run that the daemon holds.
func removeKept(ctx context.Context, c *client.Client, sandboxes map[string]bool, last string, snapshotsOnly bool, done *Removed) error {
	snapshots, err := c.Snapshots(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		// A snapshot names its sandbox, also if a crash kept the snapshot out of the record.
		// Snapshots that a user took of the sandbox have no label and stay.
		if s.Labels[turnLabel] != turnValue || !sandboxes[s.Sandbox] && !sandboxes[s.SandboxName] {
			continue
		}
		if _, err := c.RemoveSnapshot(ctx, s.ID); err != nil && !hasCode(err, api.CodeNotFound) {
			return err
		}
		done.Snapshots = append(done.Snapshots, s.ID)
		done.Size += s.Size
	}
	if snapshotsOnly {
		return nil
	}
	err = c.DeleteSandbox(ctx, last)
	if err == nil {
		done.Sandbox = last
	}
	if hasCode(err, api.CodeNotFound) {
		err = nil
	}
	return err
}
