package attack

import (
	"os"

	"golang.org/x/sys/unix"
)

func initProcess() []Attack {
	return []Attack{
		{"ptrace-init", Undumpable, func() error { return ptrace(1) }},
		{"read-init-memory", Undumpable, func() error { return open("/proc/1/mem", unix.O_RDWR) }},
		{"read-init-exe", Undumpable, func() error { return open("/proc/1/exe", unix.O_RDONLY) }},
		{"read-init-environ", Undumpable, func() error { return open("/proc/1/environ", unix.O_RDONLY) }},
		{"read-init-maps", Undumpable, func() error { return open("/proc/1/maps", unix.O_RDONLY) }},
		{"read-init-auxv", Undumpable, func() error { return open("/proc/1/auxv", unix.O_RDONLY) }},
		{"read-init-syscall", Undumpable, func() error { return read("/proc/1/syscall") }},
		{"enter-init-root", Undumpable, func() error { return unix.Chdir("/proc/1/root/") }},
		{"enter-init-cwd", Undumpable, func() error { return unix.Chdir("/proc/1/cwd/") }},
		{"open-init-fds", Undumpable, openInitFDs},
		{"process-vm-readv-init", Filter, readInit},
		{"process-vm-writev-init", Filter, func() error {
			return reached(raw(unix.SYS_PROCESS_VM_WRITEV, 1, 0, 0))
		}},
		{"pidfd-getfd-init", Filter, pidfdGetfd},
		{"kcmp-init", Filter, func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_KCMP, 1, uintptr(os.Getpid()), 1, 0, 0, 0) // KCMP_VM
			if errno != 0 {
				return errno
			}
			return nil
		}},
		{"move-pages-init", Filter, func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_MOVE_PAGES, 1, 0, 0, 0, 0, 0)
			if errno != 0 {
				return reached(errno)
			}
			return nil
		}},
	}
}
