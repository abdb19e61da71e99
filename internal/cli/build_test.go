package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func writeTree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, body := range files {
		full := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBuildSendsTheContextAndShowsTheSteps(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	writeTree(t, dir, map[string]string{
		"Dockerfile": "FROM a", "docker/Other": "FROM b", "docker/Other.dockerignore": "*\n", "a": "a", "skip/b": "b", "keep/c.o": "c", "keep/d": "d",
		".dockerignore": "skip\n**/*.o\nDockerfile\n",
	})
	writeTree(t, elsewhere, map[string]string{"Dockerfile": "FROM elsewhere"})
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	const plain = `"args":{"SOURCE_DATE_EPOCH":"42"},"network":{"mode":"none"}}`
	for _, c := range []struct {
		name  string
		args  []string
		stdin string
		log   []string
	}{
		{"plain", []string{dir}, "", []string{"build {" + plain, "files .dockerignore Dockerfile a docker/ docker/Other docker/Other.dockerignore keep/ keep/d link"}},
		{"its own list of what is ignored", []string{"-f", dir + "/docker/Other", dir}, "", []string{
			`build {"dockerfile":"docker/Other",` + plain, "files .dockerignore docker/ docker/Other docker/Other.dockerignore",
		}},
		{"Dockerfile from elsewhere", []string{"-f", elsewhere + "/Dockerfile", dir}, "", []string{`build {"dockerfile":".sandboxd-dockerfile",`, "files .dockerignore .sandboxd-dockerfile a "}},
		{"Dockerfile from stdin", []string{"-f", "-", dir}, "FROM stdin", []string{`build {"dockerfile":".sandboxd-dockerfile",`, "files .dockerignore .sandboxd-dockerfile a "}},
		{"flags", []string{
			"-t", "a:1", "-t", "b:1", "--build-arg", "X=1=2", "--build-arg", "PASSED", "--build-arg", "UNSET", "-l", "k=v", "--target", "s", "--no-cache", "--platform", "linux/amd64",
			"-m", "64m", "--timeout", "90", "--run-timeout", "1m", dir,
		}, "", []string{
			`build {"tags":["a:1","b:1"],"target":"s","args":{"PASSED":"on","SOURCE_DATE_EPOCH":"42","X":"1=2"},"labels":{"k":"v"},"no_cache":true,` +
				`"platform":"linux/amd64","network":{"mode":"none"},"limits":{"memory":67108864},"timeout":90,"run_timeout":60}`,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := cmdtest.New()
			cmd := cmdtest.Command(t, f.Start(t), append([]string{"build"}, c.args...)...)
			cmd.Stdin = strings.NewReader(c.stdin)
			cmd.Env = append(cmd.Env, "SOURCE_DATE_EPOCH=42", "PASSED=on")
			got := cmdtest.Finish(t, cmd)
			if got.Code != 0 || got.Stdout != "app:1 sha256:89ab\n" {
				t.Errorf("%+v", got)
			}
			want := "[1/2] RUN make \\x1b[31m\n  | half a line\n  | \\x1b]0;title\\atab        here\n  | no end\n[1/2] done in 1.5s\n[2/2] COPY a b\n[2/2] cached\n"
			if diff := cmp.Diff(want, got.Stderr); diff != "" {
				t.Errorf("progress (-want +got)\n%s", diff)
			}
			f.Mu.Lock()
			defer f.Mu.Unlock()
			log := strings.Join(f.Log, "\n")
			for _, want := range c.log {
				if !strings.Contains(log, want) {
					t.Errorf("the daemon got\n%s\nwithout %s", log, want)
				}
			}
		})
	}
}

func TestBuildRefusesAndFails(t *testing.T) {
	dir := t.TempDir()
	writeTree(t, dir, map[string]string{"Dockerfile": "FROM a"})
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		stderr string
	}{
		{"no context", nil, 2, "no argument is given; as in: sandboxd build [flags] PATH|-"},
		{"context that is not there", []string{dir + "/none"}, 1, "none"},
		{"context that is a file", []string{dir + "/Dockerfile"}, 2, "is not a directory"},
		{"network", []string{"--network", "host", dir}, 2, "want none, full, egress:POLICY, sandbox:SANDBOX or net:NAME"},
		{"argument without a name", []string{"--build-arg", "=x", dir}, 2, "has no name"},
		{"label without a key", []string{"-l", "=x", dir}, 2, "has no key"},
		{"limit of nothing", []string{"--pids", "0", dir}, 2, "less than 1"},
		{"both from stdin", []string{"-f", "-", "-"}, 2, "both come from stdin"},
		{"Dockerfile that is not there", []string{"-f", dir + "/Nope", dir}, 1, "Nope"},
		{"bad list of what is ignored", []string{"-f", dir + "/Bad", dir}, 1, ".dockerignore"},
		{"failing program", []string{"--target", "failing", dir}, 1, "Dockerfile:2: RUN make: exit code 2\nhint: see above\n"},
		{"quiet", []string{"-q", "--target", "failing", dir}, 1, "sandboxd: Dockerfile:2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.HasSuffix(c.name, "ignored") {
				writeTree(t, dir, map[string]string{"Bad": "FROM a", "Bad.dockerignore": "a[\n"})
			}
			got := inline(t, cmdtest.New().Start(t), "", append([]string{"build"}, c.args...)...)
			if got.Code != c.code || !strings.Contains(got.Stderr, c.stderr) || got.Stdout != "" {
				t.Errorf("%+v", got)
			}
			if c.name == "quiet" && strings.Contains(got.Stderr, "[1/2]") {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A quiet build shows the latest output of the step that failed, and of no other.
func TestLastOutput(t *testing.T) {
	var l lastOutput
	l.event(api.BuildEvent{Step: 1, Stream: "stdout", Output: "of the step before\n"})
	l.event(api.BuildEvent{Step: 2, Status: api.BuildStarted, Text: "RUN false"})
	l.event(api.BuildEvent{Step: 2, Stream: "stdout", Output: strings.Repeat("old\n", maxLastOutput/4)})
	l.event(api.BuildEvent{Step: 2, Stream: "stderr", Output: "why\n"})
	var b strings.Builder
	p := &buildProgress{w: &b}
	l.show(p)
	p.end()
	if b.String() != "  | ...\n  | why\n" {
		t.Errorf("%.200q", b.String())
	}
}
