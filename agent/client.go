package agent

import (
	"context"
	"fmt"
	"io"
	"io/fs"

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

// Delete ends and removes the sandbox.
func (c *Client) Delete(ctx context.Context) error { return c.api.DeleteSandbox(ctx, c.id) }
