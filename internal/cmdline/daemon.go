package cmdline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/dirs"
	"github.com/sandboxd/sandboxd/internal/flock"
)

const (
	// startTimeout limits the time until a new daemon answers, and only ends one that hangs. Its
	// launcher may take two minutes on a busy machine.
	startTimeout = 3 * time.Minute
	startPoll    = 10 * time.Millisecond
)

// Daemon returns a client for a running daemon. If none is running, it starts one in the background
// and says so on stderr.
func (d Deps) Daemon(ctx context.Context) (*client.Client, error) {
	c := d.Client()
	err := c.Health(ctx)
	if _, ok := errors.AsType[*client.NotRunning](err); !ok {
		return c, err
	}
	where, err := dirs.Default()
	if err != nil {
		return nil, err
	}
	socket, err := filepath.Abs(d.SocketPath())
	if err != nil {
		return nil, err
	}
	s := starter{client: c, socket: socket, data: where.Data, log: where.Log(), program: d.Program}
	pid, err := s.start(ctx)
	if err != nil {
		return nil, fmt.Errorf("no daemon was running, and starting one went wrong: %w", err)
	}
	if pid != 0 {
		fmt.Fprintf(d.Stderr, "sandboxd: no daemon was running; started one (pid %d, log %s); stop it with: sandboxd shutdown (sandboxes keep their files)\n", pid, s.log)
	}
	return c, nil
}

// starter starts a daemon in the background.
type starter struct {
	client  *client.Client
	socket  string
	data    string
	log     string
	program func() (string, error)
}

// start returns the daemon's pid once it answers, or 0 if another command has started a daemon
// meanwhile.
func (s *starter) start(ctx context.Context) (pid int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("it does not answer within %v; its log is %s", startTimeout, s.log))
	defer cancel()
	if err := os.MkdirAll(s.data, 0o700); err != nil {
		return 0, fmt.Errorf("make the data directory: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(s.data, "start.lock"))
	if err != nil {
		return 0, fmt.Errorf("wait for our turn to start it: %w", err)
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if s.client.Health(ctx) == nil {
		return 0, nil
	}

	log, err := os.OpenFile(s.log, os.O_RDWR|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, fmt.Errorf("open its log: %w", err)
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, fmt.Errorf("find the end of its log: %w", err)
	}
	exe, err := s.program()
	if err != nil {
		return 0, fmt.Errorf("find sandboxd: %w", err)
	}
	// CommandContext would end the daemon with this command.
	cmd := exec.Command(exe, "serve", "--background", "--socket", s.socket) //nolint:gosec,noctx // our own program; it outlives the command
	cmd.Dir = "/"                                                           // do not keep the caller's directory busy
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // keep the terminal's signals from the daemon
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start %s serve: %w", exe, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // reaps a daemon that ends early

	tick := time.NewTicker(startPoll)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if s.client.Health(ctx) == nil {
				return cmd.Process.Pid, nil
			}
		case err := <-ended:
			return 0, fmt.Errorf("it ended at once (%s); its log, %s, says: %s", how(err), s.log, tail(log, begin))
		case <-ctx.Done():
			// Do not leave a daemon behind that does not answer.
			_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended meanwhile
			return 0, context.Cause(ctx)
		}
	}
}

func how(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// tail returns the last lines of the log that were written after begin.
func tail(log *os.File, begin int64) string {
	const most = 2000
	end, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	begin = max(begin, end-most)
	b := make([]byte, end-begin)
	n, err := log.ReadAt(b, begin)
	if err != nil && !errors.Is(err, io.EOF) {
		return err.Error()
	}
	b = bytes.TrimSpace(b[:n])
	if len(b) == 0 {
		return "nothing"
	}
	return string(bytes.ReplaceAll(b, []byte("\n"), []byte(" / ")))
}

// lock takes an exclusive lock on a file, so that only one of several commands starts a daemon.
func lock(ctx context.Context, path string) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock.Exclusive(ctx.Done(), flock.Forever, f); err != nil {
		if ctx.Err() != nil {
			return nil, errors.Join(context.Cause(ctx), f.Close())
		}
		return nil, errors.Join(&os.PathError{Op: "flock", Path: path, Err: err}, f.Close())
	}
	return f.Close, nil
}
