package functional

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// dockerLines reads the table of Docker's command lines where the tests of the command line have
// it: its rows must be true of a daemon, too.
func dockerLines(t *testing.T) (lines [][2]string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(harness.Root(t), "internal/cli/docker_test.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	table, ok := file.Scope.Lookup("habitLines").Decl.(*ast.ValueSpec)
	if !ok {
		t.Fatal("no table habitLines")
	}
	list, ok := table.Values[0].(*ast.CompositeLit)
	if !ok {
		t.Fatal("habitLines is no list")
	}
	for _, e := range list.Elts {
		var row [2]string
		pair, ok := e.(*ast.CompositeLit)
		for i := 0; ok && i < len(row); i++ {
			lit, isText := pair.Elts[i].(*ast.BasicLit)
			if ok = isText; ok {
				row[i], err = strconv.Unquote(lit.Value)
				ok = err == nil
			}
		}
		if !ok {
			t.Fatalf("a row of habitLines is not two texts: %v", err)
		}
		lines = append(lines, row)
	}
	return lines
}

// freePort returns a port of the loopback that nothing uses at the moment.
func freePort(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// Command lines of Docker's users do as the table says, with a daemon, an image and sandboxes.
func TestDockerLines(t *testing.T) {
	testenv.RequireUserNS(t)
	dir := t.TempDir()
	for _, name := range []string{"src", "a"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	env := filepath.Join(dir, "env")
	for name, text := range map[string]string{env: "# comment\nA=1\n", filepath.Join(dir, "Dockerfile"): "FROM debian\nRUN --mount=type=secret,id=x true\n"} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	registry := harness.LyingRegistry(t, nil)
	registry.Push(t, "library/debian:latest", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Cmd: []string{"echo", "by default"}},
		harness.Layer(t, "gzip", harness.Tar(t, append(harness.Busybox(t),
			harness.File{Name: "etc/passwd", Body: "root:x:0:0::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\n"},
			harness.File{Name: "etc/group", Body: "root:x:0:\nwww-data:x:33:\n"})...))))
	d := harness.Start(t, harness.Options{Args: []string{"--registry-mirror", "docker.io=" + registry.Host, "--insecure-registry", registry.Host, "--mount-root", dir}})
	sandboxd := func(args ...string) (code int, out, errors string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		defer cancel()
		cmd := exec.CommandContext(ctx, harness.Program(t, "sandboxd"), append([]string{"--socket", d.Socket}, args...)...)
		cmd.Dir = dir
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		if ctx.Err() != nil {
			t.Fatalf("%q: %v\n%s", args, err, stderr.String())
		}
		return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
	}
	if code, _, stderr := sandboxd("pull", "debian"); code != 0 {
		t.Fatal(stderr)
	}
	// The host's image has no digest before its first use, and is no line of ids.
	if _, out, _ := sandboxd("images", "-q"); !strings.HasPrefix(out, "sha256:") || strings.Count(out, "\n") != 1 {
		t.Errorf("images -q: %q", out)
	}
	enforced := d.Create(t, api.CreateSandbox{}).Enforced
	port := strings.NewReplacer(":8080:", ":"+freePort(t)+":", " 8080:", " "+freePort(t)+":", " 53:53/", " "+freePort(t)+":53/", "ENVFILE", env, "CONTEXT", ".",
		" /src:/", " "+dir+"/src:/", "source=/a", "source="+dir+"/a", "src=/a", "src="+dir+"/a")
	for _, row := range dockerLines(t) {
		line, refusal := row[0], row[1]
		t.Run(line, func(t *testing.T) {
			if refusal != "" {
				testenv.SameForAll(t)
			}
			if strings.Contains(line, "sb1") {
				made := []string{"create", "--name", "sb1", "debian"}
				if strings.HasPrefix(line, "network ") {
					made = []string{"create", "--name", "sb1", "--network", "net:back", "debian"}
				}
				if strings.HasPrefix(line, "kill ") {
					made = append(made, "--", "sleep", "600")
				}
				if code, _, stderr := sandboxd(made...); code != 0 {
					t.Fatal(stderr)
				}
				before := map[string]string{"start": "stop", "unpause": "pause"}
				if verb := before[strings.Fields(line)[0]]; verb != "" {
					if code, _, stderr := sandboxd(verb, "sb1"); code != 0 {
						t.Fatal(stderr)
					}
				}
			}
			if strings.HasPrefix(line, "volume ") && strings.HasSuffix(line, " cache") {
				if code, _, stderr := sandboxd("create", "-v", "cache:/cache", "debian"); code != 0 {
					t.Fatal(stderr)
				}
			}
			number := len(d.List(t))
			code, _, stderr := sandboxd(strings.Fields(port.Replace(line))...)
			var unenforceable bool // limits need a cgroup, and a host that has as much to give
			for flag, by := range map[string]string{"-m ": enforced.Memory, "--memory=": enforced.Memory, "--cpus ": enforced.CPU, "--cpuset-cpus ": enforced.CPUSet} {
				unenforceable = unenforceable || strings.Contains(line, flag) && by == "none"
			}
			var nofile unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &nofile); err != nil {
				t.Fatal(err)
			}
			unenforceable = unenforceable || strings.Contains(line, "nofile=65536") && nofile.Max < 65536
			switch {
			case refusal == "" && unenforceable:
				if code != 125 || !strings.Contains(stderr, "cannot be enforced on this host") && !strings.Contains(stderr, "above the sandbox's own limit") {
					t.Errorf("exit %d: %s", code, stderr)
				}
			case refusal == "" && code != 0:
				t.Errorf("exit %d: %s", code, stderr)
			case refusal != "" && (code == 0 || code > 125 || !strings.Contains(stderr, refusal)):
				t.Errorf("exit %d: %s, want %q", code, stderr, refusal)
			case refusal != "" && len(d.List(t)) != number:
				t.Errorf("it was refused after a sandbox was made: %s", stderr)
			}
			for _, sb := range d.List(t) {
				if err := d.Sandbox(sb).TryDelete(t.Context()); err != nil && !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
					t.Error(err)
				}
			}
		})
	}
}
