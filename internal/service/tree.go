package service

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
)

const (
	// maxEntries is how many entries a buffered list has at most, and maxEntryBytes how many bytes
	// their names may have, of which JSON can make six times as many. A streaming list ends after
	// maxStreamed.
	maxEntries    = 10_000
	maxEntryBytes = 3 << 20
	maxStreamed   = 1_000_000
)

// ListOptions say what of a directory is listed.
type ListOptions struct {
	Depth int // 1 to 200: how many levels
	Limit int // of entries; 0: as many as there can be
}

// Stat describes the file at path, following a link in the last place if asked.
func (s *API) Stat(ctx context.Context, ref, path string, follow bool) (api.FileEntry, error) {
	if err := validatePath("path", path); err != nil {
		return api.FileEntry{}, err
	}
	s, ref, done, err := s.reader(ctx, ref)
	if err != nil {
		return api.FileEntry{}, err
	}
	defer done()
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return api.FileEntry{}, err
	}
	defer end()
	fi, err := client.Stat(ctx, path, follow)
	if err != nil {
		return api.FileEntry{}, s.fail(ctx, lease, path, err)
	}
	return readAccounts(ctx, client.Open).entry(path, fi), nil
}

// List lists a directory, sorted by path.
func (s *API) List(ctx context.Context, ref, dir string, opts ListOptions) (api.FileList, error) {
	list := api.FileList{Entries: []api.FileEntry{}}
	if opts.Limit == 0 {
		opts.Limit = maxEntries
	}
	if opts.Limit > maxEntries {
		return list, class.Invalidf("limit %d: must be between 1 and %d; a streaming answer has no such limit", opts.Limit, maxEntries)
	}
	room := maxEntryBytes
	var err error
	list.More, err = s.ListEach(ctx, ref, dir, opts, func(e api.FileEntry) error {
		if room -= len(e.Path) + len(e.Target); room < 0 {
			return errEnough
		}
		list.Entries = append(list.Entries, e)
		return nil
	})
	slices.SortFunc(list.Entries, func(a, b api.FileEntry) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), bytes.Compare(a.PathBytes, b.PathBytes))
	})
	return list, err
}

// ListEach calls found for every entry, and reports whether some were left out. Found may end it
// with errEnough.
func (s *API) ListEach(ctx context.Context, ref, dir string, opts ListOptions, found func(api.FileEntry) error) (more bool, err error) {
	if err := validatePath("path", dir); err != nil {
		return false, err
	}
	if opts.Depth < 1 || opts.Depth > guest.MaxListDepth {
		return false, class.Invalidf("depth %d: must be between 1 and %d", opts.Depth, guest.MaxListDepth)
	}
	left := cmp.Or(opts.Limit, maxStreamed)
	if left < 1 || left > maxStreamed {
		return false, class.Invalidf("limit %d: must be between 1 and %d", left, maxStreamed)
	}
	s, ref, done, err := s.reader(ctx, ref)
	if err != nil {
		return false, err
	}
	defer done()
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return false, err
	}
	defer end()
	names := readAccounts(ctx, client.Open)
	more, err = client.List(ctx, dir, opts.Depth, func(e host.Entry) error {
		if left--; left < 0 {
			return errEnough
		}
		entry := names.entry(path.Join(dir, e.Path), e.FileInfo)
		if e.Errno != 0 {
			entry.Error = e.Errno.Error()
		}
		return found(entry)
	})
	if errors.Is(err, errEnough) {
		return true, nil
	}
	if err != nil {
		return false, s.fail(ctx, lease, dir, err)
	}
	return more, nil
}

// accounts are the names of a sandbox's users and groups.
type accounts struct{ users, groups map[uint32]string }

// readAccounts reads the sandbox's names of users. Missing or invalid files are no error: numbers
// remain.
func readAccounts(ctx context.Context, open func(context.Context, string) (*os.File, error)) accounts {
	read := func(path string, last int) map[uint32]string {
		data, err := readDatabase(ctx, path, 2, last, open)
		if err != nil {
			return nil // if init is lost, the request itself says so
		}
		names := make(map[uint32]string)
		for line := range strings.Lines(string(data)) {
			fields := strings.SplitN(line, ":", 4)
			id, err := strconv.ParseUint(strings.TrimSpace(fields[2]), 10, 32)
			if _, ok := names[uint32(id)]; err == nil && !ok && validAccount(fields[0]) {
				names[uint32(id)] = fields[0]
			}
		}
		return names
	}
	return accounts{read("/etc/passwd", 3), read("/etc/group", 2)}
}

// entry is a file as the API shows it.
func (a accounts) entry(path string, fi host.FileInfo) api.FileEntry {
	e := api.FileEntry{
		Size: fi.Size, Mode: octal(fi.Mode), MTime: fi.ModTime.UTC(), Type: typeOf(fi.Mode),
		UID: fi.UID, GID: fi.GID, User: a.users[fi.UID], Group: a.groups[fi.GID],
	}
	e.Path, e.PathBytes = asText(path)
	e.Target, e.TargetBytes = asText(fi.Link)
	return e
}

// asText returns bytes as text, and the bytes themselves if that loses something.
func asText(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return strings.ToValidUTF8(s, "\uFFFD"), []byte(s)
}

// octal is a mode as chmod takes it.
func octal(m fs.FileMode) string {
	bits := uint32(m.Perm())
	for _, b := range []struct {
		mode fs.FileMode
		bit  uint32
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if m&b.mode != 0 {
			bits |= b.bit
		}
	}
	return fmt.Sprintf("%04o", bits)
}

func typeOf(m fs.FileMode) api.FileType {
	switch {
	case m.IsRegular():
		return api.TypeFile
	case m.IsDir():
		return api.TypeDirectory
	case m&fs.ModeSymlink != 0:
		return api.TypeSymlink
	case m&fs.ModeNamedPipe != 0:
		return api.TypeFIFO
	case m&fs.ModeSocket != 0:
		return api.TypeSocket
	case m&fs.ModeCharDevice != 0:
		return api.TypeChar
	}
	return api.TypeBlock
}

// Mkdir makes a directory.
func (s *API) Mkdir(ctx context.Context, ref, path string, parents bool, opts WriteOptions) error {
	if err := opts.validate(path); err != nil {
		return err
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	id, err := owner(ctx, client, &lease.Record, opts.User)
	if err != nil {
		return s.fail(ctx, lease, "/etc/passwd", err)
	}
	if err := client.Mkdir(ctx, path, parents, cmp.Or(opts.Mode, 0o755), id.uid, id.gid); err != nil {
		return s.fail(ctx, lease, path, err)
	}
	return nil
}

// Move renames a file or a directory. Both paths must be in one file system.
func (s *API) Move(ctx context.Context, ref, from, to string, overwrite bool) error {
	if err := errors.Join(validatePath("from", from), validatePath("to", to)); err != nil {
		return err
	}
	if path.Clean(from) == path.Clean(to) {
		return class.Invalidf("%q: from and to are the same", from)
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	if err := client.Move(ctx, from, to, overwrite); err != nil {
		about := from
		if ge, ok := errors.AsType[*guest.Error](err); ok && ge.Path != "" {
			about = ge.Path // one of the two, or the directory that it would be in
		}
		return s.fail(ctx, lease, about, err)
	}
	return nil
}

// RemoveFile removes a file, a link or an empty directory; a whole tree if asked.
func (s *API) RemoveFile(ctx context.Context, ref, path string, recursive bool) error {
	if err := validatePath("path", path); err != nil {
		return err
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	if err := client.Remove(ctx, path, recursive); err != nil {
		return s.fail(ctx, lease, path, err)
	}
	return nil
}

// Watch emits changes at path, and below it if recursive, until the path is gone, ctx ends or emit
// fails. Watching is no use of the sandbox: its idle time goes on.
func (s *API) Watch(ctx context.Context, ref, dir string, recursive bool, emit func(api.FileChange) error) error {
	if err := validatePath("path", dir); err != nil {
		return err
	}
	lease, err := s.begin(ref)
	if err != nil {
		return err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	err = guests.Of(lease).Watch(ctx, dir, recursive, func() error {
		lease.End()
		ready := api.FileChange{Kind: api.WatchReady}
		ready.Path, ready.PathBytes = asText(dir)
		return emit(ready)
	}, func(c host.Change) error {
		return emit(changeOf(dir, c))
	})
	if err == nil {
		return nil
	}
	return s.fail(ctx, lease, dir, err)
}

// changeOf is a change as the API shows it.
func changeOf(dir string, c host.Change) api.FileChange {
	change := api.FileChange{Kind: api.FileChangeKind(c.Kind)} // they are the same words
	if c.Dir {
		change.Type = api.TypeDirectory
	}
	if c.Kind == guest.ChangeMoved {
		change.From, change.FromBytes = asText(path.Join(dir, c.Path))
		change.To, change.ToBytes = asText(path.Join(dir, c.To))
	} else {
		change.Path, change.PathBytes = asText(path.Join(dir, c.Path))
	}
	return change
}
