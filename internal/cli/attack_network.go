package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// nothingAllowed is the policy of attacked sandboxes.
const nothingAllowed = "version: 1\nrules: []\n"

// attackedServers are servers of this host that attacks look for: on its loopback, and at an
// abstract Unix socket.
type attackedServers struct {
	servers []net.Listener
	env     []string // tells attacks where the servers are
}

func openAttackedServers(ctx context.Context) (*attackedServers, error) {
	n := new(attackedServers)
	for _, at := range []struct{ network, address string }{{"tcp4", "127.0.0.1:0"}, {"unix", ""}} { // of the kernel's choice
		l, err := new(net.ListenConfig).Listen(ctx, at.network, at.address)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("start a server to attack: %w", err), n.Close())
		}
		n.servers = append(n.servers, l)
		go attack.Answer(l)
	}
	port, socket := n.servers[0].Addr().(*net.TCPAddr).Port, n.servers[1].Addr().String() //nolint:forcetypeassert // of the network tcp4
	n.env = []string{attack.PortVariable + "=" + strconv.Itoa(port), attack.SocketVariable + "=" + socket}
	return n, nil
}

// Close ends the servers.
func (n *attackedServers) Close() error {
	var errs []error
	for _, l := range n.servers {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// networkWatch reads the record of an attacked sandbox's network while it is written.
type networkWatch struct {
	read    chan error // gets the end of reading
	refused int
	passed  []string
}

// watchNetwork checks that the network works, without which no attack on it proves anything, and
// begins to read its record.
func watchNetwork(ctx context.Context, c *client.Client, id string, env []string) (*networkWatch, error) {
	stopped, err := tryAttacks([]string{attack.UpName}, func(group []string) (*api.ExecResult, error) {
		return c.Exec(ctx, id, attempt(env, group...))
	})
	if err != nil {
		return nil, fmt.Errorf("check that the network works: %w", err)
	}
	if by := stopped[attack.UpName]; by != "" {
		return nil, fmt.Errorf("the network does not work, and attacks on it would prove nothing: %s", by)
	}
	w := &networkWatch{read: make(chan error, 1)}
	go func() {
		w.read <- c.Flows(ctx, id, true, -1, func(f api.Flow) error {
			w.add(&f)
			return nil
		})
	}()
	return w, nil
}

func (w *networkWatch) add(f *api.Flow) {
	switch {
	case f.Kind == api.FlowRestart:
		w.passed = append(w.passed, "the gateway was started again")
	case f.Lost > 0:
		w.passed = append(w.passed, fmt.Sprintf("%d entries of the record were lost", f.Lost))
	case !f.Allow:
		w.refused++
	case f.Kind == api.FlowConnection && f.Protocol == "dns": // ended at the gateway, which answers questions itself
	default:
		w.passed = append(w.passed, fmt.Sprintf("%s %s %s", f.Kind, f.Name, net.JoinHostPort(f.Address, strconv.Itoa(int(f.Port)))))
	}
}

// judge ends the sandbox, so that its record is complete, and reads the rest.
func (w *networkWatch) judge(ctx context.Context, c *client.Client, id string, p *attackedProfile) error {
	ctx = context.WithoutCancel(ctx)
	if _, err := c.StopSandbox(ctx, id, api.StopSandbox{}); err != nil {
		return fmt.Errorf("stop the sandbox for its record: %w", err)
	}
	if err := <-w.read; err != nil {
		return fmt.Errorf("read the record of the network: %w", err)
	}
	mode := api.NetworkEgress
	p.Network, p.Refused, p.Passed = &mode, w.refused, w.passed
	return nil
}

// printNetwork prints the entries of the network's record that allowed anything, and the number of
// refusals.
func (p *attackedProfile) printNetwork(w io.Writer) error {
	if p.Network == nil {
		return nil
	}
	for _, passed := range p.Passed {
		if _, err := fmt.Fprintf(w, "  PASSED THE POLICY: %s\n", cmdline.Printable(passed)); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "  network %s: %d refusals are in its record\n", *p.Network, p.Refused)
	return err
}
