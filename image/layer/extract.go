package layer

import (
	"archive/tar"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// extractor adds entries to the tree one by one.
type extractor struct {
	tree   tree
	opts   Options
	stream *readAhead
	buf    []byte
	result Result
	// Whiteouts by resolved path; some may have been replaced since.
	whiteouts  map[string]struct{}
	opaqueRoot bool
}

func newExtractor(root *os.Root, opts Options) (*extractor, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, fmt.Errorf("open the layer's directory: %w", err)
	}
	if names, err := dir.Readdirnames(1); err == nil {
		_ = dir.Close()
		return nil, fmt.Errorf("the layer's directory is not empty: it has %q", names[0])
	} else if !errors.Is(err, io.EOF) {
		_ = dir.Close()
		return nil, fmt.Errorf("list the layer's directory: %w", err)
	}
	lower, err := openLower(opts.Lower)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	x := &extractor{
		tree: tree{
			root: root, dir: dir, lower: lower, singleID: opts.SingleID, limits: opts.Limits,
			metas: make(map[string]dirMeta),
		},
		opts: opts,
		buf:  make([]byte, 256<<10),

		whiteouts: make(map[string]struct{}),
	}
	// Most layers do not describe their root.
	if err := x.tree.describe(handle{int(dir.Fd()), "."}, ".", byDefault, 0, 0); err != nil {
		x.close()
		return nil, err
	}
	return x, nil
}

func (x *extractor) close() {
	x.tree.forget()
	_ = x.tree.lower.close() // only read
	_ = x.tree.dir.Close()
}

// skip records an omission.
func (x *extractor) skip(name, what string) {
	if len(x.result.Skipped) == MaxSkipped {
		x.result.SkippedMore++
		return
	}
	x.result.Skipped = append(x.result.Skipped, shown(name)+": "+what)
}

// entry extracts one entry. content is its data.
func (x *extractor) entry(hdr *tar.Header, content io.Reader) error {
	// Defaults for later entries; we use none of them.
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := clean(hdr.Name, x.opts.Limits)
	if err != nil {
		return err
	}
	dir, base := split(name)
	if name == "." {
		dir, base = ".", "."
	}
	if x.opts.Plain {
		return x.make(dir, base, name, hdr, content)
	}
	if hasComponent(dir, whiteoutMeta) || strings.HasPrefix(base, whiteoutMeta) && base != whiteoutOpaque {
		x.skip(name, "a note of the aufs driver")
		return nil
	}
	if hasComponent(dir, whiteoutPrefix) {
		return invalidf("a whiteout is used as a directory")
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return x.whiteout(dir, base)
	}
	return x.make(dir, base, name, hdr, content)
}

// make extracts an entry that is no whiteout.
func (x *extractor) make(dir, base, name string, hdr *tar.Header, content io.Reader) error {
	if !x.opts.SingleID && (hdr.Uid < 0 || hdr.Uid > maxID || hdr.Gid < 0 || hdr.Gid > maxID) {
		return invalidf("owner %d:%d is outside 0..%d, the ids of a sandbox", hdr.Uid, hdr.Gid, maxID)
	}
	switch hdr.Typeflag {
	case tar.TypeDir:
		return x.directory(dir, base, hdr)
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return x.file(dir, base, hdr, content)
	case tar.TypeSymlink:
		return x.symlink(dir, base, hdr)
	case tar.TypeLink:
		return x.link(dir, base, hdr)
	case tar.TypeFifo:
		return x.fifo(dir, base, hdr)
	case tar.TypeChar, tar.TypeBlock:
		// Sandboxes get a /dev of their own, and a device 0:0 would be a whiteout that the layer did not
		// declare.
		x.skip(name, "a device")
		return nil
	}
	return invalidf("entries of type %q are not supported", hdr.Typeflag)
}

// whiteout deletes something of the layers below. It does not touch entries of this layer: the
// order of the two in one layer has no meaning.
func (x *extractor) whiteout(dir, base string) error {
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if base != whiteoutOpaque && (hidden == "" || hidden == "." || hidden == "..") {
		return invalidf("whiteout of %q names nothing that could be deleted", hidden)
	}
	h, err := x.tree.directory(dir, true)
	if err != nil {
		return err
	}
	if base == whiteoutOpaque {
		x.opaqueRoot = x.opaqueRoot || h.path == "."
		return x.tree.setOpaque(h, ".")
	}
	what, err := x.tree.kind(h, hidden)
	if err != nil {
		return err
	}
	switch what {
	case absent:
		return x.hide(h, hidden)
	case directory:
		nothing, err := x.tree.holdsNothing(h.join(hidden))
		if err != nil {
			return err
		}
		if !nothing {
			return x.tree.setOpaque(h, hidden)
		}
		// The directory only holds whiteouts, which this one makes needless.
		if err := x.tree.remove(h, hidden, what); err != nil {
			return err
		}
		return x.hide(h, hidden)
	case whiteout, other: // hides the layers below already
	}
	return nil
}

// hide makes a whiteout and records it for applyLower.
func (x *extractor) hide(h handle, base string) error {
	path := h.join(base)
	if err := x.tree.hold(path); err != nil {
		return err
	}
	x.whiteouts[path] = struct{}{}
	return x.tree.whiteout(h, base)
}

// place opens the directory for a new file and clears the way for it.
func (x *extractor) place(dir, base string) (handle, error) {
	if base == "." {
		return handle{}, invalidf("the layer's root must be a directory")
	}
	h, err := x.tree.directory(dir, true)
	if err != nil {
		return handle{}, err
	}
	what, err := x.tree.kind(h, base)
	if err != nil {
		return handle{}, err
	}
	return h, x.tree.remove(h, base, what)
}

func (x *extractor) directory(dir, base string, hdr *tar.Header) error {
	h, err := x.tree.directory(dir, true)
	if err != nil {
		return err
	}
	what := directory
	if base != "." {
		if what, err = x.tree.kind(h, base); err != nil {
			return err
		}
	}
	meta := dirMeta{mode: uint32(hdr.Mode) & 0o7777, mtime: hdr.ModTime} //nolint:gosec // masked
	if what == directory {
		err = x.tree.describe(h, base, meta, hdr.Uid, hdr.Gid)
	} else {
		if err := x.tree.remove(h, base, what); err != nil {
			return err
		}
		err = x.tree.mkdir(h, base, meta, hdr.Uid, hdr.Gid)
	}
	if err != nil {
		return err
	}
	// The entry that stood there hid a directory of the layers below, whose content must not come
	// back.
	if what == whiteout || what == other {
		if err := x.tree.setOpaque(h, base); err != nil {
			return err
		}
	}
	return x.xattrs(h, base, hdr)
}

func (x *extractor) file(dir, base string, hdr *tar.Header, content io.Reader) (err error) {
	// Before a byte is written: the size of a sparse file costs its author nothing.
	if l := x.opts.Limits; hdr.Size > l.Bytes-l.Below.Bytes-x.result.Size {
		return ExceededBytes.Errorf("with its %d bytes the layer has more than %d%s", hdr.Size, l.Bytes, l.Below.with())
	}
	h, fd, err := x.create(dir, base)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := unix.Close(fd); err == nil && cerr != nil {
			err = fmt.Errorf("close: %w", cerr)
		}
	}()
	if err := x.content(fd, hdr, content); err != nil {
		return err
	}
	// The owner's bits, which the umask may have removed, are needed to set xattrs. The final mode
	// comes after the owner, because a change of owner clears the set-id bits.
	if hasXattrs(hdr) {
		if err := unix.Fchmod(fd, 0o600); err != nil {
			return fmt.Errorf("change mode: %w", err)
		}
	}
	if err := x.xattrs(h, base, hdr); err != nil {
		return err
	}
	if err := x.tree.chown(h, base, hdr.Uid, hdr.Gid); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, uint32(hdr.Mode)&0o7777); err != nil { //nolint:gosec // masked
		return fmt.Errorf("change mode: %w", err)
	}
	return x.tree.chtimes(h, base, hdr.ModTime)
}

// hasXattrs distinguishes headers with extended attributes from those with only fine times or long
// names.
func hasXattrs(hdr *tar.Header) bool {
	for record := range hdr.PAXRecords {
		if strings.HasPrefix(record, xattrRecord) {
			return true
		}
	}
	return false
}

// create makes an empty file. It clears the place only if the kernel reports that it is taken.
func (x *extractor) create(dir, base string) (handle, int, error) {
	if base != "." {
		h, err := x.tree.directory(dir, true)
		if err != nil {
			return handle{}, -1, err
		}
		if fd, err := unix.Openat(h.fd, base, newFile, 0o600); err == nil {
			return h, fd, nil
		}
	}
	h, err := x.place(dir, base)
	if err != nil {
		return handle{}, -1, err
	}
	fd, err := unix.Openat(h.fd, base, newFile, 0o600)
	if err != nil {
		return handle{}, -1, fmt.Errorf("create: %w", err)
	}
	return h, fd, nil
}

const newFile = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC

// content writes the content of a file: only the pieces between the holes if it is mostly holes.
func (x *extractor) content(fd int, hdr *tar.Header, content io.Reader) error {
	if !x.opts.FromDiff {
		return x.copy(fd, content, 0)
	}
	parts, size, ok, err := getPieces(hdr, content)
	if err != nil && !errors.Is(err, ErrInvalid) {
		return fmt.Errorf("read content: %w", x.stream.blame(err))
	}
	if err != nil {
		return err
	}
	if !ok {
		return x.copy(fd, content, 0)
	}
	for _, p := range parts {
		if _, err := unix.Seek(fd, p.at, io.SeekStart); err != nil {
			return fmt.Errorf("leave a hole: %w", err)
		}
		if err := x.copy(fd, io.LimitReader(content, p.n), p.at); err != nil {
			return err
		}
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return fmt.Errorf("leave a hole of a file of %d bytes: %w", size, err)
	}
	return nil
}

// copy writes a file's content from offset at, the descriptor's own, and checks the limits after
// every buffer.
func (x *extractor) copy(fd int, content io.Reader, at int64) error {
	hole := false
	for {
		n, rerr := content.Read(x.buf)
		x.result.Size += int64(n)
		if err := x.stream.check(x.result.Size); err != nil {
			return err
		}
		todo := x.buf[:n]
		at += int64(n)
		if (x.opts.FromDiff || x.opts.Plain) && n > 0 {
			if hole = n >= holeSize && allZero(todo); hole {
				if _, err := unix.Seek(fd, at, io.SeekStart); err != nil {
					return fmt.Errorf("leave a hole: %w", err)
				}
				todo = nil
			}
		}
		for len(todo) > 0 {
			m, err := unix.Write(fd, todo)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return fmt.Errorf("write: %w", err)
			}
			todo = todo[m:]
		}
		if errors.Is(rerr, io.EOF) {
			if hole {
				if err := unix.Ftruncate(fd, at); err != nil {
					return fmt.Errorf("leave a hole: %w", err)
				}
			}
			return nil
		}
		if rerr != nil {
			return fmt.Errorf("read content: %w", x.stream.blame(rerr))
		}
	}
}

// holeSize is the number of zeros for which a hole is worth a system call: no file system has holes
// smaller than a block.
const holeSize = 4096

func allZero(p []byte) bool {
	for len(p) >= 8 {
		if binary.NativeEndian.Uint64(p) != 0 {
			return false
		}
		p = p[8:]
	}
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

func (x *extractor) symlink(dir, base string, hdr *tar.Header) error {
	switch {
	case hdr.Linkname == "":
		return invalidf("the symbolic link has no target")
	case len(hdr.Linkname) > maxPath:
		return invalidf("the target of the symbolic link has %d bytes, %d are allowed", len(hdr.Linkname), maxPath)
	case strings.IndexByte(hdr.Linkname, 0) >= 0:
		return invalidf("the target of the symbolic link has a NUL in it")
	}
	h, err := x.place(dir, base)
	if err != nil {
		return err
	}
	// Stored unchanged, wherever it leads: it is only followed in the sandbox.
	if err := unix.Symlinkat(hdr.Linkname, h.fd, base); err != nil {
		return fmt.Errorf("make symbolic link: %w", err)
	}
	if err := x.tree.chown(h, base, hdr.Uid, hdr.Gid); err != nil {
		return err
	}
	x.skipXattrs(hdr)
	return x.tree.chtimes(h, base, hdr.ModTime)
}

func (x *extractor) link(dir, base string, hdr *tar.Header) error {
	target, err := clean(hdr.Linkname, x.opts.Limits)
	if err != nil {
		return fmt.Errorf("target %q of the hard link: %w", short(hdr.Linkname), err)
	}
	if base == "." || target == "." {
		return invalidf("a hard link to or in place of the layer's root")
	}
	gone := invalidf("hard link to %q, which is not in this layer", short(hdr.Linkname))
	targetDir, targetBase := split(target)
	// A handle of its own, because the next call of directory closes the one before.
	from, err := x.tree.resolve(targetDir, false)
	if errors.Is(err, errAbsent) {
		return gone
	} else if err != nil {
		return fmt.Errorf("target %q of the hard link: %w", short(hdr.Linkname), err)
	}
	defer func() { _ = unix.Close(from.fd) }()
	what, err := x.tree.kind(from, targetBase)
	if err != nil {
		return err
	}
	switch what {
	case absent, whiteout:
		return gone
	case directory:
		return invalidf("hard link to %q, which is a directory", short(hdr.Linkname))
	case other:
	}

	to, err := x.tree.directory(dir, true)
	if err != nil {
		return err
	}
	// A link to itself, under this name or through a link in the path: replacing would delete the only
	// name.
	if to.join(base) == from.join(targetBase) {
		return nil
	}
	// The place may be a directory with the target in it.
	if strings.HasPrefix(from.join(targetBase), to.join(base)+"/") {
		return invalidf("hard link replaces the directory that has its target %q", short(hdr.Linkname))
	}
	if to, err = x.place(dir, base); err != nil {
		return err
	}
	// Without AT_SYMLINK_FOLLOW: a link to a symbolic link is one more name for that link.
	if err := unix.Linkat(from.fd, targetBase, to.fd, base, 0); err != nil {
		return fmt.Errorf("make hard link to %q: %w", short(hdr.Linkname), err)
	}
	return nil
}

func (x *extractor) fifo(dir, base string, hdr *tar.Header) error {
	h, err := x.place(dir, base)
	if err != nil {
		return err
	}
	if err := unix.Mknodat(h.fd, base, unix.S_IFIFO|0o600, 0); err != nil {
		return fmt.Errorf("make FIFO: %w", err)
	}
	if err := x.tree.chown(h, base, hdr.Uid, hdr.Gid); err != nil {
		return err
	}
	// It was made a moment ago and no other process works here, so base is no link that this could
	// follow.
	if err := unix.Fchmodat(h.fd, base, uint32(hdr.Mode)&0o7777, 0); err != nil { //nolint:gosec // masked
		return fmt.Errorf("change mode: %w", err)
	}
	x.skipXattrs(hdr)
	return x.tree.chtimes(h, base, hdr.ModTime)
}

// xattrRecord is the prefix of xattrs in PAX records; LIBARCHIVE.xattr. repeats them in another
// encoding.
const xattrRecord = "SCHILY.xattr."

// xattrs sets the allowed xattrs of a file or directory.
func (x *extractor) xattrs(h handle, base string, hdr *tar.Header) error {
	for _, record := range slices.Sorted(maps.Keys(hdr.PAXRecords)) { // sorted, so that a layer always gives one list
		name, ok := strings.CutPrefix(record, xattrRecord)
		if !ok {
			continue
		}
		if !strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "user.overlay") || strings.IndexByte(name, 0) >= 0 {
			x.skip(hdr.Name, "xattr "+shown(name))
			continue
		}
		err := x.tree.setxattr(h, base, name, []byte(hdr.PAXRecords[record]))
		if errors.Is(err, unix.ENOTSUP) {
			x.skip(hdr.Name, "xattr "+shown(name)+" (the file system has none)")
			continue
		}
		// The kernel has no such name or no room for such a value, on any file system.
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.E2BIG) {
			return &invalid{err}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// skipXattrs records the xattrs of links and FIFOs, which can have none of user.*.
func (x *extractor) skipXattrs(hdr *tar.Header) {
	for _, record := range slices.Sorted(maps.Keys(hdr.PAXRecords)) {
		if name, ok := strings.CutPrefix(record, xattrRecord); ok {
			x.skip(hdr.Name, "xattr "+shown(name))
		}
	}
}

// applyLower does the work that depends on the layers below, if they are known.
func (x *extractor) applyLower() error {
	if x.opts.Lower == nil || x.opts.FromDiff {
		return nil
	}
	if x.opaqueRoot {
		if err := x.hideAll(); err != nil {
			return fmt.Errorf("hide the layers below the root: %w", err)
		}
	}
	// In a directory that it does not merge with another layer's, overlayfs shows whiteouts by name.
	// Whiteouts of this layer that hide nothing are removed.
	dirs := make(map[string]bool)
	for _, path := range slices.Sorted(maps.Keys(x.whiteouts)) {
		dir, base := split(path)
		found, err := x.tree.lower.look(path)
		if err != nil {
			return err
		}
		if found.there {
			merged, err := x.merged(dir, dirs)
			if err != nil {
				return err
			}
			if merged {
				continue
			}
		}
		h, err := x.tree.still(dir)
		if errors.Is(err, errReplaced) {
			continue
		} else if err != nil {
			return err
		}
		what, err := x.tree.kind(h, base)
		if err != nil {
			return err
		}
		if what == whiteout {
			if err := x.tree.remove(h, base, what); err != nil {
				return err
			}
		}
	}
	return nil
}

// merged reports whether overlayfs merges the directory with one below: neither it nor one above it
// is opaque. It caches answers in known.
func (x *extractor) merged(dir string, known map[string]bool) (is bool, err error) {
	if dir == "." {
		return true, nil // whatever its xattr; see hideAll
	}
	is, ok := known[dir]
	if !ok {
		h, err := x.tree.still(dir)
		switch {
		case err == nil && !isOpaque(h.fd):
			up, _ := split(dir)
			if is, err = x.merged(up, known); err != nil {
				return false, err
			}
		case err != nil && !errors.Is(err, errReplaced):
			return false, err
		}
		known[dir] = is
	}
	return is, nil
}

// hideAll applies an opaque mark on the root, where overlayfs ignores it. Each name at the top of
// the layers below gets a whiteout, or is hidden by this layer's own directory.
func (x *extractor) hideAll() error {
	for _, lower := range x.opts.Lower {
		dir, err := lower.Open(".")
		if err != nil {
			return err
		}
		names, err := dir.Readdirnames(-1)
		if err := errors.Join(err, dir.Close()); err != nil {
			return err
		}
		for _, name := range names {
			h, err := x.tree.directory(".", false)
			if err != nil {
				return err
			}
			what, err := x.tree.kind(h, name)
			if err != nil {
				return err
			}
			switch what {
			case absent:
				var found below
				if found, err = x.tree.lower.look(name); err == nil && found.there {
					err = x.tree.whiteout(h, name)
				}
			case directory:
				err = x.tree.setOpaque(h, name)
			case whiteout, other:
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// finish gives the directories their modes and times, children first: a mode may block the way to
// them.
func (x *extractor) finish() error {
	if err := x.applyLower(); err != nil {
		return err
	}
	x.tree.forget()
	paths := slices.Sorted(maps.Keys(x.tree.metas))
	slices.Reverse(paths)
	for _, path := range paths {
		if path == "." {
			continue
		}
		if err := x.finishDir(path, x.tree.metas[path]); err != nil {
			return fmt.Errorf("directory %q: %w", short(path), err)
		}
	}
	return x.finishDir(".", x.tree.metas["."])
}

func (x *extractor) finishDir(path string, meta dirMeta) error {
	dir, base := split(path)
	h, err := x.tree.still(dir)
	if errors.Is(err, errReplaced) {
		return nil // and so needs nothing
	} else if err != nil {
		return err
	}
	fd, err := unix.Openat(h.fd, base, openDir, 0)
	if isReplaced(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if meta.implicit {
		var uid, gid int
		if meta, uid, gid, err = x.tree.inherited(path); err != nil {
			return err
		}
		if err := x.tree.chown(handle{fd, path}, ".", uid, gid); err != nil {
			return err
		}
	}
	// Before the mode, which may forbid to look up even ".".
	if err := x.tree.chtimes(handle{fd, path}, ".", meta.mtime); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, meta.mode); err != nil {
		return fmt.Errorf("change mode: %w", err)
	}
	return nil
}
