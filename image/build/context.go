package build

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

// HiddenDockerfile is the name of a Dockerfile that is sent with the context without being part of
// it. COPY never sees it.
const HiddenDockerfile = ".sandboxd-dockerfile"

const (
	defaultDockerfile = "Dockerfile"
	ignoreFile        = ".dockerignore"
	maxIgnore         = 1 << 20
	maxPatterns       = 1000
	maxPatternBytes   = 16 << 10
)

// Context reads the context of a build from a, and the Dockerfile in it, called name or by default
// Dockerfile. It leaves out the entries of .dockerignore, whether or not the sender has done so.
func Context(ctx context.Context, a *Archive, name string, limits Limits) (*Tree, []byte, error) {
	t := NewTree(limits)
	if err := t.Load(a); err != nil {
		return nil, nil, invalidf("the context: %w", err)
	}
	if name == "" {
		name = defaultDockerfile
	}
	dockerfile, err := t.small(name, maxDockerfile)
	if errors.Is(err, errAbsent) {
		return nil, nil, invalidf("the context has no file %q", clip(name))
	} else if err != nil {
		return nil, nil, invalidf("read %q in the context: %w", clip(name), err)
	}
	// The Dockerfile's own ignore file takes precedence over the common one.
	ignore, err := t.small(name+ignoreFile, maxIgnore)
	if errors.Is(err, errAbsent) {
		ignore, err = t.small(ignoreFile, maxIgnore)
	}
	if err != nil && !errors.Is(err, errAbsent) {
		return nil, nil, invalidf("read %s: %w", ignoreFile, err)
	}
	delete(t.root.children, HiddenDockerfile)
	// The sender's ids belong to its host and mean nothing here.
	seen := func(_ string, n *node) error {
		n.uid, n.gid, n.xattrs = 0, 0, nil
		return nil
	}
	if err := walk("", t.root, seen); err != nil {
		return nil, nil, err
	}
	if len(ignore) > 0 {
		m, err := Ignore(ignore)
		if err != nil {
			return nil, nil, err
		}
		if err := t.leaveOut(ctx, m, t.root, "", patternmatcher.MatchInfo{}); ctx.Err() != nil {
			return nil, nil, ctx.Err()
		} else if err != nil {
			return nil, nil, invalidf("%s: %w", ignoreFile, err)
		}
	}
	t.recount()
	return t, dockerfile, nil
}

// Ignore parses a .dockerignore.
func Ignore(data []byte) (_ *patternmatcher.PatternMatcher, err error) {
	defer func() {
		if p := recover(); p != nil { // the parser is not ours
			err = invalidf("%s cannot be read (%v)", ignoreFile, p)
		}
	}()
	patterns, err := ignorefile.ReadAll(bytes.NewReader(data))
	if err != nil {
		return nil, invalidf("%s: %w", ignoreFile, err)
	}
	if len(patterns) > maxPatterns {
		return nil, invalidf("%s has %d patterns, %d are allowed", ignoreFile, len(patterns), maxPatterns)
	}
	// Every file is compared with all patterns.
	size := 0
	for _, p := range patterns {
		size += len(p)
	}
	if size > maxPatternBytes {
		return nil, invalidf("%s has %d bytes of patterns, %d are allowed", ignoreFile, size, maxPatternBytes)
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, invalidf("%s: %w", ignoreFile, err)
	}
	return m, nil
}

func (t *Tree) leaveOut(ctx context.Context, m *patternmatcher.PatternMatcher, dir *node, prefix string, above patternmatcher.MatchInfo) error {
	for _, name := range dir.sorted() {
		if err := ctx.Err(); err != nil {
			return err
		}
		child := dir.children[name]
		full := path.Join(prefix, name)
		out, info, err := m.MatchesUsingParentResults(full, above)
		if err != nil {
			return err
		}
		// An exception may let files in although their directory is left out.
		if child.kind == tar.TypeDir && (!out || m.Exclusions()) {
			if err := t.leaveOut(ctx, m, child, full, info); err != nil {
				return err
			}
			out = out && len(child.children) == 0
		}
		if out {
			delete(dir.children, name)
		}
	}
	return nil
}

// small reads a file of the tree that has at most limit bytes and is in the spool.
func (t *Tree) small(name string, limit int64) ([]byte, error) {
	n, err := t.file(name)
	if err != nil {
		return nil, err
	}
	if n.size > limit {
		return nil, invalidf("it has %d bytes, %d are allowed", n.size, limit)
	}
	r, err := n.open()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// file returns the regular file at a path.
func (t *Tree) file(name string) (*node, error) {
	if strings.IndexByte(name, 0) >= 0 || len(name) > maxName {
		return nil, invalidf("not the name of a file")
	}
	full, err := t.resolve("/"+name, true, false)
	if err != nil {
		return nil, err
	}
	n := t.lookup(full)
	if n == nil {
		return nil, errAbsent
	}
	if n.kind != tar.TypeReg {
		return nil, invalidf("it is not a regular file")
	}
	return n, nil
}

// open opens content that is in the spool.
func (n *node) open() (io.Reader, error) {
	switch {
	case n.content.in == nil:
		return strings.NewReader(n.content.inline), nil
	case n.content.in.At == nil:
		return nil, errors.New("the content is not at hand")
	}
	return io.NewSectionReader(n.content.in.At, n.content.offset, n.size), nil
}
