package httpapi

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// getEvents answers, with follow, until the client goes or the daemon stops.
func (s *Server) getEvents(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "since", "until", "filter", "tail", "follow")
	if err != nil {
		return err
	}
	opts, err := eventOptions(q)
	if err != nil {
		return err
	}
	ctx, end := s.untilStopping(r.Context())
	defer end()
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: opts.Follow}
	emit := linesOf[api.Event](out)
	err = s.as(r).Events(ctx, opts, func() error {
		_, err := out.Write(nil) // that there is nothing so far is an answer too
		return err
	}, emit)
	switch {
	case errors.Is(err, class.ErrStopping):
		return emit(api.Event{Error: ProblemOf(err)})
	case errors.Is(context.Cause(r.Context()), context.Canceled):
		return nil // the client has gone, which is how following ends
	}
	return err
}

// eventOptions reads the parameters of getEvents.
func eventOptions(q url.Values) (opts service.EventOptions, err error) {
	if opts.Follow, err = boolParam("follow", q.Get("follow")); err != nil {
		return opts, err
	}
	if opts.Tail, err = tailParam(q.Get("tail"), "events"); err != nil {
		return opts, err
	}
	if since := q.Get("since"); since != "" {
		if opts.After, err = strconv.ParseUint(since, 10, 64); err != nil {
			opts.After = 0
			if opts.Since, err = time.Parse(time.RFC3339Nano, since); err != nil {
				return opts, class.Invalidf("since %q: must be the id of an event, or a time as in RFC 3339", class.Clip(since))
			}
		}
	}
	if until := q.Get("until"); until != "" {
		if opts.Until, err = time.Parse(time.RFC3339Nano, until); err != nil {
			return opts, class.Invalidf("until %q: must be a time as in RFC 3339", class.Clip(until))
		}
	}
	for _, f := range q["filter"] {
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return opts, class.Invalidf("filter %q: must be key=value", class.Clip(f))
		}
		if opts.Filter == nil {
			opts.Filter = make(map[string][]string)
		}
		opts.Filter[key] = append(opts.Filter[key], value)
	}
	return opts, nil
}

func (s *Server) postRename(w http.ResponseWriter, r *http.Request) error {
	var req api.RenameSandbox
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	sb, err := s.as(r).RenameSandbox(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}
