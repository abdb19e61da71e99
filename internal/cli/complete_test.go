package cli

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// A shell gets names of the daemon's objects, where an argument or flag takes one.
func TestCompletion(t *testing.T) {
	f := cmdtest.New()
	twoSandboxes(f)
	f.Sandboxes[0].Image = "ima\x1bge"
	f.Images = []string{"docker.io/library/debian:12", "localhost:5000/tool"}
	t.Setenv("SANDBOXD_SOCKET", f.Start(t))
	for _, tt := range []struct {
		line, want string
		files      bool // the shell offers files
	}{
		{line: "exec |", want: `first` + "\t" + `running, ima\x1bge`}, // the other one's name could not be typed
		{line: "exec s|", want: "sb1\tfirst, running sb2\tse\\x1bcond, running"},
		{line: "exec first |", files: true},
		{line: "exec -it fi|", want: `first` + "\t" + `running, ima\x1bge`},
		{line: "rm first sb|", want: "sb1\tfirst, running sb2\tse\\x1bcond, running"},
		{line: "stats sb1 sb2|", want: "sb2\tse\\x1bcond, running"},
		{line: "rename sb1 |", files: true},
		{line: "run de|", want: "debian:12\tlinux/amd64"},
		{line: "run debian:12 |", files: true},
		{line: "rmi docker.io/|", want: "docker.io/library/debian:12\tlinux/amd64"},
		{line: "tag local|", want: "localhost:5000/tool\tlinux/amd64"},
		{line: "pull de|"},
		{line: "rollback sb1 cl|", want: "clean\tof , -"},
		{line: "create --snapshot cl|", want: "clean\tof , -"},
		{line: "fork x|"},
		{line: "cp fi|", want: `first:` + "\t" + `running, ima\x1bge`},
		{line: "cp ./nothing|", files: true},
		{line: "run --network fu|", want: "full\tall public addresses"},
		{line: "inspect cle|", want: "clean\tof , -"},
		{line: "secret rm git|", want: "github"},
		{line: "volume rm ca|", want: "cache\tAbout an hour ago"},
		{line: "volume export |", want: "cache\tAbout an hour ago"},
		{line: "run -v ca|", want: "cache:\tAbout an hour ago"},
	} {
		before, _ := strings.CutSuffix(tt.line, "|")
		got := cmdtest.Inline(t, "", func(ctx context.Context, stdin, stdout, stderr *os.File) int {
			return command(ctx, stdin, stdout, stderr, append([]string{cobra.ShellCompRequestCmd}, strings.Split(before, " ")...)...)
		})
		out, directive, ok := strings.Cut(strings.TrimSuffix(got.Stdout, "\n"), ":")
		if i := strings.LastIndex(got.Stdout, "\n:"); i >= 0 {
			out, directive, ok = got.Stdout[:i], strings.TrimSpace(got.Stdout[i+2:]), true
		}
		if want := tt.want; strings.ReplaceAll(out, "\n", " ") != want || !ok || (directive == "0") != tt.files {
			t.Errorf("%s: %q, directive %s; want %q, files %v", tt.line, out, directive, want, tt.files)
		}
	}
}

// Without a daemon nothing is offered, nothing is said, and none is started.
func TestCompletionWithoutADaemon(t *testing.T) {
	socket := filepath.Join(cmdtest.ShortDir(t), "s")
	got := cmdtest.Finish(t, cmdtest.Command(t, socket, cobra.ShellCompRequestCmd, "exec", ""))
	if got.Code != 0 || got.Stdout != ":4\n" || strings.Contains(got.Stderr, "sandboxd:") {
		t.Errorf("%+v", got)
	}
	if entries, err := os.ReadDir(filepath.Dir(socket)); err != nil || len(entries) > 0 {
		t.Errorf("%v, %v", entries, err)
	}
}

// Each command has a manual page, which roff reads without a warning where there is one.
func TestManPages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man1")
	if err := writeMan(newRoot(testDeps), dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "sandboxd-system-df.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{".TH SANDBOXD\\-SYSTEM\\-DF 1", "sandboxd\\-system\\-df \\- Show disk space", "\\-\\-verbose", ".SH EXIT STATUS\n.nf\n  0    success", "\\fBsandboxd\\-system\\fR(1)"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("the page lacks %q:\n%s", part, text)
		}
	}
	if got := roff(".a\n'b\nc\\d --e…"); got != "\\&.a\n\\&'b\nc\\ed \\-\\-e\\[u2026]" {
		t.Errorf("escaped: %q", got)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(pages) < 60 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	if path, err := exec.LookPath("groff"); err == nil {
		if out, err := exec.CommandContext(t.Context(), path, append([]string{"-man", "-ww", "-z", "-Tutf8"}, pages...)...).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("groff: %v\n%s", err, out)
		}
	}
}
