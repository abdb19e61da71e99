package attack

import (
	"golang.org/x/sys/unix"
)

func terminals() []Attack {
	return []Attack{
		{"tiocsti", Filter, func() error { return ttyIoctl(unix.TIOCSTI) }},
		{"tiocsetd", Filter, func() error { return reached(ttyIoctl(unix.TIOCSETD)) }},
		{"tiocsti-high-bits", Filter, func() error { return ttyIoctl(unix.TIOCSTI | 1<<32) }},
	}
}
