package security

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// holdInFlight sends descriptors that are never received until the kernel refuses more, and keeps
// them under way.
const holdInFlight = `
import array, errno, os, socket
fd, held = os.open("/dev/null", os.O_RDONLY), []
try:
    while True:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        held.append(pair)
        for i in range(8):
            pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 250))], socket.MSG_DONTWAIT)
except OSError as e:
    print(errno.errorcode[e.errno], flush=True)
import time
while True: time.sleep(100)
`

// The kernel counts descriptors that are under way for each user of the host, and the root of
// every sandbox is the same: what one leaves unread must not keep another's init from sending any.
func TestDescriptorsUnderWayAreNoNeighboursMatter(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	hog, neighbour := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	ready := make(chan string, 100)
	done := make(chan error, 1)
	go func() {
		done <- hog.Stream(t.Context(), api.ExecRequest{Argv: []string{"python3", "-c", holdInFlight}}, func(e api.ExecEvent) {
			if e.Stream != "" {
				ready <- e.Text
			}
		})
	}()
	select {
	case got := <-ready:
		if got != "ETOOMANYREFS\n" {
			t.Fatalf("it was refused more with %q", got)
		}
	case err := <-done:
		t.Fatalf("it ended: %v", err)
	case <-time.After(testenv.HungAfter):
		t.Fatal("it is never refused more")
	}
	for _, s := range []*harness.Sandbox{neighbour, hog} {
		if got := s.Sh(t, "echo fine"); got != "fine\n" {
			t.Errorf("an exec says %q", got)
		}
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "test -t 1 && echo fine"}, TTY: true}); got.Stdout != "fine\r\n" {
			t.Errorf("an exec with a terminal says %q, %+v", got.Stdout, got.Exit)
		}
		for _, tty := range []bool{false, true} {
			if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/exec", api.ExecRequest{
				Argv: []string{"sleep", "600"}, Detach: true, TTY: tty,
			}, new(api.Exec)); err != nil {
				t.Errorf("a detached exec, with a terminal: %v: %v", tty, err)
			}
		}
		if err := s.Put(t.Context(), "/tmp/file", []byte("fine")); err != nil {
			t.Errorf("writing a file: %v", err)
		}
		response, err := s.Get(t.Context(), "/tmp/file")
		if err != nil {
			t.Errorf("reading a file: %v", err)
			continue
		}
		got, err := io.ReadAll(response.Body)
		if err := errors.Join(err, response.Body.Close()); err != nil || string(got) != "fine" {
			t.Errorf("the file has %q, %v", got, err)
		}
	}
	d.Create(t, api.CreateSandbox{}).Delete(t)
	hog.Delete(t)
	if err := <-done; err != nil {
		t.Errorf("the sandbox of what holds them: %v", err)
	}
}
