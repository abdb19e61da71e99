package security

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// statuses are a field of /proc/<pid>/status for every thread of a process.
func statuses(t *testing.T, pid int, field string) (values []string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("no threads of process %d: %v", pid, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		_, after, ok := strings.Cut(string(data), "\n"+field+":")
		if !ok {
			t.Fatalf("%s has no %s", file, field)
		}
		value, _, _ := strings.Cut(after, "\n")
		values = append(values, strings.TrimSpace(value))
	}
	return values
}

// A daemon that is led out of its own directories, by a link in the place of one of them, does not
// follow.
func TestDaemonIsConfined(t *testing.T) {
	testenv.RequireLandlock(t, 2)
	d := start(t)
	for _, v := range statuses(t, d.PID(), "NoNewPrivs") {
		if v != "1" {
			t.Errorf("no_new_privs of a thread is %s", v)
		}
	}
	if got := d.System(t).Confined; got < 2 {
		t.Errorf("the daemon says that it is held by version %d of Landlock", got)
	}
	c := client.New(d.Socket)
	defer c.Close()
	if checks, err := c.Checks(t.Context()); err != nil || !slices.ContainsFunc(checks, func(c api.Check) bool {
		return c.Name == "the daemon itself" && c.OK && strings.HasPrefix(c.Found, "held to its own directories")
	}) {
		t.Errorf("doctor does not say that it is held: %+v, %v", checks, err)
	}
	s := d.Create(t, api.CreateSandbox{Command: []string{"/bin/sh", "-c", "echo its own words; sleep 1000"}})
	const planted = "words of the host"
	dir := filepath.Join(d.DataDir, "logs", s.ID)
	file := filepath.Join(dir, "00000001.log")
	var log []byte
	harness.Eventually(t, func() (err error) {
		if log, err = os.ReadFile(file); err == nil && !strings.Contains(string(log), "its own words") {
			err = fmt.Errorf("the log is %q", log)
		}
		return err
	})
	read := func() string {
		resp, err := d.Do(t.Context(), http.MethodGet, "/v1/sandboxes/"+s.ID+"/logs", nil)
		if err != nil {
			return err.Error() // nothing was sent yet when it broke off
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Logf("the answer breaks off: %v", err)
		}
		return string(body)
	}
	if got := read(); !strings.Contains(got, "its own words") {
		t.Fatalf("control: the log is %q", got)
	}
	outside := t.TempDir()
	forged := strings.ReplaceAll(string(log), "its own words", planted)
	if err := os.WriteFile(filepath.Join(outside, filepath.Base(file)), []byte(forged), 0o644); err != nil {
		t.Fatal(err)
	}
	swap := func(with string) {
		if err := os.Rename(dir, dir+".aside"); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(with, dir); err != nil {
			t.Fatal(err)
		}
	}
	back := func() {
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir+".aside", dir); err != nil {
			t.Fatal(err)
		}
	}
	// The control: the daemon reads through a link below its own directories.
	inside := filepath.Join(d.DataDir, "planted")
	if err := os.CopyFS(inside, os.DirFS(outside)); err != nil {
		t.Fatal(err)
	}
	swap(inside)
	if got := read(); !strings.Contains(got, planted) {
		t.Errorf("control: what is read by way of a link is %q", got)
	}
	back()
	swap(outside)
	if got := read(); strings.Contains(got, planted) {
		t.Errorf("the daemon reads a file of the host: %q", got)
	}
	back()
	if got := read(); !strings.Contains(got, "its own words") {
		t.Errorf("the log is %q after that", got)
	}
	if err := os.RemoveAll(inside); err != nil {
		t.Fatal(err)
	}
}

// A process for a run of the agent, which a daemon that was taken over tells what to do, is not
// led out of the runs by a link among them.
func TestAgentWorkerIsConfined(t *testing.T) {
	testenv.RequireLandlock(t, 2)
	runs, outside := t.TempDir(), t.TempDir()
	const words = "words of the host"
	for _, dir := range []string{filepath.Join(runs, "elsewhere"), outside} {
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "record.jsonl"), []byte(words+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	const in, out = "20260116_143000", "20260116_143001"
	if err := errors.Join(os.Symlink("elsewhere", filepath.Join(runs, in)), os.Symlink(outside, filepath.Join(runs, out))); err != nil {
		t.Fatal(err)
	}
	ask := func(request string) (api.Problem, string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "--socket", filepath.Join(outside, "api.sock"), "agent", "worker", "--runs", runs)
		cmd.Stdin = strings.NewReader(request)
		cmd.Env = []string{"HOME=" + runs}
		said, err := cmd.Output()
		var reply struct{ Problem api.Problem }
		if err == nil {
			err = json.Unmarshal(said, &reply)
		}
		if err != nil {
			return api.Problem{}, err.Error()
		}
		return reply.Problem, ""
	}
	for _, what := range []string{`"resume":{}`, `"remove":true`} {
		// The control: below the runs a link is followed, and its target is read, and is no record.
		if p, failed := ask(`{"run":"` + in + `",` + what + `}`); failed != "" || p.Detail == "" || strings.Contains(p.Detail, "permission denied") {
			t.Errorf("control: %s: %+v %s", what, p, failed)
		}
		if p, failed := ask(`{"run":"` + out + `",` + what + `}`); failed != "" || !strings.Contains(p.Detail, "permission denied") {
			t.Errorf("%s of a run elsewhere: %+v %s", what, p, failed)
		}
		// Nor by its name.
		for _, name := range []string{"../" + filepath.Base(outside), outside, "", ".", "elsewhere"} {
			if p, failed := ask(`{"run":"` + name + `",` + what + `}`); failed == "" {
				t.Errorf("%s of a run called %q is answered: %+v", what, name, p)
			}
		}
	}
	if text, err := os.ReadFile(filepath.Join(outside, "record.jsonl")); err != nil || string(text) != words+"\n" {
		t.Errorf("what is elsewhere is %q, %v", text, err)
	}
}

// While a run goes on, every thread of its process is held, and a daemon that was killed leaves it
// to the next one.
func TestHostedRunsProcessIsHeld(t *testing.T) {
	testenv.RequireLandlock(t, 2)
	d := start(t)
	c := client.New(d.Socket)
	defer c.Close()
	model := llmtest.Start(t, llmtest.Turn{Hang: true})
	run, err := c.StartAgentRun(t.Context(), api.StartAgentRun{Query: "q", Model: api.AgentModel{Name: "m", BaseURL: model.URL}})
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	pid := 0
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), d.Socket+"\x00agent\x00worker") {
			_, _ = fmt.Sscanf(file, "/proc/%d/", &pid)
		}
	}
	if pid == 0 {
		t.Fatal("no process works on it")
	}
	for _, v := range statuses(t, pid, "NoNewPrivs") {
		if v != "1" {
			t.Errorf("no_new_privs of a thread is %s", v)
		}
	}
	d.Kill9(t)
	d.Launch(t)
	again := client.New(d.Socket)
	defer again.Close()
	runs, err := again.AgentRuns(t.Context())
	if err != nil || len(runs) != 1 || runs[0].ID != run.ID || runs[0].State != api.AgentRunning {
		t.Errorf("the next daemon lists %+v, %v", runs, err)
	}
	if _, err := again.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{}); err != nil {
		t.Fatal(err)
	}
	ended, err := again.AgentRunEvents(t.Context(), run.ID, 1, func(api.AgentRunEvent) error { return nil })
	if err != nil || ended.ExitReason != "interrupted" {
		t.Errorf("cancelled: %+v, %v", ended, err)
	}
	if err := again.DeleteAgentRun(t.Context(), run.ID); err != nil {
		t.Error(err)
	}
}

// A broker does the work that the daemon is confined from, and a launcher that dies is replaced.
func TestConfinedDaemonStartsALauncher(t *testing.T) {
	d := start(t)
	before := d.System(t).Launcher
	for _, field := range []struct{ name, want string }{{"Seccomp", "2"}, {"NoNewPrivs", "1"}} {
		for _, v := range statuses(t, before, field.name) {
			if v != field.want {
				t.Errorf("%s of a thread of the launcher is %s", field.name, v)
			}
		}
	}
	process, err := os.FindProcess(before)
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		defer cancel()
		s, err := d.TryCreate(ctx, api.CreateSandbox{})
		if err != nil {
			return err
		}
		return s.TryDelete(ctx)
	})
	if after := d.System(t).Launcher; after == before || after == 0 {
		t.Errorf("the launcher is process %d, and was %d", after, before)
	}
}

// statusOf is a field of /proc/<pid>/status, empty where the process is gone.
func statusOf(pid int, field string) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(data), "\n"+field+":")
	value, _, _ := strings.Cut(after, "\n")
	return strings.TrimSpace(value)
}

// brokerOf returns the pid of the daemon's broker.
func brokerOf(t *testing.T, daemon int) (pid int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !strings.HasSuffix(string(line), "\x00broker\x00") {
			continue // it has ended, or is another
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && statusOf(pid, "PPid") == strconv.Itoa(daemon) {
			return pid
		}
	}
	t.Fatal("the daemon has no broker")
	return 0
}

// A broker ends with a daemon that is killed. A broker that is killed takes only its requests
// along.
func TestBroker(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	broker := brokerOf(t, d.PID())
	gone := func() error {
		if state := statusOf(broker, "State"); state != "" && !strings.HasPrefix(state, "Z") {
			return fmt.Errorf("the broker is there: %s", state)
		}
		return nil
	}
	d.Kill9(t)
	harness.Eventually(t, gone)
	d.Launch(t)
	if d.System(t).ErrandsGone {
		t.Error("control: the broker is gone")
	}
	d.Create(t, api.CreateSandbox{}).Delete(t) // the image of the host is made
	broker = brokerOf(t, d.PID())
	process, err := os.FindProcess(broker)
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, gone)
	other := d.Create(t, api.CreateSandbox{})
	for _, s := range []*harness.Sandbox{s, other} {
		if r := s.Exec(t, api.ExecRequest{Argv: []string{"true"}}); r.Exit.Code != 0 {
			t.Errorf("without a broker: %+v", r)
		}
		s.Delete(t)
	}
	c := client.New(d.Socket)
	defer c.Close()
	// It is seen by the daemon, too, before long.
	harness.Eventually(t, func() error {
		checks, err := c.Checks(t.Context())
		if err != nil || !slices.ContainsFunc(checks, func(c api.Check) bool {
			return !c.OK && strings.Contains(c.Found, "is gone") && strings.Contains(c.Remedy, "--keep-sandboxes")
		}) {
			return fmt.Errorf("doctor does not report the lost broker: %+v, %w", checks, err)
		}
		return nil
	})
	harness.Eventually(t, func() error {
		if !d.System(t).ErrandsGone {
			return errors.New("nor does /v1/system")
		}
		return nil
	})
	_, err = c.StartAgentRun(t.Context(), api.StartAgentRun{Query: "q", Model: api.AgentModel{Name: "m", BaseURL: "http://127.0.0.1:1"}})
	if !errors.Is(err, &api.Problem{Code: api.CodeUnavailable}) || !strings.Contains(err.Error(), "--keep-sandboxes") {
		t.Errorf("an agent run that cannot begin: %v", err)
	}
	// The next daemon has one, and leaves the cgroups in the end, which the harness looks for.
	d.Kill9(t)
	d.Launch(t)
}

// Files that the daemon's caller forgot to close reach neither the broker nor the launcher.
func TestOpenFilesAreTheDaemonsAlone(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	flags := func(to int) {
		if _, err := unix.FcntlInt(w.Fd(), unix.F_SETFD, to); err != nil {
			t.Fatal(err)
		}
	}
	flags(0)
	d := start(t)
	flags(unix.FD_CLOEXEC)
	pipe, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", w.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	has := func(pid int) bool {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(files, func(f os.DirEntry) bool {
			to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name()))
			return err == nil && to == pipe
		})
	}
	if !has(d.PID()) {
		t.Error("control: the daemon does not have it")
	}
	if has(brokerOf(t, d.PID())) {
		t.Error("the broker has it")
	}
	if os.Getuid() == 0 { // no other process may look
		if has(d.System(t).Launcher) {
			t.Error("the launcher has it")
		}
	}
}
