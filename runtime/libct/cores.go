package libct

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/seccomp"
)

// coreLimit plans the limit of cores. With 1 byte, and with no other value, the kernel does not
// start the program that a host has for cores (coredump_pipe in fs/coredump.c, core(5)). That
// program would run as root of the host, for each crash, and its arguments can hold a name that the
// crashing program has chosen. No core is written either way.
func coreLimit(host *Host) configs.Rlimit {
	most := min(1, host.Core)
	return configs.Rlimit{Type: unix.RLIMIT_CORE, Hard: most, Soft: most}
}

// readCorePattern returns the host's sysctl; of one that cannot be read, nothing good is assumed.
func readCorePattern() string {
	pattern, err := kernel.CorePattern()
	if err != nil {
		return "@"
	}
	return pattern
}

// coresReason begins the reason for CoresHost in [api.Enforced.Missing].
const coresReason = "cores: "

// keepCores copies what a creation found about cores to the result of an update: the filter, which
// decides too, is not kept.
func keepCores(e, created *api.Enforced) {
	isReason := func(s string) bool { return strings.HasPrefix(s, coresReason) }
	e.Cores = created.Cores
	e.Missing = slices.DeleteFunc(e.Missing, isReason)
	if i := slices.IndexFunc(created.Missing, isReason); i >= 0 {
		e.Missing = append(e.Missing, created.Missing[i])
	}
}

// cores judges the effect of a crash in a sandbox, for Enforced; missing is the remedy where there
// is one. A filter that lets programs lower the limit of 1 byte takes its effect away; nil is one
// that does not.
func (h *Host) cores(filter *specs.LinuxSeccomp) (what, missing string) {
	switch handler := kernel.CoreHandlerOf(h.CorePattern); {
	case handler == kernel.CoreFile:
		return api.CoresNone, ""
	case handler == kernel.CoreSocket:
		return api.CoresHost, coresReason + "the host hands each crash to a service, whatever the limit of cores: " + kernel.CoreRemedy
	case h.Core == 0:
		return api.CoresHost, coresReason + "the host starts a program for each crash, and only a limit of 1 byte keeps the kernel from it, above the daemon's own: " +
			"start the daemon with one (systemd: LimitCORE=infinity; a shell: ulimit -Hc unlimited), or " + kernel.CoreRemedy
	case filter != nil && lowersCores(filter):
		return api.CoresHost, fmt.Sprintf(coresReason+"the host starts a program for each crash, and the profile's filter lets programs set the limit that keeps the kernel from it: "+
			"answer prlimit64 and setrlimit of RLIMIT_CORE (%d) with errno 0, as profile default does", unix.RLIMIT_CORE)
	}
	return api.CoresNone, ""
}

// lowersCores reports whether a filter lets a program set its own limit of cores.
func lowersCores(filter *specs.LinuxSeccomp) bool {
	const pointer = 4096
	return seccomp.Lookup(filter, "prlimit64", 0, unix.RLIMIT_CORE, pointer).Allowed() || seccomp.Lookup(filter, "setrlimit", unix.RLIMIT_CORE, pointer).Allowed()
}
