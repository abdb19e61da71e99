package layer

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Comparison is the result of [Compare].
type Comparison struct {
	DiffID  string
	Entries int64 // of the layer, compared with the tree
	Unseen  int64 // unreadable for the caller: they belong to a sandbox's ids
	// Differences are the differences from the layer, a line each, at most [MaxSkipped] of them.
	Differences []string
}

// Compare compares an extracted layer with the stream that it was made of. For every file,
// directory, link and FIFO of the layer it checks that the tree has it with equal type,
// permissions, size and target and, if the caller may read the file, equal bytes. It ignores
// owners, times, xattrs and whiteouts, and entries that only the tree has.
//
// The tree is only read, and below root.
func Compare(root *os.Root, r io.Reader, opts Options) (Comparison, error) {
	opts.Limits = opts.Limits.WithDefaults()
	s, err := newStream(r, opts.MediaType, opts.Limits)
	if err != nil {
		return Comparison{}, err
	}
	defer s.close()
	c := comparer{root: root, buf: make([]byte, 128<<10), differ: make(map[string]string)}
	tr := tar.NewReader(bufio.NewReaderSize(s, 256<<10))
	for entries := int64(1); ; entries++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return Comparison{}, fmt.Errorf("read entry %d: %w", entries, s.blame(err))
		}
		if entries > opts.Limits.Entries {
			return Comparison{}, ExceededEntries.Errorf("more than %d entries", opts.Limits.Entries)
		}
		if err := c.entry(hdr, tr, opts.Limits); err != nil {
			return Comparison{}, fmt.Errorf("entry %q: %w", short(hdr.Name), s.blame(err))
		}
	}
	if err := s.drain(); err != nil {
		return Comparison{}, fmt.Errorf("read to the end: %w", s.blame(err))
	}
	c.result.DiffID = s.digest()
	for _, name := range slices.Sorted(maps.Keys(c.differ)) {
		if c.replaced(name) {
			continue
		}
		if len(c.result.Differences) == MaxSkipped {
			break
		}
		c.result.Differences = append(c.result.Differences, short(name)+": "+c.differ[name])
	}
	return c.result, nil
}

type comparer struct {
	root   *os.Root
	buf    []byte
	differ map[string]string // by name; a later entry of that name may correct it
	result Comparison
}

// maxDiffer limits the memory for differences. A tree with more of them is no longer a layer's.
const maxDiffer = 10_000

func (c *comparer) entry(hdr *tar.Header, content io.Reader, limits Limits) error {
	name, err := clean(hdr.Name, limits)
	if err != nil {
		return err
	}
	dir, base := split(name)
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo:
	default:
		return nil // not extracted
	}
	if strings.HasPrefix(base, whiteoutPrefix) || hasComponent(dir, whiteoutPrefix) {
		return nil
	}
	what, err := c.compare(name, hdr, content, limits)
	switch {
	case errors.Is(err, errUnseen):
		c.result.Unseen++
		return nil
	case err != nil:
		return err
	}
	c.result.Entries++
	if what == "" {
		delete(c.differ, name)
	} else if len(c.differ) < maxDiffer {
		c.differ[name] = what
	}
	return nil
}

// errUnseen reports an entry that the caller may not read.
var errUnseen = errors.New("out of sight")

// unseen classifies an error of reading the tree: hidden from the caller, or damaged in the
// returned way.
func unseen(err error) (string, error) {
	// os.Root does not follow a link in the path that leads through the layer's root as "/", and its
	// error for that is unnamed.
	if errors.Is(err, fs.ErrPermission) || strings.HasSuffix(err.Error(), "path escapes from parent") {
		return "", errUnseen
	}
	if at, ok := errors.AsType[*fs.PathError](err); ok {
		err = at.Err
	}
	return fmt.Sprintf("it cannot be looked at: %v", err), nil
}

// compare returns the difference of the tree, empty for none. An error is errUnseen, or of reading
// the layer.
func (c *comparer) compare(name string, hdr *tar.Header, content io.Reader, limits Limits) (string, error) {
	fi, err := c.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return "it is missing", nil
	case err != nil:
		return unseen(err)
	}
	want := map[byte]fs.FileMode{tar.TypeDir: fs.ModeDir, tar.TypeSymlink: fs.ModeSymlink, tar.TypeFifo: fs.ModeNamedPipe}[hdr.Typeflag]
	if hdr.Typeflag == tar.TypeLink {
		target, err := clean(hdr.Linkname, limits)
		if err != nil {
			return "", err
		}
		other, err := c.root.Lstat(target)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			return short(hdr.Linkname) + ", which it is the same file as, is missing", nil
		}
		if err != nil {
			return unseen(err)
		}
		if !os.SameFile(fi, other) {
			return "it is not the same file as " + short(hdr.Linkname), nil
		}
		return "", nil
	}
	if got := fi.Mode().Type(); got != want {
		return fmt.Sprintf("it is of type %s, not %s", got, want), nil
	}
	if hdr.Typeflag == tar.TypeSymlink {
		got, err := c.root.Readlink(name)
		if err != nil {
			return unseen(err)
		}
		if got != hdr.Linkname {
			return fmt.Sprintf("it leads to %q, not %q", short(got), short(hdr.Linkname)), nil
		}
		return "", nil
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && name != "." && int64(st.Mode)&0o7777 != hdr.Mode&0o7777 {
		return fmt.Sprintf("its permissions are %04o, not %04o", st.Mode&0o7777, hdr.Mode&0o7777), nil
	}
	if hdr.Typeflag == tar.TypeDir || hdr.Typeflag == tar.TypeFifo {
		return "", nil
	}
	if fi.Size() != hdr.Size {
		return fmt.Sprintf("it has %d bytes, not %d", fi.Size(), hdr.Size), nil
	}
	f, err := c.root.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return unseen(err)
	}
	defer func() { _ = f.Close() }() // only read
	return c.bytes(f, content)
}

func (c *comparer) bytes(f io.Reader, content io.Reader) (string, error) {
	half := len(c.buf) / 2
	for at := int64(0); ; {
		n, err := io.ReadFull(content, c.buf[:half])
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return "", err
		}
		m, ferr := io.ReadFull(f, c.buf[half:half+n])
		if ferr != nil && n > 0 {
			return fmt.Sprintf("it cannot be read after %d bytes: %v", at+int64(m), ferr), nil
		}
		if !bytes.Equal(c.buf[:n], c.buf[half:half+n]) {
			return fmt.Sprintf("its bytes differ after %d", at), nil
		}
		if at += int64(n); n < half {
			return "", nil
		}
	}
}

// replaced reports whether a name is missing because a later entry replaced a directory above.
func (c *comparer) replaced(name string) bool {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if fi, err := c.root.Lstat(dir); err == nil && !fi.IsDir() {
			return true
		}
	}
	return false
}
