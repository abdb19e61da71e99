package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
)

// told collects what [runtime.Options.Changed] tells.
type told struct {
	mu   sync.Mutex
	list []string
}

func (c *told) on(tenant string, e api.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	line := fmt.Sprintf("%s%s %s %s", tenant, e.Name, e.Action, e.State)
	if e.Reason != "" {
		line += " (" + e.Reason + ")"
	}
	if e.Code != nil {
		line += fmt.Sprintf(" %d", *e.Code)
	}
	if e.Idle {
		line += " idle"
	}
	if e.From != "" {
		line += " from " + e.From
	}
	c.list = append(c.list, line)
}

// take returns what was told since the last call.
func (c *told) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.list
	c.list = nil
	return list
}

// TestChangesAreTold: every change of a sandbox is told once, in order, and nothing else is.
func TestChangesAreTold(t *testing.T) {
	b := newBench(t)
	var c told
	b.options.Changed = c.on
	s := b.open(t)
	check := func(what string, want ...string) {
		t.Helper()
		if d := cmp.Diff(want, c.take()); d != "" {
			t.Errorf("%s (-want +got):\n%s", what, d)
		}
	}
	must := func(_ runtime.Record, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	a := create(t, s, request("a"))
	check("create", "a created running")
	must(s.Pause(t.Context(), a.ID))
	must(s.Pause(t.Context(), a.ID)) // is paused
	check("pause", "a paused paused")
	must(s.Resume(t.Context(), a.ID))
	must(s.Resume(t.Context(), a.ID))
	check("resume", "a resumed running")
	must(s.Update(t.Context(), a.ID, func(rec *runtime.Record) (api.Limits, error) {
		rec.Labels["k"] = "v"
		return api.Limits{}, nil
	}))
	check("update", "a updated running")
	must(s.Rename(t.Context(), a.ID, "b"))
	must(s.Rename(t.Context(), "b", "b"))
	check("rename", "b renamed running from a")
	must(s.Stop(t.Context(), a.ID, 0))
	must(s.Stop(t.Context(), a.ID, 0))
	check("stop", "b stopped stopped (stopped)")
	must(s.Start(t.Context(), a.ID, runtime.StartRequest{Profile: request("").Profile}))
	check("start", "b started running")
	must(s.Rollback(t.Context(), a.ID, rootfs.Source{Layers: []string{"sha256:00"}}, "snap", runtime.StartRequest{Profile: request("").Profile}))
	check("rollback", "b stopped stopped (stopped)", "b rolled_back stopped", "b started running")
	if err := s.MainEnded(t.Context(), a.ID, 2, &api.SandboxExit{Exit: api.Exit{Code: 3}}, "its main process exited with 3"); err != nil {
		t.Fatal(err)
	}
	check("the end of its main process", "b stopped stopped (its main process exited with 3) 3")
	must(s.Start(t.Context(), a.ID, runtime.StartRequest{Profile: request("").Profile, Idle: true}))
	must(s.Stop(t.Context(), a.ID, 0))
	check("a start without its main process", "b started running idle", "b stopped stopped (stopped) 3 idle")
	if err := s.Delete(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	check("delete", "b deleted ")

	req := request("a")
	req.Tenant = "ann/"
	if err := s.Delete(t.Context(), create(t, s, req).ID); err != nil {
		t.Fatal(err)
	}
	check("another tenant's", "ann/a created running", "ann/a deleted ")
	req = request("hidden")
	req.Ephemeral = true
	if err := s.Delete(t.Context(), create(t, s, req).ID); err != nil {
		t.Fatal(err)
	}
	check("a sandbox of a build")
	if _, err := s.Create(t.Context(), runtime.Request{Name: "x", Network: api.Network{Mode: api.NetworkSandbox, Sandbox: "none"}}); err == nil {
		t.Error("a sandbox joins the network of one that does not exist")
	}
	check("a creation that failed")

	idle := create(t, s, request("idle"))
	b.advance(s, time.Hour)
	waitEnded(t, s, idle.ID)
	check("idle", "idle created running", "idle stopped stopped (deadline reached)")
}

// TestEndsAreToldByTheNextDaemon: what ended while no daemon ran is told when it is found, once.
func TestEndsAreToldByTheNextDaemon(t *testing.T) {
	b := newBench(t)
	var c told
	b.options.Changed = c.on
	s := b.open(t)
	stays := create(t, s, request("stays"))
	goes := create(t, s, request("goes"))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := b.engine.Kill(t.Context(), goes.ID); err != nil {
		t.Fatal(err)
	}
	c.take()
	s = b.open(t)
	if d := cmp.Diff([]string{"goes stopped lost (its processes ended while no daemon was running)"}, c.take()); d != "" {
		t.Errorf("at the start (-want +got):\n%s", d)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if d := cmp.Diff([]string(nil), c.take()); d != "" {
		t.Errorf("at the next start (-want +got):\n%s", d)
	}
	if _, err := s.Get(stays.ID); err != nil {
		t.Error(err)
	}
}

// TestRename: a name is unique, survives a restart, and is free when it is given up.
func TestRename(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	one, two := create(t, s, request("one")), create(t, s, request("two"))
	for _, taken := range []string{"two", one.ID, two.ID} {
		if _, err := s.Rename(t.Context(), one.ID, taken); !errors.Is(err, runtime.ErrExists) {
			t.Errorf("rename to %q: %v", taken, err)
		}
	}
	if _, err := s.Rename(t.Context(), "none", "x"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("rename of none: %v", err)
	}
	rec, err := s.Rename(t.Context(), "one", "three")
	if err != nil || rec.Name != "three" || rec.ID != one.ID {
		t.Fatalf("renamed to %q: %v", rec.Name, err)
	}
	if _, err := s.Get("one"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("by its old name: %v", err)
	}
	if _, err := s.Rename(t.Context(), "two", "one"); err != nil {
		t.Errorf("rename to a name that was given up: %v", err)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	for name, id := range map[string]string{"three": one.ID, "one": two.ID} {
		if rec, err := s.Get(name); err != nil || rec.ID != id {
			t.Errorf("after a restart %q is %s: %v", name, rec.ID, err)
		}
	}
	if err := s.Delete(context.WithoutCancel(t.Context()), "three"); err != nil {
		t.Fatal(err)
	}
	create(t, s, request("three"))

	req := request("member")
	req.Network = api.Network{Mode: api.NetworkNone, Join: []string{"net"}}
	member := create(t, s, req)
	if _, err := s.Rename(t.Context(), member.ID, "other"); !errors.Is(err, runtime.ErrNotEnded) {
		t.Errorf("rename of a running member of a network: %v", err)
	}
	if _, err := s.Stop(t.Context(), member.ID, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Rename(t.Context(), member.ID, "other"); err != nil {
		t.Errorf("rename of a stopped one: %v", err)
	}
}

// TestIdleDeadline: it is shown exactly while the idle time runs, and moves with each use.
func TestIdleDeadline(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("a"))
	check := func(what string, want time.Time) {
		t.Helper()
		got, err := s.Get(rec.ID)
		list := s.List(runtime.Filter{})
		seen, lerr := s.Lookup("", "a")
		if err != nil || lerr != nil || !got.IdleDeadline.Equal(want) || !list[0].IdleDeadline.Equal(want) || !seen.IdleDeadline.Equal(want) {
			t.Errorf("%s: %v, %v, %v, want %v; errors %v, %v", what, got.IdleDeadline, list[0].IdleDeadline, seen.IdleDeadline, want, err, lerr)
		}
	}
	idle := time.Duration(rec.IdleTimeout * float64(time.Second))
	check("new", b.clock.Now().Add(idle))
	lease, err := s.Begin(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	check("in use", time.Time{})
	b.advance(s, time.Minute)
	lease.End()
	check("used", b.clock.Now().Add(idle))
	if _, err := s.Pause(t.Context(), rec.ID); err != nil {
		t.Fatal(err)
	}
	check("paused", time.Time{})
	if _, err := s.Stop(t.Context(), rec.ID, 0); err != nil {
		t.Fatal(err)
	}
	check("stopped", time.Time{})
}
