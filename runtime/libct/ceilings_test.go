package libct

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// All sandboxes together have half of the host's number, whatever that is. One of their users has
// half of that, and no more than the largest useful value.
func TestCeilingsAreParts(t *testing.T) {
	host := []ceiling{{"max_inotify_instances", 9}, {"max_inotify_watches", 1 << 31}}
	if d := cmp.Diff([]ceiling{{"max_inotify_instances", 4}, {"max_inotify_watches", 1 << 30}}, ofAll(host)); d != "" {
		t.Errorf("of all (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]ceiling{{"max_inotify_instances", 2}, {"max_inotify_watches", 1 << 29}}, ofOne(host)[:2]); d != "" {
		t.Errorf("of one (-want +got):\n%s", d)
	}
	limit := func(signals, bytes uint64) []configs.Rlimit {
		return []configs.Rlimit{
			{Type: unix.RLIMIT_SIGPENDING, Hard: signals, Soft: signals}, {Type: unix.RLIMIT_MSGQUEUE, Hard: bytes, Soft: bytes},
		}
	}
	const infinite = unix.RLIM_INFINITY
	for _, tc := range []struct{ host, all, one []configs.Rlimit }{
		{limit(1000, 819200), limit(500, 409600), limit(250, 204800)},
		{limit(15000, 0), limit(7500, 0), limit(1024, 0)},
		{limit(infinite, infinite), limit(infinite/2, infinite/2), limit(1024, 256<<10)},
	} {
		if d := cmp.Diff(tc.all, limitsOfAll(tc.host)); d != "" {
			t.Errorf("of all, of %v (-want +got):\n%s", tc.host, d)
		}
		if d := cmp.Diff(tc.one, limitsOfOne(tc.host)); d != "" {
			t.Errorf("of one, of %v (-want +got):\n%s", tc.host, d)
		}
	}
}
