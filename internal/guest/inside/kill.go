package inside

import (
	"errors"
	"strconv"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"golang.org/x/sys/unix"
)

// How init finds and kills everything that an exec has started.
//
// Every exec begins in a UTS namespace of its own, which only init can make by clone(2): the
// sandbox's seccomp filter and its capabilities refuse unshare, setns and the CLONE_NEW* flags to
// everything that init starts. So /proc/<pid>/ns/uts identifies the exec of every process, however
// often it has forked, whatever its parent is by now, and whatever session it leads. Difficulties:
//
//   - A process may fork while /proc is read. Rounds are repeated until two find nothing. The names
//     are read a few at a time, so that a chain of processes that fork and exit can hardly run
//     between the reading of a name and its use. New pids are mostly higher than old ones, hence
//     found by the same round. The main process's group is killed as a whole, which the kernel does
//     atomically.
//   - A pid may be reused before it is signalled. Processes are held by a /proc directory and a
//     pidfd.
//   - A process whose first thread has ended shows no namespace of its own; its other threads do.
//   - A process may have executed a file which its user may execute but not read, and whose owner
//     has no id in the sandbox. Then even init cannot inspect it (would_dump in fs/exec.c hands it
//     to the parent user namespace). Such a process is killed with the first exec that is killed;
//     an exec's own first program must not be such a file.
//   - Some programs still make new processes after a second in which all found ones were killed
//     several times. Then everything in the sandbox except init is killed, other execs too: better
//     than to leave a process after its deadline. The time alone proves nothing, because a machine
//     may stand still for a second.
//   - A process may be unkillable for a while (frozen, or waiting for a disk). After ten seconds
//     init gives up and does not send exited, so the daemon ends the sandbox. In practice it has
//     done so by then.
const (
	killAll    = time.Second
	killRounds = 3
	killGiveUp = 10 * time.Second
)

// kill ends everything that p's exec has started. It reports whether nothing is left.
func (s *server) kill(p *process) bool {
	begun := time.Now()
	if p.uts < 0 {
		s.markLate(p)
	}
	known := map[int]bool{} // found in the last round
	for clean, round := 0, 0; clean < 2; round++ {
		s.killGroup(p)
		found, vanished := s.killMarked(p)
		elapsed := time.Since(begun)
		fresh := false
		for pid := range found {
			fresh = fresh || !known[pid]
		}
		known = found
		switch {
		case len(found) > 0:
			clean = 0
			if hopeless(fresh, elapsed, round) {
				_ = unix.Kill(-1, unix.SIGKILL)
			}
			if elapsed > killGiveUp {
				return false
			}
		case vanished && round < 16:
			// A process ended during this round and may have forked before. In a busy sandbox it belongs to
			// another exec, so this alone must not go on for ever.
			clean = 0
		default:
			clean++
		}
	}
	return true
}

// hopeless reports whether killing in rounds loses against a program that makes new processes;
// fresh means that this round has found some.
func hopeless(fresh bool, elapsed time.Duration, round int) bool {
	return fresh && elapsed > killAll && round >= killRounds
}

// killGroup kills the main process's group, unless it has been reaped. While a fork does not
// return, because its child was stopped before its exec, mu is locked; then killGroup does nothing.
func (s *server) killGroup(p *process) {
	if !s.mu.TryLock() {
		return
	}
	defer s.mu.Unlock()
	if s.procs[p.pid] == p {
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
}

// killMarked is one round over /proc. It kills the processes of the exec, waits a little for their
// end and returns them. Vanished reports whether some process ended before it could be inspected.
func (s *server) killMarked(p *process) (found map[int]bool, vanished bool) {
	found = map[int]bool{}
	var dying []int
	defer func() { unixmsg.CloseAll(dying) }()
	s.each(s.proc, ".", func(pid int, name string) bool {
		if pid == 1 {
			return true
		}
		dir, err := unix.Openat(s.proc, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			vanished = true
			return true
		}
		defer func() { _ = unix.Close(dir) }()
		mark, err := s.markIn(dir)
		switch {
		case errors.Is(err, errUnreadable) && !s.othersMain(pid, p):
		case err != nil:
			vanished = true
			return true
		case mark == "" || mark != p.mark:
			return true
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			// Gone, or the filter has no rule for pidfds.
			if !errors.Is(err, unix.ESRCH) {
				_ = unix.Kill(pid, unix.SIGKILL)
				found[pid] = true
			}
			return true
		}
		// The directory still shows a process, so the number was its own when the pidfd was opened.
		if _, err := s.markIn(dir); err != nil && !errors.Is(err, errUnreadable) {
			_ = unix.Close(pidfd)
			vanished = true
			return true
		}
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
		found[pid] = true
		if len(dying) < 64 {
			dying = append(dying, pidfd)
		} else {
			_ = unix.Close(pidfd)
		}
		return true
	})
	// A pidfd is readable when the process has ended. The next round finds late ones.
	for deadline := time.Now().Add(20 * time.Millisecond); len(dying) > 0; {
		left := time.Until(deadline)
		if left <= 0 {
			break
		}
		//nolint:gosec // descriptors are small
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(dying[0]), Events: unix.POLLIN}}, int(left/time.Millisecond)+1)
		if n > 0 || (err != nil && !errors.Is(err, unix.EINTR)) {
			_ = unix.Close(dying[0])
			dying = dying[1:]
		}
	}
	return found, vanished
}

// signalAll sends sig to the main process's group and to everything else that the exec has started,
// as one pass over /proc finds it. A process that forks meanwhile may be missed; kill misses none.
func (s *server) signalAll(p *process, sig syscall.Signal) {
	s.signal(p, sig)
	s.each(s.proc, ".", func(pid int, name string) bool {
		if pid == 1 {
			return true
		}
		dir, err := unix.Openat(s.proc, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return true
		}
		defer func() { _ = unix.Close(dir) }()
		if mark, err := s.markIn(dir); err != nil || mark == "" || mark != p.markOf() {
			return true
		}
		if pgid, err := unix.Getpgid(pid); err == nil && pgid == p.pid {
			return true // the group has the signal already
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return true
		}
		defer func() { _ = unix.Close(pidfd) }()
		// See killMarked: the directory still shows a process, so the number was its own.
		if _, err := s.markIn(dir); err == nil {
			_ = unix.PidfdSendSignal(pidfd, sig, nil, 0)
		}
		return true
	})
}

// markOf returns the mark until the exit is reported; afterwards the number may belong to another
// namespace.
func (p *process) markOf() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.uts < 0 {
		return ""
	}
	return p.mark
}

// othersMain reports whether pid is the main process of another exec than p.
func (s *server) othersMain(pid int, p *process) bool {
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	o := s.procs[pid]
	return o != nil && o != p
}

// each calls f for the numbers in a directory of /proc, read a few at a time, until f returns
// false.
func (s *server) each(dirfd int, path string, f func(n int, name string) bool) {
	dir, err := unix.Openat(dirfd, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(dir) }()
	var buf [512]byte
	var names []string
	for {
		n, err := unix.Getdents(dir, buf[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil && !f(pid, name) {
				return
			}
		}
	}
}

// markIn returns the mark of the process whose /proc directory is dir. The mark is "" for one that
// has ended and has not been reaped; errUnreadable is for one that init must not inspect.
func (s *server) markIn(dir int) (string, error) {
	mark, err := readMark(dir, "ns/uts")
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		// The kernel returns the same errno for a process that has just ended.
		var st unix.Stat_t
		if err := unix.Fstatat(dir, "stat", &st, 0); err != nil {
			return "", err
		}
		return "", errUnreadable
	}
	if !errors.Is(err, unix.ENOENT) {
		return mark, err
	}
	// The first thread has ended. The kernel shows the process while it has others.
	mark = ""
	s.each(dir, "task", func(_ int, name string) bool {
		m, err := readMark(dir, "task/"+name+"/ns/uts")
		if err == nil {
			mark = m
		}
		return err != nil
	})
	return mark, nil
}

func readMark(dir int, path string) (string, error) {
	var buf [32]byte
	n, err := unix.Readlinkat(dir, path, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// offer makes a new process, and everything that it starts, a better target of the kernel than init
// when the sandbox runs out of memory: with init the whole sandbox ends
// (TestMemoryLimitSparesTheInit). Every process may raise the value, and one that lowers it again
// endangers its own sandbox alone.
func (s *server) offer(proc int) {
	fd, err := unix.Openat(proc, "oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return // it has ended
	}
	_, _ = unix.Write(fd, []byte("1000"))
	_ = unix.Close(fd)
}

// utsOf opens the UTS namespace of a child that cannot be reaped meanwhile, and returns its mark;
// -1 and "" if the child has ended.
func (s *server) utsOf(pid int) (fd int, mark string, err error) {
	dir, err := unix.Openat(s.proc, strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, "", err
	}
	defer func() { _ = unix.Close(dir) }()
	s.offer(dir)
	open := func(path string) error {
		fd, err = unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	}
	if errors.Is(open("ns/uts"), unix.ENOENT) {
		s.each(dir, "task", func(_ int, name string) bool { return open("task/"+name+"/ns/uts") != nil })
	}
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return -1, "", errUnreadable
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return -1, "", nil
	case err != nil:
		return -1, "", err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return -1, "", err
	}
	return fd, "uts:[" + strconv.FormatUint(st.Ino, 10) + "]", nil
}

// markLate handles a process whose first thread had ended before its mark could be read, while
// another one was being made. A process that has really ended stays without a mark, and has left
// nothing to kill.
func (s *server) markLate(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.procs[p.pid] != p {
		return
	}
	if fd, mark, err := s.utsOf(p.pid); err == nil {
		p.uts, p.mark = fd, mark
	}
}
