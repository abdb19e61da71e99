package limits

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// smallPools are pools of the host's, smaller than the bounds of [attack.Resources]: a sandbox can
// take all of them.
var smallPools = [][2]string{
	{"fs/epoll/max_user_watches", "3000"},
	{"fs/inotify/max_user_watches", "400"},
	{"fs/pipe-user-pages-soft", "1024"},
	{"net/ipv4/tcp_mem", "64 128 256"},
	// Each processor keeps up to 256 pages that it has given back (net.core.mem_pcpu_rsv): a smaller
	// pool would seem full for as long as nothing else runs there.
	{"net/ipv4/udp_mem", "256 512 900"},
	{"net/ipv4/tcp_max_orphans", "32"},
}

// emptied are the resources of these pools, and those whose own pools are small enough.
var emptied = []string{
	"epoll-watches", "inotify-watches", "pipe-pages", "tcp-memory", "udp-memory", "tcp-orphans", "descriptors-in-flight", "inotify-instances",
}

// noticed are the resources whose loss neighbours notice when a pool is empty. One that nothing
// bounds must show it, or the probes see nothing.
var noticed = []string{"epoll-watches", "pipe-pages"}

// lower sets the pools until the test ends, in their order.
func lower(t *testing.T, pools [][2]string) {
	t.Helper()
	for _, p := range pools {
		file := filepath.Join("/proc/sys", p[0])
		before, err := os.ReadFile(file)
		if err != nil {
			t.Logf("a pool that this kernel does not have: %v", err)
			continue
		}
		if err := os.WriteFile(file, []byte(p[1]), 0); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(file, []byte(strings.TrimSpace(string(before))), 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// Pools that are smaller than the bound of a sandbox's program are taken to the last. Where
// `enforced` names a layer, neighbours, host and daemon lose nothing. Where it names none they do.
func TestNeighboursOfEmptyPools(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	testenv.Soak(t, "it takes minutes of an emulated processor")
	testenv.RequireCgroup(t, controllers...)
	lower(t, smallPools)
	_, dev := ordinary(t)
	for name, options := range map[string]func(t *testing.T) harness.Options{
		"root":     func(t *testing.T) harness.Options { t.Helper(); return harness.Options{Cgroup: group(t)} },
		"ordinary": func(t *testing.T) harness.Options { t.Helper(); return harness.Options{User: dev} },
	} {
		t.Run(name, func(t *testing.T) {
			d := harness.Start(t, options(t))
			// One at a time: a run of all of them takes longer than a call may.
			for _, resource := range emptied {
				t.Run(resource, func(t *testing.T) { emptyPool(t, d, resource) })
			}
		})
	}
}

// emptyPool has sandboxes of each profile take all of a resource, and judges the report of it.
func emptyPool(t *testing.T, d *harness.Daemon, resource string) {
	t.Helper()
	got := d.CLI(t, "doctor", "--attack", "--neighbours", "--json", resource)
	var report struct {
		Resources []struct {
			Name     string
			Profiles map[string]struct {
				attack.Taken

				Layer, Want, Verdict string
				Lost, Kept, After    map[string]map[string]string
			}
		}
	}
	if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil {
		t.Fatalf("%v: %+v", err, got)
	}
	if len(report.Resources) != 1 || report.Resources[0].Name != resource || len(report.Resources[0].Profiles) == 0 {
		t.Fatalf("the report is not about it: %s", got.Stdout)
	}
	for profile, by := range report.Resources[0].Profiles {
		what := fmt.Sprintf("%s in %s: %s: %d taken, stopped by %q %s, want %q; lost %v, then %v, afterwards %v",
			resource, profile, by.Verdict, by.Taken.Taken, by.Layer, by.Stopped, by.Want, by.Lost, by.Kept, by.After)
		t.Log(what)
		switch {
		case by.Verdict == "LOST" || len(by.After) > 0:
			t.Error(what)
		case by.Verdict == "open" && slices.Contains(noticed, resource) && len(by.Lost) == 0:
			t.Errorf("the pool is empty, and no neighbour noticed: %s", what)
		}
	}
}

// Objects of the kernel count towards the memory limit of the sandbox whose program has them made.
// That program ends, or gets no more, and a neighbour does not notice.
func TestKernelObjectsAreHeldByTheCgroup(t *testing.T) {
	testenv.Soak(t, "it takes minutes of an emulated processor")
	d := shared(t)
	neighbour := d.Create(t, api.CreateSandbox{})
	attacker, err := os.ReadFile(harness.Helper(t, "attacker"))
	if err != nil {
		t.Fatal(err)
	}
	// All of them would be far more than the limit.
	for name, bound := range map[string]int{
		"memory": 256, "memfds": 256, "unix-sockets": 256, "shared-memory": 256, "tmpfs-bytes": 60, "eventfds": 2_000_000, "netlink-sockets": 60_000, "netlink-messages": 4000, "semaphores": 20_000,
	} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 32 * mib}})
			defer s.Delete(t)
			const path = "/var/tmp/attacker"
			if err := s.Put(t.Context(), path, attacker); err != nil {
				t.Fatal(err)
			}
			s.Sh(t, "chmod 755 "+path)
			got, err := s.TryExec(t.Context(), api.ExecRequest{
				Argv: append([]string{path}, attack.TakeResource(name, bound)...), Env: []string{"SANDBOXD_ATTACK_CONTROL=yes"}, Timeout: testenv.HungAfter.Seconds(),
			})
			switch {
			case err != nil:
				t.Logf("the kernel ended all of it for its memory: %v", err)
			case !got.Exit.OOM && !strings.Contains(got.Stdout, `"stopped"`):
				t.Errorf("it got all: %+v %s %s", got.Exit, got.Stdout, got.Stderr)
			default:
				t.Logf("%+v %s", got.Exit, got.Stdout)
			}
			if got := neighbour.Sh(t, "echo fine"); got != "fine\n" {
				t.Errorf("the neighbour says %q", got)
			}
			if used := number(t, cgroupOf(t, neighbour.PID), "memory.events", "max"); used != 0 {
				t.Errorf("the neighbour was at its limit %d times", used)
			}
		})
	}
}
