package cli

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/faces/mcp/handoff"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type mcpOptions struct {
	sandboxFlags

	images  []string
	timeout cmdline.Seconds
	listen  []string
}

func newMCP(d deps) *cobra.Command {
	var opts mcpOptions
	cmd := &cobra.Command{
		Use:   "mcp [flags]",
		Short: "Offer sandboxes to language models, as tools over MCP",
		Long: `Serve the Model Context Protocol on stdin and stdout, for programs such as Claude
Code, Cursor and VS Code that start it: their models run commands and work on files
in sandboxes. With --listen it serves many clients over HTTP instead.

The flags describe a session's own sandbox, and are the most that a model can have:
no tool chooses an image, a network, a mount or a profile beyond them. Sandboxes are
removed when their session ends, also when this command is killed.

At an address of this host clients must send the token that lies in mcp.token, in
the directory of the daemon's socket, as "Authorization: Bearer TOKEN". If that
directory is another user's, the token is in your own runtime directory.`,
		Example: `  claude mcp add sandbox -- sandboxd mcp --image python:3 --network egress:pypi
  sandboxd mcp --memory 1g --timeout 2m
  sandboxd mcp --listen 127.0.0.1:7600 --listen unix:/run/user/1000/mcp.sock`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := opts.face(cmd.Context(), cmd.Flags().Changed)
			if err != nil {
				return err
			}
			if r.Socket, err = filepath.Abs(d.SocketPath()); err != nil {
				return err
			}
			r.Version = d.version
			return r.Exec()
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *mcpOptions) addFlags(f *pflag.FlagSet) {
	o.sandboxFlags.addFlags(f)
	f.StringArrayVar(&o.images, "image", nil, "`image` of a session's own sandbox (default: host); repeatable: the others are those that a model may choose")
	f.Var(&o.timeout, "timeout", "stop a command and all its children after this time, unless it runs in the background (default: 10m)")
	f.StringArrayVar(&o.listen, "listen", nil, "serve HTTP at an `address` of this host's loopback, as in 127.0.0.1:7600, or at unix:PATH; repeatable (default: stdin and stdout)")
}

// face returns the request of the face, without version and socket. changed is as for
// [sandboxFlags.request].
func (o *mcpOptions) face(ctx context.Context, changed func(string) bool) (r handoff.Request, err error) {
	r = handoff.Request{Images: o.images, Timeout: time.Duration(float64(o.timeout) * float64(time.Second)), Listen: o.listen}
	image := ""
	if len(r.Images) > 0 && o.snapshot == "" {
		image, r.Images = r.Images[0], r.Images[1:]
	}
	if r.Sandbox, err = o.request(ctx, image, changed); err != nil {
		return r, err
	}
	if err := o.main(&r.Sandbox, nil, false, false, false); err != nil {
		return r, err
	}
	for _, l := range o.listen {
		if err := checkFaceAddress(l); err != nil {
			return r, err
		}
	}
	return r, nil
}

// daemonMCP returns the request of the face that the daemon starts, which serves socket. The flags
// are those of "sandboxd mcp", each as NAME=VALUE.
func daemonMCP(flags []string, socket string) (*handoff.Request, error) {
	var opts mcpOptions
	f := pflag.NewFlagSet("mcp", pflag.ContinueOnError)
	opts.addFlags(f)
	for _, text := range flags {
		name, value, given := strings.Cut(text, "=")
		if flag := f.Lookup(name); flag != nil && !given {
			value = flag.NoOptDefVal
		}
		if err := f.Set(name, value); err != nil {
			return nil, cmdline.Usagef("--mcp-flag %q: %w", text, err)
		}
	}
	r, err := opts.face(context.Background(), f.Changed)
	if err != nil {
		return nil, cmdline.Usagef("--mcp-flag: %w", err)
	}
	r.Listen, r.Tied = append([]string{"unix:" + socket}, r.Listen...), true
	return &r, nil
}

// checkFaceAddress refuses addresses that other hosts reach: the token travels in clear.
func checkFaceAddress(where string) error {
	if path, ok := strings.CutPrefix(where, "unix:"); ok {
		if path == "" {
			return cmdline.Usagef("--listen %q: want unix:PATH", where)
		}
		return nil
	}
	host, _, err := net.SplitHostPort(where)
	if err != nil {
		return cmdline.Usagef("--listen %q: want an address with a port, or unix:PATH", where)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return cmdline.Usagef("--listen %q: only loopback addresses, such as 127.0.0.1:7600: the token travels as it is", where)
	}
	return nil
}
