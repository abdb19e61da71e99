package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
)

// pair returns both ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = out.Close(), in.Close() })
	return out.(*net.TCPConn), in.(*net.TCPConn)
}

func relayed(t *testing.T, ctx context.Context) (client, server *net.TCPConn, done chan struct{}) {
	t.Helper()
	client, a := pair(t)
	b, server := pair(t)
	done = make(chan struct{})
	go func() {
		defer close(done)
		Both(ctx, a, b)
	}()
	return client, server, done
}

func TestDirectionsEndForThemselves(t *testing.T) {
	client, server, done := relayed(t, t.Context())
	if _, err := io.WriteString(client, "question"); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(server); err != nil || string(got) != "question" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := io.WriteString(server, "answer"); err != nil {
		t.Fatal(err)
	}
	_ = server.Close()
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
	<-done
}

func TestFailuresAreResets(t *testing.T) {
	for name, fail := range map[string]func(server *net.TCPConn, cancel func()){
		"a reset":    func(server *net.TCPConn, _ func()) { _, _ = server.SetLinger(0), server.Close() },
		"its caller": func(_ *net.TCPConn, cancel func()) { cancel() },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		client, server, done := relayed(t, ctx)
		fail(server, cancel)
		if _, err := io.ReadAll(client); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client reads %v", name, err)
		}
		<-done
		cancel()
	}
}
