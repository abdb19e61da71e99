package inside

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// A process is the main process of an exec.
type process struct {
	pid   int
	begun time.Time
	conn  *conn
	// uts is the exec's own UTS namespace, which marks everything that it starts; -1 if the process
	// had ended before it could be opened. While it is open, its number is not reused. See kill.
	uts  int
	mark string

	done chan struct{} // closed when the process has been waited for

	mu      sync.Mutex
	started bool // the daemon knows of the start
	whole   bool // the start is reported with the exit
	pidfd   int  // pidfd of a process that may end while init waits for it; -1: none
	killing bool // another goroutine kills the exec and will report its exit
	exited  bool
	timeout bool
	exit    guest.ExitedAnswer
	timer   *time.Timer
}

// exec serves an exec from its request to its exit. It owns fds.
func (s *server) exec(c *conn, pkt guest.Packet, fds []int) error {
	p, r, err := s.launch(c, pkt, fds)
	if p == nil {
		return err
	}
	if r.Whole {
		if s.ended(p, time.Duration(r.Timeout)) {
			return nil // the daemon has the whole answer
		}
		err = c.reply(guest.KindStarted, guest.StartedAnswer{PID: p.pid})
	}
	if err != nil {
		s.undo(p)
		return fail(guest.StageStart, err, "")
	}
	p.begin(s, time.Duration(r.Timeout))
	s.control(p)
	s.end(p, false) // the daemon has closed the connection
	return nil
}

// undo removes an exec that the daemon does not know of and will not learn of. The daemon may be
// gone, or the terminal cannot be sent: other sandboxes with these ids have more descriptors in
// flight than the kernel lets a user have.
func (s *server) undo(p *process) {
	s.kill(p)
	<-p.done
	if p.uts >= 0 {
		_ = unix.Close(p.uts)
		p.uts = -1
	}
}

// launch starts the process and reports the start, unless that is to come with the exit. An error
// together with a process means that the report failed. When it returns, init holds neither the
// process's descriptors nor its terminal: they must end when the process does.
func (s *server) launch(c *conn, pkt guest.Packet, fds []int) (_ *process, r guest.ExecRequest, err error) {
	defer func() { unixmsg.CloseAll(fds) }()
	if err := pkt.Into(&r, -1); err != nil {
		return nil, r, fail(guest.StageRequest, unix.EINVAL, pkt.Kind)
	}
	want := 3
	if r.TTY {
		want = 0
	}
	if r.Memfd {
		want++
	}
	if len(fds) != want {
		return nil, r, fail(guest.StageRequest, unix.EBADF, pkt.Kind)
	}
	strs := pkt.Strs
	if r.Memfd {
		if strs, err = readStrings(fds[want-1]); err != nil {
			return nil, r, fail(guest.StageRequest, err, pkt.Kind)
		}
	}
	if r.Args < 1 || len(strs) < 2 || r.Args > len(strs)-1 || strs[0] == "" || strs[0][0] != '/' || strs[1] == "" || r.Timeout < 0 || r.Whole && r.TTY {
		return nil, r, fail(guest.StageRequest, unix.EINVAL, pkt.Kind)
	}
	env := strs[1+r.Args:]
	if r.User != "" {
		a, home, err := s.account(r.User, r.NonRoot)
		if err != nil {
			return nil, r, err
		}
		r.UID, r.GID, r.Groups = a.UID, a.GID, a.Groups
		if !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, "HOME=") }) {
			env = append(slices.Clip(env), "HOME="+home)
		}
	}
	files := fds
	var master []int
	if r.TTY {
		m, slave, err := openTTY(r.Rows, r.Cols, r.UID)
		if err != nil {
			return nil, r, fail(guest.StageTTY, err, "/dev/ptmx")
		}
		fds = append(fds, m, slave)
		master = []int{m}
		files = []int{slave, slave, slave}
	}
	p, err := s.start(c, &r, strs[0], strs[1:1+r.Args], env, files)
	if err != nil {
		return nil, r, err
	}
	if !r.Whole {
		err = c.reply(guest.KindStarted, guest.StartedAnswer{PID: p.pid}, master...)
	}
	return p, r, err
}

// control handles the daemon's packets while the process runs, until the daemon closes the
// connection.
func (s *server) control(p *process) {
	for {
		pkt, fds, err := p.conn.Recv()
		if err != nil {
			return
		}
		unixmsg.CloseAll(fds)
		switch pkt.Kind {
		case guest.KindSignal:
			var m guest.SignalRequest
			switch {
			case pkt.Into(&m, 0) != nil || m.Signal < 1 || m.Signal > 64 || m.All && m.Main:
			case m.All:
				s.signalAll(p, syscall.Signal(m.Signal))
			default:
				s.signal(p, syscall.Signal(m.Signal), !m.Main)
			}
		case guest.KindKill:
			s.end(p, false)
		}
	}
}

// begin starts the timeout once the daemon knows of the start. From then on the exit may be
// reported.
func (p *process) begin(s *server, timeout time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.started = true
	if p.exited {
		p.reportExit()
		return
	}
	if timeout > 0 {
		p.timer = time.AfterFunc(timeout-time.Since(p.begun), func() { s.end(p, true) })
	}
}

// ended waits a moment for a process that no other goroutine knows yet, and reports its exit if it
// comes. Wake-ups are the main cost of a small program: this way they are one thread here, and the
// daemon once.
func (s *server) ended(p *process, timeout time.Duration) bool {
	if p.pidfd < 0 {
		return false
	}
	defer func() { _ = unix.Close(p.pidfd) }()
	wait := guest.WholeWait
	if timeout > 0 {
		wait = min(wait, timeout)
	}
	for left := wait; left > 0; left = wait - time.Since(p.begun) {
		ts := unix.NsecToTimespec(int64(left))
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}, &ts, nil) //nolint:gosec // descriptors are small
		if !errors.Is(err, unix.EINTR) && n <= 0 {
			break
		}
		if n > 0 {
			s.reapOne(p.pid)
			break
		}
	}
	s.mu.Lock()
	s.quick--
	if !s.childless() {
		s.wake() // for the process, or for its orphans
	}
	s.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.exited {
		p.whole = false
	}
	return p.exited
}

// childless reports whether init has no child. The caller holds mu.
func (s *server) childless() bool {
	return errors.Is(unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG|unix.WALL, nil), unix.ECHILD)
}

// wake signals the reaper that there is a child. The caller holds mu.
func (s *server) wake() {
	s.begun++
	s.forked.Signal()
}

// finish records the exit. The reaper calls it.
func (p *process) finish(ws unix.WaitStatus, ru *unix.Rusage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exited = true
	p.exit = guest.ExitedAnswer{
		Wall:   int64(time.Since(p.begun)),
		CPU:    ru.Utime.Nano() + ru.Stime.Nano(),
		MaxRSS: ru.Maxrss << 10,
	}
	if ws.Signaled() {
		p.exit.Signal = int(ws.Signal())
	} else {
		p.exit.Code = ws.ExitStatus()
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	if (p.started || p.whole) && !p.killing {
		p.reportExit()
	}
	close(p.done)
}

// reportExit sends the exit and releases the namespace. The caller holds mu, or is the only user
// left.
func (p *process) reportExit() {
	p.exit.Timeout = p.timeout
	if p.whole {
		p.exit.PID = p.pid
	}
	if pkt, err := guest.Encode(guest.KindExited, p.exit); err == nil {
		_ = p.conn.SendNow(pkt) // the daemon may be gone
	}
	if p.uts >= 0 {
		_ = unix.Close(p.uts)
		p.uts = -1
	}
}

// end kills everything of an exec that still runs, and then reports its exit: the daemon may rely
// on nothing being left.
func (s *server) end(p *process, timeout bool) {
	p.mu.Lock()
	if p.exited || p.killing {
		p.mu.Unlock()
		return
	}
	p.killing = true
	p.timeout = timeout
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Unlock()
	s.kill(p)
	<-p.done
	p.reportExit()
}

// signal sends sig to a process that has not been reaped, or to its group. The main process leads
// its session, so it cannot leave that group.
func (s *server) signal(p *process, sig syscall.Signal, group bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.procs[p.pid] != p {
		return
	}
	to := p.pid
	if group {
		to = -to
	}
	_ = unix.Kill(to, sig)
}

// readStrings reads the memfd of an exec.
func readStrings(fd int) ([]string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Size > guest.MaxArgs+guest.MaxPath {
		return nil, unix.E2BIG
	}
	b := make([]byte, st.Size)
	for off := 0; off < len(b); {
		n, err := unix.Pread(fd, b[off:], int64(off))
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return nil, unix.EINVAL
		}
		off += n
	}
	return guest.SplitStrings(b), nil
}

// openTTY makes a terminal of the sandbox's own devpts. The slave is opened through the master's
// descriptor, not by its name.
func openTTY(rows, cols uint16, uid uint32) (master, slave int, err error) {
	master, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, -1, err
	}
	slave = -1
	defer func() {
		if err != nil {
			_ = unix.Close(master)
			if slave >= 0 {
				_ = unix.Close(slave)
			}
		}
	}()
	if err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, -1, err
	}
	// Not unix.IoctlRetInt, which passes no flags.
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		err = errno
		return -1, -1, err
	}
	slave = int(fd)
	if rows == 0 {
		rows = 24
	}
	if cols == 0 {
		cols = 80
	}
	if err = unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		return -1, -1, err
	}
	// The user may open the terminal by name, /dev/tty or /dev/pts/0.
	if err = unix.Fchown(slave, int(uid), -1); err != nil {
		return -1, -1, err
	}
	return master, slave, nil
}

// start forks and executes. The errno of a failed start does not name its step, so the likely steps
// are tried beforehand and the others diagnosed afterwards.
func (s *server) start(c *conn, r *guest.ExecRequest, cwd string, argv, env []string, files []int) (*process, error) {
	if r.MakeCwd {
		fd, _, err := makeDir(cwd, r.UID, r.GID)
		if err != nil {
			return nil, fail(guest.StageCwd, err, cwd)
		}
		_ = unix.Close(fd)
	}
	if err := lowering(r.Limits); err != nil {
		return nil, err
	}
	// Not by its name, which the child would look up with init's descriptors (CVE-2024-21626).
	dir, err := openPath(unix.AT_FDCWD, cwd, unix.O_DIRECTORY)
	if err != nil {
		return nil, fail(guest.StageCwd, err, cwd)
	}
	defer func() { _ = unix.Close(dir) }()
	// The group is a supplementary one, too: a set-group-ID program could otherwise leave it, and with
	// it what a file's mode denies to its group (CVE-2022-36109).
	cred := &syscall.Credential{Uid: r.UID, Gid: r.GID, Groups: append(slices.Clone(r.Groups), r.GID)}
	if slices.Contains(r.Groups, r.GID) {
		cred.Groups = r.Groups
	}
	if s.lonely {
		// setgroups(2) always fails, also without any change.
		for _, g := range r.Groups {
			if g != r.GID {
				return nil, fail(guest.StageStart, unix.EPERM, "group "+strconv.Itoa(int(g)))
			}
		}
		cred.NoSetGroups = true
	}
	attr := &syscall.ProcAttr{
		Env: env,
		// All other descriptors of init are close-on-exec.
		Files: []uintptr{uintptr(files[0]), uintptr(files[1]), uintptr(files[2])},
		Sys: &syscall.SysProcAttr{
			Credential: cred,
			Setsid:     true,
			Setctty:    r.TTY,
			Ctty:       0,
			// The new UTS namespace marks everything that this exec starts, see kill. With these attributes
			// the syscall package uses clone(2) (forkAndExecInChild1: clone3 only for UseCgroupFD and
			// CLONE_NEWTIME), which the seccomp filter can inspect.
			Cloneflags: unix.CLONE_NEWUTS,
		},
	}
	paths, none := lookup(argv[0], cwd, env)
	// As execvp(3): a later file may be executable, and a refusal outweighs an absence.
	failure := none
	for _, path := range paths {
		p, err := s.forkLimited(c, dir, path, argv, attr, r)
		if err == nil {
			return p, nil
		}
		switch {
		case errors.Is(err, errUnreadable):
			return nil, fail(guest.StageStart, unix.EACCES, path)
		case errors.Is(err, errUnmarked):
			return nil, fail(guest.StageStart, err, path)
		case errors.Is(err, errOutside):
			return nil, fail(guest.StageCwd, unix.EPERM, cwd)
		case errors.Is(err, unix.EACCES), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EPERM),
			errors.Is(err, unix.ELOOP), errors.Is(err, unix.EINVAL):
			if err := s.diagnose(attr, dir, cwd, r); err != nil {
				return nil, err
			}
			switch {
			case errors.Is(err, unix.EACCES):
				failure = fail(guest.StageLookup, unix.EACCES, path)
			case failure.Errno != unix.EACCES:
				// The file exists, so its interpreter is missing.
				failure = fail(guest.StageStart, err, path)
			}
		default:
			return nil, fail(guest.StageStart, err, path)
		}
	}
	return nil, failure
}

// diagnose finds out after a failed start whether the user or the working directory was the reason;
// nil if it was the program. Only execve refuses a name that is longer than any file's with that
// errno.
func (s *server) diagnose(attr *syscall.ProcAttr, dir int, cwd string, r *guest.ExecRequest) error {
	probe := func(enter bool) error {
		a := *attr
		a.Dir = "/"
		s.mu.Lock()
		defer s.mu.Unlock()
		if enter {
			leave, err := enterFor(dir, &a)
			if err != nil {
				return err
			}
			defer leave()
		}
		//nolint:gosec // there is no such program
		_, err := syscall.ForkExec("/"+strings.Repeat("x", guest.MaxPath), []string{"probe"}, &a)
		return err
	}
	err := probe(true)
	if errors.Is(err, unix.ENAMETOOLONG) {
		return nil
	}
	if errors.Is(probe(false), unix.ENAMETOOLONG) {
		return fail(guest.StageCwd, err, cwd)
	}
	return fail(guest.StageStart, err, "user "+strconv.Itoa(int(r.UID))+":"+strconv.Itoa(int(r.GID)))
}

// lookup returns the files that a program's name may mean, in order, and the error to report if
// none is executable. It looks with init's permissions: the kernel decides whether the user may
// execute a file.
func lookup(name, cwd string, env []string) ([]string, *guest.Error) {
	failure := fail(guest.StageLookup, unix.ENOENT, name)
	look := func(path string) bool {
		full := path
		if path[0] != '/' {
			full = cwd + "/" + path
		}
		var st unix.Stat_t
		err := unix.Stat(full, &st)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return false
		case err != nil:
			failure = fail(guest.StageLookup, err, path)
			return false
		case st.Mode&unix.S_IFMT != unix.S_IFREG, st.Mode&0o111 == 0:
			failure = fail(guest.StageLookup, unix.EACCES, path)
			return false
		}
		return true
	}
	if strings.IndexByte(name, '/') >= 0 {
		if !look(name) {
			return nil, failure
		}
		return []string{name}, failure
	}
	var found []string
	for dir := range strings.SplitSeq(pathOf(env), ":") {
		if dir == "" {
			dir = "."
		}
		if path := dir + "/" + name; look(path) {
			found = append(found, path)
		}
	}
	return found, failure
}

// pathOf returns PATH of an environment.
func pathOf(env []string) string {
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			return v
		}
	}
	return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

// errUnreadable refuses a program that init cannot inspect and so could not kill in full.
var errUnreadable = errors.New("the program's file can be read by nobody in the sandbox")

// errUnmarked is a start whose namespace init cannot read.
var errUnmarked = errors.New("read the process's namespace")

// programSlack is the timer slack of programs, the kernel's default. Init's own is larger (libct).
const programSlack = 50 * time.Microsecond

// forkExec starts a program on the thread that sets the attributes which the program inherits from
// its thread.
func forkExec(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(programSlack), 0, 0, 0); err != nil {
		return 0, err
	}
	return syscall.ForkExec(path, argv, attr) //nolint:gosec // running the daemon's programs is the purpose
}

// maxQuick bounds the processes that are waited for in [server.ended] at a time.
const maxQuick = 2

// errOutside refuses a working directory that is not below the root.
var errOutside = errors.New("the working directory is outside of the root")

// enterFor makes dir the working directory of a program that is forked before leave. As with runc,
// the program's user need not be able to enter it: init enters it, which runs as root, and the
// program inherits it. If init may not, the child tries as its user. Dir was looked up without
// magic links; that it is below the root is checked nevertheless (CVE-2024-21626). The caller holds
// mu. Other threads of init meanwhile use absolute paths alone.
func enterFor(dir int, attr *syscall.ProcAttr) (leave func(), err error) {
	attr.Dir = ""
	if unix.Fchdir(dir) != nil {
		attr.Dir = "/proc/self/fd/" + strconv.Itoa(dir)
		return func() {}, nil //nolint:nilerr // the child tries
	}
	leave = func() { _ = unix.Chdir("/") }
	var buf [unix.PathMax]byte
	if n, err := unix.Getcwd(buf[:]); err != nil || n < 1 || buf[0] != '/' { // "(unreachable)"
		leave()
		return nil, errOutside
	}
	return leave, nil
}

// fork starts path in dir and adds the process to the table. If the result is a whole one, the
// caller must call [server.ended].
func (s *server) fork(c *conn, dir int, path string, argv []string, attr *syscall.ProcAttr, whole bool) (*process, error) {
	p := &process{conn: c, uts: -1, pidfd: -1, done: make(chan struct{})}
	err := func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		// A wait occupies a thread, of which there are few (spareThreads).
		attr.Sys.PidFD = nil
		if p.whole = whole && s.quick < maxQuick; p.whole {
			attr.Sys.PidFD = &p.pidfd
		}
		leave, err := enterFor(dir, attr)
		if err != nil {
			return err
		}
		p.begun = time.Now()
		settle := s.lean()
		pid, err := s.forker.forkExec(path, argv, attr)
		settle()
		leave()
		if err != nil {
			return err
		}
		p.pid = pid
		s.procs[pid] = p
		if p.whole {
			s.quick++
		} else {
			s.wake()
		}
		// Under the lock, so that a process that has ended is not reaped yet.
		p.uts, p.mark, err = s.utsOf(pid)
		if gone(err) {
			err = nil // see markLate
		}
		if err != nil && p.whole {
			p.whole = false
			_ = unix.Close(p.pidfd)
			s.quick--
			s.wake()
		}
		return err
	}()
	switch {
	case err == nil:
		return p, nil
	case p.pid == 0:
		return nil, err
	}
	// It runs but could not be killed in full later on. Its descendants, if it has any so soon, are as
	// unreadable as itself, and this kill finds them.
	s.kill(p)
	<-p.done
	return nil, fmt.Errorf("%w: %w", errUnmarked, err)
}

// reap waits for every child: the execs, and the orphans that process 1 inherits. No other code
// calls wait4, except the syscall package after a failed start, under mu.
func (s *server) reap() {
	for begun := 0; ; {
		// WNOWAIT leaves the child unreaped: that happens under mu only.
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT|unix.WALL, nil)
		if errors.Is(err, unix.ECHILD) {
			// Init has no child. Orphans can only come from an exec, so wait for the next fork.
			s.mu.Lock()
			for s.begun == begun {
				s.forked.Wait()
			}
			begun = s.begun
			s.mu.Unlock()
			continue
		}
		for s.reapOne(-1) {
		}
	}
}

// reapOne reaps one child that has ended, or lets one that has stopped go on, and reports whether
// there was one: the child with this pid, any for -1. Only the first thread may ask for any: it
// traces the processes that init inherits.
func (s *server) reapOne(which int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ws unix.WaitStatus
	var ru unix.Rusage
	pid, err := unix.Wait4(which, &ws, unix.WNOHANG|unix.WALL, &ru)
	if errors.Is(err, unix.EINTR) {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	if !ws.Exited() && !ws.Signaled() {
		s.untrace(pid, ws)
		return true
	}
	if p := s.procs[pid]; p != nil {
		delete(s.procs, pid)
		p.finish(ws, &ru)
	}
	return true
}

// untrace lets a process go on that has stopped because init traces it. Init traces nothing by
// itself: a process makes its parent the tracer (PTRACE_TRACEME), or is born traced (CLONE_PTRACE).
// It then stops for each signal and after each execve, and wait4 reports that like an end. When it
// is detached, it gets the signal, except the SIGTRAP of an execve and the SIGSTOP of a birth:
// only tracers expect those. The caller holds mu.
func (s *server) untrace(pid int, ws unix.WaitStatus) {
	detach := func() bool {
		sig := ws.StopSignal()
		if sig == unix.SIGTRAP || sig == unix.SIGSTOP && sentByNone(pid) {
			sig = 0
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_DETACH, uintptr(pid), 0, uintptr(sig), 0, 0)
		return errno == 0
	}
	// Only the tracer, a thread, can do that: the first one for an inherited process, the forker for
	// others.
	if detach() || s.forker.do(detach) {
		return
	}
	_ = unix.Kill(pid, unix.SIGKILL) // the filter refuses ptrace
}

// sentByNone reports whether the kernel has made up the signal that a tracee has stopped for: for a
// process that is born traced, it only marks SIGSTOP as pending.
func sentByNone(pid int) bool {
	var info struct {
		signo, errno, code, _ int32
		pid                   int32
		_                     [108]byte
	}
	//nolint:gosec // the address is that of the structure (siginfo_t of a 64-bit kernel)
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_GETSIGINFO, uintptr(pid), 0, uintptr(unsafe.Pointer(&info)), 0, 0)
	return errno == 0 && info.code == 0 && info.pid == 0
}
