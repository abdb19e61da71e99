package confine

import (
	"cmp"
	"errors"
	"fmt"
	goruntime "runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A filter lists the system calls that a process may still make; all others fail with EPERM. It is
// a value that is planned, applied and verified like [Plan]. It is assembled here because the
// daemon's program has no cgo, and so no libseccomp.
type filter []call

// A call allows a system call if all conditions on its arguments hold. Further entries of one
// number allow other arguments.
type call struct {
	number uint32
	when   []condition
}

// A condition compares the masked lower half of an argument: the kernel takes no more of the
// arguments that are compared here.
type condition struct {
	argument int
	mask, is uint32
}

// all is the mask of a condition on the whole lower half.
const all = ^uint32(0)

// gatewayFilter returns the filter of a gateway with the process id. Go's runtime needs most of the
// calls. Files are opened for reading only, which Landlock restricts to the resolver's.
func gatewayFilter(pid int) filter {
	return socketFilter(pid, unix.AF_INET, unix.AF_INET6)
}

// faceFilter returns the filter of a face with the process id.
func faceFilter(pid int) filter {
	f := socketFilter(pid, unix.AF_UNIX)
	// What a client has not read yet is asked for.
	return append(f, call{number: unix.SYS_SYSINFO}, call{unix.SYS_IOCTL, []condition{{1, all, unix.TIOCOUTQ}}})
}

// socketFilter is the filter of a process that works with sockets of these families.
func socketFilter(pid int, families ...uint32) filter {
	var f filter
	allow := func(numbers ...uint32) {
		for _, n := range numbers {
			f = append(f, call{number: n})
		}
	}
	when := func(number uint32, conditions ...condition) { f = append(f, call{number, conditions}) }
	oneOf := func(number uint32, argument int, values ...uint32) {
		for _, v := range values {
			when(number, condition{argument, all, v})
		}
	}
	// Connections, the frequent calls first.
	allow(unix.SYS_SPLICE, unix.SYS_READ, unix.SYS_WRITE, unix.SYS_EPOLL_PWAIT, unix.SYS_EPOLL_CTL, unix.SYS_FUTEX, unix.SYS_CLOSE,
		unix.SYS_ACCEPT4, unix.SYS_CONNECT, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT,
		unix.SYS_RECVMSG, unix.SYS_SENDMSG, unix.SYS_RECVFROM, unix.SYS_SENDTO, unix.SYS_WRITEV, unix.SYS_PIPE2)
	for _, family := range families {
		for _, kind := range []uint32{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			when(unix.SYS_SOCKET, condition{0, all, family}, condition{1, 0xf, kind}, condition{2, all, 0})
		}
	}
	options := func(level uint32, names ...uint32) {
		for _, name := range names {
			when(unix.SYS_SETSOCKOPT, condition{1, all, level}, condition{2, all, name})
		}
	}
	options(unix.SOL_SOCKET, unix.SO_LINGER, unix.SO_KEEPALIVE, unix.SO_BROADCAST)
	options(unix.SOL_TCP, unix.TCP_NODELAY, unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL, unix.TCP_KEEPCNT)
	options(unix.SOL_IP, unix.IP_RECVORIGDSTADDR)
	options(unix.SOL_IPV6, unix.IPV6_RECVORIGDSTADDR, unix.IPV6_V6ONLY)
	// Not F_SETOWN and F_SETSIG, by which the kernel signals other processes.
	oneOf(unix.SYS_FCNTL, 1, unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC, unix.F_SETPIPE_SZ, unix.F_GETPIPE_SZ)
	// Reading of files.
	const writes = unix.O_ACCMODE | unix.O_CREAT | unix.O_TRUNC | unix.O_APPEND | unix.O_TMPFILE | unix.O_DIRECTORY | unix.O_PATH
	when(unix.SYS_OPENAT, condition{2, writes, unix.O_RDONLY})
	allow(unix.SYS_FSTAT, unix.SYS_NEWFSTATAT, unix.SYS_PREAD64)
	// Go's runtime: memory, threads of this process, signals to itself, time.
	when(unix.SYS_MMAP, condition{2, unix.PROT_EXEC, 0}, condition{3, unix.MAP_ANONYMOUS, unix.MAP_ANONYMOUS})
	allow(unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MINCORE)
	const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID |
		unix.CLONE_NEWNET
	const thread = unix.CLONE_THREAD | unix.CLONE_VM
	when(unix.SYS_CLONE, condition{0, thread | namespaces | unix.CLONE_PTRACE, thread})
	when(unix.SYS_TGKILL, condition{0, all, uint32(pid)}) //nolint:gosec // a pid is positive
	allow(unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_GETPID, unix.SYS_GETTID,
		unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME,
		unix.SYS_RESTART_SYSCALL, unix.SYS_EPOLL_CREATE1, unix.SYS_EVENTFD2, unix.SYS_GETRANDOM, unix.SYS_UNAME,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP)
	return f
}

// Offsets in struct seccomp_data, and the audit numbers of architectures.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16 // 8 bytes each, the lower half first on both architectures
	archAMD64    = unix.AUDIT_ARCH_X86_64
	archARM64    = unix.AUDIT_ARCH_AARCH64
	x32          = 0x40000000 // set in numbers of amd64's second interface
)

// assemble returns the filter's program for an architecture of Go. Calls of other architectures,
// which have other numbers, end the process.
func (f filter) assemble(goarch string) ([]bpf.RawInstruction, error) {
	arch, ok := map[string]uint32{"amd64": archAMD64, "arm64": archARM64}[goarch]
	if !ok {
		return nil, fmt.Errorf("no system call filter for %s", goarch)
	}
	eperm := bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)}
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offsetArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: arch, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS},
		bpf.LoadAbsolute{Off: offsetNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32, SkipTrue: 1},
		eperm,
	}
	for _, c := range f {
		var block []bpf.Instruction
		for _, w := range c.when {
			block = append(block, bpf.LoadAbsolute{Off: uint32(offsetArgs + 8*w.argument), Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: w.mask}, //nolint:gosec // at most 5
				bpf.JumpIf{Cond: bpf.JumpEqual, Val: w.is}) // SkipFalse is set below
		}
		block = append(block, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
		for i, instruction := range block {
			if jump, ok := instruction.(bpf.JumpIf); ok {
				jump.SkipFalse = uint8(len(block) - i - 1) //nolint:gosec // a block has at most 19 instructions
				block[i] = jump
			}
		}
		if len(c.when) > 0 {
			block = append(block, bpf.LoadAbsolute{Off: offsetNumber, Size: 4}) // for the next block
		}
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: c.number, SkipFalse: uint8(len(block))}) //nolint:gosec // as above
		program = append(program, block...)
	}
	return bpf.Assemble(append(program, eperm))
}

// apply loads the filter on all threads and verifies it. The process needs no_new_privs.
func (f filter) apply(refuses func() error) error {
	raw, err := f.assemble(goruntime.GOARCH)
	if err != nil {
		return err
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]} //nolint:gosec // a few hundred
	//nolint:gosec // the address is that of the structure which seccomp(2) reads
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&p)))
	goruntime.KeepAlive(&p)
	if errno != 0 {
		return fmt.Errorf("load the system call filter: %w", errno)
	}
	if thread != 0 {
		return fmt.Errorf("load the system call filter: thread %d has another one", thread)
	}
	return errors.Join(f.verify(), refuses())
}

// verify tries a call that every filter refuses on every thread. It would do no harm.
func (filter) verify() error {
	if err := onAllThreads("ask", unix.SYS_PERSONALITY, uintptr(all), 0); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("personality(2) in spite of the filter: %w", cmp.Or(err, errWorked))
	}
	return nil
}

// refuseUnix and refuseInternet try a socket that a filter refuses.
func refuseUnix() error     { return refuseSocket(unix.AF_UNIX) }
func refuseInternet() error { return refuseSocket(unix.AF_INET) }

func refuseSocket(family int) error {
	if fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); !errors.Is(err, unix.EPERM) {
		_ = unix.Close(fd)
		return fmt.Errorf("make a socket of family %d in spite of the filter: %w", family, cmp.Or(err, errWorked))
	}
	return nil
}

var errWorked = errors.New("it works")
