package libct

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// The last process of a mount namespace has not ended before the kernel has taken its mounts down.
// For an overlay the kernel then writes out the whole file system below it (ovl_sync_fs): a
// deletion would wait for all writes of the host to reach the disk. So the namespace is held for
// the time of the deletion, and let go after it. The overlays' files are removed by then; to have
// written them out is useless.

// holdMounts opens the mount namespace of a sandbox that runs; -1 where that cannot be, and nothing
// is lost. Nothing is done with the descriptor but to close it.
func (in *instance) holdMounts() int {
	if in.hasEnded() {
		return -1
	}
	fd, err := unix.Open("/proc/"+strconv.Itoa(in.pid)+"/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1 // it has just ended
	}
	return fd
}

// closer closes what holdMounts has opened, one after the other.
type closer struct {
	mu      sync.Mutex
	waiting []int
	working chan struct{} // closed when everything has been let go; nil: it has
}

// maxHeld is the number of namespaces that may wait to be let go. Beyond that deletions wait
// themselves, or they would get ahead of the disk without a bound.
const maxHeld = 64

// close does not wait for the kernel, as long as there is room. A negative fd is none.
func (c *closer) close(fd int) {
	if fd < 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) >= maxHeld {
		_ = unix.Close(fd) // with the lock: those that come meanwhile are no faster than the disk either
		return
	}
	c.waiting = append(c.waiting, fd)
	if c.working == nil {
		c.working = make(chan struct{})
		go c.work()
	}
}

func (c *closer) work() {
	for {
		c.mu.Lock()
		if len(c.waiting) == 0 {
			close(c.working)
			c.working = nil
			c.mu.Unlock()
			return
		}
		fd := c.waiting[0]
		c.waiting = c.waiting[1:]
		c.mu.Unlock()
		_ = unix.Close(fd)
	}
}

// wait returns when everything has been let go, or ctx ends: the kernel goes on then.
func (c *closer) wait(ctx context.Context) error {
	c.mu.Lock()
	working := c.working
	c.mu.Unlock()
	if working == nil {
		return nil
	}
	select {
	case <-working:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("let go of the mounts of deleted sandboxes: %w", context.Cause(ctx))
	}
}
