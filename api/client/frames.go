package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/sandboxd/sandboxd/api"
)

// ExecOutput executes a program and writes its output to stdout and stderr as it comes, byte by
// byte the program's; nil ones are left out. It takes much less of the processor than
// [Client.ExecStream]. If a write fails or ctx ends, the program and its descendants are killed and
// ExecOutput returns that error.
func (c *Client) ExecOutput(ctx context.Context, id string, req api.ExecRequest, stdout, stderr io.Writer) (*End, error) {
	return c.ExecSignalled(ctx, id, req, Streams{Stdout: stdout, Stderr: stderr})
}

// ExecSignalled is [Client.ExecOutput] for a caller that has signals for the program, too. Signals
// are the only input that it takes from s.
func (c *Client) ExecSignalled(ctx context.Context, id string, req api.ExecRequest, s Streams) (_ *End, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := c.do(ctx, request{
		method: http.MethodPost, path: []string{"v1", "sandboxes", id, "exec"}, json: req,
		accept: api.TypeStream + ", " + api.TypeNDJSON,
	})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var signals sync.WaitGroup
	defer signals.Wait()
	defer cancel(nil) // runs first
	begun := false
	s.started = func(exec string) {
		if exec == "" || begun {
			return
		}
		begun = true
		if s.Begun != nil {
			s.Begun()
		}
		if s.Signals == nil {
			return
		}
		signals.Go(func() {
			if err := c.ForwardSignals(ctx, id, exec, s.Signals); err != nil {
				cancel(err)
			}
		})
	}
	switch mediaType(resp) {
	case api.TypeStream:
		f := frames{r: resp.Body}
		end, err := f.follow(s)
		if cause := context.Cause(ctx); err != nil && cause != nil {
			return nil, cause
		}
		if err == nil {
			// Read to the end of the body, so that the connection can be reused: the daemon sends no more.
			_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1)) // the answer was complete, whatever fails here
		}
		return end, err
	case api.TypeNDJSON: // a daemon of an earlier version
		return events(ctx, resp, func(e api.ExecEvent) error {
			s.started(e.Exec)
			channel := api.ChannelStdout
			if e.Stream == "stderr" {
				channel = api.ChannelStderr
			}
			out := Output(e)
			if len(out) == 0 {
				return nil
			}
			return deliver(append([]byte{channel}, out...), s)
		})
	}
	return nil, unexpectedAnswer(resp, read(resp.Body, 200))
}

// frames reads the frames of [api.TypeStream].
type frames struct {
	r   io.Reader
	buf []byte // the last frame: its channel, then its payload
}

// next returns the next frame, its channel first; the slice is valid until the next call. The end
// between two frames is io.EOF.
func (f *frames) next() ([]byte, error) {
	var head [api.FrameHeader]byte
	if _, err := io.ReadFull(f.r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > api.MaxFrame {
		return nil, fmt.Errorf("read the stream: a frame of %d bytes; at most %d are possible", n, api.MaxFrame)
	}
	if cap(f.buf) < int(n)+1 {
		f.buf = make([]byte, n+1)
	}
	f.buf = f.buf[:n+1]
	f.buf[0] = head[0]
	if _, err := io.ReadFull(f.r, f.buf[1:]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return f.buf, nil
}

// follow writes output to s until the frame with the program's end.
func (f *frames) follow(s Streams) (*End, error) {
	for {
		frame, err := f.next()
		switch {
		case errors.Is(err, io.EOF):
			return nil, errLost
		case err != nil:
			return nil, fmt.Errorf("%w: %w", errLost, err)
		}
		if frame[0] != api.ChannelEvent {
			if err := deliver(frame, s); err != nil {
				return nil, err
			}
			continue
		}
		e, err := decodeEvent(frame[1:])
		if err != nil {
			return nil, err
		}
		if end, err := ending(e); end != nil || err != nil {
			return end, err
		}
		if s.started != nil {
			s.started(e.Exec)
		}
	}
}

// ForwardSignals sends signals to an exec until ctx ends or the channel is closed. A signal to an
// exec that has ended is no error.
func (c *Client) ForwardSignals(ctx context.Context, id, exec string, signals <-chan string) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case sig, ok := <-signals:
			if !ok {
				return nil
			}
			err := c.SignalExec(ctx, id, exec, api.ExecSignal{Signal: sig})
			if err != nil && ctx.Err() == nil && !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
				return fmt.Errorf("send %s to the program: %w", sig, err)
			}
		}
	}
}
