package libct

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// Links, holes, modes and times are copied as they are, what may not be there is not, and nothing
// beyond the room.
func TestImageFilesAreCopied(t *testing.T) {
	from, outside := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(from, "sub/dir"), 0o750), os.WriteFile(filepath.Join(from, "file"), []byte("text"), 0o640),
		os.Link(filepath.Join(from, "file"), filepath.Join(from, "sub/again")), os.Symlink(outside, filepath.Join(from, "link")),
		os.WriteFile(filepath.Join(from, "sub/hole"), nil, 0o600), os.Truncate(filepath.Join(from, "sub/hole"), 1<<20),
		unix.Mkfifo(filepath.Join(from, "pipe"), 0o600), os.WriteFile(filepath.Join(outside, "secret"), nil, 0o600),
		unix.Mknod(filepath.Join(from, "socket"), unix.S_IFSOCK|0o600, 0), os.Chmod(from, 0o711),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	fill := func(p volumePlan) (string, error) {
		t.Helper()
		to := t.TempDir()
		src, err := openDir(unix.AT_FDCWD, from)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(src)
		dst, err := openDir(unix.AT_FDCWD, to)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(dst)
		return to, p.fill(dst, src, true)
	}
	to, err := fill(volumePlan{Room: quota.Usage{Bytes: 1 << 20, Inodes: 8}})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	if err := filepath.WalkDir(to, func(path string, _ os.DirEntry, err error) error {
		names = append(names, strings.TrimPrefix(path, to))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"", "/file", "/link", "/pipe", "/sub", "/sub/again", "/sub/dir", "/sub/hole"}; !slices.Equal(names, want) {
		t.Errorf("copied: %q", names)
	}
	for name, want := range map[string]struct {
		mode  uint32
		links uint64
		size  int64
	}{"": {mode: 0o711}, "file": {0o640, 2, 4}, "sub/again": {0o640, 2, 4}, "sub/hole": {0o600, 1, 1 << 20}, "sub/dir": {mode: 0o750}} {
		var was, st unix.Stat_t
		if err := errors.Join(unix.Lstat(filepath.Join(to, name), &st), unix.Lstat(filepath.Join(from, name), &was)); err != nil {
			t.Fatal(err)
		}
		links := uint64(st.Nlink) //nolint:unconvert // has another type elsewhere
		if st.Mode&0o7777 != want.mode || want.links > 0 && (links != want.links || st.Size != want.size || st.Blocks > 16) || st.Mtim != was.Mtim {
			t.Errorf("%s: %+v", name, st)
		}
	}
	for _, room := range []quota.Usage{{Inodes: 6}, {Bytes: 12 << 10}} {
		if _, err := fill(volumePlan{Room: room}); !errors.Is(err, runtime.ErrRootfs) {
			t.Errorf("room for %+v: %v", room, err)
		}
	}
}

// Limits of volumes show, and a sandbox whose files no other one could use gets none.
func TestVolumesAreEnforced(t *testing.T) {
	limit := runtime.VolumeUsage{Bytes: 1}
	for _, tt := range []struct {
		spec   runtime.Spec
		single bool
		want   string
		err    error
	}{
		{want: ""},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{}}}, want: "none"},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{}, {Limit: limit}}}, want: "accounting"},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{Own: true}}, Limits: api.Limits{Disk: 1}}, want: "accounting"},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{}}, MountIDs: api.MountsMapped}, want: "none"},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{}}, MountIDs: api.MountsUser}, want: "none", err: runtime.ErrUnenforceable},
		{spec: runtime.Spec{Volumes: []runtime.VolumeMount{{}}, MountIDs: api.MountsUser}, single: true, want: "none"},
	} {
		got, err := Enforce(&tt.spec, &Host{Single: tt.single})
		if got.Volumes != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%+v: %q, %v", tt.spec, got.Volumes, err)
		}
	}
	spec := &runtime.Spec{Volumes: []runtime.VolumeMount{{Target: "/rw"}, {Target: "/ro", ReadOnly: true}}}
	spec.Profile.ReadOnlyRoot = true
	if got := confinement(spec, &api.Enforced{}).Writable; !slices.Equal(got, []string{"/rw"}) {
		t.Errorf("writable: %q", got)
	}
}

// A volume has one gate, whoever comes and goes: its state is kept while a start, an archive or a
// sandbox has it.
func TestGatesOfVolumes(t *testing.T) {
	var v volumes
	first, err := v.lock(t.Context(), "ab")
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := v.lock(gone, "ab"); !errors.Is(err, context.Canceled) {
		t.Errorf("a second one: %v", err)
	}
	e := &Engine{disk: quota.New(nil, nil)}
	in := &instance{}
	first.users[in] = volumeUser{"box", true}
	e.volumes.all = v.all
	e.leaveVolumes(in) // while the gate is held
	if v.all["ab"] != first {
		t.Error("its state is forgotten while a start has it")
	}
	second := make(chan *volume)
	go func() {
		vol, err := v.lock(t.Context(), "ab")
		if err != nil {
			t.Error(err)
		}
		second <- vol
	}()
	v.unlock("ab", first)
	if vol := <-second; vol != nil {
		v.unlock("ab", vol)
	}
	if len(v.all) != 0 {
		t.Errorf("%d are kept", len(v.all))
	}
	for _, id := range []string{"", "../x", "A", strings.Repeat("a", 65), ".removed-1"} {
		if _, err := v.lock(t.Context(), id); err == nil {
			t.Errorf("id %q is accepted", id)
		}
	}
}
