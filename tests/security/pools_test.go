package security

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Every file system in memory that a sandbox can write to has a ceiling on bytes and on files: an
// empty file takes the kernel's memory and none of the size. Files are refused at the ceiling.
func TestFileSystemsInMemoryAreBounded(t *testing.T) {
	testenv.RequireUserNS(t)
	const mostFiles, mostBlocks = 131072, 131072 // of hardened's /work, which has 512 MiB
	d := harness.Start(t, harness.Options{})
	for _, profile := range profiles(t, d) {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		seen := 0
		for line := range strings.Lines(s.Sh(t, `while read -r _ at kind options _; do
			case $kind,$options in tmpfs,rw*) echo "$at $(stat -f -c '%c %b' "$at")";; esac; done </proc/self/mounts`)) {
			var at string
			var files, blocks int64
			if _, err := fmt.Sscan(line, &at, &files, &blocks); err != nil {
				t.Fatalf("%s: %q: %v", profile, line, err)
			}
			if seen++; files == 0 || files > mostFiles || blocks == 0 || blocks > mostBlocks {
				t.Errorf("%s: %s may have %d files and %d blocks", profile, at, files, blocks)
			}
		}
		if want := map[string]int{"default": 2, "hardened": 6}[profile]; seen != want {
			t.Errorf("%s: %d file systems in memory, want %d", profile, seen, want)
		}
		if got := s.Sh(t, `i=0; cd /dev/shm; while [ $i -lt 20000 ] && true >f$i; do i=$((i+1)); done 2>/dev/null; echo $i`); got != "16383\n" {
			t.Errorf("%s: %s files are made in /dev/shm", profile, strings.TrimSpace(got))
		}
	}
}

// All sandboxes and other users of a host have some thousand terminals together, of which one takes
// 64. A neighbour gets one meanwhile.
func TestTerminalsOfASandboxAreBounded(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s, neighbour := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	const script = `n=0; while exec {fd}<>/dev/ptmx; do n=$((n+1)); done 2>/dev/null; echo $n`
	if got := s.Exec(t, api.ExecRequest{Argv: []string{"bash", "-c", script}}); got.Stdout != "64\n" {
		t.Errorf("%+v: %s terminals %s", got.Exit, strings.TrimSpace(got.Stdout), got.Stderr)
	}
	if got := neighbour.Exec(t, api.ExecRequest{Argv: []string{"tty"}, TTY: true}); got.Exit.Code != 0 || !strings.HasPrefix(got.Stdout, "/dev/pts/") {
		t.Errorf("a neighbour's terminal: %+v %s", got.Exit, got.Stdout)
	}
}

// The daemon's own limits are not those of programs: they have none of its real-time priorities and
// little locked memory.
func TestLimitsAreNotTheDaemons(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireResource(t)
	for _, limit := range []struct{ of, to int }{{unix.RLIMIT_RTPRIO, 50}, {unix.RLIMIT_NICE, 30}, {unix.RLIMIT_MEMLOCK, 1 << 30}} {
		var before unix.Rlimit
		if err := unix.Getrlimit(limit.of, &before); err != nil {
			t.Fatal(err)
		}
		more := unix.Rlimit{Cur: uint64(limit.to), Max: max(before.Max, uint64(limit.to))}
		if err := unix.Setrlimit(limit.of, &more); err != nil {
			t.Skipf("needs a root that can raise limit %d above %d, for the daemon to have more than its programs: %v", limit.of, before.Max, err)
		}
		t.Cleanup(func() { _ = unix.Setrlimit(limit.of, &before) })
	}
	d := harness.Start(t, harness.Options{})
	for _, profile := range profiles(t, d) {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		limits := make(map[string]int)
		for line := range strings.Lines(s.Sh(t, "cat /proc/self/limits")) {
			if fields := strings.Fields(strings.TrimPrefix(line, "Max ")); len(fields) > 3 {
				n, err := strconv.Atoi(fields[len(fields)-2])
				if fields[len(fields)-1] == "us" || err != nil { // nice and realtime priority have no unit
					n, err = strconv.Atoi(fields[len(fields)-1])
				}
				if err == nil {
					limits[fields[0]+" "+fields[1]] = n
				}
			}
		}
		if n, ok := limits["locked memory"]; !ok || n > 64<<10 {
			t.Errorf("%s: locked memory: %d bytes, %v", profile, n, limits)
		}
		for _, name := range []string{"nice priority", "realtime priority"} {
			if n, ok := limits[name]; !ok || n != 0 {
				t.Errorf("%s: %s: %d, %v", profile, name, n, limits)
			}
		}
	}
}

// All sandboxes together have at most half of the launcher's limit of processes, which is no more
// than the host's pids and threads: since Linux 6.14 the launcher sees another number of pids.
func TestProcessesAreAPartOfTheHosts(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	d.Create(t, api.CreateSandbox{}) // with a launcher that runs
	var info struct {
		Launcher int `json:"launcher_pid"`
	}
	if err := d.Call(t.Context(), http.MethodGet, "/v1/system", nil, &info); err != nil {
		t.Fatal(err)
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", info.Launcher))
	if err != nil {
		t.Fatal(err)
	}
	var limit uint64
	_, line, _ := strings.Cut(string(limits), "Max processes")
	if _, err := fmt.Sscan(line, &limit); err != nil {
		t.Fatalf("%s: %v", limits, err)
	}
	for _, file := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if most, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64); err != nil || limit == 0 || limit > most {
			t.Errorf("the launcher may have %d processes, %s is %d, %v", limit, file, most, err)
		}
	}
}

// System V IPC, which outlives its programs, has small ceilings in a sandbox.
func TestSystemVIPCIsBounded(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	for _, missing := range s.Enforced.Missing {
		if strings.Contains(missing, "System V IPC") {
			t.Skip(missing)
		}
	}
	for script, want := range map[string]string{"-M 1": "256\n", "-Q": "32\n", "-S 1": "256\n"} {
		got := s.Sh(t, "n=0; while [ $n -lt 300 ] && ipcmk "+script+" >/dev/null 2>&1; do n=$((n+1)); done; echo $n")
		if got != want {
			t.Errorf("ipcmk %s: %s are made", script, strings.TrimSpace(got))
		}
	}
	if got := s.Sh(t, "ipcmk -M $((3<<30)) 2>/dev/null || echo refused"); got != "refused\n" { // the limit of memory is 2 GiB
		t.Errorf("shared memory beyond the limit of memory: %s", got)
	}
}

// A crash in a sandbox starts no program of the host, though its core_pattern is a pipe: neither
// after a program has set its own limit of cores to 0. The control is a crash on the host. The
// pattern is the whole machine's, so this is for machines of the test bed.
func TestCrashStartsNothing(t *testing.T) {
	testenv.RequireBed(t)
	testenv.RequireRoot(t)
	dir, err := os.MkdirTemp("/tmp", "cores") //nolint:usetesting // the kernel wants a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	helper, said := filepath.Join(dir, "h"), filepath.Join(dir, "said")
	script := "#!/bin/sh\n/bin/cat >/dev/null\necho \"$1\" >>" + said + "\n"
	if err := os.WriteFile(helper, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	// With a limit of helpers the kernel waits for each before its crash is over.
	for name, value := range map[string]string{"core_pattern": "|" + helper + " %e", "core_pipe_limit": "16"} {
		path := "/proc/sys/kernel/" + name
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.WriteFile(path, before, 0o644) })
	}
	crash := func(run func(script string)) {
		run("cp \"$(command -v sleep)\" /tmp/crasher; for i in 1 2 3; do /tmp/crasher 1000 & kill -SEGV $!; wait $! || :; done; rm /tmp/crasher")
	}
	started := func() int {
		text, err := os.ReadFile(said)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return strings.Count(string(text), "\n") // of any name: a shell that is killed before it executes has its own
	}
	crash(func(script string) {
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", "ulimit -c 0; "+script).CombinedOutput(); err != nil {
			t.Fatalf("control: %v: %s", err, out)
		}
	})
	if n := started(); n != 3 {
		t.Fatalf("control: %d programs were started for three crashes on the host", n)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--require=nocorepipe"}})
	for _, profile := range profiles(t, d) {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		if s.Enforced.Cores != api.CoresNone {
			t.Errorf("%s: enforced.cores is %q", profile, s.Enforced.Cores)
		}
		crash(func(script string) { s.Sh(t, script) })
		crash(func(script string) { s.Sh(t, "ulimit -c 0; "+script) })
	}
	if n := started(); n != 3 {
		t.Errorf("%d programs were started for crashes in sandboxes", n-3)
	}
}

// When the host's memory runs out, programs of sandboxes end before others of the host, and none of
// them can have one of another sandbox end first: every process has the same score, and no program
// writes it, whatever it forks or becomes. Where a limit of its own can be met, init alone has a
// lower one.
func TestNoProgramIsSparedAtANeighboursCost(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	score := func(s *harness.Sandbox, script string) int {
		t.Helper()
		said := s.Sh(t, script)
		n, err := strconv.Atoi(strings.TrimSpace(said))
		if err != nil {
			t.Fatalf("%s: %q", script, said)
		}
		return n
	}
	const own = "cat /proc/self/oom_score_adj"
	for _, profile := range profiles(t, d) {
		s, neighbour := d.Create(t, api.CreateSandbox{Profile: profile}), d.Create(t, api.CreateSandbox{Profile: profile})
		for name, script := range map[string]string{
			"nothing":   ":",
			"a write":   "{ echo 0 >/proc/self/oom_score_adj; } 2>/dev/null",
			"the old":   "{ echo -17 >/proc/self/oom_adj; } 2>/dev/null",
			"a thread":  "{ echo 0 >/proc/thread-self/oom_score_adj; echo 0 >/proc/self/task/$$/oom_score_adj; } 2>/dev/null",
			"by number": "{ echo 0 >/proc/$$/oom_score_adj; } 2>/dev/null",
			"init":      "{ echo 0 >/proc/1/oom_score_adj; } 2>/dev/null",
		} {
			if got := score(s, script+"; "+own); got != 1000 {
				t.Errorf("%s: after %s a program has %d", profile, name, got)
			}
			if got := score(s, script+"; setsid sh -c '"+own+"'"); got != 1000 {
				t.Errorf("%s: after %s what it forks has %d", profile, name, got)
			}
		}
		if got := s.Sh(t, "{ echo 1000 >/proc/self/oom_score_adj; } 2>&1 || :"); !strings.Contains(got, "Read-only file system") {
			t.Errorf("%s: a write of the same value: %q", profile, got)
		}
		for _, s := range []*harness.Sandbox{s, neighbour} {
			if got := score(s, own); got != 1000 {
				t.Errorf("%s: a neighbour has %d", profile, got)
			}
			init := score(s, "cat /proc/1/oom_score_adj")
			if limited := s.Enforced.Memory == "cgroup"; limited != (init < 1000) {
				t.Errorf("%s: its init has %d, and a limit of its own: %v", profile, init, limited)
			}
		}
	}
}

// Unread messages, which no limit of memory counts, end the sandbox that piles them up, and it says
// why. A neighbour with some, and the daemon, go on.
func TestUnreadMessagesEndTheirSandbox(t *testing.T) {
	testenv.RequireUserNS(t)
	attacker, err := os.ReadFile(harness.Helper(t, "attacker"))
	if err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{})
	take := func(s *harness.Sandbox, resource string, bound int, env ...string) (*api.ExecResult, error) {
		t.Helper()
		const path = "/var/tmp/attacker"
		if err := s.Put(t.Context(), path, attacker); err != nil {
			t.Fatal(err)
		}
		s.Sh(t, "chmod 755 "+path)
		return s.TryExec(t.Context(), api.ExecRequest{
			Argv: append([]string{path}, attack.TakeResource(resource, bound)...), Env: env, Timeout: testenv.HungAfter.Seconds(),
		})
	}
	for _, profile := range profiles(t, d) {
		for _, resource := range []string{"netlink-messages", "datagram-errors"} {
			neighbour := d.Create(t, api.CreateSandbox{Profile: profile})
			if got, err := take(neighbour, resource, 16, "SANDBOXD_ATTACK_CONTROL=yes"); err != nil || !strings.Contains(got.Stdout, `"taken":16`) {
				t.Errorf("%s, %s: a MiB: %+v, %v", profile, resource, got, err)
			}
			// 2 GiB, or as many sockets as it may have. It holds them until it is killed.
			greedy := d.Create(t, api.CreateSandbox{Profile: profile})
			if got, err := take(greedy, resource, 32768); err == nil {
				t.Errorf("%s, %s: it went on: %+v", profile, resource, got)
			}
			if now := greedy.WaitState(t, api.StateStopped); !strings.Contains(now.Reason, "memory: unread messages of its sockets hold more than 64 MiB") {
				t.Errorf("%s, %s: it ended, because %q", profile, resource, now.Reason)
			}
			if got := neighbour.Sh(t, "echo fine"); got != "fine\n" {
				t.Errorf("%s, %s: the neighbour says %q", profile, resource, got)
			}
		}
	}
}
