package libct

import (
	"fmt"

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

// cores judges what a crash in a sandbox does, for Enforced; missing is the remedy where that is not
// nothing. A filter that lets programs lower the limit of 1 byte takes its effect away; nil is one
// that does not.
func (h *Host) cores(filter *specs.LinuxSeccomp) (what, missing string) {
	switch handler := kernel.CoreHandlerOf(h.CorePattern); {
	case handler == kernel.CoreFile:
		return api.CoresNone, ""
	case handler == kernel.CoreSocket:
		return api.CoresHost, "cores: the host hands each crash to a service, whatever the limit of cores: " + kernel.CoreRemedy
	case h.Core == 0:
		return api.CoresHost, "cores: the host starts a program for each crash, and only a limit of 1 byte keeps the kernel from it, above the daemon's own: " +
			"start the daemon with one (systemd: LimitCORE=infinity; a shell: ulimit -Hc unlimited), or " + kernel.CoreRemedy
	case filter != nil && lowersCores(filter):
		return api.CoresHost, fmt.Sprintf("cores: the host starts a program for each crash, and the profile's filter lets programs set the limit that keeps the kernel from it: "+
			"answer prlimit64 and setrlimit of RLIMIT_CORE (%d) with errno 0, as profile default does", unix.RLIMIT_CORE)
	}
	return api.CoresNone, ""
}

// lowersCores reports whether a filter lets a program set its own limit of cores.
func lowersCores(filter *specs.LinuxSeccomp) bool {
	const pointer = 4096
	return seccomp.Lookup(filter, "prlimit64", 0, unix.RLIMIT_CORE, pointer).Allowed() || seccomp.Lookup(filter, "setrlimit", unix.RLIMIT_CORE, pointer).Allowed()
}
