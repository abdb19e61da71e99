package service_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
)

// stoppedIn returns a request for a sandbox that is created stopped.
func stoppedIn(name string, networks ...string) api.CreateSandbox {
	return api.CreateSandbox{Name: name, Stopped: true, Command: []string{"true"}, Network: api.Network{Join: networks}}
}

// A named network is its tenant's, stays when it has no sandbox, also over a restart of the daemon,
// and is not removed while it has one.
func TestNamedNetworksOfTenants(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	one := r.D.Service().For(service.Caller{Tenant: "1", UID: 1})
	two := r.D.Service().For(service.Caller{Tenant: "2", UID: 2})
	if _, err := one.CreateNetwork(api.CreateNetwork{Name: "shop_default", Labels: map[string]string{"app": "shop"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := one.CreateNetwork(api.CreateNetwork{Name: "shop_default"}); !errors.Is(err, class.ErrNamedExists) {
		t.Errorf("twice: %v", err)
	}
	if _, err := two.NamedNetwork("shop_default"); !errors.Is(err, class.ErrNoNamed) {
		t.Errorf("another tenant's look: %v", err)
	}
	if err := two.RemoveNetwork("shop_default"); !errors.Is(err, class.ErrNoNamed) {
		t.Errorf("another tenant's removal: %v", err)
	}
	sb, err := one.CreateSandbox(t.Context(), stoppedIn("web", "shop_default", "unmade"))
	if err != nil {
		t.Fatal(err)
	}
	if err := two.ConnectNetwork(t.Context(), "shop_default", api.ConnectNetwork{Sandbox: sb.ID}); !errors.Is(err, class.ErrNoNamed) {
		t.Errorf("another tenant's connection: %v", err)
	}
	for _, name := range []string{"shop_default", "unmade"} {
		if err := one.RemoveNetwork(name); !errors.Is(err, class.ErrNamedInUse) || !strings.Contains(err.Error(), "web") {
			t.Errorf("in use: %v", err)
		}
	}
	if out, err := one.PruneNetworks(t.Context(), api.PruneNetworks{}); err != nil || len(out.Removed) > 0 {
		t.Errorf("in use: %v, %v", out, err)
	}
	if _, err := one.CreateNetwork(api.CreateNetwork{Name: "unmade", Internal: true}); !errors.Is(err, class.ErrNamedInUse) {
		t.Errorf("internal, and in use: %v", err)
	}
	if err := one.DeleteSandbox(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := one.NamedNetworks(nil).Networks; len(got) != 1 || got[0].Name != "shop_default" || got[0].Labels["app"] != "shop" || got[0].CreatedAt.IsZero() || got[0].Sandboxes == nil || len(got[0].Sandboxes) > 0 {
		t.Errorf("without its sandbox: %+v", got)
	}
	r.D.Shutdown(api.Shutdown{})
	r.Wait()
	r = b.Start()
	one = r.D.Service().For(service.Caller{Tenant: "1", UID: 1})
	if _, err := one.CreateNetwork(api.CreateNetwork{Name: "kept", Labels: map[string]string{api.LabelKeep: "true"}}); err != nil {
		t.Fatal(err)
	}
	if got := one.NamedNetworks(map[string]string{"app": "shop"}).Networks; len(got) != 1 || got[0].Name != "shop_default" {
		t.Errorf("after a restart: %+v", got)
	}
	if out, err := one.PruneNetworks(t.Context(), api.PruneNetworks{}); err != nil || len(out.Removed) != 1 || out.Removed[0] != "shop_default" {
		t.Errorf("%v, %v", out, err)
	}
}

// A sandbox that does not run joins and leaves networks; aliases are replaced. What it cannot have
// is refused, and changes nothing.
func TestNetworksOfStoppedSandboxes(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	s := r.API()
	for _, name := range []string{"back", "front"} {
		if _, err := s.CreateNetwork(api.CreateNetwork{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.CreateSandbox(t.Context(), stoppedIn("db")); err != nil {
		t.Fatal(err)
	}
	published := stoppedIn("web", "back")
	published.Ports = []api.PortMapping{{Port: 80}}
	if _, err := s.CreateSandbox(t.Context(), published); err != nil {
		t.Fatal(err)
	}
	running := r.Create(api.CreateSandbox{Name: "alone"})
	if _, err := s.CreateSandbox(t.Context(), api.CreateSandbox{Name: "shares", Network: api.Network{Mode: api.NetworkSandbox, Sandbox: running.ID}}); err != nil {
		t.Fatal(err)
	}
	connect := func(network, sandbox string, aliases ...string) error {
		return s.ConnectNetwork(t.Context(), network, api.ConnectNetwork{Sandbox: sandbox, Aliases: aliases})
	}
	disconnect := func(network, sandbox string) error {
		return s.DisconnectNetwork(t.Context(), network, api.DisconnectNetwork{Sandbox: sandbox})
	}
	update := func(sandbox string, mode api.NetworkMode) error {
		_, err := s.UpdateSandbox(t.Context(), sandbox, api.UpdateSandbox{Network: &api.Network{Mode: mode}})
		return err
	}
	for _, step := range []struct {
		what string
		do   func() error
		want error
		nets string // of db, then; "" if they stay
	}{
		{"a network", func() error { return connect("back", "db", "sql", "data") }, nil, "[back] map[back:[sql data]]"},
		{"a second", func() error { return connect("front", "db") }, nil, "[back front] map[back:[sql data]]"},
		{"the first again", func() error { return connect("back", "db", "sql") }, nil, "[back front] map[back:[sql]]"},
		{"no such network", func() error { return connect("none", "db") }, class.ErrNoNamed, ""},
		{"no such sandbox", func() error { return connect("back", "none") }, class.ErrNoSandbox, ""},
		{"an alias that is none", func() error { return connect("front", "db", "a.b") }, class.ErrInvalid, ""},
		{"a network that it is not in", func() error { return disconnect("other", "db") }, class.ErrNoNamed, ""},
		{"a network that it is in", func() error { return disconnect("front", "db") }, nil, "[back] map[back:[sql]]"},
		{"the last", func() error { return disconnect("back", "db") }, nil, "[] map[]"},
		{"the last, with ports", func() error { return disconnect("back", "web") }, nil, ""},
		{"a start with ports, in no network", func() error { _, err := s.StartSandbox(t.Context(), "web", api.StartSandbox{}); return err }, class.ErrState, ""},
		{"another mode", func() error { return update("db", api.NetworkFull) }, nil, ""},
		{"none, with ports", func() error { return update("web", api.NetworkNone) }, class.ErrState, ""},
		{"a running one without a network", func() error { return connect("back", "alone") }, class.ErrNamedRunning, ""},
		{"one that shares a network", func() error { return connect("back", "shares") }, class.ErrShared, ""},
	} {
		before, err := s.GetSandbox("db")
		if err != nil {
			t.Fatal(err)
		}
		if err := step.do(); !errors.Is(err, step.want) {
			t.Errorf("%s: %v, want %v", step.what, err, step.want)
		}
		after, err := s.GetSandbox("db")
		want := step.nets
		if want == "" {
			want = fmt.Sprint(before.Network.Join, before.Network.Aliases)
		}
		if got := fmt.Sprint(after.Network.Join, after.Network.Aliases); err != nil || got != want {
			t.Errorf("%s: it is in %s, want %s; %v", step.what, got, want, err)
		}
	}
	if db, err := s.GetSandbox("db"); err != nil || db.Network.Mode != api.NetworkFull {
		t.Errorf("%+v, %v", db.Network, err)
	}
}

// A change of networks that waits for its gateways keeps the other changes of its tenant waiting,
// as long as their clients do, and no other tenant's.
func TestTenantsChangeNetworksBesideEachOther(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	one := r.D.Service().For(service.Caller{Tenant: "1", UID: 1})
	two := r.D.Service().For(service.Caller{Tenant: "2", UID: 2})
	for _, s := range []*service.API{one, two} {
		if _, err := s.CreateNetwork(api.CreateNetwork{Name: "back"}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"db", "web"} {
			if _, err := s.CreateSandbox(t.Context(), stoppedIn(name, "front")); err != nil {
				t.Fatal(err)
			}
		}
	}
	waits, answer, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- one.Rejoin(t.Context(), "db", "back", func(rec *runtime.Record) (api.Network, error) {
			close(waits)
			<-answer
			return rec.Network, nil
		})
	}()
	<-waits

	others := make(chan error, 1)
	go func() {
		_, err := two.UpdateSandbox(t.Context(), "web", api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkFull}})
		others <- errors.Join(
			two.ConnectNetwork(t.Context(), "back", api.ConnectNetwork{Sandbox: "db"}),
			two.DisconnectNetwork(t.Context(), "front", api.DisconnectNetwork{Sandbox: "db"}),
			err)
	}()
	select {
	case err := <-others:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testenv.HungAfter):
		t.Error("another tenant waits for it")
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := one.ConnectNetwork(gone, "back", api.ConnectNetwork{Sandbox: "web"}); !errors.Is(err, context.Canceled) {
		t.Errorf("another change of the tenant: %v", err)
	}
	if web, err := one.GetSandbox("web"); err != nil || len(web.Network.Join) != 1 {
		t.Errorf("%+v, %v", web.Network, err)
	}
	close(answer)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := one.ConnectNetwork(t.Context(), "back", api.ConnectNetwork{Sandbox: "web"}); err != nil {
		t.Error(err)
	}
}
