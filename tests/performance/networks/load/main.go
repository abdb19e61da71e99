// Command load is both ends of what `make bench-net` measures: a server outside, and a client that
// runs inside a network and writes its results as JSON.
package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("usage: load serve | bulk | requests | tls")
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	name := flags.String("name", "bench.test", "Name of the server.")
	port := flags.String("port", "80", "Port of the server.")
	switch args[0] {
	case "serve":
		file := flags.String("certificate", "", "File for the certificate.")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return serve(*name, *file)
	case "bulk":
		down := flags.Bool("down", false, "Receive instead of sending.")
		flows := flags.Int("flows", 1, "Number of connections at once.")
		period := flags.Duration("for", time.Second, "Time to send or receive.")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return bulk(*name, *port, *down, *flows, *period)
	case "requests", "tls":
		count := flags.Int("n", 100, "Number of connections.")
		further := flags.Int("further", 10, "Number of further requests of each connection, with TLS.")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if args[0] == "tls" {
			return secure(*name, *port, *count, *further)
		}
		return requests(*name, *port, *count)
	default:
		return fmt.Errorf("no command %q", args[0])
	}
}

const bufferSize = 256 << 10

// The first byte of a bulk connection. A letter would begin a head of HTTP, for which a gateway
// waits.
const (
	up   = 1 // the client sends buffers, and is told the number of bytes after the last
	down = 2
)

// The first byte of the last buffer of a client. The connection does not end there: pasta of Debian
// 12 resets some that are half closed.
const end = 3

// serve answers bulk connections on port 5001, one request per connection on port 80, and requests
// in TLS on port 443, whose certificate it writes to a file.
func serve(name, file string) error {
	certificate, err := selfSigned(name, file)
	if err != nil {
		return err
	}
	config := &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13}
	serveTLS := func(c *net.TCPConn) error { return serveRequests(tls.Server(c, config), kept) }
	for at, handle := range map[string]func(*net.TCPConn) error{":5001": serveBulk, ":80": serveOne, ":443": serveTLS} {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp4", at)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					_ = handle(c.(*net.TCPConn)) // the client reports what it misses
					_ = c.Close()
				}()
			}
		}()
	}
	select {} // ends with the benchmark
}

func serveBulk(c *net.TCPConn) error {
	var kind [1]byte
	if _, err := io.ReadFull(c, kind[:]); err != nil {
		return err
	}
	buf := make([]byte, bufferSize)
	if kind[0] == down {
		for {
			if _, err := c.Write(buf); err != nil {
				return err
			}
		}
	}
	for sum := int64(0); ; {
		n, err := io.ReadFull(c, buf)
		if sum += int64(n); err != nil {
			return err
		}
		if buf[0] == end {
			return binary.Write(c, binary.BigEndian, sum)
		}
	}
}

// count reads to the end.
func count(r io.Reader, buf []byte) (sum int64, err error) {
	for {
		n, err := r.Read(buf)
		sum += int64(n)
		switch {
		case errors.Is(err, io.EOF):
			return sum, nil
		case err != nil:
			return sum, err
		}
	}
}

// Responses.
var (
	kept = []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	last = []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
)

func serveOne(c *net.TCPConn) error { return serveRequests(c, last) }

func serveRequests(c net.Conn, response []byte) error {
	buf := make([]byte, 4096)
	for n := 0; ; {
		m, err := c.Read(buf[n:])
		if n += m; err != nil {
			return err
		}
		if !bytes.HasSuffix(buf[:n], []byte("\r\n\r\n")) {
			continue
		}
		if _, err := c.Write(response); err != nil || &response[0] == &last[0] {
			return err
		}
		n = 0
	}
}

// selfSigned makes a certificate and writes it to a file.
func selfSigned(name, file string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// address resolves the name once, as a program inside does before it connects.
func address(name, port string) (string, error) {
	addrs, err := net.DefaultResolver.LookupHost(context.Background(), name)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(addrs[0], port), nil
}

func dial(at string) (*net.TCPConn, error) {
	c, err := new(net.Dialer).DialContext(context.Background(), "tcp4", at)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// Bulk is the result of a bulk transfer.
type Bulk struct {
	Bytes   int64         `json:"bytes"` // that have arrived
	Elapsed time.Duration `json:"elapsed"`
	CPU     time.Duration `json:"cpu"` // processor time of this process
}

func bulk(name, port string, receive bool, flows int, period time.Duration) error {
	at, err := address(name, port)
	if err != nil {
		return err
	}
	var total atomic.Int64
	errs := make([]error, flows)
	start := time.Now()
	var group sync.WaitGroup
	for i := range flows {
		group.Go(func() {
			n, err := flow(at, receive, start.Add(period))
			total.Add(n)
			errs[i] = err
		})
	}
	group.Wait()
	b := Bulk{Bytes: total.Load(), Elapsed: time.Since(start)}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return err
	}
	b.CPU = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	return json.NewEncoder(os.Stdout).Encode(b)
}

// flow is one connection. It returns the bytes that have arrived.
func flow(at string, receive bool, until time.Time) (int64, error) {
	c, err := dial(at)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	buf := make([]byte, bufferSize)
	if receive {
		if _, err := c.Write([]byte{down}); err != nil {
			return 0, err
		}
		if err := c.SetReadDeadline(until); err != nil {
			return 0, err
		}
		sum, err := count(c, buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
		return sum, err
	}
	if _, err := c.Write([]byte{up}); err != nil {
		return 0, err
	}
	for buf[0] != end {
		if !time.Now().Before(until) {
			buf[0] = end
		}
		if _, err := c.Write(buf); err != nil {
			return 0, err
		}
	}
	var sum int64
	return sum, binary.Read(c, binary.BigEndian, &sum)
}

// requests writes the times of connections with one request each: connect, request, whole response,
// close.
func requests(name, port string, n int) error {
	at, err := address(name, port)
	if err != nil {
		return err
	}
	request := requestTo(name)
	times := make([]time.Duration, n)
	for i := range times {
		start := time.Now()
		if err := once(at, request); err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		times[i] = time.Since(start)
	}
	return json.NewEncoder(os.Stdout).Encode(times)
}

func once(at string, request []byte) error {
	c, err := dial(at)
	if err != nil {
		return err
	}
	defer c.Close()
	return exchange(c, request)
}

func requestTo(name string) []byte { return []byte("GET / HTTP/1.1\r\nHost: " + name + "\r\n\r\n") }

// exchange sends a request and reads the response.
func exchange(c net.Conn, request []byte) error {
	if _, err := c.Write(request); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	for n := 0; !bytes.HasSuffix(buf[:n], []byte("\r\n\r\nok")); {
		m, err := c.Read(buf[n:])
		if n += m; err != nil {
			return fmt.Errorf("read the response after %q: %w", buf[:n], err)
		}
	}
	return nil
}

// Secure is the times of requests in TLS.
type Secure struct {
	First   []time.Duration `json:"first"` // from connect to the response
	Further []time.Duration `json:"further"`
}

// secure writes the times of connections with several requests each. It checks no certificate: with
// and without inspection it does the same.
func secure(name, port string, n, further int) error {
	at, err := address(name, port)
	if err != nil {
		return err
	}
	var s Secure
	timed := func(to *[]time.Duration, f func() error) error {
		start := time.Now()
		err := f()
		*to = append(*to, time.Since(start))
		return err
	}
	config := &tls.Config{ServerName: name, InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}
	for range n {
		var c *tls.Conn
		err := timed(&s.First, func() error {
			plain, err := dial(at)
			if err != nil {
				return err
			}
			c = tls.Client(plain, config)
			return exchange(c, requestTo(name))
		})
		for range further {
			if err == nil {
				err = timed(&s.Further, func() error { return exchange(c, requestTo(name)) })
			}
		}
		if err != nil {
			return err
		}
		if err := c.Close(); err != nil {
			return err
		}
	}
	return json.NewEncoder(os.Stdout).Encode(s)
}
