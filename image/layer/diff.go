package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// ErrChanged is the class of errors of what was written to while [Diff] read it. Trying again may help; to stop the
// writer first does.
var ErrChanged = errors.New("changed while it was read")

// Overlay is one overlay mount whose upper directory is to become a layer.
//
// The upper directory is hostile: whoever lived in the sandbox chose every name, link, mode and length in it, and may be
// writing to it. It is read as the package's rules say: one component of a name at a time, no link followed, nothing
// opened that could block or act.
type Overlay struct {
	// At is where in the rootfs it is mounted: a path without leading slash, "." for the rootfs itself.
	At    string
	Upper *os.Root
	// Lower are the directories that it lies on, highest first. They are only looked at for what the upper one hides.
	Lower []*os.Root
	// Mounted are names at the top of it on which others are mounted: what Upper has there is theirs.
	Mounted []string
}

// DiffOptions are what [Diff] needs to know besides the directories.
type DiffOptions struct {
	// Latest is what later modification times are set back to, so that the same changes make the same layer; zero: none
	// is. It is what SOURCE_DATE_EPOCH asks for.
	Latest time.Time
	// Limits are those of [Apply], which would not take a layer beyond them. Ratio does not count.
	Limits Limits
	// Stored says that the upper directories are of a layer that [Apply] has made of such a stream. Every whiteout and opaque mark
	// is in it then, also those that hide nothing: what is below may have changed since, as the host's own directories do, and the
	// layer has not.
	Stored bool
	// Holes leaves the zeros of files that are mostly that out, in a form that only [Apply] with FromDiff understands.
	Holes bool
}

// Diff writes what the upper directories have changed as the uncompressed tar stream of a layer: applied to the lower
// ones it gives what the overlays show.
//
// The stream depends on the changes alone: entries come sorted, the files of a directory before its subdirectories,
// without names of owners and times of access. What no layer can express, or [Apply] would not take either, is left out
// and listed: sockets, devices, xattrs beyond user.*, names that would read as whiteouts.
//
// The result has no DiffID: who receives the stream hashes what has arrived.
func Diff(w io.Writer, overlays []Overlay, opts DiffOptions) (Result, error) {
	d := newDiffer(opts.Limits)
	d.stored = opts.Stored
	out := &archiver{differ: d, w: tar.NewWriter(w), latest: opts.Latest.UTC(), holes: opts.Holes, links: make(map[inode]named), buf: make([]byte, 256<<10)}
	d.visit = out.entry
	if err := d.run(overlays); err != nil {
		return Result{}, err
	}
	if err := out.w.Close(); err != nil {
		return Result{}, fmt.Errorf("end the archive: %w", err)
	}
	return d.result, nil
}

// Changes calls found for everything that the upper directories have added, changed or deleted, in the order of [Diff]
// but with what an opaque directory hides as deleted. The result counts them.
func Changes(overlays []Overlay, limits Limits, found func(api.Change) error) (Result, error) {
	d := newDiffer(limits)
	d.all = true
	d.visit = func(i *item) error {
		c := api.Change{Path: "/" + i.name, Kind: i.kind, Type: typeOf(&i.st)}
		if i.name == "." {
			c.Path = "/"
		}
		if i.st.Mode&unix.S_IFMT == unix.S_IFREG {
			c.Size = i.st.Size
			d.result.Size += i.st.Size
		}
		return found(c)
	}
	if err := d.run(overlays); err != nil {
		return Result{}, err
	}
	return d.result, nil
}

func typeOf(st *unix.Stat_t) string {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFIFO:
		return "fifo"
	}
	return "file"
}

// item is one difference.
type item struct {
	name   string // in the rootfs, clean
	kind   api.ChangeKind
	opaque bool // a directory that hides one below
	base   string
	dir    int         // open directory that base is in
	st     unix.Stat_t // of what is there, or was
	attrs  []xattr     // of a directory
}

// differ walks the upper directories and looks below them.
type differ struct {
	visit  func(*item) error
	all    bool // also visit what is deleted by being below an opaque directory
	stored bool // DiffOptions.Stored
	// overlay is the one that is being walked, lower its lower directories, open.
	at      string
	mounted []string
	lower   []*os.File
	limits  Limits
	held    int64 // bytes of names in memory
	seen    int64 // names in the upper directories
	dirent  []byte
	result  Result
}

// maxHeld bounds the memory for names: that of a directory's entries and of files with several links.
const maxHeld = 128 << 20

func newDiffer(limits Limits) *differ {
	return &differ{limits: limits.WithDefaults(), dirent: make([]byte, 64<<10)}
}

func (d *differ) hold(n int64) error {
	if d.held += n; d.held > maxHeld {
		return invalidf("names of one directory, or of hard links, take more than %d bytes", maxHeld)
	}
	return nil
}

func (d *differ) skip(name, what string) {
	if len(d.result.Skipped) == MaxSkipped {
		d.result.SkippedMore++
		return
	}
	d.result.Skipped = append(d.result.Skipped, shown(name)+": "+what)
}

func (d *differ) run(overlays []Overlay) error {
	for i := range overlays {
		if err := d.overlay(&overlays[i]); err != nil {
			return err
		}
	}
	return nil
}

func (d *differ) overlay(o *Overlay) (err error) {
	upper, err := o.Upper.Open(".")
	if err != nil {
		return fmt.Errorf("open the upper directory: %w", err)
	}
	defer func() { _ = upper.Close() }() // only read
	d.at, d.mounted, d.lower = o.At, o.Mounted, nil
	defer func() {
		for _, f := range d.lower {
			_ = f.Close() // only read
		}
	}()
	var live []int
	for i, root := range o.Lower {
		f, err := root.Open(".")
		if err != nil {
			return fmt.Errorf("open lower directory %d: %w", i, err)
		}
		d.lower = append(d.lower, f)
		if !d.stored {
			live = append(live, i)
		}
	}
	fd := int(upper.Fd())
	if err := d.root(fd); err != nil {
		return fmt.Errorf("root directory: %w", err)
	}
	return d.directory(fd, ".", live, false, 0)
}

// root visits the root directory only where more than its time differs: it was made with the sandbox, so its time says
// nothing, and a sandbox that changed nothing has an empty layer.
func (d *differ) root(fd int) error {
	i := item{name: d.at, kind: api.Changed, base: ".", dir: fd}
	if err := unix.Fstat(fd, &i.st); err != nil {
		return err
	}
	attrs, err := d.xattrs(fd, i.name, true)
	if err != nil {
		return err
	}
	i.attrs = attrs.kept
	if len(d.lower) > 0 {
		var st unix.Stat_t
		below := int(d.lower[0].Fd())
		if err := unix.Fstat(below, &st); err != nil {
			return err
		}
		// A directory of the host's may keep its xattrs to itself. What is left out of the lower one is no news.
		was, err := d.xattrs(below, i.name, false)
		if err != nil && !errors.Is(err, unix.EACCES) {
			return err
		}
		if st.Mode == i.st.Mode && st.Uid == i.st.Uid && st.Gid == i.st.Gid && slices.Equal(was.kept, i.attrs) {
			return nil
		}
	}
	return d.found(&i)
}

func (d *differ) found(i *item) error {
	if d.result.Entries++; d.result.Entries > d.limits.Entries {
		return ExceededEntries.Errorf("more than %d entries", d.limits.Entries)
	}
	return d.visit(i)
}

// subdir is a directory whose turn comes after the files beside it.
type subdir struct {
	base   string
	exists bool  // below
	dirs   []int // as in lowerEntry, which is larger
}

// size is what it takes in memory.
func (s *subdir) size() int64 { return int64(len(s.base)) + 8*int64(cap(s.dirs)) + perName }

// directory visits what is in the directory fd of the upper tree, at rel in it. live are the lower directories that have
// a directory there too, of which nothing shows if it is hidden.
func (d *differ) directory(fd int, rel string, live []int, hidden bool, depth int) error {
	names, err := d.names(fd)
	if err != nil {
		return fmt.Errorf("list directory %q: %w", short(d.name(rel)), err)
	}
	lowers, err := d.openLower(live, rel)
	if err != nil {
		return err
	}
	dirs, err := d.files(fd, rel, names, lowers, hidden, depth)
	if err == nil && hidden && d.all {
		err = d.deleted(rel, names, lowers)
	}
	closeAll(lowers)
	d.held -= sizeOf(names)
	if err != nil {
		return err
	}
	// They stay until the last has been visited, and so do those of the directories above.
	var held int64
	for _, s := range dirs {
		held += s.size()
	}
	if err := d.hold(held); err != nil {
		return err
	}
	for _, s := range dirs {
		if err := d.subdirectory(fd, rel, s, hidden, depth+1); err != nil {
			return err
		}
	}
	d.held -= held
	return nil
}

// perName is what a name costs in memory beside its bytes.
const perName = 64

func sizeOf(names []string) (n int64) {
	for _, name := range names {
		n += int64(len(name)) + perName
	}
	return n
}

// files visits what is in a directory but its subdirectories, which it returns.
func (d *differ) files(fd int, rel string, names []string, lowers []lowerDir, hidden bool, depth int) ([]subdir, error) {
	var dirs []subdir
	for _, base := range names {
		// All that there is, not only what becomes an entry: it takes as long.
		if d.seen++; d.seen > d.limits.Entries {
			return nil, ExceededEntries.Errorf("more than %d entries", d.limits.Entries)
		}
		if rel == "." && slices.Contains(d.mounted, base) {
			continue
		}
		i := item{name: d.name(pathIn(rel, base)), base: base, dir: fd}
		if strings.HasPrefix(base, whiteoutPrefix) {
			d.skip(i.name, "a layer would take it for a whiteout")
			continue
		}
		if _, err := clean(i.name, d.limits); err != nil {
			return nil, fmt.Errorf("%q: %w", short(i.name), err)
		}
		if depth >= d.limits.Depth {
			return nil, ExceededDepth.Errorf("%q is more than %d directories deep", short(i.name), d.limits.Depth)
		}
		if err := unix.Fstatat(fd, base, &i.st, unix.AT_SYMLINK_NOFOLLOW); errors.Is(err, unix.ENOENT) {
			continue // deleted a moment ago
		} else if err != nil {
			return nil, fmt.Errorf("stat %q: %w", short(i.name), err)
		}
		was, err := d.look(lowers, base)
		if err != nil {
			return nil, fmt.Errorf("look below %q: %w", short(i.name), err)
		}
		white, err := d.whiteout(&i)
		if errors.Is(err, unix.ENOENT) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("%q: %w", short(i.name), err)
		}
		i.kind = api.Added
		if was.exists {
			i.kind = api.Changed
		}
		switch typ := i.st.Mode & unix.S_IFMT; {
		case white:
			// overlayfs keeps whiteouts for what was never below. Where all is hidden there is nothing to be deleted.
			if (!was.exists || hidden) && !d.stored {
				continue
			}
			i.kind, i.st, i.dir = api.Deleted, was.st, -1
			err = d.found(&i)
		case typ == unix.S_IFDIR:
			dirs = append(dirs, subdir{base, was.exists, slices.Clip(was.dirs)})
		case typ == unix.S_IFREG, typ == unix.S_IFLNK, typ == unix.S_IFIFO:
			err = d.found(&i)
		case typ == unix.S_IFSOCK:
			d.skip(i.name, "a socket")
		default:
			d.skip(i.name, "a device")
		}
		if err != nil {
			return nil, err
		}
	}
	return dirs, nil
}

func (d *differ) subdirectory(dir int, rel string, s subdir, hidden bool, depth int) error {
	rel = pathIn(rel, s.base)
	i := item{name: d.name(rel), kind: api.Added, base: s.base, dir: dir}
	if s.exists {
		i.kind = api.Changed
	}
	fd, err := unix.Openat(dir, s.base, openDir, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil // deleted a moment ago
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return fmt.Errorf("directory %q: %w", short(i.name), ErrChanged)
	case err != nil:
		return fmt.Errorf("open directory %q: %w", short(i.name), err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Fstat(fd, &i.st); err != nil {
		return fmt.Errorf("stat %q: %w", short(i.name), err)
	}
	attrs, err := d.xattrs(fd, i.name, true)
	if err != nil {
		return fmt.Errorf("directory %q: %w", short(i.name), err)
	}
	i.attrs = attrs.kept
	// A new directory is opaque as a rule, to spare overlayfs from looking below.
	i.opaque = attrs.opaque && (len(s.dirs) > 0 && !hidden || d.stored)
	if err := d.found(&i); err != nil {
		return err
	}
	return d.directory(fd, rel, s.dirs, hidden || attrs.opaque, depth)
}

// deleted visits what the lower directories have at rel and the upper one, which hides it, has not.
func (d *differ) deleted(rel string, names []string, lowers []lowerDir) error {
	var gone []string
	for _, l := range lowers {
		below, err := d.names(l.fd)
		if err != nil {
			return fmt.Errorf("list what %q hides: %w", short(d.name(rel)), err)
		}
		for _, base := range below {
			if _, ok := slices.BinarySearch(names, base); ok {
				d.held -= int64(len(base)) + perName
			} else {
				gone = append(gone, base)
			}
		}
	}
	defer func(held int64) { d.held = held }(d.held - sizeOf(gone))
	slices.Sort(gone)
	for _, base := range slices.Compact(gone) {
		was, err := d.look(lowers, base)
		if err != nil {
			return err
		}
		if !was.exists {
			continue // a whiteout
		}
		if err := d.found(&item{name: d.name(pathIn(rel, base)), kind: api.Deleted, base: base, dir: -1, st: was.st}); err != nil {
			return err
		}
	}
	return nil
}

// name is the place in the rootfs of what is at rel in the overlay.
func (d *differ) name(rel string) string {
	if rel == "." {
		return d.at
	}
	return pathIn(d.at, rel)
}

func pathIn(dir, base string) string {
	if dir == "." {
		return base
	}
	return dir + "/" + base
}

// names lists a directory, sorted. They count as held.
func (d *differ) names(fd int) ([]string, error) {
	// From the start: the descriptor may have been read before.
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return nil, err
	}
	var names []string
	for {
		n, err := unix.ReadDirent(fd, d.dirent)
		if errors.Is(err, unix.ENOENT) {
			n, err = 0, nil // the directory itself was deleted a moment ago, empty as it was by then
		}
		if err != nil {
			return nil, err
		}
		if n <= 0 {
			slices.Sort(names)
			return names, nil
		}
		had := len(names)
		_, _, names = unix.ParseDirent(d.dirent[:n], -1, names)
		for _, name := range names[had:] {
			if err := d.hold(int64(len(name)) + perName); err != nil {
				return nil, err
			}
		}
	}
}

// lowerDir is an open directory of one of the lower trees.
type lowerDir struct {
	layer int
	fd    int
}

func closeAll(dirs []lowerDir) {
	for _, l := range dirs {
		_ = unix.Close(l.fd)
	}
}

// openLower opens the directories at rel of those lower trees which are known to have one.
func (d *differ) openLower(live []int, rel string) ([]lowerDir, error) {
	// Overlayfs merges no mounts that are in a lower directory; in a user namespace the kernel refuses the overlay that would have
	// to hide one. So there is none below a sandbox, and what shows here is not what it saw.
	how := unix.OpenHow{Flags: openDir, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV}
	var dirs []lowerDir
	for _, layer := range live {
		fd, err := unix.Openat2(int(d.lower[layer].Fd()), rel, &how)
		if errors.Is(err, unix.EACCES) {
			continue // of the host's: what we may not look into, the sandbox did not see either
		}
		if err != nil {
			closeAll(dirs)
			return nil, fmt.Errorf("open what is below %q: %w", short(d.name(rel)), err)
		}
		dirs = append(dirs, lowerDir{layer, fd})
	}
	return dirs, nil
}

// lowerEntry is what the lower directories together show at one name.
type lowerEntry struct {
	exists bool
	st     unix.Stat_t
	dirs   []int // the lower trees that it is a directory in, as far as they are merged
}

// look merges the lower directories at base as overlayfs does.
func (d *differ) look(lowers []lowerDir, base string) (lowerEntry, error) {
	var b lowerEntry
	for _, l := range lowers {
		var st unix.Stat_t
		err := unix.Fstatat(l.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) { // as in openLower
			continue
		}
		if err != nil {
			return lowerEntry{}, err
		}
		// A whiteout or file ends it, be there what may further below.
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if !b.exists && !isWhiteout(&st) {
				b.exists, b.st = true, st
			}
			return b, nil
		}
		if !b.exists {
			b.exists, b.st = true, st
		}
		b.dirs = append(b.dirs, l.layer)
		fd, err := unix.Openat(l.fd, base, openDir, 0)
		if errors.Is(err, unix.EACCES) {
			continue
		}
		if err != nil {
			return lowerEntry{}, err
		}
		opaque, err := overlayMark(fd, "opaque")
		_ = unix.Close(fd)
		if err != nil || opaque == "y" {
			return b, err
		}
	}
	return b, nil
}

// whiteout reports whether the upper tree has one of either form: a device 0:0, or, since Linux 6.7, an empty file with a
// mark.
func (d *differ) whiteout(i *item) (bool, error) {
	if isWhiteout(&i.st) {
		return true, nil
	}
	if i.st.Mode&unix.S_IFMT != unix.S_IFREG || i.st.Size != 0 {
		return false, nil
	}
	fd, err := d.open(i)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Close(fd) }()
	attrs, err := listxattr(fd)
	return slices.Contains(attrs, overlayPrefix+"whiteout"), err
}

// open opens a regular file of the upper tree, takes its state anew and holds it against what it was.
func (d *differ) open(i *item) (int, error) {
	fd, err := unix.Openat(i.dir, i.base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return -1, ErrChanged // a link, or a socket
	}
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return -1, errors.Join(ErrChanged, unix.Close(fd))
	}
	i.st = st
	return fd, nil
}

const overlayPrefix = "user.overlay."

// overlayMark reads one of overlayfs' own xattrs, empty where it is not set.
func overlayMark(fd int, name string) (string, error) {
	var buf [64]byte
	n, err := unix.Fgetxattr(fd, overlayPrefix+name, buf[:])
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ENOTSUP):
		return "", nil
	case errors.Is(err, unix.ERANGE):
		return "", invalidf("xattr %s has a value that overlayfs does not write", overlayPrefix+name)
	case err != nil:
		return "", fmt.Errorf("read xattr %s: %w", overlayPrefix+name, err)
	}
	return string(buf[:n]), nil
}

func listxattr(fd int) ([]string, error) {
	buf := make([]byte, 64<<10) // XATTR_LIST_MAX
	n, err := unix.Flistxattr(fd, buf)
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list xattrs: %w", err)
	}
	var names []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if name != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// xattr is one that goes into the layer.
type xattr struct{ name, value string }

// attributes are the xattrs of a file or directory.
type attributes struct {
	kept   []xattr // sorted by name
	opaque bool
}

// maxXattrs bounds the xattrs of one entry: readers of tar archives take headers of 1 MiB.
const maxXattrs = 512 << 10

// xattrs reads those that a layer may have and that [Apply] would set. With note, the others are listed as left out.
func (d *differ) xattrs(fd int, name string, note bool) (attributes, error) {
	names, err := listxattr(fd)
	if err != nil {
		return attributes{}, err
	}
	var a attributes
	total := 0
	skip := func(attr string) {
		if note {
			d.skip(name, "xattr "+shown(attr))
		}
	}
	for _, attr := range names {
		if mark, ok := strings.CutPrefix(attr, overlayPrefix); ok {
			switch mark {
			case "opaque":
				value, err := overlayMark(fd, "opaque")
				if err != nil {
					return attributes{}, err
				}
				a.opaque = value == "y"
			case "redirect", "metacopy":
				// overlayfs writes neither with the mount option userxattr: then the content is in another place than it seems.
				return attributes{}, invalidf("it has %s, which no overlay of a sandbox does", attr)
			}
			// What the sandbox has called user.overlay.x itself the kernel keeps as user.overlay.overlay.x.
			if escaped, ok := strings.CutPrefix(mark, "overlay."); ok {
				skip(overlayPrefix + escaped)
			}
			continue
		}
		if !strings.HasPrefix(attr, "user.") || strings.HasPrefix(attr, "user.overlay") || strings.Contains(attr, "=") {
			skip(attr)
			continue
		}
		value, err := getxattr(fd, attr)
		if errors.Is(err, unix.ENODATA) {
			continue // removed a moment ago
		}
		if err != nil {
			return attributes{}, fmt.Errorf("read xattr %s: %w", short(attr), err)
		}
		if total += len(attr) + len(value); total > maxXattrs {
			skip(attr)
			continue
		}
		a.kept = append(a.kept, xattr{attr, value})
	}
	return a, nil
}

func getxattr(fd int, name string) (string, error) {
	for {
		size, err := unix.Fgetxattr(fd, name, nil)
		if err != nil {
			return "", err
		}
		buf := make([]byte, size)
		n, err := unix.Fgetxattr(fd, name, buf)
		if errors.Is(err, unix.ERANGE) {
			continue // it has grown
		}
		if err != nil {
			return "", err
		}
		return string(buf[:min(n, size)]), nil
	}
}

// epoch is the time of whiteouts. Times are in UTC, all of them: archive/tar formats those that it finds hard to express, and
// to format one in local time opens /etc/localtime, which in the child that does this is the sandbox's, be it a FIFO.
var epoch = time.Unix(0, 0).UTC()

// inode tells files with several names.
type inode struct{ dev, ino uint64 }

// named is a file in the archive: its first name, and what tells it from another file that has got its inode since.
type named struct {
	name         string
	typ          uint32
	size         int64
	mtime, ctime unix.Timespec
}

// archiver writes differences as a tar stream.
type archiver struct {
	*differ
	w      *tar.Writer
	latest time.Time
	holes  bool            // DiffOptions.Holes
	links  map[inode]named // files that have several names
	buf    []byte
}

func (a *archiver) entry(i *item) error {
	if err := a.write(i); errors.Is(err, unix.ENOENT) {
		a.result.Entries-- // deleted a moment ago
		return nil
	} else if err != nil {
		return fmt.Errorf("%q: %w", short(i.name), err)
	}
	return nil
}

func (a *archiver) write(i *item) error {
	if i.kind == api.Deleted {
		dir, base := split(i.name)
		return a.header(&tar.Header{Typeflag: tar.TypeReg, Name: pathIn(dir, whiteoutPrefix+base), ModTime: epoch})
	}
	switch i.st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return a.directory(i)
	case unix.S_IFLNK:
		target, err := readlinkat(i.dir, i.base)
		if errors.Is(err, unix.EINVAL) {
			return ErrChanged // no link any more
		}
		if err != nil {
			return fmt.Errorf("read link: %w", err)
		}
		if done, err := a.link(i); done || err != nil {
			return err
		}
		hdr, err := a.describe(i, tar.TypeSymlink)
		if err != nil {
			return err
		}
		hdr.Linkname = target
		return a.header(hdr)
	case unix.S_IFIFO:
		if done, err := a.link(i); done || err != nil {
			return err
		}
		hdr, err := a.describe(i, tar.TypeFifo)
		if err != nil {
			return err
		}
		return a.header(hdr)
	}
	return a.file(i)
}

// link writes a further name of a file that is in the archive.
func (a *archiver) link(i *item) (done bool, err error) {
	if i.st.Nlink < 2 {
		return false, nil
	}
	key := inode{i.st.Dev, i.st.Ino}
	now := named{i.name, i.st.Mode & unix.S_IFMT, i.st.Size, i.st.Mtim, i.st.Ctim}
	if first, ok := a.links[key]; ok {
		if now.name = first.name; now != first {
			return false, ErrChanged
		}
		hdr, err := a.describe(i, tar.TypeLink)
		if err != nil {
			return false, err
		}
		hdr.Linkname = first.name
		return true, a.header(hdr)
	}
	a.links[key] = now
	return false, a.hold(int64(len(i.name)) + 3*perName)
}

func (a *archiver) directory(i *item) error {
	hdr, err := a.describe(i, tar.TypeDir)
	if err != nil {
		return err
	}
	if i.name == "." {
		hdr.Name = "./"
	} else {
		hdr.Name += "/"
	}
	setXattrs(hdr, i.attrs)
	if err := a.header(hdr); err != nil {
		return err
	}
	if !i.opaque {
		return nil
	}
	// First of all in the directory, for tools that would delete what came before it.
	return a.header(&tar.Header{Typeflag: tar.TypeReg, Name: pathIn(i.name, whiteoutOpaque), ModTime: epoch})
}

func (a *archiver) file(i *item) error {
	fd, err := a.open(i)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }() // only read
	if done, err := a.link(i); done || err != nil {
		return err
	}
	left := a.limits.Bytes - a.result.Size
	parts, content := []piece{{0, i.st.Size}}, i.st.Size
	if a.holes {
		if parts, content, err = pieces(fd, i.st.Size, left, a.buf); err != nil {
			return err
		}
	}
	if content > left {
		return ExceededBytes.Errorf("with its %d bytes the layer has more than %d", content, a.limits.Bytes)
	}
	attrs, err := a.xattrs(fd, i.name, true)
	if err != nil {
		return err
	}
	hdr, err := a.describe(i, tar.TypeReg)
	if err != nil {
		return err
	}
	hdr.Size = i.st.Size
	setXattrs(hdr, attrs.kept)
	holes := content < i.st.Size
	if holes {
		setPieces(hdr, i.st.Size, content, parts)
	}
	if err := a.header(hdr); err != nil {
		return err
	}
	if holes {
		if err := putPieces(a.w, parts); err != nil {
			return fmt.Errorf("copy content: %w", err)
		}
	}
	// An os.File of a descriptor that does not block asks the kernel to be told of data, for each file.
	in := granules{section: section{fd: fd}, size: i.st.Size}
	for _, p := range parts {
		in.at = p.at
		n, err := io.CopyBuffer(struct{ io.Writer }{a.w}, struct{ io.Reader }{io.LimitReader(&in, p.n)}, a.buf)
		a.result.Size += n
		if err != nil {
			return fmt.Errorf("copy content: %w", err)
		}
		if n < p.n {
			return fmt.Errorf("%w: it became shorter", ErrChanged)
		}
	}
	if a.holes && (holes && in.zeros > 0 || in.zeros >= minHoles) {
		return fmt.Errorf("%w: zeros were written to it", ErrChanged)
	}
	return nil
}

// describe begins the header of what is there.
func (a *archiver) describe(i *item, typ byte) (*tar.Header, error) {
	if i.st.Uid > maxID || i.st.Gid > maxID {
		return nil, invalidf("its owner %d:%d is outside 0..%d, which is what a sandbox maps", i.st.Uid, i.st.Gid, maxID)
	}
	hdr := &tar.Header{
		Typeflag: typ, Name: i.name, Mode: int64(i.st.Mode & 0o7777), Uid: int(i.st.Uid), Gid: int(i.st.Gid),
		ModTime: time.Unix(i.st.Mtim.Unix()).UTC(),
	}
	if !a.latest.IsZero() && hdr.ModTime.After(a.latest) {
		hdr.ModTime = a.latest
	}
	return hdr, nil
}

func setXattrs(hdr *tar.Header, attrs []xattr) {
	if len(attrs) == 0 {
		return
	}
	hdr.PAXRecords = make(map[string]string, len(attrs))
	for _, x := range attrs {
		hdr.PAXRecords[xattrRecord+x.name] = x.value
	}
}

// header writes one in the form that every tool reads: USTAR, with PAX records for what it has no room for.
func (a *archiver) header(hdr *tar.Header) error {
	hdr.Format = tar.FormatPAX
	if err := a.w.WriteHeader(hdr); err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	return nil
}
