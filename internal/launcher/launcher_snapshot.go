package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// mediaTypeTar is what the child that reads a sandbox writes.
const mediaTypeTar = "application/vnd.oci.image.layer.v1.tar"

// Snapshot makes a layer of its own of what a sandbox has changed, under req.ChainID. Frozen says that nothing in the sandbox ran
// while it was read. Two confined children do it, at once: one reads the sandbox's directories and can change nothing, the
// other has the layer's directory and nothing of the sandbox. Only a pipe is between them, and nobody else reads what comes
// through it.
func (l *Layers) Snapshot(ctx context.Context, req *SnapshotRequest) (result layer.Result, frozen bool, err error) {
	final, err := layerDir(req.ChainID)
	if err != nil {
		return layer.Result{}, false, err
	}
	// Who has given up has it removed, and forgets it. The removal waits until this is over.
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
		job.Options.Holes = true // whoever asks: it is what the stream of every snapshot has
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
	// The children take turns less often. Where it is refused, the pipe does as it is.
	_, _ = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20)
	// Whiteouts hide what may be a directory of the host's, which is none of the layers below.
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
	// The one that ends first with an error is to blame: the other then finds the pipe broken, or cut short.
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
		_ = w.Close() // the end of the stream; an error of the reader has been told before
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

// publish gives a layer that is complete its name when all of it is on disk, and makes that last.
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
