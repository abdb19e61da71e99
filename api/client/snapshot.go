package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// TakeSnapshot snapshots the files of a sandbox. When it returns, the snapshot is on disk.
func (c *Client) TakeSnapshot(ctx context.Context, id string, req api.TakeSnapshot) (*api.Snapshot, error) {
	return fetch[api.Snapshot](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "snapshots"}, json: req})
}

// Snapshots returns the snapshots of one sandbox, or with an empty id all of them, oldest first.
func (c *Client) Snapshots(ctx context.Context, id string) ([]api.Snapshot, error) {
	path := []string{"v1", "snapshots"}
	if id != "" {
		path = []string{"v1", "sandboxes", id, "snapshots"}
	}
	var out api.SnapshotList
	err := c.call(ctx, request{method: http.MethodGet, path: path}, maxAnswer, &out)
	return out.Snapshots, err
}

// Snapshot returns one snapshot by its ID or name.
func (c *Client) Snapshot(ctx context.Context, ref string) (*api.Snapshot, error) {
	return fetch[api.Snapshot](ctx, c, request{method: http.MethodGet, path: []string{"v1", "snapshots", ref}})
}

// RemoveSnapshot removes a snapshot. Sandboxes that were created from it are not affected.
func (c *Client) RemoveSnapshot(ctx context.Context, ref string) (*api.SnapshotRemoved, error) {
	return fetch[api.SnapshotRemoved](ctx, c, request{method: http.MethodDelete, path: []string{"v1", "snapshots", ref}})
}

// PruneSnapshots removes snapshots that no sandbox depends on.
func (c *Client) PruneSnapshots(ctx context.Context, req api.PruneSnapshots) (*api.SnapshotsRemoved, error) {
	return fetch[api.SnapshotsRemoved](ctx, c, request{method: http.MethodPost, path: []string{"v1", "snapshots", "prune"}, json: req})
}

// Fork creates sandboxes with the current files of another. It creates all of them, or returns an
// error and creates none.
func (c *Client) Fork(ctx context.Context, id string, req api.ForkSandbox) (*api.SandboxForked, error) {
	return fetch[api.SandboxForked](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "fork"}, json: req})
}

// Rollback replaces the files of a sandbox by those of a snapshot.
func (c *Client) Rollback(ctx context.Context, id string, req api.RollbackSandbox) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "rollback"}, json: req})
}

// ExportSnapshot returns a snapshot as a tar with its layers and the name and digest of its image.
// The caller closes it. Reading fails with io.ErrUnexpectedEOF if the daemon could not send all of
// it.
func (c *Client) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	return c.download(ctx, request{method: http.MethodGet, path: []string{"v1", "snapshots", ref, "export"}, accept: api.TypeTar})
}

// ImportSnapshot sends an archive from [Client.ExportSnapshot]. Its image must be stored. An empty
// name keeps the snapshot's own.
func (c *Client) ImportSnapshot(ctx context.Context, r io.Reader, name string) (*api.Snapshot, error) {
	q := url.Values{}
	if name != "" {
		q.Set("name", name)
	}
	return fetch[api.Snapshot](ctx, c, request{
		method: http.MethodPost, path: []string{"v1", "snapshots", "import"}, query: q, body: readOnly(r), typ: api.TypeTar,
	})
}
