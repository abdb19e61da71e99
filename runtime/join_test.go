package runtime_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// sharing is a request for a sandbox that shares the network of another one.
func sharing(name, owner string) runtime.Request {
	req := request(name)
	req.Network = api.Network{Mode: api.NetworkSandbox, Sandbox: owner}
	return req
}

// The engine is told the owner of a shared network, and whether that one has a way out, at each
// start and after a restart of the daemon.
func TestSharedNetworkIsTheOwners(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	plain := create(t, s, request("plain")).ID
	connected := request("connected")
	connected.Network = api.Network{Mode: api.NetworkEgress, Policy: "version: 1"}
	owner := create(t, s, connected).ID
	one, other := create(t, s, sharing("one", owner)).ID, create(t, s, sharing("other", plain)).ID
	check := func(when string) {
		t.Helper()
		for id, want := range map[string]struct {
			join    string
			network bool
		}{one: {owner, true}, other: {plain, false}, owner: {"", true}, plain: {"", false}} {
			if got := b.engine.Spec(id); got.Join != want.join || got.Network != want.network {
				t.Errorf("%s: %s: joins %q, network %t; want %+v", when, id, got.Join, got.Network, want)
			}
		}
	}
	check("created")
	startAgain(t, b, s, one, other)
	check("started again")
}

// Without its owner a sandbox is neither created nor started, and a failed start leaves it as it
// was.
func TestSharedNetworkNeedsItsOwner(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	owner := create(t, s, request("owner")).ID
	guest := create(t, s, sharing("guest", owner)).ID
	for _, id := range []string{guest, owner} {
		if err := s.Kill(t.Context(), id, "test"); err != nil {
			t.Fatal(err)
		}
		waitEnded(t, s, id)
	}
	refused := func(says string) {
		t.Helper()
		if _, err := s.Create(t.Context(), sharing("more", owner)); !errors.Is(err, runtime.ErrNoOwner) || !strings.Contains(err.Error(), says) {
			t.Errorf("create: %v, want one that says %q", err, says)
		}
		if _, err := s.Start(t.Context(), guest, runtime.StartRequest{}); !errors.Is(err, runtime.ErrNoOwner) || !strings.Contains(err.Error(), says) {
			t.Errorf("start: %v, want one that says %q", err, says)
		}
		if rec, err := s.Get(guest); err != nil || rec.State != api.StateStopped || rec.Reason != "test" {
			t.Errorf("the one that did not start: %+v, %v", rec, err)
		}
		if _, err := s.Get("more"); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("the one that was not created: %v", err)
		}
	}
	refused("sandbox owner (" + owner + "), does not run; start that one first")
	if _, err := s.Start(t.Context(), owner, runtime.StartRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(t.Context(), guest, runtime.StartRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Kill(t.Context(), guest, "test"); err != nil {
		t.Fatal(err)
	}
	waitEnded(t, s, guest)
	if err := s.Delete(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	refused("was deleted")

	// A sandbox of another tenant is no owner.
	owner = create(t, s, request("again")).ID
	req := sharing("theirs", owner)
	req.Tenant = "1002"
	if _, err := s.Create(t.Context(), req); !errors.Is(err, runtime.ErrNoOwner) || strings.Contains(err.Error(), "again") {
		t.Errorf("of another tenant: %v", err)
	}
}

// A sandbox whose network others share is not idle while one of them runs.
func TestOwnerOfASharedNetworkIsNotIdle(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	owner := create(t, s, request("owner")).ID
	guest := create(t, s, sharing("guest", owner)).ID
	const idle = 40 * time.Second
	idlesAfter(t, s, owner, idle)
	for range 3 {
		b.advance(s, idle)
		if reason := runtime.Expire(t.Context(), s, owner); reason != "" {
			t.Fatalf("while its network is shared it ends: %s", reason)
		}
	}
	if err := s.Kill(t.Context(), guest, "test"); err != nil {
		t.Fatal(err)
	}
	waitEnded(t, s, guest)
	b.advance(s, idle)
	if rec := waitEnded(t, s, owner); rec.Reason != "idle for 40s" {
		t.Errorf("the owner has ended: %s", rec.Reason)
	}
}

// A warm sandbox is in a network namespace, and serves no request for another one.
func TestNoWarmSandboxForASharedNetwork(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	if err := s.Park(t.Context(), "host", fitting("")); err != nil {
		t.Fatal(err)
	}
	parked := b.engine.IDs()[0]
	owner := create(t, s, request("owner")).ID
	req := fitting("")
	req.Network = api.Network{Mode: api.NetworkSandbox, Sandbox: owner}
	if rec := create(t, s, req); rec.ID == parked {
		t.Error("it got the warm sandbox")
	}
	if rec := create(t, s, fitting("")); rec.ID != parked {
		t.Error("the warm sandbox fits no request")
	}
}
