package network

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Connections of published ports beyond those of the sandbox are reset at once, whichever of its
// ports they come to. Other sandboxes' go on, and a place is free again when a connection has
// ended.
func TestForwardedConnectionsAreBounded(t *testing.T) {
	n := open(t, nil)
	log := &relaying{logged: make(chan string, 100)}
	n.opts.Log = slog.New(log)
	if q := n.forwarded; q.Sandbox != 1024 || q.Tenant != 2048 || q.All != 4096 {
		t.Errorf("the bounds are %d, %d and %d", q.Sandbox, q.Tenant, q.All)
	}
	n.forwarded.Sandbox = 2
	server := listen(t)
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	defer server.Close()
	dial := func(ctx context.Context, _ string, _ uint16) (*net.TCPConn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", server.Addr().String())
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	var accepting sync.WaitGroup
	publish := func(id string) (at string) {
		l := listen(t) //nolint:contextcheck // it ends with the test
		accepting.Go(func() { n.accept(ctx, share.Owner{Tenant: "", ID: id}, 80, l, dial) })
		return l.Addr().String()
	}
	connect := func(at string) error { // the connection stays open
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", at)
		if err != nil {
			return err // a reset may come before
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(testenv.HungAfter))
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, err = io.ReadFull(c, make([]byte, 1))
		return err
	}
	first, second, other := publish("a"), publish("a"), publish("b")
	for _, at := range []string{first, second, other} {
		if err := connect(at); err != nil {
			t.Fatalf("%s: %v", at, err)
		}
	}
	for range 3 {
		if err := connect(first); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			t.Errorf("a third connection of the sandbox: %v, want a reset", err)
		}
	}
	if err := connect(other); err != nil {
		t.Errorf("another sandbox: %v", err)
	}
	cancel()
	accepting.Wait()
	if n.forwarded.Held() != 0 {
		t.Errorf("%d places are held by nothing", n.forwarded.Held())
	}
	if len(log.logged) != 1 {
		t.Errorf("%d messages are logged, want one", len(log.logged))
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}
