package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/dns/dnsmessage"
)

// A nameserver is the resolver of the world's host. Its answers come from a table.
type nameserver struct {
	udp     *net.UDPConn
	tcp     *net.TCPListener
	serving sync.WaitGroup

	mu    sync.Mutex // guards those below
	names map[string]*host
	asked []string // "A web.test"
	conns map[net.Conn]struct{}
}

// A host is the entry of a name.
type host struct {
	addrs []string // of the first answer; in later ones too if then is nil
	then  []string // of later answers
	cname []string // names that the answer leads through
	code  dnsmessage.RCode
	// odd changes the messages of an answer: the wrong ids and questions, several, none.
	odd   func(q *dnsmessage.Message, reply []byte) [][]byte
	times int // answers of addresses so far
}

func openNameserver(at string) (*nameserver, error) {
	n := &nameserver{names: make(map[string]*host), conns: make(map[net.Conn]struct{})}
	udp, err := beside.ListenPacket(context.Background(), "udp", at)
	if err != nil {
		return nil, err
	}
	tcp, err := beside.Listen(context.Background(), "tcp", at)
	if err != nil {
		return nil, errors.Join(err, udp.Close())
	}
	n.udp, n.tcp = udp.(*net.UDPConn), tcp.(*net.TCPListener)
	n.serving.Go(n.serveUDP)
	n.serving.Go(n.serveTCP)
	return n, nil
}

func (n *nameserver) close() {
	_ = n.udp.Close() // both are sockets
	_ = n.tcp.Close()
	n.mu.Lock()
	for c := range n.conns {
		_ = c.Close()
	}
	n.mu.Unlock()
	n.serving.Wait()
}

// set replaces the entries of names.
func (n *nameserver) set(names map[string]*host) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.Copy(n.names, names)
}

// take returns the questions so far, and forgets them.
func (n *nameserver) take() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := n.asked
	n.asked = nil
	return all
}

func (n *nameserver) serveUDP() {
	buf := make([]byte, 4096)
	for {
		size, from, err := n.udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			continue // a client that is gone
		}
		for _, reply := range n.answer(buf[:size], 1232) {
			_, _ = n.udp.WriteToUDPAddrPort(reply, from) // it may be gone
		}
	}
}

func (n *nameserver) serveTCP() {
	for {
		c, err := n.tcp.Accept()
		if err != nil {
			return
		}
		n.mu.Lock()
		n.conns[c] = struct{}{}
		n.mu.Unlock()
		n.serving.Go(func() {
			defer c.Close()
			for {
				var size [2]byte
				if _, err := io.ReadFull(c, size[:]); err != nil {
					return
				}
				msg := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, msg); err != nil {
					return
				}
				for _, reply := range n.answer(msg, 65535) {
					if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
						return
					}
				}
			}
		})
	}
}

// answer returns the messages that answer one.
func (n *nameserver) answer(data []byte, limit int) [][]byte {
	var q dnsmessage.Message
	if err := q.Unpack(data); err != nil || len(q.Questions) != 1 {
		return nil
	}
	question := q.Questions[0]
	name := strings.ToLower(strings.TrimSuffix(question.Name.String(), "."))
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = append(n.asked, strings.TrimPrefix(question.Type.String(), "Type")+" "+name)
	h := n.names[name]
	if h == nil {
		if _, below, ok := strings.Cut(name, "."); ok {
			h = n.names["*."+below]
		}
	}
	reply := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: q.ID, Response: true, RecursionDesired: q.RecursionDesired, RecursionAvailable: true},
		Questions: q.Questions,
	}
	if h == nil {
		reply.RCode = dnsmessage.RCodeNameError
		return [][]byte{packed(&reply)}
	}
	reply.RCode = h.code
	owner := question.Name
	for _, next := range h.cname {
		to := dnsmessage.MustNewName(next + ".")
		reply.Answers = append(reply.Answers, resource(owner, &dnsmessage.CNAMEResource{CNAME: to}))
		owner = to
	}
	addrs := h.addrs
	if h.then != nil && h.times > 0 {
		addrs = h.then
	}
	if question.Type == dnsmessage.TypeA {
		h.times++
	}
	for _, s := range addrs {
		a := netip.MustParseAddr(s)
		switch {
		case a.Is4() && question.Type == dnsmessage.TypeA:
			reply.Answers = append(reply.Answers, resource(owner, &dnsmessage.AResource{A: a.As4()}))
		case a.Is6() && question.Type == dnsmessage.TypeAAAA:
			reply.Answers = append(reply.Answers, resource(owner, &dnsmessage.AAAAResource{AAAA: a.As16()}))
		}
	}
	msg := packed(&reply)
	if len(msg) > limit {
		reply.Truncated, reply.Answers = true, nil
		msg = packed(&reply)
	}
	if h.odd != nil {
		return h.odd(&q, msg)
	}
	return [][]byte{msg}
}

func resource(name dnsmessage.Name, body dnsmessage.ResourceBody) dnsmessage.Resource {
	return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: 60}, Body: body}
}

func packed(m *dnsmessage.Message) []byte {
	msg, err := m.Pack()
	if err != nil {
		panic(fmt.Sprintf("pack a DNS message of a test: %v", err))
	}
	return msg
}

// forged returns the reply with another id or question, and addresses of its own, before the true
// reply.
func forged(change func(*dnsmessage.Message), addr string) func(*dnsmessage.Message, []byte) [][]byte {
	return func(_ *dnsmessage.Message, reply []byte) [][]byte {
		var m dnsmessage.Message
		if err := m.Unpack(reply); err != nil {
			panic(fmt.Sprintf("unpack a DNS message of a test: %v", err))
		}
		m.Answers = []dnsmessage.Resource{resource(m.Questions[0].Name, &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()})}
		m.Questions = slices.Clone(m.Questions)
		change(&m)
		return [][]byte{packed(&m), reply}
	}
}
