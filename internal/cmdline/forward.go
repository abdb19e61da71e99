package cmdline

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// twice is the time in which a second SIGINT ends the command itself.
const twice = time.Second

// forwarder passes the command's signals on to a program. The zero value passes none on.
type forwarder struct {
	from chan<- os.Signal // gets the signals of the process

	mu          sync.Mutex
	to          chan<- string
	interrupted time.Time // of the last SIGINT that was passed on
}

// take passes a signal on. It returns false if the signal is to end the command: no program takes
// it, or the user is impatient.
func (f *forwarder) take(sig syscall.Signal, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to == nil {
		return false
	}
	if sig == syscall.SIGINT {
		if last := f.interrupted; !last.IsZero() && now.Sub(last) < twice {
			return false
		}
		f.interrupted = now
	}
	select {
	case f.to <- unix.SignalName(sig):
		return true
	default: // the daemon takes none any more
		return false
	}
}

// Forward makes SIGINT, SIGTERM, SIGHUP and SIGQUIT signals for a program, from begin, which is
// called once the program has started, until stop is called. They arrive by name. A second SIGINT
// within a second still ends ctx, as does a signal when eight are waiting. Signals that the command
// was started to ignore stay ignored.
func Forward(ctx context.Context) (signals <-chan string, begin, stop func()) {
	to := make(chan string, 8)
	f, ok := ctx.Value(forwards{}).(*forwarder)
	if !ok { // it is not [Run] that handles signals
		return to, func() {}, func() {}
	}
	quit := !signal.Ignored(syscall.SIGQUIT)
	if quit {
		signal.Notify(f.from, syscall.SIGQUIT)
	}
	begin = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.to = to
	}
	return to, begin, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.to = nil
		if quit {
			signal.Reset(syscall.SIGQUIT)
		}
	}
}
