package service

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

const maxMounts = 16

// errTenantMounts keeps directories of the host from tenants: which of them belong to whom, no
// setting of the daemon says.
var errTenantMounts = errors.New("mounts: a daemon that serves several tenants gives none of them files of the host, which do not say whose they are; copy files in with sandboxd cp, or build them into an image")

// validateMounts checks the form of mounts. Their sources are checked where they are opened, each
// time anew.
func validateMounts(set *api.Settings, profile []api.Scratch) error {
	if len(set.Mounts) > maxMounts {
		return class.Invalidf("mounts: %d, at most %d are possible", len(set.Mounts), maxMounts)
	}
	for i := range set.Mounts {
		m := &set.Mounts[i]
		paths := []struct{ what, path string }{{"mount source", m.Source}, {"mount target", m.Target}}
		switch {
		case m.Type == api.MountVolume && m.Create:
			return class.Invalidf("mounts[%d].create: a volume is made where there is none; this is for directories of the host", i)
		case m.Type == api.MountVolume:
			if err := validateVolumeName(m.Source); err != nil {
				return err
			}
			paths = paths[1:]
		case m.Type != api.MountBind:
			return class.Invalidf("mounts[%d].type %q: must be %q or %q", i, class.Clip(m.Type), api.MountBind, api.MountVolume)
		case m.NoCopy:
			return class.Invalidf("mounts[%d].no_copy: nothing is ever copied to a directory of the host", i)
		}
		if m.Anonymous {
			return class.Invalidf("mounts[%d].anonymous: it is in answers only; leave source empty for a volume that goes with the sandbox", i)
		}
		for _, p := range paths {
			if err := validatePath(p.what, p.path); err != nil {
				return err
			}
			if hasControl(p.path) || path.Clean(p.path) != p.path || p.path == "/" {
				return class.Invalidf("%s %q: not a path in its shortest form below \"/\"", p.what, class.Clip(p.path))
			}
		}
		for _, at := range []string{"/proc", "/sys", "/dev"} {
			if within(m.Target, at) {
				return class.Invalidf("mount target %q: %s is sandboxd's", class.Clip(m.Target), at)
			}
		}
		if m.Target == "/etc" {
			return class.Invalidf("mount target /etc: files of sandboxd are there; name files or directories below it")
		}
		for _, other := range set.Mounts[:i] {
			if within(m.Target, other.Target) || within(other.Target, m.Target) {
				return class.Invalidf("mounts: %s and %s lie in one another", other.Target, m.Target)
			}
		}
		for _, memory := range append(append([]api.Scratch{}, profile...), set.Tmpfs...) {
			if within(m.Target, memory.Path) || within(memory.Path, m.Target) {
				return class.Invalidf("mounts: %s and the file system in memory at %s lie in one another; choose another target", m.Target, memory.Path)
			}
		}
		for _, id := range []*uint32{m.UID, m.GID} {
			if id != nil && *id > maxID {
				return class.Invalidf("mount %s: the ids of a sandbox end at %d", m.Target, maxID)
			}
		}
	}
	return nil
}

// fillMounts fills in the ids of mounts: those of the user as which the sandbox's programs run.
func fillMounts(set *api.Settings, p *runtime.Profile, user string) error {
	if len(set.Mounts) == 0 {
		return nil
	}
	if err := validateMounts(set, p.Mounts); err != nil {
		return err
	}
	set.Mounts = append([]api.Mount{}, set.Mounts...)
	for i := range set.Mounts {
		m := &set.Mounts[i]
		if m.UID == nil {
			uid, gid, ok := numbersOf(user)
			if !ok && m.Type == api.MountVolume {
				continue // root owns a new one
			}
			if !ok {
				return class.Invalidf("mount %s: the programs' user is %q, a name; say its numbers: uid=N,gid=N of the mount, or --user UID:GID", m.Target, class.Clip(user))
			}
			m.UID = &uid
			if m.GID == nil {
				m.GID = &gid
			}
		}
		if m.GID == nil {
			m.GID = m.UID
		}
		if m.Type == api.MountVolume {
			continue
		}
		if first := &set.Mounts[firstBind(set.Mounts)]; *m.UID != *first.UID || *m.GID != *first.GID {
			return class.Invalidf("mounts: %s has the ids %d:%d, and %s has %d:%d; all mounts of a sandbox have the same",
				first.Target, *first.UID, *first.GID, m.Target, *m.UID, *m.GID)
		}
	}
	return nil
}

// firstBind returns the index of the first mount of the host's files; -1 if there is none.
func firstBind(mounts []api.Mount) int {
	return slices.IndexFunc(mounts, func(m api.Mount) bool { return m.Type == api.MountBind })
}

// checkMounts checks the sources on the host that no start opens soon, and makes those that are to
// be made.
func (s *core) checkMounts(ctx context.Context, r *runtime.Request) error {
	for i := range r.Mounts {
		m := &r.Mounts[i]
		if m.Type != api.MountBind || s.opts.CheckMount == nil || !r.Stopped && !m.Create {
			continue
		}
		if err := s.opts.CheckMount(ctx, m.Source, m.Create); err != nil {
			return err
		}
	}
	return nil
}

// numbersOf returns the ids of a user that no file of the image must be asked for. A user without a
// group has the group of the same number.
func numbersOf(user string) (uid, gid uint32, ok bool) {
	name, group, both := strings.Cut(user, ":")
	if isRoot(user) {
		name = "0"
	}
	if !both {
		group = name
	}
	if group == "root" {
		group = "0"
	}
	u, err := strconv.ParseUint(name, 10, 16)
	if err != nil {
		return 0, 0, false
	}
	g, err := strconv.ParseUint(group, 10, 16)
	return uint32(u), uint32(g), err == nil
}

// sameIDs refuses to read files whose owners are not those of other sandboxes: the programs of a
// sandbox with [api.MountsUser] write as another user of the host.
func sameIDs(rec *runtime.Record) error {
	if rec.Enforced.Mounts == api.MountsUser && rec.Enforced.IDs != api.IDsSingle {
		return class.Mark(class.ErrUnreadable, fmt.Errorf(
			"%s (%s) has mounts, for which it runs under the daemon's user: its own files have owners that no snapshot, fork or image can have; copy what is wanted with sandboxd cp, or use a daemon of root",
			rec.Name, rec.ID))
	}
	return nil
}
