package service

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/network"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

// connect gives a sandbox that has just been created its network, if it has one, and takes over its
// ports.
func (s *core) connect(ctx context.Context, rec *runtime.Record, ports *network.Published) error {
	if !rec.HasGateway() {
		return nil
	}
	lease, err := s.supervisor.Begin(rec.ID)
	if err != nil {
		return errors.Join(err, ports.Close())
	}
	defer lease.End()
	if _, err := s.networks.Connect(ctx, lease, ports); err != nil { // the record has the ports
		return err
	}
	s.publishPorts(rec)
	return nil
}

// adoptNetworks connects the sandboxes that run when the daemon starts. Their connections wait
// meanwhile.
func (s *core) adoptNetworks() {
	err := s.networks.Sweep(func(id string) bool {
		_, err := s.supervisor.Get(id)
		return err == nil
	})
	if err != nil {
		s.log.Warn("flows of deleted sandboxes are left until the next start", "error", err)
	}
	records := slices.DeleteFunc(s.supervisor.List(runtime.Filter{AllTenants: true}), func(rec runtime.Record) bool {
		return !rec.HasGateway() || rec.State != api.StateRunning && rec.State != api.StatePaused
	})
	// All are found by name before the first of them asks.
	s.networks.Expect(records)
	for _, rec := range records {
		s.work.Go(func() {
			lease, err := s.supervisor.Rejoin(rec.ID)
			if err != nil {
				s.networks.Miss(rec.ID) // it has ended
				return
			}
			defer lease.End()
			ports, err := s.networks.Connect(s.work.Ctx, lease, nil)
			if err != nil && s.work.Ctx.Err() == nil {
				s.log.Warn("a running sandbox has no network until it is started again", "id", rec.ID, "error", err)
			}
			moved, err := s.recordPorts(lease, &rec, ports)
			if err != nil && s.work.Ctx.Err() == nil {
				s.log.Warn("record the published ports of a running sandbox", "id", rec.ID, "error", err)
			}
			if moved {
				s.publishPorts(&rec)
			}
		})
	}
}

// recordPorts puts the ports that [network.Networks.Connect] has bound for a lease into the record,
// and reports whether one was chosen anew.
func (s *core) recordPorts(lease *runtime.Lease, rec *runtime.Record, ports []api.PortMapping) (moved bool, err error) {
	if len(ports) == 0 || slices.Equal(ports, lease.Record.Ports) {
		return false, nil
	}
	_, _, err = s.supervisor.Amend(rec.ID, func(now *runtime.Record) error {
		if moved = now.Life == lease.Record.Life; moved { // else these are closed, and those of the next life bound
			now.Ports = ports
		}
		return nil
	})
	if err != nil || !moved {
		return false, err
	}
	rec.Ports = ports
	return true, nil
}

// checkNetwork returns the network that a request asks for, with defaults filled in. For a shared
// one it finds the owner.
func (s *API) checkNetwork(net api.Network) (api.Network, error) {
	net, err := s.networks.Check(s.caller.Tenant, net)
	if err != nil || net.Mode != api.NetworkSandbox {
		return net, err
	}
	owner, err := s.lookup(net.Sandbox)
	if err != nil {
		return net, fmt.Errorf("share a network: %w", err)
	}
	// Its authority for inspection, if it has one, is there when it runs. Before, none would be found
	// and none be trusted.
	if owner.State == api.StateCreating {
		return net, fmt.Errorf("share a network: %w: its owner, sandbox %s, is being created", runtime.ErrNoOwner, owner.Name)
	}
	net.Sandbox = owner.ID
	if owner.Network.Mode == api.NetworkSandbox {
		net.Sandbox = owner.Network.Sandbox
	}
	return net, nil
}

// checkOwn returns an error if a sandbox shares the network of another one: the request has to name
// that one.
func checkOwn(rec *runtime.Record, what string) error {
	if rec.Network.Mode != api.NetworkSandbox {
		return nil
	}
	return class.Mark(class.ErrShared, fmt.Errorf("%s: sandbox %s shares the network of sandbox %s", what, rec.Name, rec.Network.Sandbox))
}

// changedNetwork returns the network that a sandbox has after a change.
func (s *API) changedNetwork(rec *runtime.Record, to api.Network) (api.Network, error) {
	if err := checkOwn(rec, "change the network"); err != nil {
		return to, err
	}
	if to.Budget != (api.NetworkBudget{}) {
		return to, class.Invalidf("network.budget: it cannot be changed; create another sandbox")
	}
	if len(to.Secrets) > 0 {
		return to, class.Invalidf("network.secrets: they cannot be changed; create another sandbox")
	}
	if len(to.Join) > 0 && !slices.Equal(to.Join, rec.Network.Join) || len(to.Aliases) > 0 && !maps.EqualFunc(to.Aliases, rec.Network.Aliases, slices.Equal) {
		return to, class.Invalidf("network.join: it is changed with requests of their own: sandboxd network connect, or POST /v1/networks/{network}/connect")
	}
	to.Join, to.Aliases = rec.Network.Join, rec.Network.Aliases
	to, err := s.networks.Check(s.caller.Tenant, to)
	if err != nil {
		return to, err
	}
	if isLive(rec) && (rec.Network.HasGateway() && !to.HasGateway() || to.HasGateway() && !rec.HasGateway()) || to.Mode == api.NetworkSandbox {
		return to, class.Invalidf("network: sandbox %s was created with mode %q, and cannot change to %q; create another sandbox",
			rec.Name, rec.Network.Mode, to.Mode)
	}
	if p, err := policy.Parse([]byte(to.Policy)); err == nil && to.Mode == api.NetworkEgress && p.Inspects() && !s.networks.Inspects(rec.ID) {
		return to, class.Invalidf("network.policy: it inspects requests, for which sandbox %s trusts no authority: its first policy did not; create another sandbox", rec.Name)
	}
	if len(rec.Ports) > 0 && !to.HasGateway() {
		return to, class.Mark(class.ErrState, fmt.Errorf("sandbox %s publishes ports, for which it needs a network", rec.Name))
	}
	to.Budget, to.Secrets = rec.Network.Budget, rec.Network.Secrets
	return to, nil
}

// maxHolders bounds the sandboxes of one network that are asked for the holder of a socket.
const maxHolders = 16

// holder implements [network.Options.Holder]. It asks the init of the sandbox, then those of the
// sandboxes that share its network.
func (s *core) holder(ctx context.Context, id string, inode uint32) (api.FlowProcess, error) {
	all := append([]string{id}, s.supervisor.Sharing(id)...)
	for _, at := range all[:min(len(all), maxHolders)] {
		lease, err := s.supervisor.Probe(at)
		if err != nil {
			continue // it has ended, or is paused
		}
		p, err := guests.Of(lease).Holder(ctx, inode)
		lease.End()
		if _, ok := errors.AsType[*guest.Error](err); ok {
			continue // it has none, or is of a version that does not tell
		}
		if err != nil {
			return api.FlowProcess{}, err
		}
		found := api.FlowProcess{PID: p.PID, Name: p.Name}
		if p.Main != 0 {
			found.Exec = s.execs.ByMain(ctx, at, p.Main)
		}
		if at != id {
			found.Sandbox = at
		}
		return found, nil
	}
	return api.FlowProcess{}, network.ErrNoHolder
}

// NamedNetworks lists the named networks of the caller's tenant that have all labels, with the
// sandboxes in them.
func (s *API) NamedNetworks(labels map[string]string) api.NetworkList {
	list := api.NetworkList{Networks: []api.NamedNetwork{}}
	at := make(map[string]int) // places in the list
	for _, rec := range s.networks.Named(s.caller.Tenant) {
		at[rec.Name] = len(list.Networks)
		list.Networks = append(list.Networks, api.NamedNetwork{
			Name: rec.Name, Labels: rec.Labels, CreatedAt: rec.CreatedAt, Internal: rec.Internal, Sandboxes: []api.NetworkMember{},
		})
	}
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant}) {
		if !s.visible(&rec) {
			continue
		}
		member := api.NetworkMember{ID: rec.ID, Name: rec.Name, State: rec.State, Address: s.networks.Address(rec.ID)}
		for _, name := range rec.Network.Join {
			i, ok := at[name]
			if !ok {
				i = len(list.Networks)
				at[name] = i
				list.Networks = append(list.Networks, api.NamedNetwork{Name: name})
			}
			member.Aliases = rec.Network.Aliases[name]
			list.Networks[i].Sandboxes = append(list.Networks[i].Sandboxes, member)
		}
	}
	list.Networks = slices.DeleteFunc(list.Networks, func(n api.NamedNetwork) bool { return !hasLabels(n.Labels, labels) })
	slices.SortFunc(list.Networks, func(a, b api.NamedNetwork) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// NamedNetwork returns one named network.
func (s *API) NamedNetwork(name string) (api.NamedNetwork, error) {
	for _, n := range s.NamedNetworks(nil).Networks {
		if n.Name == name {
			return n, nil
		}
	}
	return api.NamedNetwork{}, fmt.Errorf("network %s: %w", class.Clip(name), class.ErrNoNamed)
}

// CreateNetwork makes a named network of the caller's tenant.
func (s *API) CreateNetwork(req api.CreateNetwork) (api.NamedNetwork, error) {
	if err := validateLabels(req.Labels); err != nil {
		return api.NamedNetwork{}, err
	}
	rec, err := s.networks.CreateNamed(network.Named{Tenant: s.caller.Tenant, Name: req.Name, Labels: req.Labels, Internal: req.Internal}, func() error {
		return s.unused(req.Name)
	})
	if err != nil {
		return api.NamedNetwork{}, err
	}
	s.publishNetwork(api.ActionCreated, &rec)
	return s.NamedNetwork(rec.Name)
}

// unused returns an error if a sandbox of the caller's tenant, running or not, is in a named
// network.
func (s *API) unused(name string) error {
	var users []api.SandboxRef
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant}) {
		if slices.Contains(rec.Network.Join, name) {
			users = append(users, api.SandboxRef{ID: rec.ID, Name: rec.Name})
		}
	}
	if len(users) == 0 {
		return nil
	}
	return class.Mark(class.ErrNamedInUse, fmt.Errorf("sandbox %s is in it", namesOf(users)))
}

func (s *core) publishNetwork(action api.EventAction, rec *network.Named) {
	s.events.Publish(rec.Tenant, api.Event{Type: api.EventNetwork, Action: action, Object: rec.Name, Labels: rec.Labels})
}

// RemoveNetwork removes a named network that no sandbox is in.
func (s *API) RemoveNetwork(name string) error {
	rec, err := s.networks.RemoveNamed(s.caller.Tenant, name, func() error { return s.unused(name) })
	if err == nil {
		s.publishNetwork(api.ActionRemoved, &rec)
	}
	return err
}

// PruneNetworks removes named networks that no sandbox is in.
func (s *API) PruneNetworks(_ context.Context, req api.PruneNetworks) (api.NetworksRemoved, error) {
	out := api.NetworksRemoved{Removed: []string{}}
	if err := validateLabels(req.Labels); err != nil {
		return out, err
	}
	var errs []error
	for _, rec := range s.networks.Named(s.caller.Tenant) {
		if api.Kept(rec.Labels) || !hasLabels(rec.Labels, req.Labels) {
			continue
		}
		switch err := s.RemoveNetwork(rec.Name); {
		case err == nil:
			out.Removed = append(out.Removed, rec.Name)
		case errors.Is(err, class.ErrNamedInUse), errors.Is(err, class.ErrNoNamed): // by now
		default:
			errs = append(errs, err)
		}
	}
	s.log.Info("networks were pruned", "removed", len(out.Removed))
	return out, errors.Join(errs...)
}

// ConnectNetwork puts a sandbox into a named network, which exists.
func (s *API) ConnectNetwork(ctx context.Context, name string, req api.ConnectNetwork) error {
	if _, err := s.NamedNetwork(name); err != nil {
		return err
	}
	return s.rejoin(ctx, req.Sandbox, name, api.ActionConnected, func(rec *runtime.Record) (api.Network, error) {
		net := rec.Network
		if isLive(rec) && !rec.HasGateway() {
			return net, class.Mark(class.ErrNamedRunning, fmt.Errorf("sandbox %s runs without a network, which a running one cannot get", rec.Name))
		}
		if !slices.Contains(net.Join, name) {
			net.Join = append(slices.Clip(net.Join), name)
		}
		if net.Aliases = maps.Clone(net.Aliases); net.Aliases == nil {
			net.Aliases = make(map[string][]string)
		}
		if delete(net.Aliases, name); len(req.Aliases) > 0 {
			net.Aliases[name] = req.Aliases
		}
		return s.networks.Check(rec.Tenant, net)
	})
}

// DisconnectNetwork takes a sandbox out of a named network. Of one that runs, connections from and
// to sandboxes with which it shares no other network are reset when DisconnectNetwork returns.
func (s *API) DisconnectNetwork(ctx context.Context, name string, req api.DisconnectNetwork) error {
	return s.rejoin(ctx, req.Sandbox, name, api.ActionDisconnected, func(rec *runtime.Record) (api.Network, error) {
		net := rec.Network
		if !slices.Contains(net.Join, name) {
			return net, fmt.Errorf("sandbox %s is not in it: %w", rec.Name, class.ErrNoNamed)
		}
		net.Join = slices.DeleteFunc(slices.Clone(net.Join), func(n string) bool { return n == name })
		net.Aliases = maps.Clone(net.Aliases)
		delete(net.Aliases, name)
		if net.HasGateway() {
			return s.networks.Check(rec.Tenant, net)
		}
		budget := net.Budget
		net.Budget = api.NetworkBudget{} // of no network
		net, err := s.networks.Check(rec.Tenant, net)
		if err == nil && isLive(rec) { // its gateway stays, and may get networks again
			net.Budget, rec.Unjoined = budget, rec.Life+1
		}
		return net, err
	})
}

func isLive(rec *runtime.Record) bool {
	return rec.State == api.StateRunning || rec.State == api.StatePaused
}

// rejoin changes the named networks of a sandbox on its record, and at the gateway if it runs.
func (s *API) rejoin(ctx context.Context, ref, name string, action api.EventAction, edit func(rec *runtime.Record) (api.Network, error)) error {
	fail := func(err error) error {
		verb := map[api.EventAction]string{api.ActionConnected: "connect to", api.ActionDisconnected: "disconnect from"}[action]
		return fmt.Errorf("%s network %s: %w", verb, class.Clip(name), err)
	}
	rec, err := s.lookup(ref)
	if err == nil {
		err = checkOwn(&rec, "change the network")
	}
	if err != nil {
		return fail(err)
	}
	// A change waits for gateways, which may be slow to reset connections. It touches networks of one
	// tenant only.
	release, err := s.rejoining.take(ctx, rec.Tenant)
	if err != nil {
		return fail(err)
	}
	defer release()
	rec, was, err := s.supervisor.SetNetwork(rec.ID, edit)
	if err != nil {
		return fail(err)
	}
	if err := s.networks.SetNetwork(ctx, &rec, was); err != nil {
		return fail(errors.Join(err, s.restoreNetwork(rec.ID, was)))
	}
	s.events.Publish(rec.Tenant, api.Event{Type: api.EventNetwork, Action: action, Object: name, Sandbox: rec.ID, Name: rec.Name, State: rec.State})
	return nil
}

// restoreNetwork undoes the change of a record that the gateway did not follow.
func (s *core) restoreNetwork(id string, was api.Network) error {
	_, _, err := s.supervisor.SetNetwork(id, func(*runtime.Record) (api.Network, error) { return was, nil })
	return err
}

// FlowOptions choose flows.
type FlowOptions = network.FlowOptions

// Flows calls begin and then emit for the flows of the sandbox with this id or name, in their
// order. A sandbox without a network has none, which is an error.
func (s *API) Flows(ctx context.Context, ref string, opts FlowOptions, begin func() error, emit func(api.Flow) error) error {
	rec, err := s.lookup(ref)
	if err != nil {
		return err
	}
	if err := checkOwn(&rec, "read the flows"); err != nil {
		return err
	}
	if !rec.HasGateway() {
		return class.Mark(class.ErrState, errors.New("sandbox "+rec.Name+" has no network, and so no flows"))
	}
	if err := begin(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.work.Ctx, func() { cancel(class.ErrStopping) })() //nolint:contextcheck // the daemon's end
	return s.networks.Flows(ctx, rec.ID, opts, emit)
}

// DialPort connects to a port of the sandbox with this id or name. Until end is called the sandbox
// is in use; the connection is the caller's to close.
func (s *API) DialPort(ctx context.Context, ref string, port uint16) (_ *net.TCPConn, end func(), err error) {
	lease, err := s.begin(ref)
	if err != nil {
		return nil, nil, err
	}
	if err := checkOwn(&lease.Record, "connect to a port"); err != nil {
		lease.End()
		return nil, nil, err
	}
	conn, err := s.networks.Dial(ctx, lease.Record.ID, port)
	if err != nil {
		lease.End()
		if errors.Is(err, syscall.ECONNREFUSED) {
			err = class.Mark(class.ErrNoPort, err)
		}
		return nil, nil, err
	}
	return conn, lease.End, nil
}
