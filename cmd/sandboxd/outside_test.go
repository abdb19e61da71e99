package main

import (
	"bufio"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/errand"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// agentStandIn is what this test's own program is where it is started as a process for a run of the agent: it says how it was
// started, and ends when it is told to, or when there is nothing more to read.
const agentStandIn = "SANDBOXD_TEST_AGENT"

// runner is a runner of errands without the process around it, and what it says.
func runner(t *testing.T, a agentWorkers) (*errandRunner, *bufio.Reader) {
	t.Helper()
	t.Setenv(agentStandIn, "1")
	r := new(errandRunner)
	if _, err := r.begin(t.Context(), outside{Agents: a}); err != nil {
		t.Fatal(err)
	}
	log, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(log.Close(), to.Close()) })
	if err := log.SetReadDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	r.about.Launcher.Log = slog.New(slog.NewTextHandler(to, nil))
	return r, bufio.NewReader(log)
}

// began starts a process for a run.
func began(t *testing.T, r *errandRunner) (pid int, stdin *os.File, lines *bufio.Reader, err error) {
	t.Helper()
	in, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close() })
	out, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() })
	started, err := r.errands()[errandAgent](t.Context(), []byte("{}"), []*os.File{in, stdout})
	if closed := errors.Join(in.Close(), stdout.Close()); closed != nil {
		t.Fatal(closed)
	}
	pid, _ = started.(int)
	return pid, stdin, bufio.NewReader(out), err
}

// A daemon that was taken over can start what it was to start, as often as it was to be, and signal that alone.
func TestAgentErrands(t *testing.T) {
	r, said := runner(t, agentWorkers{Socket: "/s", Runs: "/runs", Inputs: []string{"/a", "/b c"}, Max: 2})
	pid, stdin, lines, err := began(t, r)
	if err != nil {
		t.Fatal(err)
	}
	const want = "--socket /s agent worker --runs /runs --inputs /a --inputs /b c"
	if line, err := lines.ReadString('\n'); err != nil || strings.TrimSpace(line) != want {
		t.Errorf("it was started with %q, %v, want %q", line, err, want)
	}
	if session, err := unix.Getsid(pid); err != nil || session != pid {
		t.Errorf("its session is %d, %v; it is %d", session, err, pid)
	}
	second, _, more, err := began(t, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := began(t, r); err == nil {
		t.Error("a third was started")
	}
	if _, err := r.errands()[errandAgent](t.Context(), []byte("{}"), nil); err == nil {
		t.Error("one without files was started")
	}

	victim := exec.CommandContext(t.Context(), "sleep", "600")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = victim.Wait() // it is killed in the end
	}()
	signal := func(pid int, kill bool) error {
		args := `{"pid":` + strconv.Itoa(pid) + `,"kill":` + strconv.FormatBool(kill) + `}`
		_, err := r.errands()[errandAgentSignal](t.Context(), []byte(args), nil)
		return err
	}
	for _, other := range []int{victim.Process.Pid, -victim.Process.Pid, os.Getpid(), os.Getppid(), 1, 0, -1, -pid} {
		for _, kill := range []bool{false, true} {
			if err := signal(other, kill); err == nil || !strings.Contains(err.Error(), "no process for an agent run") {
				t.Errorf("signal to %d, which is no run's: %v", other, err)
			}
		}
	}
	select {
	case <-ended:
		t.Errorf("another process was ended: %v", victim.ProcessState)
	default:
	}
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended

	// One is told to end, and the other killed; who has ended is forgotten, and its pid is anybody's.
	if _, err := more.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(signal(pid, false), signal(second, true)); err != nil {
		t.Error(err)
	}
	for pid, lines := range map[int]*bufio.Reader{pid: lines, second: more} {
		if rest, err := lines.ReadString('\n'); err == nil {
			t.Errorf("%d says %q", pid, rest)
		}
	}
	_ = stdin.Close()
	for range 2 { // it is said of each when it has been forgotten
		if _, err := said.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	if first, other := signal(pid, false), signal(second, false); first == nil || other == nil {
		t.Errorf("they are still known: %v, %v", first, other)
	}
}

// Before the daemon has said what it is about, nothing is started.
func TestAgentErrandBeforeTheFirst(t *testing.T) {
	r := new(errandRunner)
	if _, _, _, err := began(t, r); err == nil {
		t.Error("a process was started")
	}
}

// A runner that answers no more is gone, also before anybody has seen its end.
func TestChecksWithoutARunner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := errand.Start(silentArg, path)
	if err != nil {
		t.Fatal(errors.Join(err, fifo.Close()))
	}
	if checks := (assistant{r}).checks(t.Context()); len(checks) != 1 || checks[0].Remedy != goneRemedy {
		t.Errorf("%+v", checks)
	}
	if err := errors.Join(fifo.Close(), r.Close()); err != nil {
		t.Error(err)
	}
}

// silentArg is the first argument of this test's own program where it is to be a runner that takes no errands and does not end
// before the other end of a FIFO, the second, is closed.
const silentArg = "silent"

// standIn is [agentStandIn]'s main function, and that of [silentArg].
func standIn() bool {
	if len(os.Args) == 3 && os.Args[1] == silentArg {
		fifo, err := os.Open(os.Args[2])
		_ = unix.Close(3) // of errands
		if err == nil {
			_, _ = io.Copy(io.Discard, fifo)
		}
		return true
	}
	i := slices.Index(os.Args, "worker")
	if os.Getenv(agentStandIn) == "" || i < 0 {
		return false
	}
	_, _ = os.Stdout.WriteString(strings.Join(os.Args[1:], " ") + "\n")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return true
}
