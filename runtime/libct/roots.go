package libct

import (
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// The kernel writes out the whole file system below an overlay when that is mounted nowhere any more (ovl_sync_fs), and
// the last process of a mount namespace has not ended before that is done: whoever deletes a sandbox would wait for
// everything that anybody has written to the disk. So its overlays are held for the time of the deletion, and let go
// after it. What has been in them is removed by then; that it has been written out is of no use to anyone.

// holdRoots opens the overlays of a sandbox that runs. The paths are walked below its root without following a link, and
// nothing is done with what is found there but to close it.
func (in *instance) holdRoots() []int {
	if in.hasEnded() {
		return nil
	}
	root, err := unix.Open("/proc/"+strconv.Itoa(in.pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // it has just ended; to hold it is no duty
	}
	held := []int{root}
	for _, target := range in.targets {
		if target == "" {
			continue
		}
		fd, err := unix.Openat2(root, strings.TrimPrefix(target, "/"), &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
		})
		if err == nil {
			held = append(held, fd)
		}
	}
	return held
}

// rootCloser closes what holdRoots has opened, one after the other.
type rootCloser struct {
	mu      sync.Mutex
	waiting []int
	working bool
	done    sync.WaitGroup
}

// maxRoots is how many overlays may wait to be let go. Beyond that deletions wait themselves, or they would get ahead of
// the disk without a bound.
const maxRoots = 256

// close does not wait for the kernel, as long as there is room.
func (c *rootCloser) close(held []int) {
	c.mu.Lock()
	if len(c.waiting)+len(held) > maxRoots {
		c.mu.Unlock()
		closeAll(held)
		return
	}
	c.waiting = append(c.waiting, held...)
	if !c.working && len(c.waiting) > 0 {
		c.working = true
		c.done.Go(c.work)
	}
	c.mu.Unlock()
}

func (c *rootCloser) work() {
	for {
		c.mu.Lock()
		held := c.waiting
		c.waiting = nil
		c.working = len(held) > 0
		c.mu.Unlock()
		if len(held) == 0 {
			return
		}
		closeAll(held)
	}
}

// wait returns when everything has been let go.
func (c *rootCloser) wait() { c.done.Wait() }

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
