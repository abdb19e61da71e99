package httpapi

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Tenants are the users of this host that are tenants of their own. The zero value has none: the
// daemon's uid, and root, are its only callers.
type Tenants struct {
	UIDs  []uint32 // sorted; those of the daemon and of root are never tenants
	Group *uint32  // nil, or the group whose members are tenants
}

// ParseTenants reads a list of uids and names of users, or @GROUP.
func ParseTenants(text string) (Tenants, error) {
	var t Tenants
	if name, found := strings.CutPrefix(text, "@"); found {
		id := name
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			g, err := user.LookupGroup(name)
			if err != nil {
				return t, fmt.Errorf("group %q: %w", name, err)
			}
			id = g.Gid
		}
		gid, err := parseID(id)
		if err != nil {
			return t, fmt.Errorf("group %q: %w", name, err)
		}
		t.Group = &gid
		return t, nil
	}
	for one := range strings.SplitSeq(text, ",") {
		id := one
		if _, err := strconv.ParseUint(one, 10, 32); err != nil {
			u, err := user.Lookup(one)
			if err != nil {
				return t, fmt.Errorf("user %q: %w", one, err)
			}
			id = u.Uid
		}
		uid, err := parseID(id)
		if err != nil {
			return t, fmt.Errorf("user %q: %w", one, err)
		}
		if uid == 0 || int64(uid) == int64(os.Geteuid()) {
			return t, fmt.Errorf("user %q: root and the daemon's user are operators, no tenants", one)
		}
		t.UIDs = append(t.UIDs, uid)
	}
	slices.Sort(t.UIDs)
	t.UIDs = slices.Compact(t.UIDs)
	return t, nil
}

func parseID(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err == nil && uint32(n) == unknownUID {
		err = errors.New("no id")
	}
	return uint32(n), err
}

// any reports whether there may be a tenant.
func (t Tenants) any() bool { return len(t.UIDs) > 0 || t.Group != nil }

// has reports whether the peer is a tenant.
func (t Tenants) has(p peer) bool {
	if p.uid == unknownUID {
		return false
	}
	return slices.Contains(t.UIDs, p.uid) || t.Group != nil && slices.Contains(p.groups, *t.Group)
}

// mode returns the mode of the socket: a list of uids cannot be said by one, and the peer's uid is
// read in any case.
func (t Tenants) mode() uint32 {
	switch {
	case t.Group != nil:
		return 0o660
	case len(t.UIDs) > 0:
		return 0o666
	}
	return 0o600
}

// SocketRefused returns the reason why the tenants cannot open a socket at this path, or why
// another user could take its place; empty if neither holds.
func (t Tenants) SocketRefused(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Sprintf("the socket's directory %s is not there", filepath.Dir(path))
	} else if err != nil || !filepath.IsAbs(dir) {
		return fmt.Sprintf("the socket's directory %s is no absolute path to follow: %v", filepath.Dir(path), err)
	}
	for at := dir; ; at = filepath.Dir(at) {
		fi, err := os.Stat(at)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Sprintf("the socket's directory %s is not there", at)
		} else if err != nil {
			return fmt.Sprintf("the socket's directory %s: %v", at, err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Sprintf("the owner of %s is unknown", at)
		}
		perm := fi.Mode().Perm()
		group := t.Group != nil && st.Gid == *t.Group
		switch {
		case st.Uid != 0 && int64(st.Uid) != int64(os.Geteuid()):
			return fmt.Sprintf("the socket's directory %s belongs to uid %d, who could replace it", at, st.Uid)
		case perm&0o022 != 0 && (at == dir || fi.Mode()&fs.ModeSticky == 0):
			return fmt.Sprintf("others may write to the socket's directory %s, and could replace it", at)
		case group && perm&0o010 == 0, !group && perm&0o001 == 0:
			return fmt.Sprintf("the socket %s lies in %s, which is closed to tenants", path, at)
		}
		if at == filepath.Dir(at) {
			return ""
		}
	}
}

// peer identifies the other side of a connection by the credentials with which it connected.
type peer struct {
	uid    uint32
	groups []uint32 // its group and its supplementary groups; nil unless tenants are a group's members
}

// tenant returns the name under which objects of the peer are kept, empty for the daemon's own.
func (p peer) tenant() string {
	if p.operator() {
		return ""
	}
	return "uid:" + strconv.FormatUint(uint64(p.uid), 10)
}

// operator reports whether the peer has the uid of the daemon, or is root, which no file mode keeps
// out.
func (p peer) operator() bool { return p.uid == 0 || int64(p.uid) == int64(os.Geteuid()) }

// peerGroups returns the groups with which the peer connected: SO_PEERCRED's, and those of
// SO_PEERGROUPS (Linux 4.13).
func peerGroups(c *net.UnixConn) (groups []uint32, err error) {
	conn, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := conn.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		// x/sys has no call for this option. The list has room for the kernel's NGROUPS_MAX.
		list := make([]uint32, 1<<16)
		size := uint32(4 * len(list)) //nolint:gosec // G115: 256 KiB
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&list[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // G103: see above
		if errno != 0 {
			err = errno
			return
		}
		groups = append(slices.Clone(list[:size/4]), cred.Gid)
	})
	return groups, errors.Join(cerr, err)
}

// maxPeerConns is the number of connections that one tenant may have at a time. Each costs the
// daemon descriptors, and the body of a request memory.
const maxPeerConns = 256

// peerConns counts the connections of each uid but the operators'.
type peerConns struct {
	mu sync.Mutex
	n  map[uint32]int
}

// enter counts a connection, which leave must end; false if the uid has too many.
func (p *peerConns) enter(uid uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n == nil {
		p.n = make(map[uint32]int)
	}
	if p.n[uid] >= maxPeerConns {
		return false
	}
	p.n[uid]++
	return true
}

func (p *peerConns) leave(uid uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n[uid]--; p.n[uid] == 0 {
		delete(p.n, uid)
	}
}
