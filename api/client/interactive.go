package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
)

// Streams holds the streams of an interactive exec. Nil members are absent.
type Streams struct {
	// Stdin is copied to the program's stdin, which is then closed. A Read that blocks when the
	// program ends stays blocked, since only the caller can interrupt it; its bytes are dropped.
	Stdin io.Reader
	// Detach is the form in which a program goes on when a Read of Stdin returns [ErrDetached]: see
	// [api.ExecControl]. Only for [Client.ExecInteractive] with a terminal.
	Detach string
	// Stdout and Stderr receive the output. A write error ends the exec.
	Stdout, Stderr io.Writer
	// Resize and Signals carry events of a local terminal. They need not be closed.
	Resize  <-chan api.TerminalSize
	Signals <-chan string // "SIGINT", ...
	// Begun is called once, when the program has started: until then there is nothing that a signal
	// could go to.
	Begun func()

	started func(exec string) // called with the id of the exec; nil for none
}

// ErrDetached is the error of a Read of [Streams].Stdin that asks to leave the program alone.
var ErrDetached = errors.New("the client has detached from the program")

// A DetachedError reports that the program goes on without the caller, as [ErrDetached], which it
// wraps, has asked.
type DetachedError struct {
	Exec string // id of the program's exec
}

func (e *DetachedError) Error() string { return "exec " + e.Exec + ": " + ErrDetached.Error() }

// Unwrap returns [ErrDetached].
func (e *DetachedError) Unwrap() error { return ErrDetached }

// ExecInteractive executes a program connected to s. If ctx ends, the program and its descendants
// are killed. The error is a [*DetachedError] if the program goes on.
func (c *Client) ExecInteractive(ctx context.Context, id string, req api.ExecRequest, s Streams) (*End, error) {
	conn, err := c.dialWebSocket(ctx, request{path: []string{"v1", "sandboxes", id, "exec"}})
	if err != nil {
		return nil, err
	}
	// An unfinished closing handshake is not worth waiting for.
	defer conn.CloseNow() //nolint:errcheck // the exit or the error has been read
	if err := writeText(ctx, conn, req); err != nil {
		return nil, fmt.Errorf("send the exec request: %w", err)
	}
	return converse(ctx, conn, s, true, nil)
}

func (c *Client) dialWebSocket(ctx context.Context, r request) (*websocket.Conn, error) {
	u, err := r.url()
	if err != nil {
		return nil, err
	}
	conn, resp, err := websocket.Dial(ctx, u, &websocket.DialOptions{HTTPClient: c.http})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, problem(resp)
		}
		return nil, c.transportError(ctx, err)
	}
	conn.SetReadLimit(maxLine)
	return conn, nil
}

// converse connects s to a program until that ends. If feed is set, it copies s.Stdin and then
// closes the program's stdin, also for a nil s.Stdin.
func converse(ctx context.Context, conn *websocket.Conn, s Streams, feed bool, dropped func(int64)) (*End, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()   // the control goroutine ends with ctx
	defer cancel(nil) // runs first
	wg.Go(func() { control(ctx, conn, s) })
	if feed {
		go stdin(ctx, conn, s, cancel) // may block in Stdin.Read after our return: see Streams.Stdin
	}

	begun := s.Begun
	for {
		typ, data, err := conn.Read(ctx)
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause
			}
			return nil, fmt.Errorf("%w: %w", errLost, err)
		}
		if begun != nil {
			begun()
			begun = nil
		}
		switch typ {
		case websocket.MessageBinary:
			if err := deliver(data, s); err != nil {
				return nil, err
			}
		case websocket.MessageText:
			e, err := decodeEvent(data)
			if err != nil {
				return nil, err
			}
			if e.Detached {
				_ = conn.Close(websocket.StatusNormalClosure, "") // as below
				return nil, &DetachedError{Exec: e.Exec}
			}
			if e.Dropped > 0 && dropped != nil {
				dropped(e.Dropped)
			}
			end, err := ending(e)
			if err != nil {
				return nil, err
			}
			if end != nil {
				// The daemon waits for our half of the closing handshake.
				_ = conn.Close(websocket.StatusNormalClosure, "") // the exit is known; a failed handshake changes nothing
				return end, nil
			}
		}
	}
}

// deliver writes a binary frame to its stream.
func deliver(frame []byte, s Streams) error {
	if len(frame) == 0 {
		return errors.New("the daemon sent a frame without a channel")
	}
	var w io.Writer
	name := "stdout"
	switch ch := frame[0]; ch {
	case api.ChannelStdout:
		w = s.Stdout
	case api.ChannelStderr:
		w, name = s.Stderr, "stderr"
	case api.ChannelStdin:
		return errors.New("the daemon sent a frame for stdin")
	default:
		return fmt.Errorf("the daemon sent a frame for unknown channel %d", ch)
	}
	if w == nil {
		return nil
	}
	if _, err := w.Write(frame[1:]); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// stdin copies s.Stdin into frames until its end, then closes the program's stdin.
func stdin(ctx context.Context, conn *websocket.Conn, s Streams, cancel context.CancelCauseFunc) {
	if r := s.Stdin; r != nil {
		buf := make([]byte, 1+32<<10)
		buf[0] = api.ChannelStdin
		for {
			n, err := r.Read(buf[1:])
			if ctx.Err() != nil {
				return
			}
			if n > 0 {
				if werr := conn.Write(ctx, websocket.MessageBinary, buf[:1+n]); werr != nil {
					return // the reader sees the same end, with its reason
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if errors.Is(err, ErrDetached) && s.Detach != "" {
				_ = writeText(ctx, conn, api.ExecControl{Detach: s.Detach}) // the reader sees the same end, with its reason
				return
			}
			if err != nil {
				cancel(fmt.Errorf("read stdin: %w", err))
				return
			}
		}
	}
	_ = writeText(ctx, conn, api.ExecControl{StdinClose: true}) // the reader sees the same end, with its reason
}

// control forwards resizes and signals until ctx ends.
func control(ctx context.Context, conn *websocket.Conn, s Streams) {
	resize, signals := s.Resize, s.Signals
	for resize != nil || signals != nil {
		var msg api.ExecControl
		select {
		case <-ctx.Done():
			return
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			msg.Resize = &size
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			msg.Signal = sig
		}
		if err := writeText(ctx, conn, msg); err != nil {
			return // the reader sees the same end, with its reason
		}
	}
}

func writeText(ctx context.Context, conn *websocket.Conn, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return conn.Write(ctx, websocket.MessageText, b)
}
