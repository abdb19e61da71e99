package hostdir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
)

// TestMain is also the child that copies a mount: the test binary executed once more.
func TestMain(m *testing.M) {
	if code, ok := Main(os.Args[1:]); ok {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// tree makes directories (names that end with a slash), files, and links (name -> target).
func tree(t *testing.T, names ...string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		link, to, isLink := strings.Cut(name, " -> ")
		path := filepath.Join(dir, link)
		switch {
		case isLink:
			err = os.Symlink(to, path)
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(path, 0o755)
		default:
			err = os.WriteFile(path, []byte(name), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A source lies below a root, is reached without links, and is apart from the daemon's directories.
func TestSourcesThatMayBeMounted(t *testing.T) {
	dir := tree(t, "root/a/b/", "root/file", "root/empty/", "root/data/sandboxes/", "root/run/beside/", "root/run/config", "outside/secret/",
		"root/out -> ../outside", "root/abs -> /etc", "root/in -> a", "root/a/up -> ..", "root/tofile -> file", "root2/", "closed/")
	if err := os.Chmod(filepath.Join(dir, "closed"), 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "root/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := &Config{
		Roots: []string{filepath.Join(dir, "root")},
		Own:   []string{filepath.Join(dir, "root/data"), filepath.Join(dir, "gone")}, Kept: []string{filepath.Join(dir, "root/run"), filepath.Join(dir, "closed")},
	}
	for source, reason := range map[string]string{
		"root/a": "", "root/a/b": "", "root/run/beside": "", "root/file": "", "root/empty": "",
		"root":                "it contains",
		"root/run":            "it contains",
		"root/run/config":     "it lies beside",
		"root/data":           "it lies in",
		"root/data/sandboxes": "it lies in",
		"outside":             "not below",
		"outside/secret":      "not below",
		"root2":               "not below",
		"root/out":            "symbolic link",
		"root/out/secret":     "symbolic link",
		"root/abs":            "symbolic link",
		"root/abs/passwd":     "symbolic link",
		"root/in":             "symbolic link",
		"root/in/b":           "symbolic link",
		"root/a/up/file":      "symbolic link",
		"root/tofile":         "symbolic link",
		"root/gone":           "no such file",
		"root/file/x":         "not a directory",
		"root/fifo":           "neither a directory",
	} {
		f, err := c.Open(filepath.Join(dir, source))
		if f != nil {
			defer f.Close()
		}
		switch {
		case reason == "" && err != nil:
			t.Errorf("%s: %v", source, err)
		case reason != "" && (!errors.Is(err, runtime.ErrMount) || !strings.Contains(err.Error(), reason)):
			t.Errorf("%s: %v, want %q", source, err, reason)
		}
	}
	for _, source := range []string{"", "/", "root/a", dir + "/root/../outside", dir + "/root/a/", dir + "/root//a", dir + "/root/a/../../outside", dir + "/root/a\x00"} {
		if f, err := c.Open(source); err == nil {
			t.Errorf("%q is opened", source)
			f.Close()
		}
	}
	none := &Config{}
	if _, err := none.Open(dir); !errors.Is(err, runtime.ErrMount) || !strings.Contains(err.Error(), "--mount-root") {
		t.Errorf("without roots: %v", err)
	}
}

// Missing directories are made below a root alone, behind no link and in none of our own.
func TestSourcesThatAreMade(t *testing.T) {
	dir := tree(t, "root/a/", "root/file", "root/data/", "outside/", "root/out -> ../outside", "root/in -> a")
	c := Config{Roots: []string{filepath.Join(dir, "root")}, Own: []string{filepath.Join(dir, "root/data")}}
	for source, made := range map[string]bool{
		"root/new": true, "root/a/b/c": true, "root/a": true,
		"root/file/x": false, "root/out/x": false, "root/in/x": false, "root/data/x": false, "outside/x": false, "root/a/../../outside/y": false,
	} {
		full := dir + "/" + source
		_, before := os.Lstat(full)
		if err := c.Check(full, false); before != nil && !errors.Is(err, runtime.ErrMount) {
			t.Errorf("%s: %v before it is made", source, err)
		}
		err := c.Check(full, true)
		if fi, serr := os.Stat(full); (err == nil) != made || !made && serr == nil || made && (serr != nil || fi.Mode().Perm() != 0o755) {
			t.Errorf("%s: %v; %v, %v", source, err, fi, serr)
		}
		if err != nil && !errors.Is(err, runtime.ErrMount) {
			t.Errorf("%s: %v", source, err)
		}
	}
	for _, left := range []string{"outside", "root/data"} {
		if entries, err := os.ReadDir(filepath.Join(dir, left)); err != nil || len(entries) > 0 {
			t.Errorf("%s has %v, %v", left, entries, err)
		}
	}
}

// While a directory is swapped with a link out of the root, what is opened is the directory or
// nothing.
func TestSwappedSource(t *testing.T) {
	dir := tree(t, "root/a/b/", "outside/b/")
	c := &Config{Roots: []string{filepath.Join(dir, "root")}}
	a, aside, link := filepath.Join(dir, "root/a"), filepath.Join(dir, "aside"), filepath.Join(dir, "link")
	if err := os.Symlink("../outside", link); err != nil {
		t.Fatal(err)
	}
	var want unix.Stat_t
	if err := unix.Stat(filepath.Join(a, "b"), &want); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for {
			for _, step := range [][2]string{{a, aside}, {link, a}, {a, link}, {aside, a}} {
				if err := os.Rename(step[0], step[1]); err != nil {
					t.Error(err)
					return
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for range 2000 {
		f, err := c.Open(filepath.Join(a, "b"))
		if err != nil {
			continue // a link, or nothing, was there
		}
		var got unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &got); err != nil || got.Dev != want.Dev || got.Ino != want.Ino {
			t.Fatalf("another directory is open, %v", err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	swapping.Wait()
}

// The mount of an ordinary user's daemon has its flags, and none of another user's files.
func TestPlainMount(t *testing.T) {
	testenv.RequireUserNS(t)
	dir := tree(t, "root/a/", "root/a/file", "root/link -> /etc")
	c := &Config{Roots: []string{filepath.Join(dir, "root")}}
	for readOnly, want := range map[bool]int64{false: unix.ST_NOSUID | unix.ST_NODEV, true: unix.ST_NOSUID | unix.ST_NODEV | unix.ST_RDONLY} {
		for _, source := range []string{"root/a", "root/a/file"} {
			m, err := c.Plain(t.Context(), filepath.Join(dir, source), readOnly)
			if err != nil {
				t.Fatal(err)
			}
			checkMount(t, m, filepath.Join(dir, source), want)
		}
	}
	if _, err := c.Plain(t.Context(), filepath.Join(dir, "root/link"), false); !errors.Is(err, runtime.ErrMount) {
		t.Errorf("a link: %v", err)
	}
	if os.Geteuid() != 0 {
		c.Roots = []string{"/usr"} // of root
	} else if err := os.Lchown(filepath.Join(dir, "root/a"), 12345, 12345); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(c.Roots[0], map[bool]string{true: "a", false: "lib"}[os.Geteuid() == 0])
	if _, err := c.Plain(t.Context(), foreign, true); !errors.Is(err, runtime.ErrMount) || !strings.Contains(err.Error(), "daemon's user") {
		t.Errorf("%s of another user: %v", foreign, err)
	}
}

func checkMount(t *testing.T, m *os.File, source string, want int64) {
	t.Helper()
	defer m.Close()
	var fs unix.Statfs_t
	var of, on unix.Stat_t
	if err := errors.Join(unix.Fstatfs(int(m.Fd()), &fs), unix.Fstat(int(m.Fd()), &of), unix.Stat(source, &on)); err != nil {
		t.Fatal(err)
	}
	const all = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_RDONLY
	if fs.Flags&all != want {
		t.Errorf("%s: flags %#x, want %#x", source, fs.Flags&all, want)
	}
	if of.Dev != on.Dev || of.Ino != on.Ino {
		t.Errorf("%s: another inode", source)
	}
}

// The mount of root's daemon shows the owner of the source as the id that was asked for.
func TestMappedMount(t *testing.T) {
	testenv.RequireOwnIDs(t)
	dir := tree(t, "root/a/", "root/b/")
	c := &Config{Roots: []string{filepath.Join(dir, "root")}}
	if err := os.Lchown(filepath.Join(dir, "root/b"), 1234, 4321); err != nil {
		t.Fatal(err)
	}
	for source, owner := range map[string][2]int{"root/a": {0, 0}, "root/b": {1234, 4321}} {
		m, err := c.Mapped(filepath.Join(dir, source), true, func(uid, gid int) (u, g []idmap.Range, err error) {
			if uid != owner[0] || gid != owner[1] {
				t.Errorf("%s: ids %d:%d", source, uid, gid)
			}
			return []idmap.Range{{Inside: uid, Outside: 70000, Size: 1}}, []idmap.Range{{Inside: gid, Outside: 80000, Size: 1}}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(m.Fd()), &st); err != nil || st.Uid != 70000 || st.Gid != 80000 {
			t.Errorf("%s is seen as %d:%d, %v", source, st.Uid, st.Gid, err)
		}
		checkMount(t, m, filepath.Join(dir, source), unix.ST_NOSUID|unix.ST_NODEV|unix.ST_RDONLY)
	}
	c.Roots = []string{"/sys"}
	if _, err := c.Mapped("/sys/kernel", true, func(int, int) (u, g []idmap.Range, err error) {
		return []idmap.Range{{Size: 1}}, []idmap.Range{{Size: 1}}, nil
	}); !errors.Is(err, runtime.ErrMount) || !strings.Contains(err.Error(), "cannot map ids") {
		t.Errorf("a file system without maps: %v", err)
	}
}
