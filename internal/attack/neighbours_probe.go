package attack

import (
	"os"
	"os/exec"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Probed is the outcome of a neighbour's operations: those that failed, with their errors.
type Probed struct {
	Failed map[string]string `json:"failed"`
}

// Lost returns the operations that worked before and do not any more, with their errors.
func (p Probed) Lost(before Probed) map[string]string {
	lost := make(map[string]string)
	for name, by := range p.Failed {
		if _, never := before.Failed[name]; !never {
			lost[name] = by
		}
	}
	return lost
}

// probe tries every operation once.
func probe() Probed {
	p := Probed{Failed: make(map[string]string)}
	for _, o := range operations() {
		if err := o.try(); err != nil {
			p.Failed[o.name] = errorName(err)
		}
	}
	return p
}

type operation struct {
	name string
	try  func() error
}

// closing tries to make a descriptor.
func closing(fd int, err error) error {
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// operations returns those of an ordinary program. Each gives back all of its resources.
func operations() []operation {
	return []operation{
		{"fork", func() error { return clone(0) }},
		{"execute", func() error {
			return exec.Command("/proc/self/exe", mainArg, "ids").Run() //nolint:noctx // it prints a line and ends
		}},
		{"open a file", openFile},
		{"shared memory", func() error { return scratch("/dev/shm") }},
		{"pipe of 64 KiB", wholePipe},
		{"eventfd", func() error { return closing(unix.Eventfd(0, unix.EFD_CLOEXEC)) }},
		{"timerfd", func() error { return closing(unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)) }},
		{"signalfd", func() error { return closing(unix.Signalfd(-1, new(unix.Sigset_t), unix.SFD_CLOEXEC)) }},
		{"memfd", func() error { return closing(unix.MemfdCreate("probe", unix.MFD_CLOEXEC)) }},
		{"pidfd", func() error { return closing(unix.PidfdOpen(os.Getpid(), 0)) }},
		{"epoll with a hundred watches", epollHundred},
		{"inotify", watchFile},
		{"terminal", bothEnds},
		{"timer", func() error {
			id, err := timer()
			if err == nil {
				_, _, _ = unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(id), 0, 0)
			}
			return err
		}},
		{"queued signal", oneSignal},
		{"message queue", func() error {
			fd, err := queue("/sandboxd-probe-"+strconv.Itoa(os.Getpid()), true) // others probe this host too
			return closing(fd, err)
		}},
		{"System V shared memory", func() error {
			id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o600)
			if err == nil {
				_, err = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			}
			return err
		}},
		{"System V semaphores", func() error {
			id, err := semaphores(4)
			if err == nil {
				_, _, _ = unix.Syscall(unix.SYS_SEMCTL, uintptr(id), 0, unix.IPC_RMID)
			}
			return err
		}},
		{"System V messages", func() error {
			id, _, errno := unix.Syscall(unix.SYS_MSGGET, unix.IPC_PRIVATE, unix.IPC_CREAT|0o600, 0)
			if errno != 0 {
				return errno
			}
			_, _, _ = unix.Syscall(unix.SYS_MSGCTL, id, unix.IPC_RMID, 0)
			return nil
		}},
		{"TCP over loopback", overTCP},
		{"UDP over loopback", overUDP},
		{"netlink", func() error { return closing(unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)) }},
		{"pass a descriptor", passDescriptor},
		{"lock memory", func() error { return lockedPages(1) }},
		{"lock shared memory", func() error {
			id, err := lockedSegment()
			if err == nil {
				_, err = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			}
			return err
		}},
		{"map memory", func() error {
			b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			if err != nil {
				return err
			}
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			return unix.Munmap(b)
		}},
		{"asynchronous I/O", func() error {
			id, err := aio(1)
			if err == nil {
				_, _, _ = unix.Syscall(unix.SYS_IO_DESTROY, id, 0, 0)
			}
			return err
		}},
		{"socket filter", func() error {
			fd, err := filtered(unix.SO_ATTACH_FILTER)
			return closing(fd, err)
		}},
		{"key", addKey},
		{"random bytes", func() error {
			_, err := unix.Getrandom(make([]byte, 256), unix.GRND_NONBLOCK)
			return err
		}},
	}
}

// scratch writes a file in a directory, reads it and removes it.
func scratch(dir string) error {
	f, err := os.CreateTemp(dir, "sandboxd-probe")
	if err != nil {
		return unwrapped(err)
	}
	defer os.Remove(f.Name()) // it may be gone
	defer f.Close()           // its content has been looked at
	if _, err := f.Write(make([]byte, 64<<10)); err != nil {
		return unwrapped(err)
	}
	if n, err := f.ReadAt(make([]byte, 64<<10), 0); err != nil || n != 64<<10 {
		return refusal("not what was written")
	}
	return nil
}

// openFile writes, locks and leases a file.
func openFile() error {
	if err := scratch(os.TempDir()); err != nil {
		return err
	}
	fd, err := unix.Open(os.TempDir(), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil // a file system without nameless files
	}
	defer unix.Close(fd)
	return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
}

// wholePipe has room for as much as pipe(7) promises, and passes it on.
func wholePipe() error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return err
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	if n, err := unix.FcntlInt(uintptr(p[0]), unix.F_GETPIPE_SZ, 0); err != nil || n < 64<<10 {
		return errSmall
	}
	if n, err := unix.Write(p[1], make([]byte, 64<<10)); err != nil || n != 64<<10 {
		return errSmall
	}
	return nil
}

func epollHundred() error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(ep)
	for range 100 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
			return err
		}
	}
	return nil
}

func watchFile() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.InotifyAddWatch(fd, os.TempDir(), unix.IN_CREATE)
	return err
}

// bothEnds opens both ends of a terminal.
func bothEnds() error {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return err
	}
	const tiocgptpeer = 0x5441
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), tiocgptpeer, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(peer))
}

// overTCP connects to itself and passes bytes.
func overTCP() error {
	listener, client, err := connection()
	if err != nil {
		return err
	}
	defer unix.Close(listener)
	defer unix.Close(client)
	server, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(server)
	if err := unix.SetsockoptTimeval(server, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: patience}); err != nil {
		return err
	}
	if _, err := unix.Write(client, []byte("probe")); err != nil {
		return err
	}
	if n, err := unix.Read(server, make([]byte, 8)); err != nil || n != 5 {
		return refusal("nothing arrives")
	}
	return nil
}

func overUDP() error {
	fd, name, err := datagrams()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: patience}); err != nil {
		return err
	}
	if err := unix.Sendto(fd, []byte("probe"), 0, name); err != nil {
		return err
	}
	if n, err := unix.Read(fd, make([]byte, 8)); err != nil || n != 5 {
		return refusal("nothing arrives")
	}
	return nil
}

// passDescriptor sends a descriptor to itself.
func passDescriptor() error {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	return unix.Sendmsg(p[0], []byte("x"), unix.UnixRights(p[1]), nil, unix.MSG_DONTWAIT)
}

// oneSignal queues a signal to this thread, which blocks it, and takes it back.
func oneSignal() error {
	return withBlocked(func() error {
		if err := queueSignal(); err != nil {
			return err
		}
		var set unix.Sigset_t
		set.Val[0] = 1 << (blocked - 1)
		wait := unix.NsecToTimespec(int64(time.Second) * patience)
		_, _, errno := unix.Syscall6(unix.SYS_RT_SIGTIMEDWAIT, uintptr(unsafe.Pointer(&set)), 0, uintptr(unsafe.Pointer(&wait)), 8, 0, 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
}

// patience is the time in seconds after which a probe takes bytes of its own for lost.
const patience = 20
