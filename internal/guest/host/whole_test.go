package host

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// An exec with Whole is like any other, whether it ends before init reports its start or long
// after: every byte of output is there, its exit is right, and orphans are not waited for.
func TestWholeExec(t *testing.T) {
	s := startInit(t)
	for _, tc := range []struct {
		name, script string
		timeout      time.Duration
		out, errs    string
		want         ExecExit
	}{
		{name: "ends at once", script: "echo out; echo err >&2; exit 3", out: "out\n", errs: "err\n", want: ExecExit{Code: 3}},
		{name: "silent", script: "exit 0"},
		{name: "signal", script: "kill -KILL $$", want: ExecExit{Code: 137, Signal: unix.SIGKILL}},
		{name: "goes on", script: "echo out; sleep 0.1; echo more", out: "out\nmore\n"},
		{name: "more than a pipe holds", script: "head -c 300000 /dev/zero | tr '\\0' x", out: strings.Repeat("x", 300000)},
		{name: "leaves somebody behind", script: "echo out; sleep 100 &", out: "out\n"},
		{name: "timeout", script: "echo out; sleep 100", timeout: 50 * time.Millisecond, out: "out\n", want: ExecExit{Code: 137, Signal: unix.SIGKILL, Timeout: true}},
		{name: "short timeout", script: "sleep 100", timeout: time.Nanosecond, want: ExecExit{Code: 137, Signal: unix.SIGKILL, Timeout: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := ExecRequest{Argv: []string{"sh", "-c", tc.script}, Timeout: tc.timeout, NoStdin: true, Whole: true}
			out, errs, exit, err := s.run(t, r)
			for err == nil && out == "" && tc.out != "" && exit.Timeout && r.Timeout < 30*time.Second { // before it had come to its first word
				r.Timeout *= 2
				out, errs, exit, err = s.run(t, r)
			}
			if err != nil || out != tc.out || errs != tc.errs {
				t.Fatalf("wrote %.60q and %.60q, %v", out, errs, err)
			}
			if exit.Wall <= 0 || exit.MaxRSS <= 0 {
				t.Errorf("usage %+v", exit)
			}
			if exit.Wall, exit.CPU, exit.MaxRSS = 0, 0, 0; exit != tc.want {
				t.Errorf("ended with %+v, want %+v", exit, tc.want)
			}
		})
	}
	t.Run("the smallest program", func(t *testing.T) { // which mostly ends before init would have reported its start
		bin, before := staticTrue(t), descriptorsOpen(t)
		// At least one gets its start and end reported at once, also after many.
		var patience time.Time
		for n, atOnce := 0, false; n < 200 || !atOnce; n++ {
			if n == 200 {
				patience = time.Now().Add(testenv.HungAfter)
			}
			if n > 200 && time.Now().After(patience) {
				t.Fatalf("none of %d programs was told of in one packet", n)
			}
			e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{bin}, Env: testEnv, NoStdin: true, Whole: true})
			if err != nil {
				t.Fatal(err)
			}
			exit, err := e.Wait()
			if err != nil || exit.Code != 0 || e.PID < 2 {
				t.Fatalf("%d: %+v, %v", e.PID, exit, err)
			}
			atOnce = n >= 100 && (atOnce || e.conn == nil)
			// An exec that has ended accepts every call.
			if err := errors.Join(e.Signal(unix.SIGTERM, ReachGroup), e.Kill(), e.Close()); err != nil {
				t.Fatal(err)
			}
		}
		if after := descriptorsOpen(t); after > before {
			t.Errorf("%d descriptors are open, were %d", after, before)
		}
	})
	t.Run("not to be found", func(t *testing.T) {
		_, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"no-such-program"}, Env: testEnv, NoStdin: true, Whole: true})
		if e, ok := errors.AsType[*guest.Error](err); !ok || e.Stage != guest.StageLookup {
			t.Error(err)
		}
	})
	t.Run("nobody reads", func(t *testing.T) { // a failing reader ends Stream, however early the program has ended
		bad := errors.New("bad")
		for _, script := range []string{"echo x", "echo x; sleep 100"} {
			e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", script}, Env: testEnv, NoStdin: true, Whole: true})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := e.Stream(t.Context(), func(string, []byte) error { return bad }); !errors.Is(err, bad) {
				t.Errorf("%s: %v", script, err)
			}
			_ = e.Close()
		}
	})
	t.Run("its caller goes", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		e, err := s.Exec(ctx, ExecRequest{Argv: []string{"sh", "-c", "sleep 12345"}, Env: testEnv, NoStdin: true, Whole: true})
		if err == nil {
			_ = e.Close()
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		const left = `cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -cx 12345`
		if out := s.sh(t, "i=0; while n=$("+left+") && [ $i -lt 500 ]; do i=$((i+1)); sleep 0.01; done; echo $n"); out != "0\n" {
			t.Errorf("%s processes are left", out)
		}
	})
	for _, r := range []ExecRequest{{Argv: []string{"true"}, TTY: true, Whole: true}, {Argv: []string{"true"}, Keep: true, Whole: true}} {
		if _, err := s.Exec(t.Context(), r); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}
