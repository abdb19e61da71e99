package cmdline

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Signals go to the program while there is one; a second interrupt within a second ends the
// command.
func TestForwardTwice(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, tc := range map[string]struct {
		sigs []syscall.Signal
		gaps []time.Duration
		want bool // the last one is passed on
	}{
		"one interrupt":           {[]syscall.Signal{syscall.SIGINT}, []time.Duration{0}, true},
		"two, quickly":            {[]syscall.Signal{syscall.SIGINT, syscall.SIGINT}, []time.Duration{0, twice - 1}, false},
		"two, slowly":             {[]syscall.Signal{syscall.SIGINT, syscall.SIGINT}, []time.Duration{0, twice}, true},
		"after a termination":     {[]syscall.Signal{syscall.SIGTERM, syscall.SIGINT}, []time.Duration{0, 1}, true},
		"two terminations":        {[]syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}, []time.Duration{0, 1}, true},
		"slowly and then quickly": {[]syscall.Signal{syscall.SIGINT, syscall.SIGINT, syscall.SIGINT}, []time.Duration{0, twice, 1}, false},
	} {
		f, now := &forwarder{to: make(chan string, 8)}, at
		var got bool
		for i, sig := range tc.sigs {
			now = now.Add(tc.gaps[i])
			got = f.take(sig, now)
		}
		if got != tc.want {
			t.Errorf("%s: passed on: %v", name, got)
		}
	}
	if new(forwarder).take(syscall.SIGTERM, at) {
		t.Error("without a program it is passed on")
	}
	full := &forwarder{to: make(chan string)}
	if full.take(syscall.SIGTERM, at) {
		t.Error("a program that takes none hides the signal")
	}
}

// A signal that comes before the program has begun ends the command.
func TestForwardBeforeTheBeginning(t *testing.T) {
	ctx, done := withSignals(t.Context())
	defer done()
	_, _, stop := Forward(ctx)
	defer stop()
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
}

// Each signal reaches the program, and after its end the command.
func TestForward(t *testing.T) {
	testenv.Heed(syscall.SIGHUP)
	ctx, done := withSignals(t.Context())
	defer done()
	signals, begin, stop := Forward(ctx)
	begin()
	for _, want := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGINT} {
		if err := syscall.Kill(syscall.Getpid(), want); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-signals:
			if got != map[syscall.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGHUP: "SIGHUP", syscall.SIGQUIT: "SIGQUIT", syscall.SIGINT: "SIGINT"}[want] {
				t.Errorf("%v arrives as %s", want, got)
			}
		case <-ctx.Done():
			t.Fatalf("%v ends the command", want)
		}
	}
	stop()
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if context.Cause(ctx).Error() != syscall.SIGTERM.String() {
		t.Errorf("it ended by %v", context.Cause(ctx))
	}
}
