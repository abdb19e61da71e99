package cmdline

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// NetworkUsage is the help text of flags of type [Network].
const NetworkUsage = "`network`: none, full, egress:POLICY with a policy file or presets such as pypi,npm, sandbox:SANDBOX to share that one's, or net:NAME, whose sandboxes reach each other; repeatable"

// Network is a flag for the network of a sandbox: "none", "full", "egress:PRESET,…", "egress:FILE",
// "sandbox:ID", of which the last counts, and "net:NAME", of which all do. A file is read and
// checked by Set.
type Network struct {
	network api.Network // without Join
	text    string
	joined  []string
}

func (n *Network) String() string {
	all := []string{cmp.Or(n.text, string(api.NetworkNone))}
	for _, name := range n.joined {
		all = append(all, joinPrefix+name)
	}
	return strings.Join(all, " ")
}

const joinPrefix = "net:"

// Type implements pflag.Value.
func (n *Network) Type() string { return "network" }

// Set implements pflag.Value.
func (n *Network) Set(text string) error {
	if name, ok := strings.CutPrefix(text, joinPrefix); ok {
		if name == "" {
			return errors.New("net needs the name of a network, as in net:backend")
		}
		n.joined = append(n.joined, name)
		return nil
	}
	mode, name, _ := strings.Cut(text, ":")
	switch {
	case text == string(api.NetworkNone), text == string(api.NetworkFull):
		n.network, n.text = api.Network{Mode: api.NetworkMode(text)}, text
		return nil
	case mode == string(api.NetworkSandbox) && name == "":
		return errors.New("sandbox needs the id or name of one that runs: as in sandbox:work")
	case mode == string(api.NetworkSandbox):
		n.network, n.text = api.Network{Mode: api.NetworkSandbox, Sandbox: name}, text
		return nil
	case mode != string(api.NetworkEgress):
		return fmt.Errorf("%q is no network of a sandbox: want none, full, egress:POLICY, sandbox:SANDBOX or net:NAME; it never has the host's", text)
	case name == "":
		return fmt.Errorf("egress needs a policy, a file or some of %s: as in egress:pypi,npm", strings.Join(policy.Presets(), ", "))
	}
	document, err := PolicyDocument(name, policy.Named)
	if err != nil {
		return err
	}
	if _, err := policy.Parse(document); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	n.network, n.text = api.Network{Mode: api.NetworkEgress, Policy: string(document)}, text
	return nil
}

// Value returns the network that the flag names; without a value it is none.
func (n *Network) Value() api.Network {
	net := n.network
	net.Mode, net.Join = cmp.Or(net.Mode, api.NetworkNone), slices.Clone(n.joined)
	return net
}

// With returns the network with a maximum of bytes that leave, if flag, the flag of that name, is
// given.
func (n *Network) With(egress *Size, flag string) (api.Network, error) {
	net := n.Value()
	if egress.Given && (net.Mode == api.NetworkNone && len(net.Join) == 0 || net.Mode == api.NetworkSandbox) {
		return net, Usagef("%s is for a sandbox with a network of its own; see --network", flag)
	}
	net.Budget.BytesOut = egress.Bytes
	return net, nil
}

// PolicyDocument returns the policy that a user names: presets joined by commas, of which named
// makes a document, or a file, whose name has a slash or a dot.
func PolicyDocument(name string, named func(list string) ([]byte, error)) ([]byte, error) {
	if !strings.ContainsAny(name, "./") {
		doc, err := named(name)
		if err != nil {
			return nil, fmt.Errorf("%w; the name of a file has a slash or a dot", err)
		}
		return doc, nil
	}
	f, err := os.Open(filepath.Clean(name))
	if err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	defer f.Close()
	return ReadPolicy(f)
}

// ReadPolicy reads a policy document, at most a little more than [policy.Parse] takes.
func ReadPolicy(r io.Reader) ([]byte, error) {
	doc, err := io.ReadAll(io.LimitReader(r, 2<<20))
	if err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	return doc, nil
}
