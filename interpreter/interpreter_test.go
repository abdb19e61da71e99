package interpreter

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

func TestLanguages(t *testing.T) {
	seen := map[string]string{}
	for _, l := range All() {
		for _, name := range append([]string{l.Name}, l.Aliases...) {
			if seen[name] != "" || name != strings.ToLower(name) {
				t.Errorf("%q of %s: taken by %q, or not in lower case", name, l.Name, seen[name])
			}
			seen[name] = l.Name
			if Find(strings.ToUpper(name)) != l {
				t.Errorf("Find(%q) is not %s", strings.ToUpper(name), l.Name)
			}
		}
		for _, ext := range l.Extensions {
			if got := OfFile("dir.x/a" + ext); got != l {
				t.Errorf("OfFile of %q is %v, want %s", ext, got, l.Name)
			}
		}
		if OfFile(l.File) != l {
			t.Errorf("%s: its own file %q is not in it", l.Name, l.File)
		}
		place := Place{Dir: "/tmp/x", Cwd: "/work"}
		for _, c := range l.Toolchains {
			if len(c.Programs()) == 0 {
				t.Errorf("%s: a toolchain without programs", l.Name)
			}
			for _, a := range place.FillAll(slices.Concat(append(slices.Clone(c.Compile), c.Run)...)) {
				if strings.ContainsAny(a, "{}") {
					t.Errorf("%s: %q is left of a placeholder", l.Name, a)
				}
			}
		}
	}
	if !slices.IsSorted(Names()) {
		t.Errorf("not sorted: %v", Names())
	}
	if Find("cobol") != nil || OfFile("README") != nil {
		t.Error("found what there is not")
	}
}

func TestLibraryNames(t *testing.T) {
	good := map[*Libraries][]string{
		pip:       {"six", "requests[socks,security]>=2.31,<3", "a.b_c-d==1.0+local", "x~=1!2.0", "y===1", "z!=1.*"},
		npm:       {"left-pad", "left-pad@1.3.0", "@types/node@^20", "react@latest", "a@>=1", "b@1.x", "JSONStream"},
		gem:       {"rake", "rake:13.0.6", "a_b-c"},
		goModules: {"golang.org/x/text@v0.14.0", "github.com/a/b", "gopkg.in/yaml.v3@latest"},
		cran:      {"jsonlite", "data.table"},
		apt:       {"libssl-dev", "g++", "zlib1g-dev=1:1.2.13~dfsg-1"},
	}
	// Each of these would be an option, a path, a URL, several words, or more than a name.
	bad := []string{
		"", "-r", "--index-url=http://x", "-", "/etc/passwd", "../x", "./x", "x y", "x\ty", "x\n", "x;y", "x|y", "x&y", "$(x)", "`x`", "'x'", "\"x\"",
		"http://host/x", "git+ssh://host/x", "file:///x", "x@http://host", "x @ http://host", "x@file:../y", "x@git+ssh://h", "x\x00", "é", "x\\y", "a/../b", "x>", "x==-1",
		"x[", "x[]", "x[-a]", "@/x", "@a", "@a/", "a@", "a:", "a=", "x@npm:y", strings.Repeat("a", 300),
	}
	for _, l := range []*Libraries{pip, npm, gem, goModules, cran, apt} {
		for _, name := range good[l] {
			if err := l.Check(name); err != nil {
				t.Errorf("%s refuses %q: %v", l.Manager, name, err)
			}
		}
		for _, name := range bad {
			if err := l.Check(name); err == nil {
				t.Errorf("%s accepts %q", l.Manager, name)
			}
		}
	}
}

func FuzzLibraryNames(f *testing.F) {
	for _, s := range []string{"six", "a[b]>=1,<2", "@s/n@^1", "x:1", "golang.org/x/text@v1", "a=1:2~3", "-x", "a b", "x@file:y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, l := range All() {
			if l.Libraries == nil || l.Libraries.Check(name) != nil {
				continue
			}
			alone := strings.TrimLeft(name, "@")
			if alone == "" || strings.ContainsAny(alone[:1], "-./~") || strings.ContainsAny(name, " \t\r\n\x00;|&$`'\"\\(){}#%") ||
				strings.Contains(name, "..") && strings.Contains(name, "/..") || strings.Contains(name, "://") || len(name) > maxName {
				t.Errorf("%s accepts %q", l.Libraries.Manager, name)
			}
			for _, local := range []*Local{nil, {Dir: "/lib", Files: []string{name + "-1.0.tgz", "x_1.deb"}}} {
				for _, way := range l.Libraries.Ways([]string{name}, local) {
					for _, step := range way {
						if len(step.Argv) == 0 || strings.Contains(strings.Join(step.Argv, "/"), "/../") {
							t.Errorf("%s: %q leads to %q", l.Libraries.Manager, name, step.Argv)
						}
					}
				}
			}
		}
	})
}

func TestLocalPackages(t *testing.T) {
	local := &Local{Dir: "/p", Files: []string{"rake-13.0.6.gem", "rake-13.1.0.gem", "rake-compiler-1.2.gem", "zlib1g_1.2-1_amd64.deb", "README"}}
	for _, c := range []struct{ name, version, sep, ext, want string }{
		{"rake", "", "-", ".gem", "/p/rake-13.1.0.gem"},
		{"rake", "13.0.6", "-", ".gem", "/p/rake-13.0.6.gem"},
		{"zlib1g", "1.2-1", "_", ".deb", "/p/zlib1g_1.2-1_amd64.deb"},
		{"zlib1g", "1.2", "_", ".deb", "/p/zlib1g_1.2.deb"}, // which there is not
		{"rak", "", "-", ".gem", "/p/rak-.gem"},
	} {
		if got := local.find(c.name, c.version, c.sep, c.ext); got != c.want {
			t.Errorf("find(%q, %q) = %q, want %q", c.name, c.version, got, c.want)
		}
	}
}

// TestFailures reads real output of programs.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name, lang, stderr string
		want               *api.CodeFailure // Traceback is not compared
	}{
		{"exception", "python", "warning: x\nTraceback (most recent call last):\n  File \"/tmp/.code-a/main.py\", line 3, in <module>\n    f()\n  File \"/tmp/.code-a/main.py\", line 2, in f\n    raise ValueError(\"x\\ny\")\nValueError: x\ny\n", &api.CodeFailure{Name: "ValueError", Value: "x\ny"}},
		{"chain", "python", "Traceback (most recent call last):\n  File \"m\", line 2, in <module>\n    1/0\nZeroDivisionError: division by zero\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  File \"m\", line 4, in <module>\n    raise json.decoder.JSONDecodeError('a','b',0)\njson.decoder.JSONDecodeError: a: line 1 column 1 (char 0)\n", &api.CodeFailure{Name: "json.decoder.JSONDecodeError", Value: "a: line 1 column 1 (char 0)"}},
		{"no message", "python", "Traceback (most recent call last):\n  File \"m\", line 1, in <module>\n    raise KeyError\nKeyError\n", &api.CodeFailure{Name: "KeyError"}},
		{"syntax", "python", "  File \"/tmp/.code-a/main.py\", line 2\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n", &api.CodeFailure{Name: "SyntaxError", Value: "invalid syntax"}},
		{"sys.exit with text", "python", "no\n", nil},
		{"forged header alone", "python", "Traceback (most recent call last):\n", nil},
		{"empty", "python", "", nil},
		{"error", "javascript", "/tmp/.code-a/main.js:2\nthrow new TypeError(\"x\")\n^\n\nTypeError: x\n    at Object.<anonymous> (/tmp/.code-a/main.js:2:7)\n    at Module._compile (node:internal/modules/cjs/loader:1469:14)\n\nNode.js v20.20.2\n", &api.CodeFailure{Name: "TypeError", Value: "x"}},
		{"module", "javascript", "node:internal/modules/cjs/loader:1210\n  throw err;\n  ^\n\nError: Cannot find module 'x'\nRequire stack:\n- /tmp/.code-a/main.js\n    at Module._resolveFilename (node:internal/modules/cjs/loader:1207:15) {\n  code: 'MODULE_NOT_FOUND',\n  requireStack: [ '/tmp/.code-a/main.js' ]\n}\n\nNode.js v20.20.2\n", &api.CodeFailure{Name: "Error", Value: "Cannot find module 'x'\nRequire stack:\n- /tmp/.code-a/main.js"}},
		{"syntax", "javascript", "/tmp/.code-a/main.js:2\nlet = = 1\n    ^\n\nSyntaxError: Unexpected token '='\n    at internalCompileFunction (node:internal/vm:76:18)\n\nNode.js v20.20.2\n", &api.CodeFailure{Name: "SyntaxError", Value: "Unexpected token '='"}},
		{"exit", "javascript", "Error: not really\n", nil},
		{"exception", "ruby", "/tmp/.code-a/main.rb:2:in `f': x (ArgumentError)\n\tfrom /tmp/.code-a/main.rb:4:in `<main>'\n", &api.CodeFailure{Name: "ArgumentError", Value: "x"}},
		{"syntax", "ruby", "/tmp/.code-a/main.rb:2: syntax error, unexpected '='\ny = = 2\n    ^\n", &api.CodeFailure{Name: "SyntaxError", Value: "syntax error, unexpected '='"}},
		{"syntax of 3.3", "ruby", "/tmp/.code-a/main.rb: --> main.rb\n/tmp/.code-a/main.rb:2: syntax error, unexpected '=' (SyntaxError)\ny = = 2\n", &api.CodeFailure{Name: "SyntaxError", Value: "syntax error, unexpected '='"}},
		{"exception of 3.4", "ruby", "/tmp/.code-a/main.rb:2:in 'Object#f': x (ArgumentError)\n\tfrom /tmp/.code-a/main.rb:4:in '<main>'\n", &api.CodeFailure{Name: "ArgumentError", Value: "x"}},
		{"exception", "java", "Exception in thread \"main\" java.lang.IllegalStateException: x\n\tat Main.main(Main.java:3)\n", &api.CodeFailure{Name: "java.lang.IllegalStateException", Value: "x"}},
		{"compile", "java", "/tmp/.code-a/Main.java:2: error: ';' expected\n  int x\n       ^\n1 error\nerror: compilation failed\n", &api.CodeFailure{Name: "CompileError", Value: "/tmp/.code-a/Main.java:2: error: ';' expected"}},
		{"panic", "go", "panic: x\n\ngoroutine 1 [running]:\nmain.main()\n\t/tmp/.code-a/main.go:4 +0x1d\nexit status 2\n", &api.CodeFailure{Name: "panic", Value: "x"}},
		{"stop", "r", "Error in f(1) : x\nCalls: f\nExecution halted\n", &api.CodeFailure{Name: "Error", Value: "x"}},
		{"missing", "r", "Error: object 'y' not found\nExecution halted\n", &api.CodeFailure{Name: "Error", Value: "object 'y' not found"}},
	} {
		t.Run(c.lang+"/"+c.name, func(t *testing.T) {
			got := Find(c.lang).Failure(c.stderr)
			switch {
			case (got == nil) != (c.want == nil):
				t.Errorf("%+v, want %+v", got, c.want)
			case got != nil && (got.Name != c.want.Name || got.Value != c.want.Value || got.Traceback == ""):
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	got := cpp.CompileFailure("main.cpp: In function 'int main()':\nmain.cpp:2:3: error: 'x' was not declared in this scope\n")
	if got.Name != "CompileError" || got.Value != "main.cpp:2:3: error: 'x' was not declared in this scope" {
		t.Errorf("%+v", got)
	}
}

// FuzzFailure feeds output of programs, which say anything.
func FuzzFailure(f *testing.F) {
	f.Add("Traceback (most recent call last):\nX: y\n")
	f.Add("E: x\n    at y\n\nNode.js v20\n")
	f.Add("panic: x\n\ngoroutine 1 [running]:\n")
	f.Fuzz(func(t *testing.T, stderr string) {
		for _, l := range All() {
			if l.Failure == nil {
				continue
			}
			if got := l.Failure(stderr); got != nil && (got.Name == "" || !strings.Contains(stderr, got.Traceback)) {
				t.Errorf("%s: %+v", l.Name, got)
			}
		}
	})
}
