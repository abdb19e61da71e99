package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// mediaTypeTar is the media type of a reading child's stream.
const mediaTypeTar = "application/vnd.oci.image.layer.v1.tar"

// Snapshot makes a layer of a sandbox's changes, under req.ChainID. Frozen reports that the sandbox
// stood still while it was read. Two confined children run at once: one reads the sandbox's
// directories and can change nothing, the other has the layer's directory and nothing of the
// sandbox. Only a pipe connects them, and no third process reads from it.
func (l *Layers) Snapshot(ctx context.Context, req *snapshotRequest) (result layer.Result, frozen bool, err error) {
	final, err := layerDir(req.ChainID)
	if err != nil {
		return layer.Result{}, false, err
	}
	// A client that gives up has the layer removed, and forgets it. The removal waits for the end of
	// this.
	leave, err := l.claim(ctx, []layer.Request{{ChainID: req.ChainID}})
	if err != nil {
		return layer.Result{}, false, err
	}
	defer leave()
	if _, err := os.Lstat(final); err == nil {
		return layer.Result{}, false, fmt.Errorf("snapshot %s: %w", req.ChainID, os.ErrExist)
	}
	job, err := req.Diff.job()
	if err == nil {
		job.Options.Holes = true // always: every snapshot's stream has it
	}
	if err != nil {
		return layer.Result{}, false, err
	}
	release, err := l.begin(ctx)
	if err != nil {
		return layer.Result{}, false, err
	}
	defer release()
	// Opened before anything is written: errors of writing that happen from now on are found.
	dir, err := os.Open(LayersDir)
	if err != nil {
		return layer.Result{}, false, fmt.Errorf("open layers: %w", err)
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	tmp, err := l.makePartial()
	if err != nil {
		return layer.Result{}, false, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	r, w, err := os.Pipe()
	if err != nil {
		return layer.Result{}, false, fmt.Errorf("snapshot: %w", err)
	}
	// The children take turns less often. If the kernel refuses, the default size will do.
	_, _ = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20)
	// Whiteouts may hide a directory of the host's, which is in none of the layers below.
	unpacked := applyJob{Dir: tmp, MediaType: mediaTypeTar, Limits: req.Diff.Limits.AnyRatio(), Single: l.single, FromDiff: true}
	for _, p := range req.Diff.Rootfs.Layers {
		below, err := layerDir(p)
		if err != nil {
			return layer.Result{}, false, errors.Join(err, r.Close(), w.Close())
		}
		unpacked.Parents = append(unpacked.Parents, below)
	}
	complete := make(chan struct{}) // the layers below are
	close(complete)
	readCtx, thaw, frozen, err := l.still(ctx, &req.Diff)
	if err != nil {
		return layer.Result{}, false, errors.Join(err, r.Close(), w.Close())
	}
	// The one that ends first with an error is to blame: the other then finds the pipe broken, or cut
	// short.
	type end struct {
		result layer.Result
		err    error
		reader bool
	}
	ends := make(chan end, 2)
	go func() {
		e := end{reader: true}
		e.result, e.err = l.child(readCtx, "read what the sandbox has changed", "diff", job, nil, w)
		e.err = errors.Join(e.err, thaw())
		ends <- e
		_ = w.Close() // end of the stream; an error of the reader was reported before
	}()
	go func() {
		var e end
		e.result, e.err = l.applyOne(ctx, &unpacked, r, complete)
		ends <- e
		_ = r.Close() // a reader that writes on ends
	}()
	var skipped layer.Result
	for range 2 {
		e := <-ends
		switch {
		case e.err != nil && err == nil:
			err = e.err
		case e.reader:
			skipped = e.result
		default:
			result = e.result
		}
	}
	if err != nil {
		return layer.Result{}, false, err
	}
	if err := context.Cause(ctx); err != nil { // its removal may have been before
		return layer.Result{}, false, err
	}
	if err := publish(dir, tmp, final); err != nil {
		return layer.Result{}, false, err
	}
	result.Add(skipped)
	return result, frozen, nil
}

// publish gives a complete layer its name once it is on disk, and syncs the name.
func publish(dir *os.File, tmp, final string) error {
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return fmt.Errorf("sync layers: %w", err)
	}
	if err := os.Rename(tmp, final); err != nil {
		return fmt.Errorf("complete layer: %w", err)
	}
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync layers: %w", err)
	}
	return nil
}
