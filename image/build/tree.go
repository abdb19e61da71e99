package build

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"
)

// Tree is a root file system in memory: names, modes, owners and links; of a file's content only
// its place.
type Tree struct {
	root    *node
	pool    *pool
	count   int // entries, and nodes made since the last count, of which some may have been replaced
	text    int // bytes of their names, links and xattrs
	counted int // count at the last recount
}

// pool holds the limits of all trees of a build together.
type pool struct {
	limits Limits
	count  int
	text   int
}

// maxText limits the names, links and extended attributes of all trees: an entry may have a MiB of
// them.
const maxText = 256 << 20

// node is a file, directory, link or FIFO. A file with several names is one node.
type node struct {
	kind      byte // tar.TypeReg, TypeDir, TypeSymlink or TypeFifo
	mode      int64
	uid, gid  int
	mtime     time.Time
	size      int64
	link      string // target of a symbolic link
	content   content
	digest    string // of the content, once it is known
	xattrs    map[string]string
	children  map[string]*node // of a directory
	described bool             // by an entry of its own
}

// Archive is a tar stream whose entries trees refer to. It is either an uncompressed file, or can
// be read from its beginning any number of times.
type Archive struct {
	At   io.ReaderAt
	Open func() (io.ReadCloser, error)
}

// content is the place of a file's bytes.
type content struct {
	in     *Archive
	entry  int    // number of its header
	offset int64  // of its data in the uncompressed stream
	inline string // if in is nil
}

// NewTree returns a tree with an empty root.
func NewTree(limits Limits) *Tree {
	return (&pool{limits: limits.withDefaults()}).tree()
}

func (p *pool) tree() *Tree {
	t := &Tree{pool: p}
	t.root = t.directory()
	return t
}

// New returns a tree with an empty root for the same build: the limits apply to both together.
func (t *Tree) New() *Tree { return t.pool.tree() }

// Drop returns t's share in the limits. T is useless after that.
func (t *Tree) Drop() {
	t.spend(-t.count, -t.text)
	t.root = nil
}

func (t *Tree) spend(nodes, text int) {
	t.count += nodes
	t.text += text
	t.pool.count += nodes
	t.pool.text += text
}

// recount counts the nodes of the tree if many were made since the last count: some have been
// replaced.
func (t *Tree) recount() {
	if t.count-t.counted <= t.pool.limits.Entries/16 {
		return
	}
	nodes, text, seen := 0, 0, make(map[*node]bool)
	_ = walk("", t.root, func(name string, n *node) error {
		text += len(path.Base(name))
		if n.children == nil && seen[n] {
			return nil
		}
		if n.children == nil {
			seen[n] = true
		}
		nodes++
		text += n.text()
		return nil
	}) // f never fails
	t.spend(nodes-t.count, text-t.text)
	t.counted = t.count
}

func (n *node) text() int {
	bytes := len(n.link)
	for k, v := range n.xattrs {
		bytes += len(k) + len(v)
	}
	return bytes
}

func (t *Tree) directory() *node {
	t.spend(1, 0)
	return &node{kind: tar.TypeDir, mode: 0o755, mtime: time.Unix(0, 0), children: make(map[string]*node)}
}

// room returns an error if the limits forbid one more node.
func (t *Tree) room() error {
	if t.pool.count >= t.pool.limits.Entries {
		return invalidf("more than %d entries", t.pool.limits.Entries)
	}
	return nil
}

// Clone returns a copy that can be changed without changing t.
func (t *Tree) Clone() (*Tree, error) {
	t.recount()
	if n := t.pool.count + t.count; n > t.pool.limits.Entries || t.pool.text+t.text > maxText {
		return nil, invalidf("more than %d entries, with those of other stages", t.pool.limits.Entries)
	}
	c := &Tree{pool: t.pool, counted: t.counted}
	c.spend(t.count, t.text)
	links := make(map[*node]*node) // so that hard links stay hard links
	var clone func(n *node) *node
	clone = func(n *node) *node {
		if n.children == nil {
			if same := links[n]; same != nil {
				return same
			}
		}
		d := *n
		if n.children == nil {
			links[n] = &d
			return &d
		}
		d.children = make(map[string]*node, len(n.children))
		for name, child := range n.children {
			d.children[name] = clone(child)
		}
		return &d
	}
	c.root = clone(t.root)
	return c, nil
}

// A layer's whiteouts, as the OCI image specification names them.
const (
	whiteout     = ".wh."
	whiteoutMeta = ".wh..wh."
	opaque       = ".wh..wh..opq"
)

// Apply changes the tree by the layer in a. It leaves out the entries that image/layer leaves out
// (devices, notes of aufs).
func (t *Tree) Apply(a *Archive) error {
	r, err := a.Open()
	if err != nil {
		return err
	}
	err = t.read(r, a, true)
	return errors.Join(err, r.Close())
}

// Load adds the entries of an archive that is no layer: the context of a build, or the archive of
// an ADD.
func (t *Tree) Load(a *Archive) error {
	r, err := a.Open()
	if err != nil {
		return err
	}
	err = t.read(r, a, false)
	return errors.Join(err, r.Close())
}

// position counts the bytes read, so that data can be found again.
type position struct {
	r io.Reader
	n int64
}

func (p *position) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.n += int64(n)
	return n, err
}

func (t *Tree) read(r io.Reader, a *Archive, layer bool) error {
	in := &position{r: r}
	tr := tar.NewReader(in)
	var bytes int64
	t.recount()
	made := make(map[*node]bool) // by this layer: an opaque whiteout keeps them
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return invalidf("read entry %d of the archive: %w", n+1, err)
		}
		if err := t.room(); err != nil {
			return err
		}
		t.spend(1, 0)
		if bytes += hdr.Size; bytes > t.pool.limits.Bytes || hdr.Size < 0 {
			return invalidf("its files have more than %d bytes", t.pool.limits.Bytes)
		}
		if err := t.entry(hdr, content{in: a, entry: n, offset: in.n}, layer, made); err != nil {
			return invalidf("entry %q: %w", clip(hdr.Name), err)
		}
	}
}

// components splits a name. No honest name has "..".
func components(name string) ([]string, error) {
	if len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
		return nil, errors.New("not the name of a file")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch part {
		case "", ".":
			continue
		case "..":
			return nil, errors.New(`".." in a name`)
		}
		if len(part) > 255 {
			return nil, errors.New("a component of more than 255 bytes")
		}
		parts = append(parts, part)
	}
	if len(parts) > maxDepth {
		return nil, fmt.Errorf("more than %d directories deep", maxDepth)
	}
	return parts, nil
}

func (t *Tree) entry(hdr *tar.Header, at content, layer bool, made map[*node]bool) error {
	parts, err := components(hdr.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		if hdr.Typeflag == tar.TypeDir && layer {
			t.root.describe(hdr)
		}
		return nil
	}
	base := parts[len(parts)-1]
	if layer {
		// Like the extractor: notes of aufs are no files, and no whiteout is a directory.
		inside := func(prefix string) bool {
			return slices.ContainsFunc(parts[:len(parts)-1], func(p string) bool { return strings.HasPrefix(p, prefix) })
		}
		switch {
		case inside(whiteoutMeta) || strings.HasPrefix(base, whiteoutMeta) && base != opaque:
			return nil
		case inside(whiteout):
			return errors.New("a whiteout is used as a directory")
		case strings.HasPrefix(base, whiteout):
			return t.white(parts[:len(parts)-1], base, made)
		}
	}
	n := &node{mode: hdr.Mode & 0o7777, uid: hdr.Uid, gid: hdr.Gid, mtime: hdr.ModTime, size: hdr.Size, content: at, described: true}
	for record, value := range hdr.PAXRecords {
		if strings.HasPrefix(record, xattrs) {
			if n.xattrs == nil {
				n.xattrs = make(map[string]string)
			}
			n.xattrs[record] = value
		}
	}
	// The header's name is one string for the whole path, which a substring would keep in memory.
	base = strings.Clone(base)
	text := len(base) + len(hdr.Linkname)
	for k, v := range n.xattrs {
		text += len(k) + len(v)
	}
	if t.spend(0, text); t.pool.text > maxText {
		return fmt.Errorf("names, links and extended attributes have more than %d bytes", maxText)
	}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont:
		if sparse(hdr) {
			return errors.New("sparse files cannot be built from")
		}
		n.kind = tar.TypeReg
	case tar.TypeDir:
		n.kind, n.size, n.children = tar.TypeDir, 0, make(map[string]*node)
	case tar.TypeSymlink:
		if hdr.Linkname == "" || len(hdr.Linkname) > maxName || strings.IndexByte(hdr.Linkname, 0) >= 0 {
			return errors.New("a symbolic link to nowhere")
		}
		n.kind, n.size, n.link = tar.TypeSymlink, 0, hdr.Linkname
	case tar.TypeFifo:
		n.kind, n.size = tar.TypeFifo, 0
	case tar.TypeLink:
		target, err := components(hdr.Linkname)
		if err != nil {
			return fmt.Errorf("hard link: %w", err)
		}
		if n, err = t.at(target); err != nil || n.kind == tar.TypeDir {
			return fmt.Errorf("hard link to %q, which is no file in the archive", clip(hdr.Linkname))
		}
	case tar.TypeGNUSparse:
		return errors.New("sparse files cannot be built from")
	default:
		return nil // devices; headers for others
	}
	if layer {
		t.uncover(parts[:len(parts)-1], made)
	}
	dir, err := t.mkdirs(parts[:len(parts)-1], made)
	if err != nil {
		return err
	}
	old := dir.children[base]
	if n.kind == tar.TypeDir && old != nil && old.kind == tar.TypeDir {
		old.describe(hdr)
		old.xattrs, old.described = n.xattrs, true
		made[old] = true
		return nil
	}
	made[n] = true
	dir.children[base] = n
	return nil
}

// xattrs is the prefix of extended attributes in PAX records.
const xattrs = "SCHILY.xattr."

func sparse(hdr *tar.Header) bool {
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func (n *node) describe(hdr *tar.Header) {
	n.mode, n.uid, n.gid, n.mtime = hdr.Mode&0o7777, hdr.Uid, hdr.Gid, hdr.ModTime
}

func (t *Tree) white(dir []string, base string, made map[*node]bool) error {
	d, err := t.at(dir)
	if err != nil || d.kind != tar.TypeDir {
		return nil //nolint:nilerr // nothing to hide
	}
	if base == opaque {
		for name, child := range d.children {
			if !made[child] {
				delete(d.children, name)
			}
		}
		return nil
	}
	hidden := strings.TrimPrefix(base, whiteout)
	if child := d.children[hidden]; child != nil && !made[child] {
		delete(d.children, hidden)
	}
	return nil
}

// uncover replaces an entry of a layer below in the place of a directory: overlayfs shows this
// layer's directory then. Links that this layer made are followed instead.
func (t *Tree) uncover(dir []string, made map[*node]bool) {
	d := t.root
	for _, part := range dir {
		next := d.children[part]
		switch {
		case next == nil:
			return
		case next.kind == tar.TypeDir:
			d = next
		case made[next]:
			return
		default:
			delete(d.children, part)
			return
		}
	}
}

// at returns the node of a name. Links to its directories are followed, as in a chroot; a link at
// its end is not.
func (t *Tree) at(parts []string) (*node, error) {
	full, err := t.resolve("/"+strings.Join(parts, "/"), false, false)
	if err != nil {
		return nil, err
	}
	n := t.lookup(full)
	if n == nil {
		return nil, errAbsent
	}
	return n, nil
}

// mkdirs makes the directories that an entry assumes.
func (t *Tree) mkdirs(parts []string, made map[*node]bool) (*node, error) {
	full, err := t.resolve("/"+strings.Join(parts, "/"), true, true)
	if err != nil {
		return nil, err
	}
	d := t.root
	for part := range strings.SplitSeq(full, "/") {
		if part == "" {
			continue
		}
		next := d.children[part]
		if next == nil {
			if err := t.room(); err != nil {
				return nil, err
			}
			next = t.directory()
			made[next] = true
			d.children[part] = next
		}
		if next.kind != tar.TypeDir {
			return nil, fmt.Errorf("%q is not a directory", clip(full))
		}
		d = next
	}
	return d, nil
}

var errAbsent = errors.New("no such file or directory")

// lookup returns the node of a resolved path, nil if there is none.
func (t *Tree) lookup(full string) *node {
	n := t.root
	for part := range strings.SplitSeq(full, "/") {
		if part == "" {
			continue
		}
		if n = n.children[part]; n == nil {
			return nil
		}
	}
	return n
}

// resolve returns an absolute path without links, "." and "..", as a process with the tree as its
// root would resolve it. With last, a link at the end is followed too; with missing, the result may
// have missing components, for an entry that is to be made there.
func (t *Tree) resolve(name string, last, missing bool) (string, error) {
	todo := strings.Split(name, "/")
	var done []string
	trail := []*node{t.root}
	links, steps := 0, 0
	for len(todo) > 0 {
		if steps++; steps > maxName {
			return "", errors.New("too many links on the way")
		}
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(done) > 0 {
				done, trail = done[:len(done)-1], trail[:len(trail)-1]
			}
			continue
		}
		here := trail[len(trail)-1]
		var next *node
		if here != nil {
			if here.kind != tar.TypeDir {
				return "", fmt.Errorf("%q is not a directory", clip("/"+strings.Join(done, "/")))
			}
			next = here.children[part]
		}
		end := !slices.ContainsFunc(todo, func(s string) bool { return s != "" && s != "." })
		switch {
		case next == nil && !missing:
			return "", errAbsent
		case next != nil && next.kind == tar.TypeSymlink && (last || !end):
			if links++; links > maxLinks {
				return "", fmt.Errorf("more than %d symbolic links on the way", maxLinks)
			}
			if strings.HasPrefix(next.link, "/") {
				done, trail = nil, trail[:1]
			}
			if todo = slices.Concat(strings.Split(next.link, "/"), todo); len(todo) > maxName {
				return "", errors.New("too many links on the way")
			}
			continue
		}
		if done, trail = append(done, part), append(trail, next); len(done) > maxDepth {
			return "", fmt.Errorf("more than %d directories deep", maxDepth)
		}
	}
	return "/" + strings.Join(done, "/"), nil
}

// walk calls f for a node and all below it, in the order of their names.
func walk(name string, n *node, f func(name string, n *node) error) error {
	if err := f(name, n); err != nil {
		return err
	}
	for _, child := range n.sorted() {
		if err := walk(path.Join(name, child), n.children[child], f); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) sorted() []string {
	names := make([]string, 0, len(n.children))
	for name := range n.children {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
