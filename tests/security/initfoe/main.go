// Command initfoe attacks the init of its sandbox: each foe tries calls that a process with init's
// uid may make about process 1. It is static, so that it runs in any image.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	goruntime "runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) < 2 || foes[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: initfoe FOE [ARGUMENT…]")
		os.Exit(2)
	}
	if err := foes[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// foes are the hostile programs, by name.
var foes = map[string]func(args []string) error{
	// Makes its parent the tracer, and stops before a signal that does nothing, and before an execve.
	"traceme": func([]string) error { return traced() },
	// The same in an orphan, whose parent is init. The file tells that it got to its end.
	"traceme-orphan": func(args []string) error {
		if len(args) == 2 {
			for unix.Getppid() != 1 {
				time.Sleep(time.Millisecond) //nolint:forbidigo // the kernel tells no process of its new parent
			}
			if err := traced(); err != nil {
				return err
			}
			return os.WriteFile(args[0], []byte("went on\n"), 0o666)
		}
		return leave("traceme-orphan", args[0], "orphan")
	},
	// The same in a child that is traced from its birth on (CLONE_PTRACE), and is no child of init.
	"traceme-clone": func([]string) error {
		goruntime.LockOSThread()
		if err := traceMe(); err != nil {
			return err
		}
		pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, unix.CLONE_PTRACE|uintptr(unix.SIGCHLD), 0, 0)
		if errno != 0 {
			return errno
		}
		if pid == 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 7, 0, 0)
		}
		var ws unix.WaitStatus
		if _, err := unix.Wait4(int(pid), &ws, unix.WALL, nil); err != nil {
			return err
		}
		fmt.Println("the child ended with", ws.ExitStatus())
		return nil
	},
	// Ends while it is stopped for its tracer.
	"traceme-killed": func([]string) error {
		goruntime.LockOSThread()
		if err := traceMe(); err != nil {
			return err
		}
		return unix.Kill(unix.Getpid(), unix.SIGKILL)
	},
	// Changes a limit of init's, the soft one or both, and leaves a process in a session of its own
	// that writes to a file.
	"limit": func(args []string) error {
		resource, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		value, err := strconv.ParseUint(args[1], 10, 64)
		if err != nil {
			return err
		}
		limit := unix.Rlimit{Cur: value, Max: value}
		if args[2] == "soft" {
			var own unix.Rlimit // the hard one is init's
			if err := unix.Getrlimit(resource, &own); err != nil {
				return err
			}
			limit.Max = own.Max
		}
		if err := leave("heartbeat", args[3]); err != nil {
			return err
		}
		fmt.Println("prlimit:", unix.Prlimit(1, resource, &limit, nil))
		return hold()
	},
	"heartbeat": func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
		if err != nil {
			return err
		}
		for {
			if _, err := f.WriteString("."); err != nil {
				return err
			}
			time.Sleep(10 * time.Millisecond) //nolint:forbidigo // a heartbeat
		}
	},
	// Starts processes that are hard to find, in each way that the kernel has, says so, and stays.
	"odd-tree": func([]string) error { return oddTree() },
	// A process whose first thread has ended; with an argument an undumpable one.
	"leaderless": func(args []string) error {
		if len(args) > 0 {
			if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
				return err
			}
		}
		go func() { _ = hold() }()
		goruntime.LockOSThread()
		_, _, errno := unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
		return errno
	},
	// Keeps the remains of a child that was not dumpable. It writes the file once the child has ended.
	"remains": func(args []string) error {
		pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
		if errno != 0 {
			return errno
		}
		if pid == 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0)
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if err := unix.Waitid(unix.P_PID, int(pid), nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			return err
		}
		if err := os.WriteFile(args[0], []byte("kept\n"), 0o666); err != nil {
			return err
		}
		return hold()
	},
	"stay": func([]string) error {
		signal.Ignore(unix.SIGTERM, unix.SIGHUP, unix.SIGINT)
		return hold()
	},
	// Prints what each call about process 1 comes to.
	"calls": func([]string) error {
		for _, c := range calls {
			fmt.Println(c.name, c.try())
		}
		return nil
	},
	// Uses up the epoll watches of its user, and holds them: each instance watches each eventfd.
	"watches": useWatches,
}

// init has main run on the first thread, for "leaderless".
func init() { goruntime.LockOSThread() }

// oddTree returns only if it cannot start one of the processes.
func oddTree() error {
	// A file that is not readable, for a user who is not this one. Only root may start it.
	const closed = "/tmp/closed"
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	if err := os.WriteFile(closed, program, 0o711); err != nil {
		return err
	}
	for _, cmd := range []*exec.Cmd{
		exec.Command("/proc/self/exe", "leaderless"),
		exec.Command("/proc/self/exe", "leaderless", "undumpable"),
		exec.Command("/proc/self/exe", "stay"),
		exec.Command(closed, "stay"),
	} {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if cmd.Path == closed && os.Getuid() == 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 1234, Gid: 1234}
		}
		if err := cmd.Start(); err != nil {
			return err
		}
	}
	for _, how := range []struct {
		flags  uintptr
		traced bool
	}{
		{flags: unix.CLONE_PARENT},                // no child of its own
		{flags: unix.CLONE_VFORK},                 // its parent's thread waits for it
		{flags: 0, traced: true},                  // stopped for its tracer
		{flags: unix.CLONE_PTRACE},                // traced if its parent is
		{flags: unix.CLONE_FILES | unix.CLONE_FS}, // shares what it can
	} {
		done := make(chan unix.Errno)
		go func() {
			goruntime.LockOSThread() // never unlocked: children end with their parent's thread, or hold it
			if how.flags&unix.CLONE_VFORK != 0 {
				close(done) // there is no answer before the child ends
			}
			pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, how.flags|uintptr(unix.SIGCHLD), 0, 0)
			if errno == 0 && pid == 0 { // nothing but system calls is safe in this child
				_, _, _ = unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
				if how.traced {
					_, _, _ = unix.RawSyscall(unix.SYS_PTRACE, unix.PTRACE_TRACEME, 0, 0)
					me, _, _ := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
					_, _, _ = unix.RawSyscall(unix.SYS_KILL, me, uintptr(unix.SIGUSR2), 0)
				}
				for {
					_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
				}
			}
			if how.flags&unix.CLONE_VFORK == 0 {
				done <- errno
			}
			_ = hold()
		}()
		if errno := <-done; errno != 0 {
			return errno
		}
	}
	fmt.Println("grown")
	return hold()
}

// hold never returns.
func hold() error {
	for {
		_, _ = unix.Poll(nil, -1) // signals of the Go runtime end it
	}
}

// leave starts this program again in a session of its own, as a child of init.
func leave(args ...string) error {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd.Start()
}

func traceMe() error {
	if _, _, errno := unix.RawSyscall(unix.SYS_PTRACE, unix.PTRACE_TRACEME, 0, 0); errno != 0 {
		return fmt.Errorf("PTRACE_TRACEME: %w", errno)
	}
	return nil
}

// traced lives on after a stop for a signal.
func traced() error {
	signal.Ignore(unix.SIGUSR1)
	goruntime.LockOSThread()
	if err := traceMe(); err != nil {
		return err
	}
	if err := unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGUSR1); err != nil {
		return err
	}
	fmt.Println("went on")
	return nil
}

// calls are the calls that a process with init's uid may try on it.
var calls = []struct {
	name string
	try  func() error
}{
	{"prlimit", func() error { return unix.Prlimit(1, unix.RLIMIT_CORE, nil, new(unix.Rlimit)) }},
	{"setpriority", func() error { return unix.Setpriority(unix.PRIO_PROCESS, 1, 1) }},
	{"sched_setscheduler", func() error {
		var param int32
		return raw(unix.SYS_SCHED_SETSCHEDULER, 1, 3, uintptr(unsafe.Pointer(&param))) // SCHED_BATCH
	}},
	{"sched_setaffinity", func() error {
		var set unix.CPUSet
		set.Set(0)
		return unix.SchedSetaffinity(1, &set)
	}},
	{"ioprio_set", func() error { return raw(unix.SYS_IOPRIO_SET, 1, 1, 3<<13) }},
	{"kcmp", func() error { return raw(unix.SYS_KCMP, 1, 1, 0) }},
	{"pidfd_getfd", func() error {
		fd, err := unix.PidfdOpen(1, 0)
		if err != nil {
			return err
		}
		return raw(unix.SYS_PIDFD_GETFD, uintptr(fd), 0, 0)
	}},
	{"process_madvise", func() error {
		fd, err := unix.PidfdOpen(1, 0)
		if err != nil {
			return err
		}
		return raw(unix.SYS_PROCESS_MADVISE, uintptr(fd), 0, 0)
	}},
	{"migrate_pages", func() error {
		var nodes uint64 = 1
		return raw4(unix.SYS_MIGRATE_PAGES, 1, 64, uintptr(unsafe.Pointer(&nodes)), uintptr(unsafe.Pointer(&nodes)))
	}},
	{"move_pages", func() error { return raw4(unix.SYS_MOVE_PAGES, 1, 0, 0, 0) }},
	{"setpgid", func() error { return unix.Setpgid(1, 0) }},
	{"capset", func() error {
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: 1}
		var data [2]unix.CapUserData
		return unix.Capset(&hdr, &data[0])
	}},
	{"ptrace attach", func() error { return raw4(unix.SYS_PTRACE, unix.PTRACE_SEIZE, 1, 0, 0) }},
	{"oom_score_adj", func() error { return write("oom_score_adj", "1000") }},
	{"comm", func() error { return write("comm", "foe") }},
	{"timerslack_ns", func() error { return write("timerslack_ns", "1000000000") }},
	{"autogroup", func() error { return write("autogroup", "19") }},
	{"coredump_filter", func() error { return write("coredump_filter", "0") }},
	{"clear_refs", func() error { return write("clear_refs", "1") }},
	{"mem", func() error { return write("mem", "") }},
	{"attr/current", func() error { return write("attr/current", "") }},
}

func raw(trap, a, b, c uintptr) error { return raw4(trap, a, b, c, 0) }

func raw4(trap, a, b, c, d uintptr) error {
	if _, _, errno := unix.RawSyscall6(trap, a, b, c, d, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

func write(file, value string) error {
	f, err := os.OpenFile("/proc/1/"+file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

// useWatches prints the number of watches and the reason of the end, and then holds them. The
// argument bounds them.
func useWatches(args []string) error {
	most, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	var files []int
	for {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			break
		}
		files = append(files, fd)
	}
	for range 300 { // room for the instances
		_ = unix.Close(files[len(files)-1])
		files = files[:len(files)-1]
	}
	n := 0
	for {
		ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		if err != nil {
			fmt.Println(n, err)
			break
		}
		for _, fd := range files {
			if err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil || n == most {
				break
			}
			n++
		}
		if err != nil || n == most {
			fmt.Println(n, err)
			break
		}
	}
	return hold()
}
