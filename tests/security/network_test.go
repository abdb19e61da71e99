package security

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/testenv/outside"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Minimum numbers of attacks on networks, and of those that work on every host without rules and
// gateway: none gets lost.
const minNetworkAttacks, minNetworkControls = 140, 135

// networkReport is the output of `doctor --attack --network --json`, as far as the test reads it.
type networkReport struct {
	Profiles []struct {
		Name, Network, Error string
		Refused              int
		Passed               []string
	}
	Attacks []struct {
		Name, Reason string
		Control      bool
		Stopped      map[string]string
	}
	Held bool
}

// TestNetworkAttacksAreRefused runs every attack of the corpus, and those on networks, in sandboxes
// whose policy allows nothing. As root it runs where the gateway could be led to anything: the
// daemon is in a network namespace of the test's, in which everything answers. The record of each
// sandbox has the refusals, and nothing that was allowed.
func TestNetworkAttacksAreRefused(t *testing.T) {
	testenv.RequireUserNS(t)
	inWorld(t, attackNetworks)
}

func attackNetworks(t *testing.T) {
	t.Helper()
	d := harness.Start(t, harness.Options{})
	got := d.CLI(t, "doctor", "--attack", "--network", "--json")
	var report networkReport
	if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil {
		t.Fatalf("%v: %+v", err, got)
	}
	if !report.Held || got.Code != 0 {
		t.Errorf("held: %v, exit code %d", report.Held, got.Code)
	}
	if n := len(report.Attacks); n != len(attack.Corpus())+len(attack.Egress()) || len(attack.Egress()) < minNetworkAttacks {
		t.Errorf("%d attacks of %d and %d, want %d", n, len(attack.Corpus()), len(attack.Egress()), minNetworkAttacks)
	}
	want := profiles(t, d)
	for _, p := range report.Profiles {
		for _, passed := range p.Passed {
			t.Errorf("%s: passed the policy: %s", p.Name, passed)
		}
		// A connection or question each that came to the gateway.
		if p.Error == "" && (p.Network != "egress" || p.Refused < 70) {
			t.Errorf("%s: network %q, %d refusals are in its record", p.Name, p.Network, p.Refused)
		}
	}
	controls := 0
	for _, a := range report.Attacks {
		for _, profile := range want {
			if by, tried := a.Stopped[profile]; !tried || by == "" {
				t.Errorf("%s: %s: tried: %v; it worked", profile, a.Name, tried)
			}
		}
		if a.Control && strings.HasPrefix(a.Name, "egress-") {
			controls++
		}
	}
	if controls < minNetworkControls {
		t.Errorf("only %d attacks on networks work here where nothing holds them", controls)
	}
	if left := d.List(t); len(left) != 0 {
		t.Errorf("it left sandboxes behind: %+v", left)
	}
}

// SECURITY.md says how many attacks on networks there are.
func TestNetworkAttacksAreCounted(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(harness.Root(t), "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("and %d more", len(attack.Egress())); !strings.Contains(string(text), want) {
		t.Errorf("SECURITY.md does not say %q", want)
	}
}

// openOnFull are the attacks on public places. They work in the mode full, where they are the
// control of all others.
var openOnFull = []string{
	"egress-public", "egress-public6", "egress-public-mapped", "egress-public-ssh", "egress-public-plain", "egress-dns-over-tls",
}

// TestFullReachesThePublicOnly tries to reach everything that is not public in the mode full, where
// every address has a server. Names are not tried: they are allowed.
func TestFullReachesThePublicOnly(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireRoot(t)
	inWorld(t, attackFull)
}

func attackFull(t *testing.T) {
	t.Helper()
	program := harness.Helper(t, "attacker")
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}})
	attackWhereFull(t, s, plant(t, s, program))
}

// attackWhereFull runs the attacks in a sandbox that reaches everything public.
func attackWhereFull(t *testing.T, s *harness.Sandbox, path string) {
	t.Helper()
	var tried []string
	for _, a := range attack.Egress() {
		isName := slices.ContainsFunc([]string{"egress-dns-", "egress-tls-", "egress-http-"}, func(p string) bool { return strings.HasPrefix(a.Name, p) })
		open := slices.Contains(openOnFull, a.Name)
		if isName && !open {
			continue
		}
		tried = append(tried, a.Name)
	}
	attackFrom(t, s, path, tried, func(r attack.Result) {
		if open := slices.Contains(openOnFull, r.Attack); r.Worked != open {
			t.Errorf("%s: worked: %v, want %v: %s", r.Attack, r.Worked, open, r.Detail)
		}
	})
	if len(tried) < 100 {
		t.Errorf("only %d were tried", len(tried))
	}
}

// attackFrom tries attacks in a sandbox that has the attacker, and judges each.
func attackFrom(t *testing.T, s *harness.Sandbox, path string, attacks []string, judge func(attack.Result)) {
	t.Helper()
	judged := 0
	err := attack.TryAll(attacks, func(group []string) (said string, killed bool, err error) {
		got := s.Exec(t, api.ExecRequest{Argv: append([]string{path}, attack.Try(group...)...)})
		return got.Stdout, got.Exit.Signal == "SIGSYS", nil
	}, func(_ string, r attack.Result) error {
		judged++
		judge(r)
		return nil
	})
	if err != nil || judged != len(attacks) {
		t.Errorf("of %d attacks %d have a result: %v", len(attacks), judged, err)
	}
}

// TestSharedNetworkReachesNoMore runs the attacks in sandboxes that share the network of another
// one, of the modes full and none, and of one whose policy allows nothing.
func TestSharedNetworkReachesNoMore(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireRoot(t)
	inWorld(t, attackShared)
}

func attackShared(t *testing.T) {
	t.Helper()
	program := harness.Helper(t, "attacker")
	d := harness.Start(t, harness.Options{})
	share := func(owner api.Network) (*harness.Sandbox, string) {
		o := d.Create(t, api.CreateSandbox{Network: owner})
		s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: o.ID}})
		return s, plant(t, s, program)
	}
	s, path := share(api.Network{Mode: api.NetworkFull})
	attackWhereFull(t, s, path)
	for name, owner := range map[string]api.Network{
		"nothing": {Mode: api.NetworkEgress, Policy: "version: 1\nrules: []\n"}, "none": {},
	} {
		s, path := share(owner)
		var all []string
		for _, a := range attack.Egress() {
			all = append(all, a.Name)
		}
		attackFrom(t, s, path, all, func(r attack.Result) {
			if r.Worked {
				t.Errorf("%s: %s: it worked", name, r.Attack)
			}
		})
	}
}

// inWorld runs a test on a thread whose network namespace has an answer at every address. Addresses
// of the host itself answer there, all others beyond a veth. Only root can make that one; others
// run the test where they are.
func inWorld(t *testing.T, test func(*testing.T)) {
	t.Helper()
	if os.Geteuid() != 0 {
		test(t)
		return
	}
	goruntime.LockOSThread() // and never unlocked: the thread, and the namespace, end with the test
	if unix.Gettid() == unix.Getpid() {
		t.Run("thread", func(t *testing.T) { inWorld(t, test) }) // the main thread would stay
		return
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	everything := func() error {
		w, err := attack.Everything()
		if err == nil {
			t.Cleanup(func() { _ = w.Close() })
		}
		return err
	}
	if err := everything(); err != nil {
		t.Fatal(err)
	}
	n, err := outside.Make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	if err := n.Enter(everything); err != nil {
		t.Fatal(err)
	}
	test(t)
}
