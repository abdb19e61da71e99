package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

// ReadFile opens a regular file in the sandbox. The caller closes it. Reading fails with
// io.ErrUnexpectedEOF if the daemon could not send all of it.
func (c *Client) ReadFile(ctx context.Context, id, path string) (io.ReadCloser, error) {
	return c.download(ctx, readRequest(id, "files", path, api.TypeBytes, ""))
}

// ReadFileRange opens length bytes of a regular file from offset on; a negative length reads to the
// end. It yields fewer bytes if the file ends earlier. An offset at or beyond the file's end is
// [api.CodeInvalid].
func (c *Client) ReadFileRange(ctx context.Context, id, path string, offset, length int64) (io.ReadCloser, error) {
	if length == 0 {
		return io.NopCloser(http.NoBody), nil // an HTTP range has at least one byte
	}
	span := "bytes=" + strconv.FormatInt(offset, 10) + "-"
	if length > 0 {
		span += strconv.FormatInt(offset+length-1, 10)
	}
	return c.download(ctx, readRequest(id, "files", path, api.TypeBytes, span))
}

// WriteFile writes a regular file in the sandbox from r and creates its parent directories. The
// file appears complete or not at all. A zero mode means 0644; user is as in [api.CreateSandbox]
// and may be empty.
func (c *Client) WriteFile(ctx context.Context, id, path string, r io.Reader, mode fs.FileMode, user string) error {
	return c.upload(ctx, id, "files", writeQuery(path, mode, user), api.TypeBytes, r)
}

// AppendFile appends r to a regular file in the sandbox, piece by piece. A missing file is created
// as by [Client.WriteFile]. Bytes written before an error stay.
func (c *Client) AppendFile(ctx context.Context, id, path string, r io.Reader, mode fs.FileMode, user string) error {
	q := writeQuery(path, mode, user)
	q.Set("append", "true")
	return c.upload(ctx, id, "files", q, api.TypeBytes, r)
}

func writeQuery(path string, mode fs.FileMode, user string) url.Values {
	q := url.Values{"path": {path}}
	if mode != 0 {
		q.Set("mode", octal(mode))
	}
	if user != "" {
		q.Set("user", user)
	}
	return q
}

func octal(mode fs.FileMode) string { return "0" + strconv.FormatUint(uint64(mode.Perm()), 8) }

// RemoveFile removes a file, a link or an empty directory of the sandbox, or with recursive a whole
// tree. After an error a part of the tree may be gone.
func (c *Client) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	q := url.Values{"path": {path}}
	if recursive {
		q.Set("recursive", "true")
	}
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "sandboxes", id, "files"}, query: q}, maxAnswer, nil)
}

// StatFile describes the file at path. A link in the last element is followed if follow is set.
func (c *Client) StatFile(ctx context.Context, id, path string, follow bool) (*api.FileEntry, error) {
	q := url.Values{"path": {path}}
	if follow {
		q.Set("follow", "true")
	}
	return fetch[api.FileEntry](ctx, c, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "stat"}, query: q})
}

// ListFiles lists a directory of the sandbox and depth-1 levels below it, sorted by path. It
// returns at most 10,000 entries and reports whether there are more; [Client.ListEachFile] has no
// limit.
func (c *Client) ListFiles(ctx context.Context, id, path string, depth int) (*api.FileList, error) {
	out := new(api.FileList)
	if err := c.call(ctx, listRequest(id, path, depth), 2*maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// ListEachFile calls on for every entry as the sandbox reports it. A directory precedes its
// entries; the order is otherwise arbitrary. More reports omissions, as in [api.FileList]. An error
// of on ends the list.
func (c *Client) ListEachFile(ctx context.Context, id, path string, depth int, on func(api.FileEntry) error) (more bool, err error) {
	whole := false
	err = c.lines(ctx, listRequest(id, path, depth), func(line []byte) error {
		var e api.ListEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode an entry: %w", err)
		}
		switch {
		case e.Error != nil:
			return e.Error
		case e.Done:
			whole, more = true, e.More
			return errEnd
		case e.Entry != nil:
			return on(*e.Entry)
		}
		return nil
	})
	if err == nil && !whole {
		err = errors.New("the daemon sent an incomplete list")
	}
	return more, err
}

func listRequest(id, path string, depth int) request {
	q := url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}}
	return request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "list"}, query: q}
}

// MakeDirectory makes a directory in the sandbox.
func (c *Client) MakeDirectory(ctx context.Context, id string, req api.MakeDirectory) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "mkdir"}, json: req}, maxAnswer, nil)
}

// MoveFile renames a file or a directory in the sandbox.
func (c *Client) MoveFile(ctx context.Context, id string, req api.MoveFile) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "move"}, json: req}, maxAnswer, nil)
}

// WatchFiles calls on for every change at path and, if recursive is set, below it; the first event
// is [api.WatchReady]. It returns nil when path itself is gone, else when ctx ends or on returns an
// error. A watch does not count as use of the sandbox, which idles regardless.
func (c *Client) WatchFiles(ctx context.Context, id, path string, recursive bool, on func(api.FileChange) error) error {
	q := url.Values{"path": {path}}
	if recursive {
		q.Set("recursive", "true")
	}
	r := request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "watch"}, query: q}
	return c.lines(ctx, r, func(line []byte) error {
		var e api.FileChange
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode a change: %w", err)
		}
		if e.Error != nil {
			return e.Error
		}
		return on(e)
	})
}

// ArchiveOut returns a tar stream of the file or tree at path, with names relative to path. The
// caller closes it. The sandbox controls its content: never extract it by path or through links.
func (c *Client) ArchiveOut(ctx context.Context, id, path string) (io.ReadCloser, error) {
	return c.download(ctx, readRequest(id, "archive", path, api.TypeTar, ""))
}

// ArchiveIn extracts a tar stream below path, inside the sandbox. It creates path.
func (c *Client) ArchiveIn(ctx context.Context, id, path string, r io.Reader) error {
	return c.upload(ctx, id, "archive", url.Values{"path": {path}}, api.TypeTar, r)
}

// ArchiveInOwned is [Client.ArchiveIn] for an archive whose files keep the owners that it states,
// where the sandbox has several ids.
func (c *Client) ArchiveInOwned(ctx context.Context, id, path string, r io.Reader) error {
	return c.upload(ctx, id, "archive", url.Values{"path": {path}, "owners": {"true"}}, api.TypeTar, r)
}

// readRequest returns a request for the content at path, or for the range span of it.
func readRequest(id, route, path, typ, span string) request {
	return request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, route}, query: url.Values{"path": {path}}, accept: typ, span: span}
}

func (c *Client) upload(ctx context.Context, id, route string, q url.Values, typ string, r io.Reader) error {
	if r == nil {
		r = http.NoBody
	}
	return c.call(ctx, request{
		method: http.MethodPut, path: []string{"v1", "sandboxes", id, route}, query: q, body: readOnly(r), typ: typ,
	}, maxAnswer, nil)
}
