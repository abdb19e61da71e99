package gateway

import (
	"io"
	"net"
	"syscall"
	"testing"
	"time"
)

// BenchmarkRelay sends bytes through the gateway to a server that drops them. Client, server and
// gateway are one process; its processor time per GB is that of all three.
func BenchmarkRelay(b *testing.B) {
	for _, tc := range []struct {
		name, dst string
		size      int
	}{{"bulk", "10.1.0.7:9000", 256 << 10}, {"4KB", "10.1.0.7:9000", 4 << 10}} {
		b.Run(tc.name, func(b *testing.B) {
			w := newWorld(b, lan)
			got := make(chan int64, 1)
			w.raw(tc.dst, func(c *net.TCPConn) {
				buf := make([]byte, 256<<10)
				var total int64
				for {
					n, err := c.Read(buf)
					if total += int64(n); err != nil {
						got <- total
						return
					}
				}
			})
			c := w.dial(tc.dst)
			data := make([]byte, tc.size)
			var before, after syscall.Rusage
			syscall.Getrusage(0, &before) //nolint:errcheck // it has no reason to fail
			b.SetBytes(int64(tc.size))
			b.ResetTimer()
			for range b.N {
				if _, err := c.Write(data); err != nil {
					b.Fatal(err)
				}
			}
			_ = c.CloseWrite()
			if total := <-got; total != int64(b.N)*int64(tc.size) {
				b.Fatalf("%d bytes", total)
			}
			b.StopTimer()
			syscall.Getrusage(0, &after) //nolint:errcheck // it has no reason to fail
			cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
			b.ReportMetric(cpu.Seconds()*1e9/float64(int64(b.N)*int64(tc.size)), "cpu-s/GB")
		})
	}
}

// BenchmarkConnect is a connection through the policy: connect, one byte there and back, close.
func BenchmarkConnect(b *testing.B) {
	w := newWorld(b, lan)
	w.raw("10.1.0.7:9000", echoServer)
	w.dial("10.1.0.7:9000")
	go func() {
		for range w.events { // they are dropped
		}
	}()
	buf := make([]byte, 1)
	for b.Loop() {
		c := w.dial("10.1.0.7:9000")
		_, _ = c.Write(buf)
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
		_ = c.Close()
	}
}

// Clients that do not read hold pipes. Other connections of the network go through buffers then.
func TestPipesAreBounded(t *testing.T) {
	w := newWorld(t, lan)
	w.raw("10.1.0.7:9000", func(c *net.TCPConn) {
		b := make([]byte, 1<<20)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	w.raw("10.1.0.8:9000", echoServer)
	for range maxPipes + 4 {
		w.dial("10.1.0.7:9000")
	}
	await(t, func() bool { return w.n.pipes.Load() >= maxPipes }) // each is held when the buffers of its sockets are full
	c := w.dial("10.1.0.8:9000")
	for range 10 {
		say(t, c, "hello")
	}
	w.n.Close()
	if n := w.n.pipes.Load(); n != 0 {
		t.Errorf("%d pipes are held at the end", n)
	}
}
