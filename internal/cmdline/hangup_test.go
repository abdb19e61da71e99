package cmdline

import (
	"context"
	"errors"
	"syscall"
	"testing"
)

// A hangup ends a command, unless it takes hangups as orders.
func TestHangups(t *testing.T) {
	ctx, stop := withSignals(t.Context())
	defer stop()
	orders := Hangups(ctx)
	for range 2 {
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		select {
		case <-orders:
		case <-ctx.Done():
			t.Fatal("it ends the command")
		}
	}
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if s, ok := errors.AsType[Signalled](context.Cause(ctx)); !ok || s.sig != syscall.SIGTERM {
		t.Errorf("it ended by %v", context.Cause(ctx))
	}
}
