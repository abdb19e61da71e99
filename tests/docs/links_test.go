package docs

import (
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/tests/harness"
)

// markdown returns the paths of all documents of the tree, relative to root.
func markdown(t *testing.T, root string) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && (strings.HasPrefix(e.Name(), ".") && path != root || e.Name() == "testdata" || e.Name() == "node_modules" || path == filepath.Join(root, "build")) {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			files = append(files, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

var (
	fence   = regexp.MustCompile("(?ms)^```.*?^```\\s*$")
	code    = regexp.MustCompile("`[^`\n]*`")
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.+?) *$`)
	notWord = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors returns the fragments of a document's headings, as GitHub makes them.
func anchors(text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		title := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		found[strings.ReplaceAll(notWord.ReplaceAllString(strings.ToLower(title), ""), " ", "-")] = true
	}
	return found
}

// broken returns the relative links of a document that lead nowhere.
func broken(root, name, text string) []string {
	var bad []string
	text = code.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		target, fragment, _ := strings.Cut(m[1], "#")
		if u, err := url.Parse(m[1]); err != nil || u.Scheme != "" {
			continue
		}
		path := filepath.Join(root, name)
		if target != "" {
			path = filepath.Join(root, filepath.Dir(name), target)
		}
		data, err := os.ReadFile(path)
		if info, serr := os.Stat(path); serr != nil || err != nil && !info.IsDir() {
			bad = append(bad, m[1])
			continue
		}
		if fragment != "" && !anchors(string(data))[fragment] {
			bad = append(bad, m[1])
		}
	}
	return bad
}

func TestLinksLeadSomewhere(t *testing.T) {
	root := harness.Root(t)
	for _, name := range markdown(t, root) {
		if strings.HasPrefix(name, "docs/reference/") {
			titles := map[string]bool{}
			for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(document(t, root, name), ""), -1) {
				if title := strings.ToLower(m[1]); titles[title] {
					t.Errorf("%s: two headings are %q, and links lead to the first", name, m[1])
				} else {
					titles[title] = true
				}
			}
		}
		for _, target := range broken(root, name, document(t, root, name)) {
			t.Errorf("%s: a link leads nowhere: %s", name, target)
		}
	}
	control := "[a](README.md) [b](README.md#no-such-heading) [c](no-such-file.md) `[d](no-such)`"
	if got := broken(root, "README.md", control); len(got) != 2 {
		t.Errorf("of two broken links, these are found: %q", got)
	}
}

// Every document of docs can be reached from its index.
func TestDocumentsAreIndexed(t *testing.T) {
	root := harness.Root(t)
	reached, next := map[string]bool{}, []string{"docs/README.md"}
	for len(next) > 0 {
		name := next[0]
		next = next[1:]
		if reached[name] {
			continue
		}
		reached[name] = true
		for _, m := range link.FindAllStringSubmatch(document(t, root, name), -1) {
			target, _, _ := strings.Cut(m[1], "#")
			path := filepath.Join(filepath.Dir(name), target)
			if strings.HasPrefix(path, "docs/") && strings.HasSuffix(path, ".md") {
				if _, err := os.Stat(filepath.Join(root, path)); err == nil {
					next = append(next, path)
				}
			}
		}
	}
	for _, name := range markdown(t, root) {
		if strings.HasPrefix(name, "docs/") && !reached[name] {
			t.Errorf("no path of links leads from docs/README.md to %s", name)
		}
	}
}
