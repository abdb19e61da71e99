package limits

import (
	"bufio"
	"fmt"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// With oom_group the kernel ends the sandbox as a whole, and it says why.
func TestOOMGroupEndsTheSandbox(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, OOMGroup: true}})
	neighbour := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, OOMGroup: true}})
	s.Sh(t, "nohup sleep 600 >/dev/null 2>&1 &")
	var pidfds []int // of the processes before the kill: a pid may be another's afterwards, and the cgroup is gone
	for pid := range strings.FieldsSeq(read(t, cgroupOf(t, s.PID), "cgroup.procs")) {
		n, err := strconv.Atoi(pid)
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdOpen(n, 0)
		if err != nil {
			t.Fatalf("process %d: %v", n, err)
		}
		defer func() { _ = unix.Close(fd) }()
		pidfds = append(pidfds, fd)
	}
	if len(pidfds) < 2 {
		t.Fatalf("%d processes are up, want the init and the sleeper", len(pidfds))
	}
	_, err := s.TryExec(t.Context(), sh("exec tail /dev/zero"))
	if code(err) != api.CodeGone || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("the hog's exec: %v", err)
	}
	now := s.WaitState(t, api.StateStopped)
	if !strings.Contains(now.Reason, "out of memory") {
		t.Errorf("the reason is %q", now.Reason)
	}
	if got := neighbour.Sh(t, "echo fine"); got != "fine\n" {
		t.Errorf("the neighbour: %q", got)
	}
	for _, fd := range pidfds {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); n != 1 || err != nil {
			t.Errorf("a process of the sandbox still runs: %d, %v", n, err)
		}
	}
}

// A main process that the kernel kills for want of memory ends the sandbox, which says so; so does
// the end of all with oom_group.
func TestOOMOfTheMainProcess(t *testing.T) {
	d := shared(t)
	for _, group := range []bool{false, true} {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, OOMGroup: group}, Command: []string{"tail", "/dev/zero"}})
		var now api.Sandbox
		if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+s.ID+"/wait", nil, &now); err != nil {
			t.Fatal(err)
		}
		if now.State != api.StateStopped || !strings.Contains(now.Reason, "out of memory") || now.Exit == nil || !now.Exit.OOM || now.Exit.Code != 137 || now.Exit.Signal != "SIGKILL" {
			t.Errorf("oom_group %v: %+v, exit %+v", group, now, now.Exit)
		}
	}
}

// memory_high slows down and reclaims, and kills nothing.
func TestMemoryHighKillsNobody(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 200 * mib, MemoryHigh: 32 * mib}})
	dir := cgroupOf(t, s.PID)
	s.Sh(t, "head -c 100M /dev/zero >/tmp/big; sync /tmp/big")
	if n := number(t, dir, "memory.current", ""); n > 40*mib {
		t.Errorf("%d bytes are in use, most of it page cache, with memory_high at 32 MiB", n)
	}
	if number(t, dir, "memory.events", "high") == 0 || number(t, dir, "memory.events", "oom_kill") != 0 {
		t.Errorf("memory.events: %s", read(t, dir, "memory.events"))
	}
}

// When the host's memory runs out, the kernel ends the largest program of all sandboxes, though it
// tries to be spared. Smaller ones of other sandboxes go on, and so do larger ones of the host.
func TestHostOutOfMemory(t *testing.T) {
	testenv.Soak(t, "it takes all memory of the machine")
	const small = 24 * mib
	d := shared(t)
	neighbour := d.Create(t, api.CreateSandbox{})
	// A shell holds a text of this size, and a program of the host one of four times that.
	hold := func(size int) string {
		return fmt.Sprintf("x=$(head -c %d /dev/zero | tr '\\0' x); echo ready; sleep 600; echo ${#x}", size)
	}
	neighbour.Sh(t, "mkfifo /tmp/ready; setsid sh -c '"+strings.ReplaceAll(hold(small), "'", `'\''`)+"' >/tmp/ready 2>/dev/null </dev/null & read -r _ </tmp/ready")
	host := exec.CommandContext(t.Context(), "sh", "-c", hold(4*small))
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	defer func() { _ = host.Process.Kill(); <-ended }()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	go func() { _ = host.Wait(); close(ended) }()

	// More than the machine has: the limit is not what ends it.
	greedy := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 << 30}})
	got, err := greedy.TryExec(t.Context(), sh("{ echo 0 >/proc/self/oom_score_adj; } 2>/dev/null; exec tail /dev/zero"))
	if err != nil || !got.Exit.OOM {
		t.Errorf("the program that takes all ended with %+v, %v", got, err)
	}
	if got := greedy.Sh(t, "echo fine"); got != "fine\n" {
		t.Errorf("its sandbox says %q", got)
	}
	if n := number(t, cgroupOf(t, neighbour.PID), "memory.events", "oom_kill"); n != 0 {
		t.Errorf("the kernel has ended %d programs of its neighbour", n)
	}
	select {
	case <-ended:
		t.Error("a program of the host was ended before those of sandboxes")
	default:
	}
}

// Init's score follows the limit of memory, and children from before their program was raised are
// better targets than init still.
func TestInitsScoreFollowsTheLimit(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	scores := func() (init, least int) {
		t.Helper()
		said := s.Sh(t, "cat /proc/1/oom_score_adj; for i in 1 2 3 4 5 6 7 8; do sh -c 'cat /proc/self/oom_score_adj'; done")
		for i, field := range strings.Fields(said) {
			n, err := strconv.Atoi(field)
			if err != nil {
				t.Fatalf("scores %q", said)
			}
			switch {
			case i == 0:
				init, least = n, offered
			case n < least:
				least = n
			}
		}
		return init, least
	}
	for _, c := range []struct{ limit, init int }{{64 * mib, 500}, {512 * mib, 937}, {128 * mib, 750}} {
		mustPatch(t, d, s, api.LimitsUpdate{Memory: new(int64(c.limit))})
		s.Sh(t, "until read -r n </proc/$$/oom_score_adj && [ $n = 1000 ]; do :; done") // it is raised soon
		harness.Eventually(t, func() error {                                            // while it forks, init has another one
			init, least := scores()
			if least < (offered+c.init)/2 {
				t.Fatalf("with a limit of %d MiB one of the programs has %d", c.limit/mib, least)
			}
			if init != c.init {
				return fmt.Errorf("with a limit of %d MiB init has %d", c.limit/mib, init)
			}
			return nil
		})
	}
}

// offered is the oom_score_adj of programs.
const offered = 1000
