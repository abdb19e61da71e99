package facesock

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dirs"
)

func TestToken(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	// Faces that start at once have one token.
	tokens := make([]string, 20)
	var starting sync.WaitGroup
	for i := range tokens {
		starting.Go(func() {
			var err error
			if tokens[i], err = Token(path); err != nil {
				t.Error(err)
			}
		})
	}
	starting.Wait()
	for _, token := range tokens {
		if token != tokens[0] || len(token) < minToken {
			t.Fatalf("tokens %q", tokens)
		}
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("files %v are left, %v", left, err)
	}
}

func TestTokensThatAreRefused(t *testing.T) {
	long := strings.Repeat("x", minToken)
	for name, plant := range map[string]func(path string) error{
		"others read it": func(path string) error {
			// The umask may take bits of the file's first mode away.
			return errors.Join(os.WriteFile(path, []byte(long), 0o600), os.Chmod(path, 0o644))
		},
		"short": func(path string) error { return os.WriteFile(path, []byte(long[1:]+"\n"), 0o600) },
		"empty": func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"link": func(path string) error {
			if err := os.WriteFile(path+".1", []byte(long), 0o600); err != nil {
				return err
			}
			return os.Symlink(path+".1", path)
		},
		"FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		path := filepath.Join(t.TempDir(), "token")
		if err := plant(path); err != nil {
			t.Fatal(err)
		}
		if token, err := Token(path); err == nil {
			t.Errorf("%s: %q", name, token)
		}
	}
	if _, err := Token(filepath.Join(t.TempDir(), "none", "token")); err == nil {
		t.Error("a token in no directory")
	}
}

// A tenant's token lies in a directory of its own: the daemon's is another user's.
func TestTokenPath(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "api.sock")
	own := func() (dirs.Dirs, error) { return dirs.Dirs{Runtime: filepath.Join(dir, "new", "own")}, nil }
	if got, err := tokenPath(socket, "x.token", os.Geteuid(), own); got != filepath.Join(dir, "x.token") || err != nil {
		t.Errorf("beside the socket: %q, %v", got, err)
	}
	got, err := tokenPath(socket, "x.token", os.Geteuid()+1, own)
	if got != filepath.Join(dir, "new", "own", "x.token") || err != nil {
		t.Fatalf("of a tenant: %q, %v", got, err)
	}
	if _, err := Token(got); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(filepath.Dir(got)); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the tenant's directory: %v, %v", fi.Mode(), err)
	}
	no := func() (dirs.Dirs, error) { return dirs.Dirs{}, errors.New("none") }
	if got, err := tokenPath(socket, "x.token", os.Geteuid()+1, no); err == nil {
		t.Errorf("without a directory: %q", got)
	}
}
