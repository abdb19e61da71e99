package layer_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// entry is one header with its content. Zero modes mean 0755 for directories and 0644 for the rest.
type entry struct {
	typ     byte
	name    string
	link    string
	body    string
	mode    int64
	uid     int
	gid     int
	xattrs  map[string]string
	format  tar.Format
	modTime time.Time
}

func dir(name string) entry            { return entry{typ: tar.TypeDir, name: name} }
func file(name, body string) entry     { return entry{typ: tar.TypeReg, name: name, body: body} }
func symlink(name, to string) entry    { return entry{typ: tar.TypeSymlink, name: name, link: to} }
func hardlink(name, to string) entry   { return entry{typ: tar.TypeLink, name: name, link: to} }
func special(typ byte, n string) entry { return entry{typ: typ, name: n} }

var epoch = time.Unix(1_000_000_000, 0)

func archive(tb testing.TB, entries ...entry) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		hdr := &tar.Header{
			Typeflag: e.typ, Name: e.name, Linkname: e.link, Size: int64(len(e.body)), Mode: e.mode,
			Uid: e.uid, Gid: e.gid, ModTime: e.modTime, Format: e.format,
		}
		if hdr.Mode == 0 {
			hdr.Mode = 0o644
			if e.typ == tar.TypeDir {
				hdr.Mode = 0o755
			}
		}
		if hdr.ModTime.IsZero() {
			hdr.ModTime = epoch
		}
		for k, v := range e.xattrs {
			if hdr.PAXRecords == nil {
				hdr.PAXRecords = map[string]string{}
			}
			hdr.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(hdr); err != nil {
			tb.Fatalf("write header %q: %v", e.name, err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// raw is a header that archive/tar would refuse to write.
func raw(name string, typ byte, set func(block []byte)) []byte {
	b := make([]byte, 512)
	copy(b[0:100], name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], "00000000000\x00")
	copy(b[136:], "00000000000\x00")
	b[156] = typ
	copy(b[257:], "ustar\x0000")
	if set != nil {
		set(b)
	}
	copy(b[148:156], "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// single reports whether files are extracted as by ordinary users, which cannot chown.
func single() bool { return os.Geteuid() != 0 }

// host is a directory outside of the layer with things that must not change.
type host struct {
	dir, before string
}

// plant puts a file, a directory and a link on the host, beside the layer's directory.
func plant(tb testing.TB) (h host, root *os.Root) {
	tb.Helper()
	top := tb.TempDir()
	h.dir = filepath.Join(top, "host")
	for _, d := range []string{h.dir, filepath.Join(h.dir, "etc"), filepath.Join(top, "layer")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	for _, f := range []string{"secret", "etc/passwd"} {
		if err := os.WriteFile(filepath.Join(h.dir, f), []byte("the host's "+f), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	root, err := os.OpenRoot(filepath.Join(top, "layer"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = root.Close()
		// Extracted modes may forbid an ordinary user to clean up.
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if d != nil && d.IsDir() {
				_ = os.Chmod(path, 0o700)
			}
			return nil
		})
	})
	h.before = list(tb, h.dir, true)
	return h, root
}

// unharmed fails the test when anything on the host changed.
func (h host) unharmed(tb testing.TB) {
	tb.Helper()
	if diff := cmp.Diff(h.before, list(tb, h.dir, true)); diff != "" {
		tb.Fatalf("THE HOST WAS CHANGED (-before +after):\n%s", diff)
	}
	// Nothing new beside it either.
	names, err := os.ReadDir(filepath.Dir(h.dir))
	if err != nil {
		tb.Fatal(err)
	}
	if len(names) != 2 {
		tb.Fatalf("SOMETHING WAS MADE OUTSIDE THE LAYER: %v", names)
	}
}

// list describes a tree, one line a file, sorted. The trees of tests are small.
func list(tb testing.TB, top string, full bool) string {
	tb.Helper()
	var b strings.Builder
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrPermission) {
			b.WriteString("shut to an ordinary user\n")
			return fs.SkipDir
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); errors.Is(err, fs.ErrPermission) {
			fmt.Fprintf(&b, "%s shut to an ordinary user\n", rel)
			return nil
		} else if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s ", rel)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			b.WriteString("dir")
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil && !errors.Is(err, fs.ErrPermission) {
				return err
			}
			fmt.Fprintf(&b, "file %q", content)
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, "-> %s", to)
		case unix.S_IFIFO:
			b.WriteString("fifo")
		case unix.S_IFCHR:
			fmt.Fprintf(&b, "chr %d", st.Rdev)
		default:
			fmt.Fprintf(&b, "mode %o", st.Mode)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFLNK {
			for _, name := range xattrs(path) {
				fmt.Fprintf(&b, " %s", name)
			}
		}
		if full {
			fmt.Fprintf(&b, " %o %d:%d %d", st.Mode&0o7777, st.Uid, st.Gid, st.Mtim.Sec)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return b.String()
}

func xattrs(path string) []string {
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return nil
	}
	var out []string
	for name := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		value := make([]byte, 4096)
		n, err := unix.Lgetxattr(path, name, value)
		if err == nil {
			out = append(out, name+"="+string(value[:n]))
		}
	}
	return out
}

func lines(l ...string) string {
	if len(l) == 0 {
		return ". dir\n"
	}
	return ". dir\n" + strings.Join(l, "\n") + "\n"
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func TestModesOwnersAndTimes(t *testing.T) {
	h, root := plant(t)
	when := func(sec int64) time.Time { return time.Unix(sec, 0) }
	stream := archive(t,
		entry{typ: tar.TypeDir, name: ".", mode: 0o711, modTime: when(11)},
		entry{typ: tar.TypeDir, name: "tmp", mode: 0o1777, modTime: when(12)},
		entry{typ: tar.TypeReg, name: "tmp/su", mode: 0o4755, uid: 7, gid: 8, modTime: when(13)},
		entry{typ: tar.TypeReg, name: "tmp/sg", mode: 0o2711, gid: 42, modTime: when(14)},
		entry{typ: tar.TypeDir, name: "locked", mode: 0o500, uid: 1000, gid: 1000, modTime: when(15)},
		entry{typ: tar.TypeReg, name: "locked/in", mode: 0o777, uid: 65535, gid: 65535, modTime: when(16)},
		entry{typ: tar.TypeSymlink, name: "locked/l", link: "/x", uid: 5, gid: 6, modTime: when(17)},
		entry{typ: tar.TypeFifo, name: "f", mode: 0o666, modTime: when(18)},
	)
	// A mask that takes everything away shows whether modes are set or asked for.
	old := syscall.Umask(0o777)
	_, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()})
	syscall.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	h.unharmed(t)
	own := func(uid, gid int) string {
		if single() {
			return fmt.Sprintf("%d:%d", os.Geteuid(), os.Getegid())
		}
		return fmt.Sprintf("%d:%d", uid, gid)
	}
	want := strings.Join([]string{
		". dir 711 " + own(0, 0) + " 11",
		"f fifo 666 " + own(0, 0) + " 18",
		"locked dir 500 " + own(1000, 1000) + " 15",
		`locked/in file "" 777 ` + own(65535, 65535) + " 16",
		"locked/l -> /x 777 " + own(5, 6) + " 17",
		"tmp dir 1777 " + own(0, 0) + " 12",
		`tmp/sg file "" 2711 ` + own(0, 42) + " 14",
		`tmp/su file "" 4755 ` + own(7, 8) + " 13",
	}, "\n") + "\n"
	if diff := cmp.Diff(want, list(t, root.Name(), true)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

func TestDirectoriesReplacedByLinksLeaveTheirModesBehind(t *testing.T) {
	_, root := plant(t)
	stream := archive(t,
		entry{typ: tar.TypeDir, name: "a/b", mode: 0o777}, entry{typ: tar.TypeDir, name: "c/b", mode: 0o700}, symlink("a", "c"))
	if _, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	fi, err := root.Lstat("c/b")
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != 0o700 {
		t.Errorf("c/b has mode %o, want 700", fi.Mode().Perm())
	}
}

func TestDirectoriesWithoutEntryAreLikeTheLayersBelow(t *testing.T) {
	_, lower := plant(t)
	below := archive(t, entry{typ: tar.TypeDir, name: "tmp", mode: 0o1777}, entry{typ: tar.TypeDir, name: ".", mode: 0o751})
	if _, err := layer.Apply(lower, bytes.NewReader(below), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	_, root := plant(t)
	stream := archive(t, file("tmp/x", ""), file("tmp/new/x", ""))
	if _, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single(), Lower: []*os.Root{lower}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{".": fs.ModeDir | 0o751, "tmp": fs.ModeDir | fs.ModeSticky | 0o777, "tmp/new": fs.ModeDir | 0o755} {
		fi, err := root.Lstat(name)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode() != want {
			t.Errorf("%s is %v, want %v", name, fi.Mode(), want)
		}
	}
}

func TestDirectoryThatIsNotEmptyIsRefused(t *testing.T) {
	_, root := plant(t)
	if err := root.Mkdir("x", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := layer.Apply(root, bytes.NewReader(archive(t)), layer.Options{SingleID: single()}); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Fatalf("error %v, want one about a directory that is not empty", err)
	}
}

func TestSkippedIsBounded(t *testing.T) {
	_, root := plant(t)
	var entries []entry
	for i := range layer.MaxSkipped + 5 {
		entries = append(entries, special(tar.TypeChar, fmt.Sprint("c", i)))
	}
	res, err := layer.Apply(root, bytes.NewReader(archive(t, entries...)), layer.Options{SingleID: single()})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Skipped) != layer.MaxSkipped || res.SkippedMore != 5 {
		t.Errorf("%d skipped and %d more, want %d and 5", len(res.Skipped), res.SkippedMore, layer.MaxSkipped)
	}
}

func TestNoDescriptorIsLeftOpen(t *testing.T) {
	count := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skipf("no /proc: %v", err)
		}
		return len(names)
	}
	_, root := plant(t)
	_, other := plant(t)
	before := count()
	good := archive(t, file("a/b", "x"), symlink("l", "a"), file("l/c", "y"), hardlink("l/h", "a/b"), file(".wh.w", ""), dir("w"))
	if _, err := layer.Apply(root, bytes.NewReader(good), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	bad := archive(t, file("a/b", "x"), file("a/b/c", "y"))
	if _, err := layer.Apply(other, bytes.NewReader(bad), layer.Options{SingleID: single(), Lower: []*os.Root{root}}); err == nil {
		t.Fatal("a file below a file was accepted")
	}
	if after := count(); after > before { // fewer: one that an earlier test had left was collected
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

// FuzzApply holds the one promise that matters most against any input: nothing outside the layer's
// directory changes.
func FuzzApply(f *testing.F) {
	for _, o := range corpus() {
		if stream := o.stream(f); len(stream) < 64<<10 {
			f.Add(stream)
		}
	}
	small := archive(f, file("a", "x"), file("b/.wh.c", ""))
	f.Add(compress(f, "gzip", small))
	f.Add(compress(f, "zstd", small))
	f.Add(cat(members(f, small), gzipFooter(f)))
	f.Add(cat(compress(f, "zstd", small), skippable("x")))
	f.Fuzz(func(t *testing.T, stream []byte) {
		h, root := plant(t)
		limits := layer.Limits{Entries: 100, Bytes: 1 << 20, Depth: 20, RatioFloor: 1 << 16, Ratio: 20}
		_, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single(), Limits: limits})
		h.unharmed(t)
		// Whatever is wrong, it is the layer that is to blame, but for an xattr that a file system has no
		// room for.
		if err != nil && !errors.Is(err, layer.ErrInvalid) && !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("the host is blamed: %v", err)
		}
		if err == nil {
			// On top of itself it is accepted as well: everything that the layers below are asked about is
			// there.
			above, top := plant(t)
			_, err := layer.Apply(top, bytes.NewReader(stream), layer.Options{SingleID: single(), Limits: limits, Lower: []*os.Root{root}})
			if err != nil && (!single() || !errors.Is(err, fs.ErrPermission)) {
				t.Errorf("a second time, above itself: %v", err)
			}
			above.unharmed(t)
			// An accepted layer has no device but whiteouts and no xattr with a meaning for overlayfs but
			// the opaque mark.
			for line := range strings.SplitSeq(list(t, root.Name(), false), "\n") {
				if strings.Contains(line, " chr ") && !strings.HasSuffix(line, " chr 0") {
					t.Errorf("a device was made: %s", line)
				}
				if strings.Contains(strings.ReplaceAll(line, " user.overlay.opaque=y", ""), " user.overlay.") {
					t.Errorf("overlayfs was given an order: %s", line)
				}
			}
		}
	})
}

// untilDone reports reads after the end.
type untilDone struct {
	t    *testing.T
	r    io.Reader
	done atomic.Bool
}

func (u *untilDone) Read(p []byte) (int, error) {
	if u.done.Load() {
		u.t.Error("the stream is read after Apply has returned")
	}
	return u.r.Read(p)
}

// The read-ahead ends with Apply, wherever that fails: the descriptor below may be closed, or
// reused.
func TestNothingIsReadAfterAnError(t *testing.T) {
	var long []entry
	long = append(long, file("../out", "x"))
	for i := range 64 {
		long = append(long, file(fmt.Sprint(i), strings.Repeat("x", 256<<10)))
	}
	_, root := plant(t)
	stream := &untilDone{t: t, r: bytes.NewReader(archive(t, long...))}
	_, err := layer.Apply(root, stream, layer.Options{SingleID: single()})
	stream.done.Store(true)
	if !errors.Is(err, layer.ErrInvalid) {
		t.Fatalf("error %v, want one that blames the layer", err)
	}
	// The goroutine signals its end a moment before it ends.
	stacks := make([]byte, 1<<20)
	for deadline := time.Now().Add(testenv.HungAfter); ; goruntime.Gosched() {
		n := goruntime.Stack(stacks, true)
		if !bytes.Contains(stacks[:n], []byte("readAhead).run")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a goroutine still reads ahead:\n%s", stacks[:n])
		}
	}
}

// Each settable limit refuses a layer beyond it, by its name, and accepts it once raised.
func TestLimitsThatCanBeSet(t *testing.T) {
	deep := strings.Repeat("d/", 40) + "f"
	zeros := file("zeros", strings.Repeat("\x00", 1<<20))
	// The floor is not for operators: small layers may be mostly padding.
	const floor = 1 << 16
	for _, tt := range []struct {
		limit        layer.Exceeded
		stream       []byte
		small, large layer.Limits
	}{
		{layer.ExceededEntries, archive(t, file("a", ""), file("b", ""), file("c", "")), layer.Limits{Entries: 2}, layer.Limits{Entries: 3}},
		{layer.ExceededEntries, archive(t, file("a", "")), layer.Limits{Entries: 5, Below: layer.Usage{Entries: 5}}, layer.Limits{Entries: 6, Below: layer.Usage{Entries: 5}}},
		{layer.ExceededBytes, archive(t, zeros), layer.Limits{Bytes: 1 << 20}, layer.Limits{Bytes: 2 << 20}},
		{layer.ExceededBytes, archive(t, zeros), layer.Limits{Bytes: 4 << 20, Below: layer.Usage{Bytes: 3<<20 + 1}}, layer.Limits{Bytes: 4 << 20, Below: layer.Usage{Bytes: 3 << 20}}},
		{layer.ExceededRatio, compress(t, "gzip", archive(t, zeros)), layer.Limits{Ratio: 20, RatioFloor: floor}, layer.Limits{Ratio: 2000, RatioFloor: floor}},
		{layer.ExceededDepth, archive(t, file(deep, "")), layer.Limits{Depth: 40}, layer.Limits{Depth: 41}},
		{layer.ExceededDepth, archive(t, symlink("l", strings.Repeat("d/", 40)), file("l/f", "")), layer.Limits{Depth: 40}, layer.Limits{Depth: 41}},
	} {
		_, root := plant(t)
		_, err := layer.Apply(root, bytes.NewReader(tt.stream), layer.Options{SingleID: single(), Limits: tt.small})
		if got, ok := errors.AsType[layer.Exceeded](err); !ok || got != tt.limit || !errors.Is(err, layer.ErrInvalid) {
			t.Errorf("%+v: %v", tt.small, err)
		}
		_, root = plant(t)
		if _, err := layer.Apply(root, bytes.NewReader(tt.stream), layer.Options{SingleID: single(), Limits: tt.large}); err != nil {
			t.Errorf("%+v: %v", tt.large, err)
		}
	}
}

// Directories that are made because a name has them count like those that an entry describes.
func TestImplicitDirectoriesCount(t *testing.T) {
	_, root := plant(t)
	stream := archive(t, file("a/b/c/d", "1"), file("a/b/c/e", "1"))
	opts := layer.Options{SingleID: single(), Limits: layer.Limits{Entries: 4}}
	if _, err := layer.Apply(root, bytes.NewReader(stream), opts); !errors.Is(err, layer.ErrInvalid) || !strings.Contains(err.Error(), "more than 4 entries") {
		t.Errorf("five inodes with four allowed: %v", err)
	}
	_, root = plant(t)
	opts.Limits.Entries = 5
	if got, err := layer.Apply(root, bytes.NewReader(stream), opts); err != nil || got.Entries != 5 {
		t.Errorf("%+v, %v", got, err)
	}
}
