package security

import (
	"encoding/json"
	"flag"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// How many attacks there are at least, and how many of them work on every host where nothing holds
// them: none gets lost.
const minAttacks, minControls = 270, 150

// TestAttacksAreRefused runs every attack of the corpus in sandboxes of the host image: kernel
// surface at large, nested namespaces, mounts, /proc and /sys, init and its descriptors, cgroups,
// odd socket families. The installed program does it, with nothing of the tests. That attacks see
// the layers is for engine.TestAttacksWorkWithoutTheLayer. Where -run names attacks, only they are
// tried: the bed names those whose controls work nowhere else, and four hundred programs take a
// minute where processors are emulated.
func TestAttacksAreRefused(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	named := namedAttacks(flag.Lookup("test.run").Value.String())
	got := d.CLI(t, append([]string{"doctor", "--attack", "--json"}, named...)...)
	var report struct {
		Attacks []struct {
			Name, Reason string
			Control      bool
			Stopped      map[string]string
		}
		Held    bool
		Seconds float64
	}
	if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil {
		t.Fatalf("%v: %+v", err, got)
	}
	if !report.Held || got.Code != 0 {
		t.Errorf("held: %v, exit code %d", report.Held, got.Code)
	}
	// The limit is for a quiet machine: the attacking program has 84 MB and is written to each
	// sandbox.
	t.Logf("it took %.0f s", report.Seconds)
	if testenv.Soaking() && report.Seconds > 60 {
		t.Errorf("it took %.0f s, more than a minute", report.Seconds)
	}
	if n := len(report.Attacks); named != nil && n != len(named) {
		t.Errorf("%d attacks of the %d that were named", n, len(named))
	} else if named == nil && (n != len(attack.Corpus()) || n < minAttacks) {
		t.Errorf("%d attacks of %d, want %d", n, len(attack.Corpus()), minAttacks)
	}
	want, controls := profiles(t, d), 0
	for _, a := range report.Attacks {
		if a.Control {
			controls++
		}
		t.Run(a.Name, func(t *testing.T) {
			for _, profile := range want {
				switch by, tried := a.Stopped[profile]; {
				case !tried:
					t.Errorf("%s: it was not tried", profile)
				case by == "":
					t.Errorf("%s: the attack worked", profile)
				}
			}
			if !a.Control {
				t.Skipf("the attack does not work on this machine even where nothing holds it: %s", a.Reason)
			}
		})
	}
	t.Logf("%d attacks, %d whose control works here", len(report.Attacks), controls)
	if named == nil && controls < minControls {
		t.Errorf("of %d attacks only %d work here where nothing holds them", len(report.Attacks), controls)
	}
	if left := d.List(t); len(left) != 0 {
		t.Errorf("it left sandboxes behind: %+v", left)
	}
}

// namedAttacks are those that a -test.run names to the letter; nil: all are meant.
func namedAttacks(run string) (named []string) {
	for _, a := range attack.Corpus() {
		if strings.Contains(run+"|", "^TestAttacksAreRefused$/^"+regexp.QuoteMeta(a.Name)+"$|") {
			named = append(named, a.Name)
		}
	}
	return named
}

// Landlock alone holds these. A profile with a read-only root forbids making message queues, though
// every user may by the mode of their file system, which is mounted writable. Init, which shares a
// PID namespace and perhaps a uid with programs, gets no signal. Everything that must go on working
// does.
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
	const queue = ": >/dev/mqueue/x"
	if got := ordinary.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", queue}, User: "65534"}); got.Exit.Code != 0 {
		t.Errorf("control: %s: %s", queue, got.Stderr)
	}
	if got := hardened.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", queue}}); got.Exit.Code == 0 || !strings.Contains(got.Stderr, "Permission denied") {
		t.Errorf("%s: %+v %s", queue, got.Exit, got.Stderr)
	}
	for _, s := range []*harness.Sandbox{ordinary, hardened} {
		// Root of the sandbox may signal whatever is in its PID namespace, were it not for the scope.
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "kill -0 1"}}); got.Exit.Code == 0 || !strings.Contains(got.Stderr, "not permitted") {
			t.Errorf("%s: a signal to init: %+v %s", s.Profile, got.Exit, got.Stderr)
		}
		// Two execs are forked one after the other, and are in one domain.
		var sleeper sync.WaitGroup
		sleeper.Go(func() {
			_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "echo $$ >/tmp/pid; exec sleep 1000"}, Timeout: testenv.HungAfter.Seconds()})
		})
		s.Sh(t, "while ! test -s /tmp/pid; do :; done; kill $(cat /tmp/pid) && mkdir /tmp/d && echo x >/tmp/a && mv /tmp/a /tmp/d/ && ln /tmp/d/a /tmp/b && echo y >/dev/null")
		sleeper.Wait()
	}
	// A domain forbids every change of mounts: the first of the layers of attacks "mount-…", which
	// the filter answers before it.
	if got := ordinary.Sh(t, "tr '\\0' ' ' </proc/1/cmdline"); !strings.HasPrefix(got, "/dev/sandboxd-init filter=5 landlock=") {
		t.Errorf("init was told %q", got)
	}
}
