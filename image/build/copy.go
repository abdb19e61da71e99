package build

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/image/layer"
)

// Stamp holds the times for a layer that is made here.
type Stamp struct {
	Now    time.Time // of directories without an entry
	Latest time.Time // later times are set back to it; zero means none
}

func (s Stamp) of(t time.Time) time.Time {
	if !s.Latest.IsZero() && t.After(s.Latest) {
		return s.Latest
	}
	return t
}

// changer makes one change to a tree and records the touched nodes.
type changer struct {
	tree    *Tree
	ctx     context.Context //nolint:containedctx // lives as long as one step
	spool   *Spool
	stamp   Stamp
	owner   *owner // nil keeps the source's
	mode    int64  // -1 keeps the source's
	changed map[string]*node
	links   map[*node]*node // source to copy, so that hard links stay hard links
}

func (t *Tree) changer(ctx context.Context, spool *Spool, stamp Stamp) *changer {
	t.recount()
	return &changer{
		tree: t, ctx: ctx, spool: spool, stamp: stamp, mode: -1, changed: make(map[string]*node), links: make(map[*node]*node),
	}
}

// Change is the change of a tree by one step, to be written as a layer before the next change.
type Change struct{ c *changer }

// Write writes the change as the tar stream of a layer, which depends only on the files and their
// times.
func (c *Change) Write(w io.Writer) error { return c.c.write(w) }

func (c *changer) change() *Change {
	if len(c.changed) == 0 {
		return nil
	}
	return &Change{c}
}

// Copy puts a selection into t, the root of a stage. It returns nil if that changes nothing.
func (t *Tree) Copy(ctx context.Context, s *Selection, spool *Spool, stamp Stamp) (*Change, error) {
	c := t.changer(ctx, spool, stamp)
	cp := s.copy
	var err error
	if cp.Chown != "" {
		if c.owner, err = t.account(ctx, cp.Chown, spool); err != nil {
			return nil, invalidf("--chown=%s: %w", clip(cp.Chown), err)
		}
	}
	if c.mode, err = parseMode(cp.Chmod); err != nil {
		return nil, err
	}
	for _, it := range s.items {
		if err := c.item(cp, it); err != nil {
			return nil, invalidf("%q: %w", clip(it.name), err)
		}
	}
	return c.change(), nil
}

// MakeDir makes a directory of the stage and those above it. It returns nil if the directory
// exists.
func (t *Tree) MakeDir(ctx context.Context, d *Dir, spool *Spool, stamp Stamp) (*Change, error) {
	c := t.changer(ctx, spool, stamp)
	full, err := t.resolve(d.Path, true, true)
	if err != nil {
		return nil, invalidf("directory %q: %w", clip(d.Path), err)
	}
	if n := t.lookup(full); n != nil && n.kind == tar.TypeDir {
		return nil, nil //nolint:nilnil // no change
	}
	if d.User != "" {
		if c.owner, err = t.account(ctx, d.User, spool); err != nil {
			return nil, err
		}
	}
	if _, err := c.mkdirs(full); err != nil {
		return nil, invalidf("directory %q: %w", clip(d.Path), err)
	}
	return c.change(), nil
}

func (c *changer) item(cp *Copy, it item) error {
	if cp.Add && cp.Unpack && it.node.kind == tar.TypeReg {
		a, err := c.unpack(it)
		if err != nil {
			return invalidf("ADD %s: %w", clip(it.name), err)
		}
		if a != nil {
			err := c.unpacked(cp, a)
			a.Drop()
			if err != nil {
				return invalidf("ADD %s: %w", clip(it.name), err)
			}
			return nil
		}
	}
	dest, err := c.tree.resolve(cp.Dest, true, true)
	if err != nil {
		return invalidf("destination %q: %w", clip(cp.Dest), err)
	}
	there := c.tree.lookup(dest)
	if it.node.kind == tar.TypeDir {
		return c.content(cp, dest, there, it.node)
	}
	if strings.HasSuffix(cp.Dest, "/") || there != nil && there.kind == tar.TypeDir {
		if _, err := c.mkdirs(dest); err != nil {
			return invalidf("destination %q: %w", clip(cp.Dest), err)
		}
		dest = path.Join(dest, it.name)
	}
	if dest == "/" {
		return invalidf("destination %q is the root directory", clip(cp.Dest))
	}
	if err := c.put(dest, it.node, true); err != nil {
		return invalidf("destination %q: %w", clip(cp.Dest), err)
	}
	return nil
}

// content copies the content of a directory. If the destination does not exist, it gets the
// source's metadata.
func (c *changer) content(cp *Copy, dest string, there, dir *node) error {
	if there == nil {
		if err := c.put(dest, dir, false); err != nil {
			return invalidf("destination %q: %w", clip(cp.Dest), err)
		}
		return nil
	}
	if there.kind != tar.TypeDir {
		return invalidf("destination %q is not a directory", clip(cp.Dest))
	}
	for _, name := range dir.sorted() {
		if err := c.put(path.Join(dest, name), dir.children[name], true); err != nil {
			return invalidf("destination %q: %w", clip(cp.Dest), err)
		}
	}
	return nil
}

// mkdirs makes the missing directories of a resolved path.
func (c *changer) mkdirs(full string) (*node, error) {
	d, at := c.tree.root, ""
	for part := range strings.SplitSeq(full, "/") {
		if part == "" {
			continue
		}
		at += "/" + part
		next := d.children[part]
		if next == nil {
			if err := creatable(at); err != nil {
				return nil, err
			}
			if err := c.tree.room(); err != nil {
				return nil, err
			}
			next = c.tree.directory()
			next.mtime = c.stamp.Now
			if c.owner != nil {
				next.uid, next.gid = c.owner.uid, c.owner.gid
			}
			d.children[part] = next
			c.changed[at] = next
		}
		if next.kind != tar.TypeDir {
			return nil, fmt.Errorf("%q is not a directory", clip(at))
		}
		d = next
	}
	return d, nil
}

// creatable refuses names that no file of a layer can have.
func creatable(full string) error {
	base := path.Base(full)
	switch {
	case strings.HasPrefix(base, whiteout):
		return fmt.Errorf("%q cannot be in an image: such names mark deletions in layers", clip(full))
	case len(base) > 255:
		return fmt.Errorf("%q has a component of more than 255 bytes", clip(full))
	}
	return nil
}

// put copies a file or a whole directory to a resolved path. With describe, an existing directory
// gets the source's metadata.
func (c *changer) put(full string, src *node, describe bool) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if strings.Count(full, "/") > maxDepth || len(full) > maxName {
		return fmt.Errorf("%q is too deep a path", clip(full))
	}
	if err := creatable(full); err != nil {
		return err
	}
	parent, err := c.mkdirs(path.Dir(full))
	if err != nil {
		return err
	}
	base := path.Base(full)
	old := parent.children[base]
	if full == "/" {
		old = c.tree.root
	}
	if src.kind != tar.TypeDir {
		if old != nil && old.kind == tar.TypeDir {
			return fmt.Errorf("%q is a directory, which a file cannot replace", clip(full))
		}
		n := c.links[src]
		if n == nil {
			if n, err = c.like(src); err != nil {
				return err
			}
			c.links[src] = n
		}
		parent.children[base] = n
		c.changed[full] = n
		return nil
	}
	switch {
	case old == nil:
		if old, err = c.like(src); err != nil {
			return err
		}
		old.children = make(map[string]*node)
		parent.children[base] = old
		c.changed[full] = old
	case old.kind != tar.TypeDir:
		what := "a file"
		if old.kind == tar.TypeSymlink {
			what = "a symbolic link"
		}
		return fmt.Errorf("%q is %s, which a directory cannot replace", clip(full), what)
	case describe:
		n, err := c.like(src)
		if err != nil {
			return err
		}
		old.mode, old.uid, old.gid, old.mtime, old.xattrs = n.mode, n.uid, n.gid, n.mtime, n.xattrs
		c.changed[full] = old
	}
	for _, name := range src.sorted() {
		if err := c.put(path.Join(full, name), src.children[name], true); err != nil {
			return err
		}
	}
	return nil
}

// like returns a copy of a node with the metadata for the destination.
func (c *changer) like(src *node) (*node, error) {
	if err := c.tree.room(); err != nil {
		return nil, err
	}
	c.tree.spend(1, len(src.link))
	n := *src
	n.children = nil
	if c.owner != nil {
		n.uid, n.gid = c.owner.uid, c.owner.gid
	}
	if c.mode >= 0 && n.kind != tar.TypeSymlink {
		n.mode = c.mode
	}
	return &n, nil
}

// unpack reads a file that may be an archive; it returns nil if it is none.
func (c *changer) unpack(it item) (*Tree, error) {
	open := func() (io.ReadCloser, error) {
		r, err := it.node.open()
		if err != nil {
			return nil, err
		}
		u, err := layer.Uncompress(&ctxReader{c.ctx, r}, "", layer.Limits{Bytes: c.tree.pool.limits.Bytes})
		if err != nil {
			return nil, err
		}
		return &uncompressed{u, bufio.NewReaderSize(u, 64<<10)}, nil
	}
	// A file that is not a tar, even one that begins like a compressed stream, is copied unchanged.
	first, err := open()
	if err != nil {
		r, oerr := it.node.open()
		if oerr != nil {
			return nil, oerr
		}
		magic := make([]byte, 6)
		if n, _ := io.ReadFull(r, magic); strings.HasPrefix(string(magic[:n]), "BZh") || string(magic[:n]) == "\xfd7zXZ\x00" { // too short for either
			return nil, errors.New("archives compressed with bzip2 or xz are not unpacked; gzip, zstd and none are, and COPY takes it as it is")
		}
		return nil, nil //nolint:nilnil // damaged, so an ordinary file
	}
	_, err = tar.NewReader(first).Next()
	if cerr := first.Close(); cerr != nil {
		return nil, cerr
	}
	if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
		return nil, c.ctx.Err() // nil if it is no archive
	}
	t := c.tree.New()
	if err := t.Load(&Archive{Open: open}); err != nil {
		return nil, err
	}
	var files []*node
	err = walk("", t.root, func(_ string, n *node) error {
		files = append(files, n)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, c.spool.fetch(c.ctx, files)
}

type uncompressed struct {
	u *layer.Uncompressed
	*bufio.Reader
}

func (u *uncompressed) Close() error { u.u.Close(); return nil }

// unpacked puts an archive's content into the destination, which becomes a directory. Unlike in a
// COPY, an archive's directories may lie behind links of the image, as with tar.
func (c *changer) unpacked(cp *Copy, a *Tree) error {
	dest, err := c.tree.resolve(cp.Dest, true, true)
	if err != nil {
		return err
	}
	if _, err := c.mkdirs(dest); err != nil {
		return err
	}
	return c.merge(dest, a.root, make(map[string]bool))
}

func (c *changer) merge(dir string, src *node, into map[string]bool) error {
	for _, name := range src.sorted() {
		child, full := src.children[name], path.Join(dir, name)
		if child.kind == tar.TypeDir {
			if there := c.tree.lookup(full); there != nil && there.kind == tar.TypeSymlink {
				target, err := c.tree.resolve(full, true, true)
				if err != nil {
					return err
				}
				if into[target] {
					return fmt.Errorf("%q leads to a directory that the archive has, too", clip(full))
				}
				if _, err := c.mkdirs(target); err != nil {
					return err
				}
				into[target] = true
				if err := c.merge(target, child, into); err != nil {
					return err
				}
				continue
			}
			shallow := *child
			shallow.children = nil
			if err := c.put(full, &shallow, child.described); err != nil {
				return err
			}
			if err := c.merge(full, child, into); err != nil {
				return err
			}
			continue
		}
		if err := c.put(full, child, true); err != nil {
			return err
		}
	}
	return nil
}

// write writes the changed nodes, with the directories above them unchanged, so that the layer can
// be applied without the layers below.
func (c *changer) write(w io.Writer) error {
	all := maps.Clone(c.changed)
	for full := range c.changed {
		for dir := path.Dir(full); dir != "/"; dir = path.Dir(dir) {
			if all[dir] != nil {
				break
			}
			all[dir] = c.tree.lookup(dir)
		}
	}
	out := bufio.NewWriterSize(w, 256<<10)
	tw := tar.NewWriter(out)
	names := make(map[*node]string)
	for _, full := range slices.Sorted(maps.Keys(all)) {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if full == "/" {
			continue
		}
		n := all[full]
		if c.tree.lookup(full) != n {
			continue // replaced by another source of the same COPY
		}
		if err := c.entry(tw, full[1:], n, names); err != nil {
			return fmt.Errorf("write %q: %w", clip(full), err)
		}
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("write the layer: %w", err)
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write the layer: %w", err)
	}
	return nil
}

func (c *changer) entry(tw *tar.Writer, name string, n *node, names map[*node]string) error {
	// Whole seconds: not every reader supports fractions.
	hdr := &tar.Header{
		Typeflag: n.kind, Name: name, Mode: n.mode, Uid: n.uid, Gid: n.gid, Linkname: n.link,
		ModTime: c.stamp.of(n.mtime).Truncate(time.Second), PAXRecords: n.xattrs, Format: tar.FormatPAX,
	}
	switch n.kind {
	case tar.TypeDir:
		hdr.Name += "/"
	case tar.TypeReg:
		if first, ok := names[n]; ok {
			hdr.Typeflag, hdr.Linkname, hdr.PAXRecords = tar.TypeLink, first, nil
			return tw.WriteHeader(hdr)
		}
		names[n] = name
		hdr.Size = n.size
	}
	if err := tw.WriteHeader(hdr); err != nil {
		return err
	}
	if n.kind != tar.TypeReg {
		return nil
	}
	r, err := n.open()
	if err != nil {
		return err
	}
	got, err := io.Copy(tw, r)
	if err == nil && got != n.size {
		err = io.ErrUnexpectedEOF
	}
	return err
}
