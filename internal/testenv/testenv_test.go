package testenv

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/idmap"
)

func TestRequired(t *testing.T) {
	for _, test := range []struct {
		list string
		need need
		want bool
	}{
		{"", needUserNS, false},
		{"userns", needUserNS, true},
		{"subids, userns", needUserNS, true},
		{"subids", needUserNS, false},
		{"all", needCgroup, true},
		{"all", needRoot, false}, // root and user exclude each other
		{"all", needUser, false},
		{"all", needAccount, false},
		{"root,account", needAccount, true},
		{"all,root", needRoot, true},
	} {
		if got := required(test.list, test.need); got != test.want {
			t.Errorf("required(%q, %s) = %v, want %v", test.list, test.need, got, test.want)
		}
	}
}

// A skip must name the finding: the summary of `make test` shows nothing else.
func TestUnmetSkipsWithWhatWasFound(t *testing.T) {
	t.Setenv("SANDBOXD_TEST_REQUIRE", "")
	spy := newSpy(t)
	unmet(spy, needPeer, "no such program")
	if spy.skipped != "needs peer: no such program" {
		t.Errorf("skipped with %q", spy.skipped)
	}
	t.Setenv("SANDBOXD_TEST_REQUIRE", "peer")
	spy = newSpy(t)
	unmet(spy, needPeer, "no such program")
	if spy.failed == "" {
		t.Error("a required need did not fail the test")
	}
}

// A need that is met logs nothing, and one that is not skips with the finding. The machine decides
// which; the answer is always the product's.
func TestRequirementsSayWhatWasFound(t *testing.T) {
	t.Setenv("SANDBOXD_TEST_REQUIRE", "")
	spy := newSpy(t)
	RequireCgroup(spy, "nonsense") // no kernel has such a controller
	if !strings.HasPrefix(spy.skipped, "needs cgroup: ") {
		t.Errorf("cgroup: skipped with %q", spy.skipped)
	}
	if found := LacksCgroup("nonsense"); !strings.HasSuffix(spy.skipped, found) || found == "" {
		t.Errorf("cgroup: skipped with %q, and %q is lacking", spy.skipped, found)
	}
	for name, n := range map[string]struct {
		require func(testing.TB)
		found   string
	}{"bed": {RequireBed, LacksBed()}, "resource": {RequireResource, LacksResource()}} {
		spy = newSpy(t)
		n.require(spy)
		if asked := name == "bed" || os.Geteuid() == 0; asked && strings.Contains(spy.skipped, "needs "+name+": ") != (n.found != "") {
			t.Errorf("%s: skipped with %q, and %q is lacking", name, spy.skipped, n.found)
		}
	}
	spy = newSpy(t)
	RequireLandlock(spy, 1000)
	if !strings.HasPrefix(spy.skipped, "needs landlock: ") {
		t.Errorf("Landlock: skipped with %q", spy.skipped)
	}
	spy = newSpy(t)
	RequirePeer(spy, "no-such-program")
	if !strings.Contains(spy.skipped, "no no-such-program in PATH") {
		t.Errorf("peer: skipped with %q", spy.skipped)
	}
	spy = newSpy(t)
	RequireSubIDs(spy)
	plan, err := idmap.Detect()
	if met := err == nil && plan.Size() == idmap.SandboxIDs; met != (spy.skipped == "") {
		t.Errorf("subordinate ids: plan %+v, %v; skipped with %q", plan, err, spy.skipped)
	}
	spy = newSpy(t)
	if c := RequireAccount(spy); (c == nil) == (spy.skipped == "") || c != nil && c.Uid == 0 {
		t.Errorf("account: credentials %+v, skipped with %q", c, spy.skipped)
	}
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	spy = newSpy(t)
	if bus := RequireSystemdUser(spy); bus != "" || spy.skipped == "" {
		t.Errorf("a bus %q in an empty directory", bus)
	}
}

// The lanes tell the skips of a gate run from all others, and a soak run skips nothing.
func TestSoak(t *testing.T) {
	t.Setenv(soakVariable, "")
	spy := newSpy(t)
	Soak(spy, "it judges a rate")
	if !SkippedForSoak(spy.skipped) || Rounds(2, 200) != 2 {
		t.Errorf("in the gate it is skipped with %q, and there are %d rounds", spy.skipped, Rounds(2, 200))
	}
	if SkippedForSoak("needs cgroup: none") {
		t.Error("another need counts as one for soak")
	}
	t.Setenv(soakVariable, "yes")
	spy = newSpy(t)
	Soak(spy, "it judges a rate")
	if spy.skipped != "" || Rounds(2, 200) != 200 {
		t.Errorf("in a soak run it is skipped with %q, and there are %d rounds", spy.skipped, Rounds(2, 200))
	}
}

// spy records instead of ending the test.
type spy struct {
	testing.TB
	skipped, failed string
}

func newSpy(t *testing.T) *spy {
	t.Helper()
	return &spy{TB: t}
}

func (s *spy) Helper()                           {}
func (s *spy) Skipf(format string, args ...any)  { s.skipped = fmt.Sprintf(format, args...) }
func (s *spy) Fatalf(format string, args ...any) { s.failed = fmt.Sprintf(format, args...) }
