package inside

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// clockTick is the unit of times in /proc/<pid>/stat. The kernel's USER_HZ is 100 wherever Go runs.
const clockTick = 10 * time.Millisecond

// processes lists every process of the sandbox except init.
func (s *server) processes(c *conn, pkt guest.Packet, fds []int) error {
	if err := expect(pkt, &guest.None{}, 0, fds, 0); err != nil {
		return err
	}
	mains := s.mains()
	now, list, err := s.openProcesses()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(list) }()
	if err := c.reply(guest.KindListing, guest.None{}); err != nil {
		return nil // the daemon is gone
	}
	told := 0
	var sent, lack error
	err = eachNumber(list, func(pid int, name string) bool {
		if pid == 1 {
			return true
		}
		if told == guest.MaxProcesses {
			return false
		}
		a, argv, err := s.describe(name, now)
		if err != nil {
			if !gone(err) { // a list without a process that runs would be a lie
				lack = err
			}
			return lack == nil
		}
		a.PID, a.Main = pid, mains[a.mark]
		p, err := guest.Encode(guest.KindProcess, a.ProcessAnswer, argv...)
		if err != nil {
			return true
		}
		told++
		sent = c.Send(p)
		return sent == nil
	})
	if sent != nil {
		return nil // the daemon is gone, or does not read: no peer is left
	}
	if err := errors.Join(err, lack); err != nil {
		return fail(guest.StageRead, err, "/proc")
	}
	return c.reply(guest.KindDone, guest.None{})
}

// mains returns the pids of the main processes of running execs, by their marks.
func (s *server) mains() map[string]int {
	mains := map[string]int{}
	s.mu.Lock()
	running := make([]*process, 0, len(s.procs))
	for _, p := range s.procs {
		running = append(running, p)
	}
	s.mu.Unlock()
	for _, p := range running {
		if mark := p.markOf(); mark != "" {
			mains[mark] = p.pid
		}
	}
	return mains
}

// openProcesses returns the time from boot, and a list of processes of its own: the descriptor of
// kills waits for no daemon.
func (s *server) openProcesses() (now time.Duration, list int, err error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, -1, fail(guest.StageRead, err, "clock")
	}
	if list, err = unix.Openat(s.proc, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return 0, -1, fail(guest.StageRead, err, "/proc")
	}
	return time.Duration(ts.Nano()), list, nil
}

// holder describes a process that has a socket: of several, the first of /proc. A program that has
// passed the socket on is as good as one that has made it: the kernel knows no difference.
func (s *server) holder(c *conn, pkt guest.Packet, fds []int) error {
	var r guest.HolderRequest
	if err := expect(pkt, &r, 0, fds, 0); err != nil {
		return err
	}
	now, list, err := s.openProcesses()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(list) }()
	left, link := guest.MaxHeld, "socket:["+strconv.FormatUint(uint64(r.Socket), 10)+"]"
	var found []byte
	err = eachNumber(list, func(pid int, name string) bool {
		if pid == 1 || !s.holds(name, link, &left) {
			return left > 0
		}
		// One that has ended meanwhile may have left the socket to another.
		if a, argv, err := s.describe(name, now); err == nil {
			a.PID, a.Main = pid, s.mains()[a.mark]
			if p, err := guest.Encode(guest.KindProcess, a.ProcessAnswer, argv...); err == nil {
				found = p
			}
		}
		return found == nil && left > 0
	})
	if err != nil {
		return fail(guest.StageRead, err, "/proc")
	}
	if found == nil {
		return fail(guest.StageRead, unix.ESRCH, "/proc")
	}
	_ = c.Send(found) // else the daemon is gone
	return nil
}

// holds reports whether a process has a descriptor with a link. It takes the number of descriptors
// that it looks at from left.
func (s *server) holds(pid, link string, left *int) (has bool) {
	dir, err := unix.Openat(s.proc, pid+"/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false // it has ended, or init must not look at it
	}
	defer func() { _ = unix.Close(dir) }()
	var buf [64]byte
	_ = eachNumber(dir, func(_ int, name string) bool {
		*left--
		n, err := unix.Readlinkat(dir, name, buf[:])
		has = err == nil && string(buf[:n]) == link
		return !has && *left > 0
	})
	return has
}

// description holds the properties of a process and its mark.
type description struct {
	guest.ProcessAnswer

	mark string
}

// describe reads a process's files of /proc. Since is the time from boot.
func (s *server) describe(name string, since time.Duration) (d description, argv []string, err error) {
	dir, err := unix.Openat(s.proc, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return d, nil, err
	}
	defer func() { _ = unix.Close(dir) }()
	stat, err := readSmall(dir, "stat", 4096)
	if err != nil {
		return d, nil, err
	}
	comm, state, number, err := parseStat(stat)
	if err != nil {
		return d, nil, err
	}
	d.Name = strings.ToValidUTF8(comm, "?")
	d.State = state
	d.PPID = int(number(4))
	d.CPU = (number(14) + number(15)) * int64(clockTick)
	d.Age = max(0, int64(since)-number(22)*int64(clockTick))
	d.RSS = number(24) * int64(unix.Getpagesize())
	status, err := readSmall(dir, "status", 8192)
	if err != nil {
		return d, nil, err
	}
	if _, after, ok := bytes.Cut(status, []byte("\nUid:\t")); ok {
		f := strings.Fields(string(after))
		if len(f) > 1 {
			uid, _ := strconv.ParseUint(f[1], 10, 32) // the effective one; the kernel writes numbers
			d.UID = uint32(uid)
		}
	}
	d.mark, _ = s.markIn(name) // a process that init must not inspect has no mark
	line, err := readSmall(dir, "cmdline", guest.MaxProcessArgs+1)
	if err != nil {
		return d, nil, err
	}
	if len(line) > guest.MaxProcessArgs {
		line, d.Cut = line[:guest.MaxProcessArgs], true
	}
	if line = bytes.TrimSuffix(line, []byte{0}); len(line) > 0 {
		argv = strings.Split(string(line), "\x00")
	}
	return d, argv, nil
}

// parseStat returns name, state and further fields, by their numbers in proc_pid_stat(5), of a
// process or thread.
func parseStat(stat []byte) (comm, state string, number func(field int) int64, err error) {
	// The name, in parentheses, may hold any byte.
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return "", "", nil, unix.EINVAL
	}
	fields := strings.Fields(string(stat[end+1:])) // the first one is the third
	if len(fields) < 22 {
		return "", "", nil, unix.EINVAL
	}
	number = func(field int) int64 {
		n, _ := strconv.ParseInt(fields[field-3], 10, 64) // the kernel writes numbers
		return n
	}
	return string(stat[open+1 : end]), fields[0], number, nil
}

// readSmall reads the beginning of a file of /proc.
func readSmall(dir int, name string, most int) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	b := make([]byte, most)
	n := 0
	for n < most {
		m, err := unix.Read(fd, b[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if m == 0 {
			break
		}
		n += m
	}
	return b[:n], nil
}
