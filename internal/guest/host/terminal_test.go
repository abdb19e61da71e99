package host

import (
	"errors"
	goruntime "runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// A signal during poll(2) says nothing about the file. The Go runtime sends itself some.
func TestReadyAmongSignals(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unixmsg.CloseAll(p[:]) })
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	tid, begun, stop, stopped := unix.Gettid(), make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		close(begun)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
			}
		}
	}()
	defer func() { close(stop); <-stopped }()

	<-begun
	for interrupted, calls := 0, 0; interrupted < 20 && calls < 2_000_000; calls++ {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(p[0]), Events: unix.POLLIN}}, 0); errors.Is(err, unix.EINTR) {
			interrupted++ // as often as the calls of ready
		}
		if ready(p[0], unix.POLLIN) {
			t.Fatal("an empty pipe can be read")
		}
	}
	if _, err := unix.Write(p[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		if !ready(p[0], unix.POLLIN) {
			t.Fatal("a pipe with a byte cannot be read")
		}
	}
}
