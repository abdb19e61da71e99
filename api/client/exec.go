package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// End describes how a streamed program ended.
type End struct {
	Exit  api.Exit
	Usage api.Usage
}

// Exec executes a program and waits for its end. Output beyond req.OutputLimit is dropped and
// marked in the result; [Client.ExecStream] returns all of it. If ctx ends first, the program and
// its descendants are killed.
func (c *Client) Exec(ctx context.Context, id string, req api.ExecRequest) (*api.ExecResult, error) {
	out := new(api.ExecResult)
	r := request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "exec"}, json: req}
	if err := c.call(ctx, r, outputBound(req), out); err != nil {
		return nil, err
	}
	return out, nil
}

// Run creates a sandbox, executes one program in it and deletes it. If ctx ends first, the sandbox
// is deleted at once.
func (c *Client) Run(ctx context.Context, req api.RunRequest) (*api.ExecResult, error) {
	out := new(api.ExecResult)
	r := request{method: http.MethodPost, path: []string{"v1", "run"}, json: req}
	if err := c.call(ctx, r, outputBound(req.Exec), out); err != nil {
		return nil, err
	}
	return out, nil
}

// outputBound returns the maximum size of a buffered answer: each stream once as text, where a byte
// takes up to six characters ("\u0000"), and once in base64.
func outputBound(req api.ExecRequest) int64 {
	n := req.OutputLimit
	if n <= 0 {
		n = defaultOutput
	}
	return maxProblem + 2*8*min(n, maxOutput)
}

// ExecStream executes a program and calls on for every event as it happens, the last one included.
// If on returns an error or ctx ends, the program and its descendants are killed and ExecStream
// returns that error.
func (c *Client) ExecStream(ctx context.Context, id string, req api.ExecRequest, on func(api.ExecEvent) error) (*End, error) {
	return c.stream(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "exec"}, json: req}, on)
}

// RunStream is [Client.Run] with the events of [Client.ExecStream].
func (c *Client) RunStream(ctx context.Context, req api.RunRequest, on func(api.ExecEvent) error) (*End, error) {
	return c.stream(ctx, request{method: http.MethodPost, path: []string{"v1", "run"}, json: req}, on)
}

func (c *Client) stream(ctx context.Context, r request, on func(api.ExecEvent) error) (*End, error) {
	r.accept = api.TypeNDJSON
	resp, err := c.do(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return events(ctx, resp, on)
}

// events calls on for every event of an answer of JSON lines.
func events(ctx context.Context, resp *http.Response, on func(api.ExecEvent) error) (*End, error) {
	var end *End
	err := scan(ctx, resp, func(line []byte) error {
		e, err := decodeEvent(line)
		if err != nil {
			return err
		}
		if err := on(e); err != nil {
			return err
		}
		if end, err = ending(e); err == nil && end != nil {
			return errEnd
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if end == nil {
		return nil, errLost
	}
	return end, nil
}

// ending returns the program's end if e reports it; both results are nil while the program runs.
func ending(e api.ExecEvent) (*End, error) {
	switch {
	case e.Error != nil:
		return nil, e.Error
	case e.Exit != nil:
		end := &End{Exit: *e.Exit}
		if e.Usage != nil {
			end.Usage = *e.Usage
		}
		return end, nil
	}
	return nil, nil
}

var (
	errEnd  = errors.New("the last line was read") // ends lines without an error
	errLost = errors.New("the daemon ended the stream without the exit of the program")
)

// lines sends the request and calls on for every line of the streamed answer until on returns an
// error; errEnd counts as success. Then it closes the stream, which kills the program of an exec.
func (c *Client) lines(ctx context.Context, r request, on func([]byte) error) error {
	r.accept = api.TypeNDJSON
	resp, err := c.do(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return scan(ctx, resp, on)
}

// scan is lines for an answer that has begun. The caller closes it.
func scan(ctx context.Context, resp *http.Response, on func([]byte) error) error {
	if t := mediaType(resp); t != api.TypeNDJSON {
		return unexpectedAnswer(resp, read(resp.Body, 200))
	}
	s := bufio.NewScanner(resp.Body)
	s.Buffer(make([]byte, 0, 64<<10), maxEvent)
	for s.Scan() {
		if len(s.Bytes()) == 0 {
			continue
		}
		if err := on(s.Bytes()); errors.Is(err, errEnd) {
			// Read to the end of the body, so that the connection can be reused: the daemon sends no
			// more.
			_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1)) // the answer was complete, whatever fails here
			return nil
		} else if err != nil {
			return err
		}
	}
	if err := s.Err(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("read the stream: %w", err)
	}
	return nil
}

// Output returns the output of an event in either form, or nil if the event has none.
func Output(e api.ExecEvent) []byte {
	if len(e.Data) > 0 {
		return e.Data
	}
	if e.Text != "" {
		return []byte(e.Text)
	}
	return nil
}
