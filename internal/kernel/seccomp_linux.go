package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func seccomp(op uintptr, arg *uint32) error {
	//nolint:gosec // G103: x/sys has no wrapper for seccomp(2); the kernel reads four bytes
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, op, 0, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
