package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

const (
	// scratchSize bounds a lane's temporary files in memory: seven times the most that was seen.
	scratchSize = "4g"
	// scratchMemory is how much of the machine's memory must be free for that, beside two machines of
	// the bed.
	scratchMemory = 8 << 30
)

// scratch readies the directory that a lane has for temporary files, and returns what removes all
// that is in it.
//
// Every daemon that a test starts makes the host image, a thousand inodes, and they are removed
// with it. Before ext4 without a journal takes an inode, it looks at each one removed in the last
// minutes: that took a third of the tests' processor time. Syncs wait for a disk that the other
// lane writes to. So an ordinary user's files are in memory, if root runs the lanes. Root's stay
// on disk, as the product's do, and are removed when all have been made. So are those of a soak
// run, which makes images of gigabytes.
func (l *lane) scratch(ctx context.Context, dir string, soak bool) (remove func() error, inMemory bool) {
	onDisk := func() error { return removeTree(ctx, dir) }
	if l.user == nil || soak {
		return onDisk, false
	}
	if err := mountMemory(dir); err != nil {
		fmt.Printf("lane %s: its temporary files are on disk, which takes longer: %v\n", l.Name, err)
		return onDisk, false
	}
	// Detached: a peer of a test that leaves something running for its next use, as podman does,
	// holds nothing up.
	return func() error { return unix.Unmount(dir, unix.MNT_DETACH) }, true
}

// mountMemory mounts a tmpfs that overlay can lie on, where there is memory for it.
func mountMemory(dir string) error {
	if free, err := memoryAvailable(); err != nil {
		return err
	} else if free < scratchMemory {
		return fmt.Errorf("%d MiB of memory are free", free>>20)
	}
	if err := unix.Mount("sandboxd-lanes", dir, "tmpfs", 0, "mode=0700,size="+scratchSize); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	if err := kernel.UserXattrs(dir); err != nil {
		return errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
	}
	return nil
}

// memoryAvailable is how much may be used before the machine has to swap, in bytes.
func memoryAvailable() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, after, found := strings.Cut(string(data), "\nMemAvailable:")
	var kib int64
	if _, err := fmt.Sscan(after, &kib); !found || err != nil {
		return 0, fmt.Errorf("no MemAvailable in /proc/meminfo: %w", err)
	}
	return kib << 10, nil
}
