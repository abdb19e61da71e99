package agent

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Client is a [Sandbox] behind the daemon's socket.
type Client struct {
	api *client.Client
	id  string
}

// NewClient is the sandbox of that id behind c. It must exist.
func NewClient(c *client.Client, id string) *Client { return &Client{api: c, id: id} }

// OpenClient is the sandbox of that id or name, running: one that has stopped is started, one that is paused resumed. It is given
// that much time from now on. A sandbox that does not exist is an [*api.Problem] of [api.CodeNotFound].
func OpenClient(ctx context.Context, c *client.Client, ref string, lifetime time.Duration) (*Client, error) {
	sb, err := c.GetSandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	switch sb.State {
	case api.StateStopped, api.StateLost:
		sb, err = c.StartSandbox(ctx, sb.ID, api.StartSandbox{Timeout: lifetime.Seconds()})
	case api.StatePaused:
		sb, err = c.ResumeSandbox(ctx, sb.ID)
	case api.StateCreating, api.StateRunning:
	}
	if err != nil {
		return nil, err
	}
	if _, err := c.UpdateSandbox(ctx, sb.ID, api.UpdateSandbox{Timeout: lifetime.Seconds()}); err != nil {
		return nil, err
	}
	return NewClient(c, sb.ID), nil
}

// ID is the sandbox's id.
func (c *Client) ID() string { return c.id }

// Exec runs a program and streams its output: a buffered answer would keep the beginning only, and both ends matter.
func (c *Client) Exec(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (Outcome, error) {
	end, err := c.api.ExecStream(ctx, c.id, req, func(e api.ExecEvent) error {
		w := stdout
		if e.Stream == "stderr" {
			w = stderr
		}
		if len(e.Data) > 0 {
			if _, err := w.Write(e.Data); err != nil {
				return fmt.Errorf("keep the output: %w", err)
			}
		}
		if e.Text != "" {
			if _, err := io.WriteString(w, e.Text); err != nil {
				return fmt.Errorf("keep the output: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{Exit: end.Exit, Usage: end.Usage}, nil
}

// ReadFile opens a regular file.
func (c *Client) ReadFile(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.api.ReadFile(ctx, c.id, path)
}

// WriteFile writes a file whole or not at all.
func (c *Client) WriteFile(ctx context.Context, path string, r io.Reader, mode fs.FileMode, user string) error {
	return c.api.WriteFile(ctx, c.id, path, r, mode, user)
}

// ArchiveIn extracts a tar stream below path.
func (c *Client) ArchiveIn(ctx context.Context, path string, r io.Reader) error {
	return c.api.ArchiveIn(ctx, c.id, path, r)
}

// ArchiveOut gives the tree at path as a tar stream.
func (c *Client) ArchiveOut(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.api.ArchiveOut(ctx, c.id, path)
}

// listDepth is deeper than any tree that a run is likely to leave; what is below is collected and checked all the same.
const listDepth = 64

// List lists what is below a directory.
func (c *Client) List(ctx context.Context, path string, on func(api.FileEntry) error) (more bool, err error) {
	return c.api.ListEachFile(ctx, c.id, path, listDepth, on)
}

// CPU asks the kernel's count.
func (c *Client) CPU(ctx context.Context) (used time.Duration, known bool, err error) {
	stats, err := c.api.Stats(ctx, c.id)
	if err != nil || stats.CPU == nil || stats.CPU.UsageMS == nil {
		return 0, false, err
	}
	return time.Duration(*stats.CPU.UsageMS * float64(time.Millisecond)), true, nil
}

// Snapshot takes one.
func (c *Client) Snapshot(ctx context.Context, comment string) (string, error) {
	s, err := c.api.TakeSnapshot(ctx, c.id, api.TakeSnapshot{Comment: comment, Labels: map[string]string{"sandboxd.agent": "turn"}})
	if err != nil {
		return "", err
	}
	return s.ID, nil
}

// Delete ends and removes the sandbox.
func (c *Client) Delete(ctx context.Context) error { return c.api.DeleteSandbox(ctx, c.id) }
