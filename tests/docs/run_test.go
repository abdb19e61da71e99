package docs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// mostNotRun bounds the shell blocks that say why they cannot run here.
const mostNotRun = 16

// block is one fenced block of shell commands.
type block struct {
	file   string
	line   int    // of its first command
	kind   string // "sh": a script; "console": commands with "$ " before them, and their output
	text   string
	notRun string // the reason
}

// A comment of this form right before a block keeps it from being run.
var notRun = regexp.MustCompile(`^<!-- not run: (.+) -->$`)

// blocks returns the shell blocks of a document.
func blocks(t *testing.T, file, text string) []block {
	t.Helper()
	var found []block
	var current *block
	reason, fenced, kind := "", false, ""
	for i, line := range strings.Split(text, "\n") {
		switch {
		case strings.HasPrefix(line, "```") && fenced:
			if current != nil {
				found = append(found, *current)
			}
			current, fenced, reason = nil, false, ""
		case strings.HasPrefix(line, "```"):
			fenced = true
			kind = strings.TrimPrefix(line, "```")
			if kind == "sh" || kind == "console" {
				current = &block{file: file, line: i + 2, kind: kind, notRun: reason}
			}
		case fenced && current != nil:
			current.text += line + "\n"
		case fenced && kind == "":
			if strings.HasPrefix(line, "$ ") || strings.HasPrefix(line, "sandboxd ") {
				t.Errorf("%s:%d: a command in a block that is neither sh nor console", file, i+1)
			}
		case fenced:
		case notRun.MatchString(line):
			reason = notRun.FindStringSubmatch(line)[1]
		case line != "":
			reason = ""
		}
	}
	return found
}

// step is one command of a console block and its output, as shown.
type step struct{ command, output string }

// steps splits a console block. A command goes on in lines that begin with "> ".
func steps(b block) []step {
	var all []step
	for line := range strings.Lines(b.text) {
		switch command, ok := strings.CutPrefix(line, "$ "); {
		case ok:
			all = append(all, step{command: command})
		case len(all) > 0 && all[len(all)-1].output == "" && strings.HasPrefix(line, "> "):
			all[len(all)-1].command += strings.TrimPrefix(line, "> ")
		case len(all) > 0:
			all[len(all)-1].output += line
		}
	}
	return all
}

// matches reports whether output is as shown; "…" stands for anything.
func matches(shown, output string) bool {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(shown)), "…", "(?s:.*)")
	// Columns of tables are as wide as their widest value.
	pattern = regexp.MustCompile(` {2,}`).ReplaceAllString(pattern, ` +`)
	var lines []string
	for line := range strings.Lines(output) {
		lines = append(lines, strings.TrimRight(line, " \n"))
	}
	return regexp.MustCompile("^" + pattern + "$").MatchString(strings.TrimSpace(strings.Join(lines, "\n")))
}

// session runs the blocks of documents with one daemon. Every document has a home directory of its
// own, and its blocks run in their order.
type session struct {
	daemon   *harness.Daemon
	home     string
	run      string // $XDG_RUNTIME_DIR
	registry string
}

func newSession(t *testing.T) *session {
	t.Helper()
	testenv.RequireUserNS(t)
	registry := harness.LyingRegistry(t, nil)
	registry.Push(t, "busybox:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Cmd: []string{"sh"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	return &session{registry: registry.Host, daemon: harness.Start(t, harness.Options{})}
}

// begin makes a home directory.
func (s *session) begin(t *testing.T) {
	t.Helper()
	s.home = t.TempDir()
	// $XDG_RUNTIME_DIR/sandboxd/api.sock is where users find the socket. Not t.TempDir: the path of a
	// socket has 108 bytes, and curl takes no longer one.
	var err error
	if s.run, err = os.MkdirTemp("", "run"); err != nil { //nolint:usetesting // see above
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(s.run) }) // a link
	err = errors.Join(os.Symlink(s.daemon.RuntimeDir, filepath.Join(s.run, "sandboxd")),
		os.Symlink(filepath.Join(harness.Root(t), "examples"), filepath.Join(s.home, "examples")))
	if err != nil {
		t.Fatal(err)
	}
}

// end deletes the sandboxes and snapshots that the document has left.
func (s *session) end(t *testing.T) {
	t.Helper()
	outputs, codes := s.commands(t, []string{"sandboxd rm --all", "sandboxd snapshots -q | xargs -r sandboxd snapshots rm"})
	if codes[0] != 0 || codes[1] != 0 {
		t.Errorf("clean up: %q", outputs)
	}
}

// mark separates the outputs of commands in one shell.
const mark = "\x1e"

// commands executes the commands in one shell and returns the output and the exit code of each.
func (s *session) commands(t *testing.T, commands []string) (outputs []string, codes []int) {
	t.Helper()
	script := new(strings.Builder)
	for _, c := range commands {
		fmt.Fprintf(script, "%s\nprintf '%s%%s\\n' $?\n", strings.TrimSuffix(c, "\n"), mark)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter) // it only ends a command that hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", strings.ReplaceAll(script.String(), "localhost:5000", s.registry))
	cmd.Dir = s.home
	cmd.Env = []string{
		"PATH=" + filepath.Dir(harness.Program(t, "sandboxd")) + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + s.home, "LANG=C.UTF-8", "USER=ann",
		"XDG_RUNTIME_DIR=" + s.run, "SANDBOXD_SOCKET=" + s.daemon.Socket,
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); !ok {
			t.Fatal(err)
		}
	}
	rest := strings.ReplaceAll(out.String(), s.registry, "localhost:5000")
	for range commands {
		output, after, ok := strings.Cut(rest, mark)
		if !ok {
			t.Fatalf("the shell ended early:\n%s", rest)
		}
		code, next, _ := strings.Cut(after, "\n")
		n, err := strconv.Atoi(code)
		if err != nil {
			t.Fatal(err)
		}
		outputs, codes, rest = append(outputs, output), append(codes, n), next
	}
	return outputs, codes
}

// check runs a block and compares its output with the shown one.
func (s *session) check(t *testing.T, b block) {
	t.Helper()
	if b.kind == "sh" {
		outputs, codes := s.commands(t, []string{"(set -e\n" + b.text + "\n)"})
		if codes[0] != 0 {
			t.Errorf("%s:%d: exit status %d\n%s%s", b.file, b.line, codes[0], b.text, outputs[0])
		}
		return
	}
	all := steps(b)
	var commands []string
	for _, st := range all {
		commands = append(commands, st.command)
	}
	outputs, codes := s.commands(t, commands)
	for i, st := range all {
		if codes[i] != 0 {
			t.Errorf("%s:%d: exit status %d\n$ %s%s", b.file, b.line, codes[i], st.command, outputs[i])
		} else if !matches(st.output, outputs[i]) {
			t.Errorf("%s:%d: $ %s-- shown:\n%s-- printed:\n%s", b.file, b.line, st.command, st.output, outputs[i])
		}
	}
}

// shown returns the documents whose commands run: README.md and those of docs, without decisions
// and pages for contributors.
func shown(t *testing.T, root string) []string {
	t.Helper()
	var names []string
	for _, name := range markdown(t, root) {
		if name == "README.md" || strings.HasPrefix(name, "docs/") && !strings.HasPrefix(name, "docs/decisions/") && name != "docs/testbed.md" {
			names = append(names, name)
		}
	}
	return names
}

// Every command of the documents runs, and prints the shown output.
func TestShownCommandsRun(t *testing.T) {
	root := harness.Root(t)
	excused := 0
	s := newSession(t)
	for _, name := range shown(t, root) {
		all := blocks(t, name, document(t, root, name))
		var runnable []block
		for _, b := range all {
			if b.notRun != "" {
				excused++
				continue
			}
			runnable = append(runnable, b)
		}
		if len(runnable) == 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			s.begin(t)
			for _, b := range runnable {
				s.check(t, b)
			}
			s.end(t)
		})
	}
	if excused > mostNotRun {
		t.Errorf("%d shell blocks are not run, at most %d may be", excused, mostNotRun)
	}
}

func TestShownOutputIsCompared(t *testing.T) {
	for _, tc := range []struct {
		shown, printed string
		want           bool
	}{
		{"hi\n", "hi\n", true},
		{"hi\n", "ho\n", false},
		{"a … c\n", "a b c\n", true},
		{"first\n…\nlast\n", "first\n2\n3\nlast\n", true},
		{"NAME  STATE\n", "NAME     STATE \n", true},
		{"", "surprise\n", false},
	} {
		if got := matches(tc.shown, tc.printed); got != tc.want {
			t.Errorf("%q, printed %q: %v", tc.shown, tc.printed, got)
		}
	}
	b := blocks(t, "x.md", "```console\n$ one \\\n> two\nout\n$ three\n```\n<!-- not run: needs root -->\n```sh\nfour\n```\n")
	if len(b) != 2 || b[1].notRun != "needs root" || len(steps(b[0])) != 2 || steps(b[0])[0] != (step{"one \\\ntwo\n", "out\n"}) {
		t.Errorf("%+v", b)
	}
}
