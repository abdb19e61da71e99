package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/faces/facesock"
	"github.com/sandboxd/sandboxd/faces/mcp"
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
the directory of the daemon's socket, as "Authorization: Bearer TOKEN".`,
		Example: `  claude mcp add sandbox -- sandboxd mcp --image python:3 --network egress:pypi
  sandboxd mcp --memory 1g --timeout 2m
  sandboxd mcp --listen 127.0.0.1:7600 --listen unix:/run/user/1000/mcp.sock`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := opts.face(cmd.Context(), cmd.Flags().Changed)
			if err != nil {
				return err
			}
			return runMCP(cmd.Context(), opts.listen, o, d)
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

// face returns the options of the face. changed is as for [sandboxFlags.request].
func (o *mcpOptions) face(ctx context.Context, changed func(string) bool) (mcp.Options, error) {
	image := ""
	if len(o.images) > 0 && o.snapshot == "" {
		image, o.images = o.images[0], o.images[1:]
	}
	req, err := o.request(ctx, image, changed)
	if err != nil {
		return mcp.Options{}, err
	}
	if err := o.main(&req, nil, false, false, false); err != nil {
		return mcp.Options{}, err
	}
	for _, l := range o.listen {
		if err := checkMCPAddress(l); err != nil {
			return mcp.Options{}, err
		}
	}
	return mcp.Options{Sandbox: req, Images: o.images, Timeout: time.Duration(float64(o.timeout) * float64(time.Second))}, nil
}

// checkMCPAddress refuses addresses that other hosts reach: the token travels in clear.
func checkMCPAddress(where string) error {
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

// mcpListener is a place at which the face serves HTTP.
type mcpListener struct {
	net.Listener

	token string // that clients must have; empty: the listener knows its clients
}

func runMCP(ctx context.Context, places []string, o mcp.Options, d deps) error {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	info, err := c.System(ctx)
	c.Close()
	if err != nil {
		return err
	}
	socket, err := filepath.Abs(d.SocketPath())
	if err != nil {
		return err
	}
	var listeners []mcpListener
	defer func() {
		for _, l := range listeners {
			_ = l.Close() // serving has reported
		}
	}()
	for _, where := range places {
		l, err := listenMCP(ctx, where, filepath.Dir(socket))
		if err != nil {
			return fmt.Errorf("listen on %s: %w", where, err)
		}
		listeners = append(listeners, l)
	}
	if o.URLs, err = new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
		return fmt.Errorf("listen for ports of sandboxes: %w", err)
	}
	// A model decides what this process reads from now on.
	held, missing, err := confineFace(socket)
	if err != nil {
		return fmt.Errorf("serve MCP: %w", err)
	}
	defer held.Close()
	log := slog.New(slog.NewTextHandler(d.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("face", "mcp")
	for _, m := range missing {
		log.Warn("not enforced on this host", "what", m)
	}
	c = client.New(socket)
	defer c.Close()
	o.Client, o.Version, o.Log = c, d.version, log
	o.HostPaths = []string{info.DataDir, filepath.Dir(info.Socket), filepath.Dir(socket)}
	face := mcp.New(o)
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
	if _, ok := errors.AsType[cmdline.Signalled](context.Cause(ctx)); ok {
		return nil // a requested end
	}
	return context.Cause(ctx)
}

// listenMCP listens at a place that [checkMCPAddress] has accepted. The token lies in dir.
func listenMCP(ctx context.Context, where, dir string) (mcpListener, error) {
	if path, ok := strings.CutPrefix(where, "unix:"); ok {
		path, err := filepath.Abs(path)
		if err != nil {
			return mcpListener{}, err
		}
		l, err := facesock.Listen(ctx, path)
		return mcpListener{l, ""}, err
	}
	token, err := mcpToken(filepath.Join(dir, "mcp.token"))
	if err != nil {
		return mcpListener{}, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", where)
	return mcpListener{l, token}, err
}

// mcpToken reads the token that clients need, or makes one if there is none. Other users must be
// able neither to read the file nor to choose it.
func mcpToken(path string) (string, error) {
	made := rand.Text()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		_, err = f.WriteString(made + "\n")
		return made, errors.Join(err, f.Close())
	}
	if !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make a token: %w", err)
	}
	if f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0); err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return "", fmt.Errorf("%s: not a file of yours that only you can read; remove it, and a new one is made", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if len(token) < 20 {
		return "", fmt.Errorf("%s: a token has at least 20 characters; remove it, and a new one is made", path)
	}
	return token, nil
}
