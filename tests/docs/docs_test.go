// Package docs compares the documents with the tree and the built binaries.
package docs

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
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

// tree holds facts of the sources.
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

// rowsOf are the cells of the tables of a document whose first column is headed so, without their
// heads.
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

// Every promise of SPECIFICATION.md and every claim of SECURITY.md names at least one test, and the
// promises have numbers.
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
	direct := map[string]string{} // module -> a directory that imports it
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

// imports returns the packages of this module that the packages of the pattern and all below them
// import, tests left out. Unlike the sources alone, go list knows what a build with the product's
// tags has.
func imports(t *testing.T, format, pattern string) map[string][]string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-tags", "seccomp osusergo netgo", "-f", "{{.ImportPath}} {{join "+format+" \" \"}}", pattern)
	cmd.Dir = harness.Root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v", pattern, err)
	}
	all := make(map[string][]string)
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		all[strings.TrimPrefix(fields[0], module+"/")] = fields[1:]
	}
	if len(all) == 0 {
		t.Fatalf("go list %s: no packages", pattern)
	}
	return all
}

// oneWay is a rule of imports: packages below the directories from import none of the packages
// deny, nor any below those, but the packages except.
type oneWay struct {
	from, deny, except []string
	deep               bool // counts what imported packages import, too
}

// The rules of ARCHITECTURE.md.
var oneWays = map[string]oneWay{
	"the service is free of any protocol": {
		from: []string{"internal/service"}, deny: []string{"github.com/coder/websocket", "internal/httpapi", "internal/daemon", "internal/boot", "internal/cli"},
	},
	"a face knows the API, the service and its classes, nothing below": {
		from: []string{"internal/httpapi", "tests/face"}, deny: []string{"runtime", "image", "internal", "agent", "seccomp", "oci-profiles"},
		except: []string{"internal/httpapi", "internal/service", "internal/service/class", "internal/flock", "internal/relay", "internal/unixmsg"},
	},
	"the stores of output know no sandboxes": {
		from: []string{"internal/service/execlog", "internal/service/mainlog"}, deny: []string{"runtime", "image", "internal", "agent", "netns", "interpreter"},
	},
	"execs know no callers, networks, pools or builds": {
		from: []string{"internal/service/exec", "internal/service/guests", "internal/service/output", "internal/service/work"},
		deny: []string{"image", "internal", "agent", "netns", "interpreter"},
		except: []string{
			"internal/guest/host", "internal/memfd", "internal/service/class", "internal/service/events", "internal/service/execlog",
			"internal/service/guests", "internal/service/mainlog", "internal/service/output", "internal/service/work",
		},
	},
	"the service knows no launcher": {from: []string{"internal/service"}, deny: []string{"internal/launcher"}},
	"only the launcher links libcontainer": {
		from: []string{"internal/service", "internal/httpapi", "internal/daemon", "internal/boot", "internal/cli", "cmd/sandboxd"},
		deny: []string{"runtime/libct", "github.com/opencontainers/runc"}, deep: true,
	},
	"image does not know runtime":           {from: []string{"image"}, deny: []string{"runtime"}, deep: true},
	"runtime does not know image":           {from: []string{"runtime"}, deny: []string{"image"}},
	"the agent is a client of the socket":   {from: []string{"agent"}, deny: []string{"runtime", "image", "internal/service", "internal/httpapi", "internal/daemon"}},
	"what is below does not know the faces": {from: []string{"image", "runtime", "agent"}, deny: []string{"internal/httpapi", "internal/service", "internal/boot"}, deep: true},
	"api is for clients, too":               {from: []string{"api"}, deny: []string{"runtime", "image", "internal", "agent"}, deep: true},
}

// below reports whether a package is the directory or lies below it.
func below(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

// TestImportsRunOneWay holds the rules that go list can see; those of the linter (.golangci.yml)
// overlap on purpose.
func TestImportsRunOneWay(t *testing.T) {
	direct, all := imports(t, ".Imports", "./..."), imports(t, ".Deps", "./...")
	for name, rule := range oneWays {
		graph, found := direct, false
		if rule.deep {
			graph = all
		}
		for pkg, imported := range graph {
			if !slices.ContainsFunc(rule.from, func(dir string) bool { return below(pkg, dir) }) || strings.HasSuffix(pkg, "test") {
				continue
			}
			found = true
			for _, path := range imported {
				path, ours := strings.CutPrefix(path, module+"/")
				denied := func(dir string) bool {
					return below(path, dir) && (ours || strings.Contains(strings.Split(path, "/")[0], "."))
				}
				if slices.ContainsFunc(rule.deny, denied) && !slices.Contains(rule.except, path) {
					t.Errorf("%s imports %s: %s", pkg, path, name)
				}
			}
		}
		if !found {
			t.Errorf("%s: the rule is about no package", name)
		}
	}
	for pkg, imported := range direct {
		if below(pkg, "internal/service") && !strings.HasSuffix(pkg, "test") && slices.Contains(imported, "net/http") {
			t.Errorf("%s imports net/http: the service is free of any protocol", pkg)
		}
		if below(pkg, "api") && slices.ContainsFunc(imported, func(path string) bool {
			return strings.Contains(strings.Split(path, "/")[0], ".") && !strings.HasPrefix(path, module) && pkg == "api"
		}) {
			t.Errorf("%s imports %q, and is for the standard library only", pkg, imported)
		}
	}
}
