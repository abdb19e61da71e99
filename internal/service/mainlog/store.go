package mainlog

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// MinFileSize is the smallest size of a file, in bytes: it has room for some records.
const MinFileSize = 256 << 10

// Options configure a [Store].
type Options struct {
	Dir      string       // required
	FileSize int64        // bytes of one file; default 4 MiB, at least [MinFileSize]
	Files    int          // files of one sandbox; default 3
	Limit    int64        // bytes of all logs; default 2 GiB. Files being written may exceed it
	Log      *slog.Logger // required
	// Tenant returns the tenant of a sandbox, and any name of one that does not exist. It is required.
	Tenant func(id string) string
}

// Store has the logs of all sandboxes.
type Store struct {
	opts Options

	trimming sync.Mutex // serializes trim

	mu sync.Mutex
	of map[string]*Log
}

// NewStore returns the logs in a directory, which need not exist yet.
func NewStore(opts Options) *Store {
	opts.FileSize = max(MinFileSize, cmp.Or(opts.FileSize, 4<<20))
	opts.Files = cmp.Or(opts.Files, 3)
	opts.Limit = cmp.Or(opts.Limit, 2<<30)
	return &Store{opts: opts, of: make(map[string]*Log)}
}

// file is a file of a sandbox's log.
type file struct {
	path string
	size int64
	at   time.Time // of the last writing
}

// trim removes files until all logs together have room for one more file of this sandbox within the
// limit. It takes the oldest file of the sandbox with most bytes, the file to come included, of the
// tenant with most bytes; of equals, that with the oldest write. So neither a sandbox nor a tenant
// that writes much evicts a smaller one's. The file being written stays, so that the limit may be
// exceeded by these. Files that cannot be examined or removed do not block writers.
func (s *Store) trim(id string) error {
	s.trimming.Lock()
	defer s.trimming.Unlock()
	sandboxes, err := os.ReadDir(s.opts.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read logs: %w", err)
	}
	var errs []error
	total := s.opts.FileSize
	has, files := map[string]int64{id: s.opts.FileSize}, make(map[string][]file) // of each the oldest first
	tenants := map[string]string{id: s.opts.Tenant(id)}
	held := map[string]int64{tenants[id]: s.opts.FileSize} // by tenant
	for _, sb := range sandboxes {
		all, err := s.filesOf(sb.Name())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		tenants[sb.Name()] = s.opts.Tenant(sb.Name())
		for _, f := range all {
			has[sb.Name()] += f.size
			held[tenants[sb.Name()]] += f.size
			total += f.size
		}
		if s.writing(sb.Name()) {
			last := len(all) - 1
			for last > 0 && all[last].size == 0 { // it does not say where a daemon that comes after a crash is to go on
				last--
			}
			all = all[:max(last, 0)]
		}
		if len(all) > 0 {
			files[sb.Name()] = all
		}
	}
	for total > s.opts.Limit && len(files) > 0 {
		most := ""
		for of := range files {
			if most == "" {
				most = of
				continue
			}
			order := cmp.Or(cmp.Compare(held[tenants[of]], held[tenants[most]]), cmp.Compare(has[of], has[most]), files[most][0].at.Compare(files[of][0].at))
			if order > 0 {
				most = of
			}
		}
		f := files[most][0]
		if files[most] = files[most][1:]; len(files[most]) == 0 {
			delete(files, most)
		}
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove old log: %w", err))
			continue
		}
		has[most] -= f.size
		held[tenants[most]] -= f.size
		total -= f.size
	}
	return errors.Join(errs...)
}

// filesOf returns the files of the log of a sandbox, in order.
func (s *Store) filesOf(id string) (files []file, err error) {
	l := &Log{dir: filepath.Join(s.opts.Dir, id)}
	seqs, err := l.segments()
	for _, seq := range seqs {
		fi, err := os.Lstat(l.path(seq))
		if errors.Is(err, fs.ErrNotExist) {
			continue // its sandbox was deleted, or it was the oldest
		} else if err != nil {
			return nil, fmt.Errorf("look at log: %w", err)
		}
		files = append(files, file{l.path(seq), fi.Size(), fi.ModTime()})
	}
	return files, err
}

// Usage returns the number of the files of a sandbox's log, and their bytes.
func (s *Store) Usage(id string) (files int, bytes int64, err error) {
	all, err := s.filesOf(id)
	for _, f := range all {
		bytes += f.size
	}
	return len(all), bytes, err
}

// writing reports whether a main process of the sandbox writes to its log, or will.
func (s *Store) writing(id string) bool {
	s.mu.Lock()
	l := s.of[id]
	s.mu.Unlock()
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writers > 0
}

// Of returns the log of a sandbox, whether or not there is anything in it.
func (s *Store) Of(id string) *Log {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.of[id]
	if l == nil {
		l = &Log{store: s, dir: filepath.Join(s.opts.Dir, id)}
		s.of[id] = l
	}
	return l
}

// Remove removes the log of a deleted sandbox. Of one that [Store.Of] was never called for there is
// none.
func (s *Store) Remove(id string) error {
	s.mu.Lock()
	l := s.of[id]
	delete(s.of, id)
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.removed = true
	l.wake()
	if err := os.RemoveAll(filepath.Join(s.opts.Dir, id)); err != nil {
		return fmt.Errorf("remove log of sandbox %s: %w", id, err)
	}
	return nil
}

// Sweep removes the logs of sandboxes that are no more, and learns which have one. It is called
// before a sandbox is deleted.
func (s *Store) Sweep(exists func(id string) bool) error {
	if err := os.MkdirAll(s.opts.Dir, 0o700); err != nil {
		return fmt.Errorf("make directory of logs: %w", err)
	}
	entries, err := os.ReadDir(s.opts.Dir)
	if err != nil {
		return fmt.Errorf("read logs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		s.Of(e.Name())
		if !exists(e.Name()) {
			errs = append(errs, s.Remove(e.Name()))
		}
	}
	return errors.Join(errs...)
}
