package security

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The installed program attacks itself: with nothing of the tests, and with the same corpus.
func TestDoctorAttacks(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	got := d.CLI(t, "doctor", "--attack", "--json")
	var report struct {
		Profiles []struct{ Name, Error string }
		Attacks  []struct {
			Name    string
			Control bool
			Stopped map[string]string
		}
		Held bool
	}
	if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil || got.Code != 0 {
		t.Fatalf("%v: %+v", err, got)
	}
	want := len(profiles(t, d))
	if !report.Held || len(report.Attacks) != len(attack.Corpus()) {
		t.Errorf("held: %v, %d attacks of %d", report.Held, len(report.Attacks), len(attack.Corpus()))
	}
	controls := 0
	for _, a := range report.Attacks {
		if a.Control {
			controls++
		}
		if len(a.Stopped) != want {
			t.Errorf("%s was tried in %d sandboxes of %d", a.Name, len(a.Stopped), want)
		}
		for profile, by := range a.Stopped {
			if by == "" {
				t.Errorf("%s worked in profile %s", a.Name, profile)
			}
		}
	}
	if controls < 80 {
		t.Errorf("of %d attacks only %d work here where nothing holds them", len(report.Attacks), controls)
	}
	if left := d.List(t); len(left) != 0 {
		t.Errorf("it left sandboxes behind: %+v", left)
	}
}

// What Landlock alone holds: under a profile with a read-only root /proc is not to be written, though it is mounted writable; and
// init, which programs share a PID namespace and perhaps a uid with, gets no signal. What must go on working does.
func TestLandlockHolds(t *testing.T) {
	testenv.RequireLandlock(t, 6)
	testenv.RequireSubIDs(t)
	d := harness.Start(t, harness.Options{})
	ordinary, hardened := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{Profile: "hardened"})
	for _, s := range []*harness.Sandbox{ordinary, hardened} {
		if s.Enforced.Landlock < 6 {
			t.Fatalf("enforced: %+v", s.Enforced)
		}
	}
	const comm = "echo name >/proc/self/comm"
	if got := ordinary.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", comm}}); got.Exit.Code != 0 {
		t.Errorf("control: %s: %s", comm, got.Stderr)
	}
	if got := hardened.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", comm}}); got.Exit.Code == 0 || !strings.Contains(got.Stderr, "Permission denied") {
		t.Errorf("%s: %+v %s", comm, got.Exit, got.Stderr)
	}
	for _, s := range []*harness.Sandbox{ordinary, hardened} {
		// Root of the sandbox may signal whatever is in its PID namespace, were it not for the scope.
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "kill -0 1"}}); got.Exit.Code == 0 || !strings.Contains(got.Stderr, "not permitted") {
			t.Errorf("%s: a signal to init: %+v %s", s.Profile, got.Exit, got.Stderr)
		}
		// Two execs are forked one after the other, and are in one domain.
		var sleeper sync.WaitGroup
		sleeper.Go(func() {
			_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "echo $$ >/tmp/pid; exec sleep 1000"}, Timeout: 60})
		})
		s.Sh(t, "while ! test -s /tmp/pid; do :; done; kill $(cat /tmp/pid) && mkdir /tmp/d && echo x >/tmp/a && mv /tmp/a /tmp/d/ && ln /tmp/d/a /tmp/b && echo y >/dev/null")
		sleeper.Wait()
	}
	// A domain forbids every change of mounts: the first of the layers of attacks "mount-…", which the filter answers before it.
	if got := ordinary.Sh(t, "tr '\\0' ' ' </proc/1/cmdline"); !strings.HasPrefix(got, "/dev/sandboxd-init landlock=") {
		t.Errorf("init was told %q", got)
	}
}
