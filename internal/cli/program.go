package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// execute runs a program in a sandbox, connected to our own streams. It returns the program's end
// as a [cmdline.ExitError], or nil; of a program that goes on, a [client.DetachedError].
func execute(ctx context.Context, c *client.Client, id string, req api.ExecRequest, t terminalFlags, d deps) error {
	req.Timeout = float64(t.timeout)
	switch {
	case t.json:
		res, err := c.Exec(ctx, id, req)
		if err != nil {
			return err
		}
		if err := cmdline.PrintJSON(d.Stdout, res); err != nil {
			return err
		}
		return ending(res.Exit, t, d.Stderr)
	case t.tty:
		signals, begin, stop := cmdline.Forward(ctx)
		defer stop()
		end, err := converse(ctx, c, id, req, t, client.Streams{Signals: signals, Begun: begin}, d)
		if err != nil {
			return err
		}
		return ending(end.Exit, t, d.Stderr)
	}
	signals, begin, stop := cmdline.Forward(ctx)
	defer stop()
	end, err := piped(ctx, c, id, req, t, signals, begin, d)
	if errors.Is(err, client.ErrNoPipes) {
		if t.interactive {
			end, err = converse(ctx, c, id, req, t, client.Streams{Signals: signals, Begun: begin}, d)
		} else {
			end, err = framed(ctx, c, id, req, client.Streams{Signals: signals, Begun: begin}, d)
		}
	}
	if err != nil {
		return err
	}
	return ending(end.Exit, t, d.Stderr)
}

// piped runs a program whose output comes to us without passing through the daemon.
func piped(ctx context.Context, c *client.Client, id string, req api.ExecRequest, t terminalFlags, signals <-chan string, begin func(), d deps) (*client.End, error) {
	req.StdinOpen = t.interactive
	p, err := c.ExecPipes(ctx, id, req)
	if err != nil {
		return nil, err
	}
	begin()
	return connectPipes(ctx, p, signals, func(sig string) error {
		err := c.SignalExec(ctx, id, p.ID, api.ExecSignal{Signal: sig})
		if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return nil // it has ended
		}
		return err
	}, d.Stdin, d.Stdout, d.Stderr, readerPatience)
}

// framed runs a program without stdin whose output comes through the daemon.
func framed(ctx context.Context, c *client.Client, id string, req api.ExecRequest, s client.Streams, d deps) (_ *client.End, err error) {
	var stop func()
	s.Stdout, s.Stderr, stop, err = interruptibleOutput(ctx, d)
	if err != nil {
		return nil, err
	}
	defer stop()
	return c.ExecSignalled(ctx, id, req, s)
}

// ending turns a program's end into our exit code, and explains it where the code is ambiguous.
func ending(e api.Exit, t terminalFlags, stderr io.Writer) error {
	if e.Timeout {
		fmt.Fprintf(stderr, "sandboxd: the program was stopped: its timeout of %v had ended\n", t.timeout.String())
		return &cmdline.ExitError{Code: cmdline.CodeTimeout}
	}
	if e.OOM {
		fmt.Fprintln(stderr, "sandboxd: the sandbox ran out of memory, and the kernel killed a process in it (see --memory)")
	}
	if e.Code == 0 {
		return nil
	}
	if e.Code < 0 || e.Code > 255 {
		return &cmdline.ExitError{Code: cmdline.CodeOurs, Err: fmt.Errorf("the daemon says that the program's exit code was %d, which cannot be", e.Code)}
	}
	return &cmdline.ExitError{Code: e.Code}
}

// converse connects the program to our stdin, and to our terminal if requested.
func converse(ctx context.Context, c *client.Client, id string, req api.ExecRequest, t terminalFlags, s client.Streams, d deps) (_ *client.End, err error) {
	var stop func()
	s.Stdout, s.Stderr, stop, err = interruptibleOutput(ctx, d)
	if err != nil {
		return nil, err
	}
	defer stop()
	if t.tty {
		req.TTY = true
		req.Env = withTerm(req.Env)
		if now, ok := windowSize(d); ok {
			req.Rows, req.Cols = now.Rows, now.Cols
		}
	}
	undo, err := connect(&s, t, d)
	if err != nil {
		return nil, err
	}
	defer undo()
	return c.ExecInteractive(ctx, id, req, s)
}

// withTerm adds our TERM to an environment without one.
func withTerm(env []string) []string {
	if v := os.Getenv("TERM"); v != "" && !slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "TERM=") }) {
		env = append(env, "TERM="+v)
	}
	return env
}

// windowSize returns the size of our terminal, if there is one.
func windowSize(d deps) (api.TerminalSize, bool) {
	f := terminal(d.Stdout, d.Stdin)
	if f == nil {
		return api.TerminalSize{}, false
	}
	w, h, err := term.GetSize(int(f.Fd()))
	return api.TerminalSize{Rows: clamp(h), Cols: clamp(w)}, err == nil && w > 0 && h > 0
}

// connect connects a program to our stdin and terminal, as t requests, until undo is called.
func connect(s *client.Streams, t terminalFlags, d deps) (undo func(), err error) {
	var undos []func()
	undo = func() {
		for _, f := range slices.Backward(undos) {
			f()
		}
	}
	defer func() {
		if err != nil {
			undo()
		}
	}()
	if t.interactive {
		in, err := newInterruptible(d.Stdin)
		if err != nil {
			return nil, err
		}
		// Interrupt a pending Read, which would take the terminal's next line from the shell.
		undos = append(undos, in.interrupt)
		s.Stdin = in
		if t.tty {
			s.Stdin, s.Detach = withKeys(in, t.detachKeys, d.Stdin), t.detachAs
		}
	}
	if t.tty && terminal(d.Stdout, d.Stdin) != nil {
		resize, stop := watchSize(func() (api.TerminalSize, bool) { return windowSize(d) })
		undos = append(undos, stop)
		s.Resize = resize
	}
	if t.tty && t.interactive && cmdline.IsTerminal(d.Stdin) {
		restore, err := raw(d.Stdin)
		if err != nil {
			return nil, err
		}
		undos = append(undos, restore)
	}
	return undo, nil
}

// raw puts the terminal into raw mode: every key, Ctrl-C included, goes to the program.
func raw(f *os.File) (restore func(), err error) {
	fd := int(f.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("put the terminal into raw mode: %w", err)
	}
	return func() { _ = term.Restore(fd, old) }, nil // fails if the terminal is gone, and then needs no restoring
}

// watchSize sends the terminal's size whenever it changes, until stop is called.
func watchSize(size func() (api.TerminalSize, bool)) (<-chan api.TerminalSize, func()) {
	out := make(chan api.TerminalSize)
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGWINCH)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer signal.Stop(sig)
		for {
			select {
			case <-sig:
				now, ok := size()
				if !ok {
					continue
				}
				select {
				case out <- now:
				case <-quit:
					return
				}
			case <-quit:
				return
			}
		}
	}()
	return out, func() {
		close(quit)
		<-done
	}
}

// terminal returns the first of the files that is a terminal.
func terminal(files ...*os.File) *os.File {
	for _, f := range files {
		if cmdline.IsTerminal(f) {
			return f
		}
	}
	return nil
}

func clamp(n int) uint16 { return uint16(min(max(n, 0), 0xffff)) }
