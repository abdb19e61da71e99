package runtime_test

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// A mode other than none, or a named network, asks the engine for a network, at every start and
// after a restart of the daemon; the policy never reaches the engine.
func TestModeOfTheNetworkDecides(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	networks := map[string]api.Network{
		"absent": {}, "none": {Mode: api.NetworkNone}, "full": {Mode: api.NetworkFull}, "egress": {Mode: api.NetworkEgress, Policy: "version: 1"},
		"joined": {Mode: api.NetworkNone, Join: []string{"front"}},
	}
	ids := map[string]string{}
	check := func(when string) {
		t.Helper()
		for name, n := range networks {
			if got, want := b.engine.Spec(ids[name]).Network, name == "full" || name == "egress" || name == "joined"; got != want {
				t.Errorf("%s: %s: network %t, want %t", when, name, got, want)
			}
			if rec, err := s.Get(ids[name]); err != nil || !reflect.DeepEqual(rec.Network, n) {
				t.Errorf("%s: %s: the record says %+v, %v", when, name, rec.Network, err)
			}
		}
	}
	for name, n := range networks {
		req := request(name)
		req.Network = n
		ids[name] = create(t, s, req).ID
	}
	check("created")
	startAgain(t, b, s, slices.Collect(maps.Values(ids))...)
	check("started again")
}

// startAgain starts sandboxes again in the supervisor that follows another one.
func startAgain(t *testing.T, b *bench, s *runtime.Supervisor, ids ...string) {
	t.Helper()
	if err := s.Close(context.WithoutCancel(t.Context()), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	for _, id := range ids {
		if err := s.Kill(t.Context(), id, "test"); err != nil {
			t.Fatal(err)
		}
		waitEnded(t, s, id)
		if _, err := s.Start(t.Context(), id, runtime.StartRequest{}); err != nil {
			t.Fatal(err)
		}
	}
}

// A warm sandbox with a network fits every policy, mode full among them, and no sandbox without.
func TestWarmSandboxFitsItsModeOfTheNetwork(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	warm := fitting("")
	warm.Network = api.Network{Mode: api.NetworkEgress, Policy: "version: 1"}
	if err := s.Park(t.Context(), "host", warm); err != nil {
		t.Fatal(err)
	}
	parked := b.engine.IDs()[0]
	for _, tc := range []struct {
		network api.Network
		claims  bool
	}{
		{api.Network{}, false},
		{api.Network{Mode: api.NetworkNone}, false},
		{api.Network{Mode: api.NetworkFull, Budget: api.NetworkBudget{Hosts: 1}}, true},
	} {
		req := fitting("")
		req.Network = tc.network
		rec := create(t, s, req)
		if (rec.ID == parked) != tc.claims || !reflect.DeepEqual(rec.Network, tc.network) {
			t.Errorf("%+v gets %s with %+v; parked was %s", tc.network, rec.ID, rec.Network, parked)
		}
	}
}

// A sandbox that leaves its last network while it runs keeps the gateway of that life, and no
// later one. A lease tells the network that it has now.
func TestGatewayOfALife(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("leaves")
	req.Network = api.Network{Mode: api.NetworkNone, Join: []string{"front"}}
	id := create(t, s, req).ID
	lease, err := s.Begin(id)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	left := api.Network{Mode: api.NetworkNone, Budget: api.NetworkBudget{Hosts: 1}}
	if _, _, err := s.SetNetwork(id, func(rec *runtime.Record) (api.Network, error) {
		rec.Unjoined = rec.Life + 1
		return left, nil
	}); err != nil {
		t.Fatal(err)
	}
	if got := lease.Network(); !reflect.DeepEqual(got, left) || len(lease.Record.Network.Join) != 1 {
		t.Errorf("the lease tells of %+v, with the record %+v", got, lease.Record.Network)
	}
	has := func(when string, s *runtime.Supervisor, want bool) {
		t.Helper()
		if rec, err := s.Get(id); err != nil || rec.HasGateway() != want || !reflect.DeepEqual(rec.Network, left) {
			t.Errorf("%s: gateway %t, want %t: %+v, %v", when, rec.HasGateway(), want, rec.Network, err)
		}
	}
	has("left", s, true)
	lease.End()
	if err := s.Close(context.WithoutCancel(t.Context()), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	has("another daemon", s, true)
	if err := s.Kill(t.Context(), id, "test"); err != nil {
		t.Fatal(err)
	}
	waitEnded(t, s, id)
	if _, err := s.Start(t.Context(), id, runtime.StartRequest{}); err != nil {
		t.Fatal(err)
	}
	has("started again", s, false)
	if b.engine.Spec(id).Network {
		t.Error("the engine was asked for a network")
	}
}
