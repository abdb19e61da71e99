package functional

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// kill -9 of the daemon in the middle of twenty sandboxes, some of them half made: those that ran
// still run and are adopted, an exec works in each, and deleting them leaves nothing.
func TestKilledDaemonAdoptsItsSandboxes(t *testing.T) {
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)

	const n = 20
	sandboxes := make([]*harness.Sandbox, n)
	each(n, 4, func(i int) {
		s, err := d.TryCreate(t.Context(), api.CreateSandbox{Name: fmt.Sprintf("s%d", i)})
		if err != nil {
			t.Errorf("create sandbox %d: %v", i, err)
			return
		}
		sandboxes[i] = s
		if _, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", fmt.Sprintf("echo %d >/tmp/mine; nohup setsid sleep 600 >/dev/null 2>&1 &", i)}}); err != nil {
			t.Errorf("exec in sandbox %d: %v", i, err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	d.Mark(t)

	// More are being created, and execs are running, at the moment of the kill.
	var busy sync.WaitGroup
	for i := range 6 {
		busy.Go(func() {
			if i%2 == 0 {
				_, _ = d.TryCreate(t.Context(), api.CreateSandbox{}) // cut off on purpose
			} else {
				_, _ = sandboxes[i].TryExec(t.Context(), api.ExecRequest{Argv: []string{"sleep", "100"}})
			}
		})
	}
	// No event tells that requests are half way; any moment will do.
	select {
	case <-time.After(15 * time.Millisecond):
	case <-t.Context().Done():
	}
	d.Kill9(t)
	busy.Wait()
	d.Launch(t)

	known := map[string]api.Sandbox{}
	for _, s := range d.List(t) {
		known[s.ID] = s
	}
	for i, s := range sandboxes {
		if now, ok := known[s.ID]; !ok || now.State != api.StateRunning || now.Name != s.Name {
			t.Errorf("sandbox %d after the restart: %+v", i, now)
			continue
		}
		if got := s.Sh(t, "cat /tmp/mine; ps 2>/dev/null | grep -c '[s]leep 600' || grep -l 600 /proc/[0-9]*/cmdline | wc -l"); !strings.HasPrefix(got, fmt.Sprintln(i)) {
			t.Errorf("exec in sandbox %d after the restart: %q", i, got)
		}
	}
	// Half-made sandboxes may be listed too, or gone; a listed one can be deleted.
	all := d.List(t)
	each(len(all), 4, func(i int) {
		if err := d.Call(t.Context(), "DELETE", "/v1/sandboxes/"+all[i].ID, nil, nil); err != nil {
			t.Errorf("delete %s: %v", all[i].ID, err)
		}
	})
	d.NothingLeaked(t, before)
}

// Creating and deleting does not accumulate anything, whatever was running inside.
func TestDeleteLeavesNothing(t *testing.T) {
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	for i := range 5 {
		s := d.Create(t, api.CreateSandbox{})
		s.Sh(t, "nohup setsid sleep 600 >/dev/null 2>&1 & mkfifo /tmp/fifo; echo x >/tmp/file; ln -s / /tmp/link")
		if i%2 == 0 { // and with an exec under way
			go func() { _, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sleep", "100"}}) }()
		}
		s.Delete(t)
		if _, err := s.Inspect(t.Context()); err == nil {
			t.Errorf("sandbox %s is still there after delete answered", s.ID)
		}
	}
	d.NothingLeaked(t, before)
}

// shutdown --keep-sandboxes, and the next daemon adopts them.
func TestShutdownCanKeepSandboxes(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "echo kept >/tmp/mine")
	d.Mark(t)
	if err := d.Call(t.Context(), "POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true}, nil); err != nil {
		t.Fatal(err)
	}
	d.WaitExit(t)
	d.Launch(t)
	if got := s.Sh(t, "cat /tmp/mine"); got != "kept\n" {
		t.Errorf("after the restart: %q", got)
	}
}

// shutdown stops the sandboxes and keeps their files, and the next daemon starts them again with a
// launcher of its own. With --delete they are gone.
func TestShutdownStopsSandboxes(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "work"})
	s.Sh(t, "echo kept >/tmp/mine")
	launcher := d.System(t).Launcher
	d.Mark(t)
	if r := d.CLI(t, "shutdown"); r.Code != 0 || !strings.Contains(r.Stderr, "kept with their files: work\n") {
		t.Fatalf("shutdown: exit %d, stderr %q", r.Code, r.Stderr)
	}
	d.WaitExit(t)
	eventually(t, func() error { return gone(launcher) })
	d.Launch(t)
	if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateStopped {
		t.Fatalf("after the restart: %+v, %v", now, err)
	}
	if r := d.CLI(t, "start", "work"); r.Code != 0 {
		t.Fatalf("start: exit %d, stderr %q", r.Code, r.Stderr)
	}
	if got := s.Sh(t, "cat /tmp/mine"); got != "kept\n" {
		t.Errorf("after the restart: %q", got)
	}
	d.Mark(t)
	if r := d.CLI(t, "shutdown", "--delete"); r.Code != 0 {
		t.Fatalf("shutdown --delete: exit %d, stderr %q", r.Code, r.Stderr)
	}
	d.WaitExit(t)
	d.Launch(t)
	if n := d.System(t).Sandboxes; n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
}

// The launcher's death ends every sandbox, by the kernel, and the daemon says so instead of
// hanging.
func TestLauncherDeathEndsSandboxes(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	pids := s.Processes(t)
	kill9(t, d.System(t).Launcher)
	for _, pid := range pids {
		eventually(t, func() error { return gone(pid) })
	}
	eventually(t, func() error {
		now, err := s.Inspect(t.Context())
		if err != nil {
			return err
		}
		if now.State != api.StateLost && now.State != api.StateStopped {
			return fmt.Errorf("state is %s", now.State)
		}
		return nil
	})
	if _, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}}); err == nil {
		t.Error("an exec in a lost sandbox succeeded")
	}
	s.Delete(t)
	// A new launcher serves the next one.
	if got := d.Create(t, api.CreateSandbox{}).Sh(t, "echo new"); got != "new\n" {
		t.Errorf("after the launcher's death: %q", got)
	}
}

// each calls f for 0..n-1, p at a time, and returns when all have returned.
func each(n, p int, f func(i int)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, p)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			f(i)
		})
	}
	wg.Wait()
}
