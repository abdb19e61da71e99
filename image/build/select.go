package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Selection holds the sources of a COPY: files with their names in the destination, and directories
// whose content is copied.
type Selection struct {
	copy  *Copy
	items []item
}

type item struct {
	name string // of a file in the destination directory
	node *node
}

// Select finds the sources of a COPY or ADD in t, the context or the root of a stage. When it
// returns, their contents are in the spool and their digests known.
func (t *Tree) Select(ctx context.Context, c *Copy, spool *Spool) (*Selection, error) {
	s := &Selection{copy: c}
	where := "the context (or .dockerignore leaves it out)"
	if c.From != "" {
		where = c.From
	}
	for _, source := range c.Sources {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		found, wild, err := t.match(ctx, source)
		if cause := ctx.Err(); cause != nil {
			return nil, cause
		}
		if err != nil {
			return nil, invalidf("%q: %w", clip(source), err)
		}
		if len(found) == 0 && !wild {
			return nil, invalidf("%q: no such file or directory in %s", clip(source), clip(where))
		}
		if s.items = append(s.items, found...); len(s.items) > t.pool.limits.Entries {
			return nil, invalidf("%q: the sources are more than %d files", clip(source), t.pool.limits.Entries)
		}
	}
	for _, f := range c.Inline {
		// A fixed time: the Dockerfile's text is all their content.
		s.items = append(s.items, item{f.Name, &node{
			kind: tar.TypeReg, mode: 0o644, size: int64(len(f.Data)), content: content{inline: f.Data}, mtime: time.Unix(0, 0),
		}})
	}
	if len(s.items) > 1 && !strings.HasSuffix(c.Dest, "/") {
		return nil, invalidf("%d sources match: the destination %q must be a directory, with a slash at its end", len(s.items), clip(c.Dest))
	}
	// A tree may be named any number of times, by itself or through links. Each copy counts.
	files, seen, count := []*node(nil), make(map[*node]bool), 0
	for _, i := range s.items {
		err := walk("", i.node, func(_ string, n *node) error {
			if count++; count > t.pool.limits.Entries {
				return invalidf("the sources are more than %d files", t.pool.limits.Entries)
			}
			if n.kind == tar.TypeReg && !seen[n] {
				seen[n] = true
				files = append(files, n)
			}
			return ctx.Err()
		})
		if err != nil {
			return nil, err
		}
	}
	return s, spool.fetch(ctx, files)
}

const wildcards = `*?[\`

// match finds the files of a source. Links are followed within the tree up to the first wildcard,
// and at the end. As with BuildKit a pattern does not look through links: with links to ".", its
// matches would be endless.
func (t *Tree) match(ctx context.Context, source string) (found []item, wild bool, err error) {
	clean := path.Clean("/" + source)
	if !strings.ContainsAny(source, wildcards) {
		full, err := t.resolve(clean, true, false)
		if err == errAbsent { //nolint:errorlint // it is never wrapped
			return nil, false, nil
		}
		if err != nil {
			return nil, false, err
		}
		return []item{{path.Base(clean), t.lookup(full)}}, false, nil
	}
	parts := strings.Split(clean[1:], "/")
	first := slices.IndexFunc(parts, func(p string) bool { return strings.ContainsAny(p, wildcards) })
	for _, part := range parts {
		if _, err := path.Match(part, ""); err != nil {
			return nil, true, fmt.Errorf("the pattern cannot be read: %w", err)
		}
	}
	if first < 0 {
		first = len(parts) // a ".." has undone the wildcard
	}
	start, err := t.resolve("/"+strings.Join(parts[:first], "/"), true, false)
	if err != nil {
		return nil, true, nil //nolint:nilerr // an unreadable directory has no match
	}
	type match struct {
		name string // path in the tree
		node *node
	}
	matches := []match{{start, t.lookup(start)}}
	for _, part := range parts[first:] {
		var next []match
		for _, dir := range matches {
			if err := ctx.Err(); err != nil {
				return nil, true, err
			}
			if !strings.ContainsAny(part, wildcards) {
				if n := dir.node.children[part]; n != nil {
					next = append(next, match{path.Join(dir.name, part), n})
				}
				continue
			}
			for _, name := range dir.node.sorted() {
				if ok, _ := path.Match(part, name); ok { // the pattern was checked above
					next = append(next, match{path.Join(dir.name, name), dir.node.children[name]})
				}
			}
		}
		matches = next
	}
	for _, m := range matches {
		if err := ctx.Err(); err != nil {
			return nil, true, err
		}
		full, err := t.resolve(m.name, true, false)
		if err != nil {
			continue // a link to nowhere
		}
		found = append(found, item{path.Base(m.name), t.lookup(full)})
	}
	return found, true, nil
}

// A key is the digest of all inputs of a step: the layers below it, and the step itself. Times are
// left out, so that a fresh checkout is an equal context.
func key(parent, epoch string, v any) string {
	data, err := json.Marshal(struct {
		Version int    `json:"version"` // to be increased when an equal step has another result than before
		Parent  string `json:"parent"`  // chain id
		Epoch   string `json:"epoch,omitempty"`
		Step    any    `json:"step"`
	}{2, parent, epoch, v})
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// Key returns the step's key on a stage with the chain id parent. Sources has the keys of the files
// of its binds. What caches and secrets hold is in no key.
func (r *Run) Key(parent, epoch string, sources []string) string {
	inputs := map[string]any{
		"run": raw(r.Argv), "env": raw(r.Env), "cwd": []byte(r.Cwd), "user": []byte(r.User), "network": r.Network, "script": []byte(r.Script),
	}
	if len(r.Mounts) > 0 {
		inputs["mounts"], inputs["sources"] = r.Mounts, sources
	}
	return key(parent, epoch, inputs)
}

// Key returns the step's key on a stage with the chain id parent.
func (d *Dir) Key(parent, epoch string) string {
	return key(parent, epoch, map[string]any{"dir": []byte(d.Path), "user": []byte(d.User)})
}

// Key returns the step's key on a stage with the chain id parent.
func (s *Selection) Key(parent, epoch string) string {
	c := s.copy
	hash := sha256.New()
	enc := json.NewEncoder(hash)
	first := make(map[*node]int) // hard links differ from files of equal content
	for i, it := range s.items {
		_ = walk("", it.node, func(name string, n *node) error {
			at, ok := first[n]
			if !ok {
				at = len(first)
				first[n] = at
			}
			var attrs []string
			for _, k := range slices.Sorted(maps.Keys(n.xattrs)) {
				attrs = append(attrs, k, n.xattrs[k])
			}
			return enc.Encode([]any{i, at, []byte(it.name), []byte(name), n.kind, n.mode, n.uid, n.gid, n.size, []byte(n.link), n.digest, raw(attrs)})
		}) // a hash never fails
	}
	return key(parent, epoch, map[string]any{
		"copy": hex.EncodeToString(hash.Sum(nil)), "add": c.Add, "unpack": c.Unpack, "dest": []byte(c.Dest), "chown": []byte(c.Chown), "chmod": c.Chmod,
		"from": c.From != "",
	})
}

// Key returns the key of a COPY from other layers, by the layers instead of the files, which saves
// reading them if nothing changed.
func (c *Copy) Key(parent, epoch string, layers []string) string {
	return key(parent, epoch, map[string]any{
		"layers": layers, "sources": raw(c.Sources), "dest": []byte(c.Dest), "chown": []byte(c.Chown), "chmod": c.Chmod, "inline": len(c.Inline),
	})
}

// raw keeps words distinct that are not valid text, which JSON would make equal.
func raw(words []string) [][]byte {
	out := make([][]byte, len(words))
	for i, w := range words {
		out[i] = []byte(w)
	}
	return out
}

// owner is the owner of copied files; nil keeps the source's.
type owner struct{ uid, gid int }

// account finds the ids of "user", "uid" or either with ":group" in the files of t, for --chown and
// USER.
func (t *Tree) account(ctx context.Context, spec string, spool *Spool) (*owner, error) {
	name, group, grouped := strings.Cut(spec, ":")
	o := &owner{}
	id, err := strconv.ParseUint(name, 10, 31)
	switch {
	case err == nil:
		o.uid, o.gid = int(id), int(id)
	case name == "" || name == "root" && !grouped:
	default:
		fields, err := t.database(ctx, "/etc/passwd", name, 4, spool)
		if err != nil {
			return nil, err
		}
		if o.uid, o.gid, err = idsOf(fields[2], fields[3]); err != nil {
			return nil, invalidf("user %q: %w", clip(name), err)
		}
	}
	if grouped {
		if group == "" {
			return nil, invalidf("%q: the group is empty; has a variable no value?", clip(spec))
		}
		id, err := strconv.ParseUint(group, 10, 31)
		if err == nil {
			o.gid = int(id)
		} else {
			fields, err := t.database(ctx, "/etc/group", group, 3, spool)
			if err != nil {
				return nil, err
			}
			if _, o.gid, err = idsOf("0", fields[2]); err != nil {
				return nil, invalidf("group %q: %w", clip(group), err)
			}
		}
	}
	if o.uid > maxID || o.gid > maxID {
		return nil, invalidf("%q is %d:%d: the ids of a sandbox end at %d", clip(spec), o.uid, o.gid, maxID)
	}
	return o, nil
}

const (
	maxID       = 65535 // highest id in a sandbox
	maxDatabase = 1 << 20
)

// idsOf accepts plain numbers only: a lax parser would turn other text into 0, root.
func idsOf(uid, gid string) (int, int, error) {
	u, err := strconv.ParseUint(uid, 10, 31)
	if err != nil {
		return 0, 0, fmt.Errorf("the id %q is not a number", clip(uid))
	}
	g, err := strconv.ParseUint(gid, 10, 31)
	if err != nil {
		return 0, 0, fmt.Errorf("the id %q is not a number", clip(gid))
	}
	return int(u), int(g), nil
}

// database finds the line of an account.
func (t *Tree) database(ctx context.Context, file, name string, fields int, spool *Spool) ([]string, error) {
	none := invalidf("%q is not in %s of the image", clip(name), file)
	n, err := t.file(file)
	if err != nil {
		return nil, none
	}
	if n.size > maxDatabase {
		return nil, invalidf("%s of the image has %d bytes, %d are allowed", file, n.size, maxDatabase)
	}
	if err := spool.fetch(ctx, []*node{n}); err != nil {
		return nil, err
	}
	r, err := n.open()
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("read %s of the image: %w", file, err)
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		if f := strings.Split(line, ":"); len(f) >= fields && f[0] == name {
			return f, nil
		}
	}
	return nil, none
}
