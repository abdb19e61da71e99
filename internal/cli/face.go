package cli

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/faces/docker"
	"github.com/sandboxd/sandboxd/faces/facesock"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/netns/policy"
)

type faceOptions struct {
	listen  string
	network string
	tied    bool
}

func newFace(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "face",
		Short: "Serve the API of another program, for its clients",
		Args:  cmdline.UsageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newFaceDocker(d), newFaceSimpleSandbox(d))
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newFaceDocker(d deps) *cobra.Command {
	var opts faceOptions
	cmd := &cobra.Command{
		Use:   "docker",
		Short: "Serve Docker's API, for programs that are written for Docker",
		Long: `Serve Docker's API on a Unix socket, as a client of the running daemon. Programs
find it by DOCKER_HOST. "sandboxd serve --docker" starts it with the daemon.

  sandboxd face docker --listen unix:/run/user/1000/docker.sock
  DOCKER_HOST=unix:///run/user/1000/docker.sock docker run --rm alpine id`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runFaceDocker(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *faceOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", "", "Unix socket to serve, `unix:PATH`; required")
	f.StringVar(&o.network, "network", "none", "`network` of containers in Docker's bridge: none, full, or a policy as egress:POLICY takes it")
	f.BoolVar(&o.tied, flagTied, false, "")
	_ = f.MarkHidden(flagTied) // the daemon's own, when it starts a face
}

// flagTied has a face end with its [facesock.Tie].
const flagTied = "tied"

// bridgeNetwork returns the network that a name of the operator means.
func bridgeNetwork(name string) (api.Network, error) {
	switch name {
	case "", string(api.NetworkNone):
		return api.Network{Mode: api.NetworkNone}, nil
	case string(api.NetworkFull):
		return api.Network{Mode: api.NetworkFull}, nil
	}
	document, err := cmdline.PolicyDocument(strings.TrimPrefix(name, string(api.NetworkEgress)+":"), policy.Named)
	if err != nil {
		return api.Network{}, err
	}
	return api.Network{Mode: api.NetworkEgress, Policy: string(document)}, nil
}

func runFaceDocker(ctx context.Context, opts faceOptions, d deps) error {
	path, ok := strings.CutPrefix(opts.listen, "unix:")
	path = strings.TrimPrefix(path, "//")
	if !ok || path == "" {
		return cmdline.Usagef("--listen %q: want unix:PATH", opts.listen)
	}
	network, err := bridgeNetwork(opts.network)
	if err != nil {
		return cmdline.Usagef("--network %q: %v", opts.network, err)
	}
	if opts.tied {
		var cancel context.CancelFunc
		ctx, cancel = facesock.Tied(ctx)
		defer cancel()
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return err
	}
	l, err := facesock.Listen(ctx, path)
	if err != nil {
		return err
	}
	defer l.Close()
	socket := d.Client().Socket()
	held, missing, err := facesock.Confine(socket)
	if err != nil {
		return fmt.Errorf("serve Docker's API: %w", err)
	}
	defer held.Close()
	log := slog.New(slog.NewTextHandler(d.Stderr, nil)).With("face", "docker")
	for _, m := range missing {
		log.Warn("not enforced on this host", "what", m)
	}
	c := client.New(socket)
	defer c.Close()
	log.Info("Docker's API is served", "socket", path)
	return docker.New(docker.Options{Client: c, Version: d.version, Network: network, Log: log}).Serve(ctx, l)
}
