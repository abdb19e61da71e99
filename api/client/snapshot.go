package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// TakeSnapshot keeps what a sandbox has in its files. When it returns, that is on disk.
func (c *Client) TakeSnapshot(ctx context.Context, id string, req api.TakeSnapshot) (*api.Snapshot, error) {
	out := new(api.Snapshot)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "snapshots"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Snapshots lists snapshots, oldest first: those of one sandbox, or with an empty id all.
func (c *Client) Snapshots(ctx context.Context, id string) ([]api.Snapshot, error) {
	path := []string{"v1", "snapshots"}
	if id != "" {
		path = []string{"v1", "sandboxes", id, "snapshots"}
	}
	var out api.SnapshotList
	err := c.call(ctx, request{method: http.MethodGet, path: path}, maxAnswer, &out)
	return out.Snapshots, err
}

// Snapshot returns one by its id or name.
func (c *Client) Snapshot(ctx context.Context, ref string) (*api.Snapshot, error) {
	out := new(api.Snapshot)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "snapshots", ref}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// RemoveSnapshot takes one away. Sandboxes that were made of it go on.
func (c *Client) RemoveSnapshot(ctx context.Context, ref string) (*api.SnapshotRemoved, error) {
	out := new(api.SnapshotRemoved)
	if err := c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "snapshots", ref}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// PruneSnapshots removes snapshots that no sandbox stands on.
func (c *Client) PruneSnapshots(ctx context.Context, req api.PruneSnapshots) (*api.SnapshotsRemoved, error) {
	out := new(api.SnapshotsRemoved)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "snapshots", "prune"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Fork makes new sandboxes with the files that one has now: all that were asked for or, with an error, none.
func (c *Client) Fork(ctx context.Context, id string, req api.ForkSandbox) (*api.SandboxForked, error) {
	out := new(api.SandboxForked)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "fork"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Rollback gives a sandbox the files of a snapshot in the place of its own.
func (c *Client) Rollback(ctx context.Context, id string, req api.RollbackSandbox) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "rollback"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// ExportSnapshot returns a snapshot as one file, a tar with its layers and the name and digest of its image. The caller closes
// it; reading fails with io.ErrUnexpectedEOF where the daemon could not send all of it.
func (c *Client) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	resp, err := c.do(ctx, request{method: http.MethodGet, path: []string{"v1", "snapshots", ref, "export"}, accept: api.TypeTar})
	if err != nil {
		return nil, err
	}
	if t := mediaType(resp); t != api.TypeTar {
		defer resp.Body.Close()
		return nil, notOurs(resp, read(resp.Body, 200))
	}
	return resp.Body, nil
}

// ImportSnapshot sends what [Client.ExportSnapshot] has returned. The image must be stored there. An empty name leaves the snapshot
// the one that it has.
func (c *Client) ImportSnapshot(ctx context.Context, r io.Reader, name string) (*api.Snapshot, error) {
	q := url.Values{}
	if name != "" {
		q.Set("name", name)
	}
	out := new(api.Snapshot)
	body := struct{ io.Reader }{r} // as in ImportImages
	err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "snapshots", "import"}, query: q, body: body, typ: api.TypeTar}, maxAnswer, out)
	if err != nil {
		return nil, err
	}
	return out, nil
}
