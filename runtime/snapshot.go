package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Rollback gives a sandbox the files of a snapshot in the place of its own, which are gone for good: it is ended without grace,
// its root is source from then on, and it runs again if it did before. Id, name, labels and limits stay. Snapshot is the id that its
// record shows. What has begun goes on although ctx ends.
//
// The record is written first, and says that what the sandbox had written is of no use any more. A daemon that comes after a
// crash finds a sandbox that has its old files, or one that has ended and has those of the snapshot.
func (s *Supervisor) Rollback(ctx context.Context, ref string, source rootfs.Source, snapshot string, req StartRequest) (_ Record, err error) {
	rec, err := s.Get(ref)
	if err != nil {
		return Record{}, err
	}
	id := rec.ID
	ran := lives(rec.State)
	if ran {
		if rec, err = s.Stop(ctx, id, 0); err != nil {
			return Record{}, err
		}
	}
	if rec, err = s.replaceFiles(ctx, id, source, snapshot); err != nil || !ran {
		return rec, err
	}
	rec, err = s.Start(context.WithoutCancel(ctx), id, req)
	if errors.Is(err, ErrNotEnded) { // somebody else has started it
		return s.Get(id)
	}
	return rec, err
}

func (s *Supervisor) replaceFiles(ctx context.Context, id string, source rootfs.Source, snapshot string) (_ Record, err error) {
	sb, rec, release, err := s.takeEnded(id)
	if err != nil {
		return Record{}, err
	}
	defer func() {
		release()
		if err != nil {
			err = fmt.Errorf("roll back sandbox %s: %w", rec.Name, err)
		}
	}()
	rec.Rootfs, rec.Snapshot, rec.Fresh = source.Clone(), snapshot, true
	if err := s.records.put(&rec); err != nil {
		return Record{}, err
	}
	s.mu.Lock()
	sb.rec.Rootfs, sb.rec.Snapshot, sb.rec.Fresh = source.Clone(), snapshot, true // no more: others read its id without the lock
	close(sb.doomed)                                                              // who reads its files may read them half removed
	sb.doomed = make(chan struct{})
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := ignoreNotFound(s.engine.Delete(ctx, id)); err != nil {
		return Record{}, err // Start tries again
	}
	s.log.Info("sandbox rolled back", "id", id, "name", rec.Name, "snapshot", snapshot)
	return rec, nil
}

// errFresh says of a sandbox that was rolled back that there is nothing to read of it.
func errFresh(rec *Record) error {
	return fmt.Errorf("%w: %s (%s) was rolled back to snapshot %s and has not run since; start it first", ErrState, rec.Name, rec.ID, rec.Snapshot)
}

// CanRollBack reports why a sandbox cannot have the files of a snapshot: both must have been made of the same image. Host images
// are the same until the host's programs change.
func CanRollBack(rec *Record, source *rootfs.Source) error {
	base, other := rec.Rootfs.Below(len(rec.Rootfs.Snapshots)), source.Below(len(source.Snapshots))
	if !base.Equal(&other) {
		what := "image"
		if rec.Image == api.HostImage {
			what = "state of this host's programs"
		}
		return fmt.Errorf("%w: the snapshot is of another %s than %s (%s)", ErrState, what, rec.Name, rec.ID)
	}
	return nil
}
