package cli

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// interruptibleOutput returns writers to our stdout and stderr that stop waiting for a stalled
// reader when ctx ends, until stop is called.
func interruptibleOutput(ctx context.Context, d deps) (stdout, stderr io.Writer, stop func(), err error) {
	over, err := newBell()
	if err != nil {
		return nil, nil, nil, err
	}
	done := make(chan struct{})
	undo := context.AfterFunc(ctx, func() {
		defer close(done)
		over.ring()
	})
	stop = func() {
		if !undo() {
			<-done
		}
		over.close()
	}
	return &patientWriter{ctx, d.Stdout, over}, &patientWriter{ctx, d.Stderr, over}, stop, nil
}

// patientWriter is a file whose Write waits for the reader only until the context ends.
type patientWriter struct {
	ctx  context.Context //nolint:containedctx // it bounds every Write, and io.Writer has no room for it
	f    *os.File
	over *bell // rings when ctx ends
}

// mostAtOnce is the number of bytes that a pipe which poll(2) calls writable takes without waiting.
const mostAtOnce = 4096

func (w *patientWriter) Write(p []byte) (n int, err error) {
	o := output{to: w.f, hurry: w.over}
	fd, err := descriptor(w.f)
	if err != nil {
		return 0, err
	}
	for n < len(p) && err == nil {
		if err = o.room(fd); errors.Is(err, errDropped) {
			return n, context.Cause(w.ctx)
		} else if err != nil {
			return n, err
		}
		var m int
		m, err = unix.Write(fd, p[n:min(n+mostAtOnce, len(p))])
		n += max(m, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			err = nil
		}
	}
	return n, err
}
