package egress

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// BenchmarkRequest measures a connection of a sandbox with one HTTP request, from connect to close,
// through a confined gateway and a namespace as sandboxes have.
func BenchmarkRequest(b *testing.B) {
	if !inWorld(b) {
		return
	}
	g, s, e := startGateway(b)
	go func() {
		for range e.queue {
		}
	}()
	box := newSandbox(b)
	doc := []byte(`{"version": 1, "rules": [{"name": "ours", "allow": ["example.com"], "ports": [80]}]}`)
	if err := g.Add(b.Context(), Network{ID: "box", Policy: doc, Sockets: box.sockets()}); err != nil {
		b.Fatal(err)
	}
	l := listen(b, example, 80)
	b.Cleanup(func() { _ = l.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := c.Read(buf); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
			}
			_ = c.Close()
		}
	}()
	box.lookup(b, "udp", "example.com")
	spent := func() time.Duration { return processTime(b, s.cmd.Process.Pid) }
	err := osthread.Run(func() error {
		if err := unix.Setns(int(box.NS.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		buf := make([]byte, 4096)
		var times []time.Duration
		begin := spent()
		for b.Loop() {
			start := time.Now()
			c, err := net.Dial("tcp", example+":80")
			if err != nil {
				return err
			}
			if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"); err != nil {
				return err
			}
			for n := 0; !bytes.HasSuffix(buf[:n], []byte("\r\n\r\nok")); {
				m, err := c.Read(buf[n:])
				if n += m; err != nil {
					return err
				}
			}
			_ = c.Close()
			times = append(times, time.Since(start))
		}
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)/2].Microseconds()), "p50-µs")
		b.ReportMetric(float64(times[len(times)/10].Microseconds()), "p10-µs")
		b.ReportMetric(float64((spent()-begin).Microseconds())/float64(len(times)), "gateway-µs/op")
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// processTime returns the processor time of a process.
func processTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	var user, system int64
	f := bytes.Fields(data[bytes.LastIndexByte(data, ')'):])
	if _, err := fmt.Sscan(string(f[12])+" "+string(f[13]), &user, &system); err != nil {
		b.Fatal(err)
	}
	return time.Duration(user+system) * (time.Second / 100) // USER_HZ
}
