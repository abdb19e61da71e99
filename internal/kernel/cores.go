package kernel

import "strings"

// CoreHandler is the kernel's way with cores.
type CoreHandler int

// The ways of kernel.core_pattern (core(5)).
const (
	CoreFile   CoreHandler = iota // written to a file, within RLIMIT_CORE
	CorePipe                      // handed to a program, started as root of the host, unless RLIMIT_CORE is 1 byte
	CoreSocket                    // handed to a service over a socket, since Linux 6.16, whatever RLIMIT_CORE is
)

// CoreRemedy makes the kernel write cores to files.
const CoreRemedy = "sysctl -w kernel.core_pattern=core"

// IPCRemedy lets the root of an IPC namespace set its ceilings.
const IPCRemedy = "run Linux 6.9 or newer; until then a limit of memory bounds it, where a cgroup is delegated"

// CoreHandlerOf reads a value of kernel.core_pattern.
func CoreHandlerOf(pattern string) CoreHandler {
	switch {
	case strings.HasPrefix(pattern, "|"):
		return CorePipe
	case strings.HasPrefix(pattern, "@"):
		return CoreSocket
	}
	return CoreFile
}
