package codehook

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

type refusing struct{ err error }

func (r refusing) RoundTrip(*http.Request) (*http.Response, error) { return nil, r.err }

// Tenants read these errors.
func TestErrorsNameNoAddress(t *testing.T) {
	socket := &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/run/secret.sock", Net: "unix"}, Err: syscall.ECONNREFUSED}
	tcp := &net.OpError{
		Op: "read", Net: "tcp", Source: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 4444}, Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 5555},
		Err: syscall.ECONNRESET,
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{socket, "dial: connection refused"}, {tcp, "read: connection reset by peer"}, {errors.New("EOF"), "EOF"}, {context.Canceled, "context canceled"},
	} {
		_, err := New("http://127.0.0.1:5555/secret", refusing{c.err}, time.Minute).Ask(t.Context(), Question{})
		if err == nil || err.Error() != c.want || !errors.Is(err, c.err) && !errors.Is(c.err, errors.Unwrap(err)) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if _, err := New("http://secret:x/", nil, time.Minute).Ask(t.Context(), Question{}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}
