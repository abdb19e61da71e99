package testenv

import (
	"fmt"
	"testing"
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
