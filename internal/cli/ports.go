package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// parsePorts reads values of --publish: [[ADDRESS:]HOSTPORT:]PORT[/tcp|udp], or unix:NAME:PORT.
func parsePorts(values []string) ([]api.PortMapping, error) {
	var ports []api.PortMapping
	for _, v := range values {
		m, err := parsePort(v)
		if err != nil {
			return nil, cmdline.Usagef("--publish %q: %v; want [[ADDRESS:]HOSTPORT:]PORT[/udp], such as 8080:80, or unix:NAME:PORT", v, err)
		}
		ports = append(ports, m)
	}
	return ports, nil
}

func parsePort(v string) (m api.PortMapping, err error) {
	host, inside := "", v
	if i := strings.LastIndexByte(v, ':'); i >= 0 {
		host, inside = v[:i], v[i+1:]
	}
	inside, m.Protocol, _ = strings.Cut(inside, "/")
	if m.Protocol != "" && m.Protocol != "tcp" && m.Protocol != "udp" {
		return m, fmt.Errorf("%q is neither tcp nor udp", m.Protocol)
	}
	if m.Port, err = portNumber(inside); err != nil {
		return m, err
	}
	if name, ok := strings.CutPrefix(host, "unix:"); ok {
		if m.Socket = name; name == "" {
			return m, errors.New("the socket has no name")
		}
		return m, nil
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		m.Address, host = strings.Trim(host[:i], "[]"), host[i+1:]
	}
	if host != "" {
		m.HostPort, err = portNumber(host)
	}
	return m, err
}

func portNumber(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is no port number", text)
	}
	return uint16(n), nil
}

func newPort(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "port SANDBOX",
		Short: "List the published ports of a sandbox",
		Long: `List the published ports of a sandbox: each port, and where it is at this host: an
address with a port, or the path of a Unix socket.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			sb, err := c.GetSandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			for _, p := range sb.Ports {
				at := "unix:" + p.Socket
				if p.Socket == "" {
					at = net.JoinHostPort(p.Address, strconv.Itoa(int(p.HostPort)))
				}
				fmt.Fprintf(d.Stdout, "%d/%s -> %s\n", p.Port, p.Protocol, cmdline.Printable(at))
			}
			return nil
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newOpen(d deps) *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use:   "open [flags] SANDBOX PORT",
		Short: "Make a port of a sandbox reachable at this host until Ctrl-C",
		Long: `Make a server that runs in a sandbox reachable at an address of this host, and print
its URL. Any protocol over TCP works, not only HTTP. With unix:PATH it is a new Unix
socket that only you can open. It ends with Ctrl-C.`,
		Example: `  sandboxd open work 8000
  sandboxd open --listen 127.0.0.1:5432 db 5432
  sandboxd open --listen unix:./db.sock db 5432`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := portNumber(args[1])
			if err != nil {
				return cmdline.Usagef("%v", err)
			}
			return runOpen(cmd.Context(), args[0], port, listen, d)
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "`address` to listen on, with a port, of which 0 is one that is free; or unix:PATH")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runOpen(ctx context.Context, id string, port uint16, listen string, d deps) error {
	c := d.Client()
	defer c.Close()
	if _, err := c.GetSandbox(ctx, id); err != nil {
		return err
	}
	l, err := listenOn(ctx, listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", listen, err)
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	if l.Addr().Network() == "unix" {
		fmt.Fprintln(d.Stdout, listen)
	} else {
		fmt.Fprintf(d.Stdout, "http://%s/\n", l.Addr())
	}
	var open sync.WaitGroup
	defer open.Wait()
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection: %w", err)
		}
		open.Go(func() {
			if err := forward(ctx, c, conn, id, port); err != nil && ctx.Err() == nil {
				fmt.Fprintf(d.Stderr, "sandboxd: %v\n", err)
			}
		})
	}
}

// listenOn listens on an address with a port, or on a new Unix socket of our user, which Close
// removes.
func listenOn(ctx context.Context, where string) (net.Listener, error) {
	path, ok := strings.CutPrefix(where, "unix:")
	if !ok {
		return new(net.ListenConfig).Listen(ctx, "tcp", where)
	}
	if path == "" || path[0] == '@' { // an abstract socket is open to all users
		return nil, errors.New("a Unix socket needs a path")
	}
	config := net.ListenConfig{Control: unixmsg.OwnerOnly}
	return config.Listen(ctx, "unix", path)
}

// forward passes a connection on to a port of a sandbox.
func forward(ctx context.Context, c *client.Client, outside net.Conn, id string, port uint16) error {
	defer outside.Close()
	inside, err := c.DialPort(ctx, id, port)
	if err != nil {
		return err
	}
	relay.Both(ctx, outside, inside)
	return nil
}
