package service

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/network"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

// connect gives a sandbox that has just been created its network, if it has one, and takes over its
// ports.
func (s *core) connect(ctx context.Context, rec *runtime.Record, ports *network.Published) error {
	if !rec.Network.HasGateway() {
		return nil
	}
	lease, err := s.supervisor.Begin(rec.ID)
	if err != nil {
		return errors.Join(err, ports.Close())
	}
	defer lease.End()
	if err := s.networks.Connect(ctx, lease, ports); err != nil {
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
		return !rec.Network.HasGateway() || rec.State != api.StateRunning && rec.State != api.StatePaused
	})
	// All are found by name before the first of them asks.
	s.networks.Expect(records)
	for _, rec := range records {
		s.execs.spawn(func() {
			lease, err := s.supervisor.Rejoin(rec.ID)
			if err != nil {
				s.networks.Miss(rec.ID) // it has ended
				return
			}
			defer lease.End()
			if err := s.networks.Connect(s.execs.ctx, lease, nil); err != nil && s.execs.ctx.Err() == nil {
				s.log.Warn("a running sandbox has no network until it is started again", "id", rec.ID, "error", err)
			}
		})
	}
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
	if len(to.Join) > 0 && !slices.Equal(to.Join, rec.Network.Join) {
		return to, class.Invalidf("network.join: it cannot be changed; create another sandbox")
	}
	to.Join = rec.Network.Join
	to, err := s.networks.Check(s.caller.Tenant, to)
	if err != nil {
		return to, err
	}
	if to.HasGateway() != rec.Network.HasGateway() || to.Mode == api.NetworkSandbox {
		return to, class.Invalidf("network: sandbox %s was created with mode %q, and cannot change to %q; create another sandbox",
			rec.Name, rec.Network.Mode, to.Mode)
	}
	if p, err := policy.Parse([]byte(to.Policy)); err == nil && to.Mode == api.NetworkEgress && p.Inspects() && !s.networks.Inspects(rec.ID) {
		return to, class.Invalidf("network.policy: it inspects requests, for which sandbox %s trusts no authority: its first policy did not; create another sandbox", rec.Name)
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
		p, err := guestOf(lease).Holder(ctx, inode)
		lease.End()
		if _, ok := errors.AsType[*guest.Error](err); ok {
			continue // it has none, or is of a version that does not tell
		}
		if err != nil {
			return api.FlowProcess{}, err
		}
		found := api.FlowProcess{PID: p.PID, Name: p.Name}
		if p.Main != 0 {
			found.Exec = s.execs.byMain(ctx, at, p.Main)
		}
		if at != id {
			found.Sandbox = at
		}
		return found, nil
	}
	return api.FlowProcess{}, network.ErrNoHolder
}

// NamedNetworks lists the named networks of the caller's tenant, with the sandboxes in them.
func (s *API) NamedNetworks() api.NetworkList {
	list := api.NetworkList{Networks: []api.NamedNetwork{}}
	at := make(map[string]int) // places in the list
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
			list.Networks[i].Sandboxes = append(list.Networks[i].Sandboxes, member)
		}
	}
	slices.SortFunc(list.Networks, func(a, b api.NamedNetwork) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// restoreNetwork undoes the change of a record that the gateway did not follow.
func (s *core) restoreNetwork(ctx context.Context, id string, was api.Network) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	_, err := s.supervisor.Update(ctx, id, func(rec *runtime.Record) (api.Limits, error) {
		rec.Network = was
		return api.Limits{}, nil
	})
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
	if !rec.Network.HasGateway() {
		return class.Mark(class.ErrState, errors.New("sandbox "+rec.Name+" has no network, and so no flows"))
	}
	if err := begin(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.execs.ctx, func() { cancel(class.ErrStopping) })() //nolint:contextcheck // the daemon's end
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
