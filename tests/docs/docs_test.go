// Package docs holds the documents to what the tree says, so that neither can change alone.
package docs

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const module = "github.com/sandboxd/sandboxd"

// tree is what the sources say: import paths by directory, and the test functions of each.
type tree struct {
	imports map[string][]string // directory -> imports
	tests   map[string]bool     // "functional.TestX"
}

func readTree(t *testing.T, root string) tree {
	t.Helper()
	tr := tree{imports: map[string][]string{}, tests: map[string]bool{}}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark)\w+)\(`)
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		made := filepath.Join(root, "build") // by the Makefile; a package may be called so, too
		if e.IsDir() && (strings.HasPrefix(e.Name(), ".") && path != root || e.Name() == "testdata" || path == made) {
			return fs.SkipDir
		}
		// A module of its own, such as the linter's, has dependencies of its own.
		if _, err := os.Stat(filepath.Join(path, "go.mod")); e.IsDir() && path != root && err == nil {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, source, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			tr.imports[dir] = append(tr.imports[dir], name)
		}
		for _, m := range function.FindAllSubmatch(source, -1) {
			// A directory may have a hyphen, its package has none.
			tr.tests[strings.ReplaceAll(filepath.Base(dir), "-", "")+"."+string(m[1])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func document(t *testing.T, root, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// A claim without a test is a wish.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	root := harness.Root(t)
	tr := readTree(t, root)
	decisions, err := filepath.Glob(filepath.Join(root, "docs/decisions/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"SECURITY.md", "SPECIFICATION.md", "README.md", "CONTRIBUTING.md", "docs/explain/security.md"}
	for _, d := range decisions {
		names = append(names, "docs/decisions/"+filepath.Base(d))
	}
	named := regexp.MustCompile(`\b[a-z]+\.(?:Test|Benchmark)\w+`)
	for _, name := range names {
		found := named.FindAllString(document(t, root, name), -1)
		for _, test := range found {
			if !tr.tests[test] {
				t.Errorf("%s names %s, which does not exist", name, test)
			}
		}
		if name == "SECURITY.md" && len(found) < 15 {
			t.Errorf("SECURITY.md names only %d tests", len(found))
		}
	}
}

// rowsOf are the cells of the tables of a document whose first column is headed so, without their heads.
func rowsOf(text, head string) [][]string {
	var rows [][]string
	inside := false
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "| "), " | ")
		switch {
		case !strings.HasPrefix(line, "|"):
			inside = false
		case cells[0] == head:
			inside = true
		case inside && !strings.HasPrefix(line, "|---"):
			rows = append(rows, cells)
		}
	}
	return rows
}

// Every promise of SPECIFICATION.md and every claim of SECURITY.md names at least one test, and the promises have numbers.
func TestPromisesNameTheirTests(t *testing.T) {
	root := harness.Root(t)
	test := regexp.MustCompile("`[a-z]+\\.(?:Test|Benchmark)\\w+`")
	for name, head := range map[string]string{"SPECIFICATION.md": "promise", "SECURITY.md": "claim"} {
		rows := rowsOf(document(t, root, name), head)
		for _, row := range rows {
			if !test.MatchString(row[len(row)-1]) {
				t.Errorf("%s: no test holds %q", name, row[0])
			}
			if head == "promise" && !strings.ContainsAny(row[1], "0123456789") && !strings.Contains(row[1], "--") {
				t.Errorf("%s: no number in %q", name, row)
			}
		}
		if len(rows) < 30 {
			t.Errorf("%s: only %d rows were read", name, len(rows))
		}
	}
}

// SECURITY.md says how many attacks there are, and the number is that of the corpus on x86-64.
func TestAttacksAreCounted(t *testing.T) {
	if goruntime.GOARCH != "amd64" {
		t.Skip("the number is that of x86-64")
	}
	want := fmt.Sprintf("are refused: %d attacks, under", len(attack.Corpus()))
	if !strings.Contains(document(t, harness.Root(t), "SECURITY.md"), want) {
		t.Errorf("SECURITY.md does not say %q", want)
	}
}

// Every sandbox maps the init, and its size is paid at every start.
func TestInitIsSmall(t *testing.T) {
	info, err := os.Stat(harness.Program(t, "sandboxd-init"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > 3_000_000 {
		t.Errorf("sandboxd-init has %d bytes", info.Size())
	}
}

func TestEveryPackageHasACharterInArchitecture(t *testing.T) {
	root := harness.Root(t)
	text := document(t, root, "ARCHITECTURE.md")
	for dir := range readTree(t, root).imports {
		if !strings.HasPrefix(dir, "tests/") && !strings.Contains(text, "`"+dir+"`") {
			t.Errorf("ARCHITECTURE.md does not name the package `%s`", dir)
		}
	}
}

// The list of direct dependencies stays short enough to read, and each has its reason.
func TestEveryDirectDependencyHasAReason(t *testing.T) {
	root := harness.Root(t)
	text := document(t, root, "ARCHITECTURE.md")
	required := regexp.MustCompile(`(?m)^\s*(?:require )?(\S+) v\S+`)
	var modules []string
	for _, m := range required.FindAllStringSubmatch(document(t, root, "go.mod"), -1) {
		modules = append(modules, m[1])
	}
	direct := map[string]string{} // module -> who imports it
	for dir, imports := range readTree(t, root).imports {
		for _, path := range imports {
			if first, _, _ := strings.Cut(path, "/"); !strings.Contains(first, ".") || strings.HasPrefix(path, module) {
				continue
			}
			owner := ""
			for _, m := range modules { // the longest that fits
				if (path == m || strings.HasPrefix(path, m+"/")) && len(m) > len(owner) {
					owner = m
				}
			}
			if owner == "" {
				t.Errorf("%s imports %s, of no module in go.mod", dir, path)
				continue
			}
			direct[owner] = dir
		}
	}
	for _, m := range slices.Sorted(maps.Keys(direct)) {
		if !strings.Contains(text, "| "+m+" |") {
			t.Errorf("ARCHITECTURE.md gives no reason for %s, imported by %s", m, direct[m])
		}
	}
}

// Imports run one way (ARCHITECTURE.md). The linter holds most of it; these are the rules it cannot say.
func TestImportsRunOneWay(t *testing.T) {
	tr := readTree(t, harness.Root(t))
	for dir, imports := range tr.imports {
		for _, path := range imports {
			pkg := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
			switch {
			case dir == "api" && path != pkg: // anything of ours
				t.Errorf("api imports %s", pkg)
			case dir == "api" && strings.Contains(strings.Split(path, "/")[0], "."):
				t.Errorf("api imports %s, and is for the standard library only", path)
			case strings.HasPrefix(dir, "image") && (pkg == "runtime" && path != "runtime" || strings.HasPrefix(pkg, "runtime/") && path != pkg):
				t.Errorf("%s imports %s: image and runtime do not know each other", dir, pkg)
			case strings.HasPrefix(dir, "runtime") && path != pkg && strings.HasPrefix(pkg, "image"):
				t.Errorf("%s imports %s: image and runtime do not know each other", dir, pkg)
			case strings.HasPrefix(dir, "agent") && path != pkg && !strings.HasPrefix(pkg, "agent") && !strings.HasPrefix(pkg, "api"):
				t.Errorf("%s imports %s: the agent is a client of the socket", dir, pkg)
			}
		}
	}
}
