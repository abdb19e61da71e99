package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// hostEtc are the files of /etc that programs in /usr need to work as installed. On a usual host
// they hold no secret and nothing about its users or network. In case they do, files that are not
// world-readable, files that look like keys, and directories called "private" are left out. Files
// that may hold credentials on some hosts (pip.conf, npmrc, profile.d, environment, wgetrc,
// maven/settings.xml, ...) are not listed.
var hostEtc = []string{
	// places of libraries, commands and data
	"alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "os-release", "debian_version", "lsb-release", "magic", "magic.mime", "mime.types",
	"protocols", "rpc", "services", "ethertypes", "terminfo", "xml", "sgml", "fonts", "papersize", "paperspecs", "inputrc", "mailcap",
	// certificates, never keys
	"ca-certificates", "ca-certificates.conf", "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf",
	"pki/ca-trust/extracted", "crypto-policies",
	// language and time
	"localtime", "timezone", "locale.alias", "locale.conf", "default/locale", "default/nss",
	// languages
	"perl", "texmf", "R", "octave.conf", "maven/m2.conf", "maven/logging", "vulkan", "OpenCL", "glvnd", "ImageMagick-6", "ImageMagick-7",
	// for packages' scripts that run in a sandbox
	"adduser.conf", "deluser.conf", "login.defs",
}

// hostEtcGlobs are names with a version.
var hostEtcGlobs = []string{"python3*", "java-*-openjdk"}

// hostReplacements are generic files in place of the host's own.
var hostReplacements = map[string]string{
	"etc/hostname":      "sandbox\n",
	"etc/hosts":         "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
	"etc/resolv.conf":   "",
	"etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\nrpc: files\n",
	"etc/host.conf":     "multi on\n",
	"etc/group":         "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\nman:x:12:\nmail:x:8:\nwww-data:x:33:\nutmp:x:43:\nstaff:x:50:\ngames:x:60:\nusers:x:100:\nsandbox:x:1000:\nnogroup:x:65534:\n",
	// Not the host's: users put tokens there for every login.
	"etc/profile":     "# The sandbox's own; the host's is not shown.\nif [ -z \"$PATH\" ]; then\n\tPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n\texport PATH\nfi\n",
	"etc/bash.bashrc": "# The sandbox's own; the host's is not shown.\n[ -z \"$PS1\" ] || PS1='\\u@\\h:\\w\\$ '\n",
}

// hostSkeleton has the directories of the root with their modes.
var hostSkeleton = map[string]int64{
	"boot": 0o755, "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555, "root": 0o700,
	"run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "usr": 0o755,
	"var": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/spool": 0o755, "var/tmp": 0o1777,
}

const (
	maxHostFile  = 8 << 20
	maxHostTotal = 64 << 20
	maxHostCount = 20_000
)

// writeHostTar writes the layer of the host image as an uncompressed tar, equal bytes for an equal
// host, and returns those of [rootfs.HostDirs] that lie below it.
//
// The launcher mounts <layer>/usr over the host's /usr. A directory in both takes owner and mode
// from the layer. So the listed directories belong to the sandbox's root and are writable in the
// sandbox's own upper layer; all others have an unmapped owner.
func writeHostTar(w io.Writer, host *os.Root) (hostDirs []string, err error) {
	t := &hostTar{host: host, entries: make(map[string]hostEntry)}
	for name, mode := range hostSkeleton {
		t.dir(name, mode, time.Time{})
	}
	t.put("home/sandbox", hostEntry{hdr: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000, Gid: 1000}})
	t.link("var/run", "/run")
	t.link("var/lock", "/run/lock")
	t.link("etc/mtab", "/proc/self/mounts")
	hostDirs = t.system()
	for _, name := range hostEtc {
		if err := t.copy("etc/" + name); err != nil {
			return nil, err
		}
	}
	for _, pattern := range hostEtcGlobs {
		names, err := fs.Glob(host.FS(), "etc/"+pattern)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", pattern, err)
		}
		for _, name := range names {
			if err := t.copy(name); err != nil {
				return nil, err
			}
		}
	}
	for name, content := range hostReplacements {
		t.file(name, []byte(content))
	}
	t.accounts()
	return hostDirs, t.write(w)
}

type hostEntry struct {
	hdr  tar.Header // without its name
	body []byte
}

// hostTar collects entries by name, so that they can be written sorted.
type hostTar struct {
	host    *os.Root
	entries map[string]hostEntry
	total   int64
}

// fixedTime is the time of entries that the host does not have.
var fixedTime = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func (t *hostTar) put(name string, e hostEntry) {
	if e.hdr.ModTime.IsZero() {
		e.hdr.ModTime = fixedTime
	}
	t.entries[name] = e
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if _, ok := t.entries[dir]; ok {
			break
		}
		t.entries[dir] = hostEntry{hdr: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755, ModTime: fixedTime}}
	}
}

func (t *hostTar) dir(name string, mode int64, mtime time.Time) {
	t.put(name, hostEntry{hdr: tar.Header{Typeflag: tar.TypeDir, Mode: mode, ModTime: mtime}})
}

func (t *hostTar) file(name string, content []byte) {
	t.put(name, hostEntry{hdr: tar.Header{Typeflag: tar.TypeReg, Mode: 0o644}, body: content})
}

func (t *hostTar) link(name, target string) {
	t.put(name, hostEntry{hdr: tar.Header{Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target}})
}

// accounts adds the few accounts that programs expect, and one for programs that refuse to be root.
func (t *hostTar) accounts() {
	shell := "/bin/sh"
	shells := "/bin/sh\n"
	if fi, err := t.host.Stat("usr/bin/bash"); err == nil && fi.Mode().IsRegular() {
		shell = "/bin/bash"
		shells += "/bin/bash\n"
	}
	t.file("etc/shells", []byte(shells))
	t.file("etc/passwd", fmt.Appendf(nil, `root:x:0:0:root:/root:%[1]s
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
games:x:5:60:games:/usr/games:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
sandbox:x:1000:1000:sandbox:/home/sandbox:%[1]s
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
`, shell))
}

// system adds the directories of programs: links like the host's, and the real directories that
// installations write to.
func (t *hostTar) system() (hostDirs []string) {
	for _, d := range rootfs.HostDirs {
		name := strings.TrimPrefix(d, "/")
		fi, err := t.host.Lstat(name)
		switch {
		case err != nil:
			continue // not every host has all of them
		case fi.Mode()&fs.ModeSymlink != 0:
			target, err := t.host.Readlink(name)
			if err == nil && strings.HasPrefix(path.Clean("/"+target), "/usr/") {
				t.link(name, target)
			}
		case fi.IsDir() && worldReadable(fi):
			hostDirs = append(hostDirs, d)
			t.dirs(t.host, name, name, 1)
		}
	}
	t.dirs(t.host, "usr/local", "usr/local", 3)
	for _, pattern := range []string{"usr/lib/python3*/*-packages", "usr/lib64/python3*/*-packages", "usr/lib/node_modules", "usr/share/node_modules"} {
		names, err := fs.Glob(t.host.FS(), pattern)
		if err != nil {
			continue // the pattern is ours and valid
		}
		for _, name := range names {
			t.dirs(t.host, name, name, 0)
		}
	}
	return hostDirs
}

// dirs adds the directory at rel below in, and the directories below it to some depth. Its name is
// that below the host's root.
func (t *hostTar) dirs(in *os.Root, rel, name string, depth int) {
	fi, err := in.Lstat(rel)
	if err != nil || !fi.IsDir() || !worldReadable(fi) || len(t.entries) > maxHostCount {
		return
	}
	// Not the group's bits or set-id: the host's staff group is not the sandbox's.
	t.dir(name, 0o755, fi.ModTime())
	if depth == 0 {
		return
	}
	_ = below(in, rel, func(dir *os.Root, child string) error {
		t.dirs(dir, child, name+"/"+child, depth-1)
		return nil
	})
}

// below calls f for everything in the directory at rel below in, sorted, with that directory as a
// root of its own: a name below the host's root would be looked up part by part each time. A
// directory that cannot be read has nothing in it.
func below(in *os.Root, rel string, f func(dir *os.Root, child string) error) error {
	dir, err := in.OpenRoot(rel)
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }()
	d, err := dir.Open(".")
	if err != nil {
		return nil
	}
	names, err := d.Readdirnames(-1)
	_ = d.Close()
	if err != nil {
		return nil
	}
	slices.Sort(names)
	for _, name := range names {
		if err := f(dir, name); err != nil {
			return err
		}
	}
	return nil
}

// worldReadable reports whether every user of the host may read the file, or read and enter the
// directory.
func worldReadable(fi fs.FileInfo) bool {
	if fi.IsDir() {
		return fi.Mode().Perm()&0o005 == 0o005
	}
	return fi.Mode().Perm()&0o004 != 0
}

// copy adds a file, link or directory of the host with everything world-readable below it. Absent
// and unreadable files are left out; only an excess is an error.
func (t *hostTar) copy(name string) error {
	// Every directory on the way counts: a readable file in a closed directory is not world-readable.
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if fi, err := t.host.Lstat(dir); err != nil || !fi.IsDir() || !worldReadable(fi) {
			return nil //nolint:nilerr // left out, as the directory is closed or gone
		}
	}
	return t.tree(t.host, name, name)
}

// tree is copy of the file at rel below in, whose name is that below the host's root.
func (t *hostTar) tree(in *os.Root, rel, name string) error {
	if len(t.entries) > maxHostCount || t.total > maxHostTotal {
		return fmt.Errorf("the host's /etc has more than %d files or %d bytes that programs need", maxHostCount, maxHostTotal)
	}
	base := path.Base(name)
	if base == "private" || strings.HasSuffix(base, ".key") {
		return nil
	}
	fi, err := in.Lstat(rel)
	if err != nil {
		return nil //nolint:nilerr // not every host has all of them
	}
	switch {
	case fi.Mode()&fs.ModeSymlink != 0:
		target, err := in.Readlink(rel)
		if err != nil {
			return nil //nolint:nilerr // gone meanwhile
		}
		// The link is only followed in the sandbox, where its target can only be a copied file.
		t.put(name, hostEntry{hdr: tar.Header{Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target, ModTime: fi.ModTime()}})
	case !worldReadable(fi):
	case fi.IsDir():
		t.dir(name, 0o755, fi.ModTime())
		return below(in, rel, func(dir *os.Root, child string) error { return t.tree(dir, child, name+"/"+child) })
	case fi.Mode().IsRegular():
		content, ok := read(in, rel, fi)
		if !ok || bytes.Contains(content, []byte("PRIVATE KEY-----")) {
			return nil
		}
		t.total += int64(len(content))
		t.put(name, hostEntry{hdr: tar.Header{Typeflag: tar.TypeReg, Mode: 0o644 | int64(fi.Mode().Perm()&0o111), ModTime: fi.ModTime()}, body: content})
	}
	return nil
}

// read reads a file of the host if it is still the checked one.
func read(in *os.Root, rel string, want fs.FileInfo) ([]byte, bool) {
	if want.Size() > maxHostFile {
		return nil, false
	}
	f, err := in.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, false
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil || !os.SameFile(fi, want) || !worldReadable(fi) {
		return nil, false
	}
	// What is appended meanwhile is read too.
	buf := bytes.NewBuffer(make([]byte, 0, fi.Size()+bytes.MinRead))
	if _, err := buf.ReadFrom(io.LimitReader(f, maxHostFile+1)); err != nil || buf.Len() > maxHostFile {
		return nil, false
	}
	return buf.Bytes(), true
}

func (t *hostTar) write(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(t.entries)) {
		e := t.entries[name]
		e.hdr.Name = name
		e.hdr.Size = int64(len(e.body))
		// Whole seconds in the oldest possible format: equal bytes on every run.
		e.hdr.ModTime = e.hdr.ModTime.Truncate(time.Second)
		if e.hdr.Typeflag == tar.TypeDir {
			e.hdr.Name += "/"
		}
		if err := tw.WriteHeader(&e.hdr); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if _, err := tw.Write(e.body); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("end the archive: %w", err)
	}
	return nil
}
