package daemon

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
)

func (d *Daemon) getExecs(w http.ResponseWriter, r *http.Request) error {
	list, err := d.service.Execs(r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *Daemon) getExecRecord(w http.ResponseWriter, r *http.Request) error {
	x, err := d.service.Exec(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, x)
}

func (d *Daemon) deleteExec(w http.ResponseWriter, r *http.Request) error {
	if err := d.service.DeleteExec(r.Context(), r.PathValue("id"), r.PathValue("exec")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) postSignal(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecSignal
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	x, err := d.service.findExec(r.PathValue("id"), r.PathValue("exec"))
	if err == nil {
		err = x.Signal(req.Signal, req.All)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) postResize(w http.ResponseWriter, r *http.Request) error {
	var req api.TerminalSize
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	if req.Rows == 0 || req.Cols == 0 {
		return invalidf("rows %d, cols %d: a terminal has at least one of each", req.Rows, req.Cols)
	}
	x, err := d.service.findExec(r.PathValue("id"), r.PathValue("exec"))
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
func (d *Daemon) postStdin(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "close")
	if err != nil {
		return err
	}
	end := false
	if s := q.Get("close"); s != "" {
		if end, err = strconv.ParseBool(s); err != nil {
			return invalidf("close %q: must be true or false", clip(s))
		}
	}
	x, err := d.service.findExec(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	if err := x.Input(r.Context(), requestBody(w, r), end); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) getProcesses(w http.ResponseWriter, r *http.Request) error {
	list, err := d.service.Processes(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

// getAttach tells what a detached exec writes. A client that goes away changes nothing.
//
// On a WebSocket it is as getExec after the first frame; ExecEvents with dropped in text frames say what is missing between
// two frames of output.
func (d *Daemon) getAttach(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "from")
	if err != nil {
		return err
	}
	x, err := d.service.findExec(r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	if err := x.attachable(); err != nil {
		return err
	}
	var from int64
	switch s := q.Get("from"); s {
	case "", "start":
	case "end":
		from = x.log.end()
	default:
		if from, err = strconv.ParseInt(s, 10, 64); err != nil || from < 0 || from > math.MaxInt64/2 {
			return invalidf("from %q: must be start, end or an offset in the output", clip(s))
		}
		if end := x.log.end(); from > end {
			return invalidf("from %d: the output has %d bytes so far", from, end)
		}
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return x.Attach(r.Context(), from, true, lines[api.ExecEvent](w))
	}
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil //nolint:nilerr // Accept has answered
	}
	d.watch(r.Context(), c, x, from)
	return nil
}

// watch is interact for an exec that does without its client.
func (d *Daemon) watch(ctx context.Context, c *websocket.Conn, x *Execution, from int64) {
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
		if err := d.readFrames(input, c, x); errors.Is(err, ErrInvalid) {
			refused = err
		}
		cancel(errClientGone)
	})
	var frame []byte
	var last api.ExecEvent
	err := x.Attach(ctx, from, false, func(e api.ExecEvent) error {
		if e.Exit != nil || e.Error != nil {
			last = e
			return nil
		}
		ctx, stop := context.WithTimeout(frames, answerTimeout)
		defer stop()
		if e.Data == nil {
			return writeText(ctx, c, e)
		}
		channel := api.ChannelStdout
		if e.Stream == "stderr" {
			channel = api.ChannelStderr
		}
		frame = append(append(frame[:0], channel), e.Data...)
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
