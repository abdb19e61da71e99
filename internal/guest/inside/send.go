package inside

import (
	"errors"
	"fmt"
	"math/rand/v2"
	goruntime "runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// The kernel counts the descriptors that are under way over Unix sockets per user of the host, and refuses whoever has more than his
// own RLIMIT_NOFILE allows one process (too_many_unix_fds). The user is the sender's real uid, and that of every sandbox's root is the
// same: what a program in one of them leaves unread is counted against the inits of all. A limit of init's own above that of
// programs would not do: nothing can lower it for good between fork and exec but a program of ours, which the sandbox could stop.
// So init sends under another of its ids where it has others. Which one nobody can know before, and to fill the counts
// of all takes 65,536 times what fills one.

// otherUsers is how many of them are tried.
const otherUsers = 8

// countIDs is how many uids there are here, from 0 on.
func countIDs(proc int) (uint32, error) {
	fd, err := unix.Openat(proc, "self/uid_map", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("read own id map: %w", err)
	}
	var buf [4096]byte
	n, err := unix.Read(fd, buf[:])
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return 0, fmt.Errorf("read own id map: %w", err)
	}
	var ids uint32
	for line := range strings.Lines(string(buf[:n])) {
		var inside, outside, size uint32
		if _, err := fmt.Sscan(line, &inside, &outside, &size); err != nil {
			return 0, fmt.Errorf("read own id map: %w", err)
		}
		if inside != ids {
			break // a gap, which no map of ours has
		}
		ids += size
	}
	return ids, nil
}

// sendFiles is send for descriptors of init's.
func (c *conn) sendFiles(p []byte, fds []int) error {
	err := c.Send(p, fds...)
	for try := 0; try < otherUsers && errors.Is(err, unix.ETOOMANYREFS) && c.ids > 1; try++ {
		err = c.sendAs(1+rand.Uint32N(c.ids-1), p, fds) //nolint:gosec // the runtime seeds it by chance, once for each init
	}
	return err
}

// sendAs sends under another real uid. Nothing else of the thread changes: rights go by the effective one.
func (c *conn) sendAs(uid uint32, p []byte, fds []int) error {
	goruntime.LockOSThread()
	if setRealUID(uid) != nil { // a profile of one's own may refuse it; what is wrong is the count
		goruntime.UnlockOSThread()
		return unix.ETOOMANYREFS
	}
	err := c.Send(p, fds...)
	if setRealUID(0) == nil {
		goruntime.UnlockOSThread()
	} // else nothing but this goroutine runs on the thread any more, which ends with it
	return err
}

// setRealUID is for the calling thread alone.
func setRealUID(uid uint32) error {
	const same = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), same, same); errno != 0 {
		return errno
	}
	return nil
}
