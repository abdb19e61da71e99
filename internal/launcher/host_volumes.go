package launcher

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/sandboxd/sandboxd/runtime"
)

var _ runtime.Volumer = (*Client)(nil)

// RemoveVolume implements [runtime.Volumer].
func (c *Client) RemoveVolume(ctx context.Context, id string) error {
	return c.remove(ctx, &request{Op: opVolume, Volume: &volumeRequest{Action: volumeRemove, ID: id}})
}

// MeasureVolume implements [runtime.Volumer].
func (c *Client) MeasureVolume(ctx context.Context, id string) (runtime.VolumeUsage, error) {
	resp, err := c.ask(ctx, &request{Op: opVolume, Volume: &volumeRequest{Action: volumeMeasure, ID: id}})
	if err != nil {
		return runtime.VolumeUsage{}, err
	}
	if resp.Usage == nil {
		return runtime.VolumeUsage{}, errors.New("launcher volume: empty answer")
	}
	return *resp.Usage, nil
}

// WriteVolume implements [runtime.Volumer].
func (c *Client) WriteVolume(ctx context.Context, id string, w io.Writer) (runtime.DiffResult, error) {
	return c.stream(ctx, &request{Op: opVolume, Volume: &volumeRequest{Action: volumeRead, ID: id}}, func(r io.Reader) error {
		_, err := io.Copy(w, r)
		return err
	})
}

// FillVolume implements [runtime.Volumer].
func (c *Client) FillVolume(ctx context.Context, id string, r *os.File, limit runtime.VolumeUsage) (runtime.DiffResult, error) {
	resp, err := c.ask(ctx, &request{Op: opVolume, Volume: &volumeRequest{Action: volumeWrite, ID: id, Limit: limit}}, r)
	if err != nil {
		return runtime.DiffResult{}, err
	}
	if resp.Layer == nil {
		return runtime.DiffResult{}, errors.New("launcher volume: empty answer")
	}
	return runtime.DiffResult(*resp.Layer), nil
}
