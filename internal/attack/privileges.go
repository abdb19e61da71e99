package attack

import (
	"encoding/binary"
	"errors"
	"os"
	goruntime "runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hostPrivileges returns the attacks that take a capability in the host's first user namespace,
// which no root of a sandbox has, or one that a sandbox does without.
func hostPrivileges() []Attack {
	return []Attack{
		// Above everything else that runs on the host (sched(7), setpriority(2), ioprio_set(2)).
		{"schedule-fifo", Namespaces, func() error { return schedule(&unix.SchedAttr{Policy: unix.SCHED_FIFO, Priority: 1}) }},
		{"schedule-deadline", Namespaces, func() error {
			const millisecond = 1000 * 1000
			return schedule(&unix.SchedAttr{Policy: unix.SCHED_DEADLINE, Runtime: millisecond, Deadline: 100 * millisecond, Period: 100 * millisecond})
		}},
		{"raise-priority", Namespaces, func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -1) }},
		{"raise-autogroup", Namespaces, func() error { return write("/proc/self/autogroup", "-1") }},
		{"realtime-io", Namespaces, func() error {
			const realtime = 1 << 13 // IOPRIO_CLASS_RT
			return raw(unix.SYS_IOPRIO_SET, 1, 0, realtime)
		}},
		// Others are killed when memory runs out (proc_pid_oom_score_adj(5)).
		{"never-out-of-memory", Namespaces, func() error { return write("/proc/self/oom_score_adj", "-1") }},
		{"raise-hard-limit", Namespaces, raiseHardLimit},
		{"huge-pipe", Namespaces, hugePipe},
		// Frees memory of others before its own (prctl(2), PR_SET_IO_FLUSHER).
		{"io-flusher", Namespaces, func() error { return unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) }},
		// Wakes a host that sleeps (timer_create(2), CLOCK_BOOTTIME_ALARM).
		{"wake-alarm", Namespaces, func() error {
			fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME_ALARM, unix.TFD_CLOEXEC)
			if err != nil {
				return err
			}
			return unix.Close(fd)
		}},
		// A null pointer of the kernel's leads there (CVE-2009-2692), or to a bug of a set-id program.
		{"map-null-page", Namespaces, mapNull},
		// Another program behind /proc/self/exe (prctl(2), PR_SET_MM_EXE_FILE).
		{"replace-own-exe", Namespaces, func() error {
			return reached(raw4(unix.SYS_PRCTL, unix.PR_SET_MM, unix.PR_SET_MM_EXE_FILE, ^uintptr(0), 0))
		}},
		// Frames of the host behind one's own pages (Rowhammer, CVE-2015-0565), and the links to mapped
		// files, which open what no path leads to.
		{"read-own-frames", Namespaces, readFrames},
		{"open-own-map-files", Namespaces, openMapFiles},
		// A file that its owner cannot remove outlives its sandbox (ioctl_iflags(2)).
		{"immutable-file", Namespaces, immutableFile},
		// Ids that are not of the map: those of the host and of other sandboxes. A count that is cut to 32
		// or 16 bits was root's (CVE-2024-40635).
		{"become-unmapped-user", Namespaces, func() error { return inChild(unix.SYS_SETUID, 100000, 0) }},
		{"become-unmapped-group", Namespaces, func() error { return inChild(unix.SYS_SETGID, 100000, 0) }},
		{"give-file-to-unmapped", Namespaces, giveAway},

		// Capabilities that a sandbox's init has, and its programs have not (CVE-2022-24769: they were
		// inheritable).
		{"gain-capabilities", Capabilities, gainCapabilities},
		{"ambient-capability", Capabilities, ambientCapability},
		{"securebits", Capabilities, func() error { return unix.Prctl(unix.PR_SET_SECUREBITS, 1<<2, 0, 0, 0) }},
		// Messages with another's pid, which servers go by (unix(7), SCM_CREDENTIALS).
		{"forge-credentials", Capabilities, forgeCredentials},
	}
}

func schedule(attr *unix.SchedAttr) error {
	goruntime.LockOSThread() // never unlocked: the thread ends with its policy
	attr.Size = unix.SizeofSchedAttr
	return unix.SchedSetAttr(0, attr, 0)
}

// raiseHardLimit lowers a limit, and raises it again.
func raiseHardLimit() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return err
	}
	lower := unix.Rlimit{Cur: limit.Cur / 2, Max: limit.Max / 2}
	return errors.Join(unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lower), unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit))
}

// hugePipe gives a pipe more pages than any user may have (fcntl(2), F_SETPIPE_SZ).
func hugePipe() error {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	text, err := os.ReadFile("/proc/sys/fs/pipe-max-size")
	if err != nil {
		return err
	}
	size := 0
	for _, digit := range strings.TrimSpace(string(text)) {
		size = 10*size + int(digit-'0')
	}
	_, err = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, 2*size)
	return err
}

func mapNull() error {
	at, _, errno := unix.RawSyscall6(unix.SYS_MMAP, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		return errno
	}
	return raw(unix.SYS_MUNMAP, at, 4096, 0)
}

// readFrames reads the frame behind a page of this process: others read 0.
func readFrames() error {
	page := make([]byte, 2*os.Getpagesize())
	page[0], page[len(page)-1] = 1, 1
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return err
	}
	defer f.Close() // only read
	var entry [8]byte
	at := int64(uintptr(unsafe.Pointer(&page[0]))) / int64(os.Getpagesize()) * int64(len(entry))
	if _, err := f.ReadAt(entry[:], at); err != nil {
		return err
	}
	goruntime.KeepAlive(page)
	if binary.NativeEndian.Uint64(entry[:])&(1<<55-1) == 0 {
		return errors.New("the frame is 0")
	}
	return nil
}

func openMapFiles() error {
	const dir = "/proc/self/map_files"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	err = errors.New("nothing is mapped")
	for _, e := range entries {
		if err = open(dir+"/"+e.Name(), unix.O_RDONLY); err == nil {
			return nil
		}
	}
	return err
}

// temporary makes a file that end removes.
func temporary() (fd int, name string, err error) {
	name = "/tmp/attacker-file"
	fd, err = unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	return fd, name, err
}

func immutableFile() error {
	fd, name, err := temporary()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Unlink(name) }()
	defer unix.Close(fd)
	const immutable = 0x10 // FS_IMMUTABLE_FL
	if err := unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, immutable); err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0)
}

func giveAway() error {
	fd, name, err := temporary()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Unlink(name) }()
	defer unix.Close(fd)
	return unix.Fchown(fd, 100000, 100000)
}

// gainCapabilities adds CAP_SYS_ADMIN to the permitted, effective and inheritable sets.
func gainCapabilities() error {
	goruntime.LockOSThread() // never unlocked: the thread ends with its capabilities
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Permitted |= 1 << unix.CAP_SYS_ADMIN
	data[0].Effective |= 1 << unix.CAP_SYS_ADMIN
	data[0].Inheritable |= 1 << unix.CAP_SYS_ADMIN
	return unix.Capset(&header, &data[0])
}

// ambientCapability makes a capability survive the start of programs and the change of users
// (capabilities(7)).
func ambientCapability() error {
	if err := gainCapabilities(); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_SYS_ADMIN, 0, 0)
}

// forgeCredentials sends a message to itself that says it comes from init.
func forgeCredentials() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	credentials := unix.UnixCredentials(&unix.Ucred{Pid: 1, Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())})
	return unix.Sendmsg(fds[0], []byte{0}, credentials, nil, 0)
}
