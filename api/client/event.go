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

// EventOptions selects events. The zero value selects all that are kept.
type EventOptions struct {
	After   uint64    // ID of an event, which all others follow; zero means any
	Since   time.Time // time of the first event; not with After
	Until   time.Time // time before which an event was
	Last    *int      // maximum number of kept events
	Follow  bool      // continue with new events, until Until if it is given
	Filters []string  // "key=value", see the reference of GET /v1/events
}

// Events calls on for events, in order, until there are no more or on returns an error. An event
// with Lost alone tells of missing ones.
func (c *Client) Events(ctx context.Context, opts EventOptions, on func(api.Event) error) error {
	q := url.Values{}
	if len(opts.Filters) > 0 {
		q["filter"] = opts.Filters
	}
	switch {
	case opts.After > 0:
		q.Set("since", strconv.FormatUint(opts.After, 10))
	case !opts.Since.IsZero():
		q.Set("since", opts.Since.Format(time.RFC3339Nano))
	}
	if !opts.Until.IsZero() {
		q.Set("until", opts.Until.Format(time.RFC3339Nano))
	}
	if opts.Last != nil {
		q.Set("tail", strconv.Itoa(*opts.Last))
	}
	if opts.Follow {
		q.Set("follow", "true")
	}
	return c.lines(ctx, request{method: http.MethodGet, path: []string{"v1", "events"}, query: q}, func(line []byte) error {
		var e api.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("read the events: %w", err)
		}
		if e.Error != nil {
			return e.Error
		}
		return on(e)
	})
}
