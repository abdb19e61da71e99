package launcher

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// landlock is what the second stage may do with files, whatever descriptor it holds and whatever capability it has: a fence
// beside the root that it is confined to, kept by other code of the kernel. Everything that is handled and that no rule
// allows is refused.
type landlock struct {
	Handled unix.LandlockRulesetAttr
	Target  uint64 // the directory that it is about: the layer's, or the sandbox's upper one
	Lower   uint64 // the layers below
	Self    uint64 // the launcher's own binary, once, to execute the second stage
}

const (
	// Unpacking makes files, directories, links, FIFOs and whiteouts, sets xattrs through descriptors that are open to read,
	// and replaces what it made. It makes no socket and no block device and executes nothing.
	landlockTarget = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO |
		unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	// Reading what a sandbox has changed.
	landlockUpper    = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	landlockVersion1 = landlockTarget&^unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_EXECUTE |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
)

// planLandlock takes all that a version of Landlock, which must be [kernel.LandlockRefer] or later, can take away, and gives
// back target.
func planLandlock(abi int, target uint64) landlock {
	l := landlock{
		Handled: unix.LandlockRulesetAttr{Handled_access_fs: landlockVersion1 | unix.LANDLOCK_ACCESS_FS_REFER},
		Target:  target,
		Lower:   unix.LANDLOCK_ACCESS_FS_READ_DIR, // directories are opened on the way to what is looked at
		Self:    unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE,
	}
	if abi >= 3 {
		l.Handled.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
		if target&unix.LANDLOCK_ACCESS_FS_WRITE_FILE != 0 {
			l.Target |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
		}
	}
	if abi >= 4 {
		l.Handled.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		l.Handled.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= 6 {
		l.Handled.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return l
}

// apply restricts the calling thread, and what it executes, for good. The thread's root is the target, and so are the
// directories also; these, self and lower are descriptors.
func (l landlock) apply(self int, also, lower []int) (err error) {
	//nolint:gosec // the address is that of the structure which the call reads
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&l.Handled)), unsafe.Sizeof(l.Handled), 0)
	if errno != 0 {
		return fmt.Errorf("create Landlock ruleset: %w", errno)
	}
	rules := int(fd)
	defer func() { err = errors.Join(err, unix.Close(rules)) }()
	target, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open layer directory: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(target)) }()
	for _, dir := range append([]int{target}, also...) {
		if err := allowBeneath(rules, dir, l.Target); err != nil {
			return fmt.Errorf("allow the directory in Landlock: %w", err)
		}
	}
	for _, dir := range lower {
		if err := allowBeneath(rules, dir, l.Lower); err != nil {
			return fmt.Errorf("allow a layer below in Landlock: %w", err)
		}
	}
	// The launcher's binary is a sealed memfd. Those lie where Landlock neither looks nor takes rules for.
	if err := allowBeneath(rules, self, l.Self); err != nil && !errors.Is(err, unix.EBADFD) {
		return fmt.Errorf("allow own executable in Landlock: %w", err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return fmt.Errorf("restrict by Landlock: %w", errno)
	}
	return nil
}

func allowBeneath(rules, fd int, access uint64) error {
	attr := unix.LandlockPathBeneathAttr{Allowed_access: access, Parent_fd: int32(fd)} //nolint:gosec // G115: a descriptor
	//nolint:gosec // the address is that of the structure which the call reads
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(rules), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
