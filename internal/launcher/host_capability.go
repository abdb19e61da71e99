package launcher

import (
	"context"
	"io"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
)

// The client offers every ability that an engine may have.
var (
	_ runtime.Differ          = (*Client)(nil)
	_ runtime.DescriptorStore = (*Client)(nil)
	_ runtime.Describer       = (*Client)(nil)
	_ runtime.Shutdowner      = (*Client)(nil)
)

// diffRequest translates a request into that of the protocol.
func diffRequest(req *runtime.DiffRequest) DiffRequest {
	l := &req.Limits
	return DiffRequest{
		ID: req.ID, Rootfs: req.Rootfs, Layer: req.Layer, Freeze: req.Freeze, Latest: req.Latest, Holes: req.Holes,
		Limits: layer.Limits{
			Entries: l.Entries, Bytes: l.Bytes, Below: layer.Usage{Entries: l.BelowEntries, Bytes: l.BelowBytes},
			Ratio: l.Ratio, RatioFloor: l.RatioFloor, Depth: l.Depth, Name: l.Name,
		},
	}
}

// WriteDiff implements [runtime.Differ].
func (c *Client) WriteDiff(ctx context.Context, req runtime.DiffRequest, w io.Writer) (runtime.DiffResult, error) {
	result, err := c.Diff(ctx, diffRequest(&req), w)
	return runtime.DiffResult(result), err
}

// ListDiff implements [runtime.Differ].
func (c *Client) ListDiff(ctx context.Context, req runtime.DiffRequest, found func(api.Change) error) (runtime.DiffResult, error) {
	result, err := c.Changes(ctx, diffRequest(&req), found)
	return runtime.DiffResult(result), err
}

// StoreDiff implements [runtime.Differ].
func (c *Client) StoreDiff(ctx context.Context, req runtime.DiffRequest, chainID string) (runtime.DiffResult, bool, error) {
	result, frozen, err := c.Snapshot(ctx, SnapshotRequest{Diff: diffRequest(&req), ChainID: chainID})
	return runtime.DiffResult(result), frozen, err
}

// StoreDescriptors implements [runtime.DescriptorStore].
func (c *Client) StoreDescriptors(ctx context.Context, set runtime.DescriptorSet) error {
	return c.Deposit(ctx, set)
}

// StoredDescriptors implements [runtime.DescriptorStore].
func (c *Client) StoredDescriptors(ctx context.Context) ([]runtime.DescriptorSet, error) {
	return c.Withdraw(ctx)
}

// DropDescriptors implements [runtime.DescriptorStore].
func (c *Client) DropDescriptors(ctx context.Context, sandbox, name string) error {
	return c.Drop(ctx, sandbox, name)
}

// Describe implements [runtime.Describer].
func (c *Client) Describe(ctx context.Context) (runtime.Description, error) {
	info, err := c.Info(ctx)
	if err != nil {
		return runtime.Description{}, err
	}
	return runtime.Description{PID: info.PID, Version: info.Version, Enforced: info.Enforced}, nil
}
