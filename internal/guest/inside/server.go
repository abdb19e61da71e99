// Package inside is init's side of the guest protocol: process 1 of a sandbox, which serves the
// daemon, reaps orphans and kills everything that an exec has started.
package inside

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// A server is the init of a sandbox: process 1, which serves the daemon and reaps every child.
//
// Known limit: a process of the sandbox that stops all others (kill(-1, SIGSTOP) in a loop) may hit
// a child of init between fork and exec, for which init then waits. It harms its own sandbox: the
// daemon gets no answer in time, and ends it.
type server struct {
	listener syscall.RawConn
	proc     int // /proc, opened before anything else ran here
	listing  sync.Mutex
	pids     int         // /proc for reading, used under listing
	nofile   unix.Rlimit // own limit of descriptors when nothing else ran
	lonely   bool        // setgroups(2) is denied: the sandbox has one id
	ids      uint32      // number of uids of the sandbox, from 0 on
	own      uint32      // real uid of init
	poller   *poller     // waits where the runtime's cannot
	reserve  int         // spare descriptor for turnAway; -1: lost for now
	forker   *forker     // starts everything, and confines it
	writable int         // procfs that is mounted nowhere; see offer
	score    int         // init's own oom_score_adj

	conns   chan struct{} // semaphore of connections; those beyond it are refused
	dirs    atomic.Int32  // directories open in lists, removals, watches and archives
	maxDirs int32         // limit of dirs
	watches chan struct{} // semaphore of watches
	watched atomic.Int32  // watched directories of all watches
	freed   chan struct{} // receives, if there is room, when a connection has ended

	// mu is held over fork and the insertion into procs, and over wait4 and the removal. So an exit
	// always finds its entry, and a pid of procs always belongs to its process: it cannot be reused
	// before wait4.
	mu     sync.Mutex
	procs  map[int]*process // main processes of execs that have not been reaped
	forked *sync.Cond       // signalled when there is a child
	begun  int              // number of forks
	quick  int              // processes that are waited for in [server.ended]
}

// requestTimeout bounds the wait for the first packet of a connection.
const requestTimeout = 10 * time.Second

// Run is the whole of sandboxd-init. It serves the guest protocol on the listening socket that is
// inherited as descriptor fd, and returns only if it cannot start. Descriptor writable is a procfs
// that is mounted nowhere: the one at /proc is read-only.
//
// Its seccomp filter comes from descriptor filter (see [guest.FilterArg]); -1 means that the
// launcher neither sends one nor waits for an answer. If confine is not nil, Landlock confines
// everything that init starts: a kernel that refuses is an error.
//
// Run must be called on the first thread, which must be locked to the caller (runtime.LockOSThread
// in an init function).
//
// The order matters: nothing of the sandbox runs before the first request, and everything that
// could leak into a process, or let one reach init, is closed before that.
func Run(fd, writable, filter int, confine *guest.Confinement) error {
	// A program may start a second init on a descriptor of its own. That is harmless (it has its
	// starter's rights), but it must not be mistaken for process 1.
	if err := checkListener(fd); err != nil {
		return fmt.Errorf("use descriptor %d: %w", fd, err)
	}
	// First, as if it had been there when this program began.
	if filter >= 0 {
		if err := loadFilter(filter); err != nil {
			return fmt.Errorf("load seccomp filter: %w", err)
		}
	}
	// Before any other step: no ptrace, no /proc/1/{mem,environ,exe,fd} for a process with the same
	// uid and fewer capabilities.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("become undumpable: %w", err)
	}
	if err := dropInheritable(); err != nil {
		return fmt.Errorf("drop inheritable capabilities: %w", err)
	}
	ids, err := countIDs(unix.AT_FDCWD, "/proc/self/uid_map")
	if err != nil {
		return err
	}
	own, err := takeOwnUser(ids)
	if err != nil {
		return fmt.Errorf("take a uid of its own: %w", err)
	}
	return serve(fd, writable, filter, confine, own)
}

func checkListener(fd int) error {
	for _, want := range []struct{ opt, value int }{
		{unix.SO_DOMAIN, unix.AF_UNIX}, {unix.SO_TYPE, unix.SOCK_SEQPACKET}, {unix.SO_ACCEPTCONN, 1},
	} {
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, want.opt)
		if err != nil {
			return err
		}
		if got != want.value {
			return errors.New("it is not a listening SOCK_SEQPACKET socket: sandboxd-init is started by sandboxd only")
		}
	}
	return nil
}

// dropInheritable empties the inheritable and the ambient set of every thread. A program that root
// executes gets the inheritable and the bounding set; the bounding set is the profile's, and lacks
// the capabilities that init keeps for itself.
func dropInheritable() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0 // the kernel empties the ambient set with it (capabilities(7))
	// Capabilities belong to a thread, and any thread may fork. AllThreadsSyscall needs a binary
	// without cgo.
	//nolint:gosec // the addresses are those of the two structures of capset(2); AllThreadsSyscall keeps them alive
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// spareThreads makes threads in advance, which the runtime keeps for later use. The runtime ends a
// program that needs a thread and gets none, as in a sandbox that a fork bomb has filled (pids.max,
// RLIMIT_NPROC). Init would end, and the sandbox with it (TestPidsLimitStopsAForkBomb). One thread
// runs Go code; the others are for blocking system calls.
func spareThreads() {
	const spare = 8 // with the runtime's own, within the launcher's addition to pids.max for init
	holdThreads(spare)
	// When the last of them waits, the runtime starts one more in another thread, while this one goes
	// on. A thread that finds an idle one starts none. So by the time that one less are held again, it
	// is there or was refused.
	holdThreads(spare - 1)
}

// holdThreads occupies n threads at a time.
func holdThreads(n int) {
	var made, left sync.WaitGroup
	made.Add(n)
	release := make(chan struct{})
	for range n {
		left.Go(func() {
			goruntime.LockOSThread() // so that the next one needs another thread
			made.Done()
			<-release
			goruntime.UnlockOSThread()
		})
	}
	made.Wait()
	close(release)
	left.Wait() // none is held any more
}

// Serve is the part of Run that a test binary can do to itself. Only tests call it: the steps
// before it in Run protect init from the sandbox.
func Serve(fd, filter int, confine *guest.Confinement) error {
	writable, err := openProc()
	if err != nil {
		return err
	}
	return serve(fd, writable, filter, confine, 0)
}

func serve(fd, writable, filter int, confine *guest.Confinement, own uint32) error {
	if err := checkProc(writable); err != nil {
		return fmt.Errorf("use descriptor %d: %w", writable, err)
	}
	if err := startPoller(); err != nil {
		return fmt.Errorf("wait for events: %w", err)
	}
	// Init is small and must stay so; the sandbox's memory and threads belong to its user. One thread
	// at a time is also fastest: forks follow each other anyway, and waking a second thread for every
	// packet costs an exec a fifth (BenchmarkExec). Setting it also stops the runtime from watching
	// the cgroup, whose descriptors closeOthers closes.
	goruntime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
	if err := catchSignals(); err != nil {
		return err
	}
	unix.Umask(0o022)
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	s := &server{
		conns:   make(chan struct{}, guest.MaxConns),
		watches: make(chan struct{}, guest.MaxWatches),
		freed:   make(chan struct{}, 1),
		procs:   make(map[int]*process),
		maxDirs: maxDirs(),
		own:     own,
	}
	s.forked = sync.NewCond(&s.mu)
	var err error
	if s.forker, err = newForker(confine); err != nil {
		return err
	}
	proc, err := openProc()
	if err != nil {
		return err
	}
	// Before the answer to the launcher: without room for threads the sandbox is not created, instead
	// of ending at its first request.
	spareThreads()
	if filter >= 0 {
		// Before the remaining steps, which hardly fail: they overlap with the launcher's work.
		if err := reportConfined(filter); err != nil {
			return fmt.Errorf("tell the launcher: %w", err)
		}
	}
	if err := closeOthers(proc, fd, writable); err != nil {
		return fmt.Errorf("close inherited descriptors: %w", err)
	}
	s.proc, s.writable, s.lonely = proc, writable, setgroupsDenied(proc)
	if s.ids, err = countIDs(proc, "self/uid_map"); err != nil {
		return err
	}
	if s.pids, err = unix.Openat(proc, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open /proc for reading: %w", err)
	}
	if s.score, err = unix.Openat(writable, "self/oom_score_adj", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open own order of ending: %w", err)
	}
	if s.poller, err = newPoller(); err != nil {
		return fmt.Errorf("wait for events: %w", err)
	}
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &s.nofile); err != nil {
		return fmt.Errorf("read own limit of descriptors: %w", err)
	}
	if s.reserve, err = unix.FcntlInt(uintptr(proc), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return fmt.Errorf("reserve a descriptor: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("use the listening socket: %w", err)
	}
	listener := s.poller.open(fd, "listener")
	if s.listener, err = listener.SyscallConn(); err != nil {
		return fmt.Errorf("use the listening socket: %w", err)
	}
	go func() {
		err := s.accept()
		_, _ = os.Stderr.WriteString("sandboxd-init: " + err.Error() + "\n")
		unix.Exit(1) // the socket is unusable: no request can come any more
	}()
	// On the first thread, which forks nothing and runs no handler.
	if err := keepHandlersOff(); err != nil {
		return fmt.Errorf("block handled signals: %w", err)
	}
	s.reap()
	return nil
}

// keepHandlersOff blocks, on the calling first thread, the signals that still have a handler: they
// go to other threads. For process 1 the kernel drops a signal without a handler only if the first
// thread does not block it (sig_ignored); otherwise another thread gets it, and it ends init. Go's
// handlers block every signal while they run, so a flood of handled signals mixed with others would
// do that. After this call no system call on all threads can be made any more.
func keepHandlersOff() error {
	var mask uint64
	for _, sig := range []uint{uint(unix.SIGBUS), uint(unix.SIGFPE), uint(unix.SIGSEGV), uint(unix.SIGURG), uint(unix.SIGPROF), 33} {
		mask |= 1 << (sig - 1)
	}
	//nolint:gosec // the address is that of the mask
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_BLOCK, uintptr(unsafe.Pointer(&mask)), 0, 8, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// maxDirs leaves half of init's descriptors to other uses than the reading of directories: a client
// that stops reading keeps up to 200 of them open.
func maxDirs() int32 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 256
	}
	return int32(min(l.Cur/2, 1<<16))
}

// catchSignals makes sure that no signal ends init. The kernel drops signals to process 1 from
// inside that have no handler. The Go runtime handles all signals, and dies of some. So its
// handlers are removed, as far as it works without. That also spares every exec about sixty system
// calls: the runtime removes its handlers in the child.
func catchSignals() error {
	if os.Getpid() != 1 {
		return errors.New("become deaf to signals: only process 1 can be")
	}
	// The runtime needs these. A forged one of the first three is caught by os/signal, and dropped
	// because no goroutine receives; the others are harmless.
	signal.Notify(make(chan os.Signal, 1), unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE)
	for n := 1; n <= 64; n++ {
		sig := syscall.Signal(n)
		switch {
		case sig == unix.SIGSEGV, sig == unix.SIGBUS, sig == unix.SIGFPE:
			continue
		case sig == unix.SIGURG, sig == unix.SIGPROF: // preemption; profiling, which is off
			continue
		case n == 33, n == 34: // system calls on all threads
			continue
		case sig == unix.SIGKILL, sig == unix.SIGSTOP: // never delivered to process 1 from inside
			continue
		}
		// signal.Ignore makes the runtime release the signal. Programs would inherit that, so set the
		// default at once, behind the runtime's back. The runtime does not use signal 32, but the
		// daemon's parent may have ignored it.
		if n != 32 {
			signal.Ignore(sig)
		}
		var dfl [4]uint64 // struct sigaction of the kernel: SIG_DFL is 0
		//nolint:gosec // the address is that of the structure
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(n), uintptr(unsafe.Pointer(&dfl)), 0, 8, 0, 0)
		if errno != 0 {
			return fmt.Errorf("reset signal %d: %w", n, errno)
		}
	}
	return nil
}

// openProc opens /proc once and for all. Later a process with CAP_SYS_ADMIN may have mounted
// another file system there.
func openProc() (int, error) {
	fd, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /proc: %w", err)
	}
	if err := checkProc(fd); err != nil {
		return -1, fmt.Errorf("look at /proc: %w", err)
	}
	return fd, nil
}

// checkProc refuses another file than a procfs of this PID namespace. One of another namespace
// would show foreign processes under these pids.
func checkProc(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return err
	}
	if st.Type != unix.PROC_SUPER_MAGIC {
		return errors.New("it is not a proc file system")
	}
	var buf [16]byte
	n, err := unix.Readlinkat(fd, "self", buf[:])
	if err != nil || string(buf[:n]) != strconv.Itoa(os.Getpid()) {
		return errors.New("it shows another PID namespace")
	}
	return nil
}

// closeOthers closes inherited descriptors except the standard streams and those that are kept
// (CVE-2024-21626), and makes the rest close-on-exec. Descriptors of anonymous inodes stay: among
// them is the Go runtime's poller.
func closeOthers(proc int, kept ...int) error {
	if err := unix.CloseRange(3, ^uint(0)>>1&0x7fffffff, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	dir, err := unix.Openat(proc, "self/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(dir), "fd")
	defer func() { _ = f.Close() }()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		n, err := strconv.Atoi(name)
		if err != nil || n < 3 || n == proc || n == dir || slices.Contains(kept, n) {
			continue
		}
		var buf [32]byte
		l, err := unix.Readlinkat(dir, name, buf[:])
		if err != nil || strings.HasPrefix(string(buf[:l]), "anon_inode:") {
			continue
		}
		_ = unix.Close(n)
	}
	return nil
}

// setgroupsDenied reports whether an ordinary user with a single id made the user namespace.
func setgroupsDenied(proc int) bool {
	fd, err := unix.Openat(proc, "self/setgroups", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var buf [8]byte
	n, _ := unix.Read(fd, buf[:])
	return n >= 4 && string(buf[:4]) == "deny"
}

// accept gives every connection a goroutine. It returns only if the socket is unusable.
func (s *server) accept() error {
	for {
		var fd int
		var got error
		err := s.listener.Read(func(l uintptr) bool {
			fd, _, got = unix.Accept4(int(l), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return !errors.Is(got, unix.EAGAIN)
		})
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		if got != nil {
			switch {
			case errors.Is(got, unix.EINTR), errors.Is(got, unix.ECONNABORTED):
			case errors.Is(got, unix.EMFILE), errors.Is(got, unix.ENFILE), errors.Is(got, unix.ENOMEM), errors.Is(got, unix.ENOBUFS):
				if s.restoreLimit() || s.turnAway(got) {
					break
				}
				// The daemon's connections wait in the backlog until a connection ends, or the sandbox has
				// memory again.
				t := time.NewTimer(100 * time.Millisecond)
				select {
				case <-s.freed:
				case <-t.C:
				}
				t.Stop()
			default:
				return fmt.Errorf("accept: %w", got)
			}
			continue
		}
		select {
		case s.conns <- struct{}{}:
		default:
			s.refuse(fd, unix.EMFILE)
			continue
		}
		go func() {
			s.handle(fd)
			<-s.conns
			select {
			case s.freed <- struct{}{}:
			default:
			}
		}()
	}
}

// turnAway refuses the next connection in the backlog for lack of a descriptor; the reserve makes
// that possible. The others may stay open for long (a list of a deep tree whose client does not
// read), and silence would look like death to the daemon.
func (s *server) turnAway(cause error) bool {
	if s.reserve >= 0 {
		_ = unix.Close(s.reserve)
	}
	defer func() {
		var err error
		if s.reserve, err = unix.FcntlInt(uintptr(s.proc), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			s.reserve = -1
		}
	}()
	fd := -1
	err := s.listener.Control(func(l uintptr) {
		fd, _, _ = unix.Accept4(int(l), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	})
	if err != nil || fd < 0 {
		return false
	}
	s.refuse(fd, cause)
	return true
}

// refuse answers a connection that exceeds a limit: silence would look like death to the daemon.
func (s *server) refuse(fd int, cause error) {
	c, err := s.newConn(fd)
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	// Wait for the request: the daemon would take a connection that is closed before for broken.
	_ = c.SetReadDeadline(time.Now().Add(requestTimeout))
	_, fds, _ := c.Recv()
	unixmsg.CloseAll(fds)
	c.refuse(fail(guest.StageRequest, cause, ""))
}

// handle serves one connection, with one request.
func (s *server) handle(fd int) {
	c, err := s.newConn(fd)
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(requestTimeout))
	pkt, fds, err := c.Recv()
	if err != nil {
		if !errors.Is(err, io.EOF) {
			// Above all EMFILE: the daemon must not take init for dead.
			c.refuse(fail(guest.StageRequest, err, "packet"))
		}
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	// A handler that uses descriptors owns and closes them.
	defer func() { unixmsg.CloseAll(fds) }()

	switch pkt.Kind {
	case guest.KindPing:
		err = s.ping(c, pkt, fds)
	case guest.KindExec:
		own := fds
		fds = nil
		err = s.exec(c, pkt, own)
	case guest.KindOpen:
		err = s.open(c, pkt, fds)
	case guest.KindCreate:
		err = s.create(c, pkt, fds)
	case guest.KindAppend:
		err = s.append(c, pkt, fds)
	case guest.KindStat:
		err = s.stat(c, pkt, fds)
	case guest.KindList:
		err = s.list(c, pkt, fds)
	case guest.KindMkdir:
		err = s.mkdir(c, pkt, fds)
	case guest.KindMove:
		err = s.move(c, pkt, fds)
	case guest.KindRemove:
		err = s.remove(c, pkt, fds)
	case guest.KindWatch:
		err = s.watch(c, pkt, fds)
	case guest.KindUser:
		err = s.user(c, pkt, fds)
	case guest.KindProcesses:
		err = s.processes(c, pkt, fds)
	case guest.KindHolder:
		err = s.holder(c, pkt, fds)
	case guest.KindTarOut, guest.KindTarIn:
		// The pipe is closed before the answer is sent, so that a reader has its end of file by then.
		own := fds
		fds = nil
		if err = s.tar(c, pkt, own); err == nil {
			err = c.reply(guest.KindDone, guest.None{})
		}
	default:
		err = fail(guest.StageRequest, unix.ENOSYS, pkt.Kind)
	}
	if err != nil {
		c.refuse(err)
	}
}

// expect decodes a request's message and checks the numbers of strings and descriptors.
func expect(pkt guest.Packet, msg any, nstrs int, fds []int, nfds int) error {
	if err := pkt.Into(msg, nstrs); err != nil {
		return fail(guest.StageRequest, unix.EINVAL, pkt.Kind)
	}
	if len(fds) != nfds {
		return fail(guest.StageRequest, unix.EBADF, pkt.Kind)
	}
	return nil
}

// fail returns the refusal of a request. A cause without an errno becomes EIO.
func fail(stage guest.Stage, cause error, path string) *guest.Error {
	var errno syscall.Errno
	if !errors.As(cause, &errno) {
		errno = unix.EIO
	}
	return &guest.Error{Stage: stage, Errno: errno, Path: path}
}

// refuse sends an error as the last packet.
func (c *conn) refuse(err error) {
	var e *guest.Error
	if !errors.As(err, &e) {
		e = fail(guest.StageRequest, err, "")
	}
	path := e.Path
	if len(path) >= guest.MaxPath {
		path = path[:guest.MaxPath-1]
	}
	if p, err := guest.Encode(guest.KindError, guest.ErrorAnswer{Stage: e.Stage, Errno: int(e.Errno)}, path); err == nil {
		_ = c.Send(p)
	}
}

// reply sends a packet without strings.
func (c *conn) reply(k guest.Kind, msg any, fds ...int) error {
	p, err := guest.Encode(k, msg)
	if err != nil {
		return err
	}
	return c.sendFiles(p, fds)
}

// onClose calls ended, once, when the daemon has closed the connection of a request that has no
// further packets. Call the returned function before reading from the connection again; ended may
// be called a last time by then.
func (c *conn) onClose(ended func()) (settled func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		_, fds, _ := c.Recv() // the end of the connection, or the deadline of settled
		unixmsg.CloseAll(fds)
		ended()
	})
	return func() {
		_ = c.SetReadDeadline(guest.Expired)
		wg.Wait()
		_ = c.SetReadDeadline(time.Time{})
	}
}

func (s *server) ping(c *conn, pkt guest.Packet, fds []int) error {
	if err := expect(pkt, &guest.None{}, 0, fds, 0); err != nil {
		return err
	}
	return c.reply(guest.KindPong, guest.None{})
}
