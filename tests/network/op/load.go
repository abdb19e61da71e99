package op

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Further kinds of operations.
const (
	// Hold opens Count connections to To, sends Bytes on each, and waits until all have ended. Its
	// error is the first one other than a reset.
	Hold Kind = "hold"
	// Flood opens connections to To and asks for names below Name, for ever. It sends Bytes on each
	// connection and keeps as many as it gets.
	Flood Kind = "flood"
)

func (o *Op) hold() error {
	conns := make([]*net.TCPConn, o.Count)
	for i := range conns {
		c, err := net.Dial("tcp", o.To)
		if err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
		defer c.Close()
		conns[i] = c.(*net.TCPConn)
		if _, err := c.Write(o.Bytes); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	for i, c := range conns {
		if n, err := io.Copy(io.Discard, c); !errors.Is(err, unix.ECONNRESET) {
			return fmt.Errorf("connection %d ended after %d bytes with %w", i, n, err)
		}
	}
	return nil
}

// flood goes on until the program is ended.
func (o *Op) flood(ctx context.Context) error {
	server, err := nameserver()
	if err != nil {
		return err
	}
	questions, err := net.Dial("udp", server)
	if err != nil {
		return err
	}
	defer questions.Close()
	var kept []net.Conn
	for i := 0; ctx.Err() == nil; i++ {
		for j := range 20 {
			if q, err := question(fmt.Sprintf("n%d.%s", i*20+j, o.Name), dnsmessage.TypeA); err == nil {
				_, _ = questions.Write(q) // more than the buffer takes
			}
		}
		c, err := net.Dial("tcp", o.To)
		if errors.Is(err, unix.EMFILE) {
			for _, c := range kept {
				_ = c.Close() // it is a flood
			}
			kept = nil
		}
		if err != nil {
			continue
		}
		go c.Write(o.Bytes) //nolint:errcheck // it may be refused, and a server may not read
		kept = append(kept, c)
	}
	return nil
}
