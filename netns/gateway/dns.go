package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	maxQuery     = 4096
	maxUDP       = 1232 // of an answer to a client that allows more than 512; it is never fragmented
	maxAddresses = 16   // of one answer
	lookupTime   = 5 * time.Second

	optionExtendedError = 15 // RFC 8914
	extendedBlocked     = 15
)

// A query is a DNS message that asks one question.
type query struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	edns     bool
	size     int    // that the client accepts over UDP
	ttl      uint32 // of the addresses in the answer, in seconds
	ends     Ends
}

// parseQuery reads a message. ok is false if it must not be answered. Otherwise any code but
// success is the answer.
func parseQuery(msg []byte) (q query, code dnsmessage.RCode, ok bool) {
	var p dnsmessage.Parser
	h, err := p.Start(msg)
	if err != nil || h.Response {
		return query{}, 0, false // an answer to an answer may go on for ever
	}
	q = query{header: h, size: 512, ttl: uint32(lifetime / time.Second)}
	if h.OpCode != 0 {
		return q, dnsmessage.RCodeNotImplemented, true
	}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 || h.Truncated {
		return q, dnsmessage.RCodeFormatError, true
	}
	q.question = questions[0]
	if _, err := p.AnswerHeader(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true
	}
	if _, err := p.AuthorityHeader(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true
	}
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return q, dnsmessage.RCodeSuccess, true
		}
		if err != nil || h.Type != dnsmessage.TypeOPT || q.edns || h.Name.String() != "." || p.SkipAdditional() != nil {
			return q, dnsmessage.RCodeFormatError, true
		}
		q.edns = true
		q.size = min(max(int(h.Class), 512), maxUDP)
		if version := h.TTL >> 16 & 0xff; version != 0 {
			return q, 16, true // BADVERS, of which the header holds the lower half
		}
	}
}

// reply builds the answer, in at most limit bytes.
func (q *query) reply(code dnsmessage.RCode, addrs []netip.Addr, reason string, limit int) []byte {
	h := dnsmessage.Header{
		ID: q.header.ID, Response: true, OpCode: q.header.OpCode, RecursionDesired: q.header.RecursionDesired, RecursionAvailable: true, RCode: code & 0xf,
	}
	msg, err := q.build(h, code, addrs, reason)
	if err == nil && len(msg) > limit && reason != "" {
		msg, err = q.build(h, code, addrs, "")
	}
	if err == nil && len(msg) > limit {
		h.Truncated = true
		msg, err = q.build(h, code, nil, "")
	}
	if err != nil {
		return nil // a name that dnsmessage read and does not write: none is known
	}
	return msg
}

func (q *query) build(h dnsmessage.Header, code dnsmessage.RCode, addrs []netip.Addr, reason string) ([]byte, error) {
	b := dnsmessage.NewBuilder(make([]byte, 0, 512), h)
	b.EnableCompression()
	var errs []error
	add := func(err error) { errs = append(errs, err) }
	add(b.StartQuestions())
	if q.question.Name.Length > 0 {
		add(b.Question(q.question))
	}
	add(b.StartAnswers())
	rh := dnsmessage.ResourceHeader{Name: q.question.Name, Class: dnsmessage.ClassINET, TTL: q.ttl}
	for _, a := range addrs {
		if a.Is4() {
			add(b.AResource(rh, dnsmessage.AResource{A: a.As4()}))
		} else {
			add(b.AAAAResource(rh, dnsmessage.AAAAResource{AAAA: a.As16()}))
		}
	}
	if q.edns {
		add(b.StartAdditionals())
		var rh dnsmessage.ResourceHeader
		add(rh.SetEDNS0(maxUDP, code, false))
		var opt dnsmessage.OPTResource
		if reason != "" {
			data := append(binary.BigEndian.AppendUint16(nil, extendedBlocked), reason...)
			opt.Options = []dnsmessage.Option{{Code: optionExtendedError, Data: data}}
		}
		add(b.OPTResource(rh, opt))
	}
	msg, err := b.Finish()
	add(err)
	return msg, errors.Join(errs...)
}

// serverFailure returns SERVFAIL for a message that is not read further than its header; nil if it
// has none, or is an answer.
func serverFailure(msg []byte) []byte {
	const headerSize, response, recursion = 12, 1 << 7, 1
	if len(msg) < headerSize || msg[2]&response != 0 {
		return nil
	}
	reply := slices.Clone(msg)
	reply[2] = reply[2]&recursion | response
	reply[3] = response | byte(dnsmessage.RCodeServerFailure) // recursion is available
	return reply
}

// asked returns the name of the question, which may be a peer's. The message's form of it ends in a
// dot.
func (q *query) asked() (policy.Name, error) {
	return policy.ParsePeerName(strings.TrimSuffix(q.question.Name.String(), "."))
}

// answer returns the answer to a message between two ends, or nil if there is none. If the host's
// resolver or the daemon has to be asked it calls later with the function that does so. If later is
// nil, it answers SERVFAIL in the place of the resolver.
func (n *Network) answer(msg []byte, ends Ends, limit int, later func(func() []byte)) []byte {
	q, code, ok := parseQuery(msg)
	q.ends = ends
	switch {
	case !ok:
		return nil
	case limit == 0:
		limit = q.size
	}
	if code != dnsmessage.RCodeSuccess {
		return q.reply(code, nil, "", limit)
	}
	event := Event{Kind: Query, Time: n.opts.Now(), Protocol: "dns", Method: strings.TrimPrefix(q.question.Type.String(), "Type"), Port: 53}
	if reason := n.ledger.query(); reason != "" {
		return n.refuseQuery(&q, event, policy.Verdict{Reason: reason}, limit, later)
	}
	name, err := q.asked()
	peer := err == nil && n.mayBePeer(name)
	if err == nil && !peer {
		name, err = policy.ParseName(name.String())
	}
	if err != nil {
		return n.refuseQuery(&q, event, policy.Verdict{Reason: err.Error()}, limit, later)
	}
	event.Name = name.String()
	if !peer {
		return n.answerByPolicy(&q, name, event, limit, later)
	}
	if later == nil {
		return q.reply(dnsmessage.RCodeServerFailure, nil, "", limit)
	}
	later(func() []byte { return n.answerPeer(&q, name, event, limit) })
	return nil
}

// refuseQuery records a refusal and returns its answer. If the process is looked for, it returns
// nil and calls later, which answers: the program's socket is there until then.
func (n *Network) refuseQuery(q *query, event Event, v policy.Verdict, limit int, later func(func() []byte)) []byte {
	event.Rule, event.Reason = v.Rule, v.Reason
	event.Duration = n.opts.Now().Sub(event.Time)
	reply := q.reply(dnsmessage.RCodeNameError, nil, explain(v), limit)
	var find func() *Process
	if later != nil {
		find = n.origins.ask(n, q.ends)
	}
	if find == nil {
		n.record(event)
		return reply
	}
	later(func() []byte {
		event.Process = find()
		n.record(event)
		return reply
	})
	return nil
}

// answerByPolicy answers a question about a name outside. If the host's resolver has to be asked,
// it returns nil and calls later with the lookup, or answers SERVFAIL if later is nil.
func (n *Network) answerByPolicy(q *query, name policy.Name, event Event, limit int, later func(func() []byte)) []byte {
	v := n.policy.Load().Resolve(name)
	if !v.Allow {
		return n.refuseQuery(q, event, v, limit, later)
	}
	ask := question{name, q.question.Type == dnsmessage.TypeAAAA}
	switch t := q.question.Type; {
	case q.question.Class != dnsmessage.ClassINET, t >= 249, t == dnsmessage.TypeOPT: // zone transfers and ANY among them
		return q.reply(dnsmessage.RCodeNotImplemented, nil, "", limit)
	case t != dnsmessage.TypeA && t != dnsmessage.TypeAAAA, ask.ipv6 && !n.opts.IPv6:
		// An HTTPS record would bring keys for ECH, which hides the server name.
		return q.reply(dnsmessage.RCodeSuccess, nil, "", limit)
	}
	if name == hostName {
		addrs := []netip.Addr{policy.HostAddress}
		if ask.ipv6 {
			addrs = nil
		}
		n.memory.add(ask, addrs)
		return q.reply(dnsmessage.RCodeSuccess, addrs, "", limit)
	}
	if addrs, ok := n.memory.answer(ask); ok {
		return q.reply(dnsmessage.RCodeSuccess, addrs, "", limit)
	}
	if later == nil {
		return q.reply(dnsmessage.RCodeServerFailure, nil, "", limit)
	}
	if reason := n.ledger.lookup(name); reason != "" {
		return n.refuseQuery(q, event, policy.Verdict{Reason: reason}, limit, later)
	}
	event.Allow, event.Rule = true, v.Rule
	later(func() []byte { return n.lookup(q, ask, event, limit) })
	return nil
}

// hostName is the name of the host's own services. The policy knows its address; the host's
// resolver is not asked.
var hostName = func() policy.Name {
	name, err := policy.ParseName(policy.HostName)
	if err != nil {
		panic(err) // it is a constant
	}
	return name
}()

// lookup asks the host's resolver.
func (n *Network) lookup(q *query, ask question, event Event, limit int) []byte {
	ctx, cancel := context.WithTimeout(n.ctx, lookupTime)
	defer cancel()
	network := "ip4"
	if ask.ipv6 {
		network = "ip6"
	}
	found, err := n.opts.Lookup(ctx, network, ask.name)
	defer func() {
		event.Duration = n.opts.Now().Sub(event.Time)
		n.record(event)
	}()
	var notFound *net.DNSError
	if errors.As(err, &notFound) && notFound.IsNotFound {
		found, err = nil, nil
	}
	if err != nil {
		event.Reason = fmt.Sprintf("look up %s: %v", ask.name, err)
		return q.reply(dnsmessage.RCodeServerFailure, nil, "", limit)
	}
	addrs, refusal := n.reachable(ask, found)
	if len(addrs) == 0 && !refusal.Allow && refusal.Reason != "" {
		event.Allow, event.Rule, event.Reason = false, refusal.Rule, refusal.Reason
	}
	n.memory.add(ask, addrs)
	return q.reply(dnsmessage.RCodeSuccess, addrs, event.Reason, limit)
}

// reachable returns the addresses of a name that a connection could be allowed to, and the verdict
// about the last of the others.
func (n *Network) reachable(ask question, found []netip.Addr) (addrs []netip.Addr, refusal policy.Verdict) {
	p := n.policy.Load()
	for _, a := range found[:min(len(found), 2*maxAddresses)] { // each one costs a walk over the rules
		if a = a.Unmap(); a.Is4() == ask.ipv6 || len(addrs) == maxAddresses {
			continue // a mapped address in an AAAA record among them
		}
		if p.Reachable(ask.name, a) {
			addrs = append(addrs, a)
		} else {
			refusal = p.Connect(tcpFlow(ask.name, netip.AddrPortFrom(a, 443)))
		}
	}
	return addrs, refusal
}

// explain is the text of a refusal for the program inside.
func explain(v policy.Verdict) string {
	if v.Rule == "" {
		return v.Reason
	}
	return v.Reason + " (rule " + v.Rule + ")"
}

// ServeDNS answers the messages of a UDP socket until it is closed or ctx ends, and closes it. Each
// answer leaves from the address that the question went to. That takes IP_TRANSPARENT where it is
// no address of the namespace; see [PrepareDNS].
func (n *Network) ServeDNS(ctx context.Context, c *net.UDPConn) error {
	defer c.Close()
	if !n.begin() {
		return net.ErrClosed
	}
	defer n.wg.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	defer context.AfterFunc(n.ctx, cancel)() //nolint:contextcheck // the network ends it too
	buf, oob := make([]byte, maxQuery+1), make([]byte, 256)
	for {
		size, oobSize, _, client, err := c.ReadMsgUDPAddrPort(buf, oob)
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("read DNS messages: %w", err)
		case size > maxQuery:
			continue
		}
		from, to := sourceOf(oob[:oobSize])
		send := func(msg []byte) {
			if msg != nil {
				_, _, _ = c.WriteMsgUDPAddrPort(msg, from, client) // a client that is gone
			}
		}
		if n.opts.Quarantined {
			send(serverFailure(buf[:size]))
			continue
		}
		ends := Ends{"udp", unmapped(client), netip.AddrPortFrom(to, 53)}
		if !n.beginLookup() { // one sandbox waits for its own questions only
			send(n.answer(buf[:size], ends, 0, nil)) //nolint:contextcheck // a lookup ends with the network
			continue
		}
		started := false
		send(n.answer(buf[:size], ends, 0, func(lookup func() []byte) { //nolint:contextcheck // a lookup ends with the network
			started = true
			n.wg.Go(func() {
				defer n.endLookup()
				send(lookup())
			})
		}))
		if !started {
			n.endLookup()
		}
	}
}

// beginLookup takes a place for a question. It reports false if all are taken.
func (n *Network) beginLookup() bool {
	select {
	case n.lookups <- struct{}{}:
	default:
		return false
	}
	if !n.places.take(forQuestion) {
		<-n.lookups
		return false
	}
	return true
}

func (n *Network) endLookup() {
	n.places.give(forQuestion, 1)
	<-n.lookups
}

// serveStream answers the messages of a TCP connection, one at a time.
func (n *Network) serveStream(f *flow) error {
	f.setProtocol("dns")
	ends := Ends{"tcp", f.program(), f.dst}
	for {
		if err := f.waitHead(); err != nil {
			return err
		}
		var prefix [2]byte
		if _, err := io.ReadFull(f.client.conn, prefix[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		size := int(binary.BigEndian.Uint16(prefix[:]))
		if size > maxQuery {
			return &refusal{Verdict: policy.Verdict{Reason: fmt.Sprintf("a DNS message of %d bytes", size)}}
		}
		msg := make([]byte, size)
		if _, err := io.ReadFull(f.client.conn, msg); err != nil {
			return err
		}
		f.headDone()
		reply := n.waitAnswer(f, ends, msg)
		if err := f.ctx.Err(); err != nil {
			return err
		} else if reply == nil {
			return &refusal{Verdict: policy.Verdict{Reason: "a message that is no DNS question"}}
		}
		if _, err := f.client.conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil { //nolint:gosec // G115: an answer has at most 64 KiB
			return err
		}
	}
}

// waitAnswer returns the answer to a message of a stream. It takes a place among the questions of
// its network when one is free, and answers SERVFAIL where the process has none.
func (n *Network) waitAnswer(f *flow, ends Ends, msg []byte) []byte {
	var lookup func() []byte
	if reply := n.answer(msg, ends, 65535, func(l func() []byte) { lookup = l }); lookup == nil {
		return reply
	}
	select {
	case n.lookups <- struct{}{}:
		if !n.places.take(forQuestion) {
			<-n.lookups
			return serverFailure(msg)
		}
		defer n.endLookup()
		return lookup()
	case <-f.ctx.Done():
		return nil
	}
}
