package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// WaitSandbox waits for a sandbox to end and returns it, with the exit of its main process if it
// has one.
func (c *Client) WaitSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "wait"}})
}

// LogOptions selects a part of a log. The zero value selects all of it.
type LogOptions struct {
	Follow bool      // continue until the main process ends
	Last   *int      // number of last lines to begin with
	Since  time.Time // earliest time of output
	Stream string    // "stdout" or "stderr"; default: both
}

// Flows calls on for the record of a sandbox's network, in order. With follow it goes on until the
// sandbox ends or on returns an error. Last chooses the last flows; negative means all.
func (c *Client) Flows(ctx context.Context, id string, follow bool, last int, on func(api.Flow) error) error {
	q := url.Values{}
	if follow {
		q.Set("follow", "true")
	}
	if last >= 0 {
		q.Set("tail", strconv.Itoa(last))
	}
	return c.lines(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "flows"}, query: q}, func(line []byte) error {
		var f api.Flow
		if err := json.Unmarshal(line, &f); err != nil {
			return fmt.Errorf("read the flows: %w", err)
		}
		if f.Error != nil {
			return f.Error
		}
		return on(f)
	})
}

// Logs calls on for the output of a sandbox's main processes, in order, until the log ends or on
// returns an error.
func (c *Client) Logs(ctx context.Context, id string, opts LogOptions, on func(api.LogEntry) error) error {
	q := url.Values{}
	if opts.Follow {
		q.Set("follow", "true")
	}
	if opts.Last != nil {
		q.Set("tail", strconv.Itoa(*opts.Last))
	}
	if !opts.Since.IsZero() {
		q.Set("since", opts.Since.Format(time.RFC3339Nano))
	}
	switch opts.Stream {
	case "stdout":
		q.Set("stderr", "false")
	case "stderr":
		q.Set("stdout", "false")
	}
	return c.lines(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "logs"}, query: q}, func(line []byte) error {
		var e api.LogEntry
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
		if e.Error != nil {
			return e.Error
		}
		return on(e)
	})
}
