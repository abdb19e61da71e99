// Package relay passes bytes between two connections.
package relay

import (
	"context"
	"io"
	"net"
	"sync"
)

// halfCloser is a connection whose directions end for themselves: TCP and Unix sockets.
type halfCloser interface{ CloseWrite() error }

// Both copies both ways until both directions have ended, one has failed or ctx ends. It returns
// when nothing is copied any more, and closes both connections. After a failure a TCP connection is
// reset: a clean end would look complete.
func Both(ctx context.Context, a, b net.Conn) {
	abort := sync.OnceFunc(func() {
		for _, c := range []net.Conn{a, b} {
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			_ = c.Close()
		}
	})
	defer context.AfterFunc(ctx, abort)()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			_, err := io.Copy(way[1], way[0]) // splice(2) between sockets of TCP
			to, ok := way[1].(halfCloser)
			if err != nil || !ok || to.CloseWrite() != nil {
				abort()
			}
		})
	}
	both.Wait()
	_, _ = a.Close(), b.Close() // ended or aborted
}
