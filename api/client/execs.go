package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

func execPath(id, exec string, more ...string) []string {
	return append([]string{"v1", "sandboxes", id, "execs", exec}, more...)
}

// Detach starts a program that goes on without the caller and the daemon, and returns when it has started. See [Client.Attach]
// for its output and its end.
func (c *Client) Detach(ctx context.Context, id string, req api.ExecRequest) (*api.Exec, error) {
	req.Detach = true
	out := new(api.Exec)
	r := request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "exec"}, json: req}
	if err := c.call(ctx, r, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// ListExecs returns a sandbox's execs, oldest first.
func (c *Client) ListExecs(ctx context.Context, id string) ([]api.Exec, error) {
	var out api.ExecList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "execs"}}, maxAnswer, &out)
	return out.Execs, err
}

// GetExec returns one exec.
func (c *Client) GetExec(ctx context.Context, id, exec string) (*api.Exec, error) {
	out := new(api.Exec)
	if err := c.call(ctx, request{method: http.MethodGet, path: execPath(id, exec)}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// DeleteExec kills everything that an exec has started, if it still runs, and forgets it and its output.
func (c *Client) DeleteExec(ctx context.Context, id, exec string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: execPath(id, exec)}, maxAnswer, nil)
}

// SignalExec sends a signal to an exec. One that has ended is no error.
func (c *Client) SignalExec(ctx context.Context, id, exec string, req api.ExecSignal) error {
	return c.call(ctx, request{method: http.MethodPost, path: execPath(id, exec, "signal"), json: req}, maxAnswer, nil)
}

// ResizeExec tells an exec's terminal its size.
func (c *Client) ResizeExec(ctx context.Context, id, exec string, size api.TerminalSize) error {
	return c.call(ctx, request{method: http.MethodPost, path: execPath(id, exec, "resize"), json: size}, maxAnswer, nil)
}

// WriteStdin gives an exec all of r on its stdin, and then, if end is set, end of file. It returns when the program, or its
// pipe, has taken it.
func (c *Client) WriteStdin(ctx context.Context, id, exec string, r io.Reader, end bool) error {
	return c.call(ctx, request{
		method: http.MethodPost, path: execPath(id, exec, "stdin"), query: url.Values{"close": {strconv.FormatBool(end)}},
		body: struct{ io.Reader }{r}, typ: api.TypeBytes,
	}, maxAnswer, nil)
}

// AttachStream calls on for what a detached exec has written from this offset of its output on and goes on to write, and last
// for its end. When on returns an error or ctx ends, the program goes on, and AttachStream may be called again.
func (c *Client) AttachStream(ctx context.Context, id, exec string, from int64, on func(api.ExecEvent) error) (*End, error) {
	return c.stream(ctx, request{
		method: http.MethodGet, path: execPath(id, exec, "attach"), query: url.Values{"from": {strconv.FormatInt(from, 10)}},
	}, on)
}

// Attach is AttachStream with s connected to the program. A nil s.Stdin leaves the program's stdin alone; the end of another
// one ends it. Dropped, which may be nil, hears how many bytes are kept no more where some are missing.
func (c *Client) Attach(ctx context.Context, id, exec string, from int64, s Streams, dropped func(int64)) (*End, error) {
	conn, err := c.dialWebSocket(ctx, request{
		path: execPath(id, exec, "attach"), query: url.Values{"from": {strconv.FormatInt(from, 10)}},
	})
	if err != nil {
		return nil, err
	}
	defer conn.CloseNow() //nolint:errcheck // the exit or the error has been read
	return converse(ctx, conn, s, s.Stdin != nil, dropped)
}

// Processes lists the processes of a sandbox, in the order of their pids.
func (c *Client) Processes(ctx context.Context, id string) ([]api.Process, error) {
	var out api.ProcessList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "processes"}}, maxAnswer, &out)
	return out.Processes, err
}

// decodeEvent reads one event of an exec.
func decodeEvent(data []byte) (api.ExecEvent, error) {
	var e api.ExecEvent
	if err := json.Unmarshal(data, &e); err != nil {
		return e, fmt.Errorf("decode an exec event: %w", err)
	}
	return e, nil
}
