package attack

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// int80getpid enters the kernel through the 32-bit gate.
func int80getpid() uint32

func processorControl() []Attack {
	return []Attack{
		{"iopl", Filter, func() error { return raw(unix.SYS_IOPL, 3, 0, 0) }},
		{"ioperm", Filter, func() error { return raw(unix.SYS_IOPERM, 0x80, 1, 1) }},
		{"modify-ldt", Filter, func() error { return raw(unix.SYS_MODIFY_LDT, 0, 0, 0) }},
		{"int80-abi", Filter, func() error {
			if pid := int80getpid(); int(pid) != os.Getpid() {
				return errors.New("the 32-bit entry does not answer")
			}
			return nil
		}},
		{"x32-abi", Filter, func() error { return raw(0x40000000|unix.SYS_GETPID, 0, 0, 0) }},
	}
}
