package security

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// inBackground runs a shell script in the sandbox until the function that it returns is called.
func inBackground(t *testing.T, s *harness.Sandbox, script string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	begun := make(chan struct{})
	wg.Go(func() {
		var once sync.Once
		// It ends with the request.
		_ = s.Stream(ctx, api.ExecRequest{Argv: []string{"sh", "-c", script}}, func(api.ExecEvent) { once.Do(func() { close(begun) }) })
	})
	select {
	case <-begun:
	case <-time.After(testenv.HungAfter):
		t.Error("the script does not start")
	}
	return func() { cancel(); wg.Wait() }
}

// While files are listed, read, removed and watched, a program of the sandbox swaps them for links
// and FIFOs. Nothing that the links name is touched, there or on the host, and nothing blocks.
func TestSwappedFilesLeadNowhereElse(t *testing.T) {
	planted := filepath.Join(t.TempDir(), "planted")
	if err := os.Mkdir(planted, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(planted, "secret"), []byte("of the host"), 0o666); err != nil {
		t.Fatal(err)
	}
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	c := client.New(d.Socket)
	t.Cleanup(c.Close)
	s.Sh(t, "mkdir -p /tmp/keep && cd /tmp/keep && for i in 1 2 3 4 5 6 7 8 9; do echo $i >$i; done")
	remake := "mkdir -p /tmp/t/a/b/c /tmp/t/d && echo x >/tmp/t/a/f; echo x >/tmp/t/a/b/g; echo x >/tmp/new && mv -f /tmp/new /tmp/t/f"
	stop := inBackground(t, s, `cd /tmp || exit
		while :; do
			mv -T t/a t-away 2>/dev/null && ln -s /tmp/keep t/a; rm -f t/a; mv -T t-away t/a 2>/dev/null
			mv -T t/a t-away 2>/dev/null && ln -s `+planted+` t/a; rm -f t/a; mv -T t-away t/a 2>/dev/null
			rm -f t/f; mkfifo t/f; rm -f t/f; ln -s /dev/zero t/f; rm -f t/f; echo x >x && mv -f x t/f
		done 2>/dev/null`)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	watched := watchOn(ctx, c, s.ID)
	secrets := 0
	for range 60 {
		s.Sh(t, remake+" 2>/dev/null; true")
		_, err := c.ListEachFile(ctx, s.ID, "/tmp/t", 10, func(e api.FileEntry) error {
			if strings.Contains(e.Path, "secret") || strings.HasSuffix(e.Path, "/9") {
				secrets++
			}
			return nil
		})
		refusedOrDone(t, "list", err)
		r, err := c.ReadFile(ctx, s.ID, "/tmp/t/f")
		refusedOrDone(t, "read", err)
		if err == nil {
			if data, err := io.ReadAll(io.LimitReader(r, 1000)); err != nil || len(data) > 2 {
				t.Errorf("read %d bytes, %v", len(data), err)
			}
			_ = r.Close()
		}
		refusedOrDone(t, "append", c.AppendFile(ctx, s.ID, "/tmp/t/f", strings.NewReader("y"), 0, ""))
		refusedOrDone(t, "move", c.MoveFile(ctx, s.ID, api.MoveFile{From: "/tmp/t/f", To: "/tmp/t/d/f", Overwrite: true}))
		refusedOrDone(t, "remove", c.RemoveFile(ctx, s.ID, "/tmp/t", true))
	}
	stop()
	cancel()
	<-watched
	if secrets > 0 {
		t.Errorf("a list went through a link %d times", secrets)
	}
	if got := s.Sh(t, "cat /tmp/keep/[1-9]"); got != "1\n2\n3\n4\n5\n6\n7\n8\n9\n" {
		t.Errorf("what the links name is now %q", got)
	}
	if data, err := os.ReadFile(filepath.Join(planted, "secret")); err != nil || string(data) != "of the host" {
		t.Errorf("the host's file is now %q (%v)", data, err)
	}
	if entries, err := os.ReadDir(planted); err != nil || len(entries) != 1 {
		t.Errorf("the host's directory is now %v (%v)", entries, err)
	}
}

// watchOn watches meanwhile; a tree that is removed ends a watch, and then there is another one.
func watchOn(ctx context.Context, c *client.Client, id string) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_ = c.WatchFiles(ctx, id, "/tmp/t", true, func(api.FileChange) error { return nil })
		}
	}()
	return done
}

// refusedOrDone accepts that a file is not as expected. It does not accept that the sandbox or the
// daemon is lost.
func refusedOrDone(t *testing.T, what string, err error) {
	t.Helper()
	if err == nil {
		return
	}
	p, ok := errors.AsType[*api.Problem](err)
	if !ok || p.Code != api.CodeInvalid && p.Code != api.CodeNotFound && p.Code != api.CodeConflict && p.Code != api.CodeExists {
		t.Fatalf("%s: %v", what, err)
	}
}

// A tree that is deep, wide and full of events costs a watch and a list a bounded memory, says so,
// and can be removed.
func TestHostileTreeIsBounded(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	c := client.New(d.Socket)
	t.Cleanup(c.Close)
	// The deep one is made from its end: no shell can go there.
	s.Sh(t, `mkdir /tmp/evil && cd /tmp/evil && seq 8300 | xargs mkdir && seq 3000 | sed 's/^/f/' | xargs touch
		name=$(printf '%0200d' 0); mkdir d; i=0; while [ $i -lt 300 ]; do mkdir n && mv d n/$name && mv n d || exit 1; i=$((i + 1)); done`)
	if got := memory(t, s.PID, "VmRSS"); got > 24<<20 {
		t.Errorf("before, init has %d MiB", got>>20)
	}
	// A client that reads nothing after the first line.
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/v1/sandboxes/"+s.ID+"/watch?recursive=true&path="+url.QueryEscape("/tmp/evil"), nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := d.HTTP.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	if !lines.Scan() || !strings.Contains(lines.Text(), `"ready"`) {
		t.Fatalf("the first line is %q (%v)", lines.Text(), lines.Err())
	}
	s.Sh(t, `cd /tmp/evil/1 && i=0; while [ $i -lt 25000 ]; do : >a; : >b; i=$((i + 1)); done`)
	n := 0
	more, err := c.ListEachFile(ctx, s.ID, "/tmp/evil", 200, func(api.FileEntry) error { n++; return nil })
	if err != nil || !more || n < 11300 {
		t.Errorf("a list of it all: %d entries, %v, %v", n, more, err)
	}
	if got := memory(t, s.PID, "VmHWM"); got > 24<<20 {
		t.Errorf("init has needed %d MiB", got>>20)
	}
	overflow := false
	for !overflow && lines.Scan() {
		overflow = strings.Contains(lines.Text(), `"overflow"`)
	}
	if !overflow {
		t.Errorf("nothing is told of what was missed: %v", lines.Err())
	}
	if err := c.RemoveFile(ctx, s.ID, "/tmp/evil", true); err != nil {
		t.Error(err)
	}
	if got := s.Sh(t, "ls /tmp; echo well"); got != "well\n" {
		t.Errorf("left: %q", got)
	}
}

// memory is a line of /proc/PID/status, in bytes.
func memory(t *testing.T, pid int, line string) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), line+":")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		t.Fatalf("%s of process %d is not told", line, pid)
	}
	kb, err := strconv.ParseInt(fields[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}
