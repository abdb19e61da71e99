package inside

import (
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A program that has ended by the time that init looks for its mark has none, also if it was not
// dumpable (having dropped privileges, say), and is not refused for that. For real root the kernel
// tells the two apart, so that this can fail for ordinary users alone.
func TestMarkOfWhatHasEnded(t *testing.T) {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(proc) })
	s := &server{proc: proc, writable: proc}
	for _, dumpable := range []uintptr{0, 1} {
		pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
		if errno != 0 {
			t.Fatal(errno)
		}
		if pid == 0 { // nothing but system calls is safe in this child
			_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, dumpable, 0)
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if err := unix.Waitid(unix.P_PID, int(pid), nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			t.Fatal(err)
		}
		fd, mark, err := s.utsOf(int(pid))
		if fd != -1 || mark != "" || err != nil {
			t.Errorf("dumpable %d: descriptor %d, mark %q, %v", dumpable, fd, mark, err)
		}
		if mark, err := s.markIn(strconv.Itoa(int(pid))); mark != "" || err != nil {
			t.Errorf("dumpable %d: mark %q, %v", dumpable, mark, err)
		}
		if _, err := unix.Wait4(int(pid), nil, 0, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := s.markIn(strconv.Itoa(int(pid))); !gone(err) {
			t.Errorf("dumpable %d, reaped: %v", dumpable, err)
		}
	}
}

// The other execs of a sandbox are not killed because the machine stood still while one was:
// processes that are found then, in the first round or the next, prove nothing.
func TestOthersAreSparedWhereTheMachineStoodStill(t *testing.T) {
	for _, tc := range []struct {
		fresh   bool
		elapsed time.Duration
		round   int
		want    bool
	}{
		{true, 5 * killAll, 0, false},
		{true, 5 * killAll, killRounds - 1, false},
		{true, 2 * killAll, killRounds, true},
		{false, 2 * killAll, 100, false},
		{true, killAll / 2, 100, false},
	} {
		if got := hopeless(tc.fresh, tc.elapsed, tc.round); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
}

// A process with several threads is not taken for one that has ended because each of them was gone
// when it was read.
func TestThreadsThatComeAndGo(t *testing.T) {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(proc) })
	s := &server{proc: proc}
	self := strconv.Itoa(unix.Getpid()) // whose runtime has threads
	const first = "/ns/uts"
	for name, read := range map[string]func(path string) error{
		"all are gone": func(path string) error { return unix.ENOENT },
		"others are gone in between": func(path string) error {
			if path == self+first {
				return unix.ENOENT
			}
			return unix.ESRCH
		},
	} {
		if err := s.anyThread(self, read); !gone(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// One that is found is enough.
	found := ""
	err = s.anyThread(self, func(path string) error {
		if path == self+first || path == self+"/task/"+self+first {
			return unix.ENOENT
		}
		found = path
		return nil
	})
	if err != nil || found == "" {
		t.Errorf("%q, %v", found, err)
	}
}
