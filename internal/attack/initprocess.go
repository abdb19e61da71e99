package attack

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"unsafe"

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
		// Its pages, and with them the host's frames (Rowhammer); which of its memory was touched.
		{"read-init-pagemap", Undumpable, func() error { return open("/proc/1/pagemap", unix.O_RDONLY) }},
		{"read-init-smaps", Undumpable, func() error { return read("/proc/1/smaps") }},
		{"list-init-map-files", Undumpable, func() error { _, err := os.ReadDir("/proc/1/map_files"); return err }},
		// The kernel's stack of a task tells of its randomization (proc_pid_stack(5)).
		{"read-init-stack", Undumpable, func() error { return read("/proc/1/stack") }},
		{"read-init-wchan", Undumpable, initWaitsAt},
		// Reads and writes of init are a side channel: passwords were guessed by it (CVE-2011-2495).
		{"read-init-io", Undumpable, func() error { return read("/proc/1/io") }},
		{"read-init-personality", Undumpable, func() error { return read("/proc/1/personality") }},
		{"read-init-addresses", Undumpable, initAddresses},
		{"read-init-robust-list", Undumpable, initRobustList},
		{"read-init-fdinfo", Undumpable, func() error { return readFirst("/proc/1/fdinfo") }},
		{"read-init-namespace", Undumpable, func() error { _, err := os.Readlink("/proc/1/ns/uts"); return err }},
		// The namespaces of a process by its pidfd (PIDFD_GET_UTS_NAMESPACE, Linux 6.11).
		{"init-namespace-by-pidfd", Undumpable, initNamespace},
		// How late its timers may be (proc_pid_timerslack_ns(5)).
		{"write-init-timer-slack", Capabilities, func() error { return write("/proc/1/timerslack_ns", "50000") }},
		// Its memory is reclaimed, again and again (process_madvise(2), Linux 5.10).
		{"process-madvise-init", Filter, func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			_, _, errno := unix.RawSyscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), 0, 0, unix.MADV_COLD, 0, 0)
			if errno != 0 {
				return errno
			}
			return nil
		}},
	}
}

// initWaitsAt reads the function of the kernel that init waits in: others read 0.
func initWaitsAt() error {
	text, err := os.ReadFile("/proc/1/wchan")
	if err == nil && string(text) == "0" {
		return errors.New("it says 0")
	}
	return err
}

// initAddresses reads where init's code begins: others read 1.
func initAddresses() error {
	text, err := os.ReadFile("/proc/1/stat")
	if err != nil {
		return err
	}
	// The second field, in parentheses, may hold anything (proc_pid_stat(5)); the third follows it.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const startCode = 26 - 3
	if len(fields) <= startCode || len(fields[startCode]) < 2 {
		return errors.New("it has no addresses")
	}
	return nil
}

// initRobustList asks for the head of init's list of futexes: an address in its memory
// (get_robust_list(2): "a helper for an exploit").
func initRobustList() error {
	var head, size uintptr
	return raw(unix.SYS_GET_ROBUST_LIST, 1, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&size)))
}

func initNamespace() error {
	pid, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return err
	}
	defer unix.Close(pid)
	const utsNamespace = 0xff00 + 10 // PIDFD_GET_UTS_NAMESPACE is _IO(0xFF, 10)
	fd, err := unix.IoctlRetInt(pid, utsNamespace)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// readFirst reads any file of a directory.
func readFirst(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	err = errors.New("it is empty")
	for _, e := range entries {
		if err = read(dir + "/" + e.Name()); err == nil {
			return nil
		}
	}
	return err
}
