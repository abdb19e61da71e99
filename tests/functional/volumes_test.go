package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func volumeMount(name, target string) api.Mount {
	return api.Mount{Type: api.MountVolume, Source: name, Target: target}
}

// withVolumes returns the settings of a sandbox with the mounts.
func withVolumes(mounts ...api.Mount) api.Settings { return api.Settings{Mounts: mounts} }

// makeVolume makes a volume that the test removes with all sandboxes that have it.
func makeVolume(t *testing.T, d *harness.Daemon, req api.CreateVolume) string {
	t.Helper()
	v, err := d.Client(t).CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	dropVolume(t, d, v.Name)
	return v.Name
}

// dropVolume removes a volume at the end of the test, when its sandboxes have been deleted.
func dropVolume(t *testing.T, d *harness.Daemon, name string) {
	t.Helper()
	c := d.Client(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		v, err := c.Volume(ctx, name)
		if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return
		}
		if err != nil {
			t.Error(err)
			return
		}
		for _, s := range v.Sandboxes {
			err = errors.Join(err, c.DeleteSandbox(ctx, s.ID))
		}
		if err := errors.Join(err, c.RemoveVolume(ctx, name)); err != nil {
			t.Errorf("remove volume: %v", err)
		}
	})
}

// Sandboxes share a volume: files of a user of one belong to that user in all others, whatever
// ids they have on the host. It stays when they are gone, and through kills of daemon and launcher.
func TestVolumesAreShared(t *testing.T) {
	testenv.RequireUserNS(t)
	volumesAreShared(t, harness.Start(t, harness.Options{}))
}

func TestVolumesWithoutSubordinateIDs(t *testing.T) { volumesAreShared(t, withoutIDs(t)) }

func volumesAreShared(t *testing.T, d *harness.Daemon) {
	t.Helper()
	user, owner := "1000:1000", "1000:1000\n"
	if d.System(t).Enforced.IDs == api.IDsSingle {
		user, owner = "", "0:0\n"
	}
	mount := volumeMount("shared", "/new/place")
	one := d.Create(t, api.CreateSandbox{User: user, Settings: withVolumes(mount)}) // makes it, owned by the user
	readOnly := mount
	readOnly.ReadOnly, readOnly.Target = true, "/data"
	two := d.Create(t, api.CreateSandbox{Settings: withVolumes(readOnly)})
	if one.Enforced.Volumes != "none" {
		t.Errorf("enforced.volumes %q", one.Enforced.Volumes)
	}
	one.Sh(t, "cd /new/place; echo one > file; ln file again; ln -s file link; mkdir dir; mkfifo pipe; cat link")
	if got := two.Sh(t, "stat -c %u:%g /data /data/* | sort -u; cat /data/link; touch /data/x 2>/dev/null || echo refused"); got != owner+"one\nrefused\n" {
		t.Errorf("the other sandbox sees %q", got)
	}
	root := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount("shared", "/data"))})
	root.Sh(t, "echo root >> /data/file; touch /data/of-root")
	if got := one.Sh(t, "stat -c %u:%g /new/place/file /new/place/of-root; cat /new/place/again"); got != owner+"0:0\none\nroot\n" {
		t.Errorf("the first sandbox sees %q", got)
	}
	for what, at := range map[*harness.Sandbox]string{one: " /new/place rw,nosuid,nodev", two: " /data ro,nosuid,nodev"} {
		if got := what.Sh(t, "grep -c '"+at+"' /proc/self/mountinfo; true"); got != "1\n" {
			t.Errorf("%s: %s", at, what.Sh(t, "cat /proc/self/mountinfo"))
		}
	}

	// In use, whether they run or not, and not through another daemon either.
	c := d.Client(t)
	refuse := func(when string, names ...string) {
		t.Helper()
		err := c.RemoveVolume(t.Context(), "shared")
		if !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
			t.Fatalf("removal %s: %v", when, err)
		}
		for _, name := range names {
			if !strings.Contains(err.Error(), name) {
				t.Errorf("removal %s: %v does not name %s", when, err, name)
			}
		}
	}
	refuse("of one that runs", one.Name, one.ID, two.Name, root.Name)
	root.MustTurn(t, "stop", nil, api.StateStopped)
	root.MustTurn(t, "start", nil, api.StateRunning)
	root.Sh(t, "cat /data/link")
	d.Kill9(t)
	d.Launch(t)
	c = d.Client(t)
	refuse("with the next daemon", one.Name, two.Name)
	one.Sh(t, "cat /new/place/link")

	two.Delete(t)
	root.Delete(t)
	one.MustTurn(t, "stop", nil, api.StateStopped)
	refuse("of one that has ended", one.Name)
	one.Delete(t)
	v, err := c.Volume(t.Context(), "shared")
	if err != nil || len(v.Sandboxes) > 0 || v.Usage == nil || v.Usage.Inodes != 5 || v.Usage.Unknown != "" {
		t.Errorf("%+v, %v", v, err)
	}
	launcher := d.System(t).Launcher
	kill9(t, launcher)
	harness.Eventually(t, func() error { return gone(launcher) })
	again := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount("shared", "/data"))})
	if got := again.Sh(t, "cat /data/again"); got != "one\nroot\n" {
		t.Errorf("after the launcher's death: %q", got)
	}
	again.Delete(t)
	if err := c.RemoveVolume(t.Context(), "shared"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Volume(t.Context(), "shared"); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Errorf("after the removal: %v", err)
	}
	left, err := os.ReadDir(filepath.Join(d.DataDir, "volumes"))
	if err != nil || len(left) > 0 {
		t.Errorf("records are left: %v, %v", left, err)
	}
}

// An image's VOLUME and a mount without a source are volumes of their sandbox alone, with the files
// of the image, and go with it. A volume gets these files once, when it is empty.
func TestVolumesOfImages(t *testing.T) {
	testenv.RequireUserNS(t)
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	files := append(harness.Busybox(t), harness.File{Name: "srv/site/", Type: tar.TypeDir, Mode: 0o750, UID: 33},
		harness.File{Name: "srv/site/index", Type: tar.TypeReg, Body: "hello\n", Mode: 0o640, UID: 33},
		harness.File{Name: "srv/site/link", Type: tar.TypeSymlink, Link: "index"},
		harness.File{Name: "srv/site/sub/", Type: tar.TypeDir, Mode: 0o700},
		harness.File{Name: "srv/site/sub/again", Type: tar.TypeLink, Link: "srv/site/index"},
	)
	img := harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Volumes: map[string]struct{}{"/srv/site": {}, "/var/none": {}, "/proc": {}}},
		harness.Layer(t, "gzip", harness.Tar(t, files...)))
	registry.Push(t, "site:1", img)
	ref := registry.Name("site:1")
	if err := d.Call(t.Context(), http.MethodPost, "/v1/images/pull", api.PullImage{Reference: ref}, nil); err != nil {
		t.Fatal(err)
	}
	look := "cat /srv/site/link; stat -c '%a %u:%g' /srv/site /srv/site/index /srv/site/sub; stat -c %h /srv/site/sub/again"
	want := "hello\n750 33:33\n640 33:33\n700 0:0\n2\n"
	if d.System(t).Enforced.IDs == api.IDsSingle {
		want = strings.ReplaceAll(want, "33:33", "0:0")
	}
	s := d.Create(t, api.CreateSandbox{Image: ref, Settings: withVolumes(api.Mount{Type: api.MountVolume, Target: "/own"})})
	if got := s.Sh(t, look+"; grep -c .volumes/ /proc/self/mountinfo"); got != want+"3\n" {
		t.Errorf("of the image: %q, want %q", got, want)
	}
	var own []string
	for _, m := range s.Mounts {
		if m.Type != api.MountVolume || !m.Anonymous || len(m.Source) != 64 {
			t.Errorf("mount %+v", m)
		}
		own = append(own, m.Source)
	}
	if len(own) != 3 {
		t.Fatalf("mounts %+v", s.Mounts)
	}
	s.Sh(t, "echo changed > /srv/site/index")
	// A fork has volumes of its own; a snapshot none.
	var forks api.SandboxForked
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{}, &forks); err != nil {
		t.Fatal(err)
	}
	fork := d.Sandbox(forks.Sandboxes[0])
	if got := fork.Sh(t, look); got != want || len(fork.Mounts) != 3 || slices.Contains(own, fork.Mounts[0].Source) {
		t.Errorf("the fork: %q, %+v", got, fork.Mounts)
	}
	var shot api.Snapshot
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/snapshots", api.TakeSnapshot{}, &shot); err != nil {
		t.Fatal(err)
	}
	of := d.Create(t, api.CreateSandbox{Snapshot: shot.ID})
	if got := of.Sh(t, look); got != want || len(of.Mounts) > 0 {
		t.Errorf("of the snapshot: %q, %+v", got, of.Mounts)
	}
	var changes api.SandboxDiff
	if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+s.ID+"/diff", nil, &changes); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes.Changes {
		if strings.HasPrefix(c.Path, "/srv/site") || strings.HasPrefix(c.Path, "/own/") {
			t.Errorf("diff has %+v", c)
		}
	}
	// A volume of another sandbox may be named; then it goes with the last of the two.
	other := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount(own[0], "/other"))})
	s.Delete(t)
	c := d.Client(t)
	if v, err := c.Volume(t.Context(), own[0]); err != nil || !v.Bound || !v.Anonymous || len(v.Sandboxes) != 1 {
		t.Errorf("used by another: %+v, %v", v, err)
	}
	other.Delete(t)
	fork.Delete(t)
	of.Delete(t)
	list, err := c.Volumes(t.Context(), nil)
	for _, v := range list {
		if v.Bound && slices.Contains(own, v.Name) {
			t.Errorf("left: %+v", v)
		}
	}
	if err != nil {
		t.Error(err)
	}

	// A named volume: once, not with no_copy, and not if it has files.
	name := makeVolume(t, d, api.CreateVolume{})
	at := volumeMount(name, "/srv/site")
	none := at
	none.NoCopy = true
	for i, tt := range []struct {
		mount api.Mount
		do    string
		want  string
	}{
		{none, "ls -A /srv/site | wc -l", "0\n"},
		{at, look, want},
		{at, "rm -r /srv/site/sub /srv/site/link; ls -A /srv/site", "index\n"},
		{at, "ls -A /srv/site; rm /srv/site/index", "index\n"},
		{none, "ls -A /srv/site | wc -l", "0\n"},
		{at, look, want},
	} {
		s := d.Create(t, api.CreateSandbox{Image: ref, Settings: withVolumes(tt.mount)})
		if got := s.Sh(t, tt.do); got != tt.want {
			t.Errorf("%d: %q, want %q", i, got, tt.want)
		}
		s.Delete(t)
	}
	if os.Getuid() == 0 { // a copy that a crash has cut off is made anew
		name := makeVolume(t, d, api.CreateVolume{})
		s := d.Create(t, api.CreateSandbox{Image: ref, Settings: withVolumes(api.Mount{Type: api.MountVolume, Source: name, Target: "/srv/site", NoCopy: true})})
		s.Sh(t, "mkdir -p /srv/site/half/a; echo part > /srv/site/index")
		s.Delete(t)
		found, err := filepath.Glob(filepath.Join(d.DataDir, "sandboxes/.volumes/*/data/half"))
		if err != nil || len(found) != 1 {
			t.Fatalf("%q, %v", found, err)
		}
		if err := os.WriteFile(filepath.Join(found[0], "../../filling"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		s = d.Create(t, api.CreateSandbox{Image: ref, Settings: withVolumes(volumeMount(name, "/srv/site"))})
		if got := s.Sh(t, look+"; ls /srv/site"); got != want+"index\nlink\nsub\n" {
			t.Errorf("after a crash: %q", got)
		}
		s.Delete(t)
	}
	// Too many files are not copied, and the volume stays as it was.
	small := makeVolume(t, d, api.CreateVolume{Inodes: 3})
	_, err = c.CreateSandbox(t.Context(), api.CreateSandbox{Image: ref, Settings: withVolumes(volumeMount(small, "/srv/site"))})
	if err == nil || !strings.Contains(err.Error(), "more than the volume may have") {
		t.Errorf("an image that does not fit: %v", err)
	}
	if v, err := c.Volume(t.Context(), small); err != nil || v.Usage.Inodes != 0 {
		t.Errorf("after that: %+v, %v", v, err)
	}
}

// A volume is exported with its names, owners and links, and imported whole or not at all. Nothing
// in an archive leads out of the volume.
func TestVolumeArchives(t *testing.T) {
	testenv.RequireUserNS(t)
	d := shared(t)
	c := d.Client(t)
	from := makeVolume(t, d, api.CreateVolume{})
	s := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount(from, "/v"))})
	s.Sh(t, `cd /v; echo text > file; ln file again; ln -s /etc/passwd out; mkdir -p .wh.dir/x; echo a > .wh.file; touch .wh..wh..opq; mkfifo pipe; truncate -s 3m hole
python3 -c 'import os, socket; os.setxattr("/v/file", "user.note", b"1"); os.setxattr("/v/.wh.dir", "user.overlay.opaque", b"y"); os.setxattr("/v/file", "user.overlay.redirect", b"/x"); socket.socket(socket.AF_UNIX).bind("/v/socket")'`)
	look := `cd /v; find . | sort; cat file .wh.file; readlink out; stat -c %h again; stat -c "%s %b" hole; python3 -c 'import os; print(os.listxattr("/v/file"))'`
	archive, err := c.ExportVolume(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(archive)
	if err := errors.Join(err, archive.Close()); err != nil {
		t.Fatal(err)
	}
	to, err := c.ImportVolume(t.Context(), bytes.NewReader(data), api.CreateVolume{Name: from + "-copy", Size: 8 << 20, Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	dropVolume(t, d, to.Name)
	copied := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount(to.Name, "/v"))})
	want := ".\n./.wh..wh..opq\n./.wh.dir\n./.wh.dir/x\n./.wh.file\n./again\n./file\n./hole\n./out\n./pipe\ntext\na\n/etc/passwd\n2\n3145728 0\n['user.note']\n"
	if got := copied.Sh(t, look); got != want || to.Size != 8<<20 || to.Labels["a"] != "b" {
		t.Errorf("imported: %q, want %q; %+v", got, want, to)
	}
	if _, err := c.ImportVolume(t.Context(), bytes.NewReader(data), api.CreateVolume{Name: to.Name}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("import to a volume with a running sandbox: %v", err)
	}
	copied.MustTurn(t, "stop", nil, api.StateStopped)
	if _, err := c.ImportVolume(t.Context(), bytes.NewReader(data), api.CreateVolume{Name: to.Name}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) || !strings.Contains(err.Error(), "has files") {
		t.Errorf("import to a volume with files: %v", err)
	}
	copied.Delete(t)

	file := func(name string) harness.File { return harness.File{Name: name, Type: tar.TypeReg, Body: "x"} }
	for name, tt := range map[string]struct {
		files []harness.File
		size  int64
		want  string // in the error
	}{
		"climbs":               {files: []harness.File{file("a"), file("../b")}, want: `".."`},
		"climbs within":        {files: []harness.File{file("a/../../b")}, want: `".."`},
		"links out":            {files: []harness.File{file("a"), {Name: "b", Type: tar.TypeLink, Link: "../../etc/passwd"}}, want: `".."`},
		"link to nothing":      {files: []harness.File{{Name: "b", Type: tar.TypeLink, Link: "/etc/passwd"}}, want: "not in this"},
		"root is a link":       {files: []harness.File{{Name: ".", Type: tar.TypeSymlink, Link: "/etc"}}, want: "root"},
		"owner beyond":         {files: []harness.File{{Name: "b", Type: tar.TypeReg, UID: 70000}}, want: "70000"},
		"larger than it may":   {files: []harness.File{{Name: "b", Type: tar.TypeReg, Body: strings.Repeat("x", 20_000)}}, size: 10_000, want: "10000"},
		"of an unknown kind":   {files: []harness.File{{Name: "b", Type: 'Q'}}, want: "not supported"},
		"no tar":               {want: "entry 1"},
		"blocks beyond a size": {files: slices.Repeat([]harness.File{file("a"), file("b"), file("c"), file("d")}, 1), size: 12_000, want: "12000"},
	} {
		if d.System(t).Enforced.IDs == api.IDsSingle && name == "owner beyond" {
			continue
		}
		body := []byte("no tar at all, but a text that is long enough for one" + strings.Repeat(".", 1000))
		if tt.files != nil {
			body = harness.Tar(t, tt.files...)
		}
		v, err := c.ImportVolume(t.Context(), bytes.NewReader(body), api.CreateVolume{Name: "hostile", Size: tt.size})
		if err == nil || !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v", name, v, err)
		}
		if _, err := c.Volume(t.Context(), "hostile"); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			t.Errorf("%s: a volume is left: %v", name, err)
			_ = c.RemoveVolume(t.Context(), "hostile")
		}
	}
	// Links are kept, and never followed to somewhere else; devices are left out.
	odd, err := c.ImportVolume(t.Context(), bytes.NewReader(harness.Tar(t,
		harness.File{Name: "etc-of-host", Type: tar.TypeSymlink, Link: "/etc"}, harness.File{Name: "etc-of-host/sandboxd-was-here", Type: tar.TypeReg},
		harness.File{Name: "up", Type: tar.TypeSymlink, Link: "../../.."}, harness.File{Name: "up/sandboxd-was-here", Type: tar.TypeReg},
		harness.File{Name: "null", Type: tar.TypeChar}, file("/absolute"),
	)), api.CreateVolume{})
	if err != nil || !odd.Anonymous || len(odd.Skipped) != 1 {
		t.Fatalf("%+v, %v", odd, err)
	}
	dropVolume(t, d, odd.Name)
	within := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount(odd.Name, "/v"))})
	if got := within.Sh(t, "cd /v; find . | sort; ls /sandboxd-was-here /etc/sandboxd-was-here 2>/dev/null; true"); got != ".\n./absolute\n./etc\n./etc-of-host\n./etc/sandboxd-was-here\n./sandboxd-was-here\n./up\n" {
		t.Errorf("odd: %q", got)
	}
	for _, path := range []string{"/etc/sandboxd-was-here", "/sandboxd-was-here", filepath.Join(d.DataDir, "sandboxd-was-here")} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	within.Delete(t)
	s.Delete(t)

	// A stream that breaks off, here by its length, is not taken for one that has ended.
	broken := &cutShort{r: bytes.NewReader(data[:1024])}
	if _, err := c.ImportVolume(t.Context(), broken, api.CreateVolume{Name: "broken"}); err == nil {
		t.Error("a stream that broke off was imported")
	}
	harness.Eventually(t, func() error {
		if _, err := c.Volume(t.Context(), "broken"); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return fmt.Errorf("it left a volume: %w", err)
		}
		return nil
	})
}

// cutShort is a reader that ends with an error.
type cutShort struct{ r io.Reader }

func (c *cutShort) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if errors.Is(err, io.EOF) {
		err = errors.New("the sender gave up")
	}
	return n, err
}

// While a sandbox swaps directories of a volume with links, an export holds files of the volume or
// fails: it follows none of them.
func TestSwappedVolumeIsExported(t *testing.T) {
	testenv.RequireUserNS(t)
	d := shared(t)
	c := d.Client(t)
	name := makeVolume(t, d, api.CreateVolume{})
	s := d.Create(t, api.CreateSandbox{Settings: withVolumes(volumeMount(name, "/v"))})
	s.Sh(t, "cd /v; mkdir -p aside/x dir/x; echo ours > dir/passwd; ln -s /etc link; ln -s ../../../../../../etc up")
	detach(t, c, s, api.ExecRequest{Argv: []string{"python3", "-c", `
import os
os.chdir("/v"); open("ready", "w")
while True:
    for a, b in (("dir", "gone"), ("link", "dir"), ("dir", "link"), ("up", "dir"), ("dir", "up"), ("gone", "dir")): os.rename(a, b)`}})
	harness.Eventually(t, func() error {
		if got := s.Sh(t, "ls /v"); !strings.Contains(got, "ready") {
			return errors.New("it does not swap")
		}
		return nil
	})
	for range testenv.Rounds(60, 2000) {
		r, err := c.ExportVolume(t.Context(), name)
		if err != nil {
			continue // it changed while it was read
		}
		archive := tar.NewReader(r)
		for {
			h, err := archive.Next()
			if err != nil {
				break // its end, or it changed
			}
			body, _ := io.ReadAll(archive)
			if strings.HasSuffix(h.Name, "/passwd") && len(body) > 0 && string(body) != "ours\n" || strings.Contains(h.Name, "shadow") {
				t.Fatalf("%s has %q", h.Name, body)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s.Delete(t)
}

// With a read-only root a volume is writable, a new one belongs to the programs' user, and one with
// mounts of the host keeps its owners or is refused.
func TestVolumesOfReadOnlyRoots(t *testing.T) {
	testenv.RequireUserNS(t)
	dir := mountRoot(t)
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir, "--volume-limit", "64m"}})
	c := d.Client(t)
	ids := d.System(t).Enforced.IDs
	req := api.CreateSandbox{Settings: withVolumes(volumeMount("", "/own"), volumeMount("data", "/data"))}
	if req.ReadOnly = true; ids != api.IDsSingle {
		req.Profile = "hardened"
	}
	s := d.Create(t, req)
	if got := s.Sh(t, "touch /own/x /data/x && ls /own /data; touch /x 2>/dev/null || echo refused"); got != "/data:\nx\n\n/own:\nx\nrefused\n" {
		t.Errorf("a read-only root: %q", got)
	}
	if v, err := c.Volume(t.Context(), "data"); err != nil || v.Size != 1<<20 || s.Enforced.Volumes != "accounting" {
		t.Errorf("a volume without a size: %+v, %v; enforced.volumes %q", v, err, s.Enforced.Volumes)
	}
	if _, err := c.CreateVolume(t.Context(), api.CreateVolume{Name: "large", Size: 64 << 20}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) || !strings.Contains(err.Error(), "of at most 64") {
		t.Errorf("beyond --volume-limit: %v", err)
	}
	both := api.CreateSandbox{Settings: withVolumes(volumeMount("data", "/data"), bindMount(dir, "/mnt/host"))}
	with, err := c.CreateSandbox(t.Context(), both)
	switch {
	case ids == api.IDsShared:
		if !errors.Is(err, &api.Problem{Code: api.CodeUnenforceable}) {
			t.Errorf("with a mount of the host: %v", err)
		}
	case err != nil:
		t.Error(err)
	default:
		mounted := d.Sandbox(*with)
		if got := mounted.Sh(t, "touch /mnt/host/x; ls /data /mnt/host"); got != "/data:\nx\n\n/mnt/host:\nx\n" {
			t.Errorf("with a mount of the host: %q", got)
		}
		mounted.Delete(t)
	}
	s.Delete(t)
	if err := c.RemoveVolume(t.Context(), "data"); err != nil {
		t.Error(err)
	}
}
