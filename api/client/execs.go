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

// Detach starts a program that does not depend on the caller or the daemon, and returns when it has
// started. [Client.Attach] returns its output and its end.
func (c *Client) Detach(ctx context.Context, id string, req api.ExecRequest) (*api.Exec, error) {
	req.Detach = true
	return fetch[api.Exec](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "exec"}, json: req})
}

// ListExecs returns a sandbox's execs, oldest first.
func (c *Client) ListExecs(ctx context.Context, id string) ([]api.Exec, error) {
	var out api.ExecList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "execs"}}, maxAnswer, &out)
	return out.Execs, err
}

// GetExec returns one exec.
func (c *Client) GetExec(ctx context.Context, id, exec string) (*api.Exec, error) {
	return fetch[api.Exec](ctx, c, request{method: http.MethodGet, path: execPath(id, exec)})
}

// DeleteExec kills the processes of an exec, if any are left, and deletes its record and output.
func (c *Client) DeleteExec(ctx context.Context, id, exec string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: execPath(id, exec)}, maxAnswer, nil)
}

// SignalExec sends a signal to an exec. It does nothing if that has ended.
func (c *Client) SignalExec(ctx context.Context, id, exec string, req api.ExecSignal) error {
	return c.call(ctx, request{method: http.MethodPost, path: execPath(id, exec, "signal"), json: req}, maxAnswer, nil)
}

// ResizeExec sets the size of an exec's terminal.
func (c *Client) ResizeExec(ctx context.Context, id, exec string, size api.TerminalSize) error {
	return c.call(ctx, request{method: http.MethodPost, path: execPath(id, exec, "resize"), json: size}, maxAnswer, nil)
}

// WriteStdin writes all of r to the stdin of an exec and then, if end is set, closes it. It returns
// when the program or its pipe has taken all bytes.
func (c *Client) WriteStdin(ctx context.Context, id, exec string, r io.Reader, end bool) error {
	return c.call(ctx, request{
		method: http.MethodPost, path: execPath(id, exec, "stdin"), query: url.Values{"close": {strconv.FormatBool(end)}},
		body: readOnly(r), typ: api.TypeBytes,
	}, maxAnswer, nil)
}

// AttachStream calls on for the output of a detached exec from offset from on, past and future, and
// last for its end. If on returns an error or ctx ends, the program goes on, and AttachStream may
// be called again.
func (c *Client) AttachStream(ctx context.Context, id, exec string, from int64, on func(api.ExecEvent) error) (*End, error) {
	return c.stream(ctx, request{
		method: http.MethodGet, path: execPath(id, exec, "attach"), query: url.Values{"from": {strconv.FormatInt(from, 10)}},
	}, on)
}

// Attach connects s to a detached exec, starting at offset from of its output. A nil s.Stdin leaves
// the program's stdin open; otherwise the end of s.Stdin closes it. If output is missing, dropped
// is called with its size in bytes; it may be nil.
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

// Processes returns the processes of a sandbox, ordered by pid.
func (c *Client) Processes(ctx context.Context, id string) ([]api.Process, error) {
	var out api.ProcessList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "processes"}}, maxAnswer, &out)
	return out.Processes, err
}

// decodeEvent decodes one event of an exec.
func decodeEvent(data []byte) (api.ExecEvent, error) {
	var e api.ExecEvent
	if err := json.Unmarshal(data, &e); err != nil {
		return e, fmt.Errorf("decode an exec event: %w", err)
	}
	return e, nil
}

// PrepareExec describes a program that [Client.StartExec] starts as a detached one. Clients attach
// to it before: see [AttachOptions].
func (c *Client) PrepareExec(ctx context.Context, id string, req api.ExecRequest) (*api.Exec, error) {
	return fetch[api.Exec](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "execs"}, json: req})
}

// StartExec starts the program of a prepared exec. Size replaces that of its request, unless it is
// zero.
func (c *Client) StartExec(ctx context.Context, id, exec string, size api.TerminalSize) (*api.Exec, error) {
	return fetch[api.Exec](ctx, c, request{method: http.MethodPost, path: execPath(id, exec, "start"), json: size})
}

// AttachOptions say how [Client.AttachWith] attaches.
type AttachOptions struct {
	// Next waits for the start of a prepared exec, or of the next main process ([api.MainExec]).
	// Nothing of its output is missed.
	Next bool
	// End begins with output that is still to come. With neither all that is kept comes first.
	End bool
	// Attached is called once, when the daemon has accepted the client; it may be nil.
	Attached func()
}

// AttachWith is [Client.Attach] for a client that misses nothing: a program that writes faster than
// the client reads waits for it.
func (c *Client) AttachWith(ctx context.Context, id, exec string, opts AttachOptions, s Streams) (*End, error) {
	from := "start"
	switch {
	case opts.Next:
		from = "next"
	case opts.End:
		from = "end"
	}
	conn, err := c.dialWebSocket(ctx, request{path: execPath(id, exec, "attach"), query: url.Values{"from": {from}, "hold": {"true"}}})
	if err != nil {
		return nil, err
	}
	defer conn.CloseNow() //nolint:errcheck // the exit or the error has been read
	if opts.Attached != nil {
		opts.Attached()
	}
	return converse(ctx, conn, s, s.Stdin != nil, nil)
}
