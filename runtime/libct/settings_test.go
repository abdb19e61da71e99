package libct

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// A file system that a request asks for has ceilings on bytes and files, is nosuid and nodev, and
// replaces that of the profile at its place.
func TestFileSystemsInMemory(t *testing.T) {
	spec, host := testSpec(), testHost()
	spec.Profile.ReadOnlyRoot = true
	spec.Profile.Mounts = []api.Scratch{{Path: "/tmp", Size: 1 << 20, Mode: 0o1777}, {Path: "/work", Size: 1 << 20, Mode: 0o755}}
	spec.Tmpfs = []api.Scratch{{Path: "/tmp", Size: 64 << 20, Mode: 0o700, UID: 7, GID: 8, NoExec: true}, {Path: "/run", Size: 4096, Mode: 0o1777}}
	spec.ShmSize = 256 << 20
	enforced, err := Enforce(spec, host)
	if err != nil {
		t.Fatal(err)
	}
	config, err := Plan(spec, host, &enforced)
	if err != nil {
		t.Fatal(err)
	}
	const plain, noexec = unix.MS_NOSUID | unix.MS_NODEV, unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	want := []configs.Mount{
		{Destination: "/dev/shm", Flags: noexec, Data: "mode=1777,size=268435456,nr_inodes=65536"},
		{Destination: "/work", Flags: plain, Data: "mode=0755,size=1048576,nr_inodes=1024,uid=0,gid=0"},
		{Destination: "/tmp", Flags: noexec, Data: "mode=0700,size=67108864,nr_inodes=16384,uid=7,gid=8"},
		{Destination: "/run", Flags: plain, Data: "mode=1777,size=4096,nr_inodes=1024,uid=0,gid=0"},
	}
	got := slices.DeleteFunc(config.Mounts, func(m *configs.Mount) bool {
		return m.Device != "tmpfs" || m.Destination == "/dev"
	})
	for i, m := range got {
		if i >= len(want) || m.Destination != want[i].Destination || m.Flags != want[i].Flags || m.Data != want[i].Data {
			t.Errorf("mount %d: %+v", i, m)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d mounts, want %d", len(got), len(want))
	}
	writable := confinement(spec, &enforced).Writable
	if !slices.Equal(writable, []string{"/work", "/tmp", "/run"}) {
		t.Errorf("Landlock leaves %v writable", writable)
	}
}

// Where nothing counts a sandbox's memory, its file systems in memory are bounded.
func TestUncountedMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		shm, tmpfs  int64
		controllers []string
		refused     bool
	}{
		"as much as is":         {shm: 512 << 20, tmpfs: 512 << 20},
		"more":                  {shm: 512 << 20, tmpfs: 513 << 20, refused: true},
		"more, and it is held":  {shm: 8 << 30, tmpfs: 8 << 30, controllers: []string{"memory"}},
		"more, held by another": {shm: 2 << 30, controllers: []string{"pids"}, refused: true},
	} {
		spec, host := testSpec(), testHost()
		host.Controllers = tt.controllers
		spec.ShmSize, spec.Tmpfs = tt.shm, []api.Scratch{{Path: "/t", Size: tt.tmpfs}}
		if _, err := Enforce(spec, host); errors.Is(err, runtime.ErrUnenforceable) != tt.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A sandbox has files over those of the image's /etc only where it needs them.
func TestFilesInEtc(t *testing.T) {
	hosts := []api.HostAddress{{Name: "db", Address: "10.0.0.2"}}
	for name, tt := range map[string]struct {
		spec  runtime.Spec
		files string
		lines []string
	}{
		"none":               {runtime.Spec{}, "", nil},
		"a network":          {runtime.Spec{Network: true}, "/d/resolv.conf /d/hosts", []string{"\tbox\n", "\tother\n"}},
		"lines":              {runtime.Spec{Hosts: hosts}, "/d/hosts", []string{"127.0.0.1\tlocalhost\n", "10.0.0.2\tdb\n"}},
		"a network and line": {runtime.Spec{Network: true, Hosts: hosts}, "/d/resolv.conf /d/hosts", []string{"\tbox\n", "10.0.0.2\tdb\n"}},
	} {
		files, contents := etcFiles("/d", &tt.spec, "box", "other")
		var at []string
		for _, f := range files {
			at = append(at, f.File)
		}
		if strings.Join(at, " ") != tt.files || len(contents) != len(files) {
			t.Errorf("%s: %v", name, files)
			continue
		}
		for _, line := range tt.lines {
			if !strings.Contains(contents[len(contents)-1], line) {
				t.Errorf("%s: %q lacks %q", name, contents[len(contents)-1], line)
			}
		}
		if !tt.spec.Network && len(contents) > 0 && strings.Contains(contents[0], "box") {
			t.Errorf("%s: %q names an address that is not there", name, contents[0])
		}
	}
}
