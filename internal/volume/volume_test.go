package volume

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T, dir string, limit int64) *Store {
	t.Helper()
	s, err := Open(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func create(t *testing.T, s *Store, want Record) Record {
	t.Helper()
	rec, created, release, err := s.Create(want)
	if err != nil || !created {
		t.Fatalf("create %+v: %v, %v", want, created, err)
	}
	release()
	return rec
}

// Records are there for the next store, a half written one is not, and a damaged one is an error.
func TestRecordsStay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volumes")
	s := open(t, dir, 0)
	one := create(t, s, Record{Name: "one", Labels: map[string]string{"a": "b"}, Size: 1 << 30})
	two := create(t, s, Record{Tenant: "7", Name: "one", Bound: true})
	none := create(t, s, Record{})
	if one.Inodes != 1<<17 || one.ID == two.ID || !none.Anonymous || len(none.Name) != 64 {
		t.Errorf("%+v, %+v, %+v", one, two, none)
	}
	if err := os.WriteFile(filepath.Join(dir, "new-1"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, 0)
	if got, err := s.Get("", "one"); err != nil || !cmp.Equal(got, one) {
		t.Errorf("%v, %s", err, cmp.Diff(one, got))
	}
	if all := s.All(); len(all) != 3 || len(s.List("7")) != 1 || len(s.List("8")) != 0 {
		t.Errorf("%+v", all)
	}
	if err := s.Remove("7", "one", func(rec *Record) error {
		if rec.ID != two.ID {
			t.Errorf("removed %+v", rec)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, 0)
	if _, err := s.Get("7", "one"); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed: %v", err)
	}
	if _, err := s.Get("", "one"); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad.json"), []byte(`{"id":"other","name":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, 0); err == nil {
		t.Error("a record with another's id was read")
	}
}

// A volume of the name is returned if it is like the one that is asked for.
func TestCreateTwice(t *testing.T) {
	s := open(t, t.TempDir(), 0)
	first := create(t, s, Record{Name: "a", Size: 1 << 20, Labels: map[string]string{"x": "1", "y": "2"}})
	for _, tt := range []struct {
		want Record
		err  error
	}{
		{Record{Name: "a"}, nil},
		{Record{Name: "a", Size: 1 << 20, Labels: map[string]string{"x": "1"}}, nil},
		{Record{Name: "a", Size: 1 << 21}, ErrExists},
		{Record{Name: "a", Inodes: 5}, ErrExists},
		{Record{Name: "a", Labels: map[string]string{"x": "2"}}, ErrExists},
		{Record{Name: "a", Labels: map[string]string{"z": ""}}, ErrExists},
	} {
		rec, created, release, err := s.Create(tt.want)
		if created || !errors.Is(err, tt.err) || err == nil && rec.ID != first.ID {
			t.Errorf("%+v: %+v, %v, %v", tt.want, rec, created, err)
		}
		if release != nil {
			release()
		}
	}
}

// A held volume stays. While files are removed nothing begins to hold it; if that fails, it stays.
func TestRemovalAndHolds(t *testing.T) {
	s := open(t, t.TempDir(), 0)
	create(t, s, Record{Name: "a"})
	_, release, err := s.Hold("", "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("", "a", func(*Record) error { return nil }); !errors.Is(err, ErrInUse) {
		t.Errorf("held: %v", err)
	}
	release()
	release()
	full := errors.New("no")
	if err := s.Remove("", "a", func(*Record) error {
		if _, _, err := s.Hold("", "a"); !errors.Is(err, ErrInUse) {
			t.Errorf("hold of one that is being removed: %v", err)
		}
		if _, _, _, err := s.Create(Record{Name: "a"}); !errors.Is(err, ErrInUse) {
			t.Errorf("creation of one that is being removed: %v", err)
		}
		return full
	}); !errors.Is(err, full) {
		t.Error(err)
	}
	if err := s.Remove("", "a", func(*Record) error { return nil }); err != nil {
		t.Error(err)
	}
	if err := s.Remove("", "a", func(*Record) error { return nil }); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// The sum of the sizes is bounded, for each tenant by a quarter. Volumes that go with a sandbox do
// not count, and an error about all tells nothing of others.
func TestSumOfSizes(t *testing.T) {
	s := open(t, t.TempDir(), 64<<20)
	if rec := create(t, s, Record{Tenant: "1", Name: "default"}); rec.Size != 1<<20 {
		t.Errorf("%+v", rec)
	}
	create(t, s, Record{Tenant: "1", Name: "more", Size: 15 << 20})
	create(t, s, Record{Tenant: "1", Bound: true})
	if _, _, _, err := s.Create(Record{Tenant: "1", Name: "x", Size: 1}); !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), "have 16 MiB together, of at most 16") {
		t.Errorf("a tenant beyond its quarter: %v", err)
	}
	create(t, s, Record{Name: "own", Size: 40 << 20})
	_, _, _, err := s.Create(Record{Tenant: "2", Name: "x", Size: 10 << 20})
	if !errors.Is(err, ErrNoRoom) || strings.Contains(err.Error(), "56") {
		t.Errorf("beyond the limit of all: %v", err)
	}
	create(t, s, Record{Tenant: "2", Name: "x", Size: 8 << 20})
	if _, err := s.Get("2", "default"); !errors.Is(err, ErrNotFound) {
		t.Errorf("another tenant's: %v", err)
	}
}

func TestNumberOfVolumes(t *testing.T) {
	s := open(t, t.TempDir(), 0)
	for range maxVolumes {
		s.byName[key{"1", newID(8)}] = &entry{}
	}
	if _, _, _, err := s.Create(Record{Tenant: "1"}); !errors.Is(err, ErrTooMany) {
		t.Error(err)
	}
	create(t, s, Record{Tenant: "2"})
}
