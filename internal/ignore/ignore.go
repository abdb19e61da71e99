// Package ignore finds the paths of a directory that its .sandboxdignore, and if wanted its
// .gitignore files, keep out of a workspace.
//
// It runs in the client, with the user's own rights: the daemon and the processes behind it get
// paths and read no patterns. Both files have git's syntax, in which a name without a slash is
// ignored at every depth. The files may come with a hostile repository. They are read without
// following links, have bounded sizes, and cost no more than the product of patterns and names.
package ignore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// The names of files of patterns. That of sandboxd counts in the workspace's directory only.
const (
	FileName = ".sandboxdignore"
	gitName  = ".gitignore"
)

const (
	// maxFile bounds a file of patterns, in bytes, and maxPatterns its patterns.
	maxFile     = 1 << 20
	maxPatterns = 10_000
	// maxDepth bounds the directories above a file.
	maxDepth = 1000
)

// Paths returns the paths below dir that are ignored, sorted: files and whole directories,
// without the files in these. With git, .gitignore files count too, where .sandboxdignore says
// nothing of a path. A directory that cannot be read is among the paths. It is empty without any
// such file.
//
// A pattern without wildcards that names a path from the top is among them even if nothing is
// there: the file stays hidden when it is made.
func Paths(ctx context.Context, dir string, git bool) ([]string, error) {
	top, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory: %w", err)
	}
	defer top.Close() // only read
	own, err := read(int(top.Fd()), FileName, FileName, true)
	if err != nil {
		return nil, err
	}
	if len(own) == 0 && !git {
		return nil, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(top.Fd()), &st); err != nil {
		return nil, fmt.Errorf("examine %s: %w", dir, err)
	}
	s := search{ctx: ctx, device: st.Dev, own: own, git: git}
	if err := s.directory(top, "", 0); err != nil {
		return nil, err
	}
	if err := s.missing(int(top.Fd())); err != nil {
		return nil, err
	}
	slices.Sort(s.found)
	return s.found, nil
}

// search walks a directory.
type search struct {
	ctx    context.Context //nolint:containedctx // of one walk
	device uint64
	own    []pattern
	git    bool
	files  []gitFile // of the directories on the way, the deepest last
	cost   int       // characters of files
	found  []string
	bytes  int
}

// gitFile is a .gitignore.
type gitFile struct {
	prefix   string // of paths that the patterns are about; ends with a slash, or is empty
	patterns []pattern
}

// directory adds the ignored paths of a directory.
func (s *search) directory(f *os.File, prefix string, depth int) error {
	if err := context.Cause(s.ctx); err != nil {
		return err
	}
	if depth > maxDepth {
		return fmt.Errorf("ignored files: %q is more than %d directories deep", prefix, maxDepth)
	}
	entries, err := f.ReadDir(-1)
	if err != nil {
		return fmt.Errorf("read directory %q: %w", prefix, err)
	}
	if s.git && slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == gitName }) {
		patterns, err := read(int(f.Fd()), gitName, prefix+gitName, false)
		if err != nil {
			return err
		}
		cost := 0
		for i := range patterns {
			cost += 1 + len(patterns[i].literal) + len(patterns[i].glob)
		}
		if s.cost += cost; s.cost > maxFile {
			return fmt.Errorf("%q: it and those in the directories above are larger than %d KiB together", prefix+gitName, maxFile>>10)
		}
		s.files = append(s.files, gitFile{prefix, patterns})
		defer func() {
			s.files = s.files[:len(s.files)-1]
			s.cost -= cost
		}()
	}
	for _, e := range entries {
		name := prefix + e.Name()
		if s.ignored(name, e.Name(), e.IsDir()) {
			if err := s.add(name); err != nil {
				return err
			}
			continue
		}
		if !e.IsDir() {
			continue
		}
		if err := s.below(int(f.Fd()), e.Name(), name, depth); err != nil {
			return err
		}
	}
	return nil
}

// below goes on in a directory of dir.
func (s *search) below(dir int, base, name string, depth int) error {
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil // it was replaced since it was listed
	case errors.Is(err, unix.EACCES):
		return s.add(name) // root of the sandbox might read it
	case err != nil:
		return fmt.Errorf("open directory %q: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close() // only read
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("examine directory %q: %w", name, err)
	}
	if st.Dev != s.device {
		// A subvolume, whose files the workspace has, or a mount, which it does not have, but what the
		// mount covers.
		return s.add(name)
	}
	return s.directory(f, name+"/", depth+1)
}

// ignored reports whether a path is ignored whose directory is not. The last pattern that matches
// decides; a deeper file comes after those above it, and .sandboxdignore after all.
func (s *search) ignored(name, base string, dir bool) bool {
	inGit := strings.Contains("/"+name, "/.git/")
	if p := last(s.own, name, base, dir, inGit); p != nil {
		return !p.negated
	}
	if inGit || base == ".git" {
		return false // git never asks
	}
	for _, file := range slices.Backward(s.files) {
		if p := last(file.patterns, strings.TrimPrefix(name, file.prefix), base, dir, false); p != nil {
			return !p.negated
		}
	}
	return false
}

// last returns the last pattern that matches a path. Within a .git directory those without a
// slash do not: a branch that is called logs, or build, is not what their author had in mind.
func last(patterns []pattern, name, base string, dir, inGit bool) *pattern {
	for i := range slices.Backward(patterns) {
		if p := &patterns[i]; (!inGit || !p.base) && p.matches(name, base, dir) {
			return p
		}
	}
	return nil
}

// missing adds what .sandboxdignore names from the top, and nothing is at yet.
func (s *search) missing(top int) error {
	for _, p := range s.own {
		if p.glob != nil || p.negated || !s.ignoredFromTop(p.literal, p.dir) {
			continue
		}
		fd, err := unix.Openat2(top, p.literal, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
		})
		switch {
		case err == nil:
			_ = unix.Close(fd) // only a handle
		case errors.Is(err, unix.ENOENT) && !slices.Contains(s.found, p.literal):
			if err := s.add(p.literal); err != nil {
				return err
			}
		}
	}
	return nil
}

// ignoredFromTop reports whether a path would be ignored, and none above it is.
func (s *search) ignoredFromTop(name string, dir bool) bool {
	for at := path.Dir(name); at != "."; at = path.Dir(at) {
		if s.ignored(at, path.Base(at), true) {
			return false
		}
	}
	return s.ignored(name, path.Base(name), dir)
}

func (s *search) add(name string) error {
	if !utf8.ValidString(name) {
		return fmt.Errorf("ignored file %q: its name is no UTF-8 text, which the API cannot carry; rename it, or ignore its directory", name)
	}
	s.bytes += len(name)
	if len(s.found) == api.MaxHidden || s.bytes > api.MaxHiddenBytes {
		return fmt.Errorf("more than %d files are ignored one by one, or their names exceed %d KiB: ignore directories of them as a whole",
			api.MaxHidden, api.MaxHiddenBytes>>10)
	}
	s.found = append(s.found, name)
	return nil
}

// read reads a file of patterns in dir; without one there are none.
func read(dir int, base, name string, strict bool) ([]pattern, error) {
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%q is a link: make it a file", name)
	case err != nil:
		return nil, fmt.Errorf("open %q: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close() // only read
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("examine %q: %w", name, err)
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is no regular file", name)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", name, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%q is larger than %d KiB", name, maxFile>>10)
	}
	patterns, err := parse(data, strict)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", name, err)
	}
	return patterns, nil
}
