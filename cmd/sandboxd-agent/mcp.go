package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/faces/facesock"
	"github.com/sandboxd/sandboxd/faces/mcp"
	"github.com/sandboxd/sandboxd/faces/mcp/handoff"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// newMCP returns the command that `sandboxd mcp` executes: the other side of package handoff.
func newMCP(d cmdline.Deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:    handoff.Command + " DESCRIPTOR",
		Short:  "Serve the request of sandboxd mcp",
		Hidden: true,
		Args:   cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := handoff.Read(args[0])
			if err != nil {
				return &cmdline.UsageError{Err: err}
			}
			return runMCP(cmd.Context(), r, d.WithSocket(r.Socket))
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// mcpListener is a place at which the face serves HTTP.
type mcpListener struct {
	net.Listener

	token string // that clients must have; empty: the listener knows its clients
}

func runMCP(ctx context.Context, r handoff.Request, d cmdline.Deps) error {
	daemon := d.Daemon
	if r.Tied {
		var cancel context.CancelFunc
		ctx, cancel = facesock.Tied(ctx)
		defer cancel()
		daemon = func(context.Context) (*client.Client, error) { return d.Client(), nil } // it is starting
	}
	c, err := daemon(ctx)
	if err != nil {
		return err
	}
	info, err := c.System(ctx)
	c.Close()
	if err != nil {
		return err
	}
	var listeners []mcpListener
	defer func() {
		for _, l := range listeners {
			_ = l.Close() // serving has reported
		}
	}()
	for _, where := range r.Listen {
		l, err := listenMCP(ctx, where, r.Socket)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", where, err)
		}
		listeners = append(listeners, l)
	}
	urls, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for ports of sandboxes: %w", err)
	}
	// A model decides what this process reads from now on.
	held, missing, err := facesock.Confine(r.Socket)
	if err != nil {
		return fmt.Errorf("serve MCP: %w", err)
	}
	defer held.Close()
	log := slog.New(slog.NewTextHandler(d.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("face", "mcp")
	for _, m := range missing {
		log.Warn("not enforced on this host", "what", m)
	}
	c = d.Client()
	defer c.Close()
	face := mcp.New(mcp.Options{
		Client: c, Version: r.Version, Sandbox: r.Sandbox, Images: r.Images, Timeout: r.Timeout, Tied: r.Tied, URLs: urls, Log: log,
		HostPaths: []string{info.DataDir, filepath.Dir(info.Socket), filepath.Dir(r.Socket)},
	})
	defer face.Close()
	if len(listeners) == 0 {
		if err := face.ServeStdio(ctx, d.Stdin, d.Stdout); err != nil {
			return fmt.Errorf("serve MCP: %w", err)
		}
		return context.Cause(ctx)
	}
	return serveMCP(ctx, face, listeners, d.Stderr)
}

// serveMCP serves all listeners until one fails or ctx ends.
func serveMCP(ctx context.Context, face *mcp.Server, listeners []mcpListener, stderr io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var serving sync.WaitGroup
	for _, l := range listeners {
		if at := l.Addr(); at.Network() == "unix" {
			fmt.Fprintln(stderr, "sandboxd: MCP is served at a Unix socket, path "+mcp.Path)
		} else {
			fmt.Fprintf(stderr, "sandboxd: MCP is served at http://%s%s\n", at, mcp.Path)
		}
		serving.Go(func() {
			if err := face.ServeHTTP(ctx, l, l.token); err != nil {
				cancel(err)
			}
		})
	}
	<-ctx.Done()
	serving.Wait()
	err := context.Cause(ctx)
	if _, ok := errors.AsType[cmdline.Signalled](err); ok || errors.Is(err, context.Canceled) {
		return nil // a requested end, or the daemon's
	}
	return err
}

// listenMCP listens at a place that sandboxd has accepted, for a client of the daemon at socket.
func listenMCP(ctx context.Context, where, socket string) (mcpListener, error) {
	if path, ok := strings.CutPrefix(where, "unix:"); ok {
		path, err := filepath.Abs(path)
		if err != nil {
			return mcpListener{}, err
		}
		l, err := facesock.Listen(ctx, path)
		return mcpListener{l, ""}, err
	}
	path, err := facesock.TokenPath(socket, "mcp.token")
	if err != nil {
		return mcpListener{}, err
	}
	token, err := facesock.Token(path)
	if err != nil {
		return mcpListener{}, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", where)
	return mcpListener{l, token}, err
}
