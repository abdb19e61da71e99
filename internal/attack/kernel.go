package attack

import (
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
		{"name-to-handle", Filter, func() error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/etc", 0); return err }},
		{"fanotify-init", Filter, func() error { _, err := unix.FanotifyInit(unix.FAN_REPORT_FID, 0); return err }},
		{"no-randomisation", Filter, func() error { return raw(unix.SYS_PERSONALITY, 0x0040000, 0, 0) }},
		{"set-mempolicy", Filter, func() error { return raw(unix.SYS_SET_MEMPOLICY, 0, 0, 0) }},
		{"mbind", Filter, func() error { return reached(raw(unix.SYS_MBIND, 1, 0, 0)) }},
		{"quotactl", Filter, func() error { return reached(raw(unix.SYS_QUOTACTL, ^uintptr(0), 0, 0)) }},
	}
}

// hostControl is what root of a host does to it.
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
