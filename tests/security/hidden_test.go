package security

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// lookout reads whatever it can find of a secret, and prints where. The visible file is the
// control.
const lookout = `
import ctypes, os, struct
SECRET, VISIBLE = b"hidden-of-the-host", b"seen-of-the-host"
found = set()
def look(path):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        data = os.read(fd, 4096)
    except OSError:
        data = b""
    os.close(fd)
    if SECRET in data: found.add("secret at " + path)
    if VISIBLE in data: found.add("visible")
names = [".env", "sub/.env", "secrets/key", "secrets/deep/key", "sub/deep/er/.env", "sub/visible"]
places = ["/workspace", "/workspace-hidden", "/proc/self/root/workspace", "/proc/1/root/workspace", "/proc/1/cwd", "/proc/self/cwd"]
for line in open("/proc/self/mountinfo"):
    fields = line.split(" ")
    places += [fields[3], fields[4]]
    for part in line.replace(",", " ").replace("=", " ").replace(":", " ").split():
        if part.startswith("/"): places.append(part)
for place in set(places):
    for name in names: look(place + "/" + name)
for fd in os.listdir("/proc/self/fd"):
    for name in names: look("/proc/self/fd/" + fd + "/" + name)
for top, dirs, files in os.walk("/workspace"):
    for name in files + dirs: look(os.path.join(top, name))
# By file handles of directories, and guesses of the names within them.
libc = ctypes.CDLL(None, use_errno=True)
for path in ["/workspace", "/workspace/sub", "/workspace/secrets"]:
    handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)), ctypes.c_int()
    for flags in (0, 0x200):
        if libc.name_to_handle_at(-100, path.encode(), handle, ctypes.byref(mount), flags) != 0: continue
        for at in ("/workspace", "/", "/dev/shm"):
            fd = os.open(at, os.O_RDONLY)
            got = libc.open_by_handle_at(fd, handle, os.O_RDONLY)
            if got >= 0:
                for name in names: look("/proc/self/fd/%d/%s" % (got, name))
                os.close(got)
            os.close(fd)
print("\n".join(sorted(found)))
`

// What a workspace hides cannot be read, however its directories are moved, emptied and made
// anew, nor after another start. What programs make at such a path is their own.
func TestHiddenFilesOfAWorkspace(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const secret, visible = "hidden-of-the-host\n", "seen-of-the-host\n"
	for name, text := range map[string]string{
		".env": secret, "sub/.env": secret, "secrets/key": secret, "secrets/deep/key": secret, "sub/deep/er/.env": secret,
		"sub/visible": visible, "sub/deep/visible": visible, "other/file": visible,
	} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "sub"), 0o750); err != nil {
		t.Fatal(err)
	}
	var st, sub unix.Stat_t
	if err := errors.Join(unix.Stat(dir, &st), unix.Stat(filepath.Join(dir, "sub"), &sub)); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{})
	hidden := []string{".env", "sub/.env", "secrets", "sub/deep/er/.env", "later", "missing/dir/file", "secrets/key"}
	create := func() *harness.Sandbox {
		return d.Create(t, api.CreateSandbox{Settings: api.Settings{Workspace: &api.Workspace{
			Source: dir, Target: "/workspace", Device: st.Dev, Inode: st.Ino, Hidden: hidden,
		}}})
	}
	look := func(s *harness.Sandbox, after, want string) {
		t.Helper()
		if got := strings.TrimSpace(s.Sh(t, "cd /workspace; python3 - <<'EOF'\n"+lookout+"EOF\n")); got != want {
			t.Errorf("%s: found %q, want %q", after, got, want)
		}
	}
	s := create()
	look(s, "at first", "visible")
	if got := s.Sh(t, "cd /workspace; ls -A . sub"); got != ".:\nother\nsub\n\nsub:\ndeep\nvisible\n" {
		t.Errorf("listed: %q", got)
	}
	f := strings.Fields(s.Sh(t, "cd /workspace; stat -c '%a %Y %u' sub; stat -c %u ."))
	if len(f) != 4 || f[0] != "750" || f[1] != strconv.FormatInt(sub.Mtim.Sec, 10) || f[2] != f[3] {
		t.Errorf("attributes of sub, and the owner of its directory: %q", f)
	}
	// Files that the host gets later, at hidden paths and in directories that were missing.
	for _, name := range []string{"later", "secrets/more", "missing/dir/file"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(secret), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for what, script := range map[string]string{
		"made at the place and removed":    "echo own > .env; cat .env; rm .env; mkdir secrets; ls -A secrets; rmdir secrets; mkdir secrets; ls -A secrets",
		"emptied and made anew":            "rm -r sub; mkdir sub; ls -A sub",
		"moved":                            "mv sub sub2; ls -A sub2; mv other sub; ls -A sub sub/deep; mkdir -p x/deep/er; mv x/deep sub2; ls -A sub2/deep/er",
		"a directory moved to the place":   "mkdir new; mv new secrets; ls -A secrets; mkdir deep; mv deep secrets/; ls -A secrets/deep",
		"exchanged":                        "python3 -c \"import ctypes; print(ctypes.CDLL(None).renameat2(-100, b'other', -100, b'sub', 2), ctypes.CDLL(None).renameat2(-100, b'.env', -100, b'other', 2))\"; ls -A other sub",
		"links":                            "ln .env hard; ln -s .env soft; ln -s /workspace/sub/.env soft2; cat hard soft soft2; ln -s sub s2; cat s2/.env",
		"marks of overlays":                "mkdir -p secrets sub/deep/er; python3 -c \"import os\nfor p in ('secrets','sub','sub/deep','.'):\n for k, v in (('opaque', b'n'), ('opaque', b'x'), ('redirect', b'/sub'), ('redirect', b'/secrets'), ('origin', b'x'), ('metacopy', b''), ('whiteout', b'')):\n  for ns in ('user.overlay.', 'trusted.overlay.', 'user.overlay.overlay.'):\n   try: os.setxattr(p, ns+k, v)\n   except OSError: pass\n   try: os.removexattr(p, ns+k)\n   except OSError: pass\"",
		"whiteouts of its own":             "mknod .env c 0 0; rm -f .env; mknod secrets c 0 0; rm -f secrets; mkdir -p secrets; mknod secrets/key c 0 0; rm -f secrets/key",
		"mounts":                           "umount /workspace; umount -l /workspace; mount -o remount,lowerdir=/ /workspace; unshare -Urm sh -c 'umount -l /workspace; mount --bind /workspace /mnt; mount --bind /workspace/sub /mnt && cat /mnt/.env; mkdir -p /tmp/u /tmp/w /tmp/m; mount -t overlay overlay -o userxattr,lowerdir=/workspace,upperdir=/tmp/u,workdir=/tmp/w /tmp/m; cat /tmp/m/.env /tmp/m/sub/.env'",
		"the caches of the kernel dropped": "ls -R >/dev/null; echo 2 > /proc/sys/vm/drop_caches; mkdir -p secrets sub/deep/er; i=0; while [ $i -lt 2000 ]; do mkdir -p many/$i; i=$((i+1)); done; rm -r many",
	} {
		s := create()
		if got := s.Sh(t, "cd /workspace; { "+script+"; } 2>&1; true"); strings.Contains(got, "hidden-of") {
			t.Errorf("%s: %s", what, got)
		}
		look(s, what, "visible")
		for _, args := range [][]string{{"stop", s.ID}, {"start", s.ID}} {
			if r := d.CLI(t, args...); r.Code != 0 {
				t.Fatalf("%s: %v: %+v", what, args, r)
			}
		}
		look(s, what+", after another start", "visible")
		if r := d.CLI(t, "changes", s.ID); r.Code != 0 || strings.Contains(r.Stdout+r.Stderr, "hidden-of") {
			t.Errorf("%s: changes show what is hidden: %+v", what, r)
		}
		s.Delete(t)
	}
	// Another start hides the same.
	s.Sh(t, "cd /workspace; echo own > .env; mkdir secrets; echo own > secrets/key")
	for _, args := range [][]string{{"stop", s.ID}, {"start", s.ID}} {
		if r := d.CLI(t, args...); r.Code != 0 {
			t.Fatalf("%v: %+v", args, r)
		}
	}
	if got := s.Sh(t, "cd /workspace; cat .env secrets/key; ls -A secrets"); got != "own\nown\nkey\n" {
		t.Errorf("what programs made at hidden paths, after another start: %q", got)
	}
	for _, name := range []string{".env", "sub/.env", "secrets/key", "secrets/more", "later"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != secret {
			t.Errorf("the host's %s: %q, %v", name, data, err)
		}
	}
}
