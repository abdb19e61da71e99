package client

import (
	"context"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

// ReadFile opens a regular file in the sandbox. The caller closes it; reading fails with io.ErrUnexpectedEOF where the
// daemon could not send all of it.
func (c *Client) ReadFile(ctx context.Context, id, path string) (io.ReadCloser, error) {
	return c.download(ctx, id, "files", path, api.TypeBytes)
}

// WriteFile writes a regular file in the sandbox from r and makes the directories above it. The file appears complete
// or not at all. A zero mode means 0644; user is as in [api.CreateSandbox] and may be empty.
func (c *Client) WriteFile(ctx context.Context, id, path string, r io.Reader, mode fs.FileMode, user string) error {
	q := url.Values{"path": {path}}
	if mode != 0 {
		q.Set("mode", "0"+strconv.FormatUint(uint64(mode.Perm()), 8))
	}
	if user != "" {
		q.Set("user", user)
	}
	return c.upload(ctx, id, "files", q, api.TypeBytes, r)
}

// ArchiveOut returns a tar stream of the file or tree at path, with names relative to path. The caller closes it. What
// is in it was made by the sandbox: extract it with care (never by path, never through links).
func (c *Client) ArchiveOut(ctx context.Context, id, path string) (io.ReadCloser, error) {
	return c.download(ctx, id, "archive", path, api.TypeTar)
}

// ArchiveIn extracts a tar stream below path, which is created. The extraction happens inside the sandbox.
func (c *Client) ArchiveIn(ctx context.Context, id, path string, r io.Reader) error {
	return c.upload(ctx, id, "archive", url.Values{"path": {path}}, api.TypeTar, r)
}

func (c *Client) download(ctx context.Context, id, route, path, typ string) (io.ReadCloser, error) {
	resp, err := c.do(ctx, request{
		method: http.MethodGet, path: []string{"v1", "sandboxes", id, route}, query: url.Values{"path": {path}}, accept: typ,
	})
	if err != nil {
		return nil, err
	}
	if t := mediaType(resp); t != typ {
		defer resp.Body.Close()
		return nil, notOurs(resp, read(resp.Body, 200))
	}
	return resp.Body, nil
}

func (c *Client) upload(ctx context.Context, id, route string, q url.Values, typ string, r io.Reader) error {
	if r == nil {
		r = http.NoBody
	}
	// Only Read is passed on: http.NewRequest would look into the reader for a length, and close it.
	body := struct{ io.Reader }{r}
	return c.call(ctx, request{
		method: http.MethodPut, path: []string{"v1", "sandboxes", id, route}, query: q, body: body, typ: typ,
	}, maxAnswer, nil)
}
