package broker

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

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// agentStandIn is set in the environment of this test binary when it stands in for sandboxd-agent:
// it prints its arguments, and ends with a signal or when its stdin is closed.
const agentStandIn = "SANDBOXD_TEST_AGENT"

// newBroker returns a broker without its process, and its log.
func newBroker(t *testing.T, a Agents) (*broker, *bufio.Reader) {
	t.Helper()
	t.Setenv(agentStandIn, "1")
	if a.Program == "" {
		program, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		a.Program = program
	}
	b := new(broker)
	if _, err := b.configure(t.Context(), Config{Agents: a}); err != nil {
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
	b.log = slog.New(slog.NewTextHandler(to, nil))
	return b, bufio.NewReader(log)
}

// startAgent starts a process for an agent run.
func startAgent(t *testing.T, b *broker) (pid int, stdin *os.File, lines *bufio.Reader, err error) {
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
	started, err := b.handlers()[requestStartAgent](t.Context(), []byte("{}"), []*os.File{in, stdout})
	if closed := errors.Join(in.Close(), stdout.Close()); closed != nil {
		t.Fatal(closed)
	}
	pid, _ = started.(int)
	return pid, stdin, bufio.NewReader(out), err
}

// A daemon that was taken over can start the configured program only, up to the limit, and signal
// no other process.
func TestAgentRequests(t *testing.T) {
	b, log := newBroker(t, Agents{Socket: "/s", Runs: "/runs", Inputs: []string{"/a", "/b c"}, Max: 2})
	pid, stdin, lines, err := startAgent(t, b)
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
	second, _, more, err := startAgent(t, b)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := startAgent(t, b); err == nil {
		t.Error("a third was started")
	}
	if _, err := b.handlers()[requestStartAgent](t.Context(), []byte("{}"), nil); err == nil {
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
		_, err := b.handlers()[requestSignalAgent](t.Context(), []byte(args), nil)
		return err
	}
	for _, other := range []int{victim.Process.Pid, -victim.Process.Pid, os.Getpid(), os.Getppid(), 1, 0, -1, -pid} {
		for _, kill := range []bool{false, true} {
			if err := signal(other, kill); err == nil || !strings.Contains(err.Error(), "no agent process") {
				t.Errorf("signal to %d, which is no agent process: %v", other, err)
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

	// One is terminated, the other killed. A process that has ended is forgotten, because its pid may
	// be reused.
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
	for range 2 { // a process is logged when it has been forgotten
		if _, err := log.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	if first, other := signal(pid, false), signal(second, false); first == nil || other == nil {
		t.Errorf("they are still known: %v, %v", first, other)
	}
}

// A broker that is not configured starts nothing.
func TestAgentBeforeConfigure(t *testing.T) {
	b := new(broker)
	if _, _, _, err := startAgent(t, b); err == nil {
		t.Error("a process was started")
	}
}

// A broker that has closed its socket counts as gone, even before its process has ended.
func TestChecksWithoutABroker(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := start(silentArg, path)
	if err != nil {
		t.Fatal(errors.Join(err, fifo.Close()))
	}
	if checks := r.Checks(t.Context()); len(checks) != 1 || checks[0].Remedy != GoneRemedy {
		t.Errorf("%+v", checks)
	}
	if err := errors.Join(fifo.Close(), r.Close()); err != nil {
		t.Error(err)
	}
}

// silentArg is the first argument of this test binary when it is a broker that takes no requests.
// It ends when the other end of a FIFO, the second argument, is closed.
const silentArg = "silent"

// standIn is the main function of [agentStandIn] and [silentArg]. It reports whether it was one of
// them.
func standIn() bool {
	if len(os.Args) == 3 && os.Args[1] == silentArg {
		fifo, err := os.Open(os.Args[2])
		_ = unix.Close(fdRequests)
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

// The program is the one that was there when the daemon started: the daemon may have been taken
// over, and write files since.
func TestAgentProgramIsFixed(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "sandboxd-agent")
	if err := os.WriteFile(program, data, 0o755); err != nil {
		t.Fatal(err)
	}
	b, _ := newBroker(t, Agents{Program: program, Socket: "/s", Runs: "/runs", Max: 1})
	other := filepath.Join(t.TempDir(), "other")
	err = errors.Join(os.WriteFile(other, []byte("#!/bin/sh\necho replaced\n"), 0o755), os.Rename(other, program))
	if err != nil {
		t.Fatal(err)
	}
	_, stdin, lines, err := startAgent(t, b)
	if err != nil {
		t.Fatal(err)
	}
	if line, err := lines.ReadString('\n'); err != nil || !strings.HasPrefix(line, "--socket /s agent worker") {
		t.Errorf("another program was started: %q, %v", line, err)
	}
	_ = stdin.Close()
	_, _ = lines.ReadString('\n') // its end
}

// Without the program the broker works, and runs fail with its path.
func TestMissingAgentProgram(t *testing.T) {
	b, _ := newBroker(t, Agents{Program: "/nowhere/sandboxd-agent", Max: 1})
	if _, _, _, err := startAgent(t, b); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/nowhere/sandboxd-agent") {
		t.Errorf("start without a program: %v", err)
	}
}
