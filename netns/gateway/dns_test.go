package gateway

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const dnsPolicy = `
version: 1
rules:
- {name: web, allow: [web.test, "*.cdn.test", six.test, broken.test, gone.test, many.test]}
- {name: evil, deny: evil.cdn.test}
- {name: lan, allow: [10.1.0.0/16, "fd00:1::/32"], ports: 8443}
- {name: ecs, allow: 169.254.170.2, ports: 80}
`

func newDNS(t testing.TB, change ...func(*Options, *limits)) *world {
	t.Helper()
	w := newWorld(t, dnsPolicy, change...)
	w.host("web.test", "93.184.215.14", "93.184.215.15", "2606:4700::1111")
	w.host("six.test", "2606:4700::1111")
	w.host("broken.test")
	w.host("evil.test", "93.184.215.66")
	w.host("a.evil.cdn.test", "93.184.215.66")
	return w
}

// explained returns the text of the extended error.
func explained(r *dnsmessage.Message) string {
	for _, a := range r.Additionals {
		if opt, ok := a.Body.(*dnsmessage.OPTResource); ok {
			for _, o := range opt.Options {
				if o.Code == optionExtendedError {
					return fmt.Sprintf("%d %s", binary.BigEndian.Uint16(o.Data), o.Data[2:])
				}
			}
		}
	}
	return ""
}

func TestDNSAnswers(t *testing.T) {
	w := newDNS(t)
	for _, tc := range []struct {
		name   string
		typ    dnsmessage.Type
		code   dnsmessage.RCode
		addrs  string
		reason string
	}{
		{"web.test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.14 93.184.215.15]", ""},
		{"WEB.Test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.14 93.184.215.15]", ""},
		{"web.test", dnsmessage.TypeAAAA, dnsmessage.RCodeSuccess, "[2606:4700::1111]", ""},
		{"six.test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[]", ""},
		{"gone.test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[]", ""},
		{"a.evil.cdn.test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.66]", ""},
		{"broken.test", dnsmessage.TypeA, dnsmessage.RCodeServerFailure, "[]", ""},
		{"web.test", 65, dnsmessage.RCodeSuccess, "[]", ""}, // HTTPS
		{"web.test", 64, dnsmessage.RCodeSuccess, "[]", ""}, // SVCB
		{"web.test", dnsmessage.TypeTXT, dnsmessage.RCodeSuccess, "[]", ""},
		{"web.test", dnsmessage.TypeMX, dnsmessage.RCodeSuccess, "[]", ""},
		{"web.test", dnsmessage.TypeALL, dnsmessage.RCodeNotImplemented, "[]", ""},
		{"web.test", dnsmessage.TypeAXFR, dnsmessage.RCodeNotImplemented, "[]", ""},
		{"evil.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 no rule allows evil.test"},
		{"evil.test", dnsmessage.TypeTXT, dnsmessage.RCodeNameError, "[]", "15 no rule allows evil.test"},
		{"evil.test", 65, dnsmessage.RCodeNameError, "[]", "15 no rule allows evil.test"},
		{"evil.cdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 evil.cdn.test is denied (rule evil)"},
		{"cdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 no rule allows cdn.test"},
		{"evilcdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 no rule allows evilcdn.test"},
		{"web.test.evil.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 no rule allows web.test.evil.test"},
		{"_dns.cdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", `15 host name "_dns.cdn.test"`},
		{"a\x00b.cdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 host name"},
		{"b\xc3\xa4.cdn.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 host name"},
		{"93.184.215.14", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 host name"},
		{"0x5db8d70e", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 host name"},
		{"localhost", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]", "15 no rule allows localhost"},
	} {
		r := w.exchange(question1(t, tc.name, tc.typ, true))
		if r.RCode != tc.code || fmt.Sprint(addresses(r)) != tc.addrs || !strings.HasPrefix(explained(r), tc.reason) {
			t.Errorf("%s %s: %s %v %q", tc.name, tc.typ, r.RCode, addresses(r), explained(r))
		}
		if !r.Response || !r.RecursionAvailable || r.Truncated || len(r.Questions) != 1 || r.Questions[0].Name.String() != tc.name+"." {
			t.Errorf("%s %s: %+v %v", tc.name, tc.typ, r.Header, r.Questions)
		}
		if r := w.exchange(question1(t, tc.name, tc.typ, false)); len(r.Additionals) > 0 {
			t.Errorf("%s: an OPT record for a client that sent none", tc.name)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.asked {
		if strings.Contains(a, "evil.test") {
			t.Errorf("the host's resolver was asked: %s", a)
		}
	}
}

// Answers of a resolver that an attacker owns.
func TestDNSRebinding(t *testing.T) {
	w := newDNS(t)
	for i, tc := range []struct {
		found string
		left  string
	}{
		{"127.0.0.1", "[]"},
		{"127.0.0.1 93.184.215.14", "[93.184.215.14]"},
		{"0.0.0.0", "[]"},
		{"10.0.0.1", "[]"},
		{"10.1.0.1", "[10.1.0.1]"}, // by the rule lan, on port 8443
		{"172.16.0.1 192.168.0.1 100.64.0.1", "[]"},
		{"169.254.169.254", "[]"},
		{"169.254.170.2", "[169.254.170.2]"}, // by the rule ecs
		{"168.63.129.16", "[]"},
		{"224.0.0.1 255.255.255.255 240.0.0.1", "[]"},
		{"::1", "[]"},
		{"::", "[]"},
		{"::ffff:127.0.0.1", "[]"},
		{"::ffff:93.184.215.14", "[]"}, // an IPv4 address in an AAAA record
		{"::127.0.0.1", "[]"},
		{"64:ff9b::7f00:1", "[]"},
		{"64:ff9b::a9fe:a9fe", "[]"},
		{"64:ff9b::5db8:d70e", "[64:ff9b::5db8:d70e]"},
		{"2002:7f00:1::", "[]"},
		{"2001:0:4136:e378:8000:63bf:3fff:fdd2", "[]"},
		{"2600::5efe:10.0.0.1", "[]"},
		{"fe80::1", "[]"},
		{"fd00::1", "[]"},
		{"fd00:1::1", "[fd00:1::1]"},
		{"fd00:ec2::254", "[]"},
		{"ff02::1", "[]"},
	} {
		name := fmt.Sprintf("r%d.cdn.test", i)
		w.host(name, strings.Fields(tc.found)...)
		typ := dnsmessage.TypeA
		if strings.Contains(tc.found, ":") {
			typ = dnsmessage.TypeAAAA
		}
		r := w.exchange(question1(t, name, typ, true))
		if got := fmt.Sprint(addresses(r)); r.RCode != dnsmessage.RCodeSuccess || got != tc.left {
			t.Errorf("%s: %s %s", tc.found, r.RCode, got)
		}
		if e := w.event(); e.Kind != Query || e.Allow != (tc.left != "[]" || strings.HasPrefix(tc.found, "::ffff:")) || e.Allow == (e.Reason != "") {
			t.Errorf("%s: %+v", tc.found, e)
		}
		if names := w.n.memory.namesOf(netip.MustParseAddr("127.0.0.1")); len(names) > 0 {
			t.Errorf("%s: loopback is remembered", tc.found)
		}
	}
}

// A name may get other addresses later. Those of before stay allowed until they are forgotten, and
// are never allowed by another name.
func TestDNSRemembers(t *testing.T) {
	w := newDNS(t)
	ask := func() string { _, a := w.resolve("web.test", dnsmessage.TypeA); return fmt.Sprint(a) }
	allowed := func(addr string) bool {
		v, _ := w.n.admit(netip.AddrPortFrom(netip.MustParseAddr(addr), 443))
		return v.Allow
	}
	if ask(); !allowed("93.184.215.14") || allowed("93.184.215.99") {
		t.Error("not exactly the addresses of the answer are allowed")
	}
	w.host("web.test", "93.184.215.99")
	if got := ask(); got != "[93.184.215.14 93.184.215.15]" {
		t.Errorf("within the lifetime: %s", got)
	}
	w.clock.advance(lifetime)
	if got := ask(); got != "[93.184.215.99]" || !allowed("93.184.215.14") || !allowed("93.184.215.99") {
		t.Errorf("after the lifetime: %s", got)
	}
	w.clock.advance(retention - lifetime)
	if allowed("93.184.215.14") || !allowed("93.184.215.99") {
		t.Error("the addresses of the first answer are not forgotten, or those of the second are")
	}
	w.clock.advance(lifetime)
	if allowed("93.184.215.99") {
		t.Error("the second answer is not forgotten")
	}
	if w.n.memory.order.Len() != 0 || len(w.n.memory.pairs) != 0 || len(w.n.memory.names) != 0 {
		t.Error("something is left in memory")
	}
}

// An answer from memory counts as one: the client may use it as long as any other.
func TestDNSRemembersAnswersFromMemory(t *testing.T) {
	w := newDNS(t)
	for range 2 {
		w.resolve("web.test", dnsmessage.TypeA)
		w.clock.advance(lifetime - 1)
	}
	w.clock.advance(retention - lifetime)
	if v, _ := w.n.admit(netip.MustParseAddrPort("93.184.215.14:443")); !v.Allow || len(w.asked) != 1 {
		t.Errorf("%+v, asked %v", v, w.asked)
	}
}

// A new policy decides about the next answer.
func TestDNSAfterSetPolicy(t *testing.T) {
	w := newDNS(t)
	w.host("db.cdn.test", "10.3.0.1")
	if _, addrs := w.resolve("db.cdn.test", dnsmessage.TypeA); len(addrs) != 0 {
		t.Fatal(addrs)
	}
	p, err := policy.Parse([]byte(`{version: 1, rules: [{allow: ["*.cdn.test", 10.3.0.0/16]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	w.n.SetPolicy(p)
	if _, addrs := w.resolve("db.cdn.test", dnsmessage.TypeA); len(addrs) != 1 {
		t.Error("the answer of before is given")
	}
	if code, _ := w.resolve("web.test", dnsmessage.TypeA); code != dnsmessage.RCodeNameError {
		t.Errorf("a name that is refused now: %s", code)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	c := newClock()
	m := newMemory(c.Now)
	name := func(i int) policy.Name {
		n, err := policy.ParseName(fmt.Sprintf("n%d.test", i))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for i := range maxPairs + 100 {
		m.add(question{name(i), false}, []netip.Addr{netip.AddrFrom4([4]byte{93, 1, byte(i >> 8), byte(i)})})
	}
	if len(m.pairs) != maxPairs || m.order.Len() != maxPairs || len(m.names) != maxPairs || len(m.answers) > maxAnswers {
		t.Errorf("%d pairs, %d in order, %d addresses, %d answers", len(m.pairs), m.order.Len(), len(m.names), len(m.answers))
	}
	if m.namesOf(netip.MustParseAddr("93.1.0.0")) != nil {
		t.Error("the oldest is not the one that was forgotten")
	}
	one := netip.MustParseAddr("93.2.0.1")
	for i := range 2 * maxNames {
		m.add(question{name(i), false}, []netip.Addr{one, one})
	}
	if names := m.namesOf(one); len(names) != maxNames || names[0] != name(maxNames) {
		t.Errorf("%d names of one address, the first %s", len(names), names[0])
	}
}

func TestDNSWithoutIPv6(t *testing.T) {
	w := newDNS(t, func(o *Options, _ *limits) { o.IPv6 = false })
	for _, name := range []string{"web.test", "six.test"} {
		if code, addrs := w.resolve(name, dnsmessage.TypeAAAA); code != dnsmessage.RCodeSuccess || len(addrs) != 0 {
			t.Errorf("%s: %s %v", name, code, addrs)
		}
	}
	if len(w.asked) != 0 {
		t.Errorf("asked %v", w.asked)
	}
}

func TestDNSTruncates(t *testing.T) {
	w := newDNS(t)
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("2606:4700::%x", i))
	}
	name := strings.Repeat("abcdefghi.", 10) + "cdn.test"
	w.host(name, many...)
	if r := w.exchange(question1(t, name, dnsmessage.TypeAAAA, false)); !r.Truncated || len(r.Answers) != 0 {
		t.Errorf("512 bytes: %+v, %d answers", r.Header, len(r.Answers))
	}
	if r := w.exchange(question1(t, name, dnsmessage.TypeAAAA, true)); r.Truncated || len(r.Answers) != maxAddresses {
		t.Errorf("1232 bytes: %+v, %d answers", r.Header, len(r.Answers))
	}
	// The client asks again over TCP, of any server.
	c := w.dial("8.8.8.8:53")
	for range 2 {
		msg := question1(t, name, dnsmessage.TypeAAAA, false)
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...))
		var size uint16
		if err := binary.Read(c, binary.BigEndian, &size); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, size)
		_, _ = io.ReadFull(c, b) // seen by the next line
		var r dnsmessage.Message
		if err := r.Unpack(b); err != nil || r.Truncated || len(r.Answers) != maxAddresses {
			t.Errorf("TCP: %v, %+v, %d answers", err, r.Header, len(r.Answers))
		}
	}
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); len(b) != 0 || err != nil {
		t.Errorf("at the end: %q, %v", b, err)
	}
}

// A connection for DNS is not recorded as an allowed connection, nor as a failed one if it ends
// badly. Its questions are recorded.
func TestDNSOverTCPIsNoConnection(t *testing.T) {
	w := newDNS(t)
	w.host("web.test", "93.184.215.14")
	for i, half := range []bool{false, true} {
		c := w.dial("8.8.8.8:53")
		msg := question1(t, []string{"web.test", "evil.test"}[i], dnsmessage.TypeA, false)
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...))
		if _, err := io.ReadFull(c, make([]byte, 2+len(msg))); err != nil {
			t.Fatal(err)
		}
		if half {
			_, _ = c.Write([]byte{0})
		}
		_ = c.SetLinger(0) // a reset
		_ = c.Close()
	}
	for _, e := range w.all() {
		if e.Kind != Query {
			t.Errorf("%+v", e)
		}
	}
}

func TestDNSOverTCPRefuses(t *testing.T) {
	for name, in := range map[string]string{
		"no DNS":   "\x00\x03abc",
		"answer":   "\x00\x0c\x12\x34\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"too long": "\xff\xff",
		"HTTP":     "GET / HTTP/1.1\r\n",
	} {
		w := newDNS(t)
		c := w.dial("8.8.8.8:53")
		_, _ = io.WriteString(c, in)
		if b, reset := wasReset(c); len(b) > 0 || !reset {
			t.Errorf("%s: %q, reset %v", name, b, reset)
		}
		if e := w.event(); e.Allow || e.Protocol != "dns" || e.Reason == "" {
			t.Errorf("%s: %+v", name, e)
		}
		if len(w.dialled) > 0 {
			t.Errorf("%s: dialled %v", name, w.dialled)
		}
	}
}

func TestDNSMessages(t *testing.T) {
	header := func(flags uint16, counts ...uint16) []byte {
		b := binary.BigEndian.AppendUint16([]byte{0x12, 0x34}, flags)
		for _, c := range counts {
			b = binary.BigEndian.AppendUint16(b, c)
		}
		return b
	}
	q := []byte("\x03web\x04test\x00\x00\x01\x00\x01")
	opt := func(version byte) []byte { return []byte{0, 0, 41, 4, 208, 0, version, 0, 0, 0, 0} }
	record := []byte("\x03web\x04test\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04\x01\x02\x03\x04")
	for name, tc := range map[string]struct {
		in   []byte
		code int // -1 for no answer
	}{
		"whole":             {slices.Concat(header(0x0100, 1, 0, 0, 0), q), 0},
		"with OPT":          {slices.Concat(header(0x0100, 1, 0, 0, 1), q, opt(0)), 0},
		"empty":             {nil, -1},
		"half a header":     {header(0, 1, 0, 0, 0)[:11], -1},
		"an answer":         {slices.Concat(header(0x8100, 1, 0, 0, 0), q), -1},
		"no question":       {header(0x0100, 0, 0, 0, 0), 1},
		"two questions":     {slices.Concat(header(0x0100, 2, 0, 0, 0), q, q), 1},
		"cut question":      {slices.Concat(header(0x0100, 1, 0, 0, 0), q[:10]), 1},
		"missing question":  {header(0x0100, 1, 0, 0, 0), 1},
		"an answer within":  {slices.Concat(header(0x0100, 1, 1, 0, 0), q, record), 1},
		"an authority":      {slices.Concat(header(0x0100, 1, 0, 1, 0), q, record), 1},
		"an additional":     {slices.Concat(header(0x0100, 1, 0, 0, 1), q, record), 1},
		"two OPT":           {slices.Concat(header(0x0100, 1, 0, 0, 2), q, opt(0), opt(0)), 1},
		"OPT of a name":     {slices.Concat(header(0x0100, 1, 0, 0, 1), q, []byte{1, 'a'}, opt(0)), 1},
		"EDNS 1":            {slices.Concat(header(0x0100, 1, 0, 0, 1), q, opt(1)), 0}, // BADVERS, in the OPT
		"truncated":         {slices.Concat(header(0x0300, 1, 0, 0, 0), q), 1},
		"status":            {slices.Concat(header(0x1000, 1, 0, 0, 0), q), 4},
		"update":            {slices.Concat(header(0x2800, 1, 0, 0, 0), q), 4},
		"class CH":          {slices.Concat(header(0x0100, 1, 0, 0, 0), q[:len(q)-1], []byte{3}), 4},
		"a pointer to self": {slices.Concat(header(0x0100, 1, 0, 0, 0), []byte{0xc0, 12, 0, 1, 0, 1}), 1},
	} {
		w := newDNS(t)
		var r dnsmessage.Message
		msg := w.n.answer(tc.in, Ends{}, 0, nil)
		if (msg == nil) != (tc.code < 0) {
			t.Errorf("%s: answer %x", name, msg)
		} else if msg != nil {
			if err := r.Unpack(msg); err != nil || r.ID != 0x1234 || !r.Response {
				t.Errorf("%s: %v, %+v", name, err, r.Header)
			}
			if code := int(r.RCode); code != tc.code && (tc.code != 0 || r.RCode != dnsmessage.RCodeServerFailure) {
				t.Errorf("%s: %s", name, r.RCode)
			}
		}
	}
}

// An answer comes from the address that was asked.
func TestDNSAnswersFromTheAddressAsked(t *testing.T) {
	n := New(Options{Record: func([]Event) {}})
	defer n.Close()
	for _, tc := range []struct{ network, listen, ask string }{
		{"udp4", "0.0.0.0:0", "127.0.0.2"},
		{"udp", "[::]:0", "127.0.0.3"},
		{"udp", "[::]:0", "::1"},
	} {
		l, err := net.ListenPacket(tc.network, tc.listen)
		if err != nil {
			t.Fatal(err)
		}
		c := l.(*net.UDPConn)
		if err := PrepareDNS(c); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- n.ServeDNS(t.Context(), c) }()
		port := fmt.Sprint(c.LocalAddr().(*net.UDPAddr).Port)
		client, err := net.Dial("udp", net.JoinHostPort(tc.ask, port)) // it accepts answers of this address only
		if err != nil {
			t.Fatal(err)
		}
		_, _ = client.Write(question1(t, "evil.test", dnsmessage.TypeA, false))
		if size, err := client.Read(make([]byte, 512)); size == 0 || err != nil {
			t.Errorf("%s at %s: %v", tc.ask, tc.listen, err)
		}
		_ = client.Close()
		_ = c.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// FuzzDNS looks at the answer to any message: it is an answer to that message, within its size, and
// has no address that the policy refuses.
func FuzzDNS(f *testing.F) {
	for _, name := range []string{"web.test", "evil.test", "a.cdn.test"} {
		f.Add(question1(f, name, dnsmessage.TypeA, true))
		f.Add(question1(f, name, dnsmessage.TypeAAAA, false))
		f.Add(question1(f, name, 65, true))
	}
	w := newDNS(f, func(o *Options, _ *limits) { o.Record = func([]Event) {} })
	w.host("a.cdn.test", "127.0.0.1", "93.184.215.14", "64:ff9b::7f00:1", "fd00::1")
	f.Fuzz(func(t *testing.T, msg []byte) {
		if len(msg) > maxQuery {
			return
		}
		var reply []byte
		if now := w.n.answer(msg, Ends{}, 0, func(lookup func() []byte) { reply = lookup() }); now != nil {
			reply = now
		}
		if reply == nil {
			return
		}
		var r dnsmessage.Message
		if err := r.Unpack(reply); err != nil {
			t.Fatalf("%x to %x: %v", reply, msg, err)
		}
		if !r.Response || r.ID != binary.BigEndian.Uint16(msg) || len(reply) > maxUDP || len(r.Questions) > 1 {
			t.Errorf("%+v to %x", r, msg)
		}
		for _, a := range addresses(&r) {
			name, err := policy.ParseName(strings.TrimSuffix(r.Questions[0].Name.String(), "."))
			if err != nil || !w.n.policy.Load().Resolve(name).Allow || !w.n.policy.Load().Reachable(name, a) {
				t.Errorf("%s in the answer for %s", a, r.Questions[0].Name)
			}
		}
	})
}
