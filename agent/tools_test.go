package agent

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm"
)

func call(name string, args any) llm.ToolCall {
	if s, ok := args.(string); ok {
		return llm.ToolCall{ID: "1", Name: name, Arguments: s}
	}
	b, err := json.Marshal(args)
	if err != nil {
		panic(err)
	}
	return llm.ToolCall{ID: "1", Name: name, Arguments: string(b)}
}

func bashCall(command string) llm.ToolCall {
	return call(ToolBash, map[string]string{"command": command})
}

type args = map[string]any

// runCall parses and runs a call without a policy.
func runCall(ctx context.Context, box *toolbox, c llm.ToolCall) (observation, error) {
	a, err := parse(c)
	if err != nil {
		return refusal(c.Name, err)
	}
	return box.run(ctx, a)
}

func observe(t *testing.T, box *toolbox, c llm.ToolCall) observation {
	t.Helper()
	obs, err := runCall(t.Context(), box, c)
	if err != nil {
		t.Fatalf("%s %s: %v", c.Name, c.Arguments, err)
	}
	if !utf8.ValidString(obs.text) {
		t.Errorf("the observation is not valid UTF-8: %q", obs.text)
	}
	return obs
}

func TestBashObservation(t *testing.T) {
	box, _, _ := newToolbox(t)
	for _, tc := range []struct{ name, command, want string }{
		{"output", "echo hi", "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\nhi\n"},
		{"no output", "true", "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\n"},
		{"both streams", "printf out; echo err >&2", "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\nout\n[STDERR]\nerr\n"},
		{"blank stderr", "echo >&2", "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\n"},
		{"exit code", "exit 3", "Exit code: Error: Exit code 3\nExecution output of [execute_bash]:\n[STDOUT]\n"},
		{"signal", "kill -9 $$", "Exit code: Error: Exit code 137 (killed by SIGKILL)\nExecution output of [execute_bash]:\n[STDOUT]\n"},
		{"colours", `printf '\033[1;31mred\033[0m \033]0;title\007a\r\nb'`, "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\nred a\nb"},
		{"not text", `printf 'a\377b\000c'`, "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\na\uFFFDbc"},
		{"metacharacters", `echo '$(x) ;"' "\` + "`" + `"`, "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\n$(x) ;\" `\n"},
		{"no stdin", "cat; echo end", "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\nend\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			obs := observe(t, box, bashCall(tc.command))
			if diff := cmp.Diff(tc.want, obs.text); diff != "" || obs.failed {
				t.Errorf("failed=%v (-want +got):\n%s", obs.failed, diff)
			}
		})
	}
}

func TestBashTimeoutKeepsWhatWasWritten(t *testing.T) {
	box, s, dir := newToolbox(t)
	box.timeout = 300 * time.Millisecond
	// The timeout ends when both were written, independent of this machine's speed.
	written := filepath.Join(dir, "written")
	if err := syscall.Mkfifo(written, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(written, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	expire := make(chan struct{})
	s.expire = expire
	go func() {
		defer close(expire)
		_, _ = f.Read(make([]byte, 1)) // fails once f is closed
	}()
	obs := observe(t, box, bashCall("echo before; echo problem >&2; echo > written; sleep 60"))
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"Exit code: -1\n", "[STDOUT]\nbefore\n", "[STDERR]\nproblem\n", "took too long to execute (>0.3s)"} {
		if !strings.Contains(obs.text, want) {
			t.Errorf("%q is missing in %q", want, obs.text)
		}
	}
}

func TestBashWithoutBash(t *testing.T) {
	box, s, _ := newToolbox(t)
	s.missing = map[string]bool{"bash": true}
	for range 2 {
		if obs := observe(t, box, bashCall("echo hi")); !strings.HasSuffix(obs.text, "\nhi\n") {
			t.Errorf("got %q", obs.text)
		}
	}
	var used []string
	for _, e := range s.execs {
		used = append(used, e.Argv[0])
	}
	if diff := cmp.Diff([]string{"bash", "sh", "sh"}, used); diff != "" {
		t.Errorf("shells (-want +got):\n%s", diff)
	}
}

// A policy reads lines as bash does. In sh this one would run echo.
func TestBashWithoutBashUnderAPolicy(t *testing.T) {
	box, s, _ := newToolbox(t)
	s.missing, box.ruled = map[string]bool{"bash": true}, true
	for range 2 {
		if obs := observe(t, box, bashCall("[[ a || echo ]]")); !strings.Contains(obs.text, "its sh reads this command otherwise") {
			t.Errorf("got %q", obs.text)
		}
	}
	if obs := observe(t, box, bashCall("echo hi")); !strings.HasSuffix(obs.text, "\nhi\n") {
		t.Errorf("got %q", obs.text)
	}
	var used []string
	for _, e := range s.execs {
		used = append(used, e.Argv[0])
	}
	if diff := cmp.Diff([]string{"bash", "sh"}, used); diff != "" {
		t.Errorf("shells (-want +got):\n%s", diff)
	}
}

// One argument may have 128 KiB; LLM-in-Sandbox's tools fail there with "argument list too long".
func TestLongCommandAndFile(t *testing.T) {
	box, _, dir := newToolbox(t)
	long := strings.Repeat("x", 300<<10)
	obs := observe(t, box, bashCall("printf %s "+long+" | wc -c"))
	if !strings.HasSuffix(obs.text, "\n"+strconv.Itoa(len(long))+"\n") {
		t.Errorf("got %q", obs.text)
	}
	path := filepath.Join(dir, "big")
	content := strings.Repeat("line\n", 1<<18)
	if obs := observe(t, box, call(ToolEditor, args{"command": "create", "path": path, "file_text": content})); obs.failed {
		t.Fatal(obs.text)
	}
	if obs := observe(t, box, call(ToolEditor, args{"command": "insert", "path": path, "insert_line": 5, "new_str": "new"})); obs.failed {
		t.Fatal(obs.text)
	}
	got, err := os.ReadFile(path)
	if err != nil || string(got) != content[:25]+"new\n"+content[25:] {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
}

func TestLongOutputKeepsBothEnds(t *testing.T) {
	box, _, _ := newToolbox(t)
	for name, command := range map[string]string{
		"many lines":        "echo FIRST; seq 1 200000; echo LAST",
		"one line":          "printf FIRST; head -c 2000000 /dev/zero | tr '\\0' x; echo LAST",
		"wide characters":   "printf FIRST; yes '日本語テキスト' | head -n 40000 | tr -d '\\n'; echo LAST",
		"just too long":     "echo FIRST; seq 1 4000; echo LAST",
		"more than capture": "echo FIRST; seq 1 60000; echo LAST",
	} {
		t.Run(name, func(t *testing.T) {
			obs := observe(t, box, bashCall(command))
			if !strings.Contains(obs.text, "[STDOUT]\nFIRST") || !strings.HasSuffix(obs.text, "LAST\n") || !strings.Contains(obs.text, truncated+"\n(") {
				t.Errorf("got %.100q ... %q", obs.text, obs.text[len(obs.text)-100:])
			}
			if len(obs.text) > defaultOutputLimit+1000 || len(obs.text) < defaultOutputLimit/2 {
				t.Errorf("%d bytes are shown", len(obs.text))
			}
			if strings.Contains(obs.text, "\uFFFD") {
				t.Error("a character was cut in two")
			}
		})
	}
}

func TestEndsWriter(t *testing.T) {
	const text = "abcdefghijklmnopqrstuvwxyz"
	for limit := 2; limit < 60; limit += 2 {
		for piece := 1; piece <= len(text); piece++ {
			e := newHeadTail(limit)
			for at := 0; at < len(text); at += piece {
				if _, err := e.Write([]byte(text[at:min(len(text), at+piece)])); err != nil {
					t.Fatal(err)
				}
			}
			want, lost := text, int64(0)
			if len(text) > limit {
				want, lost = text[:limit/2]+text[len(text)-limit/2:], int64(len(text)-limit)
			}
			if got := string(e.bytes()); got != want || e.lost != lost {
				t.Fatalf("limit %d, pieces of %d: %q, %d lost; want %q, %d", limit, piece, got, e.lost, want, lost)
			}
		}
	}
}

func TestBadCallsAreAnswered(t *testing.T) {
	box, _, dir := newToolbox(t)
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := filepath.Join(dir, "f")
	for _, tc := range []struct {
		name string
		call llm.ToolCall
		want string
	}{
		{"unknown tool", call("python", "{}"), "Unknown action: python"},
		{"no name", call("", "{}"), "Unknown action"},
		{"not JSON", call(ToolBash, `{"command":`), "cannot read the arguments"},
		{"a string", call(ToolBash, `"ls"`), "must be one JSON object"},
		{"an array", call(ToolBash, `["ls"]`), "must be one JSON object"},
		{"two objects", call(ToolBash, `{"command":"ls"}{"command":"ls"}`), "more text after"},
		{"missing", call(ToolBash, `{}`), "No command provided"},
		{"nothing", call(ToolBash, ``), "No command provided"},
		{"null", call(ToolBash, `{"command":null}`), "No command provided"},
		{"blank", call(ToolBash, `{"command":" \n"}`), "No command provided"},
		{"wrong type", call(ToolBash, `{"command":["ls"]}`), "`command` has the wrong type: got array"},
		{"extra", call(ToolBash, `{"command":"ls","cwd":"/"}`), `unknown argument "cwd"`},
		{"NUL", call(ToolBash, `{"command":"ls\u0000"}`), "NUL"},
		{"extra for submit", call(ToolSubmit, `{"answer":"42"}`), `unknown argument "answer"`},
		{"huge", call(ToolBash, strings.Repeat("[", 1<<20)), "must be one JSON object"},
		{"huge unknown", call(ToolBash, `{"`+strings.Repeat("x", 1<<20)+`":1}`), "unknown argument"},
		{"no editor command", call(ToolEditor, args{"path": f}), "`command` is required"},
		{"unknown editor command", call(ToolEditor, args{"command": "undo_edit", "path": f}), "unknown command"},
		{"no path", call(ToolEditor, args{"command": "view"}), "`path` is required"},
		{"NUL in path", call(ToolEditor, args{"command": "view", "path": "a\x00b"}), "NUL"},
		{"long path", call(ToolEditor, args{"command": "view", "path": strings.Repeat("/a", 4000)}), "longer than"},
		{"missing file", call(ToolEditor, args{"command": "view", "path": "/no/such"}), "The path /no/such does not exist"},
		{"edit a directory", call(ToolEditor, args{"command": "str_replace", "path": dir, "old_str": "x", "new_str": "y"}), "not a regular file"},
		{"create over a directory", call(ToolEditor, args{"command": "create", "path": dir, "file_text": "x"}), "cannot write"},
		{"create without text", call(ToolEditor, args{"command": "create", "path": f}), "`file_text` is required"},
		{"replace nothing", call(ToolEditor, args{"command": "str_replace", "path": f, "old_str": ""}), "`old_str` is required"},
		{"foreign argument", call(ToolEditor, args{"command": "create", "path": f, "file_text": "x", "insert_line": 3}), "`insert_line` does not go with"},
		{"insert nowhere", call(ToolEditor, args{"command": "insert", "path": f, "new_str": "x"}), "`insert_line` is required"},
		{"insert nothing", call(ToolEditor, args{"command": "insert", "path": f, "insert_line": 1}), "`new_str` is required"},
		{"insert too far", call(ToolEditor, args{"command": "insert", "path": f, "insert_line": 3, "new_str": "x"}), "between 0 and 2"},
		{"insert before", call(ToolEditor, args{"command": "insert", "path": f, "insert_line": -1, "new_str": "x"}), "between 0 and 2"},
		{"line as text", call(ToolEditor, `{"command":"insert","path":"f","insert_line":"1","new_str":"x"}`), "integer"},
		{"line with fraction", call(ToolEditor, `{"command":"insert","path":"f","insert_line":1.5,"new_str":"x"}`), "integer"},
		{"range of one", call(ToolEditor, args{"command": "view", "path": f, "view_range": []int{1}}), "two integers"},
		{"range from 0", call(ToolEditor, args{"command": "view", "path": f, "view_range": []int{0, 1}}), "between 1 and 2"},
		{"range beyond", call(ToolEditor, args{"command": "view", "path": f, "view_range": []int{1, 3}}), "has 2 lines"},
		{"range backwards", call(ToolEditor, args{"command": "view", "path": f, "view_range": []int{2, 1}}), "must not come before"},
		{"range of a directory", call(ToolEditor, args{"command": "view", "path": dir, "view_range": []int{1, 2}}), "not a regular file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			obs := observe(t, box, tc.call)
			if !obs.failed || !strings.Contains(obs.text, tc.want) {
				t.Errorf("failed=%v: %.300q, want ...%q", obs.failed, obs.text, tc.want)
			}
			if len(obs.text) > 2000 {
				t.Errorf("the answer has %d bytes", len(obs.text))
			}
		})
	}
	if got, err := os.ReadFile(f); err != nil || string(got) != "one\ntwo\n" {
		t.Errorf("the file is now %q, %v", got, err)
	}
}

func TestView(t *testing.T) {
	box, _, dir := newToolbox(t)
	write := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	five := write("five.txt", "one\n\ttwo\nthree\nfour\nfive")
	head := func(path string) string {
		return "Execution output of [str_replace_editor]:\nHere's the result of running `cat -n` on " + path + ":\n"
	}
	for _, tc := range []struct {
		name, path string
		viewRange  any
		want       string
	}{
		{"whole", five, nil, head(five) + "     1\tone\n     2\t\ttwo\n     3\tthree\n     4\tfour\n     5\tfive\n"},
		{"range", five, []int{2, 3}, head(five) + "     2\t\ttwo\n     3\tthree\n"},
		{"to the end", five, []int{4, -1}, head(five) + "     4\tfour\n     5\tfive\n"},
		{"floats", five, json.RawMessage(`[5.0, 5.0]`), head(five) + "     5\tfive\n"},
		{"empty range", five, []int{}, head(five) + "     1\tone\n     2\t\ttwo\n     3\tthree\n     4\tfour\n     5\tfive\n"},
		{"relative", "five.txt", []int{1, 1}, head(five) + "     1\tone\n"},
		{"empty file", write("empty", ""), nil, head(filepath.Join(dir, "empty")) + "(the file is empty)\n"},
		{"Latin-1", write("latin1.txt", "caf\xe9\n"), nil, head(filepath.Join(dir, "latin1.txt")) + "     1\tcaf\uFFFD\n"},
		{"odd name", write("a b;$(touch x)'.txt", "x\n"), nil, head(filepath.Join(dir, "a b;$(touch x)'.txt")) + "     1\tx\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": tc.path, "view_range": tc.viewRange}))
			if diff := cmp.Diff(tc.want, obs.text); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}

	t.Run("binary", func(t *testing.T) {
		obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": write("bin", "\x7fELF\x00\x00")}))
		if !obs.failed || !strings.Contains(obs.text, "binary file (6 bytes)") {
			t.Errorf("got %q", obs.text)
		}
	})
	t.Run("long", func(t *testing.T) {
		var b strings.Builder
		for i := 1; i <= 10000; i++ {
			b.WriteString("line " + strconv.Itoa(i) + "\n")
		}
		obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": write("long", b.String())}))
		for _, want := range []string{"     1\tline 1\n", " 10000\tline 10000\n", "left out for saving context; see them with view_range"} {
			if !strings.Contains(obs.text, want) {
				t.Errorf("%q is missing", want)
			}
		}
		if len(obs.text) > defaultOutputLimit+1000 {
			t.Errorf("%d bytes are shown", len(obs.text))
		}
	})
	t.Run("one long line", func(t *testing.T) {
		obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": write("min.js", "FIRST"+strings.Repeat("ä", 1<<20)+"LAST")}))
		if !strings.Contains(obs.text, "FIRST") || !strings.HasSuffix(obs.text, "LAST\n") || len(obs.text) > 5000 {
			t.Errorf("%d bytes are shown", len(obs.text))
		}
	})
	t.Run("directory", func(t *testing.T) {
		root := filepath.Join(dir, ".hidden", "tree")
		for _, name := range []string{"a.c", "sub/b", "sub/deep/c", ".secret/d", "sub/.x", "new\nline"} {
			write(filepath.Join(".hidden", "tree", name), "")
		}
		if err := os.Symlink("tree", filepath.Join(dir, ".hidden", "link")); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{root, filepath.Join(dir, ".hidden", "link"), root + "/"} {
			obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": path}))
			for _, want := range []string{"2 levels deep in " + path, "/a.c\n", "/sub\n", "/sub/b\n", "/sub/deep\n", `new\nline`} {
				if !strings.Contains(obs.text, want) {
					t.Errorf("%q is missing in %q", want, obs.text)
				}
			}
			listed := strings.ReplaceAll(obs.text, dir, "") // the name of the test's directory may hold anything
			for _, never := range []string{"/c\n", "secret", ".x"} {
				if strings.Contains(listed, never) {
					t.Errorf("%q is in %q", never, obs.text)
				}
			}
		}
	})
	t.Run("large directory", func(t *testing.T) {
		for i := range 150 {
			write(filepath.Join("many", strconv.Itoa(i)), "")
		}
		obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": filepath.Join(dir, "many")}))
		if n := strings.Count(obs.text, "/many/"); n != maxListed || !strings.Contains(obs.text, "and more") {
			t.Errorf("%d entries are shown: %q", n, obs.text)
		}
	})
}

// Files keep everything but the requested change: tabs, line ends, the last newline, invalid UTF-8,
// mode and links.
func TestEditsAreExact(t *testing.T) {
	replace := func(old, replacement string) args {
		return args{"command": "str_replace", "old_str": old, "new_str": replacement}
	}
	insert := func(line int, text string) args {
		return args{"command": "insert", "insert_line": line, "new_str": text}
	}
	for _, tc := range []struct {
		name, before string
		edit         args
		after, shows string
	}{
		{"tabs stay", "all:\n\techo a\n\techo b\n", replace("echo a", "echo c"), "all:\n\techo c\n\techo b\n", "     2\t\techo c\n"},
		{"no newline at the end stays", "a\nb", replace("b", "c"), "a\nc", "     2\tc\n"},
		{"newline at the end stays", "a\nb\n", replace("b", "c"), "a\nc\n", "     2\tc\n"},
		{"CRLF stays", "a\r\nb\r\n", replace("b", "c"), "a\r\nc\r\n", "c"},
		{"not UTF-8 stays", "caf\xe9 x\n", replace("x", "y"), "caf\xe9 y\n", "y"},
		{"delete", "a\nb\nc\n", args{"command": "str_replace", "old_str": "b\n"}, "a\nc\n", "     2\tc\n"},
		{"delete all", "abc", replace("abc", ""), "", "(the file is empty)"},
		{"pattern is text", "a.*b (x)\n", replace(".*b (", "$1\\0 ("), "a$1\\0 (x)\n", "a$1"},
		{"several lines", "1\n2\n3\n4\n5\n6\n7\n8\n9\n", replace("5\n", "five\nfunf\n"), "1\n2\n3\n4\nfive\nfunf\n6\n7\n8\n9\n", "     1\t1\n"},
		{"insert first", "a\n", insert(0, "x"), "x\na\n", "     1\tx\n"},
		{"insert last", "a\n", insert(1, "x"), "a\nx\n", "     2\tx\n"},
		{"insert after a line without newline", "a", insert(1, "x"), "a\nx", "     2\tx\n"},
		{"insert keeps its newline", "a\nb\n", insert(1, "x\n"), "a\nx\nb\n", "     2\tx\n"},
		{"insert blank line", "a\nb\n", insert(1, ""), "a\n\nb\n", "     2\t\n"},
		{"insert into nothing", "", insert(0, "x"), "x", "     1\tx\n"},
		{"insert tab lines", "a\nb\n", insert(1, "\tx\n\ty"), "a\n\tx\n\ty\nb\n", "     3\t\ty\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			box, _, dir := newToolbox(t)
			path := filepath.Join(dir, "file")
			if err := os.WriteFile(path, []byte(tc.before), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, 0o751); err != nil {
				t.Fatal(err)
			}
			link := filepath.Join(dir, "link")
			if err := os.Symlink("file", link); err != nil {
				t.Fatal(err)
			}
			tc.edit["path"] = link
			obs := observe(t, box, call(ToolEditor, tc.edit))
			if obs.failed || !strings.Contains(obs.text, tc.shows) || !strings.Contains(obs.text, "has been edited") {
				t.Errorf("observation %q, want ...%q", obs.text, tc.shows)
			}
			got, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.after, string(got)); diff != "" {
				t.Errorf("file (-want +got):\n%s", diff)
			}
			if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o751 {
				t.Errorf("mode %v, %v", fi.Mode(), err)
			}
			if target, err := os.Readlink(link); err != nil || target != "file" {
				t.Errorf("the link is now %q, %v", target, err)
			}
		})
	}
}

func TestStrReplaceNeedsOneOccurrence(t *testing.T) {
	box, _, dir := newToolbox(t)
	path := filepath.Join(dir, "f")
	for _, tc := range []struct{ name, content, old, want string }{
		{"none", "a\n", "b", "No occurrences of old_str found in " + path + " for replacement."},
		{"two", "a\nb\na\n", "a", "Multiple occurrences (2) of old_str found in " + path + ", at lines 1, 3."},
		{"overlapping", "aaa\n", "aa", "Multiple occurrences (2)"},
		{"very many", strings.Repeat("a\n", 5000), "a", "Multiple occurrences (1000)"},
		{"line ends", "a\r\nb\r\n", "a\nb", `Its lines end in "\r\n"`},
		{"binary", "a\x00b", "a", "binary file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			obs := observe(t, box, call(ToolEditor, args{"command": "str_replace", "path": path, "old_str": tc.old, "new_str": "x"}))
			if !obs.failed || !strings.Contains(obs.text, tc.want) {
				t.Errorf("got %q, want ...%q", obs.text, tc.want)
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != tc.content {
				t.Errorf("the file was changed: %q, %v", got, err)
			}
		})
	}
}

func TestCreate(t *testing.T) {
	box, _, dir := newToolbox(t)
	path := filepath.Join(dir, "new dir", "$(id)", "Makefile")
	for i, content := range []string{"all:\n\techo 'x'  \n\n", "no newline", "", "emoji 😀\r\n"} {
		obs := observe(t, box, call(ToolEditor, args{"command": "create", "path": path, "file_text": content}))
		if obs.failed || !strings.Contains(obs.text, "File created at "+path) || strings.Contains(obs.text, "is replaced") != (i > 0) {
			t.Errorf("got %q", obs.text)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("the file is %q, %v, want %q", got, err, content)
		}
	}
}

func TestEditorWorksWithoutCoreutils(t *testing.T) {
	box, s, dir := newToolbox(t)
	s.missing = map[string]bool{"readlink": true, "stat": true, "find": true}
	if obs := observe(t, box, call(ToolEditor, args{"command": "create", "path": "x", "file_text": "y"})); obs.failed {
		t.Error(obs.text)
	}
	if obs := observe(t, box, call(ToolEditor, args{"command": "view", "path": dir})); !obs.failed || !strings.Contains(obs.text, "cannot view") {
		t.Errorf("got %q", obs.text)
	}
}

func TestPrintableNeutralisesTerminals(t *testing.T) {
	for in, want := range map[string]string{
		"plain\ttext\n": "plain\ttext\n", "\x1b[2J": `\x1b[2J`, "a\rb": `a\x0db`, "\x9b31m": `\x9b31m`, "\u009b31m": `\u009b31m`,
		"a\u202eb": `a\u202eb`, "\xff": `\xff`, "日本 😀 \uFFFD": "日本 😀 \uFFFD", "\x7f": `\x7f`,
	} {
		if got := Printable(in); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzToolCall(f *testing.F) {
	for _, seed := range []string{
		`{}`, ``, `null`, `{"command":"view","path":"f"}`, `{"command":"create","path":"f","file_text":"x"}`,
		`{"command":"insert","path":"f","insert_line":1,"new_str":"x","view_range":[1,-1]}`, `{"command":"str_replace","path":"f","old_str":"a","new_str":"b"}`, `{"command":1e999}`, `{"insert_line":1e400}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, arguments string) {
		// The arguments are decoded as for each tool, but nothing runs: a fuzzer's commands would be
		// real.
		for _, dst := range []any{&struct {
			Command *string `json:"command"`
		}{}, new(editorArgs), new(struct{})} {
			err := decodeArguments(arguments, dst)
			if err != nil && len(err.Error()) > 2000 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
			if a, ok := dst.(*editorArgs); ok && err == nil && a.ViewRange != nil {
				if first, last, err := checkRange(*a.ViewRange, 7); err == nil && (first < 1 || last > 7 || last < first) {
					t.Errorf("range %v was accepted", *a.ViewRange)
				}
			}
		}
		newAction("x", arguments)
	})
}

func FuzzTruncate(f *testing.F) {
	f.Add("abc\ndef", 4)
	f.Add("日本語", 5)
	f.Add("\x1b[31mx\x1b]0;t\x07\r", 2)
	f.Fuzz(func(t *testing.T, text string, limit int) {
		if limit < 2 || limit > 1<<16 {
			return
		}
		e := newHeadTail(limit)
		if _, err := e.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if got := e.text(limit); !utf8.ValidString(got) || len(got) > limit+300 || strings.ContainsRune(got, '\x1b') && !strings.Contains(text, "\x1b") {
			t.Errorf("%q", got)
		}
	})
}
