// Package code runs a table of programs in all languages, each as code and plainly, and compares
// the two.
package code

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

const image = "local/languages:1"

// packages are those of the languages but Go, which is mounted. They are as this machine has them:
// `make deps` installs them.
var packages = []string{
	"bash", "libc-bin", "coreutils", "dash", "sed", "grep", "python3", "python3-pip", "python3-numpy", "nodejs", "esbuild", "ruby", "default-jdk-headless", "gcc", "g++", "r-base-core", "tar", "gzip",
}

// workshop is a sandbox that has all languages.
type workshop struct {
	c *client.Client
	s *harness.Sandbox
}

func open(t *testing.T) *workshop {
	t.Helper()
	testenv.RequireUserNS(t)
	out, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatalf("find Go: %v", err)
	}
	goroot := strings.TrimSpace(string(out))
	copied := map[string]string{goroot: "/usr/local/go"} // what no package has
	packages := packages
	// Where npm has replaced itself, its package no longer says which files it has.
	if npm, err := filepath.EvalSymlinks(testenv.RequirePeer(t, "npm")); err != nil {
		t.Fatal(err)
	} else if dir := filepath.Dir(filepath.Dir(npm)); strings.HasSuffix(dir, "/node_modules/npm") {
		copied[dir] = dir
	} else {
		packages = append(slices.Clone(packages), "npm")
	}
	d := harness.Start(t, harness.Options{})
	d.ImportDebian(t, image, packages...)
	s := d.Create(t, api.CreateSandbox{Image: image, Env: []string{"LANG=C.UTF-8"}})
	for from, to := range copied {
		copyIn(t, d, s, from, to)
	}
	compiled, unlock := goLibrary(t)
	copyIn(t, d, s, compiled, "/root/.cache/go-build")
	unlock()
	renviron, err := os.ReadFile("/etc/R/Renviron") // which R's package makes when it is installed
	if err == nil {
		err = s.Put(t.Context(), "/etc/R/Renviron", renviron)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &workshop{d.Client(t), s}
}

// goLibrary returns a cache of the go command with the packages that the table's programs import.
// Compiling them takes as long as a tenth of all that the table runs, so it is done once for a
// version of Go. The caller unlocks the directory.
func goLibrary(t *testing.T) (dir string, unlock func()) {
	t.Helper()
	dir, unlock, err := testtree.Kept(t.Context(), "go-library")
	if err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "bytes", "fmt", "io", "os", "time")
	build.Dir = t.TempDir() // in no module
	build.Env = append(os.Environ(), "GOCACHE="+dir)
	if out, err := build.CombinedOutput(); err != nil {
		unlock()
		t.Fatalf("compile Go's library: %v\n%s", err, out)
	}
	return dir, unlock
}

// copyIn copies a directory of this machine into a sandbox.
func copyIn(t *testing.T, d *harness.Daemon, s *harness.Sandbox, from, to string) {
	t.Helper()
	s.Sh(t, "rm -rf "+to+" && mkdir -p "+to)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	args := []string{"-C", from, "-cf", "-"}
	for _, needless := range []string{"./test", "./api", "./doc", "./docs", "./src/cmd", "testdata", "*_test.go"} {
		args = append(args, "--exclude="+needless)
	}
	tar := exec.CommandContext(t.Context(), "tar", append(args, ".")...)
	tar.Stdout = write
	if err := tar.Start(); err != nil {
		t.Fatal(err)
	}
	_ = write.Close() // tar has it
	got := d.CLIInput(t, read, "cp", "-", s.ID+":"+to)
	if err := tar.Wait(); err != nil || got.Code != 0 {
		t.Fatalf("copy %s: %v, %+v", from, err, got)
	}
}

// outcome is the compared part of a run.
type outcome struct {
	stdout, stderr string
	code           int
	signal         string
}

// places are the directories of the source, in which the two ways differ.
var places = regexp.MustCompile(`/(tmp/\.code-[a-z0-9]{6}|plain/[a-z]+-[a-z]+)/`)

// code runs a program as code.
func (w *workshop) code(t *testing.T, req api.CodeRequest) (outcome, *api.CodeResult) {
	t.Helper()
	res, err := w.c.RunCode(t.Context(), w.s.ID, req)
	if err != nil {
		t.Fatalf("run: %v", err)
	}
	return outcome{res.Logs.Stdout, places.ReplaceAllString(res.Logs.Stderr, "/DIR/"), res.Exit.Code, res.Exit.Signal}, res
}

// plain runs a program as the language's users do.
func (w *workshop) plain(t *testing.T, l *language, label string, req api.CodeRequest) outcome {
	t.Helper()
	dir := "/plain/" + l.name + "-" + label
	if err := w.s.Put(t.Context(), path.Join(dir, l.file), []byte(req.Code)); err != nil {
		t.Fatal(err)
	}
	// Compiled in the source's directory and run in the request's.
	var script string
	if before, run, ok := strings.Cut(l.plain, " && exec "); ok {
		script = `cd "$1" && d=$PWD && shift && cwd=$1 && shift && ` + before + ` && cd "$cwd" && exec ` + inDir(run)
	} else {
		script = `d=$1 && shift && cwd=$1 && shift && cd "$cwd" && exec ` + inDir(l.plain)
	}
	res := w.s.Exec(t, api.ExecRequest{
		Argv: append([]string{"sh", "-c", script, "sh", dir, req.Cwd}, req.Args...), Stdin: req.Stdin, Env: req.Env, OutputLimit: req.OutputLimit,
	})
	return outcome{res.Stdout, places.ReplaceAllString(res.Stderr, "/DIR/"), res.Exit.Code, res.Exit.Signal}
}

var sourceName = regexp.MustCompile(`(\./)?\b([Mm]ain\.(py|js|rb|R|sh|java|ts)|main)( |$)`)

// inDir names the program by the directory in $d.
func inDir(command string) string {
	return sourceName.ReplaceAllString(command, `"$$d"/$2$4`)
}

// TestTable runs each language's program of each case as code and plainly.
//
// One lane is enough: functional.TestCode looks at the differences between users, in both.
func TestTable(t *testing.T) {
	testenv.SameForAll(t)
	open(t).table(t)
}

func (w *workshop) table(t *testing.T) {
	t.Helper()
	w.s.Sh(t, "mkdir -p /plain")
	local := libraries(t)
	lines := new(strings.Builder)
	for i := range largeLines {
		fmt.Fprintf(lines, "line %d\n", i)
	}
	t.Run("languages", func(t *testing.T) {
		for _, l := range languages {
			t.Run(l.name, func(t *testing.T) {
				t.Parallel()
				cwd := "/work/" + l.name
				for _, c := range []struct {
					name  string
					req   api.CodeRequest
					want  outcome
					says  string // in stderr, instead of want.stderr
					fails string // name of the failure
				}{
					{name: "hello", req: api.CodeRequest{Code: l.hello}, want: outcome{stdout: "hello\n"}},
					{name: "stdin", req: api.CodeRequest{Code: l.stdin, Stdin: []byte("a b\nc\n")}, want: outcome{stdout: "A B\nC\n"}},
					{name: "exit", req: api.CodeRequest{Code: l.exit}, want: outcome{code: 3}},
					{name: "runtime", req: api.CodeRequest{Code: l.runtime}, want: outcome{code: -1}, says: l.line, fails: l.failure},
					{name: "syntax", req: api.CodeRequest{Code: l.syntax}, want: outcome{code: -1}, says: l.syntaxLine, fails: l.broken},
					{name: "memory", req: api.CodeRequest{Code: l.memory}, want: outcome{stdout: "used\n"}},
					{name: "unicode", req: api.CodeRequest{Code: l.unicode}, want: outcome{stdout: unicodeText + "\n"}},
					{name: "large", req: api.CodeRequest{Code: l.large, OutputLimit: 4 << 20}, want: outcome{stdout: lines.String()}},
					{name: "files", req: api.CodeRequest{Code: l.files}},
					{name: "missing", req: api.CodeRequest{Code: l.missing}, want: outcome{code: -1}, says: l.missingText, fails: "?"},
					{name: "args", req: api.CodeRequest{Code: l.args, Args: []string{"a b", "", "$HOME", "ž"}}, want: outcome{stdout: "a b\n\n$HOME\nž\n"}},
					{name: "env", req: api.CodeRequest{Code: l.env, Env: []string{"CODE_TEST=a b"}}, want: outcome{stdout: "a b\n"}},
					{name: "stderr", req: api.CodeRequest{Code: l.stderr}, want: outcome{stdout: "out\n", stderr: "err\n"}},
					{name: "cwd", req: api.CodeRequest{Code: l.cwd}, want: outcome{stdout: cwd + "\n"}},
				} {
					t.Run(c.name, func(t *testing.T) {
						if err := w.s.Put(t.Context(), cwd+"/in.txt", []byte("content")); err != nil {
							t.Fatal(err)
						}
						c.req.Language, c.req.Cwd = l.name, cwd
						got, res := w.code(t, c.req)
						if c.name == "files" {
							if out := w.s.Sh(t, "cat "+cwd+"/out.txt; rm "+cwd+"/out.txt"); out != "content" {
								t.Errorf("out.txt has %q", out)
							}
						}
						compare(t, "as expected", got, c.want, c.says)
						if c.name == "memory" && res.Usage.MemoryPeak < 64_000_000 {
							t.Errorf("64 MB in use, and the peak is %d", res.Usage.MemoryPeak)
						}
						switch {
						case c.fails == "?":
						case (res.Failure == nil) != (c.fails == ""), res.Failure != nil && res.Failure.Name != c.fails:
							t.Errorf("failure %+v, want %q; stderr %q", res.Failure, c.fails, got.stderr)
						}
						if plain := w.plain(t, &l, c.name, c.req); plain != got {
							t.Errorf("plainly it is\n%+v\nand as code\n%+v", short(plain), short(got))
						}
					})
				}
				if lib, ok := local[l.name]; ok {
					t.Run("library", func(t *testing.T) { w.library(t, &l, &lib) })
				}
				t.Run("timeout", func(t *testing.T) { w.timeout(t, &l, cwd) })
				t.Run("streams", func(t *testing.T) { w.streams(t, &l, cwd) })
			})
		}
	})
	if left := w.s.Sh(t, "ls -d /tmp/.code-* 2>/dev/null || true"); left != "" {
		t.Errorf("left in the sandbox: %s", left)
	}
}

func compare(t *testing.T, what string, got, want outcome, says string) {
	t.Helper()
	switch {
	case got.stdout != want.stdout, want.code >= 0 && got.code != want.code, want.code < 0 && got.code == 0 && got.signal == "",
		says == "" && got.stderr != want.stderr, !strings.Contains(got.stderr, says):
		t.Errorf("not %s: %+v, want %+v and %q in stderr", what, short(got), short(want), says)
	}
}

// short is an outcome for a message.
func short(o outcome) outcome {
	if len(o.stdout) > 1000 {
		o.stdout = o.stdout[:1000] + "…"
	}
	return o
}

// timeout has the time end while the program waits. How long a compiler and a start take is not
// judged: a timeout that was too short for them is doubled.
func (w *workshop) timeout(t *testing.T, l *language, cwd string) {
	t.Helper()
	for limit := 2.0; limit < testenv.HungAfter.Seconds(); limit *= 2 {
		got, res := w.code(t, api.CodeRequest{Language: l.name, Code: l.timeout, Cwd: cwd, Timeout: limit})
		if !res.Exit.Timeout || got.signal != "SIGKILL" || res.Failure != nil {
			t.Fatalf("not ended by the timeout: %+v", res)
		}
		if got.stdout != "" {
			if got.stdout != "before\n" {
				t.Errorf("output before the timeout: %q", got.stdout)
			}
			return
		}
	}
	t.Error("no output is kept of before the timeout")
}

// streams reads output while the program waits, and leaves.
func (w *workshop) streams(t *testing.T, l *language, cwd string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	out := ""
	_, err := w.c.StreamCode(ctx, w.s.ID, api.CodeRequest{Language: l.name, Code: l.timeout, Cwd: cwd}, func(e api.CodeEvent) error {
		if e.Type == api.CodeStdout {
			if out += e.Text; out == "before\n" {
				return io.EOF
			}
		}
		return nil
	})
	if err != io.EOF || out != "before\n" { //nolint:errorlint // it is the function's own
		t.Errorf("%q, %v", out, err)
	}
	harness.Eventually(t, func() error {
		res, err := w.s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", `for e in /proc/[0-9]*/cwd; do [ "$(readlink $e)" != "$0" ] || echo $e; done`, cwd}})
		if err == nil && res.Stdout != "" {
			err = fmt.Errorf("it runs on: %s", res.Stdout)
		}
		return err
	})
}
