package functional

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// hostRoot returns the host uid of a sandbox's root.
func hostRoot(t *testing.T, s *harness.Sandbox) int {
	t.Helper()
	now, err := s.Inspect(t.Context()) // its init is another one after a new start
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", now.PID))
	if err != nil {
		t.Fatal(err)
	}
	var inside, outside, size int
	if n, err := fmt.Sscan(string(data), &inside, &outside, &size); n != 3 || inside != 0 || size != 65536 {
		t.Fatalf("uid_map is %q, %v", data, err)
	}
	return outside
}

// Sandboxes of root run under disjoint ids, and everything about their files is as if they did not:
// owners inside, and changes, commits, snapshots, forks, rollbacks, exports and starts.
func TestSandboxesHaveOwnIDs(t *testing.T) {
	testenv.RequireOwnIDs(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)),
		harness.Layer(t, "gzip", harness.Tar(t, harness.File{Name: "etc/passwd"}, harness.File{Name: "etc/shells"}, harness.File{Name: "etc/profile"},
			harness.File{Name: "root/", Type: tar.TypeDir, Mode: 0o700}))))
	d.MustPull(t, base)
	a, b := d.Create(t, api.CreateSandbox{Name: "a", Image: base}), d.Create(t, api.CreateSandbox{Name: "b", Image: base})
	roots := map[int]bool{}
	fresh := func(s *harness.Sandbox) {
		t.Helper()
		root := hostRoot(t, s)
		for other := range roots {
			if root < other+65536 && other < root+65536 {
				t.Errorf("root of sandbox %s is %d, and of another %d", s.ID, root, other)
			}
		}
		roots[root] = true
		if state, err := s.Inspect(t.Context()); err != nil || state.Enforced.IDs != api.IDsOwn {
			t.Errorf("sandbox %s: ids %q, %v", s.ID, state.Enforced.IDs, err)
		}
	}
	fresh(a)
	fresh(b)

	const look = "stat -c '%u:%g %a %n' / /etc/passwd /root /root/mine /root/others /root/last 2>/dev/null"
	const owners = "0:0 755 /\n0:0 644 /etc/passwd\n0:0 700 /root\n0:0 600 /root/mine\n1000:1001 640 /root/others\n65535:65535 4755 /root/last\n"
	for _, s := range []*harness.Sandbox{a, b} {
		s.Sh(t, "umask 077; echo of "+s.Name+" >/root/mine; touch /root/others /root/last; chown 1000:1001 /root/others; chmod 640 /root/others; "+
			"chown 65535:65535 /root/last; chmod 4755 /root/last; rm /etc/shells; echo more >>/etc/profile")
		if got := s.Sh(t, look); got != owners {
			t.Errorf("files of sandbox %s:\n%s", s.ID, got)
		}
	}
	// On disk both are owned alike, and by neither of the two.
	var disk []int
	for _, s := range []*harness.Sandbox{a, b} {
		fi, err := os.Lstat(filepath.Join(d.DataDir, "sandboxes", s.ID, "upper", "root", "mine"))
		if err != nil {
			t.Fatal(err)
		}
		uid := int(fi.Sys().(*syscall.Stat_t).Uid)
		if disk = append(disk, uid); disk[0] != uid || roots[uid] || uid == 0 {
			t.Errorf("files are owned by %v, and sandboxes run as %v", disk, roots)
		}
	}

	// A layer and a list of the changes.
	if got := d.CLI(t, "diff", "a"); got.Code != 0 || !strings.Contains(got.Stdout, "/root/others") || !strings.Contains(got.Stdout, "/etc/shells") {
		t.Errorf("diff: %+v", got)
	}
	out := filepath.Join(t.TempDir(), "out.tar")
	for _, command := range [][]string{
		{"commit", "a", "local/ids:1"},
		{"snapshot", "a", "snap"},
		{"export", "-o", out, "local/ids:1"},
		{"fork", "--name", "forked", "a"},
	} {
		if got := d.CLI(t, command...); got.Code != 0 {
			t.Errorf("%v: %+v", command, got)
		}
	}
	check := func(what string, s *harness.Sandbox, of string) {
		t.Helper()
		if got := s.Sh(t, look); got != owners {
			t.Errorf("%s has the files:\n%s", what, got)
		}
		if got := s.Sh(t, "cat /root/mine; test -e /etc/shells || echo gone; tail -n1 /etc/profile"); got != "of "+of+"\ngone\nmore\n" {
			t.Errorf("%s: %q", what, got)
		}
	}
	committed := d.Create(t, api.CreateSandbox{Image: "local/ids:1"})
	check("a committed image", committed, "a")
	fresh(committed)
	restored := d.Create(t, api.CreateSandbox{Snapshot: "snap"})
	check("a snapshot", restored, "a")
	fresh(restored)
	for _, one := range d.List(t) {
		if one.Name == "forked" {
			forked := d.Sandbox(one)
			check("a fork", forked, "a")
			fresh(forked)
		}
	}
	if len(roots) != 5 {
		t.Errorf("%d sandboxes run under %v", len(roots), roots)
	}
	// The archive has owners as programs see them.
	list, err := exec.CommandContext(t.Context(), "sh", "-c", `cd "$1" && tar -xf "$2" && for f in blobs/sha256/*; do tar -tvf $f --numeric-owner 2>/dev/null; done`,
		"sh", t.TempDir(), out).Output()
	if text := string(list); err != nil && text == "" || !strings.Contains(text, "1000/1001") || !strings.Contains(text, "65535/65535") {
		t.Errorf("the archive of the image has %q, %v", text, err)
	}
	// A rollback, and a new start: the same files, under whatever range is free.
	a.Sh(t, "echo changed >/root/mine; chown 7:7 /root/others")
	if got := d.CLI(t, "rollback", "a", "snap"); got.Code != 0 {
		t.Errorf("rollback: %+v", got)
	}
	check("a rollback", a, "a")
	b.MustTurn(t, "stop", nil, api.StateStopped)
	b.MustTurn(t, "start", nil, api.StateRunning)
	check("a sandbox that is started again", b, "b")

	// A daemon that is killed leaves them; the next has them with their ids.
	before := map[string]int{"a": hostRoot(t, a), "b": hostRoot(t, b)}
	d.Kill9(t)
	d.Launch(t)
	for name, s := range map[string]*harness.Sandbox{"a": a, "b": b} {
		if root := hostRoot(t, s); root != before[name] {
			t.Errorf("root of %s is %d, and was %d", name, root, before[name])
		}
		check("a sandbox that was adopted", s, name)
	}
	all := []int{before["a"], before["b"], hostRoot(t, committed), hostRoot(t, restored)}
	next := d.Create(t, api.CreateSandbox{})
	if root := hostRoot(t, next); slices.Contains(all, root) {
		t.Errorf("root of a new sandbox is %d, as of one that was adopted: %v", root, all)
	}
}

// A daemon that needs own ids starts with them, and not without.
func TestOwnIDsCanBeRequired(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	own := d.System(t).Enforced.IDs == api.IDsOwn
	got := d.CLI(t, "serve", "--socket", d.RuntimeDir+"2/api.sock", "--require=ids", "--data-dir", d.DataDir+"2", "--runtime-dir", d.RuntimeDir+"2", "--idle-exit", "1ms")
	if (got.Code == 0) != own || !own && !strings.Contains(got.Stderr, "--require ids") {
		t.Errorf("own ids: %v; serve --require=ids: %+v", own, got)
	}
}
