package cli

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// Pieces of two streams that arrive interleaved are printed as complete lines.
func TestBuildOutputIsShownInWholeLines(t *testing.T) {
	var out strings.Builder
	p := &buildProgress{w: &out}
	for _, e := range []api.BuildEvent{
		{Step: 1, Steps: 2, Text: "RUN x", Status: api.BuildStarted},
		{Stream: "stdout", Output: "one "},
		{Stream: "stderr", Output: "an error\nand "},
		{Stream: "stdout", Output: "line\n"},
		{Stream: "stderr", Output: "more"},
		{Step: 2, Steps: 2, Text: "RUN y", Status: api.BuildStarted},
	} {
		p.event(e)
	}
	if want := "[1/2] RUN x\n  | an error\n  | one line\n  | and more\n[2/2] RUN y\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

// A Dockerfile is sent even if it is a link into an ignored directory.
func TestDockerfileIsSentWhereverItLies(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"ci/Dockerfile.prod": "FROM scratch\n", "ci/other": "x", ".dockerignore": "ci\n", "a": "a"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("ci/Dockerfile.prod", filepath.Join(dir, "Dockerfile")); err != nil {
		t.Fatal(err)
	}
	body, wait, err := (&buildOptions{}).open(dir, new(api.Build), deps{Deps: cmdline.Deps{Stderr: os.Stderr}})
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(body)
	if err = errors.Join(err, wait()); err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeDir {
			names = append(names, h.Name)
		}
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != ".dockerignore Dockerfile a ci/Dockerfile.prod" {
		t.Errorf("sent: %s", got)
	}
}
