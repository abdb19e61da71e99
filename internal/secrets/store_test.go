package secrets

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// bearer returns a secret with every field that its kind has.
func bearer(name, value string) Secret {
	return Secret{
		Name: name, Variable: "TOKEN", Kind: Bearer, Value: value,
		Binding: gateway.Binding{Name: name, Host: "api.example.com", Port: 8443, Methods: []string{"GET"}, Paths: []string{"/v1/*"}, Always: true},
	}
}

// files returns the content of every file below a directory, by its path there.
func files(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	all := make(map[string][]byte)
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if fi, err := e.Info(); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v, %v", path, fi.Mode(), err)
		}
		data, err := os.ReadFile(path)
		all[path] = data
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestStoreKeepsSecretsSealed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "secrets")
	s := NewStore(dir)
	clock := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	s.now = func() time.Time { return clock }
	if _, err := s.Get("", "a"); !errors.Is(err, ErrNotFound) {
		t.Errorf("of an empty store: %v", err)
	}
	if all, err := s.List(""); err != nil || all != nil {
		t.Errorf("of an empty store: %v, %v", all, err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("reading has made the directory: %v", err)
	}
	secrets := []Secret{
		bearer("a", hidden),
		{Name: "b", Kind: Basic, Field: "bot", Value: hidden, Binding: gateway.Binding{Name: "b", Host: "git.example.com"}},
		{Name: "c", Kind: Header, Field: "x-api-key", Value: hidden, Binding: gateway.Binding{Name: "c", Host: "api.example.com"}},
		{Name: "d", Kind: AWS, Field: "AKIAEXAMPLE", Value: hidden, Token: hidden + "-token", Binding: gateway.Binding{Name: "d", Host: "s3.example.com"}},
	}
	var want []Stored
	for _, secret := range secrets {
		stored, err := s.Set("uid:1002", secret)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, Stored{Secret: secret, Created: clock, Changed: clock})
		if diff := cmp.Diff(want[len(want)-1], stored); diff != "" {
			t.Error(diff)
		}
	}
	// Another daemon has the same key, and each tenant its own secrets.
	s = NewStore(dir)
	s.now = func() time.Time { return clock }
	if all, err := s.List("uid:1002"); err != nil || !cmp.Equal(want, all) {
		t.Errorf("%v, %v", all, err)
	}
	if _, err := s.Get("", "a"); !errors.Is(err, ErrNotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	for path, data := range files(t, dir) {
		if bytes.Contains(data, []byte(hidden)) || bytes.Contains(data, []byte("example.com")) {
			t.Errorf("%s has a value or a host", path)
		}
	}
	// A new value keeps the time of the first.
	clock = clock.Add(time.Hour)
	if stored, err := s.Set("uid:1002", bearer("a", "other-"+hidden)); err != nil || stored.Created != want[0].Created || stored.Changed != clock {
		t.Errorf("%+v, %v", stored, err)
	}
	if stored, err := s.Get("uid:1002", "a"); err != nil || stored.Value != "other-"+hidden || stored.Changed != clock {
		t.Errorf("%+v, %v", stored, err)
	}
	if err := s.Remove("uid:1002", "a"); err != nil {
		t.Error(err)
	}
	if err := s.Remove("uid:1002", "a"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if all, err := s.List("uid:1002"); err != nil || len(all) != 3 {
		t.Errorf("%v, %v", all, err)
	}
}

// A file is good for one tenant and one name, as it was written, and with the key.
func TestSealedFilesAreNotExchanged(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, s *Store){
		"a bit": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, s.file("", "a"), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		},
		"the version": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, s.file("", "a"), func(b []byte) []byte { b[0]++; return b })
		},
		"cut off": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, s.file("", "a"), func(b []byte) []byte { return b[:9] })
		},
		"empty": func(t *testing.T, s *Store) { t.Helper(); edit(t, s.file("", "a"), func([]byte) []byte { return nil }) },
		"too large": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, s.file("", "a"), func([]byte) []byte { return make([]byte, maxSealed+1) })
		},
		"of another name": func(t *testing.T, s *Store) {
			t.Helper()
			rename(t, s.file("", "b"), s.file("", "a"))
		},
		"of another tenant": func(t *testing.T, s *Store) {
			t.Helper()
			rename(t, s.file("uid:1002", "a"), s.file("", "a"))
		},
		"another key": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, filepath.Join(s.dir, keyFile), func(b []byte) []byte { b[0]++; return b })
		},
		"half a key": func(t *testing.T, s *Store) {
			t.Helper()
			edit(t, filepath.Join(s.dir, keyFile), func(b []byte) []byte { return b[1:] })
		},
		"no key": func(t *testing.T, s *Store) {
			t.Helper()
			if err := os.Remove(filepath.Join(s.dir, keyFile)); err != nil {
				t.Fatal(err)
			}
		},
		"a key for all to read": func(t *testing.T, s *Store) {
			t.Helper()
			if err := os.Chmod(filepath.Join(s.dir, keyFile), 0o644); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(t.TempDir())
			for _, secret := range []struct{ tenant, name string }{{"", "a"}, {"", "b"}, {"uid:1002", "a"}} {
				if _, err := s.Set(secret.tenant, bearer(secret.name, hidden)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Get("", "a"); err != nil {
				t.Fatalf("control: %v", err)
			}
			change(t, s)
			got, err := s.Get("", "a")
			if err == nil || errors.Is(err, ErrNotFound) || strings.Contains(err.Error(), hidden) || got.Value != "" {
				t.Errorf("%v, %v", got, err)
			}
			all, err := s.List("")
			if err != nil || len(all) == 0 || all[0].Name != "a" || all[0].Unreadable == nil || all[0].Value != "" || strings.Contains(all[0].Unreadable.Error(), hidden) {
				t.Errorf("the list does not tell that a secret cannot be read: %v, %v", all, err)
			}
			if err := s.Remove("", "a"); err != nil {
				t.Errorf("it cannot be removed: %v", err)
			}
		})
	}
}

func edit(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(data), 0o600); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func TestStoreIsBounded(t *testing.T) {
	s := NewStore(t.TempDir())
	for i := range MaxStored {
		// Files alone count; a thousand real ones would cost a sync each.
		if err := os.MkdirAll(s.tenantDir(""), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.file("", fmt.Sprintf("n%d", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Set("", bearer("more", hidden)); !errors.Is(err, ErrTooMany) || strings.Contains(err.Error(), hidden) {
		t.Errorf("one more: %v", err)
	}
	if _, err := s.Set("", bearer("n7", hidden)); err != nil {
		t.Errorf("another value of one that cannot be read: %v", err)
	}
	if _, err := s.Set("uid:1002", bearer("more", hidden)); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
	for name, change := range map[string]func(*Secret){
		"a long value":  func(s *Secret) { s.Value = strings.Repeat("x", 16<<10+1) },
		"a short value": func(s *Secret) { s.Value = "x" },
		"many paths": func(s *Secret) {
			s.Binding.Paths = strings.Split(strings.Repeat("/"+strings.Repeat("p", 500)+" ", 140), " ")[:140]
		},
		"no name":          func(s *Secret) { s.Name = "" },
		"a path as a name": func(s *Secret) { s.Name = "../key" },
		"no kind":          func(s *Secret) { s.Kind = "" },
		"a bad variable":   func(s *Secret) { s.Variable = "A=B" },
		"a long variable":  func(s *Secret) { s.Variable = strings.Repeat("V", maxVariable+1) },
		"a pattern":        func(s *Secret) { s.Binding.Host = "*.example.com" },
		"a token":          func(s *Secret) { s.Token = hidden },
		"a field":          func(s *Secret) { s.Field = "x" },
	} {
		secret := bearer("n8", hidden)
		change(&secret)
		if _, err := s.Set("uid:1003", secret); err == nil || strings.Contains(err.Error(), hidden) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if all, err := s.List("uid:1003"); err != nil || all != nil {
		t.Errorf("%v, %v", all, err)
	}
}

// Whatever a file has, what is read of it is usable.
func FuzzOpen(f *testing.F) {
	dir := f.TempDir()
	s := NewStore(dir)
	if _, err := s.Set("", bearer("a", hidden)); err != nil {
		f.Fatal(err)
	}
	data, err := os.ReadFile(s.file("", "a"))
	if err != nil {
		f.Fatal(err)
	}
	aead, err := s.key(false)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data, []byte(`{"kind":"bearer","value":"`+hidden+`","host":"example.com"}`))
	f.Add([]byte{sealedVersion}, []byte(`{"kind":"aws","host":1}`))
	f.Fuzz(func(t *testing.T, data, text []byte) {
		for _, data := range [][]byte{data, aead.Seal([]byte{sealedVersion}, nil, text, associated("", "a"))} {
			stored, err := open(aead, "", "a", data)
			if err != nil {
				continue
			}
			if _, err := stored.Placed().Gateway(); err != nil {
				t.Errorf("read and unusable: %v", err)
			}
		}
	})
}

// A tenant whose files are slow holds up no other, and no tenant's secrets are held up for reading.
func TestTenantsDoNotWaitForEachOther(t *testing.T) {
	s := NewStore(t.TempDir())
	for _, tenant := range []string{"", "uid:1002"} {
		if _, err := s.Set(tenant, bearer("a", hidden)); err != nil {
			t.Fatal(err)
		}
	}
	defer s.lock("")() // as a change that takes long
	if _, err := s.Set("uid:1002", bearer("b", hidden)); err != nil {
		t.Error(err)
	}
	if err := s.Remove("uid:1002", "a"); err != nil {
		t.Error(err)
	}
	if _, err := s.Get("", "a"); err != nil {
		t.Error(err)
	}
	if all, err := s.List(""); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
}

// Many tenants begin at once: there is one key.
func TestFirstSecretsAtOnce(t *testing.T) {
	s := NewStore(filepath.Join(t.TempDir(), "not", "made"))
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			if _, err := s.Set(strconv.Itoa(i), bearer("a", hidden)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i := range 20 {
		if _, err := s.Get(strconv.Itoa(i), "a"); err != nil {
			t.Error(err)
		}
	}
}
