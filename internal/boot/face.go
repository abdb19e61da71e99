package boot

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/broker"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// The delays before a face that has ended is started again. One that ran for longer than the
// longest begins anew.
const (
	firstFaceDelay = 100 * time.Millisecond
	maxFaceDelay   = 10 * time.Second
)

// docker returns the arguments of the Docker face; none if there is none.
func (o *Options) docker() []string {
	if o.Docker == "" {
		return nil
	}
	return []string{"--socket", o.Socket, "face", "docker", "--tied", "--listen", "unix:" + o.Docker, "--network", o.DockerNetwork}
}

// keepFace starts a face, and again whenever it has ended, until stop is called. It ends with its
// socket, so with the daemon.
func keepFace(ctx context.Context, b *broker.Client, face broker.Face, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var keeping sync.WaitGroup
	keeping.Go(func() {
		for delay := firstFaceDelay; ; delay = min(2*delay, maxFaceDelay) {
			began := time.Now()
			err := runFace(ctx, b, face)
			switch {
			case ctx.Err() != nil:
				return
			case errors.Is(err, broker.ErrGone):
				log.Error("a face is not started again", "face", face, "error", err)
				return
			}
			if time.Since(began) > maxFaceDelay {
				delay = firstFaceDelay
			}
			log.Warn("a face has ended, starting it again", "face", face, "after", delay, "error", err)
			select {
			case <-time.After(delay):
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		keeping.Wait()
	}
}

// runFace starts a face and returns when it has ended.
func runFace(ctx context.Context, b *broker.Client, face broker.Face) error {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_STREAM, "face")
	if err != nil {
		return err
	}
	tie, err := net.FileConn(ours) // whose reading a deadline can end
	if err = errors.Join(err, ours.Close()); err != nil {
		return errors.Join(err, theirs.Close())
	}
	defer tie.Close()
	err = b.StartFace(ctx, face, theirs)
	_ = theirs.Close() // the face has a copy
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = tie.SetReadDeadline(time.Unix(1, 0)) })()
	_, err = io.Copy(io.Discard, tie)
	return err
}
