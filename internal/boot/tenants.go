package boot

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

const (
	// hostMemory is the least memory that all sandboxes together leave to the host by default.
	hostMemory = 512 << 20
	// launcherMemory and launcherPids are what the launcher has beside the room of the sandboxes,
	// in whose cgroup it is: it unpacks layers there.
	launcherMemory = 128 << 20
	launcherPids   = 256
	// tenantsWeight is the part of all sandboxes in processor time, of the daemon's 100.
	tenantsWeight = 50
)

// hostRoom holds the resources that the host and the cgroups above leave the daemon.
type hostRoom struct {
	memory int64 // bytes
	pids   int64 // processes and threads
}

// measureHost reads the host's memory and processes.
func measureHost(subtree cgroup.Subtree) (hostRoom, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return hostRoom{}, fmt.Errorf("read the host's memory: %w", err)
	}
	h := hostRoom{memory: int64(info.Totalram) * int64(info.Unit)} //nolint:gosec // G115: no host has 8 EiB
	for _, file := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		data, err := os.ReadFile(file)
		if err != nil {
			return h, fmt.Errorf("read the host's processes: %w", err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		if err != nil {
			return h, fmt.Errorf("read the host's processes: %s: %w", file, err)
		}
		h.pids = atMost(h.pids, n)
	}
	h.memory = atMost(h.memory, subtree.Ceiling("memory.max"))
	h.pids = atMost(h.pids, subtree.Ceiling("pids.max"))
	return h, nil
}

// atMost returns the lesser of two bounds, of which zero is none.
func atMost(a, b int64) int64 {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// planRoom returns the room for the limits of all sandboxes, and the bounds of them and the
// launcher together. It is pure.
func planRoom(o *Options, h hostRoom) (runtime.Room, cgroup.Aggregate) {
	room := runtime.Room{Memory: o.Memory, Pids: o.Pids, Overcommit: o.Overcommit}
	var all cgroup.Aggregate
	if o.MultiTenant {
		if room.Memory == 0 {
			room.Memory = max(1, min(h.memory/100*85, h.memory-hostMemory)-launcherMemory) // never zero, which is no bound
		}
		if room.Pids == 0 {
			room.Pids = max(1, h.pids/2-launcherPids)
		}
		all.NoSwap, all.CPUWeight = true, tenantsWeight
	}
	if room.Memory > 0 {
		all.Memory = room.Memory + launcherMemory
	}
	if room.Pids > 0 {
		all.Pids = room.Pids + launcherPids
	}
	return room, all
}

// tenancy holds the facts that decide whether this host keeps tenants apart.
type tenancy struct {
	tenants  string // option
	socket   string // reason why tenants cannot use the socket; empty if they can
	enforced api.Enforced
	noDisk   string // reason why there is no reserve on the disk; empty if there is
	host     hostRoom
	all      cgroup.Aggregate
}

// refusals returns the reasons why tenants would not be kept apart, each with its remedy. It is
// pure.
func (t *tenancy) refusals() []string {
	var why []string
	add := func(what, remedy string) { why = append(why, what+": "+remedy) }
	if t.tenants == "" {
		add("no tenants are named", "--tenants UID,... or --tenants @GROUP")
	}
	if t.socket != "" {
		add(t.socket, "make a directory that only the daemon's user can write to and all can search, and name a socket there: "+
			"mkdir -m 711 /run/sandboxd-tenants, then --socket /run/sandboxd-tenants/api.sock")
	}
	if t.enforced.IDs != api.IDsOwn {
		add(fmt.Sprintf("sandboxes of different tenants would have the same ids of the host (ids: %q)", t.enforced.IDs),
			"run the daemon as root, on Linux 5.19 or newer, with its data directory on a file system with idmapped mounts (ext4, XFS, Btrfs); sandboxd doctor says more")
	}
	var lacking []string
	for _, c := range [][2]string{{"memory", t.enforced.Memory}, {"cpu", t.enforced.CPU}, {"pids", t.enforced.Pids}} {
		if c[1] != "cgroup" {
			lacking = append(lacking, c[0])
		}
	}
	if lacking != nil {
		add("no cgroup v2 with "+strings.Join(lacking, ", ")+" is delegated to the daemon", "sandboxd doctor says how to get one on this host")
	} else {
		if most := t.host.memory - hostMemory/2; t.all.Memory > most {
			add(fmt.Sprintf("all sandboxes together could take %d bytes of memory, of %d that the host has", t.all.Memory, t.host.memory),
				fmt.Sprintf("--memory %d or less", max(0, most-launcherMemory)))
		}
		if most := t.host.pids - t.host.pids/10; t.all.Pids > most {
			add(fmt.Sprintf("all sandboxes together could take %d processes, of %d that the host has", t.all.Pids, t.host.pids),
				fmt.Sprintf("--pids %d or less, or a higher kernel.pid_max", max(0, most-launcherPids)))
		}
	}
	if t.noDisk != "" {
		add(t.noDisk, "free some space, or give --disk-reserve a size that is free")
	}
	return why
}

// check returns one error with all reasons, nil if there is none.
func (t *tenancy) check() error {
	why := t.refusals()
	if why == nil {
		return nil
	}
	var text strings.Builder // errors are shown in one line
	for i, w := range why {
		fmt.Fprintf(&text, " (%d) %s.", i+1, w)
	}
	return fmt.Errorf("--multi-tenant: this host would not keep tenants apart, or from the daemon:%s", text.String())
}

// parseTenants reads the options of tenants. Without --multi-tenant there are none.
func (o *Options) parseTenants() (daemon.Tenants, error) {
	switch {
	case !o.MultiTenant && o.Tenants != "":
		return daemon.Tenants{}, optionErrorf("--tenants %q: only with --multi-tenant", o.Tenants)
	case !o.MultiTenant || o.Tenants == "":
		return daemon.Tenants{}, nil
	}
	t, err := daemon.ParseTenants(o.Tenants)
	if err != nil {
		return t, optionErrorf("--tenants: %w", err)
	}
	return t, nil
}
