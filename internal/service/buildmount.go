package service

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/build"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// The mounts of a RUN are made before its program starts, through the sandbox's init: files of
// binds and caches are extracted at their targets, and a secret is a file in memory with a link to
// it. The layer of the step has nothing at or below a target, so that it is the one of a step in
// which all of this was mounted.

// secretDir holds secrets in a sandbox: a file system in memory that every sandbox has.
const secretDir = "/dev/shm/.secrets" //nolint:gosec // G101: a directory

// runMounts are the mounts of one RUN in its sandbox.
type runMounts struct {
	b     *builder
	id    string // of the sandbox
	run   *build.Run
	at    map[*build.Mount]string // where each target leads to
	cache map[*build.Mount]*cacheLease
	was   map[*build.Mount][sha256.Size]byte // digests of read-only binds
	env   []string                           // secrets as variables
	made  []string                           // directories above targets that were missing
}

// sourceKeys returns a key for the files of each bind of a RUN, for the step's own key.
func (b *builder) sourceKeys(ctx context.Context, stage *build.Stage, run *build.Run) ([]string, error) {
	var keys []string
	for i := range run.Mounts {
		m := &run.Mounts[i]
		if m.Type != build.MountBind {
			continue
		}
		files := m.Files()
		other, err := b.from(ctx, stage, files)
		if err != nil {
			return nil, err
		}
		if other != nil {
			keys = append(keys, files.Key("", "", other.chains()))
			continue
		}
		found, err := b.context.Select(ctx, files, b.spool)
		if err != nil {
			return nil, fmt.Errorf("RUN --mount: %w", err)
		}
		keys = append(keys, found.Key("", ""))
	}
	return keys, nil
}

// scratchOf returns the file systems in memory of a RUN.
func scratchOf(run *build.Run) []api.Scratch {
	var all []api.Scratch
	for _, m := range run.Mounts {
		if m.Type == build.MountTmpfs {
			all = append(all, api.Scratch{Path: m.Target, Size: m.Size})
		}
	}
	return all
}

// leaseCaches takes the caches of a RUN. They come in one order, so that no two steps wait for one
// another.
func (b *builder) leaseCaches(ctx context.Context, run *build.Run) (_ map[*build.Mount]*cacheLease, release func(), err error) {
	leases := make(map[*build.Mount]*cacheLease)
	release = func() {
		for _, l := range leases {
			l.release()
		}
	}
	var mounts []*build.Mount
	for i := range run.Mounts {
		if m := &run.Mounts[i]; m.Type == build.MountCache {
			mounts = append(mounts, m)
		}
	}
	slices.SortFunc(mounts, func(x, y *build.Mount) int { return cmp.Compare(x.ID, y.ID) })
	for i, m := range mounts {
		if i > 0 && mounts[i-1].ID == m.ID {
			release()
			return nil, nil, class.Invalidf("RUN: the caches at %s and %s have one id, %q; give them two", mounts[i-1].Target, m.Target, class.Clip(m.ID))
		}
		if leases[m], err = b.s.caches.lease(ctx, b.s.caller.Tenant, m.ID, m.Sharing); err != nil {
			delete(leases, m)
			release()
			return nil, nil, err
		}
	}
	return leases, release, nil
}

// mount makes the mounts of a RUN in its sandbox.
func (b *builder) mount(ctx context.Context, stage *build.Stage, id string, run *build.Run, caches map[*build.Mount]*cacheLease) (*runMounts, error) {
	r := &runMounts{b: b, id: id, run: run, cache: caches, at: make(map[*build.Mount]string), was: make(map[*build.Mount][sha256.Size]byte)}
	for i := range run.Mounts {
		m := &run.Mounts[i]
		if err := r.add(ctx, stage, m, i); err != nil {
			return nil, fmt.Errorf("RUN --mount=type=%s: %w", m.Type, err)
		}
	}
	for m, at := range r.at { // when all are there: one may lie in another
		if m.Type == build.MountBind && m.ReadOnly {
			sum, err := r.digest(ctx, at)
			if err != nil {
				return nil, err
			}
			r.was[m] = sum
		}
	}
	return r, r.noteMade(ctx)
}

func (r *runMounts) add(ctx context.Context, stage *build.Stage, m *build.Mount, number int) error {
	secret, given := r.b.opts.Secrets[m.ID]
	if m.Type == build.MountSecret {
		switch {
		case !given && m.Required:
			return class.Invalidf("the secret %q is required, and the build was given none of this id; as in: sandboxd build --secret id=%s,src=FILE", class.Clip(m.ID), class.Clip(m.ID))
		case !given:
			return nil
		case m.Env != "" && bytes.IndexByte(secret, 0) >= 0:
			return class.Invalidf("the secret %q has a NUL, which no variable can hold", class.Clip(m.ID))
		case m.Env != "":
			r.env = append(r.env, m.Env+"="+string(secret))
		}
	}
	if m.Target == "" {
		return nil
	}
	at, err := r.resolve(ctx, m.Target)
	if err != nil {
		return err
	}
	r.at[m] = at
	if m.Type == build.MountTmpfs {
		return nil // it is there since the sandbox is
	}
	err = r.b.s.RemoveFile(ctx, r.id, at, true)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("hide what is at %s: %w", at, err)
	}
	owner := WriteOptions{Mode: fs.FileMode(m.Mode), User: fmt.Sprintf("%d:%d", m.UID, m.GID)} //nolint:gosec // G115: permissions
	switch m.Type {
	case build.MountBind:
		return r.bind(ctx, stage, m, at)
	case build.MountCache:
		if err := r.b.s.Mkdir(ctx, r.id, path.Dir(at), true, WriteOptions{User: "0:0"}); err != nil {
			return err
		}
		if err := r.b.s.Mkdir(ctx, r.id, at, false, owner); err != nil {
			return err
		}
		return r.fill(ctx, m, at)
	}
	if err := r.b.s.Mkdir(ctx, r.id, secretDir, true, WriteOptions{User: "0:0"}); err != nil {
		return err
	}
	file := fmt.Sprintf("%s/%d", secretDir, number)
	if err := r.b.s.WriteFile(ctx, r.id, file, owner, bytes.NewReader(secret)); err != nil {
		return err
	}
	var link bytes.Buffer
	w := tar.NewWriter(&link)
	if err := errors.Join(w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: at[1:], Linkname: file, Mode: 0o777}), w.Close()); err != nil {
		return err
	}
	return r.b.s.ArchiveIn(ctx, r.id, "/", WriteOptions{User: "0:0"}, &link)
}

// bind extracts the files of a bind.
func (r *runMounts) bind(ctx context.Context, stage *build.Stage, m *build.Mount, at string) error {
	files := m.Files()
	files.Dest = at
	tree := r.b.context
	other, err := r.b.from(ctx, stage, files)
	if err == nil && other != nil {
		tree, err = r.b.tree(ctx, other)
	}
	if err != nil {
		return err
	}
	found, err := tree.Select(ctx, files, r.b.spool)
	if err != nil {
		return err
	}
	root := r.b.context.New()
	defer root.Drop()
	change, err := root.Copy(ctx, found, r.b.spool, r.b.stamp)
	if err != nil {
		return err
	}
	if change == nil {
		return r.b.s.Mkdir(ctx, r.id, at, true, WriteOptions{User: "0:0"})
	}
	pr, pw := io.Pipe()
	written := make(chan struct{})
	go func() {
		defer close(written)
		_ = pw.CloseWithError(change.Write(pw))
	}()
	err = r.b.s.ArchiveIn(ctx, r.id, "/", WriteOptions{User: "0:0", Owners: true}, pr)
	_ = pr.Close() // ends the writer
	<-written
	return err
}

// fill extracts the archive of a cache. One that cannot be extracted is dropped, and the cache is
// empty.
func (r *runMounts) fill(ctx context.Context, m *build.Mount, at string) error {
	l := r.cache[m]
	f, err := l.open()
	if err != nil || f == nil {
		return err
	}
	defer f.Close() // only read
	err = r.b.s.ArchiveIn(ctx, r.id, at, WriteOptions{User: "0:0", Owners: true}, f)
	if err == nil || ctx.Err() != nil {
		return err
	}
	r.b.s.log.Warn("the cache of a build cannot be extracted, and is dropped", "id", m.ID, "error", err)
	err = errors.Join(l.drop(), r.b.s.RemoveFile(ctx, r.id, at, true))
	owner := WriteOptions{Mode: fs.FileMode(m.Mode), User: fmt.Sprintf("%d:%d", m.UID, m.GID)} //nolint:gosec // G115: permissions
	return errors.Join(err, r.b.s.Mkdir(ctx, r.id, at, false, owner))
}

// ended keeps the caches as the program has left them, and refuses a change of a read-only bind.
func (r *runMounts) ended(ctx context.Context, failed bool) error {
	for m, l := range r.cache {
		at := r.at[m]
		if e, err := r.b.s.Stat(ctx, r.id, at, false); err == nil && e.Type != api.TypeDirectory || errors.Is(err, fs.ErrNotExist) {
			if l.mine {
				err = l.drop() // the program has removed it
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			continue
		}
		err := l.save(func(w io.Writer) error { return r.b.s.ArchiveOut(ctx, r.id, at, w) })
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			r.b.s.log.Warn("the cache of a build is not kept", "id", m.ID, "error", err)
		}
	}
	if err := r.b.s.caches.limit(maxCaches); err != nil {
		r.b.s.log.Warn("the limit of the caches of builds could not be kept to", "error", err)
	}
	if failed {
		return nil
	}
	for m, was := range r.was {
		now, err := r.digest(ctx, r.at[m])
		if err != nil {
			return err
		}
		if now != was {
			return class.Mark(class.ErrBuild, fmt.Errorf("RUN has changed files in the read-only mount at %s; mount it with rw, whose changes are dropped after the step", m.Target))
		}
	}
	return nil
}

// digest returns a digest of the files at a path, but for other mounts in there and times of
// directories, which change with these.
func (r *runMounts) digest(ctx context.Context, at string) (sum [sha256.Size]byte, err error) {
	pr, pw := io.Pipe()
	defer pr.Close() // ends the writer
	go func() { _ = pw.CloseWithError(r.b.s.ArchiveOut(ctx, r.id, at, pw)) }()
	hash := sha256.New()
	in := tar.NewReader(pr)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return sum, fmt.Errorf("read the mount at %s: %w", at, err)
		}
		full := path.Join(at, h.Name) //nolint:gosec // G305: a name, and no file
		if r.inside(full, at) {
			continue
		}
		time := h.ModTime.UnixNano()
		if h.Typeflag == tar.TypeDir {
			time = 0
		}
		fmt.Fprintf(hash, "%q %d %q %o %d %d %d %d\n", h.Name, h.Typeflag, h.Linkname, h.Mode, h.Uid, h.Gid, h.Size, time)
		if _, err := io.Copy(hash, in); err != nil { //nolint:gosec // G110: the stream has no compression
			return sum, fmt.Errorf("read the mount at %s: %w", at, err)
		}
	}
	_, err = io.Copy(io.Discard, pr) // what follows the end of the archive
	return [sha256.Size]byte(hash.Sum(nil)), err
}

// inside reports whether a path belongs to a mount other than the one at a place.
func (r *runMounts) inside(full, but string) bool {
	for _, at := range r.at {
		if at != but && within(full, at) && within(at, but) {
			return true
		}
	}
	return false
}

// resolve follows the links of the image on the way to a path, of which a part may be missing.
func (r *runMounts) resolve(ctx context.Context, target string) (string, error) {
	const most = 40 // links, as in the kernel
	done, rest, links := "/", strings.Split(target[1:], "/"), 0
	for len(rest) > 0 {
		part := rest[0]
		rest = rest[1:]
		next := path.Join(done, part)
		e, err := r.b.s.Stat(ctx, r.id, next, false)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			done, rest = path.Join(append([]string{next}, rest...)...), nil
		case err != nil:
			return "", err
		case e.Type == api.TypeSymlink && links == most:
			return "", class.Invalidf("target %s: too many links on the way", target)
		case e.Type == api.TypeSymlink:
			links++
			rest = append(strings.Split(strings.Trim(path.Clean(e.Target), "/"), "/"), rest...)
			if path.IsAbs(e.Target) {
				done = "/"
			}
		default:
			done = next
		}
	}
	for _, ours := range []string{"/proc", "/sys", "/dev"} {
		if within(done, ours) || done == "/" || done == "/etc" {
			return "", class.Invalidf("target %s: it leads to %s, where files of sandboxd are", target, done)
		}
	}
	return done, nil
}

// noteMade remembers the directories that were made for the mounts.
func (r *runMounts) noteMade(ctx context.Context) error {
	req, rec, doomed, err := r.b.s.diffRequest(r.id)
	if err != nil {
		return err
	}
	req.Limits = diffLimits(layer.NoLimits())
	ctx, whole := unlessDeleted(ctx, doomed, &rec)
	_, err = r.b.s.differ.ListDiff(ctx, req, func(c api.Change) error {
		if c.Kind == api.Added && c.Type == string(api.TypeDirectory) && !r.covers(c.Path) {
			r.made = append(r.made, c.Path)
		}
		return nil
	})
	return whole(err)
}

// covers reports whether a path is a target or lies below one.
func (r *runMounts) covers(full string) bool {
	for _, at := range r.at {
		if within(full, at) {
			return true
		}
	}
	return slices.Contains(r.tmpfs(), full)
}

func (r *runMounts) tmpfs() []string {
	var all []string
	for m, at := range r.at {
		if m.Type == build.MountTmpfs {
			all = append(all, at)
		}
	}
	return all
}

// writeLayer copies the layer of a step without the mounts, and without directories that were made
// for them and have nothing else.
func (r *runMounts) writeLayer(from io.Reader, to io.Writer) error {
	in, out := tar.NewReader(from), tar.NewWriter(to)
	var held []*tar.Header // directories that were made, with nothing in them so far
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		full := path.Join("/", h.Name) //nolint:gosec // G305: a name, and no file
		dir, base := path.Split(full)
		hidden := strings.TrimPrefix(base, whiteout)
		if r.covers(full) || hidden != base && r.covers(path.Join(dir, hidden)) {
			continue
		}
		held = slices.DeleteFunc(held, func(d *tar.Header) bool {
			return !within(full, path.Join("/", d.Name)) //nolint:gosec // G305: likewise
		})
		if h.Typeflag == tar.TypeDir && slices.Contains(r.made, full) {
			held = append(held, h)
			continue
		}
		for _, d := range held {
			if err := out.WriteHeader(d); err != nil {
				return err
			}
		}
		held = nil
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(out, in); err != nil { //nolint:gosec // G110: the stream has no compression
			return err
		}
	}
	if _, err := io.Copy(io.Discard, from); err != nil {
		return err
	}
	return out.Close()
}

// whiteout is the prefix of names that stand for deletions in a layer.
const whiteout = ".wh."
