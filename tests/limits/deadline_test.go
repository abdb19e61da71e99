package limits

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// An exec's timeout ends all that it started, however it hides: a tree of processes that have
// forked twice, have sessions of their own, ignore every signal that can be ignored, and go on
// making such. A soak run judges the delay too: 200 ms in the median.
func TestTimeoutEndsATreeInTime(t *testing.T) {
	const (
		within = 200 * time.Millisecond
		most   = 2 * time.Second
		tree   = `
import os, signal, time
for n in set(range(1, 65)) - {signal.SIGCHLD}: # ignored, it would leave nothing to wait for
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
def hide():
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
for i in range(12):
    if os.fork() == 0:
        hide()
        if i % 3 == 0:
            while True: # another generation every now and then
                if os.fork() == 0:
                    hide()
                    time.sleep(0.3)
                    os._exit(0)
                os.wait()
                time.sleep(0.1)
        while True: time.sleep(1)
open("/tmp/up", "w").close()
while True: time.sleep(1)
`
	)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 200}})
	timeout := 5 * time.Second // doubled until the machine has the tree up in that time
	var late []time.Duration
	for rounds := testenv.Rounds(1, 3); len(late) < rounds; {
		s.Sh(t, "rm -f /tmp/up")
		started := make(chan time.Time, 1)
		ended := make(chan *api.Exit, 1)
		go func() {
			var exit *api.Exit
			err := s.Stream(t.Context(), api.ExecRequest{Argv: []string{"python3", "-c", tree}, Timeout: timeout.Seconds()}, func(e api.ExecEvent) {
				if e.PID > 0 {
					started <- time.Now()
				}
				if e.Exit != nil {
					exit = e.Exit
				}
			})
			if err != nil {
				t.Errorf("exec: %v", err)
			}
			ended <- exit
		}()
		began := <-started
		pidfds := treePidfds(t, s, ended)
		if pidfds == nil {
			if timeout *= 2; timeout > testenv.HungAfter {
				t.Fatal("the tree does not come up")
			}
			continue
		}
		// These end at the timeout. Later births are seen by the processes that are left after it.
		for _, fd := range pidfds {
			for {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(testenv.HungAfter.Milliseconds()))
				if n == 0 && err == nil {
					t.Fatal("a process still runs after the timeout")
				}
				if n > 0 {
					break
				}
			}
			_ = unix.Close(fd)
		}
		late = append(late, time.Since(began)-timeout)
		if exit := <-ended; exit == nil || !exit.Timeout {
			t.Errorf("the exec ended with %+v", exit)
		}
		// What is dead may not be reaped yet. Most of what would survive would never end.
		harness.Eventually(t, func() error {
			if left := s.Processes(t); len(left) != 1 || left[0] != s.PID {
				return fmt.Errorf("processes %v are left, the init is %d", left, s.PID)
			}
			return nil
		})
	}
	slices.Sort(late)
	t.Logf("the last process ended so long after the timeout: %v", late)
	if !testenv.Soaking() {
		return
	}
	if median := late[len(late)/2]; median > within {
		t.Errorf("the median is %s, more than %s", median, within)
	}
	// None of them may be a way to run on.
	if worst := late[len(late)-1]; worst > most {
		t.Errorf("the longest is %s, more than %s", worst, most)
	}
}

// treePidfds waits until the tree of [TestTimeoutEndsATreeInTime] is up, and returns pidfds of its
// processes, or nil if the exec has ended before that.
func treePidfds(t *testing.T, s *harness.Sandbox, ended chan *api.Exit) (pidfds []int) {
	t.Helper()
	const least = 13 // the leader and its twelve children; others come and go
	harness.Eventually(t, func() error {
		select {
		case exit := <-ended:
			if exit == nil || !exit.Timeout {
				t.Fatalf("the exec ended with %+v", exit)
			}
			return nil
		default:
		}
		pids := s.Processes(t)
		if response, err := s.Get(t.Context(), "/tmp/up"); err != nil {
			return err
		} else if err := response.Body.Close(); err != nil {
			return err
		}
		for _, pid := range pids {
			if fd, err := unix.PidfdOpen(pid, 0); pid != s.PID && err == nil {
				pidfds = append(pidfds, fd)
			}
		}
		if len(pidfds) >= least {
			return nil
		}
		for _, fd := range pidfds {
			_ = unix.Close(fd)
		}
		pidfds = nil
		return fmt.Errorf("%d processes are up, want %d and those being born", len(pids)-1, least)
	})
	return pidfds
}
