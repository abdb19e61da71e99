package httpapi

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// Of several that find the socket of a daemon that was killed, one gets its place.
func TestOneDaemonTakesAStaleSocket(t *testing.T) {
	for range 5 {
		dir := t.TempDir()
		l, err := servicetest.ListenStale(dir, "api.sock")
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close() // the path stays
		var wg sync.WaitGroup
		sockets := make([]*Socket, 4)
		errs := make([]error, len(sockets))
		for i := range sockets {
			own := t.TempDir()
			wg.Go(func() { sockets[i], errs[i] = Listen(t.Context(), own, filepath.Join(dir, "api.sock"), Tenants{}) })
		}
		wg.Wait()
		got := 0
		for i, s := range sockets {
			switch {
			case errs[i] == nil:
				got++
				if err := s.Remove(); err != nil {
					t.Error(err)
				}
			case !errors.Is(errs[i], errServed):
				t.Error(errs[i])
			}
		}
		if got != 1 {
			t.Fatalf("%d of them serve it", got)
		}
	}
}

// A daemon stops accepting before it removes its socket. Another daemon that has taken the path
// meanwhile keeps it.
func TestEndingDaemonLeavesAnothersSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	first, err := Listen(t.Context(), t.TempDir(), path, Tenants{})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil { // as http.Server does when the shutdown begins
		t.Fatal(err)
	}
	second, err := Listen(t.Context(), t.TempDir(), path, Tenants{})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Remove(); err != nil {
		t.Error(err)
	}
	if c, err := servicetest.Dial(t.Context(), path); err != nil {
		t.Errorf("the second: %v", err)
	} else {
		_ = c.Close()
	}
	if err := second.Remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket is left: %v", err)
	}
}

// Files go out with sendfile, and no further than they were announced.
func TestConnectionSendsFiles(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close() // c has its own
		defer c.Close()
		conns[i] = c.(*net.UnixConn)
	}
	content := bytes.Repeat([]byte("0123456789"), 500000)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	received := make(chan []byte)
	go func() {
		data, _ := io.ReadAll(conns[1]) // compared below
		received <- data
	}()
	out := &peerConn{UnixConn: conns[0]}
	if n, _, handled := out.sendfile(f, 7); n != 7 || !handled {
		t.Errorf("sent %d, %v", n, handled)
	}
	rest := &io.LimitedReader{R: f, N: int64(len(content)) - 10}
	if n, err := out.ReadFrom(rest); n != int64(len(content))-10 || err != nil || rest.N != 0 {
		t.Errorf("sent %d, %v, left %d", n, err, rest.N)
	}
	if n, err := out.ReadFrom(&io.LimitedReader{R: f, N: 100}); n != 3 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("beyond the end: %d, %v", n, err)
	}
	// Parts of a file are copied. Each has its own deadline, like the parts that the kernel sends.
	if err := out.SetWriteDeadline(longPast); err != nil {
		t.Fatal(err)
	}
	if n, err := out.ReadFrom(strings.NewReader("parts")); n != 5 || err != nil {
		t.Errorf("parts: %d, %v", n, err)
	}
	content = append(content, "parts"...)
	_ = conns[0].Close() // everything was acknowledged above
	if got := <-received; !bytes.Equal(got, content) {
		t.Errorf("%d bytes came, want %d", len(got), len(content))
	}
}
