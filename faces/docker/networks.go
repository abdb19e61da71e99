package docker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"

	"github.com/sandboxd/sandboxd/api"
)

// The networks that are always there. A container in bridge has the operator's network. It is in
// the daemon's network of that name only where that makes a difference.
const (
	bridgeNetwork = "bridge"
	noneNetwork   = "none"
)

const noAddresses = "the daemon chooses addresses, from 198.18.0.0/15; containers find each other by name"

func isPredefined(name string) bool { return name == bridgeNetwork || name == noneNetwork }

// networkID returns the ID of a network, which is that of its name: containers refer to names.
func networkID(name string) string {
	sum := sha256.Sum256([]byte("network " + name))
	return hex.EncodeToString(sum[:])
}

// networks returns all networks: the predefined ones first.
func (f *Face) networks(ctx context.Context) ([]api.NamedNetwork, error) {
	all, err := f.api.NamedNetworks(ctx)
	if err != nil {
		return nil, err
	}
	out := []api.NamedNetwork{{Name: bridgeNetwork}, {Name: noneNetwork}}
	for i := range all {
		if all[i].Name == bridgeNetwork {
			out[0] = all[i]
			continue
		}
		out = append(out, all[i])
	}
	return out, nil
}

// findNetwork returns the network with a name, an ID, or the beginning of one.
func (f *Face) findNetwork(ctx context.Context, ref string) (*api.NamedNetwork, error) {
	all, err := f.networks(ctx)
	if err != nil {
		return nil, err
	}
	var found *api.NamedNetwork
	for i := range all {
		n := &all[i]
		if id := networkID(n.Name); n.Name == ref || id == ref {
			return n, nil
		} else if !isHex(ref) || !strings.HasPrefix(id, ref) {
			continue
		}
		if found != nil {
			return nil, badf("network %s is ambiguous (2 matches found on name)", clip(ref))
		}
		found = n
	}
	if found == nil {
		return nil, statusf(http.StatusNotFound, "network %s not found", clip(ref))
	}
	return found, nil
}

// networkLabel is the label of a network with the parts of Docker's request that change nothing
// here.
const networkLabel = reserved + "docker-network"

// networkRequest is the value of networkLabel, as JSON.
type networkRequest struct {
	Options    map[string]string `json:"options,omitempty"`
	Attachable bool              `json:"attachable,omitempty"`
}

// networkDoc describes a network. A list is without containers.
func (f *Face) networkDoc(n *api.NamedNetwork, list bool) map[string]any {
	containers := map[string]any{}
	for i := range n.Sandboxes {
		m := &n.Sandboxes[i]
		if list || m.State != api.StateRunning {
			continue
		}
		address := ""
		if m.Address != "" {
			address = m.Address + "/15"
		}
		containers[containerID(m.ID)] = map[string]string{"Name": m.Name, "EndpointID": networkID(n.Name + m.ID), "MacAddress": "", "IPv4Address": address, "IPv6Address": ""}
	}
	driver := "bridge"
	if n.Name == noneNetwork {
		driver = "null"
	}
	asked := networkRequest{Options: map[string]string{}}
	_ = json.Unmarshal([]byte(n.Labels[networkLabel]), &asked) // absent, or of another client
	labels := map[string]string{}
	for k, v := range n.Labels {
		if !strings.HasPrefix(k, reserved) {
			labels[k] = v
		}
	}
	created := n.CreatedAt
	if isPredefined(n.Name) {
		created = f.began // as in Docker
	}
	return map[string]any{
		"Name": n.Name, "Id": networkID(n.Name), "Created": timeText(created), "Scope": "local", "Driver": driver, "EnableIPv4": true, "EnableIPv6": false,
		"IPAM":     map[string]any{"Driver": "default", "Options": nil, "Config": []any{}},
		"Internal": n.Internal || f.opts.Network.Mode == api.NetworkNone || f.opts.Network.Mode == "", "Attachable": asked.Attachable, "Ingress": false,
		"ConfigFrom": map[string]string{"Network": ""}, "ConfigOnly": false, "Containers": containers, "Options": asked.Options, "Labels": labels,
	}
}

func (c *call) getNetworks() error {
	want, err := c.filters("dangling", "driver", "id", "label", "label!", "name", "scope", "type")
	if err != nil {
		return err
	}
	for _, w := range want["type"] {
		if w != "builtin" && w != "custom" {
			return badf("invalid filter: 'type'='%s'", clip(w))
		}
	}
	for _, w := range want["dangling"] {
		if w != "true" && w != "1" && w != "false" && w != "0" {
			return badf("invalid value for filter 'dangling', must be \"true\" (or \"1\"), or \"false\" (or \"0\")")
		}
	}
	all, err := c.f.networks(c.ctx())
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for i := range all {
		n := &all[i]
		doc := c.f.networkDoc(n, true)
		custom := !isPredefined(n.Name)
		if want.has("name", func(w string) bool { return matchName(w, n.Name) }) && want.has("id", func(w string) bool { return strings.HasPrefix(networkID(n.Name), w) }) &&
			want.has("driver", func(w string) bool { return doc["Driver"] == w }) && want.has("scope", func(w string) bool { return w == "local" }) && want.labels(n.Labels) &&
			want.has("type", func(w string) bool { return w == "builtin" && !custom || w == "custom" && custom }) &&
			want.has("dangling", func(w string) bool { return truth(w) == (custom && len(n.Sandboxes) == 0) }) {
			out = append(out, doc)
		}
	}
	return c.json(http.StatusOK, out)
}

func (c *call) getNetwork() error {
	n, err := c.f.findNetwork(c.ctx(), c.args[0])
	if err != nil {
		return err
	}
	if scope := c.q.Get("scope"); scope != "" && scope != "local" {
		return statusf(http.StatusNotFound, "network %s not found", clip(c.args[0]))
	}
	return c.json(http.StatusOK, c.f.networkDoc(n, false))
}

// harmlessOptions are options of Docker's bridge that make no difference here, with the values that
// do not; "" stands for all.
var harmlessOptions = map[string]string{
	"com.docker.network.driver.mtu": "", "com.docker.network.bridge.name": "", "com.docker.network.bridge.enable_icc": "true",
	"com.docker.network.bridge.enable_ip_masquerade": "true", "com.docker.network.enable_ipv6": "false",
}

// checkNetworkRequest refuses what no network has.
func checkNetworkRequest(req *network.CreateRequest) error {
	no := func(field, why string) error {
		return statusf(http.StatusForbidden, "network %s: %s: %s", clip(req.Name), field, why)
	}
	switch {
	case req.Driver != "" && req.Driver != "bridge" && req.Driver != "default":
		return no(fmt.Sprintf("Driver %q", clip(req.Driver)), "the daemon connects containers itself; bridge is the one driver")
	case req.Scope != "" && req.Scope != "local", req.Ingress, req.ConfigOnly, req.ConfigFrom != nil && req.ConfigFrom.Network != "":
		return no("Scope", noSwarms)
	case req.EnableIPv6 != nil && *req.EnableIPv6, req.EnableIPv4 != nil && !*req.EnableIPv4:
		return no("EnableIPv6", "containers reach each other over IPv4")
	}
	if ipam := req.IPAM; ipam != nil {
		if len(ipam.Config) > 0 || len(ipam.Options) > 0 || ipam.Driver != "" && ipam.Driver != "default" {
			return no("IPAM", noAddresses)
		}
	}
	for name, value := range req.Options {
		if only, ok := harmlessOptions[name]; !ok || only != "" && only != value {
			return no(fmt.Sprintf("Options %q", clip(name)), "a network has no options of a driver")
		}
	}
	return checkLabels(req.Labels)
}

func (c *call) postNetwork() error {
	var req network.CreateRequest
	if err := c.read(&req, false); err != nil {
		return err
	}
	if isPredefined(req.Name) || req.Name == "host" || req.Name == "default" {
		return statusf(http.StatusForbidden, "operation is not permitted on predefined %s network", req.Name)
	}
	if err := checkNetworkRequest(&req); err != nil {
		return err
	}
	labels := req.Labels
	if len(req.Options) > 0 || req.Attachable {
		asked, err := json.Marshal(networkRequest{req.Options, req.Attachable})
		if err != nil {
			return err
		}
		labels = map[string]string{networkLabel: string(asked)}
		maps.Copy(labels, req.Labels) // which has none that is reserved
	}
	made, err := c.f.api.CreateNetwork(c.ctx(), api.CreateNetwork{Name: req.Name, Labels: labels, Internal: req.Internal})
	if errors.Is(err, &api.Problem{Code: api.CodeExists}) {
		return statusf(http.StatusConflict, "network with name %s already exists", req.Name)
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, map[string]string{"Id": networkID(made.Name), "Warning": ""})
}

func (c *call) deleteNetwork() error {
	n, err := c.f.findNetwork(c.ctx(), c.args[0])
	if err != nil {
		return err
	}
	if isPredefined(n.Name) {
		return statusf(http.StatusForbidden, "%s is a pre-defined network and cannot be removed", n.Name)
	}
	err = c.f.api.RemoveNetwork(c.ctx(), n.Name)
	if errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		var in []string
		for i := range n.Sandboxes {
			in = append(in, fmt.Sprintf("name:%q id:%q", n.Sandboxes[i].Name, containerID(n.Sandboxes[i].ID)[:12]))
		}
		return statusf(http.StatusForbidden, "error while removing network: network %s has active endpoints (%s), of containers that run or are stopped", n.Name, strings.Join(in, ", "))
	}
	if err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

// postNetworksPrune removes networks that no container is in, running or not.
func (c *call) postNetworksPrune() error {
	want, err := c.filters("until", "label", "label!")
	if err != nil {
		return err
	}
	until, err := untilOf(want)
	if err != nil {
		return err
	}
	all, err := c.f.networks(c.ctx())
	if err != nil {
		return err
	}
	var deleted []string
	for i := range all {
		n := &all[i]
		if isPredefined(n.Name) || len(n.Sandboxes) > 0 || n.CreatedAt.After(until) || api.Kept(n.Labels) || !want.labels(n.Labels) {
			continue
		}
		err := c.f.api.RemoveNetwork(c.ctx(), n.Name)
		switch {
		case err == nil:
			deleted = append(deleted, n.Name)
		case errors.Is(err, &api.Problem{Code: api.CodeConflict}), errors.Is(err, &api.Problem{Code: api.CodeNotFound}): // by now
		default:
			return err
		}
	}
	return c.json(http.StatusOK, map[string]any{"NetworksDeleted": deleted})
}

func (c *call) postConnect() error {
	var req network.ConnectRequest
	if err := c.read(&req, false); err != nil {
		return err
	}
	n, sb, err := c.f.networkAndContainer(c.ctx(), c.args[0], req.Container)
	if err != nil {
		return err
	}
	aliases, err := aliasesOf(n.Name, req.EndpointConfig, requestOf(sb).Hostname)
	if err != nil {
		return err
	}
	aliases = slices.DeleteFunc(aliases, func(a string) bool { // of digits alone, perhaps, which is no host name
		return len(a) == 12 && strings.HasPrefix(containerID(sb.ID), a)
	})
	in := networksOf(sb, netip.Addr{})
	switch {
	case in[noneNetwork] != nil || n.Name == noneNetwork:
		return badf("container cannot be connected to multiple networks with one of the networks in private (none) mode")
	case in[n.Name] != nil && (sb.State == api.StateRunning || sb.State == api.StatePaused):
		return statusf(http.StatusForbidden, "endpoint with name %s already exists in network %s", sb.Name, n.Name)
	case in[n.Name] != nil && n.Name == bridgeNetwork:
		return c.none(http.StatusOK)
	case in[bridgeNetwork] != nil && len(sb.Network.Join) == 0: // it stays in it, which a list of networks has to say
		_, err := c.f.api.CreateNetwork(c.ctx(), api.CreateNetwork{Name: bridgeNetwork})
		if err == nil || errors.Is(err, &api.Problem{Code: api.CodeExists}) {
			err = c.f.api.ConnectNetwork(c.ctx(), bridgeNetwork, api.ConnectNetwork{Sandbox: sb.ID})
		}
		if err != nil {
			return err
		}
	}
	if err := c.f.api.ConnectNetwork(c.ctx(), n.Name, api.ConnectNetwork{Sandbox: sb.ID, Aliases: aliases}); err != nil {
		return err
	}
	if err := c.f.setMode(c.ctx(), sb, &c.f.opts.Network); err != nil { // it was in no network, perhaps
		return err
	}
	return c.none(http.StatusOK)
}

func (c *call) postDisconnect() error {
	var req network.DisconnectRequest
	if err := c.read(&req, false); err != nil {
		return err
	}
	n, sb, err := c.f.networkAndContainer(c.ctx(), c.args[0], req.Container)
	if err != nil {
		return err
	}
	switch {
	case networksOf(sb, netip.Addr{})[n.Name] == nil:
		return statusf(http.StatusForbidden, "container %s is not connected to the network %s", containerID(sb.ID), n.Name)
	case isPredefined(n.Name) && !slices.Contains(sb.Network.Join, n.Name), len(sb.Network.Join) == 1 && defaultNetwork(sb) != "":
		return statusf(http.StatusForbidden, "container %s cannot leave bridge: create it with --network none, or in another network", sb.Name)
	case len(sb.Network.Join) == 1: // while it is in the network: without one, it has no way out to change
		if err := c.f.setMode(c.ctx(), sb, &api.Network{Mode: api.NetworkNone}); err != nil {
			return err
		}
	}
	err = c.f.api.DisconnectNetwork(c.ctx(), n.Name, api.DisconnectNetwork{Sandbox: sb.ID})
	if err != nil && len(sb.Network.Join) == 1 && !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) { // it is in the network yet
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx()), restoreWait)
		defer cancel()
		was := api.Network{Mode: sb.Network.Mode, Policy: sb.Network.Policy}
		sb.Network.Mode = api.NetworkNone
		err = errors.Join(err, c.f.setMode(ctx, sb, &was))
	}
	if err != nil {
		return err
	}
	return c.none(http.StatusOK)
}

// restoreWait bounds the return to a container's way out. A client that has gone does not stop it.
const restoreWait = 10 * time.Second

// setMode changes the way out of a container.
func (f *Face) setMode(ctx context.Context, sb *api.Sandbox, to *api.Network) error {
	if cmp.Or(sb.Network.Mode, api.NetworkNone) == cmp.Or(to.Mode, api.NetworkNone) {
		return nil
	}
	_, err := f.api.UpdateSandbox(ctx, sb.ID, api.UpdateSandbox{Network: to})
	return err
}

// networkAndContainer finds both ends of a connection.
func (f *Face) networkAndContainer(ctx context.Context, ref, of string) (*api.NamedNetwork, *api.Sandbox, error) {
	n, err := f.findNetwork(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	sb, err := f.find(ctx, of)
	if err != nil {
		return nil, nil, err
	}
	if sb.Network.Mode == api.NetworkSandbox {
		return nil, nil, badf("container sharing network namespace with another container or host cannot be connected to any other network")
	}
	return n, sb, nil
}

// checkNetworks returns an error if a container that is about to start names a network that neither
// was made nor has another container.
func (f *Face) checkNetworks(ctx context.Context, sb *api.Sandbox) error {
	if len(sb.Network.Join) == 0 {
		return nil
	}
	all, err := f.networks(ctx)
	if err != nil {
		return err
	}
	for i := range all {
		n := &all[i]
		others := slices.ContainsFunc(n.Sandboxes, func(m api.NetworkMember) bool { return m.ID != sb.ID })
		if slices.Contains(sb.Network.Join, n.Name) && !isPredefined(n.Name) && n.CreatedAt.IsZero() && !others {
			return statusf(http.StatusNotFound, "network %s not found", n.Name)
		}
	}
	return nil
}

// aliasesOf returns the names by which others in a network find a container, beside its own. As in
// Docker its hostname is one.
func aliasesOf(name string, e *network.EndpointSettings, hostname string) ([]string, error) {
	var out []string
	if isHostLabel(hostname) {
		out = append(out, hostname)
	}
	if e == nil {
		return out, nil
	}
	no := func(field, why string) error {
		return statusf(http.StatusForbidden, "network %s: %s: %s", clip(name), field, why)
	}
	switch ip := e.IPAMConfig; {
	case ip != nil && (ip.IPv4Address.IsValid() || ip.IPv6Address.IsValid() || len(ip.LinkLocalIPs) > 0):
		return nil, no("IPAMConfig", noAddresses)
	case len(e.MacAddress) > 0:
		return nil, no("MacAddress", noAddresses)
	case len(e.Links) > 0:
		return nil, no("Links", "containers in one network reach each other by name")
	case len(e.DriverOpts) > 0:
		return nil, no("DriverOpts", "a network has no options of a driver")
	}
	for _, a := range e.Aliases {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out, nil
}

// isHostLabel reports whether a name is a label of host names, and not one that resolvers read as a
// number.
func isHostLabel(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "-") == s && !strings.HasPrefix(s, "0x") && strings.Trim(s, "0123456789") != "" &&
		!strings.ContainsFunc(s, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
		})
}

// nameWarnings returns the warning about a container that others in its networks do not find by its
// name.
func nameWarnings(sb *api.CreateSandbox) []string {
	if len(sb.Network.Join) == 0 || sb.Name == "" || isHostLabel(sb.Name) {
		return nil
	}
	return []string{fmt.Sprintf("The name %s is no label of a host name: other containers find this one by its hostname and aliases only.", sb.Name)}
}

// networkOf translates networks and ports.
func (f *Face) networkOf(ctx context.Context, sb *api.CreateSandbox, req *container.CreateRequest) error {
	mode := string(req.HostConfig.NetworkMode)
	var endpoints map[string]*network.EndpointSettings
	if req.NetworkingConfig != nil {
		endpoints = req.NetworkingConfig.EndpointsConfig
	}
	if _, ok := endpoints["host"]; ok || mode == "host" {
		return refuse("NetworkMode", "host")
	}
	switch {
	case mode == noneNetwork, req.NetworkDisabled:
		sb.Network.Mode = api.NetworkNone
		return nil
	case strings.HasPrefix(mode, "container:"):
		other, err := f.find(ctx, strings.TrimPrefix(mode, "container:"))
		if err != nil {
			return err
		}
		sb.Network = api.Network{Mode: api.NetworkSandbox, Sandbox: other.ID}
		return nil
	}
	sb.Network = f.opts.Network
	var err error
	if sb.Network.Join, sb.Network.Aliases, err = f.joined(ctx, mode, endpoints, req.Hostname); err != nil {
		return err
	}
	ports, err := portsOf(req.HostConfig.PortBindings)
	if err != nil {
		return err
	}
	sb.Ports = ports
	if len(ports) > 0 && !sb.Network.HasGateway() {
		sb.Network.Join = []string{bridgeNetwork} // a network without a way out, whose ports can be published
	}
	return nil
}

// joined returns the daemon's networks that a container is to be in, with its aliases there. That
// of NetworkMode is the first.
func (f *Face) joined(ctx context.Context, mode string, endpoints map[string]*network.EndpointSettings, hostname string) (join []string, aliases map[string][]string, err error) {
	bridged := false
	for _, ref := range append([]string{mode}, slices.Sorted(maps.Keys(endpoints))...) {
		switch ref {
		case "", "default":
			continue
		case bridgeNetwork:
			bridged = bridged || endpoints[ref] != nil
			continue
		}
		name := ref
		if isHex(ref) { // it may be an ID; a network that is not there is missed at the start
			if n, err := f.findNetwork(ctx, ref); err == nil {
				name = n.Name
			} else if statusOf(err) != http.StatusNotFound {
				return nil, nil, err
			}
		}
		if name == noneNetwork {
			continue
		}
		also, err := aliasesOf(name, endpoints[ref], hostname)
		if err != nil {
			return nil, nil, err
		}
		if !slices.Contains(join, name) {
			join = append(join, name)
		}
		if aliases == nil {
			aliases = make(map[string][]string)
		}
		if len(also) > len(aliases[name]) {
			aliases[name] = also
		}
	}
	if bridged && len(join) > 0 {
		join = append(join, bridgeNetwork)
	}
	return join, aliases, nil
}

// networksOf returns the networks of a container.
func networksOf(sb *api.Sandbox, address netip.Addr) map[string]*network.EndpointSettings {
	out := make(map[string]*network.EndpointSettings)
	names := slices.Clone(sb.Network.Join)
	switch sb.Network.Mode {
	case api.NetworkSandbox:
		return out
	case api.NetworkNone, "":
		if name := defaultNetwork(sb); len(names) == 0 && name != "" {
			names = []string{name}
		}
	case api.NetworkFull, api.NetworkEgress:
		if len(names) == 0 {
			names = []string{bridgeNetwork}
		}
	}
	hostname := requestOf(sb).Hostname
	for _, name := range names {
		e := &network.EndpointSettings{NetworkID: networkID(name), DNSNames: []string{sb.Name}}
		for _, a := range sb.Network.Aliases[name] {
			if a != hostname {
				e.Aliases = append(e.Aliases, a)
			}
			if !slices.Contains(e.DNSNames, a) {
				e.DNSNames = append(e.DNSNames, a)
			}
		}
		if address.IsValid() {
			e.IPAddress, e.IPPrefixLen = address, 15
		}
		if sb.State == api.StateRunning {
			e.EndpointID = networkID(name + sb.ID)
		}
		out[name] = e
	}
	return out
}

// defaultNetwork is the name of the network of a container that is in none of the daemon's, as its
// request had it. It is empty if the request named one, which the container has left.
func defaultNetwork(sb *api.Sandbox) string {
	req := requestOf(sb)
	switch mode := req.HostConfig.NetworkMode; {
	case mode == noneNetwork || req.NetworkDisabled:
		return noneNetwork
	case mode == "" || mode == "default" || mode == bridgeNetwork, sb.Annotations[annotationRequest] == "":
		return bridgeNetwork
	}
	return ""
}
