// Package volume keeps the records of volumes: their names, owners and limits. The files are the
// launcher's.
//
// A record is a file of package records. It is there before a file of the volume is, and goes after
// the last one has gone: a crash leaves a volume without files, or a removal that can be repeated.
package volume

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/records"
)

// Classes of errors.
var (
	ErrNotFound = errors.New("no such volume")
	ErrExists   = errors.New("volume exists")
	ErrInUse    = errors.New("volume is in use")
	ErrTooMany  = errors.New("too many volumes")
	ErrNoRoom   = errors.New("no room for the volume")
)

const (
	// maxVolumes is the number of volumes of one tenant.
	maxVolumes = 1024
	// tenantParts is the number of tenants that may have a part of the limit of all volumes each.
	tenantParts = 4
	// defaultParts is the part of that limit that a volume gets which names no size.
	defaultParts = 64
	// perInode is the number of bytes for which a limit on bytes gives one file, minInodes the least
	// number, as for sandboxes (api.Limits.ImpliedInodes).
	perInode  = 8 << 10
	minInodes = 10_000
)

// Record describes a volume.
type Record struct {
	ID        string            `json:"id"` // of its files; random
	Tenant    string            `json:"tenant,omitempty"`
	Name      string            `json:"name"` // unique within the tenant
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at"`
	Size      int64             `json:"size,omitempty"` // maximum in bytes; zero means none
	Inodes    int64             `json:"inodes,omitempty"`
	Anonymous bool              `json:"anonymous,omitempty"` // the name was made up
	Bound     bool              `json:"bound,omitempty"`     // goes with the last sandbox that has it
}

type key struct{ tenant, name string }

type entry struct {
	rec      Record
	holds    int
	removing bool
}

// Store holds the records. Its methods may be called from several goroutines.
type Store struct {
	dir   string
	limit int64 // bytes of all volumes together; zero means none

	mu     sync.Mutex
	byName map[key]*entry
}

// Open reads the records in dir, which it makes. Limit bounds the sizes of all volumes together, in
// bytes; zero means no bound. Records beyond it stay.
func Open(dir string, limit int64) (*Store, error) {
	s := &Store{dir: dir, limit: limit, byName: make(map[key]*entry)}
	err := records.Read(dir, func(id string, rec Record) error {
		k := key{rec.Tenant, rec.Name}
		if rec.ID != id || rec.Name == "" || s.byName[k] != nil {
			return errors.New("its id or name is not its own")
		}
		s.byName[k] = &entry{rec: rec}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open volumes: %w", err)
	}
	return s, nil
}

// newID returns a random id, or the name of an anonymous volume, which looks like Docker's.
func newID(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // since Go 1.24 it never fails
	return hex.EncodeToString(b)
}

// Create makes a volume, held until release is called. Without a name in want, one is made up. If
// the tenant has a volume of the name, it is returned instead, unless want asks for other values.
func (s *Store) Create(want Record) (rec Record, created bool, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if want.Name == "" {
		want.Name, want.Anonymous = newID(32), true
	}
	k := key{want.Tenant, want.Name}
	if e := s.byName[k]; e != nil {
		if err := e.fits(&want); err != nil {
			return Record{}, false, nil, err
		}
		return e.rec.clone(), false, s.hold(e), nil
	}
	if err := s.admit(&want); err != nil {
		return Record{}, false, nil, err
	}
	if want.Inodes == 0 && want.Size > 0 {
		want.Inodes = max(minInodes, want.Size/perInode)
	}
	want.ID, want.CreatedAt = newID(8), time.Now().UTC()
	if err := records.Write(s.dir, want.ID, &want); err != nil {
		return Record{}, false, nil, fmt.Errorf("create volume %s: %w", want.Name, err)
	}
	e := &entry{rec: want.clone()}
	s.byName[k] = e
	return want, true, s.hold(e), nil
}

// fits reports whether an existing volume is one that is asked for.
func (e *entry) fits(want *Record) error {
	switch {
	case e.removing:
		return fmt.Errorf("volume %s is being removed: %w", want.Name, ErrInUse)
	case want.Size != 0 && want.Size != e.rec.Size:
		return fmt.Errorf("volume %s: it is there, and its size is %d, not %d: %w", want.Name, e.rec.Size, want.Size, ErrExists)
	case want.Inodes != 0 && want.Inodes != e.rec.Inodes:
		return fmt.Errorf("volume %s: it is there, and may have %d files, not %d: %w", want.Name, e.rec.Inodes, want.Inodes, ErrExists)
	}
	for name, value := range want.Labels {
		if got, ok := e.rec.Labels[name]; !ok || got != value {
			return fmt.Errorf("volume %s: it is there, and has not the label %s=%s: %w", want.Name, name, value, ErrExists)
		}
	}
	return nil
}

// admit compares the sizes of all volumes with the limit, and fills in the size of one that names
// none. It needs mu. One that goes with its sandbox is not counted: the limits of that hold it.
func (s *Store) admit(want *Record) error {
	number, all, own := 0, int64(0), int64(0)
	for k, e := range s.byName {
		if k.tenant == want.Tenant {
			number++
			own += e.rec.Size
		}
		all += e.rec.Size
	}
	if number >= maxVolumes {
		return fmt.Errorf("volume %s: there are %d, which is the most: %w", want.Name, number, ErrTooMany)
	}
	if s.limit == 0 || want.Bound {
		return nil
	}
	if want.Size == 0 {
		want.Size = max(1, s.limit/defaultParts)
	}
	most := s.limit
	if want.Tenant != "" {
		most = s.limit / tenantParts
	}
	if want.Size > most-own {
		return fmt.Errorf("volume %s of %d MiB: your volumes have %d MiB together, of at most %d: %w", want.Name, mib(want.Size), mib(own), most>>20, ErrNoRoom)
	}
	if want.Size > s.limit-all {
		return fmt.Errorf("volume %s of %d MiB: this daemon has no room for it: %w", want.Name, mib(want.Size), ErrNoRoom) // the sum tells of others
	}
	return nil
}

func mib(bytes int64) int64 { return (bytes + 1<<20 - 1) >> 20 }

// hold needs mu.
func (s *Store) hold(e *entry) (release func()) {
	e.holds++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		e.holds--
	})
}

// Hold returns a volume, which is not removed until release is called.
func (s *Store) Hold(tenant, name string) (rec Record, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byName[key{tenant, name}]
	if e == nil {
		return Record{}, nil, fmt.Errorf("volume %s: %w", name, ErrNotFound)
	}
	if e.removing {
		return Record{}, nil, fmt.Errorf("volume %s is being removed: %w", name, ErrInUse)
	}
	return e.rec.clone(), s.hold(e), nil
}

// Get returns a volume of a tenant.
func (s *Store) Get(tenant, name string) (Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byName[key{tenant, name}]
	if e == nil {
		return Record{}, fmt.Errorf("volume %s: %w", name, ErrNotFound)
	}
	return e.rec.clone(), nil
}

// List returns the volumes of a tenant, by name.
func (s *Store) List(tenant string) []Record {
	return s.list(func(rec *Record) bool { return rec.Tenant == tenant })
}

// All returns the volumes of all tenants.
func (s *Store) All() []Record { return s.list(func(*Record) bool { return true }) }

func (s *Store) list(wanted func(*Record) bool) []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Record
	for _, e := range s.byName {
		if wanted(&e.rec) {
			all = append(all, e.rec.clone())
		}
	}
	slices.SortFunc(all, func(a, b Record) int {
		return strings.Compare(a.Name+"\x00"+a.Tenant, b.Name+"\x00"+b.Tenant)
	})
	return all
}

// Remove removes a volume, unless it is held or files, which is called when nothing can begin to
// hold it any more, fails. Files removes the files.
func (s *Store) Remove(tenant, name string, files func(*Record) error) error {
	s.mu.Lock()
	e := s.byName[key{tenant, name}]
	var err error
	switch {
	case e == nil:
		err = fmt.Errorf("volume %s: %w", name, ErrNotFound)
	case e.removing:
		err = fmt.Errorf("volume %s is being removed: %w", name, ErrInUse)
	case e.holds > 0:
		err = fmt.Errorf("volume %s: another request uses it: %w", name, ErrInUse)
	default:
		e.removing = true
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	err = files(&e.rec)
	if err == nil {
		err = os.Remove(records.Path(s.dir, e.rec.ID))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.removing = false; err != nil {
		return fmt.Errorf("remove volume %s: %w", name, err)
	}
	delete(s.byName, key{tenant, name})
	return nil
}

func (r *Record) clone() Record {
	c := *r
	c.Labels = make(map[string]string, len(r.Labels))
	maps.Copy(c.Labels, r.Labels)
	return c
}
