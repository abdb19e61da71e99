package limits

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// An exec's timeout ends all that it started, however it hides, within 200 ms: a tree of processes that have forked twice,
// have sessions of their own, ignore every signal that can be ignored, and go on making such.
func TestTimeoutEndsATreeInTime(t *testing.T) {
	const (
		rounds  = 3
		timeout = 10 * time.Second // python takes seconds to start where it is emulated on a busy host
		within  = 200 * time.Millisecond
		most    = 2 * time.Second
		tree    = `
import os, signal, time
for n in set(range(1, 65)) - {signal.SIGCHLD}: # which ignored leaves nothing to wait for
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
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 200}})
	var late []time.Duration
	for range rounds {
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
		// Just before the end: whoever is there now ends at the timeout, and later births are seen by what is left after it.
		select {
		case <-time.After(time.Until(began.Add(timeout - 2*time.Second))):
		case <-t.Context().Done():
		}
		var pidfds []int
		for _, pid := range s.Processes(t) {
			if pid == s.PID {
				continue
			}
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				pidfds = append(pidfds, fd)
			}
		}
		if len(pidfds) < 13 {
			t.Fatalf("%d processes are up, want 13 and those being born", len(pidfds))
		}
		for _, fd := range pidfds {
			for {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000)
				if n == 0 && err == nil {
					t.Fatal("a process still runs 20 s after the timeout")
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
		if left := s.Processes(t); len(left) != 1 || left[0] != s.PID {
			t.Errorf("processes %v are left, the init is %d", left, s.PID)
		}
	}
	slices.Sort(late)
	t.Logf("the last process ended so long after the timeout: %v", late)
	if median := late[rounds/2]; median > within {
		t.Errorf("the median is %s, more than %s", median, within)
	}
	// None of them may be a way to run on; a machine that is emulated stops for a while now and then.
	if worst := late[rounds-1]; worst > testenv.Patience(most) {
		t.Errorf("the longest is %s, more than %s", worst, testenv.Patience(most))
	}
}
