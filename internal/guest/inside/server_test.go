package inside

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
)

// Init serves only a listening socket of the right type.
func TestListenerIsChecked(t *testing.T) {
	connected, peer := guesttest.SocketPair(t)
	stream, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _, _ = unix.Close(connected), unix.Close(peer), unix.Close(stream) })
	if err := checkListener(connected); err == nil {
		t.Error("accepts a connected socket")
	}
	if err := checkListener(stream); err == nil {
		t.Error("accepts a stream socket")
	}
}
