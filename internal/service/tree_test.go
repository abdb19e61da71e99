package service

import (
	"context"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
)

func TestModesAreOctal(t *testing.T) {
	for mode, want := range map[fs.FileMode]string{
		0: "0000", 0o644: "0644", fs.ModeDir | fs.ModeSticky | 0o777: "1777", fs.ModeSetuid | fs.ModeSetgid | 0o755: "6755",
	} {
		if got := octal(mode); got != want {
			t.Errorf("%v is %q, want %q", mode, got, want)
		}
	}
	for mode, want := range map[fs.FileMode]api.FileType{
		0: api.TypeFile, fs.ModeDir: api.TypeDirectory, fs.ModeSymlink: api.TypeSymlink, fs.ModeNamedPipe: api.TypeFIFO,
		fs.ModeSocket: api.TypeSocket, fs.ModeDevice: api.TypeBlock, fs.ModeDevice | fs.ModeCharDevice: api.TypeChar,
	} {
		if got := typeOf(mode); got != want {
			t.Errorf("%v is %q, want %q", mode, got, want)
		}
	}
}

// Names are told as the sandbox has them, below the path that the client knows.
func TestChangesAreToldInTheClientsPaths(t *testing.T) {
	for _, tc := range []struct {
		change host.Change
		want   api.FileChange
	}{
		{host.Change{Kind: guest.ChangeDeleted}, api.FileChange{Kind: api.FileDeleted, Path: "/d"}},
		{host.Change{Kind: guest.ChangeCreated, Path: "a/b", Dir: true}, api.FileChange{Kind: api.FileCreated, Path: "/d/a/b", Type: api.TypeDirectory}},
		{host.Change{Kind: guest.ChangeMoved, Path: "a", To: "\xff"}, api.FileChange{Kind: api.FileMoved, From: "/d/a", To: "/d/\uFFFD", ToBytes: []byte("/d/\xff")}},
		{host.Change{Kind: guest.ChangeOverflow, Path: "a"}, api.FileChange{Kind: api.WatchOverflow, Path: "/d/a"}},
		{host.Change{Kind: guest.ChangeModified, Path: "a"}, api.FileChange{Kind: api.FileModified, Path: "/d/a"}},
		{host.Change{Kind: guest.ChangeAttributes, Path: "a"}, api.FileChange{Kind: api.FileAttributes, Path: "/d/a"}},
	} {
		if diff := cmp.Diff(tc.want, changeOf("/d/", tc.change)); diff != "" {
			t.Error(diff)
		}
	}
}

// Users of a sandbox get names only from valid entries.
func TestAccountsAreNames(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"passwd": "root:x:0:0::/root:/bin/sh\ntoor:x:0:0::/:\n\x1b[31m:x:1:1::/:\nuser:x:1000:1000::/:\nbad:x:-1:0::/:\n",
		"group":  "root:x:0:\nstaff:x:50:user\nnonsense\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := readAccounts(t.Context(), func(_ context.Context, path string) (*os.File, error) {
		return os.Open(filepath.Join(dir, filepath.Base(path)))
	})
	want := accounts{users: map[uint32]string{0: "root", 1000: "user"}, groups: map[uint32]string{0: "root", 50: "staff"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(accounts{})); diff != "" {
		t.Error(diff)
	}
	got = readAccounts(t.Context(), func(context.Context, string) (*os.File, error) {
		return nil, &guest.Error{Stage: guest.StageType, Errno: syscall.EINVAL}
	})
	if len(got.users)+len(got.groups) != 0 {
		t.Errorf("%+v", got)
	}
}

// An archive that is long on its way, because its client is slow, is not held against init.
func TestInitHasItsTimeFromWhatLastMoved(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	paused := time.Now().Add(-time.Hour)
	moved := &traffic{r: r}
	held := moved.since(func() time.Time { return paused })
	if got := held(); !got.Equal(paused) {
		t.Errorf("before anything has moved: %v, want %v", got, paused)
	}
	go func() { _, _ = w.Write([]byte("x")); _ = w.Close() }()
	began := time.Now()
	if _, err := moved.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if got := held(); got.Before(began) {
		t.Errorf("after a part: %v, which is before %v", got, began)
	}
	if paused = time.Now().Add(time.Minute); !held().Equal(paused) {
		t.Errorf("paused meanwhile: %v, want %v", held(), paused)
	}
}
