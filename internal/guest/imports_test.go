package guest

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/sandboxd/sandboxd/"

// The two sides share the protocol and nothing else: init is untrusted, so the daemon's side has no
// code in common with it beyond messages and bounds. Each package lists all packages of this module
// that it may import.
func TestSidesStayApart(t *testing.T) {
	for dir, allowed := range map[string][]string{
		".":      {"internal/unixmsg"},
		"host":   {"internal/guest", "internal/unixmsg"},
		"inside": {"internal/guest", "internal/unixmsg", "internal/landlock"},
	} {
		for file, imports := range importsOf(t, dir) {
			for _, path := range imports {
				if ours, ok := strings.CutPrefix(path, module); ok && !slices.Contains(allowed, ours) {
					t.Errorf("%s imports %s", file, ours)
				}
			}
		}
	}
}

// Init starts with every sandbox and holds its memory for as long: packages that compute tables
// when a program starts, and those that a large part of the standard library follows, stay out.
func TestInitStaysSmall(t *testing.T) {
	for _, dir := range []string{".", "inside", "../unixmsg", "../unixmsg", "../landlock", "../../cmd/sandboxd-init"} {
		for file, imports := range importsOf(t, dir) {
			for _, path := range imports {
				switch path {
				case "regexp", "os/user", "os/exec", "net", "net/http", "net/netip", "text/template", "log", "log/slog", "unicode":
					t.Errorf("%s imports %s", file, path)
				}
				if strings.Contains(path, ".") && !strings.HasPrefix(path, module) && !strings.HasPrefix(path, "golang.org/x/sys/") {
					t.Errorf("%s imports %s", file, path)
				}
			}
		}
	}
}

// importsOf returns the imports of the package in dir, by file, without those of its tests.
func importsOf(t *testing.T, dir string) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	imports := map[string][]string{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range f.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			imports[file] = append(imports[file], path)
		}
	}
	if len(imports) == 0 {
		t.Fatalf("%s has no Go files", dir)
	}
	return imports
}
