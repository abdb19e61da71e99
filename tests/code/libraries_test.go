package code

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"path"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A library is the package sandlib in one ecosystem, in a directory of the operator.
type library struct {
	files map[string][]byte // below the directory
	build string            // shell commands that make the package there; empty: the files are it
	name  string            // as a request asks for it
	code  string            // prints "from a library"
	none  string            // a library that is not in the directory, as the package manager repeats it
}

func libraries(t *testing.T) map[string]library {
	t.Helper()
	return map[string]library{
		"python": {
			files: map[string][]byte{"sandlib-1.0-py3-none-any.whl": zipOf(t, map[string]string{
				"sandlib.py":                          "def say(): return 'from a library'\n",
				"sandlib-1.0.dist-info/METADATA":      "Metadata-Version: 2.1\nName: sandlib\nVersion: 1.0\n",
				"sandlib-1.0.dist-info/WHEEL":         "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
				"sandlib-1.0.dist-info/RECORD":        "sandlib.py,,\nsandlib-1.0.dist-info/METADATA,,\nsandlib-1.0.dist-info/WHEEL,,\nsandlib-1.0.dist-info/RECORD,,\n",
				"sandlib-1.0.dist-info/top_level.txt": "sandlib\n",
			})},
			name: "sandlib>=0.9,<2", code: "import sandlib\nprint(sandlib.say())\n", none: "nosuchlib",
		},
		"javascript": npmLibrary(t, "console.log(require('sandlib')())\n"),
		"typescript": npmLibrary(t, "import say from 'sandlib'\nconsole.log(say() as string)\n"),
		"ruby": {
			files: map[string][]byte{
				"lib/sandlib.rb":  []byte("def say = 'from a library'\n"),
				"sandlib.gemspec": []byte("Gem::Specification.new { |s| s.name = 'sandlib'; s.version = '1.0'; s.summary = s.authors = 'x'; s.files = ['lib/sandlib.rb'] }\n"),
			},
			build: "gem build --quiet sandlib.gemspec 2>/dev/null", name: "sandlib:1.0", code: "require 'sandlib'\nputs say\n", none: "nosuchlib",
		},
		"go": {
			files: map[string][]byte{
				"example.com/sandlib/@v/list":        []byte("v1.0.0\n"),
				"example.com/sandlib/@v/v1.0.0.info": []byte(`{"Version":"v1.0.0","Time":"2024-01-01T00:00:00Z"}`),
				"example.com/sandlib/@v/v1.0.0.mod":  []byte("module example.com/sandlib\n"),
				"example.com/sandlib/@v/v1.0.0.zip": zipOf(t, map[string]string{
					"example.com/sandlib@v1.0.0/go.mod": "module example.com/sandlib\n",
					"example.com/sandlib@v1.0.0/say.go": "package sandlib\n\nfunc Say() string { return \"from a library\" }\n",
				}),
			},
			name: "example.com/sandlib@v1.0.0", none: "example.com/nosuchlib",
			code: "package main\nimport (\"fmt\"; \"example.com/sandlib\")\nfunc main() { fmt.Println(sandlib.Say()) }\n",
		},
		"r": {
			files: map[string][]byte{"sandlib_1.0.tar.gz": tarball(t, map[string]string{
				"sandlib/DESCRIPTION": "Package: sandlib\nVersion: 1.0\nTitle: Test\nDescription: Test.\nAuthor: A\nMaintainer: A <a@example.com>\nLicense: GPL-3\n",
				"sandlib/NAMESPACE":   "export(say)\n",
				"sandlib/R/say.R":     "say <- function() 'from a library'\n",
			})},
			name: "sandlib", code: "library(sandlib)\ncat(say(), '\\n', sep='')\n", none: "nosuchlib",
		},
	}
}

func npmLibrary(t *testing.T, code string) library {
	t.Helper()
	return library{
		files: map[string][]byte{"sandlib-1.0.0.tgz": tarball(t, map[string]string{
			"package/package.json": `{"name":"sandlib","version":"1.0.0","main":"index.js"}`,
			"package/index.js":     "module.exports = () => 'from a library'\n",
		})},
		name: "sandlib@1.0.0", code: code, none: "nosuchlib",
	}
}

func zipOf(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for name, body := range files {
		f, err := w.Create(name)
		if err == nil {
			_, err = f.Write([]byte(body))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func tarball(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var entries []harness.File
	for name, body := range files {
		entries = append(entries, harness.File{Name: name, Body: body, Type: tar.TypeReg})
	}
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(harness.Tar(t, entries...)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// library installs a library from a directory, and one that is not there.
func (w *workshop) library(t *testing.T, l *language, lib *library) {
	t.Helper()
	dir := "/packages/" + l.name
	for name, data := range lib.files {
		if err := w.s.Put(t.Context(), path.Join(dir, name), data); err != nil {
			t.Fatal(err)
		}
	}
	if lib.build != "" {
		w.s.Sh(t, "cd "+dir+" && "+lib.build)
	}
	cwd := "/work/library-" + l.name
	w.s.Sh(t, "mkdir -p "+cwd)
	req := api.CodeRequest{Language: l.name, Code: lib.code, Cwd: cwd, Libraries: []string{lib.name}, LibraryDir: dir}
	got, res := w.code(t, req)
	if got.stdout != "from a library\n" || got.code != 0 {
		t.Errorf("%+v", res)
	}
	req.Libraries = []string{lib.none}
	_, err := w.c.RunCode(t.Context(), w.s.ID, req)
	if !errors.Is(err, &api.Problem{Code: api.CodeLibraries}) || !strings.Contains(err.Error(), "nosuchlib") {
		t.Errorf("a library that is not there: %v", err)
	}
}
