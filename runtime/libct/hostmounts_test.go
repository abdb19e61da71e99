package libct

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/runtime"
)

func mountOf(uid, gid uint32) api.Mount {
	return api.Mount{Type: api.MountBind, Source: "/src", Target: "/src", UID: &uid, GID: &gid}
}

// The sandbox of an ordinary user's daemon with mounts has one id that is the daemon's user, and
// all others as before.
func TestIDsOfMounts(t *testing.T) {
	shared := []idmap.Range{{Inside: 0, Outside: 1, Size: 65536}}
	for name, tt := range map[string]struct {
		spec runtime.Spec
		host Host
		want []idmap.Range
		err  string
	}{
		"none":   {host: Host{IDs: shared}, want: shared},
		"mapped": {spec: runtime.Spec{MountIDs: api.MountsMapped, Mounts: []api.Mount{mountOf(7, 8)}}, host: Host{IDs: shared, Own: true}, want: shared},
		"root": {
			spec: runtime.Spec{MountIDs: api.MountsUser, Mounts: []api.Mount{mountOf(0, 0)}}, host: Host{IDs: shared},
			want: []idmap.Range{{Inside: 0, Outside: 0, Size: 1}, {Inside: 1, Outside: 2, Size: 65535}, {Inside: 65536, Outside: 1, Size: 1}},
		},
		"a user": {
			spec: runtime.Spec{MountIDs: api.MountsUser, Mounts: []api.Mount{mountOf(1000, 1000)}}, host: Host{IDs: shared},
			want: []idmap.Range{
				{Inside: 0, Outside: 1, Size: 1000}, {Inside: 1000, Outside: 0, Size: 1}, {Inside: 1001, Outside: 1002, Size: 64535}, {Inside: 65536, Outside: 1001, Size: 1},
			},
		},
		"the last": {
			spec: runtime.Spec{MountIDs: api.MountsUser, Mounts: []api.Mount{mountOf(65535, 65535)}}, host: Host{IDs: shared},
			want: []idmap.Range{{Inside: 0, Outside: 1, Size: 65535}, {Inside: 65535, Outside: 0, Size: 1}, {Inside: 65536, Outside: 65536, Size: 1}},
		},
		"single":            {spec: runtime.Spec{Mounts: []api.Mount{mountOf(0, 0)}}, host: Host{Single: true, IDs: []idmap.Range{{Size: 1}}}, want: []idmap.Range{{Size: 1}}},
		"single, a user":    {spec: runtime.Spec{Mounts: []api.Mount{mountOf(1, 1)}}, host: Host{Single: true, IDs: []idmap.Range{{Size: 1}}}, err: "only root"},
		"two ids":           {spec: runtime.Spec{Mounts: []api.Mount{mountOf(1, 2)}}, host: Host{IDs: shared}, err: "the same number"},
		"two users":         {spec: runtime.Spec{Mounts: []api.Mount{mountOf(1, 1), mountOf(2, 2)}}, host: Host{IDs: shared}, err: "not those of the others"},
		"no ids":            {spec: runtime.Spec{Mounts: []api.Mount{{}}}, host: Host{IDs: shared}, err: "not those of the others"},
		"beyond":            {spec: runtime.Spec{Mounts: []api.Mount{mountOf(500, 500)}}, host: Host{IDs: []idmap.Range{{Outside: 1, Size: 500}}}, err: "no 500"},
		"own, but unmapped": {spec: runtime.Spec{MountIDs: api.MountsUser, Mounts: []api.Mount{mountOf(0, 0)}}, host: Host{IDs: shared, Own: true}, err: "without a map"},
	} {
		got, err := idsOf(&tt.spec, &tt.host)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %q", name, err, tt.err)
			}
			continue
		}
		if err != nil || !cmp.Equal(got, tt.want) {
			t.Errorf("%s: %v, %s", name, err, cmp.Diff(tt.want, got))
		}
		seen := map[int]bool{}
		for _, r := range got {
			for i := range r.Size {
				if seen[r.Outside+i] {
					t.Fatalf("%s: id %d twice", name, r.Outside+i)
				}
				seen[r.Outside+i] = true
			}
		}
	}
}

// A mount whose flags or ids are not those of the plan is refused: the daemon may have been taken
// over.
func TestMountsAreVerified(t *testing.T) {
	dir := t.TempDir()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 {
		if err := (&hostMount{FD: fd, UID: uint32(os.Geteuid())}).verify(); err == nil || !strings.Contains(err.Error(), "flags") {
			t.Errorf("a mount without nosuid and nodev: %v", err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("only root copies a mount")
	}
	copied, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(copied)
	if err := unix.MountSetattr(copied, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}); err != nil {
		t.Fatal(err)
	}
	if err := (&hostMount{FD: copied}).verify(); err != nil {
		t.Errorf("the control: %v", err)
	}
	if err := (&hostMount{FD: copied, UID: 1}).verify(); err == nil || !strings.Contains(err.Error(), "owner") {
		t.Errorf("another owner: %v", err)
	}
	if err := (&hostMount{FD: copied, ReadOnly: true}).verify(); err == nil || !strings.Contains(err.Error(), "flags") {
		t.Errorf("writable: %v", err)
	}
	if err := unix.MountSetattr(copied, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NODEV}); err != nil {
		t.Fatal(err)
	}
	if err := (&hostMount{FD: copied}).verify(); err == nil || !strings.Contains(err.Error(), "flags") {
		t.Errorf("without nodev: %v", err)
	}
}

// The place of a mount is made where it is missing, and is never behind a link of the image.
func TestTargetsOfMounts(t *testing.T) {
	dir := t.TempDir()
	outside := t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(dir, "etc/d"), 0o755), os.WriteFile(filepath.Join(dir, "etc/file"), nil, 0o644),
		os.Symlink(outside, filepath.Join(dir, "out")), os.Symlink("etc", filepath.Join(dir, "in")), os.Symlink("file", filepath.Join(dir, "etc/tofile")),
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	for _, tt := range []struct {
		target string
		dir    bool
		err    string
	}{
		{"/etc/d", true, ""},
		{"/new/a/b", true, ""},
		{"/etc/file", false, ""},
		{"/new/file", false, ""},
		{"/etc/d/new/file", false, ""},
		{"/out", true, "link"},
		{"/out/x", true, "link"},
		{"/in", true, "link"},
		{"/in/d", true, "link"},
		{"/etc/tofile", false, "link"},
		{"/out/x", false, "link"},
		{"/etc/file", true, "file there"},
		{"/etc/file/x", true, "file there"},
		{"/etc/d", false, "what the image has"},
		{"/fifo", false, "what the image has"},
	} {
		fd, err := makeTarget(root, tt.target, tt.dir)
		if tt.err != "" {
			if !errors.Is(err, runtime.ErrRootfs) || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %q", tt.target, err, tt.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tt.target, err)
			continue
		}
		var got, want unix.Stat_t
		if err := errors.Join(unix.Fstat(fd, &got), unix.Lstat(filepath.Join(dir, tt.target), &want), unix.Close(fd)); err != nil || got.Ino != want.Ino {
			t.Errorf("%s: another place, %v", tt.target, err)
		}
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("made outside of the root: %v, %v", left, err)
	}
}
