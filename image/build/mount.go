package build

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// Types of mounts of a RUN.
const (
	MountBind   = "bind"
	MountCache  = "cache"
	MountSecret = "secret"
	MountTmpfs  = "tmpfs"
)

// Ways in which builds share a cache.
const (
	ShareShared  = "shared"  // each begins with the content that the last one left
	ShareLocked  = "locked"  // one after the other
	SharePrivate = "private" // the first one has it, and others have an empty one
)

const (
	maxMounts  = 16      // of one RUN
	maxMemory  = 1 << 40 // bytes of a tmpfs
	maxMountID = 255
)

// Mount is a --mount of a RUN, whose files are in no layer.
type Mount struct {
	Type   string
	From   string // as written
	Stage  *Stage `json:"-"` // the stage in From, or
	Image  string // the image in From; both empty: the context
	Source string // in From
	Target string // absolute, in its shortest form; empty of a secret that is only a variable
	// ReadOnly means that the program must leave the files as they are.
	ReadOnly bool
	Size     int64  // bytes of a tmpfs; zero means the default
	ID       string // of a cache or secret
	Sharing  string
	Required bool   // the build fails without the secret
	Env      string // variable for a secret
	Mode     int64  // of a secret or of the root of a cache
	UID, GID int
}

// supportedMounts refuses mounts that this package does not implement. Variables are not filled in
// yet.
func supportedMounts(c *instructions.RunCommand) error {
	if !slices.Contains(c.FlagsUsed, "mount") {
		return nil
	}
	if err := c.Expand(func(word string) (string, error) { return word, nil }); err != nil {
		return nil //nolint:nilerr // its variables may matter; the stage's evaluation reports it
	}
	for _, m := range instructions.GetMounts(c) {
		if m.Type == instructions.MountTypeSSH {
			return invalidf("RUN --mount=type=ssh is not supported: no program of a build reaches an agent of keys; give a key or a token as --mount=type=secret")
		}
	}
	return nil
}

// mounts returns the mounts of a RUN whose variables are filled in.
func (e *evaluation) mounts(c *instructions.RunCommand) ([]Mount, error) {
	given := instructions.GetMounts(c)
	if len(given) > maxMounts {
		return nil, invalidf("RUN: %d mounts, %d are allowed", len(given), maxMounts)
	}
	var all []Mount
	for _, g := range given {
		m, err := e.mount(g)
		if err != nil {
			return nil, invalidf("RUN --mount=type=%s: %w", g.Type, err)
		}
		all = append(all, *m)
	}
	// Outer ones first: the inner ones lie in them.
	slices.SortStableFunc(all, func(a, b Mount) int { return cmp.Compare(a.Target, b.Target) })
	for i := range all {
		for j := range all[:i] {
			outer, inner := &all[j], &all[i]
			switch {
			case outer.Target == "" || inner.Target == "":
			case outer.Target == inner.Target:
				return nil, invalidf("RUN: two mounts at %s", inner.Target)
			case within(inner.Target, outer.Target) && (outer.Type != MountBind || inner.Type == MountTmpfs):
				return nil, invalidf("RUN: a mount at %s lies in the %s at %s; only a bind can have others in it, and they no tmpfs", inner.Target, outer.Type, outer.Target)
			}
		}
	}
	return all, nil
}

// within reports whether a path lies below a directory.
func within(p, dir string) bool { return strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/") }

func (e *evaluation) mount(g *instructions.Mount) (*Mount, error) {
	m := &Mount{
		Type: string(g.Type), From: g.From, Source: g.Source, ReadOnly: g.ReadOnly, Size: g.SizeLimit, ID: g.CacheID,
		Sharing: string(g.CacheSharing), Required: g.Required,
	}
	target := g.Target
	switch m.Type {
	case MountBind:
		if target == "" {
			return nil, invalidf("the target is missing, as in target=/src")
		}
	case MountCache:
		if target == "" {
			return nil, invalidf("the target is missing, as in target=/root/.cache")
		}
		m.Sharing, m.Mode = cmp.Or(m.Sharing, ShareShared), 0o755
		if m.From != "" {
			return nil, invalidf("from is not supported: a cache begins empty; COPY the files into it")
		}
	case MountSecret:
		m.ID, m.Source = cmp.Or(m.ID, m.Source), ""
		if m.ID == "" {
			m.ID = path.Base(target)
		}
		if g.Env != nil {
			m.Env = cmp.Or(*g.Env, m.ID)
			if err := validVariable(m.Env); err != nil {
				return nil, err
			}
		} else if target == "" {
			target = "/run/secrets/" + path.Base(m.ID)
		}
		m.ReadOnly, m.Mode = false, 0o400
	case MountTmpfs:
		if target == "" {
			return nil, invalidf("the target is missing, as in target=/tmp")
		}
		if m.Size < 0 || m.Size > maxMemory || m.Size > 0 && m.Size < 4096 {
			return nil, invalidf("size %d: must be between 4096 and %d bytes", m.Size, int64(maxMemory))
		}
	default:
		return nil, invalidf("it is not supported")
	}
	if target != "" {
		full, err := e.absolute(target)
		if err != nil {
			return nil, invalidf("target %w", err)
		}
		if m.Target = path.Clean(full); m.Target == "/" {
			return nil, invalidf("target %q is the root directory", clip(target))
		}
		for _, ours := range []string{"/proc", "/sys", "/dev"} {
			if m.Target == ours || within(m.Target, ours) {
				return nil, invalidf("target %q: %s is sandboxd's", clip(target), ours)
			}
		}
		if m.Target == "/etc" {
			return nil, invalidf("target /etc: files of sandboxd are there; name files or directories below it")
		}
	}
	if m.Type == MountCache {
		m.ID = cmp.Or(m.ID, m.Target)
	}
	if len(m.ID) > maxMountID || strings.IndexByte(m.ID, 0) >= 0 {
		return nil, invalidf("id %q: at most %d bytes, and no NUL", clip(m.ID), maxMountID)
	}
	if len(m.Source) > maxName || strings.IndexByte(m.Source, 0) >= 0 {
		return nil, invalidf("source %q is not the name of a file", clip(m.Source))
	}
	if g.Mode != nil {
		if m.Mode = int64(*g.Mode); m.Mode&^0o777 != 0 || m.Mode == 0 { //nolint:gosec // G115: checked at once
			return nil, invalidf("mode %o: must be between 1 and 777", *g.Mode)
		}
	}
	for _, id := range []struct {
		from *uint64
		to   *int
	}{{g.UID, &m.UID}, {g.GID, &m.GID}} {
		if id.from == nil {
			continue
		}
		if *id.from > 65535 {
			return nil, invalidf("the ids of a sandbox end at 65535")
		}
		*id.to = int(*id.from)
	}
	if m.From != "" {
		src, ok := e.stage.uses[m.From]
		if !ok {
			return nil, invalidf("from=%s: no such stage", clip(m.From))
		}
		m.Stage, m.Image = src.stage, src.image
	}
	return m, nil
}

// Files returns the copy that has the files of a bind at its target.
func (m *Mount) Files() *Copy {
	return &Copy{From: m.From, Stage: m.Stage, Image: m.Image, Sources: []string{cmp.Or(m.Source, ".")}, Dest: m.Target}
}

// froms returns the values of from of the mounts of a RUN.
func froms(c *instructions.RunCommand) []string {
	var all []string
	for _, m := range instructions.GetMounts(c) {
		if m.From != "" {
			all = append(all, m.From)
		}
	}
	return all
}
