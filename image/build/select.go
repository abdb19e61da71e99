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

// Selection is what a COPY takes: files by the names that they get, and directories whose content is taken.
type Selection struct {
	copy  *Copy
	items []item
}

type item struct {
	name string // of a file in the directory that it is copied into
	node *node
}

// Select finds the sources of a COPY or ADD in t, the context or the root of a stage, and has their contents at hand and
// their digests known when it returns.
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
		// Time stands still in them: what the Dockerfile says is all that there is to them.
		s.items = append(s.items, item{f.Name, &node{
			kind: tar.TypeReg, mode: 0o644, size: int64(len(f.Data)), content: content{inline: f.Data}, mtime: time.Unix(0, 0),
		}})
	}
	if len(s.items) > 1 && !strings.HasSuffix(c.Dest, "/") {
		return nil, invalidf("%d sources match: the destination %q must be a directory, with a slash at its end", len(s.items), clip(c.Dest))
	}
	// A tree may be named any number of times, by itself or through links. What is copied is counted as often.
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

// match finds what a source means. Links are followed within the tree on the way to the first wildcard, and at the end;
// as with BuildKit a pattern does not look through them: with links to ".", its matches would be without number.
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
		first = len(parts) // the wildcard was taken back by a ".."
	}
	start, err := t.resolve("/"+strings.Join(parts[:first], "/"), true, false)
	if err != nil {
		return nil, true, nil //nolint:nilerr // it does not match then
	}
	type match struct {
		name string // its path in the tree
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
				if ok, _ := path.Match(part, name); ok { // it was read above
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

// A key is the digest of all that a step's result follows from: what it was made of, and what is done to that. Times are
// left out, so that a fresh checkout is the same context.
func key(parent, epoch string, v any) string {
	data, err := json.Marshal(struct {
		Version int    `json:"version"` // to be raised when the same step makes something else than before
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

// Key is the step's, on a stage with the chain id parent.
func (r *Run) Key(parent, epoch string) string {
	return key(parent, epoch, map[string]any{
		"run": raw(r.Argv), "env": raw(r.Env), "cwd": []byte(r.Cwd), "user": []byte(r.User), "network": r.Network, "script": []byte(r.Script),
	})
}

// Key is the step's, on a stage with the chain id parent.
func (d *Dir) Key(parent, epoch string) string {
	return key(parent, epoch, map[string]any{"dir": []byte(d.Path), "user": []byte(d.User)})
}

// Key is the step's, on a stage with the chain id parent.
func (s *Selection) Key(parent, epoch string) string {
	c := s.copy
	hash := sha256.New()
	enc := json.NewEncoder(hash)
	first := make(map[*node]int) // names of one file are not files of the same content
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
		}) // a hash takes everything
	}
	return key(parent, epoch, map[string]any{
		"copy": hex.EncodeToString(hash.Sum(nil)), "add": c.Add, "unpack": c.Unpack, "dest": []byte(c.Dest), "chown": []byte(c.Chown), "chmod": c.Chmod,
		"from": c.From != "",
	})
}

// Key names a COPY from other layers by these instead of by the files, which saves reading them where nothing changed.
func (c *Copy) Key(parent, epoch string, layers []string) string {
	return key(parent, epoch, map[string]any{
		"layers": layers, "sources": raw(c.Sources), "dest": []byte(c.Dest), "chown": []byte(c.Chown), "chmod": c.Chmod, "inline": len(c.Inline),
	})
}

// raw keeps words that are no text apart, which JSON would make the same.
func raw(words []string) [][]byte {
	out := make([][]byte, len(words))
	for i, w := range words {
		out[i] = []byte(w)
	}
	return out
}

// owner is whom copied files belong to; nil: whom they belonged to.
type owner struct{ uid, gid int }

// account finds the ids of "user", "uid" or either with ":group" in the files of t, as --chown and USER have them.
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
	maxID       = 65535 // what a sandbox maps
	maxDatabase = 1 << 20
)

// idsOf takes plain numbers only: what else is taken for 0 is root.
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
