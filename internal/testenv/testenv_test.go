package testenv

import (
	"fmt"
	"strings"
	"testing"
	"time"

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
		{"all", needRoot, false}, // nobody is both root and not root
		{"all", needUser, false},
		{"all,root", needRoot, true},
	} {
		if got := required(test.list, test.need); got != test.want {
			t.Errorf("required(%q, %s) = %v, want %v", test.list, test.need, got, test.want)
		}
	}
}

// A skip must say what was found: the summary of `make test` shows nothing else.
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

// Where the need is met nothing is said, and where it is not the skip names what was found. Which of the two it is depends
// on the machine; that the answer is the product's does not.
func TestRequirementsSayWhatWasFound(t *testing.T) {
	t.Setenv("SANDBOXD_TEST_REQUIRE", "")
	spy := newSpy(t)
	RequireCgroup(spy, "nonsense") // a controller that no kernel has
	if !strings.HasPrefix(spy.skipped, "needs cgroup: ") {
		t.Errorf("cgroup: skipped with %q", spy.skipped)
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
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	spy = newSpy(t)
	if bus := RequireSystemdUser(spy); bus != "" || spy.skipped == "" {
		t.Errorf("a bus %q in an empty directory", bus)
	}
}

func TestPatience(t *testing.T) {
	for slow, want := range map[string]time.Duration{"": time.Minute, "10": 10 * time.Minute, "0": time.Minute, "nonsense": time.Minute} {
		t.Setenv("SANDBOXD_TEST_SLOW", slow)
		if got := Patience(time.Minute); got != want {
			t.Errorf("SANDBOXD_TEST_SLOW=%q: %s, want %s", slow, got, want)
		}
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
