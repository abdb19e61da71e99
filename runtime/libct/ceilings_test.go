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
	host := []ceiling{{Name: "user/max_inotify_instances", Most: 9}, {Name: "user/max_inotify_watches", Most: 1 << 31}}
	if d := cmp.Diff([]ceiling{{Name: "user/max_inotify_instances", Most: 4}, {Name: "user/max_inotify_watches", Most: 1 << 30}}, ofAll(host)); d != "" {
		t.Errorf("of all (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]ceiling{{Name: "user/max_inotify_instances", Most: 2}, {Name: "user/max_inotify_watches", Most: 1 << 29}}, ofOne(host, 1<<30, true)[:2]); d != "" {
		t.Errorf("of one (-want +got):\n%s", d)
	}
	limit := func(signals, bytes, locked uint64) []configs.Rlimit {
		return []configs.Rlimit{
			{Type: unix.RLIMIT_SIGPENDING, Hard: signals, Soft: signals},
			{Type: unix.RLIMIT_MSGQUEUE, Hard: bytes, Soft: bytes},
			{Type: unix.RLIMIT_MEMLOCK, Hard: locked, Soft: locked},
		}
	}
	const infinite = unix.RLIM_INFINITY
	for _, tc := range []struct{ host, all, one []configs.Rlimit }{
		{limit(1000, 819200, 200000), limit(500, 409600, 100000), limit(250, 204800, 50000)},
		{limit(15000, 0, 8<<20), limit(7500, 0, 4<<20), limit(1024, 0, 64<<10)},
		{limit(infinite, infinite, infinite), limit(infinite/2, infinite/2, infinite/2), limit(1024, 256<<10, 64<<10)},
	} {
		if d := cmp.Diff(tc.all, limitsOfAll(tc.host)); d != "" {
			t.Errorf("of all, of %v (-want +got):\n%s", tc.host, d)
		}
		if d := cmp.Diff(tc.one, limitsOfOne(tc.host)); d != "" {
			t.Errorf("of one, of %v (-want +got):\n%s", tc.host, d)
		}
	}
}

// Shared memory of System V has the limit of memory as its ceiling, and the rest of it has small
// ones, where the kernel lets a namespace's root set them.
func TestCeilingsOfIPC(t *testing.T) {
	text := func(all []ceiling) map[string]string {
		said := make(map[string]string)
		for _, c := range all {
			said[c.Name] = c.text()
		}
		return said
	}
	want := map[string]string{"kernel/msgmni": "32", "kernel/sem": "32000 32000 500 256", "kernel/shmmni": "256", "kernel/shmall": "262144"}
	for _, kind := range closed {
		want["user/max_"+kind+"_namespaces"] = "0"
	}
	if d := cmp.Diff(want, text(ofOne(nil, 1<<30, true))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got := text(ofOne(nil, 1<<30, false)); got["kernel/shmmni"] != "" || len(got) != len(closed) {
		t.Errorf("of a kernel that does not let them be set: %v", got)
	}
	if _, ok := text(ofOne(nil, 0, true))["kernel/shmall"]; ok {
		t.Error("a sandbox without a limit of memory has one of shared memory")
	}
}
