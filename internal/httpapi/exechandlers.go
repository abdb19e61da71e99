package httpapi

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// execOf returns the record of an exec as the API shows it.
func execOf(rec service.ExecRecord) api.Exec {
	x := rec.Exec
	if rec.Failure != nil {
		x.Error = ProblemOf(rec.Failure)
	}
	return x
}

func (s *Server) getExecs(w http.ResponseWriter, r *http.Request) error {
	all, err := s.as(r).Execs(r.PathValue("id"))
	if err != nil {
		return err
	}
	list := api.ExecList{Execs: make([]api.Exec, 0, len(all))}
	for _, rec := range all {
		list.Execs = append(list.Execs, execOf(rec))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getExecRecord(w http.ResponseWriter, r *http.Request) error {
	rec, err := s.as(r).ExecRecordOf(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, execOf(rec))
}

func (s *Server) postExecPrepare(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	rec, err := s.as(r).PrepareExec(r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, execOf(rec))
}

func (s *Server) postExecStart(w http.ResponseWriter, r *http.Request) error {
	var size api.TerminalSize
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &size); err != nil {
			return err
		}
	}
	rec, err := s.as(r).StartPrepared(r.Context(), r.PathValue("id"), r.PathValue("exec"), size)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, execOf(rec))
}

func (s *Server) deleteExec(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).DeleteExec(r.Context(), r.PathValue("id"), r.PathValue("exec")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postSignal(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecSignal
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	x, err := s.as(r).Exec(r.PathValue("id"), r.PathValue("exec"))
	if err == nil {
		err = x.Signal(req)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postResize(w http.ResponseWriter, r *http.Request) error {
	var req api.TerminalSize
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	if req.Rows == 0 || req.Cols == 0 {
		return class.Invalidf("rows %d, cols %d: a terminal has at least one of each", req.Rows, req.Cols)
	}
	x, err := s.as(r).Exec(r.PathValue("id"), r.PathValue("exec"))
	if err == nil {
		err = x.Resize(req.Rows, req.Cols)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// postStdin gives the body to the program as it comes.
func (s *Server) postStdin(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "close")
	if err != nil {
		return err
	}
	end := false
	if s := q.Get("close"); s != "" {
		if end, err = strconv.ParseBool(s); err != nil {
			return class.Invalidf("close %q: must be true or false", class.Clip(s))
		}
	}
	x, err := s.as(r).Exec(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	if err := x.Input(r.Context(), requestBody(w, r), end); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) getProcesses(w http.ResponseWriter, r *http.Request) error {
	list, err := s.as(r).Processes(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

// getAttach streams the output of a detached exec. A client that goes away changes nothing.
//
// On a WebSocket it works like getExec after the first frame; text frames with dropped report
// output that is missing between two frames.
func (s *Server) getAttach(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "from", "hold")
	if err != nil {
		return err
	}
	hold, err := boolParam("hold", q.Get("hold"))
	if err != nil {
		return err
	}
	if q.Get("from") == "next" {
		return s.attachNext(w, r)
	}
	x, err := s.as(r).Detached(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	var from int64
	switch s := q.Get("from"); s {
	case "", "start":
	case "end":
		from = x.OutputEnd()
	default:
		if from, err = strconv.ParseInt(s, 10, 64); err != nil || from < 0 || from > math.MaxInt64/2 {
			return class.Invalidf("from %q: must be start, end or an offset in the output", class.Clip(s))
		}
		if end := x.OutputEnd(); from > end {
			return class.Invalidf("from %d: the output has %d bytes so far", from, end)
		}
	}
	attach := func(ctx context.Context, text bool, emit func(api.ExecEvent) error) error {
		if hold {
			return x.AttachHeld(ctx, from, nil, text, emit)
		}
		return x.Attach(ctx, from, text, emit)
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return answerEvents(w, execError, func(emit func(api.ExecEvent) error) error { //nolint:contextcheck // it is the request's
			return attach(r.Context(), true, emit)
		})
	}
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil //nolint:nilerr // Accept has answered
	}
	s.watch(r.Context(), c, x, attach)
	return nil
}

// attachNext attaches to a program that is still to be started. The handshake is answered when
// nothing of its output can be missed any more.
func (s *Server) attachNext(w http.ResponseWriter, r *http.Request) error {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return class.Invalidf("from next: only over a WebSocket")
	}
	u, err := s.as(r).Upcoming(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	defer u.Close()
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil // Accept has answered
	}
	ctx, end := s.untilStopping(r.Context())
	ctx, resume := untilHungUp(ctx)
	x, err := u.Wait(ctx)
	resume()
	end()
	if err != nil {
		if !errors.Is(err, errClientGone) {
			finish(r.Context(), c, api.ExecEvent{Error: ProblemOf(err)})
		}
		_ = c.CloseNow() // it has been answered
		return nil
	}
	s.watch(r.Context(), c, x, func(ctx context.Context, text bool, emit func(api.ExecEvent) error) error {
		return x.AttachHeld(ctx, 0, u, text, emit)
	})
	return nil
}

// untilHungUp returns a context that ends with errClientGone when the client closes its connection,
// from which no other goroutine may read until resume is called. What the client has sent stays
// there: the program that will have it as stdin does not run yet.
func untilHungUp(parent context.Context) (ctx context.Context, resume func()) {
	ctx, cancel := context.WithCancelCause(parent)
	conn := connOf(parent)
	if conn == nil {
		return ctx, func() { cancel(nil) }
	}
	var waiter sync.WaitGroup
	waiter.Go(func() {
		raw, err := conn.SyscallConn()
		if err != nil {
			return // closed by its handler alone
		}
		gone := false
		_ = raw.Read(func(fd uintptr) bool { // ends with its deadline otherwise
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} //nolint:gosec // a descriptor
			for {
				n, err := unix.Poll(fds, 0)
				if !errors.Is(err, unix.EINTR) { // the poller does not report a hang-up twice
					gone = err == nil && n > 0
					return gone
				}
			}
		})
		if gone {
			cancel(errClientGone)
		}
	})
	return ctx, func() {
		cancel(nil)
		_ = conn.SetReadDeadline(longPast) // only a closed connection refuses
		waiter.Wait()
		_ = conn.SetReadDeadline(time.Time{})
	}
}

// watch is interact for an exec that goes on without its client.
func (s *Server) watch(
	ctx context.Context, c *websocket.Conn, x *service.Detached, attach func(ctx context.Context, text bool, emit func(api.ExecEvent) error) error,
) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var reader sync.WaitGroup
	defer reader.Wait()
	defer func() { _ = c.CloseNow() }() // ends the reader
	frames, stop := outlive(ctx, stepTimeout)
	defer stop()
	input, end := context.WithCancel(frames) // a reader that writes to a program which does not read goes on
	defer end()
	c.SetReadLimit(maxFrame)
	var refused error // set before ctx ends
	reader.Go(func() {
		err := s.readFrames(input, c, x, nil)
		if _, ok := errors.AsType[detaching](err); ok {
			err = class.Invalidf("detach: the program does not end with its client; close the connection")
		}
		if errors.Is(err, class.ErrInvalid) {
			refused = err
		}
		cancel(errClientGone)
	})
	var frame []byte
	var last api.ExecEvent
	err := attach(ctx, false, func(e api.ExecEvent) error {
		if e.Exit != nil {
			last = e
			return nil
		}
		ctx, stop := context.WithTimeout(frames, answerTimeout)
		defer stop()
		if e.Data == nil {
			return writeText(ctx, c, e)
		}
		frame = append(append(frame[:0], channelOf(e.Stream)), e.Data...)
		return c.Write(ctx, websocket.MessageBinary, frame)
	})
	switch {
	case err == nil:
		finish(ctx, c, last)
	case errors.Is(err, errClientGone) && refused != nil:
		finish(ctx, c, api.ExecEvent{Error: ProblemOf(refused)})
	case !errors.Is(err, errClientGone):
		finish(ctx, c, api.ExecEvent{Error: ProblemOf(err)})
	}
}
