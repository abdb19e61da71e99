package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Rollback replaces the files of a sandbox by those of a snapshot, for good: it ends the sandbox
// without grace, makes source its root, and starts it again if it ran before. Id, name, labels and
// limits stay. Snapshot is the id that its record shows. A rollback that began goes on although ctx
// ends.
//
// The record is written first, and marks the sandbox's own files as obsolete. After a crash the
// next daemon finds a sandbox with its old files, or an ended one with those of the snapshot.
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
	if errors.Is(err, ErrNotEnded) { // another request has started it
		return s.Get(id)
	}
	return rec, err
}

func (s *Supervisor) replaceFiles(ctx context.Context, id string, source rootfs.Source, snapshot string) (_ Record, err error) {
	sb, rec, release, err := s.takeEnded(id, false)
	if err != nil {
		return Record{}, err
	}
	defer func() {
		release()
		if err != nil {
			err = fmt.Errorf("roll back sandbox %s: %w", rec.Name, err)
		}
	}()
	rec.Rootfs, rec.Snapshot, rec.Fresh, rec.FilesGone = source.Clone(), snapshot, true, false
	if err := s.records.put(&rec); err != nil {
		return Record{}, err
	}
	s.mu.Lock()
	sb.rec.Rootfs, sb.rec.Snapshot, sb.rec.Fresh, sb.rec.FilesGone = source.Clone(), snapshot, true, false // nothing else: its id is read without the lock
	close(sb.filesGone)                                                                                    // a reader may see them half removed
	sb.filesGone = make(chan struct{})
	s.tell(sb, api.Event{Action: api.ActionRolledBack})
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := ignoreNotFound(s.engine.Delete(ctx, id)); err != nil {
		return Record{}, err // Start tries again
	}
	s.log.Info("sandbox rolled back", "id", id, "name", rec.Name, "snapshot", snapshot)
	return rec, nil
}

// DropFiles removes the files of a sandbox that has ended, and keeps its record, whose reason then
// says why. If the sandbox of rec has been started since, DropFiles fails with ErrNotEnded.
func (s *Supervisor) DropFiles(ctx context.Context, was *Record, why string) error {
	sb, rec, release, err := s.takeEnded(was.ID, false)
	if err != nil {
		return err
	}
	defer release()
	if rec.Life != was.Life || rec.FilesGone {
		return fmt.Errorf("%w: %s (%s) has been started again", ErrNotEnded, rec.Name, rec.ID)
	}
	rec.FilesGone = true
	rec.Reason += "; its files were removed: " + why
	// The record first, so that a crash leaves no sandbox that seems to have files. A full disk may
	// refuse it, and take it when the files are gone.
	perr := s.records.put(&rec)
	s.mu.Lock()
	sb.rec.FilesGone, sb.rec.Reason = true, rec.Reason
	s.tell(sb, api.Event{Action: api.ActionUpdated, Reason: rec.Reason})
	close(sb.filesGone) // a reader may see them half removed
	sb.filesGone = make(chan struct{})
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err = ignoreNotFound(s.engine.Delete(ctx, rec.ID))
	if perr != nil {
		perr = s.records.put(&rec)
	}
	if err := errors.Join(err, perr); err != nil {
		return fmt.Errorf("remove the files of sandbox %s: %w", rec.Name, err)
	}
	return nil
}

// errFilesGone is the error for a start or reader of a sandbox after DropFiles.
func errFilesGone(rec *Record) error {
	return fmt.Errorf("%w: %s (%s) %s", ErrState, rec.Name, rec.ID, rec.Reason)
}

// errFresh is the error for a reader of a sandbox that was rolled back: it has no files until it
// runs.
func errFresh(rec *Record) error {
	if rec.Snapshot == "" {
		return fmt.Errorf("%w: %s (%s) has not run yet, and has no files; start it first", ErrState, rec.Name, rec.ID)
	}
	return fmt.Errorf("%w: %s (%s) was rolled back to snapshot %s and has not run since; start it first", ErrState, rec.Name, rec.ID, rec.Snapshot)
}

// CanRollBack returns nil if a sandbox can have the files of a snapshot: both must be made of one
// image. Host images are one image until the host's programs change.
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
