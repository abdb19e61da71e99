// Package cmdline is the frame that the command lines of sandboxd and sandboxd-agent share: exit
// codes, flag types, output for people and programs, and the connection to a daemon, which it
// starts if none is running.
package cmdline

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Deps holds what commands work with.
type Deps struct {
	Stdin, Stdout, Stderr *os.File
	// Program returns the path of sandboxd, to start a daemon with.
	Program func() (string, error)

	socket *string // the --socket flag
}

// SocketFlag returns the value of --socket.
func (d Deps) SocketFlag() string { return *d.socket }

// SocketPath returns the daemon's socket: the flag, else SANDBOXD_SOCKET, else the default.
func (d Deps) SocketPath() string {
	if *d.socket != "" {
		return *d.socket
	}
	return client.DefaultSocket()
}

// WithSocket returns deps whose --socket flag has the value, for commands without a command line.
func (d Deps) WithSocket(path string) Deps {
	d.socket = &path
	return d
}

// Client returns a client for the daemon, running or not. Daemon also starts one.
func (d Deps) Client() *client.Client { return client.New(d.SocketPath()) }

// NewRoot prepares the root command, and the deps for its subcommands.
func NewRoot(d Deps, root *cobra.Command) (Deps, *cobra.Command) {
	d.socket = new(string)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentFlags().StringVar(d.socket, "socket", "", "the daemon's Unix `socket` (default: $SANDBOXD_SOCKET, else in the runtime directory)")
	root.SetIn(d.Stdin)
	root.SetOut(d.Stdout)
	root.SetErr(d.Stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &UsageError{FlagError(err)} })
	root.SetUsageTemplate(root.UsageTemplate() + exitStatusTemplate)
	ExitStatus(root, ExitPlain)
	return d, root
}

// CreateSandbox creates a sandbox, and pulls its image first if the daemon does not have it.
// Progress goes to stderr.
//
// A signal does not interrupt the request. It takes milliseconds, and after an interrupted one the
// caller would not know whether there is a sandbox to delete.
func CreateSandbox(ctx context.Context, c *client.Client, req api.CreateSandbox, stderr *os.File) (*api.Sandbox, error) {
	return createSandbox(ctx, c, req, stderr, c.CreateSandbox)
}

// CreateTied is [CreateSandbox] for a sandbox that the daemon deletes when the caller closes tie,
// or dies.
func CreateTied(ctx context.Context, c *client.Client, req api.CreateSandbox, stderr *os.File) (sb *api.Sandbox, tie io.Closer, err error) {
	sb, err = createSandbox(ctx, c, req, stderr, func(ctx context.Context, req api.CreateSandbox) (sb *api.Sandbox, err error) {
		sb, tie, err = c.CreateTied(ctx, req)
		return sb, err
	})
	return sb, tie, err
}

func createSandbox(ctx context.Context, c *client.Client, req api.CreateSandbox, stderr *os.File, create func(context.Context, api.CreateSandbox) (*api.Sandbox, error)) (*api.Sandbox, error) {
	sb, err := create(context.WithoutCancel(ctx), req)
	if !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || req.Image == "" || req.Image == api.HostImage {
		return sb, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p := NewProgress(stderr)
	_, perr := c.Pull(ctx, api.PullImage{Reference: req.Image}, p.Event)
	p.End()
	if perr != nil {
		return nil, perr
	}
	return create(context.WithoutCancel(ctx), req)
}
