package inside

import (
	"errors"
	"fmt"
	"math/rand/v2"
	goruntime "runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// The kernel counts the descriptors in flight over Unix sockets per user of the host. It refuses a
// sender whose user has more than the sender's RLIMIT_NOFILE (too_many_unix_fds). The user is the
// sender's real uid. Init has drawn one of its own, but root of a sandbox can become each id and
// leave descriptors unread under it, which where ids are shared count against the inits of all. A
// higher limit for init alone is impossible: only a program of ours between fork and exec could
// lower it for good, which the sandbox could stop. So init sends under another of its ids if it has
// others. The id is unpredictable, and to fill the counts of all takes 65,536 times as much as to
// fill one.

// otherUsers bounds the attempts with another id.
const otherUsers = 8

// countIDs returns the number of uids of the sandbox, from 0 on, by init's own map.
func countIDs(dir int, idMap string) (uint32, error) {
	fd, err := unix.Openat(dir, idMap, unix.O_RDONLY|unix.O_CLOEXEC, 0)
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
			break // a gap, which no map of this module has
		}
		ids += size
	}
	return ids, nil
}

// sendFiles is Send for descriptors of init's.
func (c *conn) sendFiles(p []byte, fds []int) error {
	err := c.Send(p, fds...)
	for try := 0; try < otherUsers && errors.Is(err, unix.ETOOMANYREFS) && c.ids > 1; try++ {
		err = c.sendAs(1+rand.Uint32N(c.ids-1), p, fds) //nolint:gosec // the runtime seeds it by chance, once for each init
	}
	return err
}

// sendAs sends under another real uid. Nothing else of the thread changes: permissions depend on
// the effective uid.
func (c *conn) sendAs(uid uint32, p []byte, fds []int) error {
	goruntime.LockOSThread()
	if setRealUID(uid) != nil { // a custom profile may refuse it; the cause stays the count
		goruntime.UnlockOSThread()
		return unix.ETOOMANYREFS
	}
	err := c.Send(p, fds...)
	if setRealUID(c.own) == nil {
		goruntime.UnlockOSThread()
	} // else the thread stays locked, and ends with this goroutine
	return err
}

// setRealUID sets the real uid of the calling thread alone.
func setRealUID(uid uint32) error {
	const same = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), same, same); errno != 0 {
		return errno
	}
	return nil
}
