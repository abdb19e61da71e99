package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A test binary that is started with this variable set mounts an overlay, changes it, and reports
// the view of it.
const inOverlay = "SANDBOXD_TEST_OVERLAY"

// A test binary that is started with this variable set writes the layer of the upper directory that
// it names.
const diffOf = "SANDBOXD_TEST_DIFF_OF"

func TestMain(m *testing.M) {
	if dir := os.Getenv(diffOf); dir != "" {
		root, err := os.OpenRoot(dir)
		if err == nil {
			latest := time.Unix(-10, 0)
			_, err = layer.Diff(os.Stdout, []layer.Overlay{{At: ".", Upper: root}}, layer.DiffOptions{Latest: latest})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if job := os.Getenv(inOverlay); job != "" {
		if err := overlayMain(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// overlayJob is the work to do in an overlay.
type overlayJob struct {
	Lower  []string // highest first
	Upper  string   // empty: only looked at
	Work   string
	Merged string
	Seed   uint64   // of random changes
	Steps  int      //  how many
	Script []string // changes by name, see step
}

func overlayMain(job string) error {
	var j overlayJob
	if err := json.Unmarshal([]byte(job), &j); err != nil {
		return err
	}
	unix.Umask(0)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	options := "userxattr,lowerdir=" + strings.Join(j.Lower, ":")
	if j.Upper != "" {
		options += ",volatile,upperdir=" + j.Upper + ",workdir=" + j.Work // unmounting would sync the disk
	}
	if err := unix.Mount("overlay", j.Merged, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount %s: %w", options, err)
	}
	// The next steps may go through links that they have made themselves.
	if err := errors.Join(unix.Chroot(j.Merged), unix.Chdir("/")); err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(j.Seed, 1))
	for range j.Steps {
		randomStep(r)
	}
	for _, s := range j.Script {
		if err := step(strings.Fields(s)); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	text, err := describe(".")
	if err != nil {
		return err
	}
	_, err = os.Stdout.WriteString(text)
	return err
}

// step makes one change.
func step(words []string) error {
	arg := func(i int) string {
		name, err := url.PathUnescape(words[i]) // for bytes that JSON does not carry
		if err != nil {
			panic(err)
		}
		return name
	}
	switch words[0] {
	case "write":
		return os.WriteFile(arg(1), []byte(arg(2)), 0o644)
	case "mkdir":
		return os.Mkdir(arg(1), 0o755)
	case "rm":
		return os.RemoveAll(arg(1))
	case "ln":
		return os.Link(arg(1), arg(2))
	case "symlink":
		return os.Symlink(arg(1), arg(2))
	case "fifo":
		return unix.Mkfifo(arg(1), 0o600)
	case "socket":
		l, err := net.Listen("unix", arg(1))
		if err != nil {
			return err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		return l.Close()
	case "chmod":
		mode, err := strconv.ParseUint(arg(2), 8, 32)
		if err != nil {
			return err
		}
		return unix.Chmod(arg(1), uint32(mode))
	case "xattr":
		return unix.Lsetxattr(arg(1), arg(2), []byte(arg(3)), 0)
	case "sparse":
		size, err := strconv.ParseInt(arg(2), 10, 64)
		if err != nil {
			return err
		}
		return errors.Join(os.WriteFile(arg(1), nil, 0o644), os.Truncate(arg(1), size))
	case "mtime":
		sec, err := strconv.ParseInt(arg(2), 10, 64)
		if err != nil {
			return err
		}
		ts := unix.Timespec{Sec: sec, Nsec: 123456789}
		return unix.UtimesNanoAt(unix.AT_FDCWD, arg(1), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	return fmt.Errorf("no such step")
}

// randomStep makes a change or, as it does not know the tree, often none.
func randomStep(r *rand.Rand) {
	name := func() string {
		parts := make([]string, 1+r.IntN(3))
		for i := range parts {
			parts[i] = string(rune('a' + r.IntN(4)))
		}
		return strings.Join(parts, "/")
	}
	a, b := name(), name()
	removeAll := func(name string) {
		// os.RemoveAll would open a FIFO in place of the directory of the name.
		if fi, err := os.Stat(filepath.Dir(name)); err == nil && fi.IsDir() {
			_ = os.RemoveAll(name)
		}
	}
	when := []unix.Timespec{{Sec: 1, Nsec: 2}, {Sec: r.Int64N(2_000_000_000), Nsec: r.Int64N(2) * r.Int64N(1_000_000_000)}}
	switch r.IntN(16) {
	case 0, 1:
		// Without waiting at a FIFO.
		f, err := os.OpenFile(a, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NONBLOCK, 0o644)
		if err == nil {
			_, _ = f.WriteString(strings.Repeat(b, r.IntN(1000)))
			_ = f.Close()
		}
	case 2, 3, 4:
		_ = os.MkdirAll(a, 0o755)
	case 5:
		removeAll(a)
	case 6:
		_ = os.Rename(a, b)
	case 7:
		_ = os.Symlink([]string{b, "/" + b, "../" + b, "/etc/passwd"}[r.IntN(4)], a)
	case 8:
		_ = unix.Linkat(unix.AT_FDCWD, a, unix.AT_FDCWD, b, 0)
	case 9:
		_ = unix.Mkfifo(a, 0o600)
	case 10:
		modes := []uint32{0o755, 0o700, 0o4711, 0o1777, 0o2750, 0o400, 0o600}
		if oneID() {
			modes = modes[:5] // those that an unprivileged reader can open again
		}
		_ = unix.Chmod(a, modes[r.IntN(len(modes))])
	case 11:
		_ = unix.Lchown(a, []int{0, 1, 1000, 65535}[r.IntN(4)], r.IntN(3))
	case 12:
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, a, when, unix.AT_SYMLINK_NOFOLLOW)
	case 13:
		_ = unix.Lsetxattr(a, "user."+string(rune('a'+r.IntN(3))), []byte("v\x00"+b), 0)
	case 14:
		_ = unix.Truncate(a, r.Int64N(10_000))
	case 15:
		// A directory in the place of another one, which it must hide.
		removeAll(a)
		_ = os.Mkdir(a, 0o755)
		_ = os.Symlink(b, a+"/new")
	}
}

// oneID reports whether the test's user, or the namespace that it has made, has no ids but its own.
func oneID() bool { return os.Getuid() != 0 || os.Getenv("SANDBOXD_TEST_ONE_ID") != "" }

// describe returns everything that a layer carries of a tree, a line each file. The time of the
// root is not part of a layer.
func describe(top string) (string, error) {
	type line struct {
		text string
		ino  uint64
	}
	var lines []line
	names := make(map[uint64][]string)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		text := fmt.Sprintf("%s %o", rel, st.Mode)
		if !oneID() {
			text += fmt.Sprintf(" %d:%d", st.Uid, st.Gid)
		}
		if rel != "." {
			text += fmt.Sprintf(" %d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" %d %x", len(content), sha256.Sum256(content))
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text += " -> " + to
		}
		if typ := st.Mode & unix.S_IFMT; typ == unix.S_IFREG || typ == unix.S_IFDIR {
			// umoci notes owners that it could not set.
			attrs := slices.DeleteFunc(xattrs(path), func(a string) bool { return strings.HasPrefix(a, "user.rootlesscontainers=") })
			slices.Sort(attrs)
			text += fmt.Sprintf(" %q", attrs)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			names[st.Ino] = append(names[st.Ino], rel)
		}
		lines = append(lines, line{text, st.Ino})
		return nil
	})
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l.text)
		if same := names[l.ino]; len(same) > 1 {
			fmt.Fprintf(&b, " = %s", same)
		}
		b.WriteByte('\n')
	}
	return b.String(), err
}

// run does a job in an overlay and returns the view at its end.
func (j overlayJob) run(t *testing.T) string {
	t.Helper()
	job, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), inOverlay+"="+string(job))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		cmd.Env = append(cmd.Env, "SANDBOXD_TEST_ONE_ID=yes")
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		t.Fatalf("in the overlay: %v: %s", err, complaint.String())
	}
	return out.String()
}

// stack is a growing stack of layers in one directory.
type stack struct {
	dir   string
	lower []string // highest first
	tars  [][]byte // lowest first
	n     int
}

func newStack(t *testing.T) *stack {
	t.Helper()
	testenv.RequireUserNS(t)
	s := &stack{dir: t.TempDir()}
	t.Cleanup(func() {
		// Modes of trees may forbid an ordinary user to clean up.
		_ = filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, _ error) error {
			if d != nil && d.IsDir() {
				_ = os.Chmod(path, 0o700)
			}
			return nil
		})
	})
	return s
}

func (s *stack) mkdir(t *testing.T, name string) string {
	t.Helper()
	s.n++
	path := filepath.Join(s.dir, strconv.Itoa(s.n)+name)
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func open(t *testing.T, dirs ...string) []*os.Root {
	t.Helper()
	var roots []*os.Root
	for _, d := range dirs {
		root, err := os.OpenRoot(d)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = root.Close() })
		roots = append(roots, root)
	}
	return roots
}

// push applies a layer.
func (s *stack) push(t *testing.T, stream []byte) {
	t.Helper()
	dir := s.mkdir(t, "layer")
	if _, err := layer.Apply(open(t, dir)[0], bytes.NewReader(stream), layer.Options{SingleID: single(), Lower: open(t, s.lower...)}); err != nil {
		t.Fatalf("apply: %v", err)
	}
	s.lower, s.tars = append([]string{dir}, s.lower...), append(s.tars, stream)
}

// change does a job on top of the stack. It returns the view and the upper directory.
func (s *stack) change(t *testing.T, j overlayJob) (shown, upper string) {
	t.Helper()
	j.Lower, j.Upper, j.Work, j.Merged = s.lower, s.mkdir(t, "upper"), s.mkdir(t, "work"), s.mkdir(t, "merged")
	return j.run(t), j.Upper
}

func (s *stack) show(t *testing.T) string {
	t.Helper()
	lower := s.lower
	if len(lower) == 1 {
		lower = append(slices.Clone(lower), s.mkdir(t, "empty")) // overlayfs wants two
	}
	return overlayJob{Lower: lower, Merged: s.mkdir(t, "merged")}.run(t)
}

func (s *stack) diff(t *testing.T, upper string, opts layer.DiffOptions) ([]byte, layer.Result) {
	t.Helper()
	var buf bytes.Buffer
	result, err := layer.Diff(&buf, []layer.Overlay{{At: ".", Upper: open(t, upper)[0], Lower: open(t, s.lower...)}}, opts)
	if err != nil {
		t.Fatalf("diff: %v", err)
	}
	return buf.Bytes(), result
}

// reread is the uppermost layer's stream, read from where it is stored.
func (s *stack) reread(t *testing.T) []byte {
	t.Helper()
	below := &stack{lower: s.lower[1:]}
	stream, _ := below.diff(t, s.lower[0], layer.DiffOptions{Stored: true})
	return stream
}

// A stored layer reads unchanged whatever happens to the directories below it, such as the host's
// own programs.
func TestDiffOfAStoredLayer(t *testing.T) {
	s := base(t)
	_, upper := s.change(t, overlayJob{Script: []string{"rm deleted", "rm dir", "mkdir dir", "write dir/new 1", "rm gone"}})
	stream, _ := s.diff(t, upper, layer.DiffOptions{})
	s.push(t, stream)
	below := s.lower[1]
	for _, name := range []string{"deleted", "dir", "gone"} {
		if err := os.RemoveAll(filepath.Join(below, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(below, "dir"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := s.reread(t); !bytes.Equal(stream, got) {
		t.Errorf("entries (-before +after):\n%s", cmp.Diff(entries(t, stream), entries(t, got)))
	}
}

// The layers and the difference show the view of the overlay, whatever was done to it, and repeated
// differences are equal.
func TestDiffOfRandomTrees(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel() // most of the time is spent in unmounting
			s := newStack(t)
			s.push(t, archive(t))
			for round := range uint64(3) {
				shown, upper := s.change(t, overlayJob{Seed: 3*seed + round, Steps: 160})
				stream, result := s.diff(t, upper, layer.DiffOptions{})
				if again, _ := s.diff(t, upper, layer.DiffOptions{}); !bytes.Equal(stream, again) {
					t.Fatal("a second difference is not the same")
				}
				if len(result.Skipped) > 0 {
					t.Errorf("left out: %q", result.Skipped)
				}
				s.push(t, stream)
				if again := s.reread(t); !bytes.Equal(stream, again) {
					t.Fatal("the stored layer reads as another one")
				}
				if diff := cmp.Diff(shown, s.show(t)); diff != "" {
					t.Fatalf("round %d: the layer does not give what the overlay showed (-overlay +layers):\n%s", round, diff)
				}
			}
			if seed < 3 {
				umociAgrees(t, s)
			}
		})
	}
}

// umociAgrees unpacks the layers with umoci.
func umociAgrees(t *testing.T, s *stack) {
	t.Helper()
	umoci := testenv.RequirePeer(t, "umoci")
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), umoci, args...).CombinedOutput(); err != nil {
			t.Fatalf("umoci %s: %v: %s", args, err, out)
		}
	}
	image := filepath.Join(s.dir, "oci:1")
	run("init", "--layout", filepath.Join(s.dir, "oci"))
	run("new", "--image", image)
	for i, stream := range s.tars {
		path := filepath.Join(s.dir, "tar"+strconv.Itoa(i))
		if err := os.WriteFile(path, stream, 0o600); err != nil {
			t.Fatal(err)
		}
		run("raw", "add-layer", "--image", image, path)
	}
	bundle := filepath.Join(s.dir, "bundle")
	if os.Getuid() == 0 {
		run("unpack", "--image", image, bundle)
	} else {
		run("unpack", "--rootless", "--image", image, bundle)
	}
	got, err := describe(filepath.Join(bundle, "rootfs"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s.show(t), got); diff != "" {
		t.Errorf("umoci makes another tree (-overlay +umoci):\n%s", diff)
	}
}

// base is a stack of one layer for tests of single changes.
func base(t *testing.T) *stack {
	t.Helper()
	s := newStack(t)
	s.push(t, archive(t, file("kept", "1"), file("deleted", "1"), file("replaced", "1"), file("dir/old", "1"), file("dir/sub/x", "1"), file("gone/x", "1")))
	return s
}

// entries lists a tar stream, a line each.
func entries(t *testing.T, stream []byte) []string {
	t.Helper()
	var lines []string
	r := tar.NewReader(bytes.NewReader(stream))
	for {
		hdr, err := r.Next()
		if errors.Is(err, io.EOF) {
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		line := string(hdr.Typeflag) + " " + hdr.Name
		if hdr.Linkname != "" {
			line += " -> " + hdr.Linkname
		}
		lines = append(lines, line)
	}
}

// Each kind of change has its entries, in an order of its own, and no more.
func TestDiffSaysWhatWasDone(t *testing.T) {
	for _, test := range []struct {
		name    string
		script  []string
		entries []string
		changes []string
		skipped []string
	}{
		{name: "nothing"},
		{name: "only looked at", script: []string{"write kept 1", "rm kept", "write kept 1"}, entries: []string{"0 kept"}, changes: []string{"changed file /kept 1"}},
		{
			name: "added", script: []string{"write b new", "mkdir a", "write a/x 12345"}, entries: []string{"0 b", "5 a/", "0 a/x"},
			changes: []string{"added file /b 3", "added directory /a 0", "added file /a/x 5"},
		},
		{name: "deleted", script: []string{"rm deleted", "rm gone"}, entries: []string{"0 .wh.deleted", "0 .wh.gone"}, changes: []string{"deleted file /deleted 1", "deleted directory /gone 0"}},
		{name: "added and deleted", script: []string{"write new 1", "rm new", "mkdir more", "rm more"}},
		{name: "below", script: []string{"write dir/sub/y 1"}, entries: []string{"5 dir/", "5 dir/sub/", "0 dir/sub/y"}, changes: []string{"changed directory /dir 0", "changed directory /dir/sub 0", "added file /dir/sub/y 1"}},
		{
			name: "a directory made anew hides the old one", script: []string{"rm dir", "mkdir dir", "write dir/new 1", "mkdir dir/sub"},
			entries: []string{"5 dir/", "0 dir/.wh..wh..opq", "0 dir/new", "5 dir/sub/"},
			changes: []string{"changed directory /dir 0", "added file /dir/new 1", "deleted file /dir/old 1", "changed directory /dir/sub 0", "deleted file /dir/sub/x 1"},
		},
		{name: "a file in place of a directory", script: []string{"rm dir", "write dir 1"}, entries: []string{"0 dir"}, changes: []string{"changed file /dir 1"}},
		{name: "a directory in place of a file", script: []string{"rm kept", "mkdir kept"}, entries: []string{"5 kept/"}, changes: []string{"changed directory /kept 0"}},
		{name: "the root's mode", script: []string{"chmod . 0700"}, entries: []string{"5 ./"}, changes: []string{"changed directory / 0"}},
		{name: "hard links", script: []string{"write b 1", "ln b a", "mkdir d", "ln a d/c"}, entries: []string{"0 a", "1 b -> a", "5 d/", "1 d/c -> a"}, changes: []string{"added file /a 1", "added file /b 1", "added directory /d 0", "added file /d/c 1"}},
		{name: "links and FIFOs", script: []string{"symlink /etc/passwd l", "fifo p"}, entries: []string{"2 l -> /etc/passwd", "6 p"}, changes: []string{"added symlink /l 0", "added fifo /p 0"}},
		{name: "a socket", script: []string{"socket s"}, skipped: []string{"s: a socket"}},
		{
			// It would delete a file of the image that its maker cannot even see.
			name: "a name like a whiteout's", script: []string{"write .wh.kept 1", "mkdir .wh.dir", "write dir/.wh..wh..opq 1"},
			entries: []string{"5 dir/"}, changes: []string{"changed directory /dir 0"},
			skipped: []string{".wh.dir: a layer would take it for a whiteout", ".wh.kept: a layer would take it for a whiteout", "dir/.wh..wh..opq: a layer would take it for a whiteout"},
		},
		{name: "xattrs", script: []string{"write x 1", "xattr x user.a b"}, entries: []string{"0 x"}, changes: []string{"added file /x 1"}},
		{name: "names", script: []string{"write " + strings.Repeat("n", 255) + " 1", "write ä%ff 1"}, entries: []string{"0 " + strings.Repeat("n", 255), "0 ä\xff"}, changes: []string{"added file /" + strings.Repeat("n", 255) + " 1", "added file /ä\xff 1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // most of the time is spent in unmounting
			s := base(t)
			shown, upper := s.change(t, overlayJob{Script: test.script})
			stream, result := s.diff(t, upper, layer.DiffOptions{})
			if diff := cmp.Diff(test.entries, entries(t, stream)); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.skipped, result.Skipped); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
			var changes []string
			_, err := layer.Changes([]layer.Overlay{{At: ".", Upper: open(t, upper)[0], Lower: open(t, s.lower...)}}, layer.Limits{}, func(c api.Change) error {
				changes = append(changes, fmt.Sprintf("%s %s %s %d", c.Kind, c.Type, c.Path, c.Size))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.changes, changes); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
			if s.push(t, stream); test.skipped == nil {
				if diff := cmp.Diff(shown, s.show(t)); diff != "" {
					t.Errorf("the layer does not give what the overlay showed (-overlay +layers):\n%s", diff)
				}
			}
		})
	}
}

// A directory that is deleted after it was found and before it is listed was empty: that is no
// error, and later entries are reported as ever.
func TestDiffOfADirectoryThatIsDeletedMeanwhile(t *testing.T) {
	upper := func() (dir string, overlays []layer.Overlay) {
		t.Helper()
		dir = t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, "d"), 0o755), os.Mkdir(filepath.Join(dir, "e"), 0o755), os.WriteFile(filepath.Join(dir, "e", "f"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		return dir, []layer.Overlay{{At: ".", Upper: open(t, dir)[0]}}
	}
	dir, overlays := upper()
	var changes []string
	if _, err := layer.Changes(overlays, layer.Limits{}, func(c api.Change) error {
		changes = append(changes, c.Path)
		if c.Path != "/d" {
			return nil
		}
		return os.Remove(filepath.Join(dir, "d"))
	}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"/", "/d", "/e", "/e/f"}, changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	dir, overlays = upper()
	var stream bytes.Buffer
	if _, err := layer.Diff(writerFunc(func(p []byte) (int, error) {
		if bytes.HasPrefix(p, []byte("d/\x00")) {
			if err := os.Remove(filepath.Join(dir, "d")); err != nil {
				return 0, err
			}
		}
		return stream.Write(p)
	}), overlays, layer.DiffOptions{}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"5 ./", "5 d/", "5 e/", "0 e/f"}, entries(t, stream.Bytes())); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// Times later than the one that is asked for become it, and no other.
func TestDiffSetsTimesBack(t *testing.T) {
	s := base(t)
	_, upper := s.change(t, overlayJob{Script: []string{"write old 1", "mtime old 1000", "write new 1", "mtime new 2000"}})
	latest := time.Unix(1500, 0)
	stream, _ := s.diff(t, upper, layer.DiffOptions{Latest: latest})
	s.push(t, stream)
	for name, want := range map[string]time.Time{"old": time.Unix(1000, 123456789), "new": latest} {
		fi, err := os.Lstat(filepath.Join(s.lower[0], name))
		if err != nil {
			t.Fatal(err)
		}
		if !fi.ModTime().Equal(want) {
			t.Errorf("%s is of %s, want %s", name, fi.ModTime(), want)
		}
	}
}

// When archive/tar formats times to find a way to write them, they must not be local: the file with
// the time zone is the sandbox's where layers are made, and may be a FIFO.
func TestDiffNeedsNoLocalTime(t *testing.T) {
	dir := t.TempDir()
	zone := filepath.Join(dir, "localtime")
	upper := filepath.Join(dir, "upper")
	before, after := time.Unix(-20, 5), time.Unix(-1, 5)
	if err := errors.Join(unix.Mkfifo(zone, 0o600), os.Mkdir(upper, 0o755), os.WriteFile(upper+"/old", nil, 0o644), os.WriteFile(upper+"/new", nil, 0o644),
		os.Chtimes(upper+"/old", before, before), os.Chtimes(upper+"/new", after, after)); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), diffOf+"="+upper, "TZ="+zone)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	stream, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v, %v: %s", err, ctx.Err(), complaint.String())
	}
	if diff := cmp.Diff([]string{"5 ./", "0 new", "0 old"}, entries(t, stream)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// upperDir is one that was made by hand: no sandbox can make it through its overlay, unless the
// kernel errs.
func upperDir(t *testing.T) (dir string, root *os.Root) {
	t.Helper()
	dir = t.TempDir()
	return dir, open(t, dir)[0]
}

// Hostile contents of an upper directory are refused or left out, and nothing is followed or waited
// for.
func TestDiffOfHostileUpper(t *testing.T) {
	lower := t.TempDir()
	if err := os.WriteFile(filepath.Join(lower, "below"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		plant   func(dir string) error
		limits  layer.Limits
		entries []string
		skipped []string
		err     string
	}{
		{name: "redirect", plant: func(d string) error {
			return errors.Join(os.Mkdir(d+"/d", 0o755), unix.Setxattr(d+"/d", "user.overlay.redirect", []byte("/etc"), 0))
		}, err: "user.overlay.redirect"},
		{name: "metacopy", plant: func(d string) error {
			return errors.Join(os.WriteFile(d+"/f", []byte("1"), 0o644), unix.Setxattr(d+"/f", "user.overlay.metacopy", nil, 0))
		}, err: "user.overlay.metacopy"},
		{name: "a long opaque", plant: func(d string) error {
			return errors.Join(os.Mkdir(d+"/d", 0o755), unix.Setxattr(d+"/d", "user.overlay.opaque", bytes.Repeat([]byte("y"), 100), 0))
		}, err: "overlayfs does not write"},
		{name: "overlayfs' own marks", plant: func(d string) error {
			return errors.Join(os.WriteFile(d+"/f", []byte("1"), 0o644), unix.Setxattr(d+"/f", "user.overlay.origin", []byte("x"), 0),
				unix.Setxattr(d+"/f", "user.overlay.overlay.opaque", []byte("y"), 0), unix.Setxattr(d+"/f", "user.overlay.overlay.\x1b[2J", nil, 0))
		}, entries: []string{"0 f"}, skipped: []string{`f: xattr "user.overlay.\x1b[2J"`, "f: xattr user.overlay.opaque"}},
		{name: "a whiteout that is a file", plant: func(d string) error {
			return errors.Join(os.WriteFile(d+"/below", nil, 0o644), unix.Setxattr(d+"/below", "user.overlay.whiteout", nil, 0),
				unix.Setxattr(d, "user.overlay.opaque", []byte("x"), 0))
		}, entries: []string{"0 .wh.below"}},
		{name: "a whiteout of nothing", plant: func(d string) error { return unix.Mknod(d+"/never", unix.S_IFCHR, 0) }},
		{name: "links that lead out", plant: func(d string) error {
			return errors.Join(os.Symlink("/etc", d+"/etc"), os.Symlink("..", d+"/up"), os.Symlink("/proc/self/root", d+"/root"))
		}, entries: []string{"2 etc -> /etc", "2 root -> /proc/self/root", "2 up -> .."}},
		{name: "a FIFO", plant: func(d string) error { return unix.Mkfifo(d+"/p", 0o644) }, entries: []string{"6 p"}},
		{name: "deep", plant: func(d string) error { return os.MkdirAll(d+strings.Repeat("/d", 130), 0o755) }, err: "128"},
		{name: "long", plant: func(d string) error {
			root, err := os.OpenRoot(d)
			for range 17 {
				if err != nil {
					return err
				}
				part := strings.Repeat("n", 250)
				if err = root.Mkdir(part, 0o755); err == nil {
					root, err = root.OpenRoot(part)
				}
			}
			return err
		}, err: "4095"},
		{name: "large", plant: func(d string) error { return errors.Join(os.WriteFile(d+"/f", nil, 0o644), os.Truncate(d+"/f", 1<<40)) }, err: "more than 68719476736"},
		{name: "many", plant: func(d string) error {
			return errors.Join(os.Mkdir(d+"/a", 0o755), os.Mkdir(d+"/b", 0o755), os.Mkdir(d+"/c", 0o755))
		}, limits: layer.Limits{Entries: 2}, err: "more than 2 entries"},
		{name: "many of which nothing becomes an entry", plant: func(d string) error {
			return errors.Join(unix.Mknod(d+"/a", unix.S_IFCHR, 0), unix.Mknod(d+"/b", unix.S_IFCHR, 0), os.WriteFile(d+"/.wh.c", nil, 0o644))
		}, limits: layer.Limits{Entries: 2}, err: "more than 2 entries"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, upper := upperDir(t)
			if err := test.plant(dir); err != nil {
				t.Fatal(err)
			}
			var buf bytes.Buffer
			result, err := layer.Diff(&buf, []layer.Overlay{{At: ".", Upper: upper, Lower: open(t, lower)}}, layer.DiffOptions{Limits: test.limits})
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) || !errors.Is(err, layer.ErrInvalid) {
					t.Errorf("%v, want one of class ErrInvalid with %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.entries, entries(t, buf.Bytes())); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
			if test.skipped != nil {
				if diff := cmp.Diff(test.skipped, result.Skipped); diff != "" {
					t.Errorf("skipped (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// A directory of the host's that has an overlay of its own is put where it shows.
func TestDiffOfSeveralOverlays(t *testing.T) {
	top, root := upperDir(t)
	usr, host := upperDir(t)
	for _, f := range []string{top + "/a", usr + "/b"} {
		if err := os.WriteFile(f, []byte("1"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var buf bytes.Buffer
	overlays := []layer.Overlay{{At: ".", Upper: root, Lower: open(t, t.TempDir())}, {At: "usr", Upper: host, Lower: open(t, t.TempDir())}}
	if _, err := layer.Diff(&buf, overlays, layer.DiffOptions{}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"0 a", "0 usr/b"}, entries(t, buf.Bytes())); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// A writer that ends early ends the walk with its error.
func TestDiffTellsTheWritersError(t *testing.T) {
	dir, upper := upperDir(t)
	if err := os.WriteFile(dir+"/f", make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	full := errors.New("disk full")
	_ = r.CloseWithError(full)
	if _, err := layer.Diff(w, []layer.Overlay{{At: ".", Upper: upper}}, layer.DiffOptions{}); !errors.Is(err, full) {
		t.Errorf("%v, want the writer's error", err)
	}
}
