package functional

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The sandbox's record and its programs' view agree with the profile.
func TestHardenedSandbox(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Profile: "hardened"})
	e := s.Enforced
	if e.Profile != "hardened" || e.Seccomp != "hardened" || e.Caps != 0 || !e.NonRoot || !e.ReadOnlyRoot || !e.NoNewPrivs {
		t.Errorf("enforced: %+v", e)
	}
	if s.User != "65534:65534" || s.Cwd != "/work" || s.Limits.Pids != 256 {
		t.Errorf("the sandbox: user %q, directory %q, limits %+v", s.User, s.Cwd, s.Limits)
	}
	if got := s.Sh(t, "id -u; id -g; pwd; echo $HOME; grep -E '^Cap(Prm|Eff|Bnd|Amb|Inh)' /proc/self/status | cut -f 2 | sort -u"); got !=
		"65534\n65534\n/work\n/work\n0000000000000000\n" {
		t.Errorf("a program in it finds %q", got)
	}
	// The writable places, and that files written there can be used.
	s.Sh(t, "for d in /work /tmp /var/tmp /dev/shm; do echo x >$d/file && test \"$(cat $d/file)\" = x || exit 1; done; cp /bin/true /work/true && /work/true")
	for _, path := range []string{"/", "/etc", "/usr", "/usr/bin", "/run", "/proc", "/sys", "/dev", "/var", "/home"} {
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "echo x >" + path + "/planted"}}); got.Exit.Code == 0 {
			t.Errorf("a file in %s was made", path)
		}
	}
	// The mounts have not lost on the way what keeps setuid files and devices without effect.
	for line := range strings.Lines(s.Sh(t, "cat /proc/self/mounts")) {
		f := strings.Fields(line)
		options := strings.Split(f[3], ",")
		scratch := slices.Contains([]string{"/work", "/tmp", "/var/tmp", "/run"}, f[1])
		if f[2] == "overlay" || scratch {
			if !slices.Contains(options, "nosuid") || !slices.Contains(options, "nodev") || slices.Contains(options, "rw") != scratch {
				t.Errorf("mounted: %s", line)
			}
		}
	}
	// Scratch file systems end where they should.
	if got := s.Exec(t, api.ExecRequest{Argv: []string{"dd", "if=/dev/zero", "of=/var/tmp/large", "bs=1M", "count=65"}}); !strings.Contains(got.Stderr, "No space left") {
		t.Errorf("65 MiB in a place of 64: %+v %s", got.Exit, got.Stderr)
	}
}

// Nothing runs as root under it, whoever asks for it and in whatever spelling.
func TestHardenedRunsNothingAsRoot(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	for _, user := range []string{"root", "0", "0:0", "00", "root:nogroup", "0:65534"} {
		if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Profile: "hardened", User: user}); !isInvalid(err) {
			t.Errorf("a sandbox of user %q: %v", user, err)
		}
	}
	s := d.Create(t, api.CreateSandbox{Profile: "hardened"})
	for _, user := range []string{"root", "0", "0:0", "00", "0:65534"} {
		if _, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"id"}, User: user}); !isInvalid(err) {
			t.Errorf("an exec of user %q: %v", user, err)
		}
	}
	if got := s.Exec(t, api.ExecRequest{Argv: []string{"id", "-u"}, User: "1000:1000"}); got.Stdout != "1000\n" {
		t.Errorf("another user who is not root: %+v", got)
	}
	// Control: where root is allowed, the same is root.
	if got := d.Create(t, api.CreateSandbox{User: "00"}).Sh(t, "id -u"); got != "0\n" {
		t.Errorf("control: user 00 is %q", got)
	}
}

// Nor by a name that its own files say is root's, in whatever way a program comes to run: an exec,
// one that goes on by itself, the main process after a creation, a start, a rollback, in a fork.
// Nor is a file written to be root's.
func TestHardenedRunsNoMainProcessAsRoot(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := start(t)
	base := d.Create(t, api.CreateSandbox{})
	base.Sh(t, "cp /etc/passwd /tmp/passwd; echo toor:x:0:0::/:/bin/sh >>/tmp/passwd; mv /tmp/passwd /etc/passwd")
	snapshot := func(s *harness.Sandbox) string {
		var made api.Snapshot
		if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/snapshots", struct{}{}, &made); err != nil {
			t.Fatalf("snapshot: %v", err)
		}
		t.Cleanup(func() {
			if err := d.Call(context.WithoutCancel(t.Context()), "DELETE", "/v1/snapshots/"+made.ID, nil, nil); err != nil {
				t.Error(err)
			}
		})
		return made.ID
	}
	from := snapshot(base)
	whoami := []string{"sh", "-c", "id -u; exec sleep 1000"}
	if got := d.Create(t, api.CreateSandbox{Snapshot: from, User: "toor"}).Sh(t, "id -u"); got != "0\n" {
		t.Errorf("control: user toor is %q", got)
	}

	before := len(d.List(t))
	if s, err := d.TryCreate(t.Context(), api.CreateSandbox{Snapshot: from, Profile: "hardened", User: "toor", Command: whoami}); !isInvalid(err) {
		t.Errorf("a main process of user toor: %+v, %v", s, err)
	}
	if left := len(d.List(t)); left != before {
		t.Errorf("it left a sandbox: %d, then %d", before, left)
	}

	s := d.Create(t, api.CreateSandbox{Snapshot: from, Profile: "hardened", Command: whoami})
	logged := func(id string, times int) {
		t.Helper()
		want := strings.Repeat("65534\n", times)
		eventually(t, func() error {
			if got := d.CLI(t, "logs", id); got.Stdout != want {
				return fmt.Errorf("the main process said %q %s, want %q", got.Stdout, got.Stderr, want)
			}
			return nil
		})
	}
	logged(s.ID, 1)
	for _, user := range []string{"root", "toor", "0:65534"} {
		for what, req := range map[string]api.ExecRequest{"an exec": {}, "one that goes on": {Detach: true}} {
			req.Argv, req.User = []string{"id"}, user
			if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/exec", req, nil); !isInvalid(err) {
				t.Errorf("%s of user %s: %v", what, user, err)
			}
		}
		dir := map[string]string{"path": "/tmp/planted", "user": user}
		for what, call := range map[string]struct {
			method, path string
			body         any
		}{
			"a file": {"PUT", "files?path=/tmp/planted&user=" + user, nil}, "an archive": {"PUT", "archive?path=/tmp&user=" + user, nil},
			"more of a file": {"PUT", "files?append=true&path=/tmp/planted&user=" + user, nil}, "a directory": {"POST", "mkdir", dir},
		} {
			err := d.Call(t.Context(), call.method, "/v1/sandboxes/"+s.ID+"/"+call.path, call.body, nil)
			if !isInvalid(err) || !strings.Contains(err.Error(), "runs nothing as root") {
				t.Errorf("%s of user %s: %v", what, user, err)
			}
		}
	}
	if got := s.Sh(t, "ls -A /tmp"); got != "" {
		t.Errorf("written: %q", got)
	}

	back := snapshot(s)
	s.MustTurn(t, "stop", nil, api.StateStopped)
	s.MustTurn(t, "start", nil, api.StateRunning)
	logged(s.ID, 2)
	s.MustTurn(t, "rollback", api.RollbackSandbox{Snapshot: back}, api.StateRunning)
	logged(s.ID, 3)
	var forked api.SandboxForked
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{Count: 1}, &forked); err != nil || len(forked.Sandboxes) != 1 {
		t.Fatalf("fork: %v", err)
	}
	logged(forked.Sandboxes[0].ID, 1)
	// Started in the thread that is confined, as every other: it could write its own name in /proc
	// otherwise.
	if s.Enforced.Landlock > 0 {
		mark := []string{"sh", "-c", "echo x 2>/dev/null >/proc/self/comm && echo written || echo refused"}
		m := d.Create(t, api.CreateSandbox{Profile: "hardened", Command: mark})
		eventually(t, func() error {
			if got := d.CLI(t, "logs", m.ID); got.Stdout != "refused\n" {
				return fmt.Errorf("a main process that writes to /proc said %q", got.Stdout)
			}
			return nil
		})
	}
}

func isInvalid(err error) bool { return errors.Is(err, &api.Problem{Code: api.CodeInvalid}) }

// A profile that cannot be applied is an error: without subordinate ids there is only root.
func TestProfileThatCannotBeAppliedIsAnError(t *testing.T) {
	d := shared(t)
	if d.System(t).Enforced.IDs != "single" {
		s := d.Create(t, api.CreateSandbox{Profile: "hardened"})
		if !s.Enforced.NonRoot {
			t.Errorf("enforced: %+v", s.Enforced)
		}
		return
	}
	if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Profile: "hardened"}); !errors.Is(err, &api.Problem{Code: api.CodeUnenforceable}) {
		t.Errorf("a profile without root where there is only root: %v", err)
	}
}

// A profile with more processes than the daemon itself may have gets the possible number. A
// request for more by number is refused with the reason.
func TestProfileOfMoreProcessesThanThereAre(t *testing.T) {
	testenv.RequireUserNS(t)
	most := 2000 + 4*harness.Threads(t) // more than the tests beside this one take, which are of the same user
	dir := t.TempDir()
	text := document(t, "default")
	text["name"], text["seccomp"] = "mine", "default"
	limits, ok := text["limits"].(map[string]any)
	if !ok {
		t.Fatalf("limits are %v", text["limits"])
	}
	limits["pids"] = 10 * most
	save(t, filepath.Join(dir, "mine.json"), text)
	d := harness.Start(t, harness.Options{Args: []string{"--profiles", dir}, Processes: most, ProcessesHard: true})
	s := d.Create(t, api.CreateSandbox{Profile: "mine"})
	more, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Pids: int64(most) + 1}})
	if s.Enforced.Pids == "cgroup" { // which counts them, and asks no one else
		if err != nil {
			t.Error(err)
		}
		return
	}
	want := fmt.Sprintln(most, most)
	if got := s.Sh(t, `awk '/^Max processes/ {print $3, $4}' /proc/self/limits`); got != want {
		t.Errorf("a program may have %q processes, want %q", got, want)
	}
	if !errors.Is(err, &api.Problem{Code: api.CodeUnenforceable}) || !strings.Contains(err.Error(), "ulimit -Hu") {
		t.Errorf("one more than that: %+v, %v", more, err)
	}
}

// Profiles of one's own come from a directory; a bad one keeps the daemon from starting, and says
// why.
func TestOwnProfile(t *testing.T) {
	t.Parallel()
	testenv.RequireUserNS(t)
	dir := t.TempDir()
	text := document(t, "default")
	text["name"], text["seccomp"] = "mine", "default"
	text["process"] = map[string]any{"env": []string{"COLOUR=green"}, "capabilities": map[string]any{"bounding": []string{"CAP_CHOWN"}}}
	text["mounts"] = []any{map[string]any{"destination": "/scratch/a", "type": "tmpfs", "options": []string{"nosuid", "nodev", "size=1048576", "mode=1777"}}}
	save(t, filepath.Join(dir, "mine.json"), text)
	d := harness.Start(t, harness.Options{Args: []string{"--profiles", dir, "--pool", "host=1,mine"}})
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 1 && p.Profile == "mine" })

	s := d.Create(t, api.CreateSandbox{Profile: "mine"})
	if p := d.System(t).Pools[0]; p.Hits != 1 {
		t.Errorf("it was not claimed: %+v", p)
	}
	if s.Enforced.Profile != "mine" || s.Enforced.Caps != 1 || s.Enforced.NonRoot || s.Enforced.ReadOnlyRoot {
		t.Errorf("enforced: %+v", s.Enforced)
	}
	if got := s.Sh(t, "echo $COLOUR; grep CapBnd /proc/self/status; stat -f -c %T /scratch/a; touch /scratch/a/x /x && echo done"); got !=
		"green\nCapBnd:\t0000000000000001\ntmpfs\ndone\n" {
		t.Errorf("a program in it finds %q", got)
	}
	// Another profile does not take from the pool, nor is it missed there.
	before := d.System(t).Pools[0]
	if other := d.Create(t, api.CreateSandbox{}); other.Enforced.Profile != "default" {
		t.Errorf("enforced: %+v", other.Enforced)
	}
	if after := d.System(t).Pools[0]; after.Hits != before.Hits || after.Misses != before.Misses {
		t.Errorf("a sandbox of another profile counts: %+v, then %+v", before, after)
	}
	var list api.ProfileList
	out := d.CLI(t, "profiles", "--json")
	if err := json.Unmarshal([]byte(out.Stdout), &list); err != nil || len(list.Profiles) != 4 || list.Profiles[3].Source != filepath.Join(dir, "mine.json") {
		t.Errorf("listed: %v, %+v", err, list)
	}
	if got := d.CLI(t, "profiles", "show", "mine"); got.Code != 0 || !strings.Contains(got.Stdout, "CAP_CHOWN") || !strings.Contains(got.Stdout, "\nmount EPERM\n") {
		t.Errorf("shown: %+v", got)
	}
	var shown api.Profile
	if got := d.CLI(t, "profiles", "show", "--json", "hardened"); json.Unmarshal([]byte(got.Stdout), &shown) != nil || shown.Syscalls > 180 || len(shown.Seccomp) == 0 {
		t.Errorf("shown as JSON: %+v", got)
	}
	if got := d.CLI(t, "profiles", "show", "nobody"); got.Code == 0 || !strings.Contains(got.Stderr, "sandboxd profiles") {
		t.Errorf("one that is not there: %+v", got)
	}

	text["limits"] = map[string]any{"memory": 1}
	save(t, filepath.Join(dir, "mine.json"), text)
	args := []string{"serve", "--data-dir", filepath.Join(t.TempDir(), "data"), "--runtime-dir", filepath.Join(t.TempDir(), "run"), "--profiles", dir}
	if got := d.CLI(t, args...); got.Code != 1 || !strings.Contains(got.Stderr, `profile "mine": limits:`) {
		t.Errorf("a daemon with a bad profile: %+v", got)
	}
}

// document is that of an embedded profile.
func document(t *testing.T, name string) map[string]any {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Root(t), "oci-profiles", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	doc := make(map[string]any)
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

func save(t *testing.T, path string, doc any) {
	t.Helper()
	data, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A snapshot remembers the profile; what lies on its scratch file systems is in none.
func TestHardenedSandboxIsForkedAndStarted(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Profile: "hardened", Name: fmt.Sprintf("h%d", time.Now().UnixNano())})
	s.Sh(t, "echo x >/work/mine")
	var forked api.SandboxForked
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{Count: 1}, &forked); err != nil || len(forked.Sandboxes) != 1 {
		t.Fatalf("fork: %v", err)
	}
	if e := forked.Sandboxes[0].Enforced; e.Profile != "hardened" || !e.NonRoot || !e.ReadOnlyRoot {
		t.Errorf("the fork: %+v", e)
	}
	for _, step := range []string{"stop", "start"} {
		if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/"+step, struct{}{}, nil); err != nil {
			t.Fatalf("%s: %v", step, err)
		}
	}
	if got := s.Sh(t, "id -u; ls /work; touch /x 2>/dev/null || echo refused"); got != "65534\nrefused\n" {
		t.Errorf("started again: %q", got)
	}
}
