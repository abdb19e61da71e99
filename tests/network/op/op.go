// Package op is the language between the tests of the network and the program that they put into
// sandboxes: operations of the network, and their results.
package op

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Kind is the kind of an [Op].
type Kind string

// The kinds of operations.
const (
	// Resolve asks To, or the nameserver of resolv.conf, over UDP, for addresses of Name.
	Resolve Kind = "resolve"
	// TCP connects to To, sends Send and reads to the end.
	TCP Kind = "tcp"
	// UDP sends Send to To from a connected socket and waits for an answer or an error.
	UDP Kind = "udp"
	// Send sends a datagram to To, without waiting for an answer.
	Send Kind = "send"
	// Call makes the system calls of the function that Name names in [Calls].
	Call Kind = "call"
)

// hung ends an operation that hangs. No result depends on it.
const hung = 2 * time.Minute

// Op is one operation.
type Op struct {
	Kind Kind   `json:"kind"`
	Name string `json:"name,omitempty"`
	Type uint16 `json:"type,omitempty"` // of a question; zero means A
	// Before are names that are resolved first, whose answers do not matter.
	Before []string `json:"before,omitempty"`
	To     string   `json:"to,omitempty"`     // address and port
	Source string   `json:"source,omitempty"` // address and port to bind; empty means none
	Bytes  []byte   `json:"bytes,omitempty"`  // to send
	// Outside is the network namespace of the test, as "net:[4026531840]", in which no call is made.
	Outside string `json:"outside,omitempty"`
	Count   int    `json:"count,omitempty"` // of connections to hold
	// HalfClose ends the sending direction of a TCP connection after Bytes.
	HalfClose bool `json:"half_close,omitempty"`
}

// Result is the outcome of an [Op].
type Result struct {
	// Error is empty for success, else the name of an errno such as ECONNRESET, or the error's text.
	Error     string   `json:"error,omitempty"`
	Code      int      `json:"code,omitempty"` // of a DNS answer
	Addresses []string `json:"addresses,omitempty"`
	Explained string   `json:"explained,omitempty"` // text of the extended error of a DNS answer
	Read      []byte   `json:"read,omitempty"`      // the first 64 KiB
}

const maxRead = 64 << 10

// Do does the operation.
func (o *Op) Do() Result {
	ctx, cancel := context.WithTimeout(context.Background(), hung)
	defer cancel()
	for _, name := range o.Before {
		for _, t := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
			if r := resolve(ctx, "", name, t); r.Error != "" {
				return Result{Error: fmt.Sprintf("resolve %s first: %s", name, r.Error)}
			}
		}
	}
	switch o.Kind {
	case Resolve:
		t := dnsmessage.Type(o.Type)
		if t == 0 {
			t = dnsmessage.TypeA
		}
		return resolve(ctx, o.To, o.Name, t)
	case TCP:
		return o.stream(ctx)
	case UDP, Send:
		return o.datagram(ctx)
	case Call:
		return Result{Error: name(call(o.Name, o.Outside))}
	case Hold:
		return Result{Error: name(o.hold())}
	case Flood:
		return Result{Error: name(o.flood(context.Background()))}
	case Client:
		f, ok := Clients()[o.Name]
		if o.Name == OwnPorts {
			f, ok = ownPorts, true
		}
		if !ok {
			return Result{Error: "no such client"}
		}
		return Result{Error: name(f(ctx))}
	default:
		return Result{Error: "no such kind"}
	}
}

// name is the name of the errno in an error, or its text.
func name(err error) string {
	var errno syscall.Errno
	switch {
	case err == nil:
		return ""
	case errors.As(err, &errno) && unix.ErrnoName(errno) != "":
		return unix.ErrnoName(errno)
	default:
		return err.Error()
	}
}

func (o *Op) dial(ctx context.Context, network string) (net.Conn, error) {
	var d net.Dialer
	if o.Source != "" {
		source, err := netip.ParseAddrPort(o.Source)
		if err != nil {
			return nil, err
		}
		d.LocalAddr = net.TCPAddrFromAddrPort(source)
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(source)
		}
	}
	return d.DialContext(ctx, network, o.To)
}

func (o *Op) stream(ctx context.Context) Result {
	c, err := o.dial(ctx, "tcp")
	if err != nil {
		return Result{Error: name(err)}
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return Result{Error: name(err)}
	}
	_, writeErr := c.Write(o.Bytes)
	if o.HalfClose && writeErr == nil {
		writeErr = c.(*net.TCPConn).CloseWrite()
	}
	read, err := io.ReadAll(io.LimitReader(c, maxRead))
	if errors.Is(writeErr, unix.ECONNRESET) || errors.Is(writeErr, unix.EPIPE) {
		err = unix.ECONNRESET // a reset is reported once
	}
	return Result{Error: name(err), Read: read}
}

func (o *Op) datagram(ctx context.Context) Result {
	c, err := o.dial(ctx, "udp")
	if err != nil {
		return Result{Error: name(err)}
	}
	defer c.Close()
	if _, err := c.Write(o.Bytes); err != nil {
		return Result{Error: name(err)}
	}
	if o.Kind == Send {
		return Result{}
	}
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return Result{Error: name(err)}
	}
	buf := make([]byte, maxRead)
	n, err := c.Read(buf)
	return Result{Error: name(err), Read: buf[:n]}
}

// nameserver is the first one of resolv.conf.
func nameserver() (string, error) {
	text, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "nameserver" {
			return net.JoinHostPort(f[1], "53"), nil
		}
	}
	return "", errors.New("resolv.conf has no nameserver")
}

func resolve(ctx context.Context, server, host string, t dnsmessage.Type) Result {
	msg, err := question(host, t)
	if err != nil {
		return Result{Error: err.Error()}
	}
	if server == "" {
		if server, err = nameserver(); err != nil {
			return Result{Error: name(err)}
		}
	}
	r := (&Op{Kind: UDP, To: server, Bytes: msg}).datagram(ctx)
	if r.Error != "" {
		return r
	}
	return answer(r.Read)
}

// question packs a DNS message with one question. The name may have any bytes in its labels, which
// dots separate.
func question(host string, t dnsmessage.Type) ([]byte, error) {
	msg := binary.BigEndian.AppendUint16(nil, 4711)
	msg = append(msg, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1) // recursion desired; one question, one additional record
	for label := range strings.SplitSeq(host, ".") {
		if host == "." {
			break
		}
		if len(label) > 63 {
			return nil, fmt.Errorf("label of %d bytes", len(label))
		}
		msg = append(append(msg, byte(len(label))), label...)
	}
	msg = binary.BigEndian.AppendUint16(append(msg, 0), uint16(t))
	msg = append(msg, 0, 1)
	return append(msg, 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0), nil // EDNS(0), 1232 bytes
}

func answer(data []byte) (result Result) {
	var msg dnsmessage.Message
	if err := msg.Unpack(data); err != nil {
		return Result{Error: fmt.Sprintf("read the answer: %v", err)}
	}
	result.Code = int(msg.RCode)
	for _, a := range msg.Answers {
		switch b := a.Body.(type) {
		case *dnsmessage.AResource:
			result.Addresses = append(result.Addresses, netip.AddrFrom4(b.A).String())
		case *dnsmessage.AAAAResource:
			result.Addresses = append(result.Addresses, netip.AddrFrom16(b.AAAA).String())
		}
	}
	for _, a := range msg.Additionals {
		opt, ok := a.Body.(*dnsmessage.OPTResource)
		if !ok {
			continue
		}
		for _, option := range opt.Options {
			if option.Code == 15 && len(option.Data) > 2 {
				result.Explained = string(option.Data[2:])
			}
		}
	}
	return result
}
