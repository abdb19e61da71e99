package main

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sandboxd/sandboxd"

// imports returns the packages that a package links, itself included.
func imports(t *testing.T, pkg string) []string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-buildvcs=false", "-deps", "-f", "{{.ImportPath}}", pkg)
	list.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list.Args, err)
	}
	return strings.Fields(string(out))
}

// within reports whether a package is one of the roots or lies below one.
func within(pkg string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(root string) bool { return pkg == root || strings.HasPrefix(pkg, root+"/") })
}

// heavy are the SDKs of models and of MCP, and the languages of policies. They are larger than the
// rest of sandboxd, and parse hostile input: only sandboxd-agent links them.
var heavy = []string{
	"github.com/openai/openai-go", "github.com/anthropics/anthropic-sdk-go", "cel.dev/cel-go", "mvdan.cc/sh", "github.com/modelcontextprotocol/go-sdk",
}

// The list of what sandboxd-agent links shows that the names are right.
func TestImports(t *testing.T) {
	agent := []string{module + "/agent", module + "/cmd/sandboxd-agent"}
	libct := []string{"github.com/opencontainers/runc", module + "/runtime/libct"}
	for _, tc := range []struct {
		pkg   string
		never []string
	}{
		{module + "/cmd/sandboxd", slices.Concat(heavy, agent, libct)},
		{module + "/cmd/sandboxd-launcher", slices.Concat(heavy, agent, []string{"net/http", "github.com/spf13/cobra"})},
		{module + "/cmd/sandboxd-init", slices.Concat(heavy, agent, []string{"net/http", "github.com/spf13/cobra"})},
		{module + "/cmd/sandboxd-agent", append(libct, module+"/image", module+"/runtime", module+"/internal/boot", module+"/internal/daemon")},
	} {
		for _, pkg := range imports(t, tc.pkg) {
			if within(pkg, tc.never...) {
				t.Errorf("%s links %s", tc.pkg, pkg)
			}
		}
	}
	linked := imports(t, module+"/cmd/sandboxd-agent")
	for _, root := range heavy {
		if !slices.ContainsFunc(linked, func(pkg string) bool { return within(pkg, root) }) {
			t.Errorf("control: sandboxd-agent does not link %s", root)
		}
	}
}

// Only the agent's packages and the MCP face import what only sandboxd-agent may link.
func TestImportersOfTheAgent(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-buildvcs=false", "-f", `{{.ImportPath}} {{join .Imports " "}}`, module+"/...")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list.Args, err)
	}
	own := []string{module + "/agent", module + "/cmd/sandboxd-agent"}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if within(fields[0], append(own, module+"/faces/mcp", module+"/tests")...) {
			continue
		}
		for _, pkg := range fields[1:] {
			if within(pkg, slices.Concat(own, heavy)...) {
				t.Errorf("%s imports %s", fields[0], pkg)
			}
		}
	}
}

// The commands are in internal/cli and the daemon in internal/boot: package main has one function.
func TestMainOnly(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-buildvcs=false", "-f", "{{.GoFiles}}", module+"/cmd/sandboxd")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list.Args, err)
	}
	if got := strings.TrimSpace(string(out)); got != "[main.go]" {
		t.Errorf("cmd/sandboxd has the files %s", got)
	}
	text, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(text), "\n"); lines > 50 || strings.Count(string(text), "\nfunc ") != 1 {
		t.Errorf("main.go has %d lines", lines)
	}
}
