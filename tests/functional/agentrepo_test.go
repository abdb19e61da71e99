package functional

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// git runs a command of git in a directory, and returns its output.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "safe.directory=*", "-c", "user.name=t", "-c", "user.email=t@localhost"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return string(out)
}

// repoEdits changes a repository in every way that a patch can hold.
const repoEdits = `echo more >> src/a.c; printf '\0new' > binary; rm gone; mv src/b.c src/moved.c; chmod +x script; mkdir -p new/deep
printf 'no newline' > new/deep/file; ln -s ../src/a.c new/link; printf '\0\1\2' > new/binary; rm -r tree; : > empty; rm link; echo file > link
echo x > '-name with "quotes" and é'; head -c 300000 /dev/zero | tr '\0' '\1' > new/large`

// A run works on a repository of the host, which stays as it is, and hands back a patch. What the
// repository ignores as a secret is not seen.
func TestAgentRunOnARepository(t *testing.T) {
	testenv.RequirePeer(t, "git")
	d := start(t)
	dir := filepath.Join(t.TempDir(), "repo")
	inDir(t, filepath.Dir(dir), `mkdir -p repo/src repo/tree/x; cd repo; echo a > src/a.c; echo b > src/b.c; printf '\0old' > binary; echo g > gone; echo '#!/bin/sh' > script
		echo t > tree/x/t; echo e > empty; ln -s src/a.c link; printf '.env\n' > .sandboxdignore; printf '*.o\nbuild/\n' > .gitignore; echo unseen > .env; mkdir build; echo built > build/b`)
	git(t, dir, "init", "-q")
	git(t, dir, "add", "-f", "src", "tree", "binary", "gone", "script", "empty", "link", ".sandboxdignore", ".gitignore")
	git(t, dir, "commit", "-qm", "first")
	copies := filepath.Dir(dir)
	inDir(t, copies, "cp -a repo patched; cp -a repo native")
	inDir(t, filepath.Join(copies, "native"), repoEdits)
	before := list(t, dir)

	bash := func(script string) llmtest.Turn { return llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash(script)}} }
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	model := llmtest.Start(t,
		bash("pwd; ls -A; cat .env; git status --short && git log --oneline | wc -l"), bash(repoEdits),
		bash("git -c user.name=x -c user.email=x@x add -A && git -c user.name=x -c user.email=x@x commit -qm mine; ls -A .. ; ls /testbed-input /testbed-output && echo 42 > /testbed-output/answer.txt"), submit,
		bash("echo branch > src/a.c"), submit)
	out := filepath.Join(dir, "out")
	got := d.CLI(t, "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--repo", dir, "--gitignore", "--output_dir", out)
	if got.Code != 0 || got.Stdout != "42\n" || !strings.Contains(got.Stderr, "git's own files") || !strings.Contains(got.Stderr, "out, with the results of runs, is hidden") {
		t.Fatalf("the run ended with %+v", got)
	}
	runs, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil || len(runs) != 1 {
		t.Fatalf("run directories: %v, %v", runs, err)
	}
	tr := readTrajectory(t, runs[0])
	first := *tr.Steps[0].Observation
	if strings.Contains(first, "unseen") || strings.Contains(first, "build") || !strings.Contains(first, "/testbed\n") || strings.Contains(first, "dubious") {
		t.Errorf("the model saw %s", first)
	}
	patch := filepath.Join(runs[0], "changes.patch")
	patched := filepath.Join(copies, "patched")
	git(t, patched, "apply", "--check", patch)
	git(t, patched, "apply", patch)
	compare(t, "the patched copy", list(t, patched), list(t, filepath.Join(copies, "native")))
	if got, want := git(t, patched, "status", "--porcelain"), git(t, filepath.Join(copies, "native"), "status", "--porcelain"); got != want {
		t.Errorf("git says %s, want %s", got, want)
	}
	if _, err := os.Stat(filepath.Join(runs[0], "conflicts.patch")); err == nil {
		t.Error("there are conflicts")
	}

	// A branch does the turns again, on the repository as it is.
	got = d.CLI(t, "agent", "fork", "--at", "2", runs[0])
	forks, err := filepath.Glob(filepath.Join(out, "*", "changes.patch"))
	forks = slices.DeleteFunc(forks, func(name string) bool { return name == patch })
	if got.Code != 0 || err != nil || len(forks) != 1 {
		t.Fatalf("the branch: %v, %v, %+v", forks, err, got)
	}
	inDir(t, copies, "cp -a repo forked; rm -r forked/out; cp -a native forked-native; echo branch > forked-native/src/a.c; rm forked*/.git/index")
	git(t, filepath.Join(copies, "forked"), "apply", forks[0])
	compare(t, "the branch's copy", list(t, filepath.Join(copies, "forked")), list(t, filepath.Join(copies, "forked-native")))
	if got := d.CLI(t, "agent", "replay", runs[0]); got.Code != 0 {
		t.Errorf("replay: %+v", got)
	}
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}
	compare(t, "the host's repository", list(t, dir), before)
	if got := d.CLI(t, "ps", "-a", "--json"); strings.Contains(got.Stdout, "agent-") {
		t.Errorf("a sandbox is left: %s", got.Stdout)
	}
}

// What changes on the host during a run is not undone by the patch.
func TestAgentRunOnAChangingRepository(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	dir := t.TempDir()
	inDir(t, dir, "echo a > a; echo b > b; mkdir .vscode; echo t > .vscode/tasks.json")
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo model > a; echo model > b; ln -s /etc/passwd out; mkfifo pipe; echo evil > .vscode/tasks.json")}},
		llmtest.Turn{Check: func(llmtest.Request) error { return os.WriteFile(filepath.Join(dir, "a"), []byte("mine\n"), 0o644) }, Calls: []llmtest.Call{llmtest.Submit()}})
	got, run := agentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--repo", dir, "--json")
	var res struct {
		Patch struct {
			Changes   int
			Conflicts int
			Protected []string
			Skipped   []string
		}
	}
	if err := json.Unmarshal([]byte(got.Stdout), &res); err != nil || got.Code != 0 || res.Patch.Changes != 2 || res.Patch.Conflicts != 1 || len(res.Patch.Skipped) != 3 {
		t.Errorf("the run ended with %+v, %v", got, err)
	}
	if p := res.Patch.Protected; len(p) != 1 || p[0] != ".vscode/tasks.json" {
		t.Errorf("protected: %q", p)
	}
	for name, want := range map[string]string{"changes.patch": "-b\n+model\n", "conflicts.patch": "-mine\n+model\n"} {
		if data, err := os.ReadFile(filepath.Join(run, name)); err != nil || !strings.Contains(string(data), want) {
			t.Errorf("%s: %s, %v", name, data, err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(run, "changes.patch")); err != nil || strings.Contains(string(data), "mine") || strings.Contains(string(data), "passwd") {
		t.Errorf("changes.patch: %s, %v", data, err)
	}
}

func TestAgentRunOnABadRepository(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	dir := t.TempDir()
	inDir(t, dir, "echo f > file; mkdir repo; mkdir strict; echo ../x > strict/.sandboxdignore; ln -s repo link")
	for _, tc := range []struct {
		code int
		want string
		args []string
	}{
		{125, "no such file", []string{"--repo", dir + "/missing"}},
		{125, "not a directory", []string{"--repo", dir + "/file"}},
		{2, "empty name", []string{"--repo", ""}},
		{2, "--snapshot_turns", []string{"--repo", dir + "/repo", "--snapshot_turns"}},
		{2, "--gitignore", []string{"--gitignore"}},
		{125, `line 1: "../x"`, []string{"--repo", dir + "/strict"}},
		{125, "is the repository itself", []string{"--repo", dir + "/link", "--output_dir", dir + "/repo"}},
		{125, "sandboxd's own", []string{"--repo", d.DataDir}},
		{125, `"/"`, []string{"--repo", "/"}},
	} {
		output := t.TempDir()
		got := d.CLI(t, append([]string{"agent", "run", "--output_dir", output, "--query", "q", "--llm_name", "m", "--llm_base_url", "http://localhost:1"}, tc.args...)...)
		if got.Code != tc.code || !strings.Contains(got.Stderr, tc.want) {
			t.Errorf("%v: %+v", tc.args, got)
		}
		if left, err := os.ReadDir(output); err != nil || len(left) > 0 {
			t.Errorf("%v left %v, %v", tc.args, left, err)
		}
	}
	if left, err := os.ReadDir(dir + "/repo"); err != nil || len(left) > 0 {
		t.Errorf("the repository has %v, %v", left, err)
	}
}
