package service_test

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestRubyContext(t *testing.T) {
	testenv.RequirePeer(t, "ruby")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "rb", Env: []string{"A=a"}})
	for _, run := range []struct{ code, want string }{
		{"x = 5; def f(n) = 1 / n", `"" "" [:f]*`},
		{"puts x; warn 'e'; f(1) + x", `"5\n" "e\n" [6]*`},
		{"'text'", `"" "" ["text"]*`},
		{"_ + 's'", `"" "" ["texts"]*`},
		{"nil", `"" ""`},
		{"display(1, 'two'); nil", `"" "" [1] ["two"]`},
		{"raise ArgumentError, 'bad'", `"" "" ArgumentError: bad`},
		{"raise 'žluť'", `"" "" RuntimeError: žluť`},
		{"f(0)", `"" "" ZeroDivisionError: divided by 0`},
		{"puts 'a'; system('echo b; echo c >&2'); puts 'd'", "\"a\\nb\\nd\\n\" \"c\\n\""},
		{"gets", `"" ""`},
		{"exit 3", `"" "" SystemExit: exit`},
		{"abort 'said'", "\"\" \"said\\n\" SystemExit: said"},
		{"return 7", `"" ""`},
		{"throw :x", `"" "" UncaughtThrowError: uncaught throw :x`},
		{"ENV['A']", `"" "" ["a"]*`},
		{"def (o = Object.new).inspect = raise('no'); o", `"" "" RuntimeError: no`},
		{"fork { puts 'child' }; Process.wait; nil", `"child\n" ""`},
		{"fork; Process.wait rescue 0; nil", `"" ""`},
		{"$stdout.sync = false; print 'held'; $stdout = StringIO.new; puts 'lost'", `"held" ""`},
		{"$stdout = STDOUT; print \"\\0\"; nil", `"\x00" ""`},
		{"", `"" ""`},
	} {
		if got := summary(runIn(d, c, run.code)); got != run.want {
			t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
		}
	}
	res := runIn(d, c, "def g\n  nosuch()\nend\ng")
	t.Log(res.Failure.Traceback)
	res = runIn(d, c, "x = (")
	t.Logf("%+v", res.Failure)
	res = runIn(d, c, "puts ENV['B'], ENV['A']")
	for _, code := range []string{"sleep 1000", "loop {}", "x = 0; x += 1 while true", "system('sleep 1000')", "`sleep 1000`", "Thread.new { sleep }.join", "/(a*)*b\\1/ =~ 'a' * 100"} {
		res := runReq(d, c, api.CodeRequest{Code: code, Timeout: 0.3})
		if res.Failure == nil || !res.Exit.Timeout || strings.HasPrefix(res.Failure.Name, "Context") {
			t.Errorf("%s: %.200s %+v", code, summary(res), res.Exit)
		}
	}
}

func TestTypeScriptContext(t *testing.T) {
	testenv.RequirePeer(t, "node")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "ts"})
	for _, run := range []struct{ code, want string }{
		{"interface P { x: number }\n\nconst p: P = {x: 5}", `"" ""`},
		{"console.log(p.x as number); p.x + 1", `"5\n" "" [6]*`},
		{"'text'", `"" "" [text]*`},
		{"enum E { A = 3, B }\nE.B", `"" "" [4]*`},
		{"await Promise.resolve<number>(9)", `"" "" [9]*`},
		{"1", `"" "" [1]*`},
		{"", `"" ""`},
	} {
		if got := summary(runIn(d, c, run.code)); got != run.want {
			t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
		}
	}
	for _, code := range []string{"interface Q {\n  y?: {z: number}\n}\nenum F { A }\nfunction g(q: Q): number {\n\n  return q.y!.z\n}\n\ng({})", "let w: number = = 2", "let w: number = ("} {
		res := runIn(d, c, code)
		if res.Failure == nil {
			t.Fatal("no failure")
		}
		t.Logf("%s|%s|%s", res.Failure.Name, res.Failure.Value, res.Failure.Traceback)
	}
}

func TestRContext(t *testing.T) {
	testenv.RequirePeer(t, "Rscript")
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "R", Env: []string{"A=a"}})
	for _, run := range []struct{ code, want string }{
		{"x <- 5; f <- function(n) if (n == 0) stop('zero') else n", `"" ""`},
		{"cat(x, '\\n'); message('e'); f(1) + x", `"5 \n" "e\n" [[1] 6]*`},
		{"'text'", "\"\" \"\" [[1] \"text\"]*"},
		{"1; invisible(2); 3; y <- 4", `"" "" [[1] 1] [[1] 3]`},
		{"display(1, 'two')", "\"\" \"\" [[1] 1] [[1] \"two\"]"},
		{"f(0)", `"" "" Error: zero`},
		{"stop('žluť 🐎')", `"" "" Error: žluť 🐎`},
		{"'žluť 🐎'", "\"\" \"\" [[1] \"žluť 🐎\"]*"},
		{"cat('a\\n'); invisible(system('echo b; echo c >&2')); cat('d\\n')", "\"a\\nb\\nd\\n\" \"c\\n\""},
		{"readline()", "\"\\n\" \"\" [[1] \"\"]*"},
		{"readLines(file('stdin'))", `"" "" [character(0)]*`},
		{"q(status = 3)", `"" "" SystemExit: 3`},
		{"Sys.getenv('A')", "\"\" \"\" [[1] \"a\"]*"},
		{"warning('careful')", "\"\" \"Warning: careful\\n\""},
		{"sink('/dev/null'); cat('lost'); 7", `"" "" [[1] 7]*`},
		{"sink(); sink(stdout(), type = 'message'); message('there')", `"there\n" ""`},
		{"sink(type = 'message'); NULL", `"" "" [NULL]*`},
		{"invisible(parallel::mclapply(1:2, function(i) i)); ls()", "\"\" \"\" [[1] \"f\" \"x\" \"y\"]*"},
		{"x = (", ``},
		{"cat('a\n  \tb'); cat('\\\\', \"\\\"\", '%s')", `"a\n  \tb\\ \" %s" ""`},
		{"", `"" ""`},
	} {
		if got := summary(runIn(d, c, run.code)); got != run.want {
			t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
		}
	}
	res := runIn(d, c, "g <- function(x) {\n  y <- x\n  nosuch(y)\n}\n\ng(1)")
	t.Log(res.Failure.Traceback)
	res = runIn(d, c, "data.frame(a = c(1.5, NA), b = c('x', '<y>'))")
	t.Logf("%+v", res.Results[0])
	for _, code := range []string{"plot(1:10)", "x <- 1\nplot(1:10); plot(1:5); lines(1:3); 9", "par(mfrow = c(1, 2)); hist(c(1, 2, 2)); barplot(1:3)", "invisible(par(mfrow = c(1, 2)))"} {
		res = runIn(d, c, code)
		t.Log(summary(res))
		for _, r := range res.Results {
			t.Log(len(r.PNG), r.Main)
		}
	}
	for _, code := range []string{"Sys.sleep(1000)", "while (TRUE) {}", "repeat x <- x + 1", "system('sleep 1000')", "for (i in 1:1e9) sqrt(i)"} {
		res := runReq(d, c, api.CodeRequest{Code: code, Timeout: 0.3})
		if res.Failure == nil || !res.Exit.Timeout || strings.HasPrefix(res.Failure.Name, "Context") {
			t.Errorf("%s: %.200s %+v", code, summary(res), res.Exit)
		}
	}
}
