package codepolicy

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp/syntax"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/document"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/interpreter"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func names(found []Import) string {
	var out []string
	for _, im := range found {
		if !slices.Contains(out, im.Name) {
			out = append(out, im.Name)
		}
	}
	return strings.Join(out, " ")
}

func TestImports(t *testing.T) {
	for _, c := range []struct{ language, code, want string }{
		{"python", "import os", "os"},
		{"python", "import os.path as p, sys", "os.path sys"},
		{"python", "from a.b import (c, # x\n  d as e,\n)\nimport f", "a.b a.b.c a.b.d f"},
		{"python", "from . import x\nfrom .y import z", ""},
		{"python", "x = 1; import os", "os"},
		{"python", "if x: import os", "os"},
		{"python", "import \\\n  os", "os"},
		{"python", "# import os\nx = 'import sys'\ny = '''\nimport re\n'''", ""},
		{"python", "'''a''' ; import os", "os"},
		{"python", `f"{"#"}"; import os`, "os"},
		{"python", "f'{x:#x}'; import os", "os"},
		{"python", "f'{{'; import os", "os"},
		{"python", "f'''{f'{a}'}'''\nimport os", "os"},
		{"python", `r"\"; import os`, ""},
		{"python", `r"\\"; import os`, "os"},
		{"python", "__import__('o\\x73')", "os"},
		{"python", "importlib.import_module(\"os.path\")", "os.path"},
		{"python", "import_module(name)", ""},
		{"python", "x.import_(1)\nreimport = 2", ""},
		{"python", "'unclosed\nimport os", "os"},
		{"javascript", "const f = require('fs')", "fs"},
		{"javascript", "require?.('node:fs')", "fs"},
		{"javascript", "require(`fs`)", "fs"},
		{"javascript", "requ\\u0069re('fs'), r\\u{65}quire('vm')", "fs vm"},
		{"javascript", "import f from 'node:fs/promises'", "fs/promises"},
		{"javascript", "import {\n a,\n b\n} from \"x\"\nexport * from 'y'", "x y"},
		{"javascript", "import 'x'; await import('y')", "x y"},
		{"javascript", "// require('fs')\n/* import 'x' */ 'require(\"y\")'", ""},
		{"javascript", "x = /['\"]/; require('fs')", "fs"},
		{"javascript", "x = a / b; y = c / d; require('fs')", "fs"},
		{"javascript", "x = `${require('fs')} ${`${import('y')}`}`; require('z')", "fs y z"},
		{"javascript", "process.getBuiltinModule('fs')", "fs"},
		{"javascript", "Array.from('x')", ""},
		{"typescript", "import type { A } from 'a'\nimport b = require('b')", "a b"},
		{"go", "package main\nimport \"net/http\"\nimport (\n _ \"os/exec\"\n x `fmt`\n)\nfunc main() { broken", "net/http os/exec fmt"},
		{"go", "package main\n// import \"os\"\n", ""},
		{"go", "package main\nimport \"o\\x73\"", "os"},
		{"c", "#include <stdio.h>\n # include \"a/b.h\"\n", "stdio.h a/b.h"},
		{"c", "#inc\\\nlude <sys/socket.h>\n/* #include <x> */\n// #include <y>", "sys/socket.h"},
		{"c", "%:include <a.h>\n#/**/include/**/<b.h>", "a.h b.h"},
		{"c", "char *s = \"#include <x>\";\nint a = 1'0; \n#include <y>", "y"},
		{"cpp", "auto s = R\"x(\n#include <a>\n)x\";\n#include <b>\nimport <c>;\nimport d.e;", "b c d.e"},
		{"cpp", "auto s = R\"x(\n#include <a>", "a"}, // no end
		{"java", "import java.net.Socket;\nimport static java.lang.Math.*;", "java.net.Socket java.lang.Math.*"},
		{"java", "new java . net\n. Socket()", "java.net.Socket"},
		{"java", `\u0069mport a.B;`, "a.B"},
		{"java", "Class.forName(\"java.net.URL\")", "java.net.URL"},
		{"java", "/* import a.b; */ String s = \"\"\"\nimport c.d;\n\"\"\";", ""},
		{"ruby", "require 'socket'\nrequire(\"open3\")\nload 'x.rb'\nautoload :A, 'b'", "socket open3 x b"},
		{"ruby", "# require 'socket'\nputs \"#{require 'a'}\"\n=begin\nrequire 'b'\n=end\nrequire 'c'", "c"},
		{"r", "library(httr)\nrequire('a'); requireNamespace(\"b.c\")\nlibrary(data.table)\nx <- jsonlite::fromJSON", "httr a b.c data.table jsonlite"},
		{"r", "# library(a)\ns <- \"library(b)\"\ns <- r\"---(library(c)\")---\"\nlibrary(package = d)", "d"},
		{"bash", "curl x | sh", "curl sh"},
		{"bash", "A=1 B=2 curl x; /usr/bin/wget y && nc -l", "curl wget nc"},
		{"bash", "echo curl # wget\nif true; then nc; fi", "echo true nc"},
		{"bash", "x=$(curl a) y=`wget b`; echo \"a $(nc \"$(ssh c)\") d\"", "curl wget echo nc ssh"},
		{"bash", "sudo -n env A=1 timeout 5s curl x", "sudo env timeout curl"},
		{"bash", "bash -c 'curl x; nc y' a", "bash curl nc"},
		{"bash", "eval \"sh -c 'curl x'\"", "eval sh curl"},
		{"bash", "cat <<E\nI don't $(curl x)\nE\nwget y", "cat wget : curl"},
		{"bash", "cat <<'E'\n$(curl x)\nE\n", "cat"},
		{"bash", "cu'r'l x; \"wg\"et y; \\nc", "curl wget nc"},
		{"bash", "for i in curl wget; do nc; done; case x in a) ssh;; esac", "for nc case ssh"},
		{"bash", "find . -exec curl {} \\; >out 2>&1 </dev/null", "find curl"},
		{"bash", "source ./lib.sh; . /etc/x", "source ./lib.sh /etc/x"},
		{"bash", "diff <(curl x) >(wget y)", "diff curl wget"},
		{"bash", "'unclosed", "unclosed"},
	} {
		t.Run(c.language+"/"+c.code, func(t *testing.T) {
			if got := names(imports(&Code{Language: c.language, Text: c.code})); got != c.want {
				t.Errorf("imports %q, want %q", got, c.want)
			}
		})
	}
}

func TestImportsHaveTheirLines(t *testing.T) {
	for language, code := range map[string]string{
		"python": "'''\n'''\n# x\nimport os", "javascript": "`\n`\n\nrequire('os')", "go": "package main\n\n\nimport \"os\"", "c": "/*\n\n*/\n#include <os>",
		"java": "\n\n\nimport os;", "ruby": "\n\n\nrequire 'os'", "r": "'\n\n'\nlibrary(os)", "bash": "'a\n\n'\nos",
	} {
		found := imports(&Code{Language: language, Text: code})
		if n := len(found); n == 0 || found[n-1].Name != "os" || found[n-1].Line != 4 {
			t.Errorf("%s: %+v, want os in line 4", language, found)
		}
	}
}

func TestCells(t *testing.T) {
	for _, c := range []struct{ code, want string }{
		{"!curl x", "subprocess curl"},
		{"x = !curl x", "subprocess curl"},
		{"%%bash\ncurl x\nwget y", "subprocess curl wget"},
		{"%pip install x", "subprocess pip"},
		{"%%time\nimport os", "os"},
		{"%timeit -n 3 __import__('os')", "os"},
		{"if x:\n  !curl y\nimport os", "os subprocess curl"},
		{"x = '''\n% '''; import os", "os"},
		{"x = 5 %2\nassert x !=3", ""},
		{"%load_ext x", "x"},
		{"%sx curl x", "subprocess curl"},
		{"\n \n%%bash\ncurl", "subprocess curl"},
		{"  %%bash\n  curl", "subprocess curl"},
		{"\f%%bash\ncurl", "subprocess curl"},
		{"%% bash\ncurl", "subprocess curl"},
		{"%%time\n%%bash\ncurl", "subprocess curl"},
		{"%%capture --no-stderr x\n\n %%time\n!curl", "subprocess curl"},
		{"%%timeit import os\nimport re", "re os"},
		{"%%perl\nimport os", "os subprocess perl"}, // read as Python, too: it may be a string
		{"%%ruby\nrequire 'socket'", "subprocess ruby socket"},
		{"%%python3\nimport os", "os subprocess python3"},
		{"%%script --bg ruby -w\nrequire 'socket'", "subprocess ruby socket"},
		{"%%script env x\ncurl", "subprocess env x curl"},
		{"%%nosuch\nx", "subprocess nosuch"},
		{"%%\nx", "subprocess"},
		{"%%html\n<p>!curl", ""},
		{">>> !curl", "subprocess curl"},
		{">>> x = 1\n... %sx curl", "subprocess curl"},
		{"In [12]: !curl\n    ...: import os", "os subprocess curl"},
		{"%time !curl", "subprocess curl"},
		{"x = %timeit %time -o %sx curl", "subprocess curl"},
		{"%sx \\\n curl", "subprocess curl"},
		{"x[\"#\"] = !curl", "subprocess curl"},
		{"x[i % 2] = !curl", "subprocess curl"},
		{"1\r!curl", "subprocess curl"},
		{"sx curl", "subprocess curl"},
		{"  system  curl\n\n", "subprocess curl"},
		{"sx('curl')", "subprocess"},
		{"ls", "subprocess ls"},
		{"pip install x", "subprocess pip"},
		{"%time sx curl", "subprocess curl"},
		{"ls = 1", ""},
		{"run(x)", ""},
		{"run (x)", ""},
		{"sx\n1", ""},
		{"print('x =%s' % y, \"a=!b\")", ""},
		{"x # y = !curl", ""},
	} {
		if got := names(imports(&Code{Language: "python", Text: c.code, Cell: true})); got != c.want {
			t.Errorf("%q: imports %q, want %q", c.code, got, c.want)
		}
	}
}

// The size of a cell counts once, however its magics stand in one another.
func TestLargeCells(t *testing.T) {
	for _, code := range []string{
		strings.Repeat("%%time\n", 150_000) + "%%bash\ncurl", strings.Repeat("%time ", 150_000) + "!curl", strings.Repeat("\n", 1<<20) + "!curl",
		"!curl " + strings.Repeat("\\\n", 500_000), strings.Repeat("!curl\n", 150_000), strings.Repeat(">>> ", 250_000) + "!curl",
	} {
		if got := names(imports(&Code{Language: "python", Text: code, Cell: true})); got != "subprocess curl" {
			t.Errorf("%.40q: imports %q", code, got)
		}
	}
}

func TestCommentsAreBlanked(t *testing.T) {
	for _, c := range []struct{ language, code, want string }{
		{"python", "a # b\nc '#' d", "a    \nc '#' d"},
		{"javascript", "a // b\n'//' /* c\n */ d", "a     \n'//'     \n    d"},
		{"c", "a /*/ b */ c", "a          c"},
		{"ruby", "a # b\n\"#{c}\" x#y", "a    \n\"#{c}\" x#y"},
		{"bash", "a # b\nc#d '#' \"$(x # y\n)\"", "a    \nc#d '#' \"$(x    \n)\""},
		{"r", "a # b", "a    "},
	} {
		if got := withoutComments(c.language, c.code); got != c.want {
			t.Errorf("%s: %q gives %q, want %q", c.language, c.code, got, c.want)
		}
	}
}

func parse(t *testing.T, doc string) *Policy {
	t.Helper()
	p, err := Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestCheck(t *testing.T) {
	p := parse(t, `
version: 1
refuse: high
patterns:
- {pattern: '^x\b', severity: low, reason: an x}
- {pattern: 'os\.system', languages: [py], severity: critical}
modules:
- {module: [os, java.net.Socket], severity: medium}
- {module: curl, languages: bash, severity: high}
`)
	for _, c := range []struct {
		code    Code
		want    string
		refused bool
	}{
		{Code{Language: "python", Text: "y\nx"}, "pattern ^x\\b x 2 low", false},
		{Code{Language: "python", Text: "import os.path\n# os.system\n"}, "module os os.path 1 medium", false},
		{Code{Language: "python", Text: "import oslo"}, "", false},
		{Code{Language: "python", Text: "os.system"}, "pattern os\\.system os.system 1 critical!", true},
		{Code{Language: "ruby", Text: "os.system"}, "", false},
		{Code{Language: "java", Text: "import java.net.*;"}, "module java.net.Socket java.net.* 1 medium", false},
		{Code{Language: "python", Text: "!curl", Cell: true}, "module curl curl 1 high!", true},
		{Code{Language: "python", Text: "!curl"}, "", false},
		{Code{Language: "python", Text: "1", Imports: []Import{{Name: "os", Line: 7}}}, "module os os 7 medium", false},
		{Code{Language: "python", Text: "1", Libraries: []string{"os[x]>=1", "oslo"}}, "module os os 0 medium", false},
	} {
		r := Check([]*Policy{p}, &c.code)
		refused := r.Refused
		var got []string
		for _, f := range r.Findings {
			text := strings.Join([]string{string(f.Kind), f.Name, f.Found, string(rune('0' + f.Line)), string(f.Severity)}, " ")
			if f.Refused {
				text += "!"
			}
			got = append(got, text)
		}
		if text := strings.Join(got, "; "); text != c.want || refused != c.refused {
			t.Errorf("%+v: %q, %v; want %q, %v", c.code, text, refused, c.want, c.refused)
		}
	}
}

// covers is the definition that firstImports follows with fewer steps.
func covers(module, name string) bool {
	if all, ok := strings.CutSuffix(name, ".*"); ok && strings.HasPrefix(module, all+".") {
		return true
	}
	rest, ok := strings.CutPrefix(name, module)
	return ok && (rest == "" || strings.ContainsRune("./:", rune(rest[0])) || strings.HasSuffix(module, "/"))
}

func TestModulesCoverWhatIsInThem(t *testing.T) {
	all := []string{"a", "a.b", "a.b.c", "a/", "a/b", "a/b/", "a:b", "a.", "a..b", "a.*", "a.b.*", "ab", "a//b", ".", "/", "b.*", "a/b.c", "*"}
	p := &Policy{modules: []module{{scope{languages: []string{"go"}}, []string{"b"}}, {names: all}}}
	for _, name := range all {
		first := p.firstImports("python", []Import{{Name: "none"}, {Name: name}, {Name: name, Language: "go"}})
		for i, module := range all {
			if got, want := first[1+i] == 1, covers(module, name); got != want {
				t.Errorf("module %q covers %q: %v, want %v", module, name, got, want)
			}
		}
	}
}

// The cost of names and of imports adds up. Multiplied, this test takes minutes.
func TestManyModules(t *testing.T) {
	doc, code := "version: 1\nrefuse: high\nmodules:\n", ""
	for i := range 50 {
		severity := "low"
		if i == 49 {
			severity = "high"
		}
		doc += "- {severity: " + severity + ", module: ["
		for j := range 100 {
			doc += fmt.Sprintf("m%d, ", 100*i+j)
		}
		doc += "]}\n"
	}
	for i := range 5000 {
		code += fmt.Sprintf("import m%d.a.b\n", i)
	}
	policies := slices.Repeat([]*Policy{parse(t, doc)}, 20)
	r := Check(policies, &Code{Language: "python", Text: code})
	if len(r.Findings) != MaxFindings || r.More != 4000 || !r.Refused {
		t.Fatalf("%d findings and %d more, refused %v", len(r.Findings), r.More, r.Refused)
	}
	if first, last := r.Findings[0], r.Findings[MaxFindings-1]; first.Line != 1 || first.Refused || last.Line != 5000 || !last.Refused {
		t.Errorf("from %+v to %+v", first, last)
	}
}

// A policy that is added never takes a refusal away.
func TestPoliciesAdd(t *testing.T) {
	strict := parse(t, "version: 1\nmodules: [{module: os, severity: low}]")
	lax := parse(t, "version: 1\nrefuse: critical\nmodules: [{module: os, severity: low}]")
	for _, both := range [][]*Policy{{strict, lax}, {lax, strict}} {
		r := Check(both, &Code{Language: "python", Text: "import os"})
		if !r.Refused || len(r.Findings) != 1 || !r.Findings[0].Refused {
			t.Errorf("%+v", r)
		}
	}
	if Check([]*Policy{lax}, &Code{Language: "python", Text: "import os"}).Refused {
		t.Error("the lax one refuses")
	}
}

func TestMistakesHavePlaces(t *testing.T) {
	for _, c := range []struct{ doc, want string }{
		{"", "the document is empty"},
		{"x", "1:1: policy is no mapping"},
		{"refuse: low", "1:1: the version is missing; write version: 1"},
		{"version: 2", "1:10: version is not 1"},
		{"version: 1\nrefuse: most", `2:9: refuse: "most" is none of low, medium, high, critical`},
		{"version: 1\nrules: []", `2:1: policy has no key "rules"`},
		{"version: 1\npresets: nosuch", `2:10: presets: no preset "nosuch"; there are data_science, development, educational, minimal, production, strict, web_scraping`},
		{"version: 1\npatterns:\n- pattern: '('", "3:12: pattern: missing closing ): \"(\"; the syntax is RE2's, which has no lookaround and no backreference"},
		{"version: 1\npatterns:\n- pattern: '(?=a)'", "3:12: pattern: invalid or unsupported Perl syntax: \"(?=\"; the syntax is RE2's, which has no lookaround and no backreference"},
		{"version: 1\npatterns:\n- pattern: 'a*'", `3:12: pattern: "a*" matches every text`},
		{"version: 1\npatterns:\n- severity: low", "3:3: the rule has no pattern"},
		{"version: 1\npatterns:\n- {pattern: 'x{900}y{900}', reason: a}\n- pattern: '(xy|z){900}'", "4:12: the patterns are too large together: more than 4096 instructions"},
		{"version: 1\npatterns:\n- pattern: '" + strings.Repeat("a", maxPattern+1) + "'", "3:12: pattern: longer than 4096 bytes"},
		{"version: 1\nmodules: [{module: 'a b'}]", `2:20: module: "a b" is no name`},
		{"version: 1\nmodules: [{module: [], languages: cobol}]", "2:20: module: the list is empty"},
		{"version: 1\nmodules: {}", "2:10: modules is no list"},
		{"version: 1\nversion: 1", `2:1: key "version" occurs twice`},
		{"version: 1\nmodules: [{module: a, reason: \"x\\ny\"}]", "2:31: reason: no line of 1 to 200 bytes"},
		{"a: [", "1:1: did not find expected node content"},
	} {
		_, err := Parse([]byte(c.doc))
		if err == nil || !strings.HasPrefix(strings.TrimPrefix(err.Error(), "parse the code policy: "), c.want) {
			t.Errorf("%q: %v, want %s", c.doc, err, c.want)
		}
	}
	if _, err := Parse(bytes.Repeat([]byte("#"), maxDocument+1)); err == nil {
		t.Error("a document that is too large is read")
	}
	_, err := Parse([]byte("version: 2\nx: 1"))
	if all := document.Mistakes(err); len(all) != 2 || all[1].Line != 2 {
		t.Errorf("mistakes %v", all)
	}
}

// The size of a pattern is known before its program is made, which can take a gigabyte.
func TestSizeOfPatterns(t *testing.T) {
	for _, s := range []string{
		"a", "", "(a)(?:b|c|)*?d+", "(?i)straße|x?", `\b[^a]\B\pL\PN^$\z`, "(?:ab?){3,5}", "(?:a*){3,}", "(?:(?:a|b){7}){0,9}", "a{0}", "(?:){1000}", "(?:a{0,}){0,2}", "[^\\x00-\\x{10FFFF}]", "(?:|a)+",
	} {
		got, err := measure(s)
		parsed, parseErr := syntax.Parse(s, syntax.Perl&^syntax.OneLine)
		if err != nil || parseErr != nil {
			t.Fatal(err, parseErr)
		}
		program, err := syntax.Compile(parsed.Simplify())
		if err != nil {
			t.Fatal(err)
		}
		if want := len(program.Inst); got < want {
			t.Errorf("%q: measured %d instructions, it has %d", s, got, want)
		}
	}
	for _, p := range presets() {
		for _, r := range p.patterns {
			parsed, err := syntax.Parse(r.text, syntax.Perl&^syntax.OneLine)
			if err != nil {
				t.Fatal(err)
			}
			program, err := syntax.Compile(parsed.Simplify())
			if n := len(program.Inst); err != nil || r.size < n || r.size > 2*n {
				t.Errorf("%q: measured %d instructions, it has %d, %v", r.text, r.size, n, err)
			}
		}
	}
	large := "- pattern: '(?:" + strings.Repeat("a", 800) + "){1000}'\n"
	var before, after goruntime.MemStats
	goruntime.ReadMemStats(&before)
	_, err := Parse([]byte("version: 1\npatterns:\n" + strings.Repeat(large, 50)))
	goruntime.ReadMemStats(&after)
	if all := document.Mistakes(err); len(all) != 1 || all[0].Line != 3 {
		t.Errorf("mistakes %v, want one in line 3", all)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
		t.Errorf("a document of 40 KiB takes %d bytes", n)
	}
}

func TestPresets(t *testing.T) {
	type shown struct {
		Refuse   api.CodeSeverity
		Patterns []string
		Modules  []string
	}
	all := make(map[string]shown)
	for name, p := range presets() {
		s := shown{Refuse: p.refuse}
		for _, r := range p.patterns {
			s.Patterns = append(s.Patterns, strings.Join(append(slices.Clone(r.languages), string(r.severity), r.text), " "))
		}
		for _, r := range p.modules {
			s.Modules = append(s.Modules, strings.Join(append(slices.Clone(r.languages), string(r.severity), strings.Join(r.names, ",")), " "))
		}
		all[name] = s
		if _, err := Parse([]byte("version: 1\npresets: [" + name + "]")); err != nil {
			t.Error(err)
		}
	}
	if p := parse(t, "version: 1\npresets: ["+strings.Join(Presets(), ", ")+"]"); p.refuse != api.SeverityLow || p.program > 2000 {
		t.Errorf("all presets together: refuse %s, %d instructions", p.refuse, p.program)
	}
	got, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/presets.golden"
	if *update {
		if err := os.WriteFile(golden, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)+"\n"); diff != "" {
		t.Errorf("presets differ (-want +got; -update writes them):\n%s", diff)
	}
}

// Each preset refuses some programs, and lets others run.
func TestPresetsDecide(t *testing.T) {
	const refused, runs = true, false
	for _, c := range []struct {
		preset, language, code string
		want                   bool
	}{
		{"development", "python", "import os, subprocess; os.system('ls')", runs},
		{"development", "bash", "curl https://x | sh", refused},
		{"development", "bash", "rm -rf /", refused},
		{"development", "bash", "rm -rf /tmp/x", runs},
		{"production", "python", "import math, json\nopen('/tmp/x', 'w').write('y')", runs},
		{"production", "python", "import pickle", refused},
		{"production", "go", "package main\nimport \"os/exec\"", refused},
		{"production", "go", "package main\nimport (\"fmt\"; \"os\"; \"strings\")", runs},
		{"educational", "python", "import os\nopen('x')", runs},
		{"educational", "python", "eval('1')", refused},
		{"educational", "javascript", "require('child_process')", refused},
		{"data_science", "python", "import numpy, pandas, requests, pickle\nx.eval('a > b')", runs},
		{"data_science", "python", "import subprocess", refused},
		{"web_scraping", "python", "import requests, urllib.request", runs},
		{"web_scraping", "python", "import socket", refused},
		{"web_scraping", "go", "package main\nimport \"net/http\"", runs},
		{"web_scraping", "bash", "curl https://x", runs},
		{"web_scraping", "bash", "nc -l 1", refused},
		{"minimal", "python", "import socket, subprocess", runs},
		{"minimal", "python", "open('/etc/shadow')", refused},
		{"strict", "python", "print(sum(range(10)))", runs},
		{"strict", "python", "import os", refused},
		{"strict", "java", "class A { void f() { java.nio.file.Path p; } }", refused},
		{"strict", "ruby", "puts [1, 2].sum", runs},
		{"strict", "ruby", "puts `ls`", refused},
		{"strict", "r", "print(mean(c(1, 2)))", runs},
		{"strict", "r", "system('ls')", refused},
		{"strict", "c", "#include <stdio.h>\nint main() { printf(\"1\"); }", runs},
		{"strict", "cpp", "int main() { a.clone(); system(\"ls\"); }", refused},
	} {
		p := parse(t, "version: 1\npresets: "+c.preset)
		if r := Check([]*Policy{p}, &Code{Language: c.language, Text: c.code}); r.Refused != c.want {
			t.Errorf("%s: %s %q: %+v", c.preset, c.language, c.code, r)
		}
	}
}

func TestPythonReader(t *testing.T) {
	python := testenv.RequirePeer(t, "python3")
	for _, c := range []struct {
		code string
		cell bool
		want string
	}{
		{"import os.path as p, sys\nfrom a import (b,\n c)", false, "os.path sys a a.b a.c"},
		{"from . import x", false, ""},
		{"__import__('os'); importlib.import_module('a\\nb'); import_module(x)", false, "os"},
		{"f'{__import__(\"os\")}'", false, "os"},
		{"import ｏｓ", false, "os"}, //nolint:gosmopolitan // a name that Python normalizes
		{"# coding: utf-7\n+AGkAbQBwAG8AcgB0ACAAbwBz-", false, "os"},
		{"import (", false, ""},
		{"!ls\nimport os", false, ""},
		{"!ls\nimport os", true, "os"},
		{"# coding: nosuch\nimport os", true, "os"},
		{strings.Repeat("(", 100_000), false, ""},
		{strings.Repeat("-", 100_000) + "1", false, ""},
	} {
		argv := []string{"-I", "-S", "-W", "ignore", "-c", PythonReader}
		if c.cell {
			argv = append(argv, "cell")
		}
		cmd := exec.CommandContext(t.Context(), python, argv...)
		cmd.Stdin = bytes.NewReader(PythonInput(c.code, c.cell))
		out, err := cmd.Output()
		if err != nil {
			t.Errorf("%.40q: %v", c.code, err)
			continue
		}
		found, err := ReadPython(out)
		if got := names(found); err != nil || got != c.want {
			t.Errorf("%.40q: %q, %v; want %q", c.code, got, err, c.want)
		}
	}
}

func TestReadPythonRefusesWhatIsNoAnswer(t *testing.T) {
	for _, answer := range []string{
		"", "end", "1 os\n", "1 os\nend\nmore\n", "x os\nend\n", "0 os\nend\n", "1 \nend\n", "1\nend\n", "1 a b\nend\n", "1 \x1b[0m\nend\n", "1 \xff\nend\n",
		"1 " + strings.Repeat("a", maxName+1) + "\nend\n", strings.Repeat("1 a\n", maxImports+1) + "end\n", strings.Repeat("a", maxAnswer+1),
	} {
		if found, err := ReadPython([]byte(answer)); err == nil {
			t.Errorf("%.40q is read as %v", answer, found)
		}
	}
}

func FuzzCheck(f *testing.F) {
	for i, l := range interpreter.Names() {
		f.Add(i, "import os\nrequire('x') # \" ' ` /* \\ $( <<E R\"( f'{ =begin !x %y "+l, i%2 == 0)
	}
	all := []*Policy{presets()["strict"]}
	f.Fuzz(func(t *testing.T, language int, text string, isCell bool) {
		list := interpreter.Names()
		if language < 0 {
			language = -(language + 1)
		}
		code := &Code{Language: list[language%len(list)], Text: text, Cell: isCell}
		if plain := withoutComments(code.Language, text); len(plain) != len(text) || strings.Count(plain, "\n") != strings.Count(text, "\n") {
			t.Errorf("comments are not replaced by as many spaces: %q", plain)
		}
		lines := 2 + strings.Count(text, "\n")
		for _, im := range imports(code) {
			if im.Line < 1 || im.Line > lines || im.Name == "" || len(im.Name) > maxName {
				t.Errorf("import %+v of %d lines", im, lines)
			}
		}
		for _, x := range Check(all, code).Findings {
			if x.Severity.Rank() == 0 || len(x.Found) > maxFound+3 {
				t.Errorf("finding %+v", x)
			}
		}
	})
}

func FuzzReadPython(f *testing.F) {
	for _, s := range []string{"1 os\nend\n", "end\n", "x\nend\n", "1 a.b\n2 c\nend\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		found, err := ReadPython(answer)
		for _, im := range found {
			if err != nil || im.Line < 1 || im.Name == "" || len(im.Name) > maxName || strings.ContainsAny(im.Name, " \n\x00\x1b") {
				t.Errorf("%+v, %v", im, err)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("version: 1\npresets: strict\nrefuse: low\npatterns: [{pattern: a}]\nmodules: [{module: [a, b], languages: go}]"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		p, err := Parse(doc)
		if err == nil && (p.refuse.Rank() == 0 || p.program > maxProgram) {
			t.Errorf("%+v", p)
		}
	})
}
