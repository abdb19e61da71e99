package security

import (
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// holdPipes makes pipes until its user has as many pages in them as the kernel gives an ordinary
// user without question (pipe(7), pipe-user-pages-soft), prints the size of the last one, and holds
// them. Empty pipes take next to no memory.
const holdPipes = `
import fcntl, os, time
left = int(open("/proc/sys/fs/pipe-user-pages-soft").read())
size = 65536
while left >= 0 and size == 65536:
    size = fcntl.fcntl(os.pipe()[0], 1032)
    left -= size // 4096
print(size, flush=True)
time.sleep(600)
`

// onePipe prints the size of a new pipe.
const onePipe = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032))"

// A sandbox that holds all pages of pipes which the kernel gives one user does not make a
// neighbour's pipes smaller. Its own next pipe is the control.
func TestPipesAreNoNeighboursMatter(t *testing.T) {
	testenv.RequireOwnIDs(t)
	d := harness.Start(t, harness.Options{})
	hog, neighbour := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	size := func(s *harness.Sandbox) string {
		return strings.TrimSpace(s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", onePipe}}).Stdout)
	}
	before := size(neighbour)
	ready, done := make(chan string, 100), make(chan error, 1)
	go func() {
		done <- hog.Stream(t.Context(), api.ExecRequest{Argv: []string{"python3", "-c", holdPipes}}, func(e api.ExecEvent) {
			if e.Stream != "" {
				ready <- e.Text
			}
		})
	}()
	select {
	case got := <-ready:
		if strings.TrimSpace(got) == before {
			t.Errorf("the last pipe of many has %q bytes, as a neighbour's", got)
		}
	case err := <-done:
		t.Fatalf("it ended: %v", err)
	case <-time.After(testenv.HungAfter):
		t.Fatal("it holds nothing")
	}
	if own := size(hog); own == before {
		t.Errorf("control: a further pipe of the same sandbox has %s bytes", own)
	}
	if after := size(neighbour); after != before {
		t.Errorf("a neighbour's pipe has %s bytes, and had %s before", after, before)
	}
	hog.Delete(t)
	if err := <-done; err != nil {
		t.Errorf("the sandbox of the pipes: %v", err)
	}
}
