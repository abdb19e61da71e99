package inside

import (
	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"errors"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How everything that an exec has started is found and killed.
//
// Every exec begins in a UTS namespace of its own, which clone(2) makes for init and for nobody else: the sandbox's
// seccomp filter and its capabilities refuse unshare, setns and the CLONE_NEW* flags to everything that init starts. So
// /proc/<pid>/ns/uts says of every process which exec it comes from, however often it has forked, whoever its parent is
// now, and whatever session it leads. What has to be dealt with:
//
//   - A process may fork while /proc is read. Rounds are repeated until two find nothing; the names are read a few at a
//     time, so that a chain of processes that fork and exit can hardly run between the reading of a name and its use.
//     New pids are mostly higher than old ones, hence found by the same round. The main process's group is killed as a
//     whole, which the kernel does atomically.
//   - A pid may be another process's by the time it is used. Processes are held by a /proc directory and a pidfd.
//   - A process whose first thread has ended has no namespace of its own to show; its other threads have.
//   - A process that has executed a file which its user may execute but not read, and whose owner has no id in the sandbox,
//     cannot be looked into even by init (would_dump in fs/exec.c hands it to the parent user namespace). Whoever hides
//     like that is killed with the first exec that is; an exec's own first program must not be such a file.
//   - What still makes new processes after a second, in which all that was found has been killed some times, is stopped by killing
//     all of the sandbox but init. The other execs then end as well: better than to leave a process after its deadline. The
//     second alone says nothing: a machine that stands still for one has killed nobody in it.
//   - A process may be unkillable for a while (frozen, or waiting for a disk). After ten seconds init gives up and
//     does not say exited, so the daemon ends the sandbox. In practice it has done so by then.
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
			// Something ended while we looked: perhaps one that had forked before. In a busy sandbox it is somebody else's,
			// so this alone must not go on for ever.
			clean = 0
		default:
			clean++
		}
	}
	return true
}

// hopeless says that killing what is found does not get the better of what makes new processes, of which this round has found fresh ones.
func hopeless(fresh bool, elapsed time.Duration, round int) bool {
	return fresh && elapsed > killAll && round >= killRounds
}

// killGroup kills the main process's group, unless it has been waited for. A fork that does not come back, because its child
// was stopped before its exec, holds mu; then only the rest is done.
func (s *server) killGroup(p *process) {
	if !s.mu.TryLock() {
		return
	}
	defer s.mu.Unlock()
	if s.procs[p.pid] == p {
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
}

// killMarked is one round over /proc. It returns the processes that it found and killed, after waiting a little for
// their end, and whether some process ended before it could be looked at.
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
			// Gone, or the filter does not know pidfds.
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
	// A pidfd is readable when the process has ended. The next round sees who is late.
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

// signalAll sends sig to the main process's group and to everything else that the exec has started, as one look at /proc shows
// it. What forks meanwhile may be missed: for a certain end there is kill.
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
			return true // it has the signal already
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return true
		}
		defer func() { _ = unix.Close(pidfd) }()
		// As in killMarked: the directory still shows a process, so the number was its own.
		if _, err := s.markIn(dir); err == nil {
			_ = unix.PidfdSendSignal(pidfd, sig, nil, 0)
		}
		return true
	})
}

// markOf is the mark while the process's exit has not been told; then the number may be another namespace's.
func (p *process) markOf() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.uts < 0 {
		return ""
	}
	return p.mark
}

// othersMain tells whether pid is the main process of another exec than p.
func (s *server) othersMain(pid int, p *process) bool {
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	o := s.procs[pid]
	return o != nil && o != p
}

// each calls f for the numbers in a directory of /proc, a few at a time, until f returns false.
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

// markIn reads the mark of the process whose /proc directory dir is; "" for one that has ended and has not been waited for,
// errUnreadable for one that must not be looked into.
func (s *server) markIn(dir int) (string, error) {
	mark, err := readMark(dir, "ns/uts")
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		// The kernel gives the same errno for a process that went away meanwhile.
		var st unix.Stat_t
		if err := unix.Fstatat(dir, "stat", &st, 0); err != nil {
			return "", err
		}
		return "", errUnreadable
	}
	if !errors.Is(err, unix.ENOENT) {
		return mark, err
	}
	// The first thread has ended. The kernel shows the process as long as there are others.
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

// offer makes a process that was just started, and what it starts, the kernel's choice before init when the sandbox has no
// memory left: with init the whole sandbox ends (TestMemoryLimitSparesTheInit). Raising the value is everybody's right,
// and a process that takes it back endangers its own sandbox alone.
func (s *server) offer(proc int) {
	fd, err := unix.Openat(proc, "oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return // it has ended
	}
	_, _ = unix.Write(fd, []byte("1000"))
	_ = unix.Close(fd)
}

// utsOf opens the UTS namespace of a child that cannot be waited for meanwhile, and gives its mark; -1 and "" if the child has
// ended.
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

// markLate is for a process whose first thread had ended before its mark could be read, while another one was just being
// made. A process that has really ended stays without a mark, and has not left anything that is its exec's to kill.
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
