package boot

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

func TestPlanRoom(t *testing.T) {
	const gib = 1 << 30
	host := hostRoom{memory: 20 * gib, pids: 32768}
	for _, test := range []struct {
		name string
		o    Options
		h    hostRoom
		room runtime.Room
		all  cgroup.Aggregate
	}{
		{name: "one tenant", h: host},
		{
			name: "one tenant, bounded", o: Options{Memory: gib, Pids: 1000, Overcommit: 2}, h: host,
			room: runtime.Room{Memory: gib, Pids: 1000, Overcommit: 2}, all: cgroup.Aggregate{Memory: gib + launcherMemory, Pids: 1000 + launcherPids},
		},
		{
			name: "parts of the host", o: Options{MultiTenant: true, Overcommit: 1}, h: host,
			room: runtime.Room{Memory: host.memory/100*85 - launcherMemory, Pids: 16384 - launcherPids, Overcommit: 1},
			all:  cgroup.Aggregate{Memory: host.memory / 100 * 85, Pids: 16384, NoSwap: true, CPUWeight: 50},
		},
		{
			name: "a small host keeps its least", o: Options{MultiTenant: true}, h: hostRoom{memory: gib, pids: 1000},
			room: runtime.Room{Memory: gib - hostMemory - launcherMemory, Pids: 244},
			all:  cgroup.Aggregate{Memory: gib - hostMemory, Pids: 500, NoSwap: true, CPUWeight: 50},
		},
		{
			name: "a host without room bounds all the same", o: Options{MultiTenant: true}, h: hostRoom{memory: hostMemory, pids: 100},
			room: runtime.Room{Memory: 1, Pids: 1}, all: cgroup.Aggregate{Memory: 1 + launcherMemory, Pids: 1 + launcherPids, NoSwap: true, CPUWeight: 50},
		},
	} {
		room, all := planRoom(&test.o, test.h)
		if diff := cmp.Diff(test.room, room) + cmp.Diff(test.all, all); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

func TestTenancy(t *testing.T) {
	const gib = 1 << 30
	good := func() *tenancy {
		return &tenancy{
			tenants: "4711", enforced: api.Enforced{IDs: api.IDsOwn, Memory: "cgroup", CPU: "cgroup", Pids: "cgroup"},
			host: hostRoom{memory: 4 * gib, pids: 10000}, all: cgroup.Aggregate{Memory: 3 * gib, Pids: 5000},
		}
	}
	if err := good().check(); err != nil {
		t.Fatal(err)
	}
	for want, spoil := range map[string]func(*tenancy){
		"no tenants are named: --tenants":                                    func(t *tenancy) { t.tenants = "" },
		"the socket is closed: make a directory":                             func(t *tenancy) { t.socket = "the socket is closed" },
		`(ids: "shared"): run the daemon as root`:                            func(t *tenancy) { t.enforced.IDs = api.IDsShared },
		`(ids: "single"): run the daemon as root`:                            func(t *tenancy) { t.enforced.IDs = api.IDsSingle },
		"no cgroup v2 with memory is delegated to the daemon: sandboxd doct": func(t *tenancy) { t.enforced.Memory = "none" },
		"no cgroup v2 with cpu, pids is delegated":                           func(t *tenancy) { t.enforced.CPU, t.enforced.Pids = "none", "rlimit" },
		"could take 4294967296 bytes of memory, of 4294967296":               func(t *tenancy) { t.all.Memory = 4 * gib },
		"could take 9001 processes, of 10000 that the host has: --pids 8744": func(t *tenancy) { t.all.Pids = 9001 },
		"the disk is full: free some space":                                  func(t *tenancy) { t.noDisk = "the disk is full" },
	} {
		bad := good()
		spoil(bad)
		if err := bad.check(); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "(2)") {
			t.Errorf("want %q: %v", want, err)
		}
	}
	all := &tenancy{socket: "closed", noDisk: "full", enforced: api.Enforced{IDs: api.IDsSingle}}
	if err := all.check(); !strings.Contains(err.Error(), " (5) ") {
		t.Errorf("not all reasons at once: %v", err)
	}
}

func TestTenantsNeedTheirMode(t *testing.T) {
	o := Options{Tenants: "4711"}
	if _, err := o.parseTenants(); err == nil {
		t.Error("tenants without --multi-tenant")
	}
	o.MultiTenant = true
	if got, err := o.parseTenants(); err != nil || len(got.UIDs) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	o.Tenants = "4711,no-such-user-here"
	if _, err := o.parseTenants(); err == nil {
		t.Error("an unknown user")
	}
}
