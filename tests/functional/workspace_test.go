package functional

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// workspaceOf returns the workspace of a directory for a request.
func workspaceOf(t *testing.T, dir string) *api.Workspace {
	t.Helper()
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return &api.Workspace{Source: dir, Device: st.Dev, Inode: st.Ino}
}

// repository makes a directory with files in directories.
func repository(t *testing.T, directories, files int) string {
	t.Helper()
	dir := t.TempDir()
	for i := range directories {
		sub := filepath.Join(dir, "d"+strconv.Itoa(i))
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range files {
			if err := os.WriteFile(filepath.Join(sub, "f"+strconv.Itoa(j)), fmt.Appendf(nil, "%d.%d\n", i, j), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func inDir(t *testing.T, dir, script string) {
	t.Helper()
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// edits is a script that changes a thousand files of a repository in every way. A shell would start
// a program for most of them.
const edits = `
python3 -c '
import os, shutil
for i in range(100):
    os.chdir("d%d" % i)
    with open("f0", "a") as f: f.write("changed\n")
    os.unlink("f1")
    os.rename("f2", "renamed")
    os.chmod("f3", 0o755)
    os.link("f4", "hard")
    os.symlink("f5", "soft")
    with open("added", "w") as f: f.write("new\n")
    os.mkdir("empty")
    with open("f6", "w"): pass
    shutil.copyfile("f7", "f8")
    os.chdir("..")
'
rm -r d100
mv d101 moved
rm -r d102; mkdir d102; echo again > d102/f0
rm -r d103; echo file > d103
rm d104/f0; mkdir d104/f0; echo below > d104/f0/x
rm d105/f0; ln -s ../d106/f0 d105/f0
mkdir -p deep/er/and/deeper; echo x > deep/er/and/deeper/x
chmod 700 d107
rm -rf d108/*; 
`

// list describes a tree: names, types, modes, contents and further names.
func list(t *testing.T, dir string) string {
	t.Helper()
	var lines []string
	seen := map[uint64]string{}
	err := filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil || rel == "." {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(name, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%q %o", rel, st.Mode)
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %q", st.Nlink, data)
			if st.Nlink > 1 {
				if seen[st.Ino] == "" {
					seen[st.Ino] = rel
				}
				line += " as " + seen[st.Ino]
			}
		case syscall.S_IFLNK:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			line += " -> " + target
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// compare shows the first differences of two listings.
func compare(t *testing.T, what, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	shown := 0
	for _, line := range g {
		if _, ok := slices.BinarySearch(w, line); !ok && !slices.Contains(w, line) && shown < 5 {
			t.Errorf("%s: has %s", what, line)
			shown++
		}
	}
	for _, line := range w {
		if !slices.Contains(g, line) && shown < 10 {
			t.Errorf("%s: lacks %s", what, line)
			shown++
		}
	}
	if shown == 0 {
		t.Errorf("%s: in another order", what)
	}
}

// A program works on a directory of the host as on its own, the directory stays as it was, and the
// changes brought back make the tree that the same program makes natively.
func TestWorkspace(t *testing.T) {
	d := shared(t)
	directories, files := 110, 20 // those of the edits, and one more
	if testenv.Soaking() {
		directories, files = 1000, 100
	}
	dir, native := repository(t, directories, files), repository(t, directories, files)
	before := list(t, dir)
	inDir(t, native, edits)
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Workspace: workspaceOf(t, dir)}})
	if s.Workspace == nil || s.Workspace.Target != "/workspace" || s.Enforced.Workspace == "" {
		t.Fatalf("workspace %+v, enforced %q", s.Workspace, s.Enforced.Workspace)
	}
	if r := d.CLI(t, "exec", s.ID, "--", "sh", "-ec", edits); r.Code != 0 {
		t.Fatalf("the program: %+v", r)
	}
	compare(t, "the host's directory after the program", list(t, dir), before)
	if r := d.CLI(t, "apply", s.ID); r.Code != 2 {
		t.Errorf("without a terminal and --yes: %+v", r)
	}
	compare(t, "the host's directory after a refused apply", list(t, dir), before)
	if r := d.CLI(t, "apply", "--yes", s.ID); r.Code != 0 {
		t.Fatalf("apply: %+v", r)
	}
	compare(t, "the host's directory after apply", list(t, dir), list(t, native))
	if r := d.CLI(t, "changes", "--name-only", s.ID); r.Code != 0 || r.Stdout != "" {
		t.Errorf("changes after apply: %+v", r)
	}
}

// A workspace's changes outlive a stop, and the directory must be the same one at the start.
func TestWorkspaceOfAStoppedSandbox(t *testing.T) {
	d := shared(t)
	outer := t.TempDir()
	dir := filepath.Join(outer, "dir")
	inDir(t, outer, "mkdir dir; echo old > dir/file")
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Workspace: workspaceOf(t, dir)}})
	cli := func(want int, args ...string) harness.Result {
		t.Helper()
		r := d.CLI(t, args...)
		if r.Code != want {
			t.Errorf("%v: %+v", args, r)
		}
		return r
	}
	cli(0, "exec", s.ID, "--", "sh", "-ec", "echo new >> file; echo 1 > added")
	cli(0, "stop", s.ID)
	if r := cli(0, "changes", s.ID); !strings.Contains(r.Stdout, " old\n+new\n") || !strings.Contains(r.Stdout, "+++ b/added\n") {
		t.Errorf("changes of a stopped sandbox: %s", r.Stdout)
	}
	cli(0, "start", s.ID)
	if r := cli(0, "exec", s.ID, "--", "cat", "file", "added"); r.Stdout != "old\nnew\n1\n" {
		t.Errorf("after the start: %s", r.Stdout)
	}
	if r := cli(0, "fork", s.ID); strings.TrimSpace(r.Stdout) == "" {
		t.Errorf("fork: %+v", r)
	} else if f := cli(0, "exec", strings.TrimSpace(r.Stdout), "--", "ls", "/workspace"); f.Stdout != "" {
		t.Errorf("a fork has %s of the workspace", f.Stdout)
	}
	cli(0, "stop", s.ID)
	inDir(t, outer, "mv dir old; mkdir dir; echo trap > dir/file")
	if r := cli(1, "start", s.ID); !strings.Contains(r.Stderr, "another directory is there now") {
		t.Errorf("start with another directory: %s", r.Stderr)
	}
	if r := cli(1, "apply", "--yes", s.ID); !strings.Contains(r.Stderr, "another directory is at") {
		t.Errorf("apply to another directory: %s", r.Stderr)
	}
	inDir(t, outer, "rm -r dir; ln -s old dir")
	if r := cli(1, "start", s.ID); !strings.Contains(r.Stderr, "open workspace") {
		t.Errorf("start with a link: %s", r.Stderr)
	}
	inDir(t, outer, "rm dir; mv old dir")
	cli(0, "start", s.ID)
	cli(0, "apply", "--yes", s.ID, "added")
	if data, err := os.ReadFile(filepath.Join(dir, "added")); err != nil || string(data) != "1\n" {
		t.Errorf("applied: %q, %v", data, err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(data) != "old\n" {
		t.Errorf("not asked for: %q, %v", data, err)
	}
	inDir(t, dir, "echo mine > file")
	if r := cli(1, "apply", "--yes", s.ID); !strings.Contains(r.Stderr, "not applied: file: file has changed on the host") {
		t.Errorf("conflict: %s", r.Stderr)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(data) != "mine\n" {
		t.Errorf("a conflict was applied: %q, %v", data, err)
	}
}

// The mount below the overlay is read-only for everything in the sandbox, and what the host's user
// may not read stays closed.
func TestWorkspaceIsTheOwnersAndNoMore(t *testing.T) {
	d := shared(t)
	dir := t.TempDir()
	inDir(t, dir, "echo private > file; chmod 600 file; mkdir sub; chmod 700 sub; echo x > sub/x; printf '#!/bin/sh\nid -u\n' > suid; chmod 4755 suid")
	before := list(t, dir)
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Workspace: workspaceOf(t, dir)}})
	r := d.CLI(t, "exec", s.ID, "--", "sh", "-c", "cat file sub/x; chown 0:0 file && chmod 666 file && rm -r sub && touch /workspace/suid; grep /workspace /proc/self/mountinfo")
	if r.Code != 0 || !strings.HasPrefix(r.Stdout, "private\nx\n") {
		t.Errorf("as the owner: %+v", r)
	}
	if !strings.Contains(r.Stdout, "nosuid") || !strings.Contains(r.Stdout, "nodev") {
		t.Errorf("flags of the mount: %s", r.Stdout)
	}
	compare(t, "the host's directory", list(t, dir), before)
}

// A run that has a workspace leaves its sandbox for changes and apply; --rm does not.
func TestRunWithAWorkspace(t *testing.T) {
	d := start(t)
	dir := t.TempDir()
	inDir(t, dir, "echo old > file")
	image := d.Create(t, api.CreateSandbox{}).Image
	r := d.CLI(t, "run", "--workspace", dir, image, "--", "sh", "-ec", "echo new >> file")
	if r.Code != 0 || !strings.Contains(r.Stderr, "its changes are kept: sandboxd changes ") {
		t.Fatalf("run: %+v", r)
	}
	_, rest, _ := strings.Cut(r.Stderr, "sandboxd changes ")
	name, _, _ := strings.Cut(rest, ";")
	if r := d.CLI(t, "apply", "--yes", name); r.Code != 0 {
		t.Errorf("apply: %+v", r)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(data) != "old\nnew\n" {
		t.Errorf("applied: %q, %v", data, err)
	}
	if r := d.CLI(t, "rm", "-f", name); r.Code != 0 {
		t.Errorf("rm: %+v", r)
	}
	before := d.CLI(t, "ps", "-aq")
	if r := d.CLI(t, "run", "--rm", "--workspace", dir, image, "--", "sh", "-ec", "echo more >> file"); r.Code != 0 || strings.Contains(r.Stderr, "kept") {
		t.Errorf("run --rm: %+v", r)
	}
	if after := d.CLI(t, "ps", "-aq"); before.Code != 0 || after.Stdout != before.Stdout {
		t.Errorf("run --rm left a sandbox: %q before, %q after", before.Stdout, after.Stdout)
	}
}

// What the daemon keeps of other sandboxes is no workspace, nor what contains it.
func TestWorkspaceIsApart(t *testing.T) {
	d := shared(t)
	for _, dir := range []string{d.DataDir, filepath.Join(d.DataDir, "sandboxes"), filepath.Dir(d.DataDir), d.RuntimeDir} {
		_, err := d.TryCreate(t.Context(), api.CreateSandbox{Settings: api.Settings{Workspace: workspaceOf(t, dir)}})
		wantProblem(t, err, api.CodeInvalid, "sandboxd's own")
	}
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Settings: api.Settings{
		Workspace: workspaceOf(t, t.TempDir()), Mounts: []api.Mount{{Type: api.MountBind, Source: t.TempDir(), Target: "/mnt"}},
	}})
	wantProblem(t, err, api.CodeInvalid, "not both")
}

// The command line keeps out what .sandboxdignore names, and with --gitignore what .gitignore files
// do; changes and apply leave it alone.
func TestWorkspaceIgnores(t *testing.T) {
	d := shared(t)
	dir := t.TempDir()
	inDir(t, dir, `mkdir -p src/build secrets; echo unseen > .env; echo unseen > src/.env; echo unseen > secrets/key; echo o > src/build/x.o; echo c > src/x.c
		printf '.env\n/secrets/\n' > .sandboxdignore; printf 'build/\n' > src/.gitignore`)
	before := list(t, dir)
	image := d.Create(t, api.CreateSandbox{}).Image
	run := func(want int, args ...string) harness.Result {
		t.Helper()
		r := d.CLI(t, append([]string{"run"}, args...)...)
		if r.Code != want {
			t.Errorf("%v: %+v", args, r)
		}
		return r
	}
	if r := run(0, "--rm", "--workspace", dir, image, "--", "find", ".", "-type", "f"); strings.Contains(r.Stdout, "env") || strings.Contains(r.Stdout, "key") || !strings.Contains(r.Stdout, "x.o") {
		t.Errorf("without --gitignore: %s", r.Stdout)
	}
	if r := run(125, "--gitignore", image, "--", "true"); !strings.Contains(r.Stderr, "--workspace") {
		t.Errorf("--gitignore alone: %s", r.Stderr)
	}
	r := run(0, "--gitignore", "--name", "ignoring", "--workspace", dir, image, "--", "sh", "-ec",
		"find . -type f; echo own > .env; echo more >> src/x.c; rm -r src/build 2>/dev/null || true; mkdir src/build; echo own > src/build/x.o; echo weaker > .sandboxdignore")
	if seen := strings.Fields(r.Stdout); len(seen) != 3 || !slices.Contains(seen, "./src/x.c") {
		t.Errorf("with --gitignore: %s", r.Stdout)
	}
	changes := d.CLI(t, "changes", "--name-only", "ignoring")
	for _, want := range []string{
		"A .env  4B  (conflict: the sandbox did not see what the host has there)\n", "C src/x.c  7B\n",
		"A src/build/x.o  4B  (conflict: ", "C .sandboxdignore  7B  (protected)\n",
	} {
		if !strings.Contains(changes.Stdout, want) {
			t.Errorf("changes lack %q: %s", want, changes.Stdout)
		}
	}
	if r := d.CLI(t, "changes", "ignoring"); strings.Contains(r.Stdout, "unseen") {
		t.Errorf("changes show what is hidden: %s", r.Stdout)
	}
	if r := d.CLI(t, "apply", "--yes", "ignoring"); r.Code != 1 || !strings.Contains(r.Stderr, "not applied: .env: the sandbox did not see what the host has there") {
		t.Errorf("apply: %+v", r)
	}
	inDir(t, dir, "test \"$(cat src/x.c)\" = \"c\nmore\"; echo c > src/x.c")
	compare(t, "the host's directory", list(t, dir), before)
	for content, want := range map[string]string{"../x": `line 1: "../x"`, "[": "not closed"} {
		inDir(t, dir, "printf '%s' '"+content+"' > .sandboxdignore")
		if r := run(125, "--workspace", dir, image, "--", "true"); !strings.Contains(r.Stderr, want) {
			t.Errorf("%q: %s", content, r.Stderr)
		}
	}
	inDir(t, dir, "rm .sandboxdignore; mkfifo .sandboxdignore")
	if r := run(125, "--workspace", dir, image, "--", "true"); !strings.Contains(r.Stderr, "no regular file") {
		t.Errorf("a pipe: %s", r.Stderr)
	}
}

// As many paths can be hidden as the API says, with names as long as it says, and stay so over
// restarts of the daemon and of the sandbox.
func TestWorkspaceHidesMany(t *testing.T) {
	d := harness.Start(t, harness.Options{})
	dir := t.TempDir()
	w := workspaceOf(t, dir)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for i := range 128 {
		sub := fmt.Sprintf("d%03d-%014d", i, i)
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range api.MaxHidden / 128 {
			name := fmt.Sprintf("%s/%012d", sub, j)
			// Paths are hidden, not files. New inodes of so many would be most of the test.
			if err := os.Link(file, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			w.Hidden = append(w.Hidden, name)
		}
		if err := os.WriteFile(filepath.Join(dir, sub, "seen"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Workspace: w}})
	const count = "find /workspace -type f | wc -l; find /workspace -type f -name seen | wc -l"
	if got := s.Sh(t, count); got != "128\n128\n" {
		t.Errorf("seen: %q", got)
	}
	d.Kill9(t)
	d.Launch(t)
	for _, args := range [][]string{{"stop", s.ID}, {"start", s.ID}} {
		if r := d.CLI(t, args...); r.Code != 0 {
			t.Fatalf("%v: %+v", args, r)
		}
	}
	if got := s.Sh(t, count); got != "128\n128\n" {
		t.Errorf("after restarts: %q", got)
	}
	w.Hidden = append(w.Hidden, "one-more")
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Settings: api.Settings{Workspace: w}})
	wantProblem(t, err, api.CodeInvalid, "at most 16384 are possible")
}
