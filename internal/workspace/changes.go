// Package workspace shows and applies the changes of a sandbox's workspace, in the process of the
// user who asks for them.
//
// The changes come as the tar of a layer. Everything in it is the sandbox's choice: names, links,
// modes and contents. [Read] takes it apart, [Set.Plan] compares it with a directory of the host,
// and [Plan.Apply] makes the changes that are allowed. Files are reached from the directory's
// descriptor by openat2(2), which follows no link and crosses no mount: a directory that is moved
// or replaced meanwhile leads to an error, and nowhere else.
package workspace

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	// maxEntries bounds a set of changes.
	maxEntries = 1 << 20
	// maxContent bounds the sizes of a set's files together, holes included, which cost the time to
	// read them.
	maxContent = 16 << 30
)

// kind is the type of an entry.
type kind uint8

const (
	none kind = iota // nothing is there
	file
	directory
	link
	special // whatever is never applied
)

func (k kind) String() string {
	return [...]string{"nothing", "file", "directory", "symlink", "special file"}[k]
}

// entry is one entry of the archive: the state of a name in the sandbox.
type entry struct {
	path   string
	kind   kind // none for a deletion
	mode   fs.FileMode
	size   int64
	offset int64  // of the content in the spool
	target string // of a symbolic link
	same   string // path of the entry that this is a further name of; empty for none
	opaque bool   // a directory that hides the host's
	bits   bool   // had set-id or sticky bits, which are left out
}

// Set is the set of changes of a sandbox.
type Set struct {
	entries []*entry // in the archive's order: directories before their contents
	byPath  map[string]*entry
	folded  map[string]bool // paths of what is there, with the last name in the form of fold
	spool   *os.File
}

// Close frees the contents.
func (s *Set) Close() error { return s.spool.Close() }

// Read reads an archive. Contents go to a file without a name in dir, which must have room for
// them. An archive that a sandboxd would not have made is an error.
func Read(r io.Reader, dir string) (_ *Set, err error) {
	spool, err := os.CreateTemp(dir, "sandboxd-changes-")
	if err != nil {
		return nil, fmt.Errorf("make a file for the changes: %w", err)
	}
	if err := os.Remove(spool.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("make a file for the changes: %w", err), spool.Close())
	}
	s := &Set{byPath: make(map[string]*entry), folded: make(map[string]bool), spool: spool}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("read changes: %w", err), spool.Close())
		}
	}()
	w, err := newSpooler(spool)
	if err != nil {
		return nil, err
	}
	in := tar.NewReader(r)
	for {
		hdr, err := in.Next()
		if errors.Is(err, io.EOF) {
			return s, w.end()
		}
		if err != nil {
			return nil, err
		}
		e, err := s.add(hdr)
		if err != nil {
			return nil, err
		}
		if e == nil || hdr.Typeflag != tar.TypeReg {
			continue
		}
		e.offset, e.size = w.at, hdr.Size
		if e.size > maxContent-w.at {
			return nil, fmt.Errorf("files of more than %d GiB together; copy them with sandboxd cp", maxContent>>30)
		}
		if _, err := io.CopyN(w, in, e.size); err != nil {
			return nil, err
		}
	}
}

// add takes a header; nil means that no content follows.
func (s *Set) add(hdr *tar.Header) (*entry, error) {
	name := strings.TrimSuffix(hdr.Name, "/")
	if name == "." {
		return nil, nil // the directory itself: its mode and times are the host's
	}
	if !validName(name) {
		return nil, fmt.Errorf("name %s is not below the workspace", Quote(hdr.Name))
	}
	if len(s.entries) == maxEntries {
		return nil, fmt.Errorf("more than %d entries", maxEntries)
	}
	dir, base := path.Split(name)
	dir = strings.TrimSuffix(dir, "/")
	if base == opaque {
		d := s.byPath[dir]
		if dir != "" && (d == nil || d.kind != directory) {
			return nil, fmt.Errorf("mark for %s, which is no directory", Quote(dir))
		}
		if d != nil {
			d.opaque = true
		}
		return nil, nil
	}
	e := &entry{path: name, mode: fs.FileMode(hdr.Mode & 0o777), bits: hdr.Mode&0o7000 != 0}
	if rest, ok := strings.CutPrefix(base, whiteout); ok {
		if e.path = path.Join(dir, rest); rest == "" || !validName(e.path) {
			return nil, fmt.Errorf("whiteout %s names nothing", Quote(name))
		}
		return nil, s.put(e)
	}
	switch hdr.Typeflag {
	case tar.TypeReg:
		e.kind = file
	case tar.TypeDir:
		e.kind, e.bits = directory, false // a set-gid directory is a habit, not a danger
	case tar.TypeSymlink:
		e.kind, e.target, e.mode = link, hdr.Linkname, 0o777
	case tar.TypeLink:
		first := s.byPath[hdr.Linkname]
		if first == nil || first.kind == none || first.kind == directory || first.same != "" {
			return nil, fmt.Errorf("%s is a further name of %s, which no entry has", Quote(name), Quote(hdr.Linkname))
		}
		*e = *first
		e.path, e.same = name, first.path
	default:
		e.kind = special
	}
	return e, s.put(e)
}

func (s *Set) put(e *entry) error {
	if s.byPath[e.path] != nil {
		return fmt.Errorf("%s stands there twice", Quote(e.path))
	}
	for dir := path.Dir(e.path); dir != "."; dir = path.Dir(dir) {
		if d := s.byPath[dir]; d == nil || d.kind != directory {
			return fmt.Errorf("%s is in no directory of the archive", Quote(e.path))
		}
	}
	s.byPath[e.path] = e
	if e.kind != none {
		s.folded[path.Join(path.Dir(e.path), fold(path.Base(e.path)))] = true
	}
	s.entries = append(s.entries, e)
	return nil
}

func validName(name string) bool {
	return name != "." && len(name) < 4096 && !strings.ContainsRune(name, 0) && name != "" && name[0] != '/' &&
		!slices.ContainsFunc(strings.Split(name, "/"), func(c string) bool { return c == "" || c == "." || c == ".." || len(c) > 255 })
}

// content returns the content of a file of the set.
func (s *Set) content(e *entry) *io.SectionReader {
	return io.NewSectionReader(s.spool, e.offset, e.size)
}
