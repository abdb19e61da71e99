package launcher

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
)

func TestLogIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "launcher.log")
	old := strings.Repeat("x", logLimit+1)
	for _, content := range []string{"short\n", old} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := openLog(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("new\n"); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{path: "new\n", path + ".1": old} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s has %d bytes (%v), want %d", name, len(got), err, len(want))
		}
	}
	// A foreign link is not followed.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".1", path); err != nil {
		t.Fatal(err)
	}
	if _, err := openLog(path); err == nil {
		t.Error("the log is a link, and was opened")
	}
}

func TestLauncherOfAnotherDataDirIsRefused(t *testing.T) {
	o := Options{DataDir: "/data/a", RuntimeDir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(o.RuntimeDir, ownerFile), []byte(o.DataDir), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := checkOwner(o); err != nil {
		t.Error(err)
	}
	o.DataDir = "/data/b"
	if err := checkOwner(o); err == nil || !strings.Contains(err.Error(), "--data-dir /data/a") {
		t.Errorf("a launcher of /data/a is taken for one of /data/b: %v", err)
	}
}

// The trees in both directories are spread over the disk if that is ext4.
func TestTreesAreSpread(t *testing.T) {
	dir := t.TempDir()
	var fsys unix.Statfs_t
	if err := unix.Statfs(dir, &fsys); err != nil {
		t.Fatal(err)
	}
	if fsys.Type != unix.EXT4_SUPER_MAGIC {
		t.Skipf("the file system is none that spreads: type %#x; ext4 is to be had in the test bed", fsys.Type)
	}
	ids := idmap.Plan{UID: []idmap.Range{{Outside: os.Getuid(), Size: 1}}, GID: []idmap.Range{{Outside: os.Getgid(), Size: 1}}}
	if err := prepareDirs(Options{DataDir: dir, IDs: ids}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"layers": true, "sandboxes": true, "root": false} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		if got := flags&0x20000 != 0; got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Every fixed descriptor of the launcher is open from its first moment, so that none can be the Go
// runtime's.
func TestEveryDescriptorIsPassed(t *testing.T) {
	files := passed(os.Stdin, os.Stdin, os.Stdin, os.Stdin, os.Stderr, nil)
	if len(files) != fdEnd-fdListener {
		t.Fatalf("%d files for the descriptors %d to %d", len(files), fdListener, fdEnd-1)
	}
	for i, f := range files {
		if want := i+fdListener >= fdLayers; (f == os.Stderr) != want {
			t.Errorf("descriptor %d: placeholder %v, want %v", i+fdListener, f == os.Stderr, want)
		}
	}
}

// The reason of a crash stands at the beginning of a launcher's output, before all its goroutines.
func TestLogOfACrashShowsItsReason(t *testing.T) {
	path := filepath.Join(t.TempDir(), "launcher.log")
	crash := "fatal error: the reason\n" + strings.Repeat("goroutine\n", 1000) + "the end\n"
	if err := os.WriteFile(path, []byte("an earlier launcher\n"+crash), 0o600); err != nil {
		t.Fatal(err)
	}
	got := logged(path, int64(len("an earlier launcher\n")))
	if !strings.HasPrefix(got, "fatal error: the reason; ") || !strings.HasSuffix(got, "; the end") || len(got) > 2100 {
		t.Errorf("%q", got)
	}
}
