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

// WaitSandbox returns when a sandbox has ended, with how its main process did if it has one.
func (c *Client) WaitSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "wait"}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// LogOptions choose what is read of a log. The zero value chooses all that is there.
type LogOptions struct {
	Follow bool      // go on until the main process ends
	Last   *int      // only so many lines, and what follows them
	Since  time.Time // only what was written from then on
	Stream string    // "stdout" or "stderr"; default: both
}

// Logs calls on for what the main processes of a sandbox have written, in order, until on returns an error or there is no more.
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
