// Package tsclient runs the TypeScript client with a real node against the built daemon.
package tsclient

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// common is the daemon of all tests that test no life cycle of one.
var common harness.Shared

// built is the package as it was compiled for all tests.
var built struct {
	once sync.Once
	dir  string
}

func TestMain(m *testing.M) {
	code := common.Stop(m.Run())
	if built.dir != "" {
		_ = os.RemoveAll(built.dir) // a temporary directory
	}
	os.Exit(code)
}

// source returns the directory of the package in the tree.
func source(t *testing.T) string {
	t.Helper()
	return filepath.Join(harness.Root(t), "clients", "typescript")
}

// node returns a command of node.
func node(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	program := harness.Node(t)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	return cmd
}

// copied returns a copy of the package with the packages that it is built with.
func copied(t *testing.T) string {
	t.Helper()
	// Not t.TempDir: it serves other tests, too.
	dir, err := os.MkdirTemp("", "tsc") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "sh", "-c",
		`cd "$1" && cp -R package.json tsconfig.json README.md src test "$2"`, "sh", source(t), dir).CombinedOutput(); err != nil {
		t.Fatalf("copy the package: %v\n%s", err, out)
	}
	modules := harness.NodeModules(t, "typescript")
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// compiled returns the directory of the compiled package. Its types are checked elsewhere.
func compiled(t *testing.T) string {
	t.Helper()
	built.once.Do(func() {
		built.dir = copied(t)
		if out, err := node(t, built.dir, "node_modules/typescript/bin/tsc", "--noCheck").CombinedOutput(); err != nil {
			t.Errorf("compile the package: %v\n%s", err, out)
		}
	})
	if built.dir == "" || t.Failed() {
		t.Fatal("the package could not be compiled")
	}
	return built.dir
}

// daemon returns the common daemon.
func daemon(t *testing.T) *harness.Daemon {
	t.Helper()
	testenv.RequireUserNS(t)
	return common.Daemon(t)
}

// Each file of the package's tests runs against the daemon.
func TestClient(t *testing.T) {
	d := daemon(t)
	dir := compiled(t)
	files, err := filepath.Glob(filepath.Join(dir, "test", "*.test.mjs"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".test.mjs"), func(t *testing.T) {
			t.Parallel()
			cmd := node(t, dir, "--test", "--test-reporter=spec", file)
			cmd.Env = append(os.Environ(), "SANDBOXD_SOCKET="+d.Socket)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// A command in the background outlives the daemon, and a client that connects again misses no
// byte. What waits for a daemon that is killed learns of it.
func TestDaemonIsKilled(t *testing.T) {
	testenv.RequireUserNS(t)
	dir := compiled(t)
	d := harness.Start(t, harness.Options{})
	cmd := node(t, dir, filepath.Join("test", "killed.mjs"))
	cmd.Env = append(os.Environ(), "SANDBOXD_SOCKET="+d.Socket)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v\n%s", err, stderr.String())
		}
	}()
	lines := bufio.NewScanner(stdout)
	until := func(want string) bool {
		if !lines.Scan() || lines.Text() != want {
			t.Errorf("%q in place of %q", lines.Text(), want)
			_ = cmd.Process.Kill() // it waits for us
			return false
		}
		return true
	}
	if !until("running") {
		return
	}
	d.Kill9(t)
	if !until("cut off") {
		return
	}
	d.Launch(t)
	if _, err := io.WriteString(stdin, "go on\n"); err != nil {
		t.Fatal(err)
	}
	until("complete")
}

// A sandbox that is tied to a client is deleted when that is killed, and when it ends.
func TestTiedSandboxEndsWithItsClient(t *testing.T) {
	d := daemon(t)
	for _, rest := range []string{"setInterval(() => {}, 1 << 30)", ""} {
		cmd := node(t, compiled(t), "--input-type=module", "--eval", `
			import { Sandbox } from 'sandboxd'
			const s = await Sandbox.create({ tied: true })
			await s.commands.run('true')
			console.log(s.sandboxId)
			`+rest)
		cmd.Env = append(os.Environ(), "SANDBOXD_SOCKET="+d.Socket)
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		id, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil {
			t.Errorf("read the sandbox's id: %v", err)
		}
		if rest != "" {
			_ = cmd.Process.Kill() // it runs
		}
		if err := cmd.Wait(); err != nil && rest == "" {
			t.Error(err)
		}
		deleted(t, d, strings.TrimSpace(id))
	}
}

// deleted waits until there is no such sandbox.
func deleted(t *testing.T, d *harness.Daemon, id string) {
	t.Helper()
	harness.Eventually(t, func() error {
		if err := d.Call(t.Context(), "GET", "/v1/sandboxes/"+id, nil, nil); err == nil {
			return fmt.Errorf("sandbox %s is there", id)
		}
		return nil
	})
}

// block is a program of the guide and the output that is shown below it.
type block struct {
	line         int
	text, output string
	shown        bool
}

var fenced = regexp.MustCompile("(?ms)^```ts\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?")

// blocks returns the programs of a document.
func blocks(t *testing.T, file string) []block {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []block
	for _, m := range fenced.FindAllSubmatchIndex(text, -1) {
		b := block{line: 1 + bytes.Count(text[:m[2]], []byte("\n")), text: string(text[m[2]:m[3]])}
		if m[4] >= 0 {
			b.output, b.shown = string(text[m[4]:m[5]]), true
		}
		all = append(all, b)
	}
	return all
}

// The types of the package, of the guide's programs and of the README's are right, and the types of
// the API are those of the document.
func TestTypes(t *testing.T) {
	dir := copied(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // a temporary directory
	root := source(t)
	generated := filepath.Join(t.TempDir(), "api.ts")
	if out, err := node(t, root, "scripts/generate.mjs", "../../docs/reference/openapi.json", generated).CombinedOutput(); err != nil {
		t.Fatalf("generate the types: %v\n%s", err, out)
	}
	want, err1 := os.ReadFile(generated)
	got, err2 := os.ReadFile(filepath.Join(root, "src", "api.ts"))
	if err1 != nil || err2 != nil || !bytes.Equal(got, want) {
		t.Errorf("clients/typescript/src/api.ts is not what docs/reference/openapi.json says; `npm run generate` there (%v, %v)", err1, err2)
	}
	if out, err := node(t, dir, "node_modules/typescript/bin/tsc").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	args := []string{
		"node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--module", "nodenext", "--target", "es2022",
		"--lib", "es2023,esnext.disposable", "--types", "node",
	}
	if out, err := node(t, dir, append(args, write(t, dir)...)...).CombinedOutput(); err != nil {
		t.Errorf("programs of the documents: %v\n%s", err, out)
	}
}

// write writes the programs of the documents into the package and returns their names.
func write(t *testing.T, dir string) (names []string) {
	t.Helper()
	for _, file := range documents(t) {
		for _, b := range blocks(t, file) {
			name := fmt.Sprintf("%s_%d.mts", strings.TrimSuffix(filepath.Base(file), ".md"), b.line)
			if err := os.WriteFile(filepath.Join(dir, name), []byte(b.text), 0o600); err != nil {
				t.Fatal(err)
			}
			names = append(names, name)
		}
	}
	return names
}

func documents(t *testing.T) []string {
	t.Helper()
	return []string{filepath.Join(harness.Root(t), "docs", "guides", "typescript.md"), filepath.Join(source(t), "README.md")}
}

// The programs of the documents run, with the output that stands below them.
func TestGuide(t *testing.T) {
	d := daemon(t)
	dir := compiled(t)
	args := append([]string{"node_modules/typescript/bin/tsc", "--noCheck", "--module", "nodenext", "--target", "es2022"}, write(t, dir)...)
	if out, err := node(t, dir, args...).CombinedOutput(); err != nil {
		t.Fatalf("compile the programs: %v\n%s", err, out)
	}
	for _, file := range documents(t) {
		all := blocks(t, file)
		if len(all) == 0 {
			t.Errorf("%s has no program", file)
		}
		for _, b := range all {
			name := fmt.Sprintf("%s_%d.mjs", strings.TrimSuffix(filepath.Base(file), ".md"), b.line)
			cmd := node(t, dir, name)
			cmd.Env = append(os.Environ(), "SANDBOXD_SOCKET="+d.Socket)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%s:%d: %v\n%s", file, b.line, err, out)
				continue
			}
			pattern := strings.ReplaceAll(regexp.QuoteMeta(b.output), "…", "(?s:.*)")
			if b.shown && !regexp.MustCompile("^"+pattern+"$").Match(out) {
				t.Errorf("%s:%d: printed\n%s", file, b.line, out)
			}
		}
	}
}

// The package has its code, types, README and licence and nothing else, needs no other package, and
// its lock names no registry.
func TestPackage(t *testing.T) {
	root := source(t)
	lock, err := os.ReadFile(filepath.Join(root, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(lock, []byte(`"resolved"`)) {
		t.Error("package-lock.json names a registry: npm install --omit-lockfile-registry-resolved")
	}
	var doc struct {
		Name                                    string
		Dependencies, PeerDependencies          map[string]string
		OptionalDependencies, Scripts           map[string]string
		BundleDependencies, BundledDependencies []string
	}
	manifest, err := os.ReadFile(filepath.Join(root, "package.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(manifest, &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Name != "sandboxd" || len(doc.Dependencies)+len(doc.PeerDependencies)+len(doc.OptionalDependencies)+len(doc.BundleDependencies)+len(doc.BundledDependencies) > 0 {
		t.Errorf("package.json: %+v", doc)
	}
	for _, hook := range []string{"preinstall", "install", "postinstall", "prepare"} {
		if doc.Scripts[hook] != "" {
			t.Errorf("package.json runs a program when it is installed: %s", hook)
		}
	}
	cmd := exec.CommandContext(t.Context(), testenv.RequirePeer(t, "npm"), "pack", "--json", "--dry-run", "--ignore-scripts", "--offline")
	cmd.Dir = compiled(t)
	cmd.Env = append(os.Environ(), "npm_config_cache="+t.TempDir())
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("npm pack: %v", err)
	}
	var packed []struct{ Files []struct{ Path string } }
	if err := json.Unmarshal(out, &packed); err != nil || len(packed) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	known := regexp.MustCompile(`^(dist/[a-z]+\.(js|d\.ts)|package\.json|README\.md)$`)
	for _, f := range packed[0].Files {
		if !known.MatchString(f.Path) {
			t.Errorf("the package has %s", f.Path)
		}
	}
	if len(packed[0].Files) < 20 {
		t.Errorf("the package has %d files", len(packed[0].Files))
	}
}
