package functional

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func TestFilesGoInAndOutUnchanged(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	large := make([]byte, 5<<20)
	_, _ = rand.Read(large) // never fails
	for name, data := range map[string][]byte{"empty": nil, "text": []byte("hello\n"), "large": large, "odd name;$(id) ü": []byte("x")} {
		path := "/tmp/new/dir/" + name // parents are made
		if err := s.Put(t.Context(), path, data); err != nil {
			t.Errorf("put %s: %v", name, err)
			continue
		}
		response, err := s.Get(t.Context(), path)
		if err != nil {
			t.Errorf("get %s: %v", name, err)
			continue
		}
		got, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes went in, %d came out (%v)", name, len(data), len(got), err)
		}
	}
	if got := s.Sh(t, "cat /tmp/new/dir/text; ls /tmp/new/dir | wc -l"); got != "hello\n4\n" {
		t.Errorf("inside the sandbox: %q", got)
	}
}

// Only regular files go out, and nothing that the sandbox makes of a path can block the daemon or
// lead it astray.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	planted := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(planted, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "cd /tmp && mkfifo fifo && mkdir dir && ln -s "+planted+" out && ln -s loop loop && ln -s /dev/zero zero")
	for path, code := range map[string]api.Code{
		"/tmp/fifo":        api.CodeInvalid,
		"/tmp/dir":         api.CodeInvalid,
		"/tmp/zero":        api.CodeInvalid,
		"/dev/zero":        api.CodeInvalid,
		"/tmp/loop":        api.CodeInvalid,
		"/tmp/out":         api.CodeNotFound, // resolved inside the sandbox, where the host's file is not
		"/tmp/missing":     api.CodeNotFound,
		"relative":         api.CodeInvalid,
		"":                 api.CodeInvalid,
		"/tmp/nul\x00byte": api.CodeInvalid,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter) // what blocks does so for ever
		defer cancel()
		response, err := s.Get(ctx, path)
		if err == nil {
			data, _ := io.ReadAll(io.LimitReader(response.Body, 100))
			_ = response.Body.Close()
			t.Errorf("get %q answered %q", path, data)
			continue
		}
		if ctx.Err() != nil {
			t.Errorf("get %q does not end", path)
		}
		wantProblem(t, err, code)
	}
}

func TestCopyCommandCopiesTreesBothWays(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	in := filepath.Join(t.TempDir(), "project")
	write(t, in, "README", "read me\n", 0o644)
	write(t, in, "src/main.sh", "#!/bin/sh\necho from main\n", 0o755)
	if err := os.Symlink("src/main.sh", filepath.Join(in, "run")); err != nil {
		t.Fatal(err)
	}
	if got := d.CLI(t, "cp", in, s.ID+":/tmp/"); got.Code != 0 {
		t.Fatalf("cp in: %+v", got)
	}
	if got := s.Sh(t, "cd /tmp/project && ./run && readlink run && cat README"); got != "from main\nsrc/main.sh\nread me\n" {
		t.Errorf("inside the sandbox: %q", got)
	}
	s.Sh(t, "cd /tmp/project && echo result >result && mkfifo pipe && ln -s /etc/passwd absolute && ln -s ../../../../etc/passwd climbing")
	out := filepath.Join(t.TempDir(), "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := d.CLI(t, "cp", s.ID+":/tmp/project", out); got.Code != 0 {
		t.Fatalf("cp out: %+v", got)
	}
	for name, want := range map[string]string{"README": "read me\n", "src/main.sh": "#!/bin/sh\necho from main\n", "result": "result\n"} {
		data, err := os.ReadFile(filepath.Join(out, "project", name))
		if err != nil || string(data) != want {
			t.Errorf("%s came out as %q (%v)", name, data, err)
		}
	}
	if info, err := os.Stat(filepath.Join(out, "project/src/main.sh")); err != nil || info.Mode().Perm()&0o100 == 0 {
		t.Errorf("the program is not executable any more: %v %v", info, err)
	}
	if target, err := os.Readlink(filepath.Join(out, "project/run")); err != nil || target != "src/main.sh" {
		t.Errorf("the symlink came out as %q (%v)", target, err)
	}
	if info, err := os.Lstat(filepath.Join(out, "project/pipe")); err == nil && info.Mode()&fs.ModeNamedPipe != 0 {
		t.Error("a FIFO of the sandbox was made on the host")
	}

	// One file, both ways, under another name.
	if got := d.CLI(t, "cp", filepath.Join(in, "README"), s.ID+":/tmp/one"); got.Code != 0 {
		t.Errorf("cp one file in: %+v", got)
	}
	if got := d.CLI(t, "cp", s.ID+":/tmp/one", filepath.Join(out, "one")); got.Code != 0 {
		t.Errorf("cp one file out: %+v", got)
	}
	if data, err := os.ReadFile(filepath.Join(out, "one")); err != nil || string(data) != "read me\n" {
		t.Errorf("the one file came out as %q (%v)", data, err)
	}
}

// A tree that tries to write outside of where it is copied to does not.
func TestArchiveCannotWriteOutsideItsTarget(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "mkdir -p /tmp/target /tmp/beside; ln -s /tmp/beside /tmp/target/link")
	for name, files := range map[string][]harness.File{
		"dot dot":         {{Name: "../beside/planted", Body: "x"}},
		"absolute":        {{Name: "/tmp/beside/planted", Body: "x"}},
		"through symlink": {{Name: "link/planted", Body: "x"}},
		"own symlink":     {{Name: "own", Type: '2', Link: "/tmp/beside"}, {Name: "own/planted", Body: "x"}},
		"hard link":       {{Name: "h", Type: '1', Link: "../beside/existing"}},
	} {
		t.Run(name, func(t *testing.T) {
			s.Sh(t, "rm -f /tmp/beside/*; echo old >/tmp/beside/existing")
			// Refused or put inside the target: both will do, but not outside.
			_ = s.PutArchive(t.Context(), "/tmp/target", harness.Tar(t, files...))
			if got := s.Sh(t, "ls /tmp/beside; cat /tmp/beside/existing; stat -c %h /tmp/beside/existing"); got != "existing\nold\n1\n" {
				t.Errorf("beside the target is now %q", got)
			}
		})
	}
}

func write(t *testing.T, dir, name, body string, mode fs.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(body), mode); err != nil {
		t.Fatal(err)
	}
}

// An interactive exec has a terminal: the program sees one, and its size.
func TestTerminal(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	result := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "tty; stty size; test -t 1 && echo terminal"}, TTY: true, Rows: 33, Cols: 99})
	if got := strings.ReplaceAll(result.Stdout, "\r\n", "\n"); got != "/dev/pts/0\n33 99\nterminal\n" {
		t.Errorf("the program on a terminal says %q", got)
	}
}

func TestStdinReachesTheProgram(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	result := s.Exec(t, api.ExecRequest{Argv: []string{"cat"}, Stdin: []byte("from the client\n")})
	if result.Stdout != "from the client\n" {
		t.Errorf("cat says %q", result.Stdout)
	}
	got := d.CLIInput(t, strings.NewReader("3\n1\n2\n"), "exec", "-i", s.ID, "--", "sort")
	if got.Code != 0 || got.Stdout != "1\n2\n3\n" {
		t.Errorf("exec -i -- sort: %+v", got)
	}
}

func TestOutputIsBoundedAndSaysSo(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	result := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "yes | head -c 3000000; echo end >&2"}, OutputLimit: 1000})
	if !result.Truncated || len(result.Stdout) > 1100 || result.Stderr != "end\n" || result.Exit.Code != 0 {
		t.Errorf("exit %+v, truncated %v, %d bytes of stdout, stderr %q", result.Exit, result.Truncated, len(result.Stdout), result.Stderr)
	}
	result = s.Exec(t, api.ExecRequest{Argv: []string{"printf", `\377\376x`}})
	if !bytes.Equal(result.StdoutBytes, []byte{0xff, 0xfe, 'x'}) {
		t.Errorf("bytes that are not text came as %q and %q", result.Stdout, result.StdoutBytes)
	}
}

// Output arrives while the program still runs: it goes on only after the client has seen the first
// line.
func TestExecStreamsAsItHappens(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "mkfifo /tmp/go")
	var text string
	var exit *api.Exit
	err := s.Stream(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "echo one; read x </tmp/go; echo two >&2; exit 5"}},
		func(e api.ExecEvent) {
			text += e.Stream + ":" + e.Text
			if e.Stream == "stdout" {
				s.Sh(t, "echo >/tmp/go")
			}
			if e.Exit != nil {
				exit = e.Exit
			}
		})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, "stdout:one\n") || !strings.Contains(text, "stderr:two\n") {
		t.Errorf("events: %q", text)
	}
	if exit == nil || exit.Code != 5 {
		t.Errorf("exit: %+v", exit)
	}
}

func TestSignalNamesTheSignal(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	if exit := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "kill -TERM $$"}}).Exit; exit.Signal != "SIGTERM" || exit.Code != 128+15 {
		t.Errorf("exit is %+v", exit)
	}
	if got := d.CLI(t, "exec", s.ID, "--", "sh", "-c", "kill -KILL $$"); got.Code != 137 {
		t.Errorf("the command line exits %d", got.Code)
	}
}
