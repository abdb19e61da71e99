package code

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// TestImages builds the Dockerfiles of images/ from Debian's packages, which lie in the base image:
// builds need no network. Then each language says hello in the images that are to have it, and the
// one with all of them runs the table and shows results.
func TestImages(t *testing.T) {
	testenv.Soak(t, "it downloads and installs gigabytes of packages")
	testenv.RequireUserNS(t)
	testenv.RequirePeer(t, "mmdebstrap")
	testenv.RequirePeer(t, "dpkg-scanpackages")
	root := harness.Root(t)
	names := []string{"base", "python", "polyglot"}
	d := harness.Start(t, harness.Options{})
	base := debian(t, root, names)
	f, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := d.CLIInput(t, f, "import", "--rootfs", "-", "local/debian:trixie"); got.Code != 0 {
		t.Fatalf("import: %+v", got)
	}
	has := map[string][]string{"base": {"bash"}, "python": {"bash", "python"}}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			// Without a limit of time: it installs hundreds of packages.
			build := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "build", "--socket", d.Socket,
				"--build-arg", "BASE=local/debian:trixie", "-t", "local/"+name, filepath.Join(root, "images", name))
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("build: %v\n%s", err, out)
			}
			t.Log(d.CLI(t, "images").Stdout)
			s := d.Create(t, api.CreateSandbox{Image: "local/" + name})
			for _, l := range languages {
				if want := has[name]; want != nil && !slices.Contains(want, l.name) {
					continue
				}
				res, err := d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{Language: l.name, Code: l.hello})
				if err != nil || res.Logs.Stdout != "hello\n" {
					t.Errorf("%s: %+v, %v", l.name, res, err)
				}
			}
			if name == "polyglot" {
				w := &workshop{d.Client(t), s}
				t.Run("results", w.results)
				t.Run("table", w.table)
			}
		})
	}
}

// debian returns the root file system that hack/code-base.sh makes for the images, which is kept.
func debian(t *testing.T, root string, names []string) string {
	t.Helper()
	dir, unlock, err := testtree.Kept(t.Context(), "code-base")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	script := filepath.Join(root, "hack", "code-base.sh")
	recipe := sha256.New()
	files := []string{script}
	for _, name := range names {
		files = append(files, filepath.Join(root, "images", name, "Dockerfile"))
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(recipe, f)
		_ = f.Close() // only read
		if err != nil {
			t.Fatal(err)
		}
	}
	kept := filepath.Join(dir, fmt.Sprintf("%x.tar", recipe.Sum(nil)[:6]))
	if _, err := os.Stat(kept); err == nil {
		return kept
	}
	if out, err := exec.CommandContext(t.Context(), script, append([]string{kept}, names...)...).CombinedOutput(); err != nil {
		t.Fatalf("make the base image: %v\n%s", err, out)
	}
	return kept
}
