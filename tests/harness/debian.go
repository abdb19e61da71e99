package harness

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
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
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// DebianRoot writes a root file system that has the named Debian packages and all that they depend
// on, as they are installed on this machine: no mirror is asked, and it takes seconds.
func DebianRoot(t testing.TB, w io.Writer, packages ...string) {
	t.Helper()
	files := debianFiles(t, packages)
	tw := tar.NewWriter(w)
	write := func(h *tar.Header, r io.Reader) {
		t.Helper()
		if err := tw.WriteHeader(h); err != nil {
			t.Fatalf("write %q: %v", h.Name, err)
		}
		if r != nil {
			if _, err := io.Copy(tw, r); err != nil {
				t.Fatalf("write %q: %v", h.Name, err)
			}
		}
	}
	made := make(map[string]bool)
	for _, dir := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		if target, err := os.Readlink("/" + dir); err == nil {
			write(&tar.Header{Typeflag: tar.TypeSymlink, Name: dir, Linkname: target, Mode: 0o777}, nil)
			made[dir] = true
		}
	}
	for _, name := range files {
		if made[name] {
			continue
		}
		made[name] = true
		fi, err := os.Lstat("/" + name)
		if err != nil {
			continue // a package's file that this machine's owner has removed
		}
		h := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime()}
		switch {
		case fi.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
			write(h, nil)
		case fi.Mode().Type() == fs.ModeSymlink:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = os.Readlink("/" + name); err != nil {
				t.Fatal(err)
			}
			write(h, nil)
		case fi.Mode().IsRegular():
			f, err := os.Open("/" + name)
			if errors.Is(err, fs.ErrPermission) {
				continue // root's alone
			}
			if err != nil {
				t.Fatal(err)
			}
			h.Typeflag, h.Size = tar.TypeReg, fi.Size()
			write(h, f)
			_ = f.Close() // only read
		}
	}
	for link, target := range alternatives(t) {
		if made[target] && !made[link] {
			made[link] = true
			write(&tar.Header{Typeflag: tar.TypeSymlink, Name: link, Linkname: "/" + target, Mode: 0o777}, nil)
		}
	}
	// What packages make when they are installed.
	for _, f := range []File{
		{Name: "usr/bin/sh", Type: tar.TypeSymlink, Link: "dash"},
		{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"},
		{Name: "etc/group", Body: "root:x:0:\nuser:x:1000:\nstaff:x:50:\n"},
		{Name: "root/", Type: tar.TypeDir, Mode: 0o700},
		{Name: "usr/local/", Type: tar.TypeDir},
		{Name: "usr/local/bin/", Type: tar.TypeDir},
		{Name: "tmp/", Type: tar.TypeDir, Mode: 0o1777},
	} {
		if made[strings.TrimSuffix(f.Name, "/")] {
			continue
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.Name, Linkname: f.Link, Mode: 0o755, Size: int64(len(f.Body))}
		if f.Type != 0 {
			h.Typeflag = f.Type
		}
		if f.Mode != 0 {
			h.Mode = f.Mode
		}
		write(h, strings.NewReader(f.Body))
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
}

// alternatives are the links that update-alternatives has made on this machine, and what they lead
// to.
func alternatives(t testing.TB) map[string]string {
	t.Helper()
	found := map[string]string{}
	links, err := filepath.Glob("/usr/lib/*-linux-gnu/*.so.*")
	if err != nil {
		t.Fatal(err)
	}
	programs, err := filepath.Glob("/usr/bin/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range append(links, programs...) {
		if target, err := os.Readlink(link); err != nil || !strings.HasPrefix(target, "/etc/alternatives/") {
			continue
		}
		if target, err := filepath.EvalSymlinks(link); err == nil {
			found[link[1:]] = target[1:]
		}
	}
	return found
}

// needless are files left out of images, which are made and read in every run of a test:
// documents, sanitizers, link-time optimisation.
func needless(name string) bool {
	for _, p := range []string{"usr/share/doc/", "usr/share/man/", "usr/share/locale/", "usr/share/info/", "usr/share/lintian/", "usr/share/perl/"} {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	base := path.Base(name)
	return strings.HasPrefix(base, "lto") || strings.HasPrefix(base, "x86_64-linux-gnu-lto") || strings.Contains(base, "san.")
}

// debianFiles are the names of the files of packages, sorted, without leading slash and without
// links in their directories.
func debianFiles(t testing.TB, packages []string) []string {
	t.Helper()
	args := append([]string{"-L"}, debianClosure(t, packages)...)
	out, err := exec.CommandContext(t.Context(), "dpkg-query", args...).Output()
	if err != nil {
		t.Fatalf("dpkg-query -L: %v", err)
	}
	dirs := make(map[string]string)
	var files []string
	for line := range strings.Lines(string(out)) {
		name := strings.TrimSuffix(line, "\n")
		if !filepath.IsAbs(name) || name == "/." {
			continue
		}
		dir, ok := dirs[filepath.Dir(name)]
		if !ok {
			if dir, err = filepath.EvalSymlinks(filepath.Dir(name)); err != nil {
				continue
			}
			dirs[filepath.Dir(name)] = dir
		}
		name = strings.TrimPrefix(filepath.Join(dir, filepath.Base(name)), "/")
		if !needless(name) {
			files = append(files, name)
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}

// debianClosure are the installed packages that the named ones need, themselves included.
func debianClosure(t testing.TB, packages []string) []string {
	t.Helper()
	testenv.RequirePeer(t, "dpkg-query")
	format := "${binary:Package}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
	out, err := exec.CommandContext(t.Context(), "dpkg-query", "-W", "-f", format).Output()
	if err != nil {
		t.Fatalf("dpkg-query -W: %v", err)
	}
	full, needs := make(map[string]string), make(map[string]string) // by name; name with architecture
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 4 || f[1] != "installed" {
			continue
		}
		name, _, _ := strings.Cut(f[0], ":")
		full[name], needs[name] = f[0], f[2]
		for p := range strings.SplitSeq(f[3], ",") {
			if p = debianName(p); p != "" && full[p] == "" {
				full[p], needs[p] = f[0], f[2]
			}
		}
	}
	for _, p := range packages {
		if full[p] == "" {
			testenv.RequirePeer(t, "the Debian package "+p) // which is no program's name, so this says that it is missing
		}
	}
	seen := make(map[string]bool)
	var closure []string
	for todo := slices.Clone(packages); len(todo) > 0; {
		p := todo[0]
		todo = todo[1:]
		if seen[full[p]] || full[p] == "" {
			continue
		}
		seen[full[p]] = true
		closure = append(closure, full[p])
		for need := range strings.SplitSeq(needs[p], ",") {
			for choice := range strings.SplitSeq(need, "|") {
				if name := debianName(choice); full[name] != "" {
					todo = append(todo, name)
					break
				}
			}
		}
	}
	slices.Sort(closure)
	return closure
}

// debianName is a dependency without version and architecture.
func debianName(s string) string {
	s, _, _ = strings.Cut(s, "(")
	s, _, _ = strings.Cut(strings.TrimSpace(s), ":")
	return s
}

// ImportDebian makes an image of [DebianRoot].
func (d *Daemon) ImportDebian(t testing.TB, reference string, packages ...string) {
	t.Helper()
	f := DebianArchive(t, packages...)
	defer f.Close() // before the test ends: it is large
	d.ImportArchive(t, reference, f)
}

// DebianArchive returns [DebianRoot] in a file, which the caller closes. It serves several daemons.
// Writing a large one takes seconds, so it is kept for later runs while the packages are the same.
func DebianArchive(t testing.TB, packages ...string) *os.File {
	t.Helper()
	// Another format of the archives needs another name here.
	dir, unlock, err := testtree.Kept(t.Context(), "debian-1-"+sum(packages...))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	file := filepath.Join(dir, sum(debianVersions(t, packages), fmt.Sprint(alternatives(t)))+".tar.zst")
	if f, err := os.Open(file); err == nil {
		return f
	}
	others, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range others {
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeDebianArchive(t, file+".new", packages); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file + ".new")
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func writeDebianArchive(t testing.TB, file string, packages []string) (err error) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// The daemon keeps a compressed archive as it is. It would compress another one with gzip, which
	// takes most of the time of a test of a large image.
	z, err := zstd.NewWriter(f, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return err
	}
	DebianRoot(t, z, packages...)
	return z.Close()
}

// debianVersions names the packages of [DebianRoot], each with its version.
func debianVersions(t testing.TB, packages []string) string {
	t.Helper()
	args := append([]string{"-W", "-f", "${binary:Package} ${Version}\n"}, debianClosure(t, packages)...)
	out, err := exec.CommandContext(t.Context(), "dpkg-query", args...).Output()
	if err != nil {
		t.Fatalf("dpkg-query -W: %v", err)
	}
	return string(out)
}

// sum is a part of the names of files that differ with these texts.
func sum(texts ...string) string {
	h := sha256.Sum256([]byte(strings.Join(texts, "\x00")))
	return hex.EncodeToString(h[:8])
}

// ImportArchive makes an image of the root file system in an archive.
func (d *Daemon) ImportArchive(t testing.TB, reference string, f *os.File) {
	t.Helper()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	// The daemon's user may be another, who cannot open the file.
	if got := d.CLIInput(t, f, "import", "--rootfs", "-", reference); got.Code != 0 {
		t.Fatalf("import %s: %+v", reference, got)
	}
}
