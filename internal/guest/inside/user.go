package inside

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
)

const (
	// maxID is the highest uid and gid that a sandbox's user namespace maps.
	maxID = 65535
	// maxDatabase bounds /etc/passwd and /etc/group, and maxEntry a line of /etc/passwd, in bytes.
	maxDatabase = 1 << 20
	maxEntry    = 64 << 10
	// maxAccount bounds the name of a user or a group.
	maxAccount = 64
)

// user answers with the account of a user.
func (s *server) user(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.UserRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	a, home, err := s.account(pkt.Strs[0], m.NonRoot)
	if err != nil {
		return err
	}
	p, err := guest.Encode(guest.KindAccount, a, home)
	if err != nil {
		return err
	}
	return c.Send(p)
}

// account finds the ids and the home directory of a user: "name", "uid" or either with ":group" or
// ":gid", in the sandbox's /etc/passwd and /etc/group. Root needs neither. Other users are refused
// if one of these files cannot be read; a missing file is an empty one.
func (s *server) account(user string, nonRoot bool) (a guest.AccountAnswer, home string, err error) {
	switch user {
	case "0", "root", "0:0", "root:root":
		home = "/root"
	default:
		name, group, both := strings.Cut(user, ":")
		if name == "" || len(name) > maxAccount || both && group == "" || len(group) > maxAccount {
			return a, "", fail(guest.StageUser, unix.EINVAL, user)
		}
		db := accounts{name: name, group: group}
		if err := s.database("/etc/passwd", db.passwd); err != nil {
			return a, "", err
		}
		if err := s.database("/etc/group", db.groups); err != nil {
			return a, "", err
		}
		if a, home, err = db.account(); err != nil {
			return a, "", fail(guest.StageUser, err, user)
		}
	}
	if nonRoot && a.UID == 0 {
		return a, "", fail(guest.StageUser, unix.EPERM, user) // whatever name has led to root
	}
	return a, home, nil
}

// database calls parse for a file of the sandbox. Hostile files are refused like those of a
// request: the path leads nowhere else, FIFOs and devices are not opened, and the size is bounded.
func (s *server) database(path string, parse func(io.Reader) error) error {
	handle, err := openPath(unix.AT_FDCWD, path, 0)
	if errors.Is(err, unix.ENOENT) {
		return parse(strings.NewReader(""))
	}
	if err != nil {
		return fail(guest.StageUser, err, path)
	}
	defer func() { _ = unix.Close(handle) }()
	if err := notRegular(handle, path); err != nil {
		return fail(guest.StageUser, err, path)
	}
	fd, err := s.reopen(handle, unix.O_RDONLY)
	if err != nil {
		return fail(guest.StageUser, err, path)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := parse(descriptor(fd)); err != nil {
		return fail(guest.StageUser, err, path)
	}
	return nil
}

// A descriptor reads from a file without the runtime's poller.
type descriptor int

func (d descriptor) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(d), p)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// accounts looks one user up in the two databases. The first entry of a name counts.
type accounts struct {
	name, group string

	found   bool
	uid     uint64 // of the entry
	gid     uint64
	login   string // name of the entry
	home    string
	grouped bool
	named   uint64   // gid of the named group
	member  []uint32 // gids of the groups that login belongs to
	tooMany bool
	tooHigh bool
}

// lines calls f for the fields of each line whose fields first to last are plain numbers. Other
// lines do not count: a parser that takes anything else for 0 makes it root (CVE-2026-30892 is of
// this kind).
func lines(r io.Reader, first, last int, f func(size int, fields []string) error) error {
	limited := &io.LimitedReader{R: r, N: maxDatabase + 1}
	s := bufio.NewScanner(limited)
	s.Buffer(make([]byte, 4096), maxDatabase+2)
	for s.Scan() {
		ok := true
		fields := strings.Split(string(s.Bytes()), ":")
		for i := first; ok && i <= last; i++ {
			ok = i < len(fields) && number(fields[i])
		}
		if !ok {
			continue
		}
		if err := f(len(s.Bytes()), strings.Split(string(bytes.TrimSpace(s.Bytes())), ":")); err != nil {
			return err
		}
	}
	if limited.N == 0 {
		return unix.EFBIG
	}
	return s.Err()
}

func number(s string) bool {
	_, err := strconv.ParseUint(s, 10, 31)
	return err == nil
}

// passwd reads /etc/passwd.
func (a *accounts) passwd(r io.Reader) error {
	uid, err := strconv.ParseUint(a.name, 10, 31)
	numeric := err == nil
	return lines(r, 2, 3, func(size int, fields []string) error {
		if size >= maxEntry {
			return unix.EINVAL
		}
		entry, _ := strconv.ParseUint(fields[2], 10, 31)
		if a.found || numeric && entry != uid || !numeric && fields[0] != a.name {
			return nil
		}
		a.found, a.login, a.uid = true, fields[0], entry
		a.gid, _ = strconv.ParseUint(fields[3], 10, 31)
		if len(fields) > 5 {
			a.home = fields[5]
		}
		return nil
	})
}

// groups reads /etc/group, after /etc/passwd.
func (a *accounts) groups(r io.Reader) error {
	return lines(r, 2, 2, func(_ int, fields []string) error {
		gid, _ := strconv.ParseUint(fields[2], 10, 31)
		switch {
		case strings.HasPrefix(fields[0], "#"):
		case a.group != "":
			if !a.grouped && fields[0] == a.group {
				a.grouped, a.named = true, gid
			}
		case a.login != "" && len(fields) > 3 && slices.Contains(strings.Split(fields[3], ","), a.login):
			a.tooHigh = a.tooHigh || gid > maxID
			if a.tooMany = len(a.member) == guest.MaxGroups; !a.tooMany {
				a.member = append(a.member, uint32(gid))
			}
		}
		return nil
	})
}

// account returns the result of both databases: ids that a sandbox can have, or the errno of a
// refusal.
func (a *accounts) account() (guest.AccountAnswer, string, error) {
	var none guest.AccountAnswer
	uid, gid := a.uid, a.gid
	if !a.found {
		var err error
		if uid, err = strconv.ParseUint(a.name, 10, 31); err != nil {
			return none, "", unix.ESRCH
		}
		gid = 0 // as image builders expect since Docker
	}
	if a.group != "" {
		number, err := strconv.ParseUint(a.group, 10, 31)
		switch {
		case err == nil: // a number is never a name
			gid = number
		case a.grouped:
			gid = a.named
		default:
			return none, "", unix.ENOENT
		}
	}
	switch {
	case uid > maxID, gid > maxID, a.tooHigh:
		return none, "", unix.ERANGE
	case a.tooMany:
		return none, "", unix.E2BIG
	}
	home := a.home
	if home == "" || len(home) >= guest.MaxPath || strings.IndexByte(home, 0) >= 0 {
		home = "/"
	}
	return guest.AccountAnswer{UID: uint32(uid), GID: uint32(gid), Groups: a.member}, home, nil
}
