package attack

import (
	"golang.org/x/sys/unix"
)

// programs gain something by being started.
func programs() []Attack {
	return []Attack{
		{"exec-setuid", NoNewPrivs, func() error { return execSetID(unix.S_ISUID | 0o755) }},
		{"exec-setgid", NoNewPrivs, func() error { return execSetID(unix.S_ISGID | 0o755) }},
		{"exec-file-capability", Capabilities, execCapable},
	}
}
