package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// CreateTied creates a sandbox that the daemon deletes when tie is closed, ctx ends, or this
// process dies. The connection behind tie breaks when the daemon ends, which deletes nothing. A
// daemon of an earlier version ties nothing.
func (c *Client) CreateTied(ctx context.Context, req api.CreateSandbox) (_ *api.Sandbox, tie io.Closer, err error) {
	resp, err := c.do(ctx, request{
		method: http.MethodPost, path: []string{"v1", "sandboxes"}, query: url.Values{"tie": {"true"}}, json: req,
		accept: api.TypeNDJSON,
	})
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = resp.Body.Close()
		}
	}()
	sb := new(api.Sandbox)
	switch mediaType(resp) {
	case api.TypeNDJSON:
		err = json.NewDecoder(io.LimitReader(resp.Body, maxLine)).Decode(sb)
		tie = resp.Body
	case api.TypeJSON: // a daemon of an earlier version
		err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(sb)
		_ = resp.Body.Close() // read to its end
		tie = io.NopCloser(strings.NewReader(""))
	default:
		return nil, nil, unexpectedAnswer(resp, read(resp.Body, 200))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("decode the answer to POST %s: %w", resp.Request.URL.Path, err)
	}
	return sb, tie, nil
}
