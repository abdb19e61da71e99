package main

import (
	"archive/tar"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// suite runs every test binary of the payload as the user that it is run as.
//
//go:embed suite.sh
var suite []byte

// assemble writes the payload, a tar that every machine sees as a disk:
//
//	job/argv      the command, each word ended by a NUL
//	job/timeout   seconds for each user
//	...           the directory that the command is run in
//
// For the suite that directory holds bin/, suite.sh and its plan, tests/<name>.test, and a copy of
// the tree.
func assemble(ctx context.Context, o options, p plan) (path string, remove func(), err error) {
	work, err := os.MkdirTemp("", "testbed-payload-")
	if err != nil {
		return "", nil, err
	}
	clean := func() { // not the result: an error's return sets that to nothing before the deferred call
		if err := os.RemoveAll(work); err != nil {
			fmt.Fprintln(os.Stderr, "testbed:", err)
		}
	}
	defer func() {
		if err != nil {
			clean()
		}
	}()
	dir, argv := o.payload, o.argv
	if dir == "" {
		dir = filepath.Join(work, "suite")
		if argv, err = compile(ctx, o, p, dir); err != nil {
			return "", nil, err
		}
	}
	path = filepath.Join(work, "payload.tar")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", nil, err
	}
	w := tar.NewWriter(f)
	for _, file := range []struct{ name, data string }{
		{"job/argv", strings.Join(argv, "\x00") + "\x00"},
		{"job/timeout", fmt.Sprintln(int(o.timeout.Seconds()))},
	} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.data))}))
		_, writeErr := io.WriteString(w, file.data)
		err = errors.Join(err, writeErr)
	}
	if err = errors.Join(err, w.AddFS(os.DirFS(dir)), w.Close(), f.Close()); err != nil {
		return "", nil, fmt.Errorf("write the payload: %w", err)
	}
	return path, clean, nil
}

// A plan lists the suite's test binaries, with all tests of each or some.
type plan []planned

type planned struct {
	path string // import path
	dir  string // below the module
	only string // the machine that runs it; empty for all
	run  string // for -test.run; empty for all
}

// paths returns the import paths of what a machine runs.
func (p plan) paths(machine string) []string {
	var paths []string
	for _, b := range p {
		if b.only == "" || b.only == machine {
			paths = append(paths, b.path)
		}
	}
	return paths
}

// makePlan reads the file of that name, or lists the packages that the options narrow to.
func makePlan(ctx context.Context, o options) (plan, error) {
	switch {
	case o.payload != "" || o.shell || o.prepare:
		return nil, nil
	case o.plan == "":
		return list(ctx, strings.Fields(o.packages), o.run)
	}
	data, err := os.ReadFile(o.plan)
	if err != nil {
		return nil, fmt.Errorf("read the plan: %w", err)
	}
	var p plan
	for line := range strings.Lines(string(data)) {
		pkg, run, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		run, only, _ := strings.Cut(run, "\t")
		more, err := list(ctx, []string{pkg}, run)
		if err != nil {
			return nil, err
		}
		for i := range more {
			more[i].only = only
		}
		p = append(p, more...)
	}
	return p, nil
}

// list resolves patterns of packages.
func list(ctx context.Context, patterns []string, run string) (plan, error) {
	const format = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Module.Dir}}\t{{.Dir}}{{end}}"
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-tags", testtree.Tags, "-f", format}, patterns...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list %q: %w", patterns, err)
	}
	var p plan
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 3 {
			return nil, fmt.Errorf("go list says %q", line)
		}
		dir, err := filepath.Rel(f[1], f[2])
		if err != nil {
			return nil, err
		}
		p = append(p, planned{path: f[0], dir: dir, run: run})
	}
	if len(p) == 0 {
		return nil, fmt.Errorf("%q: no package with tests", patterns)
	}
	return p, nil
}

// compile fills dir with the built binaries and the tests, all of them static: the machine has
// another libc.
func compile(ctx context.Context, o options, p plan, dir string) (argv []string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := testtree.CopyBinaries(o.bin, filepath.Join(dir, "bin")); err != nil {
		return nil, err
	}
	if o.shell {
		return []string{"true"}, nil // for whoever opens a shell the binaries are enough
	}
	if err := testtree.BuildHelpers(ctx, filepath.Join(dir, "bin")); err != nil {
		return nil, err
	}
	if err := testtree.Copy(ctx, filepath.Join(dir, "tree")); err != nil {
		return nil, err
	}
	var lines strings.Builder
	for _, b := range p {
		name := testresult.FileName(b.path)
		fmt.Fprintf(&lines, "%s\t%s\t%s\t%s\n", name, b.dir, cmp.Or(b.only, "-"), b.run)
		if err := o.compileTests(ctx, b.path, filepath.Join(dir, "tests", name+".test")); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "plan"), []byte(lines.String()), 0o644); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "suite.sh"), suite, 0o755); err != nil {
		return nil, err
	}
	for machine, tests := range o.skips {
		if err := os.WriteFile(filepath.Join(dir, "skip."+machine), []byte(tests), 0o644); err != nil {
			return nil, err
		}
	}
	// A binary that takes too long says where it stands, before the job as a whole is ended.
	return append([]string{"bash", "suite.sh"}, testresult.Flags(o.timeout-15*time.Second, "")...), nil
}

// compileTests makes the test binary of a package, or takes the one that lies in the directory
// that -tests names.
func (o options) compileTests(ctx context.Context, path, binary string) error {
	if err := os.MkdirAll(filepath.Dir(binary), 0o755); err != nil {
		return err
	}
	if o.tests != "" {
		if err := os.Link(filepath.Join(o.tests, filepath.Base(binary)), binary); err == nil {
			return nil
		}
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-trimpath", "-buildvcs=false", "-p", strconv.Itoa(goruntime.NumCPU()), "-tags", testtree.Tags,
		"-ldflags", `-w -linkmode external -extldflags "-static"`, "-o", binary, path)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile the tests of %s: %w", path, err)
	}
	return nil
}

// resultLimit bounds the results of a machine, in bytes.
const resultLimit = 1 << 30

// unpack extracts directories and regular files into dir, which nothing in the tar can lead out of.
func unpack(path, dir string) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	r := tar.NewReader(io.LimitReader(f, resultLimit))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeDir:
			if err := root.MkdirAll(filepath.Clean(h.Name), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		case tar.TypeReg:
			data, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			if err := root.WriteFile(filepath.Clean(h.Name), data, 0o644); err != nil {
				return err
			}
		}
	}
}
