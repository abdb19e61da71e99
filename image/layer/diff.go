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

// ErrChanged is the class of errors about files that were written while [Diff] read them. A retry
// may help, above all after stopping the writer.
var ErrChanged = errors.New("changed while it was read")

// Overlay is one overlay mount whose upper directory is to become a layer.
//
// The upper directory is hostile: programs of the sandbox chose every name, link, mode and length
// in it, and may be writing to it. It is read by the package's rules: one component of a name at a
// time, without following links or opening anything that could block or act.
type Overlay struct {
	// At is the mount point in the rootfs: a path without leading slash, "." for the rootfs itself.
	At    string
	Upper *os.Root
	// Lower are the directories below it, highest first. They are only searched for entries that the
	// upper one hides.
	Lower []*os.Root
	// Mounted are names at its top on which other overlays are mounted, which own those names of
	// Upper.
	Mounted []string
}

// DiffOptions are the options of [Diff].
type DiffOptions struct {
	// Latest caps modification times, so that equal changes make equal layers; zero means no cap. It
	// serves SOURCE_DATE_EPOCH.
	Latest time.Time
	// Limits are those of [Apply], which would refuse a layer beyond them. Ratio does not count.
	Limits Limits
	// Stored is true if the upper directories are of a layer that [Apply] has made of such a stream.
	// Then every whiteout and opaque mark is included, even one that hides nothing: the directories
	// below may have changed since, as the host's own do, and the layer has not.
	Stored bool
	// Holes leaves out the zeros of files that are mostly zeros, in a form that only [Apply] with
	// FromDiff understands.
	Holes bool
	// Plain writes an archive of the directories as they are, not of changes: whiteouts and the marks
	// of overlayfs mean nothing in it, and ids that no image can have become 65534.
	Plain bool `json:",omitempty"`
	// Anonymous leaves owners out. Files may then have ids that no image can have.
	Anonymous bool `json:",omitempty"`
}

// Diff writes the changes in the upper directories as the uncompressed tar stream of a layer:
// applied to the lower ones it gives the view of the overlays.
//
// The stream depends on the changes alone: entries are sorted, the files of a directory come before
// its subdirectories, and names of owners and access times are missing. Diff leaves out and lists
// entries that no layer can express or that [Apply] refuses: sockets, devices, xattrs beyond
// user.*, names that would read as whiteouts.
//
// The result has no DiffID: the receiver of the stream hashes it on arrival.
func Diff(w io.Writer, overlays []Overlay, opts DiffOptions) (Result, error) {
	d := newDiffer(opts.Limits)
	d.stored, d.plain = opts.Stored, opts.Plain
	out := &archiver{differ: d, w: tar.NewWriter(w), latest: opts.Latest.UTC(), holes: opts.Holes, anonymous: opts.Anonymous, links: make(map[inode]named), buf: make([]byte, 256<<10)}
	d.visit = out.entry
	if err := d.run(overlays); err != nil {
		return Result{}, err
	}
	if err := out.w.Close(); err != nil {
		return Result{}, fmt.Errorf("end the archive: %w", err)
	}
	return d.result, nil
}

// Changes calls found for every addition, change and deletion in the upper directories, in the
// order of [Diff], but with entries below an opaque directory as deleted. The result counts them.
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
	st     unix.Stat_t // of the entry, or of the deleted one
	attrs  []xattr     // of a directory
}

// differ walks the upper directories and compares them with those below.
type differ struct {
	visit  func(*item) error
	all    bool // also visit entries deleted by an opaque directory above them
	stored bool // DiffOptions.Stored
	plain  bool // DiffOptions.Plain
	// at, lower and the rest belong to the overlay that is being walked; the lower directories are
	// open.
	at      string
	mounted []string
	lower   []*os.File
	limits  Limits
	held    int64 // bytes of names in memory
	seen    int64 // names in the upper directories
	dirent  []byte
	result  Result
}

// maxHeld limits the memory for names: those of a directory's entries and of files with several
// links.
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

// root visits the root directory only if more than its time differs. It was made with the sandbox,
// so its time means nothing, and a sandbox without changes has an empty layer.
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
		// A directory of the host may hide its xattrs. An omission in the lower directory is not news.
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

// subdir is a directory to visit after the files beside it.
type subdir struct {
	base   string
	exists bool  // below
	dirs   []int // as in lowerEntry, which is larger
}

// size returns its memory in bytes.
func (s *subdir) size() int64 { return int64(len(s.base)) + 8*int64(cap(s.dirs)) + perName }

// directory visits the entries of the directory fd of the upper tree, at rel in it. Live are the
// lower directories that have a directory there too; if hidden, none of them shows.
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
	// The names stay until the last has been visited, and so do those of the directories above.
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

// perName is the memory of a name beside its bytes.
const perName = 64

func sizeOf(names []string) (n int64) {
	for _, name := range names {
		n += int64(len(name)) + perName
	}
	return n
}

// files visits the entries of a directory except subdirectories, which it returns.
func (d *differ) files(fd int, rel string, names []string, lowers []lowerDir, hidden bool, depth int) ([]subdir, error) {
	var dirs []subdir
	for _, base := range names {
		// All names count, not only those that become entries: they cost as much time.
		if d.seen++; d.seen > d.limits.Entries {
			return nil, ExceededEntries.Errorf("more than %d entries", d.limits.Entries)
		}
		if rel == "." && slices.Contains(d.mounted, base) {
			continue
		}
		i := item{name: d.name(pathIn(rel, base)), base: base, dir: fd}
		if strings.HasPrefix(base, whiteoutPrefix) && !d.plain {
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
			// overlayfs keeps whiteouts of names that never existed below. If everything is hidden there is
			// nothing to delete.
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
	// overlayfs usually marks a new directory as opaque, to skip lookups below.
	i.opaque = attrs.opaque && (len(s.dirs) > 0 && !hidden || d.stored)
	if err := d.found(&i); err != nil {
		return err
	}
	return d.directory(fd, rel, s.dirs, hidden || attrs.opaque, depth)
}

// deleted visits the names of the lower directories at rel that the upper one, which hides it,
// lacks.
func (d *differ) deleted(rel string, names []string, lowers []lowerDir) error {
	var gone []string
	for _, l := range lowers {
		below, err := d.names(l.fd)
		if err != nil {
			return fmt.Errorf("list names hidden by %q: %w", short(d.name(rel)), err)
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

// name returns the place in the rootfs of the entry at rel in the overlay.
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

// names returns the names in a directory, sorted. They count as held.
func (d *differ) names(fd int) ([]string, error) {
	// From the start: the descriptor may have been read before.
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return nil, err
	}
	var names []string
	for {
		n, err := unix.ReadDirent(fd, d.dirent)
		if errors.Is(err, unix.ENOENT) {
			n, err = 0, nil // the directory itself was deleted a moment ago, and was empty by then
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

// openLower opens the directories at rel of those lower trees that are known to have one.
func (d *differ) openLower(live []int, rel string) ([]lowerDir, error) {
	// Overlayfs merges no mounts in a lower directory; in a user namespace the kernel refuses an
	// overlay that would have to hide one. So there is none below a sandbox, and the sandbox did not
	// see a mount that is here.
	how := unix.OpenHow{Flags: openDir, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV}
	var dirs []lowerDir
	for _, layer := range live {
		fd, err := unix.Openat2(int(d.lower[layer].Fd()), rel, &how)
		if errors.Is(err, unix.EACCES) {
			continue // of the host: hidden from us, and so from the sandbox
		}
		if err != nil {
			closeAll(dirs)
			return nil, fmt.Errorf("open directory below %q: %w", short(d.name(rel)), err)
		}
		dirs = append(dirs, lowerDir{layer, fd})
	}
	return dirs, nil
}

// lowerEntry is the merged view of the lower directories at one name.
type lowerEntry struct {
	exists bool
	st     unix.Stat_t
	dirs   []int // indexes of the lower trees that have a directory there, as far as they are merged
}

// look merges the lower directories at base as overlayfs does.
func (d *differ) look(lowers []lowerDir, base string) (lowerEntry, error) {
	var b lowerEntry
	for _, l := range lowers {
		var st unix.Stat_t
		err := unix.Fstatat(l.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) { // see openLower
			continue
		}
		if err != nil {
			return lowerEntry{}, err
		}
		// A whiteout or file ends the search, whatever lies further below.
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

// whiteout reports whether the upper tree has a whiteout of either form: a device 0:0 or, since
// Linux 6.7, an empty file with a mark.
func (d *differ) whiteout(i *item) (bool, error) {
	if d.plain {
		return false, nil
	}
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

// open opens a regular file of the upper tree, reads its state anew and compares it with the first
// one.
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

// overlayMark returns one of overlayfs' own xattrs, empty if unset.
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

// xattr is an attribute for the layer.
type xattr struct{ name, value string }

// attributes are the xattrs of a file or directory.
type attributes struct {
	kept   []xattr // sorted by name
	opaque bool
}

// maxXattrs limits the xattrs of one entry: readers of tar archives accept headers of 1 MiB.
const maxXattrs = 512 << 10

// xattrs reads the attributes that a layer may have and that [Apply] would set. With note, the
// others are recorded as omissions.
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
		if mark, ok := strings.CutPrefix(attr, overlayPrefix); ok && d.plain {
			skip(attr)
			continue
		} else if ok {
			switch mark {
			case "opaque":
				value, err := overlayMark(fd, "opaque")
				if err != nil {
					return attributes{}, err
				}
				a.opaque = value == "y"
			case "redirect", "metacopy":
				// overlayfs writes neither with the mount option userxattr. If one is there, the content is
				// elsewhere than it seems.
				return attributes{}, invalidf("it has %s, which no overlay of a sandbox does", attr)
			}
			// The kernel keeps the sandbox's own user.overlay.x as user.overlay.overlay.x.
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

// epoch is the time of whiteouts. All times are in UTC. archive/tar formats times that are hard to
// express, and formatting a local time opens /etc/localtime. In the child that does this, that is
// the sandbox's file, perhaps a FIFO.
var epoch = time.Unix(0, 0).UTC()

// nobody is the kernel's overflow id. It replaces ids that an image cannot have.
const nobody = 65534

// inode identifies a file with several names.
type inode struct{ dev, ino uint64 }

// named is a file in the archive: its first name, and the data that distinguish it from a later
// file with its inode.
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
	holes  bool // DiffOptions.Holes
	// anonymous is DiffOptions.Anonymous.
	anonymous bool
	links     map[inode]named // files that have several names
	buf       []byte
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
			return ErrChanged // no longer a link
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

// link writes a further name of a file of the archive.
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
	// First in the directory, for tools that would delete earlier entries.
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
	// An os.File of a non-blocking descriptor registers with the poller, for each file.
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

// describe returns the beginning of an entry's header.
func (a *archiver) describe(i *item, typ byte) (*tar.Header, error) {
	if a.anonymous {
		i.st.Uid, i.st.Gid = 0, 0
	}
	if a.plain && i.st.Uid > maxID {
		i.st.Uid = nobody
	}
	if a.plain && i.st.Gid > maxID {
		i.st.Gid = nobody
	}
	if i.st.Uid > maxID || i.st.Gid > maxID {
		return nil, invalidf("its owner %d:%d is outside 0..%d, the ids of a sandbox", i.st.Uid, i.st.Gid, maxID)
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

// header writes a header in the most portable form: USTAR, with PAX records for values that do not
// fit.
func (a *archiver) header(hdr *tar.Header) error {
	hdr.Format = tar.FormatPAX
	if err := a.w.WriteHeader(hdr); err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	return nil
}
