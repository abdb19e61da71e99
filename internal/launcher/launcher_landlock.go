package launcher

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/landlock"
)

// landlockPlan lists the access to files that the second stage has, whatever its descriptors and
// capabilities. Landlock is a fence beside the root, kept by other code of the kernel. Access that
// is handled and allowed by no rule is refused.
type landlockPlan struct {
	Handled unix.LandlockRulesetAttr
	Target  uint64 // the layer's directory, or the sandbox's upper one
	Lower   uint64 // the layers below
	Self    uint64 // the launcher's own binary, once, to execute the second stage
}

const (
	// Unpacking makes files, directories, links, FIFOs and whiteouts, sets xattrs through descriptors
	// that are open to read, and replaces its own files. It makes no socket and no block device, and
	// executes nothing.
	landlockTarget = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO |
		unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	// Reading a sandbox's changes.
	landlockUpper = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
)

// planLandlock takes away all access that a version of Landlock, at least [kernel.LandlockRefer],
// can handle, and returns target.
func planLandlock(abi int, target uint64) landlockPlan {
	l := landlockPlan{
		Handled: landlock.Everything(abi),
		Target:  target,
		Lower:   unix.LANDLOCK_ACCESS_FS_READ_DIR, // directories are opened on the way to files that are compared
		Self:    unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE,
	}
	if abi >= 3 && target&unix.LANDLOCK_ACCESS_FS_WRITE_FILE != 0 {
		l.Target |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	return l
}

// apply restricts the calling thread, and the programs that it executes, for good. The thread's
// root is the target, and so are the directories also; these, self and lower are descriptors.
func (l landlockPlan) apply(self int, also, lower []int) (err error) {
	rules, err := landlock.New(&l.Handled)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rules.Close()) }()
	if err := rules.AllowPath("/", l.Target); err != nil {
		return err
	}
	for _, dir := range also {
		if err := rules.Allow(dir, l.Target); err != nil {
			return fmt.Errorf("allow the directory in Landlock: %w", err)
		}
	}
	for _, dir := range lower {
		if err := rules.Allow(dir, l.Lower); err != nil {
			return fmt.Errorf("allow a layer below in Landlock: %w", err)
		}
	}
	// The launcher's binary is a sealed memfd. Those lie where Landlock neither looks nor takes rules
	// for.
	if err := rules.Allow(self, l.Self); err != nil && !errors.Is(err, unix.EBADFD) {
		return fmt.Errorf("allow own executable in Landlock: %w", err)
	}
	return rules.RestrictThread()
}
