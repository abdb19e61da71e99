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

// NewClient returns the existing sandbox with this ID.
func NewClient(c *client.Client, id string) *Client { return &Client{api: c, id: id} }

// OpenClient returns the running sandbox with this ID or name. It starts a stopped sandbox and
// resumes a paused one, and sets its remaining lifetime. If the sandbox does not exist, the error
// is an [*api.Problem] of [api.CodeNotFound].
func OpenClient(ctx context.Context, c *client.Client, ref string, lifetime time.Duration) (*Client, error) {
	sb, err := waitCreated(ctx, c, ref)
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

// createTimeout bounds the wait for a sandbox that a killed process has requested; createPoll is
// the polling interval.
const (
	createTimeout = time.Minute
	createPoll    = 50 * time.Millisecond
)

// waitCreated returns a sandbox once its creation is over. Until then the daemon refuses all
// operations on it, deletion included.
func waitCreated(ctx context.Context, c *client.Client, ref string) (*api.Sandbox, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, createTimeout, fmt.Errorf("it is still being created after %v", createTimeout))
	defer cancel()
	tick := time.NewTicker(createPoll)
	defer tick.Stop()
	for {
		sb, err := c.GetSandbox(ctx, ref)
		if err != nil || sb.State != api.StateCreating {
			return sb, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the sandbox %s: %w", ref, context.Cause(ctx))
		}
	}
}

// RemoveLabelled deletes the sandboxes that have all of these labels.
func RemoveLabelled(ctx context.Context, c *client.Client, labels map[string]string) error {
	var opts client.ListOptions
	for key, value := range labels {
		opts.Labels = append(opts.Labels, key+"="+value)
	}
	list, err := c.ListSandboxes(ctx, opts)
	if err != nil {
		return err
	}
	for i := range list {
		if err := RemoveSandbox(ctx, c, list[i].ID); err != nil {
			return err
		}
	}
	return nil
}

// RemoveSandbox deletes the sandbox with this ID in any state. A missing one is no error.
func RemoveSandbox(ctx context.Context, c *client.Client, id string) error {
	_, err := waitCreated(ctx, c, id)
	if err == nil {
		err = c.DeleteSandbox(ctx, id)
	}
	if hasCode(err, api.CodeNotFound) {
		err = nil
	}
	return err
}

// ID returns the sandbox's ID.
func (c *Client) ID() string { return c.id }

// Exec runs a program and streams its output: a buffered answer would keep the beginning only, and
// both ends matter.
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

// WriteFile writes a file as a whole or not at all.
func (c *Client) WriteFile(ctx context.Context, path string, r io.Reader, mode fs.FileMode, user string) error {
	return c.api.WriteFile(ctx, c.id, path, r, mode, user)
}

// ArchiveIn extracts a tar stream below path.
func (c *Client) ArchiveIn(ctx context.Context, path string, r io.Reader) error {
	return c.api.ArchiveIn(ctx, c.id, path, r)
}

// ArchiveOut returns the tree at path as a tar stream.
func (c *Client) ArchiveOut(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.api.ArchiveOut(ctx, c.id, path)
}

// listDepth exceeds the depth of any likely output. Deeper files are collected and checked all the
// same.
const listDepth = 64

// List lists the tree below a directory.
func (c *Client) List(ctx context.Context, path string, on func(api.FileEntry) error) (more bool, err error) {
	return c.api.ListEachFile(ctx, c.id, path, listDepth, on)
}

// CPU returns the kernel's count.
func (c *Client) CPU(ctx context.Context) (used time.Duration, known bool, err error) {
	stats, err := c.api.Stats(ctx, c.id)
	if err != nil || stats.CPU == nil || stats.CPU.UsageMS == nil {
		return 0, false, err
	}
	return time.Duration(*stats.CPU.UsageMS * float64(time.Millisecond)), true, nil
}

// turnLabel with the value turnValue marks snapshots of turns.
const turnLabel, turnValue = "sandboxd.agent", "turn"

// Snapshot takes a snapshot and returns its ID.
func (c *Client) Snapshot(ctx context.Context, comment string) (string, error) {
	s, err := c.api.TakeSnapshot(ctx, c.id, api.TakeSnapshot{Comment: comment, Labels: map[string]string{turnLabel: turnValue}})
	if err != nil {
		return "", err
	}
	return s.ID, nil
}

// stopGrace is the time in seconds for background programs of a run to end.
const stopGrace = 2

// Stop ends all processes of the sandbox and keeps its files.
func (c *Client) Stop(ctx context.Context) error {
	grace := float64(stopGrace)
	_, err := c.api.StopSandbox(ctx, c.id, api.StopSandbox{Grace: &grace})
	return err
}

// Delete ends and removes the sandbox.
func (c *Client) Delete(ctx context.Context) error { return c.api.DeleteSandbox(ctx, c.id) }
