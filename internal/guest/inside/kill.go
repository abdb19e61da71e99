package inside

import (
	"errors"
	"os"
	"strconv"
	"strings"
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
//   - A pid may be reused before it is signalled. A pidfd holds the process, and the mark is read
//     again when it is open.
//   - A process whose first thread has ended shows no namespace of its own; its other threads do.
//     They may end and begin faster than they are read, and hide a process in a round.
//   - Of a process that made itself undumpable, the kernel no longer tells init when it has ended:
//     its state does (see [server.thread]).
//   - A process may have executed a file which its user may execute but not read, and whose owner
//     has no id in the sandbox. Then even init cannot inspect it (would_dump in fs/exec.c hands it
//     to the parent user namespace). Such a process is killed with the first exec that is killed;
//     an exec's own first program must not be such a file.
//   - Some programs still make new processes after a second in which all found ones were killed
//     several times. Then everything in the sandbox except init is killed, other execs too: better
//     than to leave a process after its deadline. The time alone proves nothing, because a machine
//     may stand still for a second.
//   - Init may lack a descriptor: a program with init's uid may lower its limit (prlimit), and a
//     client may have many requests under way. So /proc is open from the start, the mark of a
//     process with a first thread that init may inspect is read without a descriptor, and a round
//     in which anything failed proves nothing.
//   - A process may be unkillable for a while (frozen, or waiting for a disk). After ten seconds
//     and as many rounds as take a second, init ends, and with it the PID namespace: the sandbox
//     ends, daemon or no daemon. The rounds count because init itself may get no processor.
const (
	killAll      = time.Second
	killRounds   = 3
	killGiveUp   = 10 * time.Second
	killAttempts = 50
)

// kill ends everything that p's exec has started. If it cannot, it ends the sandbox.
func (s *server) kill(p *process) {
	begun := time.Now()
	known := map[int]bool{} // found in the last round
	for clean, restless, round := 0, 0, 0; clean < 2; round++ {
		var late error
		if p.uts < 0 {
			late = s.markLate(p)
		}
		if late == nil {
			s.killGroup(p) // what it has started is known by its mark alone
		}
		found, vanished, err := s.killMarked(p)
		err = errors.Join(err, late)
		elapsed := time.Since(begun)
		fresh := false
		for pid := range found {
			fresh = fresh || !known[pid]
		}
		known = found
		switch {
		case err != nil || len(found) > 0:
			clean, restless = 0, 0
			if err != nil && round >= killRounds && elapsed > killAll || hopeless(fresh, elapsed, round) {
				_ = unix.Kill(-1, unix.SIGKILL)
				// With all others gone nothing is left to inspect, whatever init lacks.
				if alone, aerr := s.alone(); alone && aerr == nil {
					return
				}
			}
			if elapsed > killGiveUp && round >= killAttempts {
				s.die("processes of an exec cannot be ended")
			}
			if err != nil {
				s.restoreLimit()
				<-time.After(killPause)
			}
		case vanished && restless < 16:
			// A process ended during this round and may have forked before. In a busy sandbox it belongs to
			// another exec, so this alone must not go on for ever.
			clean = 0
			restless++
		default:
			clean++
		}
	}
}

// killPause is the time between rounds that fail.
const killPause = 10 * time.Millisecond

// die ends the sandbox: with process 1 the kernel kills its PID namespace.
func (s *server) die(reason string) {
	_, _ = os.Stderr.WriteString("sandboxd-init: " + reason + "\n")
	unix.Exit(1)
}

// restoreLimit undoes a lowered soft limit of descriptors, and reports whether there was one. A
// hard one cannot be undone: init, and with it the sandbox, has no future.
func (s *server) restoreLimit() bool {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return false
	}
	if l.Max < s.nofile.Max {
		s.die("a program of the sandbox has lowered init's limit of descriptors")
	}
	return l.Cur < s.nofile.Cur && unix.Prlimit(0, unix.RLIMIT_NOFILE, &s.nofile, nil) == nil
}

// alone reports whether init is the only process of its PID namespace.
func (s *server) alone() (bool, error) {
	alone := true
	err := s.eachProcess(func(pid int, _ string) bool {
		alone = pid == 1
		return alone
	})
	return alone, err
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
// With an error, processes may have been missed.
func (s *server) killMarked(p *process) (found map[int]bool, vanished bool, err error) {
	found = map[int]bool{}
	var dying []int
	defer func() { unixmsg.CloseAll(dying) }()
	var failure error
	err = s.eachProcess(func(pid int, name string) bool {
		if pid == 1 {
			return true
		}
		mark, err := s.markIn(name)
		switch {
		case errors.Is(err, errUnreadable) && !s.othersMain(pid, p):
		case gone(err), errors.Is(err, errUnreadable):
			vanished = true
			return true
		case err != nil:
			failure = err
			return true
		case mark == "" || mark != p.mark:
			return true
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) {
			vanished = true
			return true
		}
		// The same mark once more: the process that the pidfd holds is one of the exec.
		again, merr := s.markIn(name)
		if merr != nil && !errors.Is(merr, errUnreadable) || merr == nil && (again == "" || again != mark) {
			if err == nil {
				_ = unix.Close(pidfd)
			}
			vanished = true
			return true
		}
		found[pid] = true
		if err != nil { // no descriptor, or the filter has no rule for pidfds
			_ = unix.Kill(pid, unix.SIGKILL)
			return true
		}
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
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
	return found, vanished, errors.Join(err, failure)
}

// gone reports whether an error of a file of /proc means that the process has been reaped.
func gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// signalAll sends sig to the main process's group and to everything else that the exec has started,
// as one pass over /proc finds it. A process that forks meanwhile may be missed; kill misses none.
func (s *server) signalAll(p *process, sig syscall.Signal) {
	s.signal(p, sig, true)
	_ = s.eachProcess(func(pid int, name string) bool {
		if pid == 1 {
			return true
		}
		if mark, err := s.markIn(name); err != nil || mark == "" || mark != p.markOf() {
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
		// As in killMarked.
		if mark, err := s.markIn(name); err == nil && mark == p.markOf() {
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

// eachProcess calls f for the processes of the PID namespace, in the order of their pids, until f
// returns false. It takes no descriptor: that of /proc is open for good, and used by one caller at
// a time.
func (s *server) eachProcess(f func(pid int, name string) bool) error {
	s.listing.Lock()
	defer s.listing.Unlock()
	if _, err := unix.Seek(s.pids, 0, 0); err != nil {
		return err
	}
	return eachNumber(s.pids, f)
}

// eachThread calls f for the threads of a process, until f returns false.
func (s *server) eachThread(pid string, f func(tid string) bool) error {
	dir, err := unix.Openat(s.proc, pid+"/task", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	return eachNumber(dir, func(_ int, tid string) bool { return f(tid) })
}

// eachNumber calls f for the numbers in a directory of /proc, read a few at a time.
func eachNumber(dir int, f func(n int, name string) bool) error {
	var buf [512]byte
	var names []string
	for {
		n, err := unix.Getdents(dir, buf[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil && !f(pid, name) {
				return nil
			}
		}
	}
}

// markIn returns the mark of a process. The mark is "" for one that has ended and has not been
// reaped; errUnreadable is for one that init must not inspect.
func (s *server) markIn(pid string) (mark string, err error) {
	err = s.anyThread(pid, func(path string) (err error) {
		mark, err = readMark(s.proc, path)
		return err
	})
	return mark, err
}

// anyThread calls read with the path of the UTS namespace of a process's first thread and, where
// that has ended, of the others, until a call succeeds. It returns nil without one if all threads
// have ended, and ESRCH if others ended or began meanwhile.
func (s *server) anyThread(pid string, read func(path string) error) error {
	ended, err := s.thread(pid, read)
	if err != nil || !ended {
		return err
	}
	others := false
	lerr := s.eachThread(pid, func(tid string) bool {
		others = others || tid != pid
		// The first thread once more: another one that executes a program takes its number.
		ended, err = s.thread(pid+"/task/"+tid, read)
		return ended || gone(err)
	})
	switch {
	case lerr != nil:
		return lerr
	case !ended && !gone(err):
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(s.proc, pid+"/task", &st, 0); err != nil {
		return err
	}
	if others || st.Nlink > 3 { // two, and one for each thread (proc_task_getattr)
		return unix.ESRCH
	}
	return nil
}

// thread calls read with the path of a thread's UTS namespace, and reports whether the thread has
// ended or is about to: it runs no program any more.
func (s *server) thread(dir string, read func(path string) error) (ended bool, err error) {
	err = read(dir + "/ns/uts")
	switch {
	case errors.Is(err, unix.ENOENT):
		return true, nil
	case !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM):
		return false, err
	}
	// The kernel returns this errno also for a thread that has just been reaped and, since its commit
	// 31e62c2ebbfd (in 6.18.44), for one that was not dumpable and ends or has ended.
	stat, err := readSmall(s.proc, dir+"/stat", 4096)
	if err != nil {
		return false, err
	}
	_, state, number, err := parseStat(stat)
	if err != nil {
		return false, err
	}
	const flags, exiting = 9, 0x4 // PF_EXITING
	if number(flags)&exiting != 0 || state == "Z" || state == "X" {
		return true, nil
	}
	return false, errUnreadable
}

func readMark(dir int, path string) (string, error) {
	var buf [32]byte
	n, err := unix.Readlinkat(dir, path, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// offered is the oom_score_adj of programs, the highest.
const offered = 1000

// offer makes a new process, and everything that it starts from then on, a better target of the
// kernel than init when the sandbox runs out of memory: with init the whole sandbox ends
// (TestMemoryLimitSparesTheInit). The launcher decides how much better, by init's own value.
// Programs could not take it back: they have no writable /proc.
func (s *server) offer(pid string) {
	fd, err := unix.Openat(s.writable, pid+"/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return // it has ended
	}
	_, _ = unix.Write(fd, []byte(strconv.Itoa(offered)))
	_ = unix.Close(fd)
}

// lean takes init's value half way to that of programs, until settle is called. A new process
// begins with init's, and its children from before it is offered keep that. So half of the
// difference is between init and these, and half of it is left to init while it forks. The caller
// holds mu.
func (s *server) lean() (settle func()) {
	own := s.readScore()
	leaned := (own + offered) / 2
	if own < 0 || leaned == own {
		return func() {}
	}
	s.writeScore(leaned)
	return func() {
		if s.readScore() == leaned { // else the launcher has set another one
			s.writeScore(own)
		}
	}
}

// readScore returns init's own oom_score_adj, which is not negative; -1 if it cannot be read.
func (s *server) readScore() int {
	var text [8]byte
	n, err := unix.Pread(s.score, text[:], 0)
	if err != nil {
		return -1
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		return -1
	}
	return score
}

func (s *server) writeScore(score int) { _, _ = unix.Pwrite(s.score, []byte(strconv.Itoa(score)), 0) }

// utsOf opens the UTS namespace of a child that cannot be reaped meanwhile, and returns its mark;
// -1 and "" if the child has ended; ESRCH if its threads ended or began meanwhile.
func (s *server) utsOf(child int) (fd int, mark string, err error) {
	pid := strconv.Itoa(child)
	s.offer(pid)
	fd = -1
	err = s.anyThread(pid, func(path string) (err error) {
		fd, err = unix.Openat(s.proc, path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil || fd < 0 {
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
// others ended or began. A process that has really ended stays without a mark, and has left nothing
// to kill. An unreadable one is found without a mark.
func (s *server) markLate(p *process) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.procs[p.pid] != p {
		return nil
	}
	fd, mark, err := s.utsOf(p.pid)
	if err == nil {
		p.mu.Lock() // for markOf
		p.uts, p.mark = fd, mark
		p.mu.Unlock()
	}
	if errors.Is(err, errUnreadable) {
		return nil
	}
	return err
}
