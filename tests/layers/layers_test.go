// Package layers compares the applier with those of other engines. Images made of Debian packages
// are unpacked by image/layer and read through overlayfs, by umoci, and by containerd's
// archive.Apply. The three trees must be equal but for the omissions that image/layer reports.
package layers

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// images returns the number of images to compare: as many as have every package, and in a soak run
// twice as many. Root, which differs only in privilege, compares a few of them.
func images() int {
	if os.Geteuid() == 0 && os.Getenv(all) == "" {
		return testenv.Rounds(4, 8)
	}
	return testenv.Rounds(16, 32)
}

// base is in every image. The others are each in one at least, with set-id files, odd owners, hard
// links, capabilities that are set after installation, and names that are not ASCII among them.
var base, packages = func() (b, p []string) {
	first, second, _ := strings.Cut(packageList, "\n\n")
	return strings.Fields(first), strings.Fields(second)
}()

//go:embed packages.txt
var packageList string

// all is set in the process that root of an ordinary user's namespace is.
const all = "SANDBOXD_TEST_LAYERS_ALL"

// inside is set in the process that may mount and own files.
const inside = "SANDBOXD_TEST_LAYERS"

func TestUnpackingAgreesWithUmociAndContainerd(t *testing.T) {
	if dir := os.Getenv(inside); dir != "" {
		compareAll(t, dir)
		return
	}
	testenv.RequireUserNS(t)
	unshare, umoci := testenv.RequirePeer(t, "unshare"), testenv.RequirePeer(t, "umoci")
	kept := harness.Debs(t)
	dir := t.TempDir()
	env := append(os.Environ(), inside+"="+dir, "SANDBOXD_TEST_DEBS="+kept, "SANDBOXD_TEST_UMOCI="+umoci, "SANDBOXD_TEST_CONTAINERD="+harness.Helper(t, "containerd-apply"))
	// With a mount namespace of its own, and, for an ordinary user, as root of the subordinate ids:
	// files get the owners that the packages give them.
	args := []string{"--mount"}
	if os.Geteuid() != 0 {
		testenv.RequireSubIDs(t)
		args = append(args, "--user", "--map-root-user", "--map-auto")
		env = append(env, all+"=1")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), unshare, append(args, self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.parallel=2", "-test.timeout="+testenv.HungAfter.String())...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "    --- PASS"); n != images() {
		t.Errorf("%d images were compared, want %d:\n%s", n, images(), out)
	}
}

func compareAll(t *testing.T, top string) {
	t.Helper()
	// Nothing that is mounted here is seen elsewhere.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	// A hundred thousand files are made and removed again. Before Linux 6.6 tmpfs has no user.*
	// xattrs.
	if err := unix.Mount("tmpfs", top, "tmpfs", 0, "size=2g"); err != nil {
		t.Fatal(err)
	}
	if err := kernel.UserXattrs(top); err != nil {
		t.Logf("on the disk: %v", err)
		if err := unix.Unmount(top, 0); err != nil {
			t.Fatal(err)
		}
	}
	for i := range images() {
		names := make([]string, 3)
		for j := range names {
			names[j] = packages[(3*i+j)%len(packages)]
		}
		t.Run(strings.Join(names, ","), func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(top, fmt.Sprint(i))
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			// The user who started us could not remove files of other owners.
			defer func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			}()
			compare(t, dir, i, build(t, i, names))
		})
	}
}

// compare unpacks one image three times.
func compare(t *testing.T, dir string, number int, layers [][]byte) {
	t.Helper()
	theirs := map[string]map[string]string{"umoci": unpackUmoci(t, dir, layers), "containerd": unpackContainerd(t, dir, layers)}
	ours, skipped := unpackOurs(t, dir, number, layers)
	for who, tree := range theirs {
		if len(tree) < 100 {
			t.Errorf("%s has %d files", who, len(tree))
		}
		// Exactly the reported omissions are in their trees and not in ours.
		for _, line := range skipped {
			name, what, _ := strings.Cut(line, ": ")
			name = path.Clean(name)
			before := tree[name]
			switch {
			case what == "a device":
				delete(tree, name)
			case strings.HasPrefix(what, "xattr "):
				var fields []string
				for f := range strings.FieldsSeq(before) {
					if !strings.HasPrefix(f, strings.TrimPrefix(what, "xattr ")+"=") {
						fields = append(fields, f)
					}
				}
				tree[name] = strings.Join(fields, " ")
			}
			if tree[name] == before {
				t.Errorf("%q was left out, and %s does not have it either: %s", line, who, before)
			}
		}
		if diff := cmp.Diff(tree, ours); diff != "" {
			t.Errorf("-%s +image/layer:\n%s", who, diff)
		}
	}
}

func unpackContainerd(t *testing.T, dir string, layers [][]byte) map[string]string {
	t.Helper()
	root := filepath.Join(dir, "containerd")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{root}
	for i, data := range layers {
		name := filepath.Join(dir, fmt.Sprintf("layer%d.tar", i))
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, name)
	}
	if out, err := exec.CommandContext(t.Context(), os.Getenv("SANDBOXD_TEST_CONTAINERD"), args...).CombinedOutput(); err != nil {
		t.Fatalf("containerd: %v\n%s", err, out)
	}
	return list(t, root)
}

func unpackUmoci(t *testing.T, dir string, layers [][]byte) map[string]string {
	t.Helper()
	var ls []v1.Layer
	for _, data := range layers {
		ls = append(ls, harness.Layer(t, "gzip", data))
	}
	oci := filepath.Join(dir, "oci")
	p, err := layout.Write(oci, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(harness.Image(t, v1.Config{}, ls...), layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "x"})); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "umoci")
	if out, err := exec.CommandContext(t.Context(), os.Getenv("SANDBOXD_TEST_UMOCI"), "raw", "unpack", "--image", oci+":x", root).CombinedOutput(); err != nil {
		t.Fatalf("umoci: %v\n%s", err, out)
	}
	return list(t, root)
}

// unpackOurs returns overlayfs' view of our layers, and the reported omissions.
func unpackOurs(t *testing.T, dir string, number int, layers [][]byte) (tree map[string]string, skipped []string) {
	t.Helper()
	lower := []*os.Root{}
	var dirs []string
	for i, data := range layers {
		name := filepath.Join(dir, fmt.Sprint("ours", i))
		if err := os.Mkdir(name, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(name)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		l := harness.Layer(t, []string{"gzip", "zstd", ""}[(number+i)%3], data)
		stream, err := l.Compressed()
		if err != nil {
			t.Fatal(err)
		}
		result, err := layer.Apply(root, stream, layer.Options{Lower: lower})
		if err := errors.Join(err, stream.Close()); err != nil {
			t.Fatalf("layer %d: %v", i, err)
		}
		if result.SkippedMore > 0 {
			t.Errorf("%d more were left out", result.SkippedMore)
		}
		skipped = append(skipped, result.Skipped...)
		lower, dirs = slices.Insert(lower, 0, root), slices.Insert(dirs, 0, name)
	}
	merged := filepath.Join(dir, "merged")
	if err := os.Mkdir(merged, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("overlay", merged, "overlay", unix.MS_RDONLY, "userxattr,lowerdir="+strings.Join(dirs, ":")); err != nil {
		t.Fatalf("mount overlay: %v", err)
	}
	defer func() {
		// A program that another image's test is starting may hold our descriptors until it is executed.
		if err := unix.Unmount(merged, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	return list(t, merged), skipped
}

// list describes every file below top: type and mode, owner, for all but directories the time, for
// files size, digest and the first of the names that share them, targets of links, device numbers,
// and xattrs.
func list(t *testing.T, top string) map[string]string {
	t.Helper()
	tree := make(map[string]string)
	same := make(map[uint64][]string) // names of each file, sorted, as the tree is walked in that order
	err := filepath.WalkDir(top, func(full string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(top, full)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(full, &st); err != nil {
			return err
		}
		about := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			about += fmt.Sprintf(" time=%d", st.Mtim.Sec)
			same[st.Ino] = append(same[st.Ino], name)
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			f, err := os.Open(full)
			if err != nil {
				return err
			}
			h := sha256.New()
			n, err := io.Copy(h, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
			about += fmt.Sprintf(" %d %x", n, h.Sum(nil))
		case unix.S_IFLNK:
			to, err := os.Readlink(full)
			if err != nil {
				return err
			}
			about += " -> " + to
		case unix.S_IFCHR, unix.S_IFBLK:
			about += fmt.Sprintf(" device=%d", st.Rdev)
		}
		tree[name] = about + xattrs(t, full)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// By names and not by the count of links, in which overlayfs includes names that are hidden.
	for _, names := range same {
		for _, name := range names[1:] {
			tree[name] += " same-as=" + names[0]
		}
	}
	return tree
}

func xattrs(t *testing.T, name string) string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(name, buf)
	if err != nil {
		t.Fatalf("list xattrs of %s: %v", name, err)
	}
	var out []string
	for key := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if key == "" || strings.HasPrefix(key, "user.overlay.") || strings.HasPrefix(key, "trusted.") || key == "security.selinux" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(name, key, value)
		if err != nil {
			t.Fatalf("read xattr %s of %s: %v", key, name, err)
		}
		out = append(out, fmt.Sprintf(" %s=%x", key, value[:n]))
	}
	slices.Sort(out)
	return strings.Join(out, "")
}

// A builder writes one layer and knows the content of the layers so far.
type builder struct {
	t    *testing.T
	buf  bytes.Buffer
	w    *tar.Writer
	seen map[string]*tar.Header // by clean name
}

// build makes the layers of an image: the base; three packages; entries that no package has; much
// of the second removed; the first in another version.
func build(t *testing.T, number int, names []string) [][]byte {
	t.Helper()
	b := &builder{t: t, seen: make(map[string]*tar.Header)}
	var layers [][]byte
	done := func() {
		if err := b.w.Close(); err != nil {
			t.Fatal(err)
		}
		layers = append(layers, bytes.Clone(b.buf.Bytes()))
	}
	b.begin()
	for _, p := range base {
		b.install(p)
	}
	done()
	b.begin()
	for _, p := range names {
		b.install(p)
	}
	done()
	b.begin()
	b.oddities(number)
	done()
	b.begin()
	b.removals(number)
	done()
	b.begin()
	b.upgrade(names[0])
	done()
	return layers
}

func (b *builder) begin() {
	b.buf.Reset()
	b.w = tar.NewWriter(&b.buf)
}

func (b *builder) add(hdr *tar.Header, content []byte) {
	b.t.Helper()
	hdr.Size = int64(len(content))
	if hdr.ModTime.IsZero() {
		hdr.ModTime = time.Unix(1_700_000_000, 0)
	}
	if err := b.w.WriteHeader(hdr); err != nil {
		b.t.Fatalf("write %q: %v", hdr.Name, err)
	}
	if _, err := b.w.Write(content); err != nil {
		b.t.Fatalf("write %q: %v", hdr.Name, err)
	}
	if !strings.HasPrefix(path.Base(hdr.Name), ".wh.") {
		b.seen[path.Clean(hdr.Name)] = hdr
	}
}

func (b *builder) file(name, content string, mode int64) {
	b.t.Helper()
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, []byte(content))
}

// each reads a package's files.
func (b *builder) each(name string, f func(*tar.Header, []byte)) {
	b.t.Helper()
	data, err := exec.CommandContext(b.t.Context(), "dpkg-deb", "--fsys-tarfile", harness.Deb(b.t, name)).Output()
	if err != nil {
		b.t.Fatalf("read package %s: %v", name, err)
	}
	r := tar.NewReader(bytes.NewReader(data))
	for {
		hdr, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			b.t.Fatalf("read package %s: %v", name, err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			b.t.Fatalf("read package %s: %v", name, err)
		}
		f(hdr, content)
	}
}

func (b *builder) install(name string) {
	b.t.Helper()
	b.each(name, func(hdr *tar.Header, content []byte) {
		// As ping's postinst does.
		if path.Clean(hdr.Name) == "bin/ping" {
			hdr.Format = tar.FormatPAX
			hdr.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}
		}
		b.add(hdr, content)
	})
}

var noted = map[string]string{"SCHILY.xattr.user.note": "d"}

// oddities adds entries that images have and packages do not.
func (b *builder) oddities(number int) {
	b.t.Helper()
	dir := fmt.Sprintf("srv/odd%d/", number)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o1775, Uid: 1000, Gid: 50}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "set-gid", Mode: 0o2775, Uid: 1000, Gid: 50}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "set-gid/below", Mode: 0o755}, nil)
	b.file(dir+"set-id", "x", 0o6755)
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + "owned", Mode: 0o640, Uid: 65534, Gid: 65534}, []byte("y"))
	// Links have the attributes of their targets: containerd gives it those of the last one.
	b.add(&tar.Header{Typeflag: tar.TypeLink, Name: dir + "owned-too", Linkname: dir + "owned", Mode: 0o640, Uid: 65534, Gid: 65534}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: dir + "link", Linkname: "../../../../etc/passwd", Uid: 33, Gid: 33}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeLink, Name: dir + "link-too", Linkname: dir + "link", Uid: 33, Gid: 33}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeFifo, Name: dir + "fifo", Mode: 0o622}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + "white space\tand\nlines", Mode: 0o600, Format: tar.FormatPAX}, []byte("z"))
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + "latin1-\xe9\xff", Mode: 0o600, Format: tar.FormatGNU}, []byte("z"))
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + strings.Repeat("long/", 40) + "name", Mode: 0o600, Format: []tar.Format{tar.FormatPAX, tar.FormatGNU}[number%2]}, []byte("z"))
	b.add(&tar.Header{
		Typeflag: tar.TypeReg, Name: dir + "noted", Mode: 0o444, Format: tar.FormatPAX, ModTime: time.Unix(1, 0), // containerd has none before 1970
		PAXRecords: map[string]string{"SCHILY.xattr.user.note": "a=b\x00c"},
	}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "noted.d", Mode: 0o700, Format: tar.FormatPAX, PAXRecords: noted}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + "future", Mode: 0o644, Format: tar.FormatPAX, ModTime: time.Unix(5_000_000_000, 0)}, nil)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}, nil)
	b.file("tmp/of-no-entry/below/file", "x", 0o644)
	b.file(dir+"shut/file", "x", 0)
	b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "shut", Mode: 0o000}, nil)
	// One name twice, of two types.
	b.file(dir+"twice", "first", 0o644)
	b.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: dir + "twice", Linkname: "set-id"}, nil)
	b.file(dir+"again", "first", 0o644)
	b.file(dir+"again", "second, longer", 0o755)
}

// removals are whiteouts and opaque directories, as removing packages makes them.
func (b *builder) removals(number int) {
	b.t.Helper()
	var names []string
	for name, hdr := range b.seen {
		if hdr.Typeflag != tar.TypeDir {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	gone := make(map[string]bool)
	hide := func(name string) {
		if !gone[name] {
			b.file(path.Join(path.Dir(name), ".wh."+path.Base(name)), "", 0)
			gone[name] = true
		}
	}
	below := func(name string) bool {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if gone[dir] {
				return true
			}
		}
		return false
	}
	// Whole directories first; some of them have lost a part before. The other way around the two do
	// not agree.
	for i, name := range names {
		dir := path.Dir(name)
		if i%11 == number%11 && strings.HasPrefix(dir, "usr/share/") && strings.Count(dir, "/") > 2 && !below(dir) {
			hide(dir)
		}
	}
	for i, name := range names {
		if i%7 == number%7 && !below(name) {
			hide(name)
		}
	}
	// Every file of a directory that itself stays; and one that was there and has another content now.
	for _, dir := range []string{"etc/cron.daily", "srv/odd" + fmt.Sprint(number) + "/noted.d", "usr/share/base-files"} {
		if below(dir) || gone[dir] || b.seen[dir] == nil {
			continue
		}
		// With the xattrs that it had, as whoever compares two trees writes it.
		b.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o750, Gid: 4, Format: tar.FormatPAX, PAXRecords: b.seen[dir].PAXRecords}, nil)
		b.file(dir+"/.wh..wh..opq", "", 0)
		b.file(dir+"/new", "after the opaque mark", 0o644)
	}
	for name := range gone {
		delete(b.seen, name)
	}
	for name := range b.seen {
		if below(name) {
			delete(b.seen, name)
		}
	}
}

// upgrade installs another version of a package: contents and modes differ, and here and there the
// type.
func (b *builder) upgrade(name string) {
	b.t.Helper()
	n := 0
	var turned []string // names that are no directories any more
	b.each(name, func(hdr *tar.Header, content []byte) {
		clean := path.Clean(hdr.Name)
		for _, dir := range turned {
			if strings.HasPrefix(clean, dir+"/") {
				return
			}
		}
		n++
		switch {
		case hdr.Typeflag == tar.TypeReg && n%5 == 0:
			content = append(content, "a line more\n"...)
			hdr.Mode ^= 0o011
		case hdr.Typeflag == tar.TypeReg && n%5 == 1:
			hdr = &tar.Header{Typeflag: tar.TypeSymlink, Name: hdr.Name, Linkname: "/etc/alternatives/" + path.Base(clean)}
			content = nil
		case hdr.Typeflag == tar.TypeReg && n%5 == 2:
			b.add(&tar.Header{Typeflag: tar.TypeDir, Name: clean + "/", Mode: 0o755}, nil)
			b.file(clean+"/inside", "was a file", 0o600)
			return
		case hdr.Typeflag == tar.TypeLink:
			return // its target may be something else by now
		case hdr.Typeflag == tar.TypeSymlink && n%2 == 0:
			hdr = &tar.Header{Typeflag: tar.TypeReg, Name: hdr.Name, Mode: 0o4711, Uid: 1}
			content = []byte("was a link")
		case hdr.Typeflag == tar.TypeDir && strings.HasPrefix(clean, "usr/share/doc/"):
			turned = append(turned, clean)
			b.file(clean, "was a directory", 0o644)
			return
		}
		b.add(hdr, content)
	})
}
