package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/faces/facesock"
	"github.com/sandboxd/sandboxd/faces/simplesandbox"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type simpleSandboxOptions struct {
	sandboxFlags

	image   string
	timeout cmdline.Seconds
	listen  string
}

func newFaceSimpleSandbox(d deps) *cobra.Command {
	var opts simpleSandboxOptions
	cmd := &cobra.Command{
		Use:   "simple-sandbox [flags]",
		Short: "Serve the HTTP routes of simple_sandbox, a small E2B-like server",
		Long: `Serve the HTTP routes of simple_sandbox at an address of this host, as a client of
the running daemon: /sandbox/create, /sandbox/{id}/execute, install, upload, files,
download and close, /sandboxes and /health.

The flags describe the sandboxes, which are all alike. They live for a day, unless
--lifetime says otherwise, and stay when this command ends.

Clients must send the token that lies in simple-sandbox.token, in the directory of
the daemon's socket, as "Authorization: Bearer TOKEN" or as the password of a URL.
If that directory is another user's, the token is in your own runtime directory.`,
		Example: `  sandboxd face simple-sandbox --listen 127.0.0.1:8000 --memory 1g --network egress:pypi
  curl -X POST -H "Authorization: Bearer $(cat /run/user/1000/sandboxd/simple-sandbox.token)" http://127.0.0.1:8000/sandbox/create`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := opts.face(cmd.Context(), cmd.Flags().Changed)
			if err != nil {
				return err
			}
			return runFaceSimpleSandbox(cmd.Context(), opts.listen, o, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *simpleSandboxOptions) addFlags(f *pflag.FlagSet) {
	o.sandboxFlags.addFlags(f)
	for name, usage := range map[string]string{
		"cwd":          "working `directory`, which clients' paths are relative to (default: /sandbox); also --workdir",
		"idle-timeout": "stop a sandbox after this time without a request (default: 24h)",
		"lifetime":     "maximum lifetime of a sandbox, or never (default: 24h)",
	} {
		f.Lookup(name).Usage = usage
	}
	f.Lookup("name").Hidden = true // it is refused
	o.timeout = 3600
	f.StringVar(&o.image, "image", "", "`image` of the sandboxes, with Python (default: host)")
	f.Var(&o.timeout, "timeout", "interrupt code that runs longer than this")
	f.StringVar(&o.listen, "listen", "127.0.0.1:8000", "`address` of this host's loopback to serve")
}

// face returns the options of the face. changed is as for [sandboxFlags.request].
func (o *simpleSandboxOptions) face(ctx context.Context, changed func(string) bool) (simplesandbox.Options, error) {
	if o.name != "" {
		return simplesandbox.Options{}, cmdline.Usagef("--name %s: there are many sandboxes, and no two have one name", o.name)
	}
	if strings.HasPrefix(o.listen, "unix:") {
		return simplesandbox.Options{}, cmdline.Usagef("--listen %q: want a loopback address with a port", o.listen)
	}
	if err := checkFaceAddress(o.listen); err != nil {
		return simplesandbox.Options{}, err
	}
	req, err := o.request(ctx, o.image, changed)
	if err != nil {
		return simplesandbox.Options{}, err
	}
	if err := o.main(&req, nil, false, false, false); err != nil {
		return simplesandbox.Options{}, err
	}
	return simplesandbox.Options{Sandbox: req, Timeout: time.Duration(float64(o.timeout) * float64(time.Second))}, nil
}

func runFaceSimpleSandbox(ctx context.Context, where string, o simplesandbox.Options, d deps) error {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	c.Close()
	socket, err := filepath.Abs(d.SocketPath())
	if err != nil {
		return err
	}
	token, err := facesock.TokenPath(socket, "simple-sandbox.token")
	if err != nil {
		return err
	}
	if o.Token, err = facesock.Token(token); err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", where)
	if err != nil {
		return err
	}
	defer l.Close()
	held, missing, err := facesock.Confine(socket)
	if err != nil {
		return fmt.Errorf("serve simple_sandbox's routes: %w", err)
	}
	defer held.Close()
	o.Log = slog.New(slog.NewTextHandler(d.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("face", "simple-sandbox")
	for _, m := range missing {
		o.Log.Warn("not enforced on this host", "what", m)
	}
	o.Client = client.New(socket)
	defer o.Client.Close()
	fmt.Fprintf(d.Stderr, "sandboxd: clients need the token in %s\n", token)
	fmt.Fprintf(d.Stderr, "sandboxd: simple_sandbox's routes are served at http://%s\n", l.Addr())
	if err := simplesandbox.New(o).Serve(ctx, l); err != nil {
		return err
	}
	if _, ok := errors.AsType[cmdline.Signalled](context.Cause(ctx)); ok {
		return nil // a requested end
	}
	return context.Cause(ctx)
}
