package main

import (
	"archive/tar"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// suite runs every test binary of the payload as the user that it is run as.
//
//go:embed suite.sh
var suite []byte

// assemble writes the payload, a tar that the machine sees as a disk:
//
//	job/argv      the command, each word ended by a NUL
//	job/users     who runs it, one after the other
//	job/timeout   seconds for each of them
//	...           the directory that the command is run in
//
// For the suite that directory holds bin/, suite.sh and tests/<name>.test.
func assemble(ctx context.Context, o options) (path string, remove func(), err error) {
	work, err := os.MkdirTemp("", "testbed-payload-")
	if err != nil {
		return "", nil, err
	}
	remove = func() {
		if err := os.RemoveAll(work); err != nil {
			fmt.Fprintln(os.Stderr, "testbed:", err)
		}
	}
	defer func() {
		if err != nil {
			remove()
		}
	}()
	dir, argv := o.payload, o.argv
	if dir == "" {
		dir = filepath.Join(work, "suite")
		if argv, err = compile(ctx, o, dir); err != nil {
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
		{"job/users", strings.Join(o.users, "\n") + "\n"},
		{"job/timeout", fmt.Sprintln(int(o.timeout.Seconds()))},
	} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.data))}))
		_, writeErr := io.WriteString(w, file.data)
		err = errors.Join(err, writeErr)
	}
	if err = errors.Join(err, w.AddFS(os.DirFS(dir)), w.Close(), f.Close()); err != nil {
		return "", nil, fmt.Errorf("write the payload: %w", err)
	}
	return path, remove, nil
}

// compile fills dir with the built binaries and the tests, all of them static: the machine has another libc.
func compile(ctx context.Context, o options, dir string) (argv []string, err error) {
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return nil, err
	}
	for _, name := range []string{"sandboxd", "sandboxd-launcher", "sandboxd-init"} {
		data, err := os.ReadFile(filepath.Join(o.bin, name))
		if err != nil {
			return nil, fmt.Errorf("%w: run `make build` first", err)
		}
		if err := os.WriteFile(filepath.Join(dir, "bin", name), data, 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "suite.sh"), suite, 0o755); err != nil {
		return nil, err
	}
	if o.shell {
		return []string{"true"}, nil // for whoever opens a shell the binaries are enough
	}
	list := exec.CommandContext(ctx, "go", append([]string{"list"}, strings.Fields(o.packages)...)...)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", o.packages, err)
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		_, name, _ := strings.Cut(pkg, "/sandboxd/sandboxd/")
		binary := filepath.Join(dir, "tests", strings.ReplaceAll(name, "/", "-")+".test")
		cmd := exec.CommandContext(ctx, "go", "test", "-c", "-buildvcs=false", "-trimpath", "-o", binary, pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return nil, fmt.Errorf("compile the tests of %s: %w", pkg, err)
		}
	}
	argv = []string{"bash", "suite.sh", "-test.v", "-test.timeout=" + o.timeout.String()}
	if o.run != "" {
		argv = append(argv, "-test.run="+o.run)
	}
	return argv, nil
}

// resultLimit bounds what a machine may give back.
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
