package inside

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// A process sets its own limits between fork and exec, as a shell's ulimit does. Package syscall
// has no place for that. From outside limits would come late (prlimit on a running process), or for
// good: init cannot raise a hard limit again that it lowers for itself over the fork (without
// CAP_SYS_RESOURCE on the host). So the forked process first becomes init's own program, the shim,
// with the user's ids and an argument list that begins with shimName. The shim sets the limits and
// executes the program. That costs such an exec one start of this small program, and other execs
// nothing.

// shimName is argv[0] of the shim. Any program may start it: it has its starter's rights alone.
const shimName = "sandboxd-limits"

// shimTimeout bounds the time until the shim executes the program.
const shimTimeout = 10 * time.Second

// IsShim reports whether these are the arguments of a shim.
func IsShim(args []string) bool { return len(args) > 0 && args[0] == shimName }

// shimArgs returns the limits, the number of arguments, the path, the arguments and the
// environment. The environment travels as arguments because the shim's own runtime would heed parts
// of it.
func shimArgs(limits []guest.Rlimit, path string, argv, env []string) []string {
	var l strings.Builder
	for _, r := range limits {
		soft := r.Value
		if r.Soft != nil {
			soft = *r.Soft
		}
		l.WriteString(strconv.Itoa(r.Resource) + "=" + strconv.FormatUint(soft, 10) + ":" + strconv.FormatUint(r.Value, 10) + ",")
	}
	return append(append([]string{shimName, l.String(), strconv.Itoa(len(argv)), path}, argv...), env...)
}

// RunShim sets the limits and executes the program; it does not return. On failure it writes the
// errno to descriptor 3.
func RunShim(args []string) {
	unix.CloseOnExec(3)
	err := shim(args)
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = unix.EINVAL
	}
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], uint32(errno))
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, 3, uintptr(unsafe.Pointer(&b)), uintptr(len(b))) //nolint:gosec // G103: the address is of a local array
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 127, 0, 0)
}

func shim(args []string) error {
	if len(args) < 5 {
		return unix.EINVAL
	}
	n, err := strconv.Atoi(args[2])
	if err != nil || n < 1 || n > len(args)-4 {
		return unix.EINVAL
	}
	type limit struct {
		resource int
		syscall.Rlimit
	}
	var limits []limit
	for pair := range strings.SplitSeq(strings.TrimSuffix(args[1], ","), ",") {
		name, value, _ := strings.Cut(pair, "=")
		resource, err := strconv.Atoi(name)
		if err != nil {
			return unix.EINVAL
		}
		soft, hard, _ := strings.Cut(value, ":")
		l := limit{resource: resource}
		l.Cur, err = strconv.ParseUint(soft, 10, 64)
		if err != nil {
			return unix.EINVAL
		}
		if l.Max, err = strconv.ParseUint(hard, 10, 64); err != nil {
			return unix.EINVAL
		}
		limits = append(limits, l)
	}
	argv, env := args[4:4+n], args[4+n:]
	makeRoom(argv, env)
	for i := range limits {
		l := &limits[i]
		if l.resource == unix.RLIMIT_NOFILE {
			// By package syscall, which then does not restore it.
			if err := syscall.Setrlimit(l.resource, &l.Rlimit); err != nil {
				return err
			}
		}
	}
	for i := range limits {
		l := &limits[i]
		if l.resource == unix.RLIMIT_NOFILE {
			continue
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, uintptr(l.resource), uintptr(unsafe.Pointer(&l.Rlimit)), 0, 0, 0) //nolint:gosec // G115: a number
		if errno != 0 {
			return errno
		}
	}
	return syscall.Exec(args[3], argv, env) //nolint:gosec // running the daemon's programs is the purpose
}

// makeRoom makes sure that the runtime needs no more memory, nor a thread for its collector, until
// exec. Under a small limit of memory it would get neither, and die with an exit that looks like
// the program's. Exec copies all arguments; here that is done before, and the copies are freed for
// reuse. The shim has GOMAXPROCS=1, and its calls under the limit are raw: for a processor that a
// thread leaves free, or keeps long in a call, the runtime starts a further thread.
func makeRoom(lists ...[]string) {
	debug.SetGCPercent(-1)
	var held [][]*byte
	for range 2 { // the freed memory may be in other pieces
		for _, list := range lists {
			if pointers, err := syscall.SlicePtrFromStrings(list); err == nil { // Exec does the same, and reports the error
				held = append(held, pointers)
			}
		}
	}
	goruntime.KeepAlive(held)
	goruntime.GC()
}

// lowering refuses limits above the sandbox's own, which the kernel would refuse the shim.
func lowering(limits []guest.Rlimit) error {
	for _, l := range limits {
		var own unix.Rlimit
		name := strconv.Itoa(l.Resource)
		if err := unix.Getrlimit(l.Resource, &own); err != nil {
			return fail(guest.StageLimit, err, name)
		}
		if l.Value > own.Max {
			return fail(guest.StageLimit, unix.EPERM, name)
		}
	}
	return nil
}

// forkLimited is fork, with limits if there are any.
func (s *server) forkLimited(c *conn, dir int, path string, argv []string, attr *syscall.ProcAttr, r *guest.ExecRequest) (*process, error) {
	if len(r.Limits) == 0 {
		return s.fork(c, dir, path, argv, attr, r.Whole)
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(pipe[0], true); err != nil {
		unixmsg.CloseAll(pipe[:])
		return nil, err
	}
	told := s.poller.open(pipe[0], "shim")
	defer func() { _ = told.Close() }()
	_ = told.SetReadDeadline(time.Now().Add(shimTimeout))
	a := *attr
	a.Env = []string{"GOMAXPROCS=1"} // see makeRoom
	a.Files = append(append([]uintptr{}, attr.Files...), uintptr(pipe[1]))
	p, err := s.fork(c, dir, "/proc/self/exe", shimArgs(r.Limits, path, argv, attr.Env), &a, false)
	_ = unix.Close(pipe[1])
	if err != nil {
		return nil, err
	}
	var b [4]byte
	n, err := told.Read(b[:])
	if n == 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
		// End of file: the shim has become the program, or was killed. Init must be able to identify the
		// exec of the program.
		fd, _, err := s.utsOf(p.pid)
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		if !errors.Is(err, errUnreadable) {
			return p, nil
		}
	}
	errno := unix.ETIMEDOUT // a program in the sandbox has stopped it
	if n == len(b) {
		errno = syscall.Errno(binary.NativeEndian.Uint32(b[:]))
	} else if err == nil {
		errno = unix.EACCES
	}
	s.kill(p)
	<-p.done
	if p.uts >= 0 {
		_ = unix.Close(p.uts)
	}
	return nil, errno
}
