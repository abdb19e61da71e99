package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

// Both flags mean what they mean to Docker. A source is absolute, and links in it are followed
// here.
func TestMountsOfTheCommandLine(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	if err := os.Symlink(dir, "link"); err != nil {
		t.Fatal(err)
	}
	one, two := uint32(1), uint32(2)
	for text, want := range map[string]api.Mount{
		"/a:/b":          {Type: "bind", Source: "/a", Target: "/b"},
		"/a:/b:ro":       {Type: "bind", Source: "/a", Target: "/b", ReadOnly: true},
		"/a:/b:rw,z":     {Type: "bind", Source: "/a", Target: "/b"},
		"/a/../c:/b":     {Type: "bind", Source: "/c", Target: "/b"},
		".:/b":           {Type: "bind", Source: dir, Target: "/b"},
		"./link:/b":      {Type: "bind", Source: dir, Target: "/b"},
		"./gone:/b":      {Type: "bind", Source: dir + "/gone", Target: "/b"},
		"a:/b":           {Type: "volume", Source: "a", Target: "/b"},
		"a.b-c_d:/b":     {Type: "volume", Source: "a.b-c_d", Target: "/b"},
		"a:/b:ro,nocopy": {Type: "volume", Source: "a", Target: "/b", ReadOnly: true, NoCopy: true},
		"/b":             {Type: "volume", Target: "/b"},
		"..:/b":          {Type: "bind", Source: filepath.Dir(dir), Target: "/b"},
		"link/x/y:/b":    {Type: "bind", Source: dir + "/link/x/y", Target: "/b"},
	} {
		if got, err := parseVolume(text); err != nil || !cmp.Equal(got, want) {
			t.Errorf("-v %s: %v, %s", text, err, cmp.Diff(want, got))
		}
	}
	for text, want := range map[string]any{
		"type=bind,source=/a,target=/b":               api.Mount{Type: "bind", Source: "/a", Target: "/b"},
		"type=bind,src=/a,dst=/b,ro":                  api.Mount{Type: "bind", Source: "/a", Target: "/b", ReadOnly: true},
		"type=bind,src=/a,dst=/b,readonly=false":      api.Mount{Type: "bind", Source: "/a", Target: "/b"},
		"type=bind,src=/a,destination=/b,uid=1,gid=2": api.Mount{Type: "bind", Source: "/a", Target: "/b", UID: &one, GID: &two},
		"target=/b":          api.Mount{Type: "volume", Target: "/b"},
		"source=a,target=/b": api.Mount{Type: "volume", Source: "a", Target: "/b"},
		"type=volume,src=a,dst=/b,ro,volume-nocopy,uid=1,gid=2": api.Mount{Type: "volume", Source: "a", Target: "/b", ReadOnly: true, NoCopy: true, UID: &one, GID: &two},
		"type=tmpfs,target=/b": api.Scratch{Path: "/b", NoExec: true},
		"type=tmpfs,target=/b,tmpfs-size=1m,tmpfs-mode=700,uid=1,gid=2": api.Scratch{Path: "/b", Size: 1 << 20, Mode: 0o700, UID: 1, GID: 2, NoExec: true},
	} {
		m, s, err := parseMount(text)
		var got any
		if m != nil {
			got = *m
		} else if s != nil {
			got = *s
		}
		if err != nil || !cmp.Equal(got, want) {
			t.Errorf("--mount %s: %v, %s", text, err, cmp.Diff(want, got))
		}
	}
	for text, want := range map[string]string{
		"": "target is missing", "type=bind": "target is missing", "type=bind,target=/b": "source is missing", "type=nfs,source=/a,target=/b": "bind, volume and tmpfs",
		"type=volume,source=/a,target=/b": "type=bind", "source=./a,target=/b": "type=bind", "type=bind,source=a,target=/b": "type=volume", "type=bind,source=/a,target=/b,volume-nocopy": "for type=volume",
		"type=volume,source=a,target=/b,volume-label=x": "volume create", "type=volume,source=a,target=/b,volume-driver=nfs": "leave the option out", "type=tmpfs,source=/a,target=/b": "no source", "type=bind,source=/a,target=/b,tmpfs-size=1m": "for type=tmpfs",
		"type=tmpfs,target=/b,tmpfs-size=-1": "tmpfs-size", "type=bind,source=/a,target=/b,uid=x": "not a valid uid", "x": "option",
	} {
		switch _, _, err := parseMount(text); {
		case err == nil:
			t.Errorf("--mount %q is accepted", text)
		case text != "" && !strings.Contains(err.Error(), want):
			t.Errorf("--mount %q: %v", text, err)
		}
	}
}

// In the file of one's own daemon $HOME is the user's; root names directories.
func TestMountRootsOfTheCommandLine(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "src"), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{"$HOME": dir, "$HOME/src": dir + "/src", dir: dir, dir + "/src/..": dir} {
		if got, err := mountRoot(text, 1000, dir); got != want || err != nil {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"/", "/usr/..", dir + "/gone", "/dev/null", "$HOMEX", "$HOME/gone", "~"} {
		if got, err := mountRoot(text, 1000, dir); err == nil {
			t.Errorf("%s: %q", text, got)
		}
	}
	for _, text := range []string{"$HOME", "$HOME/src"} {
		if got, err := mountRoot(text, 0, dir); err == nil {
			t.Errorf("%s of root: %q", text, got)
		}
		if got, err := mountRoot(text, 1000, ""); err == nil {
			t.Errorf("%s without a home: %q", text, got)
		}
	}
}
