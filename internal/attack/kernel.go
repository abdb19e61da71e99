package attack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func kernelInterfaces() []Attack {
	return []Attack{
		{"keyctl", Filter, keyctl},
		{"add-key", Filter, addKey},
		{"request-key", Filter, func() error {
			_, err := unix.RequestKey("user", "attacker", "", unix.KEY_SPEC_PROCESS_KEYRING)
			return reached(err)
		}},
		{"bpf", Filter, bpf},
		{"bpf-program-load", Filter, func() error { return reached(raw(unix.SYS_BPF, 5, 0, 0)) }},
		{"perf-event-open", Filter, perf},
		{"userfaultfd", Filter, func() error { return raw(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0) }},
		{"io-uring-setup", Filter, ioUring},
		{"io-uring-enter", Filter, func() error { return reached(raw(unix.SYS_IO_URING_ENTER, ^uintptr(0), 0, 0)) }},
		{"io-uring-register", Filter, func() error { return reached(raw(unix.SYS_IO_URING_REGISTER, ^uintptr(0), 0, 0)) }},
		{"open-by-handle", Filter, openByHandle},
		{"name-to-handle", Filter, func() error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/dev", 0); return err }},
		{"fanotify-init", Filter, func() error { _, err := unix.FanotifyInit(unix.FAN_REPORT_FID, 0); return err }},
		{"no-randomisation", Filter, func() error { return raw(unix.SYS_PERSONALITY, 0x0040000, 0, 0) }},
		{"set-mempolicy", Filter, func() error { return raw(unix.SYS_SET_MEMPOLICY, 0, 0, 0) }},
		{"mbind", Filter, func() error { return reached(raw(unix.SYS_MBIND, 1, 0, 0)) }},
		{"quotactl", Filter, func() error { return reached(raw(unix.SYS_QUOTACTL, ^uintptr(0), 0, 0)) }},
		// Data becomes executable, page 0 is mapped: a null pointer of the kernel's leads there
		// (personality(2), CVE-2009-1895, CVE-2009-2692).
		{"read-implies-exec", Filter, func() error { return raw(unix.SYS_PERSONALITY, 0x0400000, 0, 0) }},
		{"map-page-zero", Filter, func() error { return raw(unix.SYS_PERSONALITY, 0x0100000, 0, 0) }},
		// A filter that compares all 64 bits of an argument is walked around by those that the kernel
		// ignores (CVE-2019-10063).
		{"no-randomisation-high-bits", Filter, func() error { return raw(unix.SYS_PERSONALITY, 1<<32|0x0040000, 0, 0) }},
		{"migrate-pages", Filter, func() error { return reached(raw4(unix.SYS_MIGRATE_PAGES, 1, 0, 0, 0)) }},
		// The names of security modules, their labels of this process (lsm_list_modules(2), Linux 6.8).
		{"lsm-list-modules", Filter, func() error {
			var ids [32]uint64
			size := uint32(unsafe.Sizeof(ids))
			return raw(unix.SYS_LSM_LIST_MODULES, uintptr(unsafe.Pointer(&ids)), uintptr(unsafe.Pointer(&size)), 0)
		}},
		// Project ids and flags of any inode, device nodes included (file_setattr(2), Linux 6.17).
		{"file-setattr", Filter, func() error {
			var attr [24]byte // struct file_attr
			_, _, errno := unix.RawSyscall6(unix.SYS_FILE_SETATTR, ^uintptr(99), path("/tmp"), uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0, 0)
			if errno != 0 {
				return reached(errno)
			}
			return nil
		}},
		{"quotactl-fd", Filter, func() error { return reached(raw(unix.SYS_QUOTACTL_FD, ^uintptr(0), 0, 0)) }},
		{"fanotify-mark", Filter, func() error { return reached(raw(unix.SYS_FANOTIFY_MARK, ^uintptr(0), 1, 0)) }},
	}
}

// hostControl returns the attacks by calls that change the host.
func hostControl() []Attack {
	return append([]Attack{
		{"sethostname", Filter, func() error { return unix.Sethostname([]byte("attacked")) }},
		{"setdomainname", Filter, func() error { return unix.Setdomainname([]byte("attacked")) }},
		{"kexec-file-load", Filter, func() error { return reached(raw(unix.SYS_KEXEC_FILE_LOAD, ^uintptr(0), ^uintptr(0), 0)) }},
		{"init-module", Filter, func() error { return reached(raw(unix.SYS_INIT_MODULE, 0, 0, 0)) }},
		{"finit-module", Filter, func() error { return reached(raw(unix.SYS_FINIT_MODULE, ^uintptr(0), 0, 0)) }},
		{"delete-module", Filter, func() error { return reached(raw(unix.SYS_DELETE_MODULE, path("attacker-has-no-module"), 0, 0)) }},
		{"reboot", Filter, func() error { return reached(raw(unix.SYS_REBOOT, 0, 0, 0)) }}, // without the magic numbers
		{"swapon", Filter, func() error { return reached(raw(unix.SYS_SWAPON, path("/nowhere"), 0, 0)) }},
		{"swapoff", Filter, func() error { return reached(raw(unix.SYS_SWAPOFF, path("/nowhere"), 0, 0)) }},
		{"acct", Filter, func() error { return reached(raw(unix.SYS_ACCT, path("/nowhere"), 0, 0)) }},
		{"settimeofday", Filter, func() error { return raw(unix.SYS_SETTIMEOFDAY, 0, 0, 0) }},
		{"clock-settime", Filter, func() error { return reached(raw(unix.SYS_CLOCK_SETTIME, unix.CLOCK_REALTIME, 0, 0)) }},
		{"adjtimex", Filter, func() error { _, err := unix.Adjtimex(&unix.Timex{}); return err }},
		{"syslog", Filter, func() error { _, err := unix.Klogctl(3, make([]byte, 64)); return err }},
		{"vhangup", Filter, func() error { return reached(raw(unix.SYS_VHANGUP, 0, 0, 0)) }},
	}, processorControl()...)
}
