// Package landlock makes rulesets of the kernel's Landlock and restricts threads by them. The
// callers plan the rules.
package landlock

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Version1 has the rights to files of the first version.
const Version1 = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_FILE |
	unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
	unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
	unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK |
	unix.LANDLOCK_ACCESS_FS_MAKE_SYM

// Sockets is the first version with a right to connect to sockets that have a path (Linux 7.1).
const Sockets = 9

// Everything returns all rights that a version of Landlock, 2 or later, can take away, as far as
// this package knows: a later version is not asked for more.
func Everything(abi int) unix.LandlockRulesetAttr {
	a := unix.LandlockRulesetAttr{Handled_access_fs: Version1 | unix.LANDLOCK_ACCESS_FS_REFER}
	if abi >= 3 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= 4 {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	if abi >= Sockets {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
	}
	return a
}

// A Ruleset is a kernel object. Close it after use.
type Ruleset struct{ fd uintptr }

// New makes a ruleset that refuses all handled rights.
func New(handled *unix.LandlockRulesetAttr) (*Ruleset, error) {
	//nolint:gosec // the address is that of the structure which the call reads
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(handled)), unsafe.Sizeof(*handled), 0)
	if errno != 0 {
		return nil, fmt.Errorf("create Landlock ruleset: %w", errno)
	}
	return &Ruleset{fd}, nil
}

// Close closes the ruleset. Restricted threads stay restricted.
func (r *Ruleset) Close() error { return unix.Close(int(r.fd)) }

// Allow returns rights to a file, or to a directory and all below. Only handled rights may be
// named.
func (r *Ruleset) Allow(fd int, access uint64) error {
	attr := unix.LandlockPathBeneathAttr{Allowed_access: access, Parent_fd: int32(fd)} //nolint:gosec // G115: a descriptor
	//nolint:gosec // the address is that of the structure which the call reads
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, r.fd, unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// ofFiles are the rights to something that is no directory. The kernel refuses a rule about a file
// with any other.
const ofFiles = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_FILE |
	unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV

// AllowPath is Allow for a path, of whose rights a file gets those that files have. A link at its
// end is not followed.
func (r *Ruleset) AllowPath(path string, access uint64) (err error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s for Landlock: %w", path, err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("look at %s for Landlock: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		access &= ofFiles
	}
	if err := r.Allow(fd, access); err != nil {
		return fmt.Errorf("allow %s in Landlock: %w", path, err)
	}
	return nil
}

// RestrictThread restricts the calling thread, and everything that it starts, for good. It needs
// no_new_privs.
func (r *Ruleset) RestrictThread() error {
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, r.fd, 0, 0); errno != 0 {
		return fmt.Errorf("restrict by Landlock: %w", errno)
	}
	return nil
}

// RestrictProcess sets no_new_privs and restricts every thread of the process. Each is then in a
// domain of its own, with the same rules. It cannot be used in a program with cgo.
func (r *Ruleset) RestrictProcess() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, r.fd, 0, 0); errno != 0 {
		return fmt.Errorf("restrict by Landlock: %w", errno)
	}
	return nil
}

// signalsFixed is the erratum by which threads of one process, each in a domain of its own, can
// signal each other in spite of scopes, as Go's runtime does (Linux 6.15, and stable ones before).
const signalsFixed = 1 << 1

// ThreadsCanSignal reports whether the kernel lets threads of one process signal each other in
// spite of a scope of signals.
func ThreadsCanSignal() bool {
	const errata = 1 << 1 // LANDLOCK_CREATE_RULESET_ERRATA
	mended, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, errata)
	return errno == 0 && mended&signalsFixed != 0
}
