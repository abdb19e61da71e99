package service_test

import (
	"bytes"
	"fmt"
	"image/png"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A run is code in a context, and its [summary].
type run struct{ code, want string }

// A tongue is a language whose kernel leaves its streams to programs, with code and its outcomes.
type tongue struct {
	name, peer string
	runs       []run
	fails      []run    // want is the traceback, with "N" for the number of the run
	env        run      // shows the variables A of the context, and B of the run
	says       string   // prints a line
	busy       []string // does not end, but when it is interrupted
	waits      string   // runs "sleep 1000", and may end without error when that is interrupted
	after      run
	large      string   // is a text of 700,000 letters
	lines      string   // prints the numbers from 1 to 20000
	flood      string   // runs $1 as a program of sh
	dies       string   // ends the process with exit code 4
	hostile    []string // breaks the protocol
}

var tongues = []tongue{
	{
		name: "js", peer: "node",
		runs: slices.Concat(ofNode, []run{
			{"throw null", `"" "" Error: null`},
			{"let w = (", `"" "" SyntaxError: Unexpected end of input`},
		}),
		fails: []run{{"function g() {\n  nosuch()\n}\ng()", "ReferenceError: nosuch is not defined\n    at g (<cell N>:2:3)\n    at <cell N>:4:1"}},
		env:   run{"process.env.A + process.env.B", `"" "" [ab c]*`},
		says:  "console.log('now')",
		busy:  []string{"while (true) {}", "await new Promise(() => setTimeout(() => {}, 1e9))"},
		waits: "require('child_process').execSync('sleep 1000')", after: run{"f()", `"" "" [6]*`},
		large: "'x'.repeat(700000)", lines: "for (let i = 1; i <= 20000; i++) console.log(i)", flood: "require('child_process').execSync('$1', {stdio: 'inherit'}); undefined", dies: "process.exit(4)",
		hostile: []string{forgeNode + "put('? 1 0\\n')", forgeNode + "put('d 999 2\\n{}')", forgeNode + "put('r ' + n + ' 99999\\n')", forgeNode + "put('r ' + n + ' 2\\n[]')"},
	},
	{
		name: "ts", peer: "node",
		runs: slices.Concat(ofNode, []run{
			{"interface P { x: number }\n\nconst p: P = {x: 5}", `"" ""`},
			{"enum E { A = p.x, B = 7 }\nE.B as number", `"" "" [7]*`},
			{"type A = {b: string}", `"" ""`},
		}),
		fails: []run{{
			"interface Q {\n  y?: {z: number}\n}\nenum F { C }\nfunction h(q: Q): number {\n\n  return q.y!.z\n}\n\nh({})",
			"TypeError: Cannot read properties of undefined (reading 'z')\n    at h (<cell N>:7:15)\n    at <cell N>:10:1",
		}},
		env:   run{"(process.env.A as string) + process.env.B", `"" "" [ab c]*`},
		says:  "console.log('now')",
		busy:  []string{"while (true as boolean) {}"},
		waits: "require('child_process').execSync('sleep 1000')", after: run{"f()", `"" "" [6]*`},
		large: "'x'.repeat(700000) as string", lines: "for (let i: number = 1; i <= 20000; i++) console.log(i)", flood: "require('child_process').execSync('$1', {stdio: 'inherit'}); undefined", dies: "process.exit(4)",
		hostile: []string{forgeNode + "put('d 999 2\\n{}')"},
	},
	{
		name: "rb", peer: "ruby",
		runs: []run{
			{"x = 5; def f(n) = 6 / n", `"" "" [:f]*`},
			{"puts x; warn 'e'; f(1) + x", `"5\n" "e\n" [11]*`},
			{"'text'", `"" "" ["text"]*`},
			{"_ + 's'", `"" "" ["texts"]*`},
			{"nil", `"" ""`},
			{"display(1, 'two')", `"" "" [1] ["two"]`},
			{"raise ArgumentError, 'bad'", `"" "" ArgumentError: bad`},
			{"raise 'žluť'", `"" "" RuntimeError: žluť`},
			{"puts 'a'; system('echo b; echo c >&2'); puts 'd'", `"a\nb\nd\n" "c\n"`},
			{"gets", `"" ""`},
			{"exit 3", `"" "" SystemExit: exit`},
			{"abort 'said'", `"" "said\n" SystemExit: said`},
			{"throw :x", `"" "" UncaughtThrowError: uncaught throw :x`},
			{"def (o = Object.new).inspect = raise('no'); o", `"" "" RuntimeError: no`},
			{"fork { puts 'child' }; Process.wait; nil", `"child\n" ""`},
			{"fork; Process.wait rescue 0; nil", `"" ""`},
			{"require 'stringio'; $stdout.sync = false; print 'held'; $stdout = StringIO.new; puts 'lost'", `"held" ""`},
			{"$stdout = STDOUT; print \"\\0\"", `"` + "\\x00" + `" ""`},
			{"", `"" ""`},
		},
		fails: []run{
			{"def g\n  raise 'bad'\nend\n\ng", "<cell N>:2:in `g': bad (RuntimeError)\n\tfrom <cell N>:5:in `<main>'"},
			{"begin\n  g\nrescue\n  raise IOError\nend", "<cell N>:4:in `rescue in <main>': IOError (IOError)\n\tfrom <cell N>:1:in `<main>'\n<cell 20>:2:in `g': bad (RuntimeError)\n\tfrom <cell N>:2:in `<main>'"},
		},
		env:   run{"ENV.values_at('A', 'B')", `"" "" [["a", "b c"]]*`},
		says:  "puts 'now'; $stdout.flush", // a run before has made it hold output
		busy:  []string{"sleep", "loop {}", "n = 0; n += 1 while true", "Thread.new { sleep }.join", "begin; sleep; ensure; puts; end", "def (o = Object.new).inspect = loop {}; o"},
		waits: "system('sleep 1000')", after: run{"f(1)", `"" "" [6]*`},
		large: "'x' * 699_998", lines: "1.upto(20000) { |i| puts i }", flood: "system('$1'); nil", dies: "exit! 4",
		hostile: []string{
			"SANDBOXD.send(:say, '?', '{}')", "SANDBOXD.send(:say, 'r', '[]')", "SANDBOXD.send(:say, 'r', '{} {}')",
			"SANDBOXD.instance_variable_set(:@number, 999); SANDBOXD.send(:say, 'd', '{}')", "loop { SANDBOXD.send(:say, '+', 'x' * 40000) }",
		},
	},
	{
		name: "R", peer: "Rscript",
		runs: []run{
			{"x <- 5; f <- function(n) if (n == 0) stop('zero') else 6 / n", `"" ""`},
			{"cat(x, '\\n'); message('e'); f(1) + x", `"5 \n" "e\n" [[1] 11]*`},
			{"1; invisible(2); 3; y <- 4", `"" "" [[1] 1] [[1] 3]`},
			{"'text'", `"" "" [[1] "text"]*`},
			{".Last.value", `"" "" [[1] "text"]*`},
			{"display(1, 'two')", `"" "" [[1] 1] [[1] "two"]`},
			{"f(0)", `"" "" Error: zero`},
			{"stop('žluť 🐎')", `"" "" Error: žluť 🐎`},
			{"'žluť 🐎 \\\\ \"'", `"" "" [[1] "žluť 🐎 \\ \""]*`},
			{"library(nosuchlib)", `"" "" packageNotFoundError: there is no package called ‘nosuchlib’`},
			{"cat('a\\n'); invisible(system('echo b; echo c >&2')); cat('d\\n')", `"a\nb\nd\n" "c\n"`},
			{"con <- file('stdin'); print(readLines(con)); close(con)", `"character(0)\n" ""`},
			{"q(status = 3)", `"" "" SystemExit: 3`},
			{"warning('careful')", `"" "Warning: careful\n"`},
			{"sink('/dev/null'); cat('lost'); 7", `"" "" [[1] 7]*`},
			{"sink(); sink(stdout(), type = 'message'); message('there')", `"there\n" ""`},
			{"sink(type = 'message'); NULL", `"" "" [NULL]*`},
			{"invisible(parallel::mclapply(1:2, function(i) i)); ls()", `"" "" [[1] "con" "f"   "x"   "y"  ]*`},
			{"cat('a\n  \tb'); cat('\\\\', \"\\\"\", '%s')", `"a\n  \tb\\ \" %s" ""`},
			{"data.frame(a = c(1.5, NA), b = c('x', '<y>'))", "\"\" \"\" [    a   b\n1 1.5   x\n2  NA <y>]*"},
			{"", `"" ""`},
		},
		fails: []run{
			{"g <- function(x) {\n  y <- x\n  nosuch(y)\n}\n\ng(1)", "Error in nosuch(y): could not find function \"nosuch\"\n  <cell N>:6  g(1)\n  <cell N>:3  nosuch(y)"},
			{"1\nzz", "Error: object 'zz' not found\n  <cell N>:2"},
			{"x = (", "Error: <cell N>:2:0: unexpected end of input\n1: x = (\n   ^"},
		},
		env:   run{"paste0(Sys.getenv('A'), Sys.getenv('B'))", `"" "" [[1] "ab c"]*`},
		says:  "cat('now\\n')",
		busy:  []string{"Sys.sleep(1000)", "while (TRUE) {}", "repeat x <- x + 1", "for (i in 1:1e9) sqrt(i)"},
		waits: "system('sleep 1000')", after: run{"f(1)", `"" "" [[1] 6]*`},
		large: "noquote(strrep('x', 699996))", lines: "writeLines(as.character(1:20000))", flood: "invisible(system('$1'))", dies: "base::quit(status = 4)",
		hostile: []string{
			"environment(q)$say('?', '{}')", "environment(q)$say('r', '[]')", "environment(q)$say('o', 'x')",
			"e <- environment(q); e$number <- 999; e$say('d', '{}')",
		},
	},
}

// ofNode is JavaScript, which TypeScript is too.
var ofNode = []run{
	{"const x = 5; let y = 1; function f() { return x + y }", `"" ""`},
	{"console.log(x); console.error('e'); f()", `"5\n" "e\n" [6]*`},
	{"'text'", `"" "" [text]*`},
	{"await new Promise(r => setTimeout(() => r([1, {a: 2}]), 5))", `"" "" [[ 1, { a: 2 } ]]*`},
	{"const z = await 3; z + 1", `"" "" [4]*`},
	{"_ + z", `"" "" [7]*`},
	{"display(1, 'two'); undefined", `"" "" [1] [two]`},
	{"throw new TypeError('bad')", `"" "" TypeError: bad`},
	{"await Promise.reject(new RangeError('later'))", `"" "" RangeError: later`},
	{"console.log('a'); require('child_process').execSync('echo b', {stdio: 'inherit'}); console.log('c')", `"a\nb\nc\n" ""`},
	{"process.stdin.read()", `"" "" [null]*`},
	{"({[Symbol.for('nodejs.util.inspect.custom')]() { throw 1 }})", `"" ""`},
	{"throw {get stack() { throw 1 }, message: 'm'}", `"" "" Error: m`},
	{"'after'", `"" "" [after]*`},
	{"import util, {inspect as i} from 'util'\nimport * as path from \"path\"", `"" ""`},
	{"typeof util.format + i(1) + path.basename('/a/b')", `"" "" [function1b]*`},
	{"import none from 'node:nosuch'", `"" "" Error: No such built-in module: node:nosuch`},
	{"", `"" ""`},
}

// forgeNode makes put, which writes a message of the kernel's, and n, the number of the run.
const forgeNode = "var fs = require('fs'), key = fs.readFileSync('/proc/self/cmdline', 'utf8').split('\\0')[3]\n" +
	"var put = (text) => { fs.writeSync(4, '\\0' + key + ':' + text) }, n = 1\n"

func TestContextLanguages(t *testing.T) {
	for _, l := range tongues {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name, Env: []string{"A=a"}})
			count := 0
			try := func(code string, env ...string) api.CodeResult {
				t.Helper()
				count++
				res := runReq(d, c, api.CodeRequest{Code: code, Env: env})
				if res.ExecutionCount != count {
					t.Errorf("%s: execution count %d, want %d", code, res.ExecutionCount, count)
				}
				return res
			}
			for _, r := range l.runs {
				if got := summary(try(r.code)); got != r.want {
					t.Errorf("%s\n got %s\nwant %s", r.code, got, r.want)
				}
			}
			for _, r := range l.fails {
				res := try(r.code)
				if want := strings.ReplaceAll(r.want, "cell N", fmt.Sprint("cell ", count)); res.Failure == nil || res.Failure.Traceback != want || res.Exit.Code != 1 {
					t.Errorf("%s\n got %+v\nwant %s", r.code, res.Failure, want)
				}
			}
			if got := summary(try(l.env.code, "B=b c")); got != l.env.want {
				t.Errorf("%s: %s", l.env.code, got)
			}
			if got := summary(try(l.env.code)); got == l.env.want {
				t.Errorf("%s: another run's environment", l.env.code)
			}
			l.interrupts(t, d, c)
			l.floods(t, d, c)
			l.ends(t, d, c)
		})
	}
}

// interrupts interrupts runs, and then looks for what was there before. A run that waits for a
// program is interrupted when that runs: an interpreter that has begun to wait passes over a signal
// that comes before it.
func (l *tongue) interrupts(t *testing.T, d *daemontest.Running, c api.Context) {
	t.Helper()
	for _, code := range append(l.busy, l.waits) {
		asked := false
		var failure *api.CodeFailure
		streamed(t, d, api.CodeRequest{Code: l.says + "\n" + code}, c, func(e api.CodeEvent) {
			if e.Type == api.CodeStdout && !asked {
				asked = true
				if code == l.waits {
					untilRuns(d, c.Sandbox, "sleep", "1000")
				}
				d.Do("POST", "/v1/sandboxes/"+c.Sandbox+"/contexts/"+c.ID+"/interrupt", nil)
			}
			if e.Failure != nil {
				failure = e.Failure
			}
		})
		if failure == nil && code != l.waits || failure != nil && (failure.Name != "KeyboardInterrupt" && code != l.waits || strings.HasPrefix(failure.Name, "Context")) {
			t.Errorf("%s: %+v", code, failure)
		}
		if got := summary(runIn(d, c, l.after.code)); got != l.after.want {
			t.Errorf("after %s: %s", code, got)
		}
	}
}

// untilRuns waits until a program runs in a sandbox.
func untilRuns(d *daemontest.Running, sandbox string, argv ...string) {
	d.T.Helper()
	d.Await(func() string { return fmt.Sprintf("%q does not run", argv) }, func() bool {
		list := daemontest.Decode[api.ProcessList](d.T, d.Do("GET", "/v1/sandboxes/"+sandbox+"/processes", nil), http.StatusOK)
		return slices.ContainsFunc(list.Processes, func(p api.Process) bool { return slices.Equal(p.Argv, argv) })
	})
}

// floods has more output and larger results than fit into one message.
func (l *tongue) floods(t *testing.T, d *daemontest.Running, c api.Context) {
	t.Helper()
	var got strings.Builder
	var failure *api.CodeFailure
	streamed(t, d, api.CodeRequest{Code: l.lines}, c, func(e api.CodeEvent) {
		got.WriteString(e.Text)
		if e.Failure != nil {
			failure = e.Failure
		}
	})
	if n := strings.Count(got.String(), "\n"); n != 20000 || !strings.HasSuffix(got.String(), "\n20000\n") || failure != nil {
		t.Errorf("%d lines, %.300q, %+v", n, got.String(), failure)
	}
	if res := runIn(d, c, l.large); len(res.Results) != 1 || len(res.Results[0].Text) != 700000 {
		t.Errorf("%.200s", summary(res))
	}
	n := map[api.CodeEventType]int{}
	streamed(t, d, api.CodeRequest{Code: strings.Replace(l.flood, "$1", "head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2", 1)}, c, func(e api.CodeEvent) {
		n[e.Type] += len(e.Text) + len(e.Data)
	})
	if n[api.CodeStdout] != 300000 || n[api.CodeStderr] != 200000 {
		t.Error(n)
	}
}

// ends has the process end and break its protocol, which harms no other context.
func (l *tongue) ends(t *testing.T, d *daemontest.Running, c api.Context) {
	t.Helper()
	res := runIn(d, c, l.dies)
	if res.Failure == nil || res.Failure.Name != "ContextDied" || !strings.Contains(res.Failure.Value, "exit code 4") {
		t.Error(summary(res))
	}
	other := newContext(d, c.Sandbox, api.CreateContext{Language: l.name})
	runIn(d, other, l.runs[0].code)
	for _, code := range l.hostile {
		res := runReq(d, c, api.CodeRequest{Code: code, Timeout: testenv.HungAfter.Seconds()})
		if res.Failure == nil || res.Failure.Name != "ContextRestarted" {
			t.Errorf("%s: %.300s", code, summary(res))
		}
	}
	if got := summary(runIn(d, other, l.runs[1].code)); got != l.runs[1].want {
		t.Errorf("another context says %s", got)
	}
	if now := daemontest.Decode[api.Context](t, d.Do("GET", "/v1/sandboxes/"+c.Sandbox+"/contexts/"+c.ID, nil), http.StatusOK); now.State != api.ContextIdle {
		t.Errorf("%+v", now)
	}
}

// The creation of a context names the means to remove types that the image lacks.
func TestTypeScriptWithoutMeans(t *testing.T) {
	testenv.RequirePeer(t, "node")
	d, sb := contextBench(t)
	dir := t.TempDir() // programs see this machine's files
	const bare = "ln -s $(command -v node) $(command -v sh) $0 && node -p 'typeof require(\"module\").stripTypeScriptTypes'"
	made := daemontest.Decode[api.ExecResult](t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sh", "-c", bare, dir}}), http.StatusOK)
	rep := d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts", api.CreateContext{Language: "typescript", Env: []string{"PATH=" + dir}})
	switch {
	case made.Stdout == "function\n":
		if rep.Status != http.StatusCreated {
			t.Errorf("%d %s", rep.Status, rep.Body)
		}
	case rep.Status == http.StatusCreated, !strings.Contains(string(rep.Body), "typescript needs node 22.13, 23.2 or later, or esbuild"):
		t.Errorf("%d %s, %+v", rep.Status, rep.Body, made)
	}
}

// A context sees a library that was installed for the run, also when it has missed it before.
func TestInstalledLibraries(t *testing.T) {
	for _, l := range []struct{ name, peer, build, code, missing, want string }{
		{ // whose package manager is a script: the real one has this machine's directories
			"python", "python3", `mkdir bin; printf '%s\n' '#!/bin/sh' 'd=$(python3 -m site --user-site)' 'mkdir -p $d && echo "said = 1" >$d/sandlib.py' >bin/uv; chmod +x bin/uv`,
			"import sandlib\nsandlib.said", "ModuleNotFoundError", `"" "" [1]*`,
		},
		{
			"ruby", "gem", `echo "def say = 'said'" >say.rb
			echo "Gem::Specification.new { |s| s.name = 'sandlib'; s.version = '1.0'; s.summary = s.authors = 'x'; s.files = ['say.rb']; s.require_paths = ['.'] }" >sandlib.gemspec
			gem build sandlib.gemspec`,
			"require 'say'\nsay", "LoadError", `"" "" ["said"]*`,
		},
		{
			"javascript", "npm", `mkdir package; echo "module.exports = 'said'" >package/index.js
			echo '{"name":"sandlib","version":"1.0.0"}' >package/package.json; tar czf sandlib-1.0.0.tgz package`,
			"require('sandlib')", "Cannot find module", `"" "" [said]*`,
		},
		{
			"r", "Rscript", `mkdir -p sandlib/R; echo "say <- function() 'said'" >sandlib/R/say.R; echo 'export(say)' >sandlib/NAMESPACE
			printf '%s\n' 'Package: sandlib' 'Version: 1.0' 'Title: T' 'Description: T.' 'Author: A' 'Maintainer: A <a@example.com>' 'License: GPL-3' >sandlib/DESCRIPTION
			tar czf sandlib_1.0.tar.gz sandlib; mkdir lib`,
			"library(sandlib)\nsay()", "there is no package", `"" "" [[1] "said"]*`,
		},
	} {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			dir := t.TempDir() // programs see this machine's files
			env := []string{"HOME=" + dir, "PATH=" + dir + "/bin:" + os.Getenv("PATH"), "GEM_HOME=" + dir + "/gems", "R_LIBS=" + dir + "/lib"}
			made := daemontest.Decode[api.ExecResult](t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sh", "-c", l.build}, Cwd: dir}), http.StatusOK)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name, Cwd: dir, Env: env})
			if got := summary(runIn(d, c, l.code)); !strings.Contains(got, l.missing) {
				t.Fatalf("%s, %+v", got, made)
			}
			if got := summary(runReq(d, c, api.CodeRequest{Code: l.code, Libraries: []string{"sandlib"}, LibraryDir: dir})); got != l.want {
				t.Errorf("%s, want %s; %+v", got, l.want, made)
			}
		})
	}
}

// Each page that R's code draws is a result.
func TestRPlots(t *testing.T) {
	testenv.RequirePeer(t, "Rscript")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "r"})
	for _, plot := range []struct{ code, want string }{
		{"plot(1:10)", "700x500"},
		{"plot(1:10); plot(1:5); lines(1:3); 9", "[1] 9* 700x500 700x500"},
		{"par(mfrow = c(1, 2)); hist(c(1, 2, 2)); barplot(1:3)", "700x500"},
		{"invisible(par(mfrow = c(1, 2)))", ""},
		{"options(repr.plot.width = 4, repr.plot.height = 3, repr.plot.res = 50); plot.new(); dev.off()", "200x150 null device \n          1 *"},
		{"print.pic <- function(x, ...) plot.new()\nstructure(1, class = 'pic')", "200x150*"},
		{"f <- tempfile(); png(f); plot(1); invisible(dev.off()); file.exists(f)", "[1] TRUE*"},
		{"plot.new(); stop('late')", "200x150 Error"},
	} {
		res := runIn(d, c, plot.code)
		var got []string
		for _, v := range res.Results {
			one := v.Text
			if v.PNG != nil {
				size, err := png.DecodeConfig(bytes.NewReader(v.PNG))
				if err != nil {
					t.Fatalf("%s: %v", plot.code, err)
				}
				one = fmt.Sprintf("%dx%d", size.Width, size.Height)
			}
			if v.Main {
				one += "*"
			}
			got = append(got, one)
		}
		if res.Failure != nil {
			got = append(got, res.Failure.Name)
		}
		if got := strings.Join(got, " "); got != plot.want {
			t.Errorf("%s\n got %s\nwant %s", plot.code, got, plot.want)
		}
	}
}

// An interrupt that comes before the process has read the code is one of the run, and the context
// keeps its state.
func TestInterruptBeforeTheCode(t *testing.T) {
	for _, l := range []struct{ name, peer, set, endless, get, want string }{
		{"python", "python3", "x = 1", "while True: pass", "x", `"" "" [1]*`},
		{"bash", "bash", "x=1", "while :; do :; done", "echo $x", `"1\n" ""`},
		{"javascript", "node", "var x = 1", "for (;;);", "x", `"" "" [1]*`},
		{"typescript", "node", "var x = 1", "await new Promise(() => {}) as any", "x", `"" "" [1]*`},
		{"ruby", "ruby", "x = 1; nil", "loop {}", "x", `"" "" [1]*`},
		{"r", "Rscript", "x <- 1", "repeat {}", "x", `"" "" [[1] 1]*`},
	} {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name})
			runIn(d, c, l.set)
			for range 10 {
				streamed(t, d, api.CodeRequest{Code: l.endless}, c, func(e api.CodeEvent) {
					if e.Type == api.CodeStarted {
						d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID+"/interrupt", nil)
					}
				})
				if got := summary(runIn(d, c, l.get)); got != l.want {
					t.Fatal(got)
				}
			}
		})
	}
}

// An interpreter that waits for a program, and has passed over an interrupt, is interrupted again,
// and the context keeps its state. Here the program passes over the first one.
func TestInterruptIsRepeated(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo") // without a writer
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	program := `sh -c 'trap "trap - INT" INT; echo runs; while :; do read line <>` + fifo + `; done'`
	for _, l := range []struct{ name, peer, set, waits, get, want string }{
		{"bash", "bash", "x=1", program, "echo $x", `"1\n" ""`},
		{"r", "Rscript", "x <- 1", "invisible(system(" + strconv.Quote("exec "+program) + "))", "x", `"" "" [[1] 1]*`},
	} {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name})
			runIn(d, c, l.set)
			asked := false
			streamed(t, d, api.CodeRequest{Code: l.waits}, c, func(e api.CodeEvent) {
				if e.Type == api.CodeStdout && !asked {
					asked = true
					d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID+"/interrupt", nil)
				}
			})
			if got := summary(runIn(d, c, l.get)); got != l.want {
				t.Error(got)
			}
		})
	}
}

// silentNode makes node's kernel one that does not say that a run has begun, as older ones.
const silentNode = `var fs = require('fs'), write = fs.writeSync
fs.writeSync = (fd, data, at) => data[0] === 0 && data.includes(':b ') ? data.length : write(fd, data, at)
undefined`

// A kernel that an older daemon has started does not say when a run has begun. The next daemon
// interrupts its runs without that, and the context keeps its state.
func TestOlderNodeIsInterrupted(t *testing.T) {
	testenv.RequirePeer(t, "node")
	b := contextDaemons(t)
	descriptors := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	first := b.Start()
	sb := first.Create(withScratch(t))
	c := newContext(first, sb.ID, api.CreateContext{Language: "javascript"})
	if got := summary(runIn(first, c, silentNode+"\nvar x = 1")); got != `"" ""` {
		t.Fatal(got)
	}
	first.Cancel()
	first.Wait()
	stored, err := descriptors.StoredDescriptors(t.Context())
	if err != nil || len(stored) != 1 {
		t.Fatalf("%v, %v", stored, err)
	}
	defer servicetest.CloseFiles(stored[0].Files)
	if err := service.ForgetBegins(stored[0].Files); err != nil {
		t.Fatal(err)
	}
	second := b.Start()
	for _, code := range []string{"for (;;);", "await new Promise(() => {})"} {
		if got := summary(timedOut(second, c, 0.2, "now\n", "console.log('now')\n"+code)); got != `"now\n" "" KeyboardInterrupt: the run's timeout has ended` {
			t.Errorf("%s: %s", code, got)
		}
		if got := summary(runIn(second, c, "x")); got != `"" "" [1]*` {
			t.Error(got)
		}
	}
}

// misstatesNode makes node's kernel one that changes what it says of the beginning of a run. The
// message is in text.
func misstatesNode(write string) string {
	return "var fs = require('fs'), write = fs.writeSync, x = 1\n" + // once a process
		"fs.writeSync = (fd, data, at) => { const text = String(data); return text.startsWith('\\0') && text.includes(':b ') ? (" + write + ", data.length) : write(fd, data, at) }\nundefined"
}

// A kernel that says twice that a run has begun is interrupted as any other. One that says so of
// another run ends.
func TestKernelMisstatesTheBeginning(t *testing.T) {
	testenv.RequirePeer(t, "node")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "javascript"})
	runIn(d, c, misstatesNode("write(fd, text + text)"))
	for range 3 {
		if got := summary(timedOut(d, c, 0.1, "now\n", "console.log('now')\nfor (;;);")); got != `"now\n" "" KeyboardInterrupt: the run's timeout has ended` {
			t.Error(got)
		}
		if got := summary(runIn(d, c, "for (let i = 0; i < 1e7; i++) {}; x")); got != `"" "" [1]*` {
			t.Error(got)
		}
	}
	for _, other := range []string{"write(fd, text.replace(/:b \\d+/, ':b 999'))", "write(fd, text.replace(/:b \\d+/, ':b 0'))", "write(5, text)"} {
		c := newContext(d, sb.ID, api.CreateContext{Language: "javascript"})
		runIn(d, c, misstatesNode(other))
		if res := runReq(d, c, api.CodeRequest{Code: "for (;;);", Timeout: testenv.HungAfter.Seconds()}); res.Failure == nil || res.Failure.Name != "ContextRestarted" {
			t.Errorf("%s: %s", other, summary(res))
		}
	}
}

// A kernel that does not say that a run has begun is killed once the run's timeout has ended.
func TestKernelKeepsTheBeginningToItself(t *testing.T) {
	testenv.RequirePeer(t, "node")
	b := contextDaemons(t)
	b.Options.InterruptGrace = time.Millisecond
	d := b.Start()
	c := newContext(d, d.Create(withScratch(t)).ID, api.CreateContext{Language: "javascript"})
	runIn(d, c, silentNode)
	if got := summary(runIn(d, c, "'whole'")); got != `"" "" [whole]*` {
		t.Error(got)
	}
	if res := runReq(d, c, api.CodeRequest{Code: "for (;;);", Timeout: 0.2}); res.Failure == nil || res.Failure.Name != "ContextRestarted" || !strings.Contains(res.Failure.Value, "did not end after its timeout") {
		t.Error(summary(res))
	}
}

// Whenever an interrupt comes, the run ends by it or by itself, and the context keeps its state. So
// it does while node takes its handler of signals and gives it back, around each piece of code.
func TestInterruptsAtAnyInstant(t *testing.T) {
	testenv.RequirePeer(t, "node")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "javascript"})
	if got := summary(runIn(d, c, "var n = 0, heard = 0")); got != `"" ""` {
		t.Fatal(got)
	}
	const most = 2000 // microseconds
	rnd := rand.New(rand.NewPCG(1, 2))
	interrupted := 0
	for i := range testenv.Rounds(300, 10_000) {
		code := []string{
			"for (const end = Date.now() + 2; Date.now() < end;); void n++",
			"await null; for (const end = Date.now() + 2; Date.now() < end;); void n++",
			"await new Promise((done) => setTimeout(done, 1)); void n++",
			"for (;;);",
			"await new Promise(() => {})",
		}[i%5]
		endless := i%5 >= 3
		res := runReq(d, c, api.CodeRequest{Code: code, Timeout: 0.001 + float64(rnd.IntN(most))/1e6})
		if res.Failure != nil {
			interrupted++
		}
		if res.ExecutionCount != i+2 || res.Logs.Stdout+res.Logs.Stderr != "" || len(res.Results) != 0 || res.Failure != nil && res.Failure.Name != "KeyboardInterrupt" {
			t.Fatalf("run %d, %s: %s", res.ExecutionCount, code, summary(res))
		}
		if endless && res.Failure == nil {
			t.Fatalf("%s: it has ended without an interrupt", code)
		}
	}
	if interrupted == 0 {
		t.Error("no run was interrupted")
	}
	// A listener of the user's keeps no interrupt from code, before it is removed and after.
	for _, run := range []run{
		{"await new Promise(setImmediate); void 0", `"" ""`}, // hears what has come late
		{"const hear = () => heard++; process.on('SIGINT', hear); void 0", `"" ""`},
		{"for (;;);", `"" "" KeyboardInterrupt: the run's timeout has ended`},
		{"await new Promise(() => {})", `"" "" KeyboardInterrupt: the run's timeout has ended`},
		{"process.removeListener('SIGINT', hear); void 0", `"" ""`},
		{"for (;;);", `"" "" KeyboardInterrupt: the run's timeout has ended`},
		{"typeof n + heard", `"" "" [number1]*`},
	} {
		req := api.CodeRequest{Code: run.code}
		if strings.Contains(run.want, "timeout") {
			req.Timeout = 0.2
		}
		if got := summary(runReq(d, c, req)); got != run.want {
			t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
		}
	}
}

// The message of an exception is shortened, in bytes, and the context keeps its state. The same is
// done to the class's name.
func TestLongMessages(t *testing.T) {
	for _, l := range []struct{ name, peer, set, raise, get, want string }{
		{"python", "python3", "x = 1", "raise type('é' * 250000, (ValueError,), {})('日' * 250000)", "x", `"" "" [1]*`},
		{"ruby", "ruby", "x = 1; nil", "raise '日' * 250000", "x", `"" "" [1]*`},
		{"javascript", "node", "var x = 1", "throw Object.assign(new Error('日'.repeat(250000)), {name: 'é'.repeat(20000000)})", "x", `"" "" [1]*`},
		{"r", "Rscript", "x <- 1", "stop(simpleError(strrep('🐎', 250000)))", "x", `"" "" [[1] 1]*`},
	} {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name})
			runIn(d, c, l.set)
			if f := runIn(d, c, l.raise).Failure; f == nil || len(f.Value) < 200000 || len(f.Value) > 350<<10 || strings.HasPrefix(f.Name, "Context") {
				t.Errorf("%.200s", fmt.Sprintf("%+v", f))
			}
			if got := summary(runIn(d, c, l.get)); got != l.want {
				t.Error(got)
			}
		})
	}
}

// Forks that come back to the process of the context end as interpreters of their own would. No
// object that refuses to be shown ends the context, nor does code that closes all connections.
func TestOddCode(t *testing.T) {
	for _, l := range []struct {
		name, peer string
		runs       []run
	}{
		{"python", "python3", []run{
			{"import os, sys\npid = os.fork()\nif pid == 0:\n    print('child', end='')\n    sys.exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", `"child" "" [7]*`},
			{"pid = os.fork()\nif pid == 0:\n    raise ValueError('bad')\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", `"" "Traceback (most recent call last):\n  File \"<cell 2>\", line 3, in <module>\n    raise ValueError('bad')\nValueError: bad\n" [1]*`},
			{"pid = os.fork()\nif pid == 0:\n    sys.exit('said')\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", `"" "said\n" [1]*`},
			{"pid = os.fork()\npid and os.waitpid(pid, 0)[1]", `"0\n" "" [0]*`},
			{"class M(type):\n    __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M): pass\nraise E", `"" "" Exception: `},
		}},
		{"ruby", "ruby", []run{
			{"(print 'child'; exit 7) unless pid = fork; Process.wait2(pid)[1].exitstatus", `"child" "" [7]*`},
			{"raise 'bad' unless pid = fork; Process.wait2(pid)[1].exitstatus", "\"\" \"<cell 2>:1:in `<main>': bad (RuntimeError)\\n\" [1]*"},
			{"pid = fork; pid ? Process.wait2(pid)[1].exitstatus : nil", `"" "" [0]*`},
			{"class Odd < StandardError; def message = raise(Exception, 'no'); end; raise Odd", `"" "" Odd: `},
			{"class None < StandardError; def self.name = raise(Exception, 'no'); end; raise None, 'm'", `"" "" Error: m`},
			{"class Out < SystemExit; def status = 'odd'; end; raise Out, 'm'", `"" "" Out: m`},
		}},
		{"r", "Rscript", []run{
			{"odd <- function(...) stop(structure(class = c('odd', 'error', 'condition'), list(...)))", `"" ""`},
			{"f <- file(tempfile(), 'w'); sink(f); closeAllConnections(); tryCatch(isOpen(f), error = function(e) 'closed')", `"" "" [[1] "closed"]*`},
			{"odd(message = NULL, call = NULL)", `"" "" odd: `},
			{"odd(message = c('a', 'b'), call = NULL)", `"" "" odd: a` + "\nb"},
			{"stop(structure(class = c('SystemExit', 'error', 'condition'), list(message = 'm', status = 'odd')))", `"" "" SystemExit: m`},
			{"stop(simpleError('\\xe9'))", `"" "" Error: <e9>`},
		}},
		{"javascript", "node", []run{
			{"throw {get code() { throw 1 }}", `"" "" Error: { code: [Getter] }`},
			{"throw {get err() { throw 1 }, message: 'm'}", `"" "" Error: m`},
			{"throw {err: 1, message: 'm'}", `"" "" Error: m`},
			{"throw new Proxy({}, {get() { throw 1 }, getPrototypeOf() { throw 1 }})", `"" "" Error: 1`},
			{"await new Promise((done) => process.stdout.end('x', done))", `"x" ""`},
			{"console.log('y'); process.stderr.end('707a', 'hex'); void 0", `"y\n" "pz"`},
			{"var {Readable, promises: {pipeline}} = require('stream'); await pipeline(Readable.from(['a', 'b']), process.stdout); console.error('c')", `"ab" "c\n"`},
			{"await pipeline(Readable.from(['d']), process.stdout); process.stdout.end('e'); process.stdout.end('f'); console.log('g')", `"defg\n" ""`},
			{"process.stdout.destroy(); console.log('h')", `"h\n" ""`},
			{"await new Promise((done) => Readable.from(['i']).on('end', () => done()).pipe(process.stdout))", `"i" ""`},
			{"Object.preventExtensions(globalThis); void 0", `"" ""`},
			{"const own = 5; own + 1", `"" "" [6]*`},
			{"nosuch()", `"" "" ReferenceError: nosuch is not defined`},
			{"await new Promise((done) => setTimeout(done, 1, own))", `"" "" [5]*`},
		}},
	} {
		t.Run(l.name, func(t *testing.T) {
			testenv.RequirePeer(t, l.peer)
			d, sb := contextBench(t)
			c := newContext(d, sb.ID, api.CreateContext{Language: l.name})
			for i, r := range l.runs {
				res := runIn(d, c, r.code)
				if got := summary(res); got != r.want || res.ExecutionCount != i+1 {
					t.Errorf("%s\n got %s\nwant %s", r.code, got, r.want)
				}
			}
		})
	}
}
