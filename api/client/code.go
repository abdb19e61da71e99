package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// RunCode runs source text in a sandbox and waits for its end. An exception or a non-zero exit code
// is a result. If ctx ends first, the program and its descendants are killed.
func (c *Client) RunCode(ctx context.Context, id string, req api.CodeRequest) (*api.CodeResult, error) {
	out := new(api.CodeResult)
	// Results of a context come on top of the output.
	bound := outputBound(api.ExecRequest{OutputLimit: req.OutputLimit}) + maxResults
	r := request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "code"}, json: req}
	if err := c.call(ctx, r, bound, out); err != nil {
		return nil, err
	}
	return out, nil
}

// maxResults bounds the results of a buffered answer.
const maxResults = 64 << 20

// StreamCode is [Client.RunCode] for a caller that gets every event as it happens, the last one
// included, which it also returns. If on returns an error or ctx ends, the program and its
// descendants are killed, and StreamCode returns that error.
func (c *Client) StreamCode(ctx context.Context, id string, req api.CodeRequest, on func(api.CodeEvent) error) (*api.CodeEvent, error) {
	var end *api.CodeEvent
	r := request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "code"}, json: req}
	err := c.lines(ctx, r, func(line []byte) error {
		var e api.CodeEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("read event of the daemon: %w", err)
		}
		if e.Problem != nil {
			return e.Problem
		}
		if err := on(e); err != nil {
			return err
		}
		if e.Type == api.CodeEnded {
			end = &e
			return errEnd
		}
		return nil
	})
	if err == nil && (end == nil || end.Exit == nil) {
		err = errLost
	}
	if err != nil {
		return nil, err
	}
	return end, nil
}

// Languages lists the languages of code runs.
func (c *Client) Languages(ctx context.Context) ([]api.Language, error) {
	var out api.LanguageList
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "languages"}}, maxAnswer, &out); err != nil {
		return nil, err
	}
	return out.Languages, nil
}
