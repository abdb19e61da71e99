package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// maxFrame bounds the client's frames after the first.
const maxFrame = 1 << 20

// getExec is an interactive exec.
//
//	client                                  server
//	  ── text: ExecRequest ────────────────▶
//	  ◀────────────── text: ExecEvent {pid} ──
//	  ── binary: 0 + bytes for stdin ──────▶
//	  ── text: ExecControl ────────────────▶
//	  ◀── binary: 1 or 2 + bytes of output ──
//	  ◀─── text: ExecEvent {exit} or {error} ──   the last, then a normal close
//
// A client that closes the connection kills everything the exec started, unless it has sent an
// ExecControl with detach, to which the last event is {detached}.
func (s *Server) getExec(w http.ResponseWriter, r *http.Request) error {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return class.Invalidf("an exec is a POST, or a WebSocket handshake")
	}
	// Errors that HTTP can carry are answered in HTTP.
	if _, err := s.as(r).GetSandbox(r.PathValue("id")); err != nil {
		return err
	}
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil //nolint:nilerr // Accept has answered
	}
	s.interact(r.Context(), c, s.as(r), r.PathValue("id"))
	return nil
}

func writeText(ctx context.Context, c *websocket.Conn, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.Write(ctx, websocket.MessageText, data)
}

// interact serves the connection and returns when it is closed and its reader has ended.
func (s *Server) interact(ctx context.Context, c *websocket.Conn, as *service.API, ref string) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var reader sync.WaitGroup
	defer reader.Wait()
	defer func() { _ = c.CloseNow() }() // ends the reader

	x, stdin, err := s.begin(ctx, c, as, ref)
	if err != nil {
		finish(ctx, c, api.ExecEvent{Error: ProblemOf(err)})
		return
	}
	if x == nil {
		return
	}
	defer x.Close()
	if err := writeText(ctx, c, api.ExecEvent{PID: x.PID, Exec: x.ID()}); err != nil {
		return
	}
	// A frame whose context ends takes the connection with it, but the last event is still to be sent.
	frames, stop := outlive(ctx, stepTimeout)
	defer stop()
	var refused error // set before ctx ends
	var form string   // of the detach; likewise
	reader.Go(func() {
		err := s.readFrames(frames, c, x, stdin)
		if d, ok := errors.AsType[detaching](err); ok {
			if err = x.CheckLeave(string(d)); err == nil {
				form = string(d)
				cancel(service.ErrLeft)
				return
			}
		}
		if errors.Is(err, class.ErrInvalid) {
			refused = err
		}
		cancel(errClientGone)
	})
	var frame []byte // reused: one call at a time, and Write keeps nothing
	exit, usage, err := x.Stream(ctx, func(stream string, p []byte) error {
		frame = append(append(frame[:0], channelOf(stream)), p...)
		ctx, stop := context.WithTimeout(frames, answerTimeout)
		defer stop()
		return c.Write(ctx, websocket.MessageBinary, frame)
	})
	if errors.Is(err, service.ErrLeft) {
		if err = x.Leave(frames, form); err == nil {
			if form == api.MainExec {
				s.untie(x.Record().Sandbox)
			}
			finish(ctx, c, api.ExecEvent{Exec: x.ID(), Detached: true})
			return
		}
	}
	x.Close() // a reader that writes to a program which does not read goes on
	switch {
	case err == nil:
		finish(ctx, c, api.ExecEvent{Exit: &exit, Usage: &usage})
	case !errors.Is(err, errClientGone):
		finish(ctx, c, api.ExecEvent{Error: ProblemOf(err)})
	case refused != nil:
		finish(ctx, c, api.ExecEvent{Error: ProblemOf(refused)})
	}
}

// begin reads the first frame and starts the exec. Without an error and an execution the client is
// gone.
func (s *Server) begin(ctx context.Context, c *websocket.Conn, as *service.API, ref string) (_ *service.Execution, stdin []byte, _ error) {
	c.SetReadLimit(maxExecBody)
	first, stop := context.WithTimeout(ctx, bodyTimeout)
	defer stop()
	kind, data, err := c.Read(first)
	if err != nil {
		return nil, nil, nil
	}
	c.SetReadLimit(maxFrame)
	if kind != websocket.MessageText {
		return nil, nil, class.Invalidf("the first frame must be a text frame with the exec request")
	}
	var req api.ExecRequest
	if err := decodeJSON(data, &req); err != nil {
		return nil, nil, err
	}
	x, err := as.StartInteractive(ctx, ref, req)
	return x, req.Stdin, err
}

// finish sends the last event and closes the connection in order. It has a context of its own,
// because the end of the request's may be the reason.
func finish(ctx context.Context, c *websocket.Conn, last api.ExecEvent) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	if writeText(ctx, c, last) == nil {
		_ = c.Close(websocket.StatusNormalClosure, "") // waits for the client's own; one that does not answer is cut off
	}
}

// outlive returns a context that ends some time after ctx does, unless it is cancelled before.
func outlive(ctx context.Context, by time.Duration) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(by, cancel)
		context.AfterFunc(late, func() { timer.Stop() })
	})
	return late, func() { stop(); cancel() }
}

var errClientGone = errors.New("the client is gone")

// detaching ends the reading of frames: the client leaves its program, which goes on in this form.
type detaching string

func (d detaching) Error() string { return "the client detaches: " + string(d) }

// readFrames obeys the client's frames until the connection ends or a frame is invalid.
func (s *Server) readFrames(ctx context.Context, c *websocket.Conn, x service.Exec, stdin []byte) error {
	write := func(p []byte, end bool) {
		// A program that has closed its stdin is no reason to end: it may have more to say.
		if err := x.Input(ctx, bytes.NewReader(p), end); err != nil {
			s.log.Debug("stdin of an exec is not read", "error", err)
		}
	}
	if len(stdin) > 0 {
		write(stdin, false)
	}
	for {
		kind, data, err := c.Read(ctx)
		if err != nil {
			return err
		}
		if kind == websocket.MessageBinary {
			if len(data) == 0 || data[0] != api.ChannelStdin {
				return class.Invalidf("a binary frame from the client must begin with channel %d", api.ChannelStdin)
			}
			write(data[1:], false)
			continue
		}
		var control api.ExecControl
		if err := decodeJSON(data, &control); err != nil {
			return err
		}
		switch {
		case control.Detach != "":
			return detaching(control.Detach)
		case control.Resize != nil:
			err = x.Resize(control.Resize.Rows, control.Resize.Cols)
		case control.Signal != "":
			err = x.Signal(api.ExecSignal{Signal: control.Signal})
		case control.StdinClose:
			write(nil, true)
		default:
			err = class.Invalidf("a text frame must have one of resize, signal, stdin_close, detach")
		}
		if errors.Is(err, class.ErrInvalid) {
			return err
		}
		if err != nil {
			return fmt.Errorf("control exec: %w", err)
		}
	}
}
