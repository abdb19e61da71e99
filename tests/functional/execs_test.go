package functional

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// seq is what seq(1) prints.
func seq(last int) []byte {
	var b bytes.Buffer
	for i := 1; i <= last; i++ {
		b.WriteString(strconv.Itoa(i))
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// output is what an attachment has told.
type output struct {
	stdout, stderr bytes.Buffer
	dropped        int64
	next           int64 // where to go on
	data           int   // events that are no text
}

func (o *output) take(e api.ExecEvent) {
	o.dropped += e.Dropped
	p := client.Output(e)
	if e.Stream == "" {
		if e.Exit == nil && e.Error == nil {
			o.next = e.Offset
		}
		return
	}
	if e.Data != nil {
		o.data++
	}
	if e.Stream == "stderr" {
		o.stderr.Write(p)
	} else {
		o.stdout.Write(p)
	}
	o.next = e.Offset + int64(len(p))
}

// attach follows an exec to its end.
func attach(t *testing.T, c *client.Client, s *harness.Sandbox, exec string, from int64, o *output) *client.End {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	end, err := c.AttachStream(ctx, s.ID, exec, from, func(e api.ExecEvent) error { o.take(e); return nil })
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	return end
}

func detach(t *testing.T, c *client.Client, s *harness.Sandbox, req api.ExecRequest) *api.Exec {
	t.Helper()
	x, err := c.Detach(t.Context(), s.ID, req)
	if err != nil {
		t.Fatalf("detach %q: %v", req.Argv, err)
	}
	return x
}

// noProcess fails while a process of the host has this word among its arguments.
func noProcess(word string) error {
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, name := range names {
		if data, err := os.ReadFile(name); err == nil && bytes.Contains(data, []byte(word)) {
			return fmt.Errorf("%s: %q still runs", name, data)
		}
	}
	return nil
}

// A detached exec goes on through any number of killed daemons, and loses neither a byte of its output nor its exit code,
// also where it ends while no daemon is there.
func TestDetachedExecSurvivesKilledDaemons(t *testing.T) {
	d := start(t)
	c := client.New(d.Socket)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	const lines, last = 600000, 3000
	word := fmt.Sprintf("mark-%d", os.Getpid())
	script := fmt.Sprintf("seq 1 %d; seq 1 %d >&2; echo bye >&2; sleep 3; seq 1 %d; exit 7 # %s", lines, last, last, word)
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", script}, OutputLimit: 16 << 20})
	if x.State != api.ExecRunning || !x.Detached || x.PID < 2 || x.Argv[0] != "sh" {
		t.Errorf("%+v", x)
	}
	// Killed in the middle of the stream, some times, whenever that is.
	for range 4 {
		before, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			now, err := c.GetExec(t.Context(), s.ID, x.ID)
			if err == nil && now.State == api.ExecRunning && now.StdoutBytes < min(before.StdoutBytes+300<<10, 4<<20) {
				err = fmt.Errorf("%d bytes so far", now.StdoutBytes)
			}
			return err
		})
		d.Kill9(t)
		d.Launch(t)
	}
	// And while it sleeps, so that it ends without a daemon.
	eventually(t, func() error {
		now, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err == nil && now.StderrBytes < 4 {
			err = fmt.Errorf("%+v", now)
		}
		return err
	})
	d.Kill9(t)
	eventually(t, func() error { return noProcess(word) })
	d.Launch(t)

	var o output
	end := attach(t, c, s, x.ID, 0, &o)
	if end.Exit.Code != 7 || end.Exit.Signal != "" {
		t.Errorf("exit %+v", end.Exit)
	}
	if o.dropped != 0 || o.data != 0 {
		t.Errorf("%d bytes dropped, %d events not text", o.dropped, o.data)
	}
	if want := append(seq(lines), seq(last)...); !bytes.Equal(o.stdout.Bytes(), want) {
		t.Errorf("stdout has %d bytes, want %d", o.stdout.Len(), len(want))
	}
	if want := string(seq(last)) + "bye\n"; o.stderr.String() != want {
		t.Errorf("stderr has %d bytes, want %d", o.stderr.Len(), len(want))
	}
	// The same once more, after yet another daemon.
	d.Kill9(t)
	d.Launch(t)
	now, err := c.GetExec(t.Context(), s.ID, x.ID)
	if err != nil || now.State != api.ExecExited || now.Exit.Code != 7 || now.StdoutBytes != int64(o.stdout.Len()) ||
		now.StderrBytes != int64(o.stderr.Len()) || now.EndedAt.IsZero() || now.Usage == nil {
		t.Errorf("%+v, %v", now, err)
	}
	var again output
	if end := attach(t, c, s, x.ID, o.next-10, &again); end.Exit.Code != 7 || again.stdout.Len()+again.stderr.Len() != 10 {
		t.Errorf("%+v, %q", end.Exit, again.stdout.String())
	}
	if err := c.DeleteExec(t.Context(), s.ID, x.ID); err != nil {
		t.Error(err)
	}
	_, err = c.GetExec(t.Context(), s.ID, x.ID)
	wantProblem(t, err, api.CodeNotFound, x.ID)
}

// A client that goes away loses nothing, several see the same, and one that does not read holds nobody up.
func TestAttachersDoNotDisturb(t *testing.T) {
	d := start(t)
	c := client.New(d.Socket)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	const lines = 300000
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", fmt.Sprintf("read go; seq 1 %d; exit 3", lines)}, StdinOpen: true, OutputLimit: 4 << 20})

	// One that never reads.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, err := d.Do(ctx, http.MethodGet, "/v1/sandboxes/"+s.ID+"/execs/"+x.ID+"/attach", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()

	if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("go\n"), true); err != nil {
		t.Fatal(err)
	}
	// One that goes away, again and again, and goes on where it was.
	var dropping output
	errEnough := errors.New("enough")
	for range 5 {
		n := 0
		_, err := c.AttachStream(t.Context(), s.ID, x.ID, dropping.next, func(e api.ExecEvent) error {
			if n++; n > 4 {
				return errEnough
			}
			dropping.take(e)
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			t.Fatal(err)
		}
	}
	end := attach(t, c, s, x.ID, dropping.next, &dropping)
	if want := seq(lines); end.Exit.Code != 3 || !bytes.Equal(dropping.stdout.Bytes(), want) || dropping.dropped != 0 {
		t.Errorf("%+v, %d bytes of %d, %d dropped", end.Exit, dropping.stdout.Len(), len(want), dropping.dropped)
	}
	var late output
	if attach(t, c, s, x.ID, 0, &late); !bytes.Equal(late.stdout.Bytes(), dropping.stdout.Bytes()) {
		t.Errorf("who comes later sees %d bytes", late.stdout.Len())
	}
}

// What a program writes without end costs no more than the limit, and what is kept no more is counted.
func TestDetachedFloodIsBounded(t *testing.T) {
	d := start(t)
	c := client.New(d.Socket)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", "yes & yes >&2"}, OutputLimit: 1 << 20})
	eventually(t, func() error {
		now, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err == nil && now.Dropped < 200<<20 {
			err = fmt.Errorf("%d bytes dropped so far", now.Dropped)
		}
		return err
	})
	if kept := memfiles(t, d.PID()); kept > 4<<20 {
		t.Errorf("the daemon keeps %d bytes of a limit of 1 MiB", kept)
	}
	errEnough := errors.New("enough")
	var o output
	_, err := c.AttachStream(t.Context(), s.ID, x.ID, 0, func(e api.ExecEvent) error {
		if o.take(e); o.stdout.Len()+o.stderr.Len() > 0 {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) || o.dropped < 200<<20 {
		t.Errorf("%v, %d dropped", err, o.dropped)
	}
	if strings.Trim(o.stdout.String()+o.stderr.String(), "y\n") != "" {
		t.Errorf("%q", o.stdout.String())
	}
	if err := c.DeleteExec(t.Context(), s.ID, x.ID); err != nil {
		t.Fatal(err)
	}
	// All of it: also the yes in the background.
	eventually(t, func() error {
		list, err := c.Processes(t.Context(), s.ID)
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("%+v", list)
		}
		return err
	})
}

// memfiles is how much memory the files of a process have that are on no disk.
func memfiles(t *testing.T, pid int) (total int64) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if link, err := os.Readlink(path); err != nil || !strings.HasPrefix(link, "/memfd:") {
			continue
		}
		total += blocks(path)
	}
	return total
}

func blocks(path string) int64 {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0
	}
	return st.Blocks * 512
}
