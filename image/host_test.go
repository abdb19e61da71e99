package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

// fakeHost builds a root with the secrets that a careless administrator leaves.
func fakeHost(t *testing.T) string {
	t.Helper()
	top := t.TempDir()
	write := func(name, content string, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(top, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	link := func(name, target string) {
		t.Helper()
		if err := os.Symlink(target, filepath.Join(top, name)); err != nil {
			t.Fatal(err)
		}
	}
	write("usr/bin/bash", "", 0o755)
	write("usr/local/lib/python3.11/dist-packages/deep/x", "", 0o644)
	write("usr/lib/python3/dist-packages/x", "", 0o644)
	write("etc/ld.so.cache", "cache", 0o644)
	write("etc/mime.types", "not for all", 0o640)
	write("etc/ssl/certs/ca.pem", "certificate", 0o644)
	write("etc/ssl/certs/oops.pem", "-----BEGIN PRIVATE KEY-----\nSECRET", 0o644)
	write("etc/ssl/certs/oops.key", "SECRET", 0o644)
	write("etc/ssl/certs/private/x.pem", "SECRET", 0o644)
	write("etc/ssl/private/host.pem", "SECRET", 0o644)
	write("etc/perl/closed/x", "SECRET", 0o644)
	write("etc/python3.11/sitecustomize.py", "pass", 0o644)
	for _, secret := range []string{
		"etc/shadow", "etc/passwd", "etc/hosts", "etc/resolv.conf", "etc/profile", "etc/profile.d/token.sh", "etc/environment", "etc/pip.conf", "etc/npmrc",
		"etc/ssh/ssh_host_key", "etc/machine-id", "etc/unknown", "etc/maven/settings.xml", "root/x", "home/me/x", "var/lib/x", "run/x", "opt/x", "srv/x", "tmp/x", "mnt/x",
	} {
		write(secret, "SECRET", 0o644)
	}
	if err := os.Chmod(filepath.Join(top, "etc/perl/closed"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(top, "etc/alternatives"), 0o755); err != nil {
		t.Fatal(err)
	}
	link("etc/alternatives/vi", "/usr/bin/vim")
	link("etc/localtime", "/root/x") // reveals nothing by itself
	link("etc/services", "/etc/shadow")
	link("bin", "usr/bin")
	link("lib64", "/root")
	if err := os.Mkdir(filepath.Join(top, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	return top
}

func entriesOf(t *testing.T, data []byte) map[string]*tar.Header {
	t.Helper()
	out := make(map[string]*tar.Header)
	r := tar.NewReader(bytes.NewReader(data))
	for {
		hdr, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out[hdr.Name] = hdr
	}
}

func TestHostTarShowsWhatProgramsNeedAndNothingElse(t *testing.T) {
	root, err := os.OpenRoot(fakeHost(t))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var buf, again bytes.Buffer
	dirs, err := writeHostTar(&buf, root)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := writeHostTar(&again, root); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(buf.Bytes(), again.Bytes()) {
		t.Error("two runs differ")
	}
	if diff := cmp.Diff([]string{"/usr", "/lib"}, dirs); diff != "" {
		t.Errorf("host directories (-want +got):\n%s", diff)
	}
	if i := bytes.Index(buf.Bytes(), []byte("SECRET")); i >= 0 {
		t.Errorf("something is shown that must not be: ...%.300q...", buf.Bytes()[max(0, i-600):i+6])
	}
	got := entriesOf(t, buf.Bytes())
	for _, want := range []string{
		"etc/ld.so.cache", "etc/ssl/certs/ca.pem", "etc/python3.11/sitecustomize.py", "etc/alternatives/vi", "etc/localtime", "etc/passwd", "etc/hosts",
		"usr/", "usr/bin/", "usr/local/lib/python3.11/dist-packages/", "usr/lib/python3/dist-packages/", "bin", "lib/", "tmp/", "root/", "dev/", "proc/", "home/sandbox/",
	} {
		if got[want] == nil {
			t.Errorf("%s is missing", want)
		}
	}
	for name, hdr := range got {
		switch {
		case hdr.Typeflag == tar.TypeReg && !strings.HasPrefix(name, "etc/"):
			t.Errorf("%s: a file outside of /etc", name)
		case name == "lib64", name == "etc/machine-id", name == "etc/mime.types", strings.HasPrefix(name, "etc/perl/closed"), strings.Contains(name, "private"),
			strings.HasPrefix(name, "etc/ssh"), strings.Contains(name, "deep"):
			t.Errorf("%s should not be there", name)
		case hdr.Uid != 0 && name != "home/sandbox/":
			t.Errorf("%s belongs to %d", name, hdr.Uid)
		}
	}
	if m := got["tmp/"].Mode; m != 0o1777 {
		t.Errorf("tmp has mode %o", m)
	}
}

func TestHostImageIsMadeOnceAndAgainWhenTheHostChanges(t *testing.T) {
	a := newApplier(t)
	s, err := Open(t.TempDir(), a, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.host.root = fakeHost(t)
	written, write := 0, s.opts.HostLayer
	s.opts.HostLayer = func(ctx context.Context, to *os.File) ([]string, error) {
		written++
		return write(ctx, to)
	}
	first, err := s.Get(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	if first.Reference != "host" || first.Digest != first.Rootfs.Layers[0] || len(first.Rootfs.Layers) != 1 || !slices.Contains(first.Rootfs.HostDirs, "/usr") {
		t.Errorf("host image %+v", first)
	}
	if _, err := os.Stat(filepath.Join(a.path(first.Rootfs.Layers[0]), "etc/ld.so.cache")); err != nil {
		t.Error(err)
	}
	second, err := s.Get(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	// A caller that found no image before the first one was made gets here afterwards.
	if err := s.makeHost(t.Context()); err != nil {
		t.Error(err)
	}
	if written != 1 || len(a.applied) != 1 || second.Rootfs.Layers[0] != first.Rootfs.Layers[0] {
		t.Errorf("written %d times, applied %v", written, a.applied)
	}
	// As ldconfig does it.
	cache := filepath.Join(s.host.root, "etc/ld.so.cache")
	if err := os.WriteFile(cache+"~", []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(cache+"~", 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(cache+"~", cache); err != nil {
		t.Fatal(err)
	}
	third, err := s.Get(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	if third.Rootfs.Layers[0] == first.Rootfs.Layers[0] {
		t.Error("the host has changed and its image has not")
	}
	// The first one may be in use.
	if len(a.removed) != 0 {
		t.Errorf("removed %v", a.removed)
	}
	images, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(images) != 1 || images[0].Size == 0 {
		t.Errorf("list %+v", images)
	}
}

func TestHostImageOfThisHost(t *testing.T) {
	a := newApplier(t)
	s, err := Open(t.TempDir(), a, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	img, err := s.Get(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes, directories %v", img.Size, img.Rootfs.HostDirs)
	passwd, err := os.ReadFile(filepath.Join(a.path(img.Rootfs.Layers[0]), "etc/passwd"))
	if err != nil || !bytes.HasPrefix(passwd, []byte("root:x:0:0:root:/root:")) {
		t.Errorf("etc/passwd %q, %v", passwd, err)
	}
}
