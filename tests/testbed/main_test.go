package main

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMachinesAreReadAndJoined(t *testing.T) {
	for text, want := range map[string][]spec{
		"6.1-tiny":                              {{"6.1", "tiny", []string{"dev", "root"}}},
		"6.12-systemd/dev,newest-tiny/root":     {{"6.12", "systemd", []string{"dev"}}, {newest, "tiny", []string{"root"}}},
		"6.1-tiny/root,6.12-tiny,6.1-tiny/dev":  {{"6.1", "tiny", []string{"dev", "root"}}, {"6.12", "tiny", []string{"dev", "root"}}},
		"6.1-tiny/root,6.1-tiny,6.1-tiny/root":  {{"6.1", "tiny", []string{"dev", "root"}}},
		"6.1":                                   nil,
		"6.1-tiny/nobody":                       nil,
		"5.10-tiny":                             nil,
		"6.1-tiny,":                             nil,
		"newest-systemd/dev,newest-tiny-x/root": nil,
	} {
		var got []spec
		err := specs{&got}.Set(text)
		if (err == nil) != (want != nil) {
			t.Errorf("%q: %v, %v", text, got, err)
		} else if diff := cmp.Diff(want, got, cmp.AllowUnexported(spec{})); err == nil && diff != "" {
			t.Errorf("%q: %s", text, diff)
		}
	}
}

// The two kinds of kernels: in the image by their series, and the newest beside it with an image
// of its own.
func TestKernelsHaveTheirImages(t *testing.T) {
	i := images{dir: "/cache/testbed-0", newest: "newest-7.3.4-1~bpo13+1"}
	for kernel, want := range map[string][2]string{
		"6.12": {"/cache/testbed-0/root.img", "/cache/testbed-0/vmlinuz-6.12"},
		newest: {"/cache/testbed-0/newest-7.3.4-1~bpo13+1/root.img", "/cache/testbed-0/newest-7.3.4-1~bpo13+1/vmlinuz"},
	} {
		if root, vmlinuz := i.of(kernel); root != want[0] || vmlinuz != want[1] {
			t.Errorf("%s: %s and %s", kernel, root, vmlinuz)
		}
	}
}

func TestTheMachineIsToldWhoRunsTheJob(t *testing.T) {
	m := machine{root: "/a,b/root.img", flavour: "tiny", users: []string{"dev", "root"}, out: "/out"}
	got := strings.Join(m.arguments(), " ")
	for _, want := range []string{"testbed.users=dev,root", "testbed.flavour=tiny ", "file=/a,,b/root.img,", "init=/usr/sbin/testbed-init"} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not in %s", want, got)
		}
	}
}

// A machine that was taken over hands back names that lead elsewhere.
func TestResultsStayInTheirDirectory(t *testing.T) {
	dir := t.TempDir()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, kind := range map[string]byte{"good": tar.TypeReg, "../evil": tar.TypeReg} {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: kind, Mode: 0o644, Size: 1}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "result.tar")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unpack(file, filepath.Join(dir, "results")); err == nil {
		t.Error("a name that leads out was taken")
	}
	if _, err := os.Lstat(filepath.Join(dir, "evil")); err == nil {
		t.Error("a file was written outside")
	}
}

// Images that another run may have are kept, and images unused for long are removed.
func TestOldImagesAreForgotten(t *testing.T) {
	cache := t.TempDir()
	for name, age := range map[string]time.Duration{"newest-1": 2 * keepFor, "newest-2": keepFor / 2, "newest-3": 2 * keepFor, "other": 2 * keepFor} {
		dir := filepath.Join(cache, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(dir, then, then); err != nil {
			t.Fatal(err)
		}
	}
	if err := used(cache, "newest-*", filepath.Join(cache, "newest-3")); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(cache, "*"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(cache, "newest-2"), filepath.Join(cache, "newest-3"), filepath.Join(cache, "other")}
	if diff := cmp.Diff(want, left); diff != "" {
		t.Error(diff)
	}
}
