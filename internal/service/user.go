package service

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/user"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// maxID is the highest uid and gid that a sandbox's user namespace maps.
	maxID = 65535
	// maxDatabase bounds /etc/passwd and /etc/group of a sandbox.
	maxDatabase = 1 << 20
	// maxGroups bounds the supplementary groups of a user.
	maxGroups = 1024
)

// identity holds the ids that a program runs under, as the sandbox numbers them.
type identity struct {
	uid, gid uint32
	groups   []uint32
	home     string
}

// validateUser checks the form "name", "uid" or either with ":group". Signs and spaces never get to
// a parser of numbers.
func validateUser(spec string) error {
	if spec == "" {
		return nil
	}
	name, group, both := strings.Cut(spec, ":")
	if !validAccount(name) || both && !validAccount(group) {
		return class.Invalidf("user %q: must be name, uid, name:group or uid:gid", class.Clip(spec))
	}
	for _, part := range []string{name, group} {
		if id, err := strconv.ParseUint(part, 10, 64); (err == nil || errors.Is(err, strconv.ErrRange)) && (err != nil || id > maxID) {
			return class.Invalidf("user %q: the ids of a sandbox end at %d", class.Clip(spec), maxID)
		}
	}
	return nil
}

// isRoot reports whether a user is root by any of the names that need no lookup.
func isRoot(spec string) bool {
	name, _, _ := strings.Cut(spec, ":")
	id, err := strconv.ParseUint(name, 10, 64)
	return name == "" || name == "root" || err == nil && id == 0
}

// programUser returns the default user of a sandbox's programs: from the request, else from the
// image. Under a profile that runs nothing as root the profile's user replaces root; a request that
// names root is refused.
func programUser(p *runtime.Profile, asked, image string) (string, error) {
	switch {
	case !p.NonRoot:
		return cmp.Or(asked, image), nil
	case asked != "" && isRoot(asked):
		return "", refuseRoot(asked, p.Name)
	case isRoot(cmp.Or(asked, image)):
		return p.User, nil
	}
	return cmp.Or(asked, image), nil
}

func refuseRoot(user, profile string) error {
	if user == "" {
		user = "root" // a sandbox from before its profile said so
	}
	return class.Invalidf("user %q: profile %q runs nothing as root", user, profile)
}

// userOf finds the ids of the user that a request names, else of the sandbox's user, to run as or
// to own a file. The sandbox's own files may give a name the id of root: it is refused where none
// may run as root.
func userOf(ctx context.Context, rec *runtime.Record, asked string, open func(context.Context, string) (*os.File, error)) (identity, error) {
	spec := cmp.Or(asked, rec.User)
	id, err := resolveUser(ctx, spec, open)
	if err == nil && rec.Enforced.NonRoot && id.uid == 0 {
		return identity{}, refuseRoot(spec, rec.Profile)
	}
	return id, err
}

// isBareRoot reports whether a user is root by a name that needs no lookup for its groups and home
// either.
func isBareRoot(spec string) bool {
	switch spec {
	case "", "0", "root", "0:0", "root:root":
		return true
	}
	return false
}

// owner finds the ids of the user that a request about files names, else of the sandbox's user:
// init looks them up. An init of an earlier version, which has outlived its daemon, has its files
// read instead.
func owner(ctx context.Context, client *host.Client, rec *runtime.Record, asked string) (identity, error) {
	spec := cmp.Or(asked, rec.User)
	if isBareRoot(spec) {
		return userOf(ctx, rec, asked, client.Open)
	}
	if err := validateUser(spec); err != nil {
		return identity{}, err
	}
	a, err := client.Account(ctx, spec, rec.Enforced.NonRoot)
	if refused(err, syscall.ENOSYS) {
		return userOf(ctx, rec, asked, client.Open)
	}
	if err != nil {
		return identity{}, userError(rec, spec, err)
	}
	return identity{uid: a.UID, gid: a.GID, groups: a.Groups, home: a.Home}, nil
}

// refused reports whether init has refused a request as such: an earlier version refuses those, and
// fields, that it does not know.
func refused(err error, errno syscall.Errno) bool {
	ge, ok := errors.AsType[*guest.Error](err)
	return ok && ge.Stage == guest.StageRequest && ge.Errno == errno
}

// userError classifies an error of init about a user. Others pass.
func userError(rec *runtime.Record, spec string, err error) error {
	const looked = "looked up in the sandbox's /etc/passwd and /etc/group"
	ge, ok := errors.AsType[*guest.Error](err)
	if !ok || ge.Stage != guest.StageUser {
		return err
	}
	if strings.HasPrefix(ge.Path, "/") {
		switch {
		case errors.Is(ge.Errno, syscall.EFBIG):
			return class.Invalidf("the sandbox's %q is larger than %d bytes", ge.Path, maxDatabase)
		case errors.Is(ge.Errno, syscall.EINVAL):
			return class.Invalidf("read the sandbox's %q: not a regular file, or not one of users", ge.Path)
		}
		return fmt.Errorf("read the sandbox's %q: %w", ge.Path, fileError(ge.Path, &guest.Error{Stage: guest.StageOpen, Errno: ge.Errno, Path: ge.Path}))
	}
	switch {
	case errors.Is(ge.Errno, syscall.ESRCH):
		return class.Invalidf("user %q: %w (%s)", spec, user.ErrNoPasswdEntries, looked)
	case errors.Is(ge.Errno, syscall.ENOENT):
		return class.Invalidf("user %q: %w (%s)", spec, user.ErrNoGroupEntries, looked)
	case errors.Is(ge.Errno, syscall.ERANGE):
		return class.Invalidf("user %q: an id or a group is too high: the ids of a sandbox end at %d", spec, maxID)
	case errors.Is(ge.Errno, syscall.E2BIG):
		return class.Invalidf("user %q is in more than %d groups, at most %d are possible", spec, maxGroups, maxGroups)
	case errors.Is(ge.Errno, syscall.EPERM):
		return refuseRoot(spec, rec.Profile)
	case errors.Is(ge.Errno, syscall.EINVAL):
		return class.Invalidf("user %q: must be name, uid, name:group or uid:gid", class.Clip(spec))
	}
	return fmt.Errorf("find user %q: %w", spec, ge.Errno)
}

func validAccount(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i, r := range s {
		ok := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' ||
			i > 0 && (r == '-' || r == '.') || i > 0 && i == len(s)-1 && r == '$'
		if !ok {
			return false
		}
	}
	return true
}

// resolveUser finds the ids behind a user. Open opens a file of the sandbox; it is not called for
// root. Whatever the files say, the outcome is numbers that a sandbox may have: nothing is parsed
// on the other side of a process boundary.
func resolveUser(ctx context.Context, spec string, open func(context.Context, string) (*os.File, error)) (identity, error) {
	if isBareRoot(spec) {
		return identity{home: "/root"}, nil
	}
	if err := validateUser(spec); err != nil {
		return identity{}, err
	}
	passwd, err := readDatabase(ctx, "/etc/passwd", 2, 3, open)
	if err != nil {
		return identity{}, err
	}
	// Groups matter for names only: "uid" and "uid:gid" are taken as they are.
	group, err := readDatabase(ctx, "/etc/group", 2, 2, open)
	if err != nil {
		return identity{}, err
	}
	// Without an entry for a numeric uid the group is 0, as image builders expect since Docker.
	found, err := user.GetExecUser(spec, &user.ExecUser{Home: "/"}, bytes.NewReader(passwd), bytes.NewReader(group))
	if err != nil {
		return identity{}, class.Invalidf("user %q: %w (looked up in the sandbox's /etc/passwd and /etc/group)", spec, err)
	}
	if found.Uid < 0 || found.Uid > maxID || found.Gid < 0 || found.Gid > maxID {
		return identity{}, class.Invalidf("user %q is %d:%d: the ids of a sandbox end at %d", spec, found.Uid, found.Gid, maxID)
	}
	id := identity{uid: uint32(found.Uid), gid: uint32(found.Gid), home: found.Home}
	if len(found.Sgids) > maxGroups {
		return identity{}, class.Invalidf("user %q is in %d groups, at most %d are possible", spec, len(found.Sgids), maxGroups)
	}
	for _, g := range found.Sgids {
		if g < 0 || g > maxID {
			return identity{}, class.Invalidf("user %q is in group %d: the ids of a sandbox end at %d", spec, g, maxID)
		}
		id.groups = append(id.groups, uint32(g))
	}
	if id.home == "" || strings.IndexByte(id.home, 0) >= 0 || len(id.home) > maxPath {
		id.home = "/"
	}
	return id, nil
}

// readDatabase reads a file like /etc/passwd and keeps the lines whose fields first to last are
// plain numbers. The parser would take anything else for 0, which is root (CVE-2026-30892 is of
// this kind). A missing file is an empty one.
func readDatabase(ctx context.Context, path string, first, last int, open func(context.Context, string) (*os.File, error)) ([]byte, error) {
	f, err := open(ctx, path)
	if err != nil {
		err = fileError(path, err)
		if errors.Is(err, class.ErrNoFile) {
			return nil, nil
		}
		return nil, fmt.Errorf("read the sandbox's %s: %w", path, err)
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxDatabase+1))
	if err != nil {
		return nil, fmt.Errorf("read the sandbox's %s: %w", path, err)
	}
	if len(data) > maxDatabase {
		return nil, class.Invalidf("the sandbox's %q is larger than %d bytes", path, maxDatabase)
	}
	var kept bytes.Buffer
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, maxDatabase+1)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		ok := len(fields) > last
		for i := first; ok && i <= last; i++ {
			_, err := strconv.ParseUint(fields[i], 10, 31)
			ok = err == nil
		}
		if ok {
			kept.Write(lines.Bytes())
			kept.WriteByte('\n')
		}
	}
	return kept.Bytes(), lines.Err()
}
