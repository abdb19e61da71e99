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

// Removed is what there was of a run and is not any more.
type Removed struct {
	Run       string   `json:"run"`
	Dir       string   `json:"dir"`
	Snapshots []string `json:"snapshots"`         // ids
	Size      int64    `json:"snapshot_bytes"`    // of files in them
	Sandbox   string   `json:"sandbox,omitempty"` // that was left of it
}

// RemoveRun removes the run in dir: the snapshots that were taken of its turns, a sandbox that an interrupt or a crash has left, and its directory. With
// snapshotsOnly the latter two stay: what was done is still on record, but the run cannot be resumed from a snapshot, and branches do the
// turns again. Branches that stand on its snapshots go on all the same. A run that is being worked on is not touched.
//
// The directory goes last: after an error, or a crash, the same call does the rest.
func RemoveRun(ctx context.Context, c *client.Client, dir string, snapshotsOnly bool) (done *Removed, err error) {
	dir = filepath.Clean(dir)
	rec, events, err := openRecord(dir, time.Now, nil) // and so nobody begins to work on it
	if errors.Is(err, errNotBegun) && !snapshotsOnly {
		err := removeNotBegun(dir)
		if errors.Is(err, unix.EACCES) {
			giveBack(dir)
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

// RemoveUnreadable is RemoveRun for a directory that is known to be a run's, and whose record cannot be read ([ErrUnreadable]). Of the snapshots
// and sandboxes those go that what is left of the record names; the caller knows that nobody works on the run where its record cannot
// even be opened.
func RemoveUnreadable(ctx context.Context, c *client.Client, dir string) (done *Removed, err error) {
	dir = filepath.Clean(dir)
	done = &Removed{Run: filepath.Base(dir), Dir: dir, Snapshots: []string{}}
	var events []Event
	f, err := openFile(dir, os.O_RDWR|unix.O_NOFOLLOW) // what another run's record says is not to be heeded
	if err == nil {
		defer func() { err = errors.Join(err, f.Close()) }()
		if err = lock(f); err == nil { // until it is gone
			events, err = readWhatIsLeft(f)
		}
	} else if errors.Is(err, ErrUnreadable) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("remove the run %s: %w", done.Run, err)
	}
	return done, done.remove(ctx, c, events, false)
}

// remove removes the run that the events are of.
func (done *Removed) remove(ctx context.Context, c *client.Client, events []Event, snapshotsOnly bool) error {
	sandboxes := map[string]bool{} // by id and by name, of which nobody else's are
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
		giveBack(done.Dir)
		err = os.RemoveAll(done.Dir)
	}
	if err != nil {
		return fmt.Errorf("remove the run %s: %w", done.Run, err)
	}
	return syncDir(filepath.Dir(done.Dir))
}

// giveBack opens a directory, and those in it, to their owner: whoever has left them may have closed them to us. What it
// cannot open is told by who wants to remove it.
func giveBack(dir string) {
	root, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		return
	}
	defer root.Close()
	giveBackBelow(root, filepath.Base(dir))
}

func giveBackBelow(root *os.Root, name string) {
	info, err := root.Lstat(name)
	if err != nil || !info.IsDir() { // a link above all
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
			giveBackBelow(dir, e.Name())
		}
	}
}

// removeNotBegun removes the directory of a run that had not begun: there is a record in it that nobody works on, and
// nothing else. Where there is, it may be no run's.
func removeNotBegun(dir string) (err error) {
	f, err := os.OpenFile(filepath.Join(dir, RecordName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := lock(f); err != nil { // until it is gone
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

// removeKept removes what the daemon has of a run.
func removeKept(ctx context.Context, c *client.Client, sandboxes map[string]bool, last string, snapshotsOnly bool, done *Removed) error {
	snapshots, err := c.Snapshots(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		// Its sandbox says whose it is: also of one that a crash has kept out of the record. What a person took of the sandbox is theirs.
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
