package broker

import (
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// gatewayStandIn stands in for a gateway: it says its pid, session, arguments and environment on
// its socket, and ends with it.
func gatewayStandIn() bool {
	if len(os.Args) != 2 || os.Args[1] != egress.Argument {
		return false
	}
	conn, err := unixConn(os.NewFile(3, "socket"))
	if err != nil {
		return true
	}
	session, _ := unix.Getsid(0)
	dir, _ := os.Getwd()
	_, _ = io.WriteString(conn, strings.Join([]string{strconv.Itoa(os.Getpid()), strconv.Itoa(session), dir, strings.Join(os.Environ(), ",")}, "\n"))
	_, _ = conn.Read(make([]byte, 1))
	return true
}

// startTestGateway starts a gateway and returns the daemon's end of its socket.
func startTestGateway(t *testing.T, b *broker) (*net.UnixConn, []string) {
	t.Helper()
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.handlers()[requestStartGateway](t.Context(), []byte("{}"), []*os.File{theirs})
	_ = theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := unixConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return conn, strings.Split(string(buf[:n]), "\n")
}

// A gateway gets its socket and nothing of the broker's environment. The next one replaces it,
// since the daemon cannot signal it, and the broker's end is its end.
func TestGatewayRequests(t *testing.T) {
	t.Setenv("SANDBOXD_TEST_SECRET", "planted")
	b, log := newBroker(t, Agents{})
	first, said := startTestGateway(t, b)
	if len(said) != 4 || said[0] != said[1] || said[2] != "/" || said[3] != "" {
		t.Errorf("pid, session, directory and environment are %q", said)
	}
	second, _ := startTestGateway(t, b)
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the first still has its socket: %v", err)
	}
	if line, err := log.ReadString('\n'); err != nil || !strings.Contains(line, "the gateway process has ended") || !strings.Contains(line, "killed") {
		t.Errorf("the log says %q, %v", line, err)
	}
	for _, files := range [][]*os.File{nil, {os.Stdin, os.Stdin}} {
		if _, err := b.handlers()[requestStartGateway](t.Context(), []byte("{}"), files); err == nil {
			t.Errorf("one was started with %d files", len(files))
		}
	}
	b.end()
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the second still has its socket: %v", err)
	}
	b.end() // there is none
}

// A broker that is not configured starts no gateway.
func TestGatewayBeforeConfigure(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := new(broker).handlers()[requestStartGateway](t.Context(), []byte("{}"), []*os.File{null}); err == nil {
		t.Error("a gateway was started")
	}
}
