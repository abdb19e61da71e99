package egress

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Every event that a gateway of ours can have is sent, received and accepted, whatever clients have
// put into it.
func FuzzEvent(f *testing.F) {
	f.Add("example.com", "GET", "/a\x00\xff\u2028<&>", "rule", "no\x1b[31m", []byte{1, 2, 3, 4}, uint16(80), int64(5), 200)
	f.Add("", strings.Repeat("M", 9999), strings.Repeat("\xff", 9999), strings.Repeat("é", 300), strings.Repeat("\x00", 600), []byte{}, uint16(0), int64(-1), -7)
	f.Add("a", strings.Repeat("\u2028", 100), strings.Repeat("\u2028", 1000), strings.Repeat("\"", 300), strings.Repeat("\\", 600), make([]byte, 16), uint16(1), int64(1)<<62, 1<<30)
	f.Fuzz(func(t *testing.T, name, method, path, rule, reason string, addr []byte, port uint16, n int64, status int) {
		parsed, err := policy.ParseName(name) // the gateway's are parsed
		if err != nil {
			parsed = policy.Name{}
		}
		a, _ := netip.AddrFromSlice(addr)
		e := gateway.Event{
			Network: "box", Kind: gateway.Request, Time: time.Unix(0, n), Duration: time.Duration(n), Protocol: "http", Name: parsed.String(), Addr: a, Port: port,
			Method: method, Path: path, Status: status, Rule: rule, Reason: reason, Out: n, In: n, Lost: uint64(n),
			Process: &gateway.Process{PID: status, Name: path, Exec: rule, Sandbox: reason},
		}
		const sent = 40
		received := 0
		for _, packet := range eventPackets(slices.Repeat([]gateway.Event{e}, sent)) {
			if len(packet) > messages.MaxBytes {
				t.Errorf("a packet of %d bytes", len(packet))
			}
			var m message
			if err := errors.Join(decode(packet, &m), m.check()); err != nil {
				t.Fatal(err)
			}
			received += len(m.Events)
			for i := range m.Events {
				got, err := m.Events[i].event()
				if err != nil {
					t.Errorf("%v: %s", err, packet)
				}
				if isClean(path, maxPath) && got.Path != path {
					t.Errorf("the path %q became %q", path, got.Path)
				}
			}
		}
		if received != sent {
			t.Errorf("%d events of %d", received, sent)
		}
	})
}

// A message of a gateway that was taken over is refused or within its bounds.
func FuzzMessage(f *testing.F) {
	for _, s := range []string{
		`{"hello":{"landlock":6,"networks":40}}`, `{"answer":{"number":1,"error":"x"}}`, `{}`, `{"answer":{"number":1},"hello":{"landlock":1}}`,
		`{"events":[{"network":"box","kind":"connection","time":1,"duration":2,"protocol":"tcp","addr":"1.2.3.4"}]}`,
		`{"events":[{"network":"box","kind":"connection","protocol":"tcp","addr":"1.2.3.4","process":{"pid":7,"name":"curl","exec":"x"}}]}`,
		`{"events":[{"network":"box","kind":"connection","protocol":"tcp","addr":"1.2.3.4","process":{"pid":0,"name":"curl"}}]}`,
		`{"events":[{"network":"box","kind":"connection","protocol":"tcp","addr":"1.2.3.4","process":{"pid":7,"name":"\u001b"}}]}`,
		`{"events":[{"network":"box","kind":"connection","protocol":"tcp","addr":"fe80::1%eth0"}]}`, `{"events":[]}`, `{"answer":{"number":1}} {}`, `[`, `{"more":1}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		var m message
		if decode(packet, &m) != nil || m.check() != nil {
			return
		}
		for i := range m.Events {
			e, err := m.Events[i].event()
			if err != nil {
				return
			}
			texts := []string{e.Name, e.Method, e.Path, e.Rule, e.Reason}
			if p := e.Process; p != nil {
				texts = append(texts, p.Name, p.Exec, p.Sandbox)
				if p.PID < 1 {
					t.Errorf("%+v", p)
				}
			}
			for _, s := range texts {
				if len(s) > maxPath || !utf8.ValidString(s) || strings.ContainsAny(s, "\x00\x1b\n") {
					t.Errorf("%+v", e)
				}
			}
			if e.Out < 0 || e.In < 0 || e.Duration < 0 || e.Status < 0 || e.Addr.Zone() != "" {
				t.Errorf("%+v", e)
			}
		}
		if m.Answer != nil && len(m.Answer.Error) > maxError {
			t.Errorf("%+v", m.Answer)
		}
	})
}

// An ask of a gateway that was taken over is refused or within its bounds.
func FuzzAsk(f *testing.F) {
	for _, s := range []string{
		`{"number":1,"network":"box","name":"web"}`, `{"number":2,"network":"box","dial":"198.18.0.7:80"}`,
		`{"number":3,"network":"box","name":"web","dial":"198.18.0.7:80"}`, `{"number":-1,"network":"box","dial":"[::ffff:198.18.0.7]:80"}`, `{"number":1}`, `{"more":1}`, `[`,
		`{"number":1,"network":"box","socket":80}`, `{"number":1,"network":"box","socket":80,"name":"web"}`,
		`{"number":1,"network":"box","process":{"protocol":"tcp","program":"192.0.2.1:4000","server":"10.0.0.1:80"}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		var a ask
		if decode(packet, &a) != nil || a.check() != nil {
			return
		}
		name, err := policy.ParseName(a.Name)
		dials := a.Dial.IsValid() && a.Dial.Port() > 0 && policy.PeerAddresses.Contains(a.Dial.Addr())
		kinds := 0
		for _, is := range []bool{err == nil && name.String() == a.Name, dials, a.Socket != 0, a.Process != nil} {
			if is {
				kinds++
			}
		}
		if kinds != 1 || a.Network == "" || len(a.Network) > maxID {
			t.Errorf("%+v", a)
		}
	})
}

// A reply of a daemon that was taken over is refused or within its bounds.
func FuzzReply(f *testing.F) {
	for _, s := range []string{
		`{"number":1}`, `{"number":1,"peer":{"name":"web","network":"front","addr":"198.18.0.7"}}`, `{"number":1,"error":"x"}`,
		`{"number":1,"peer":{"name":"web","network":"front","addr":"127.0.0.1"}}`, `{"number":1,"process":{"pid":7,"name":"curl"}}`, `{"number":1,"error":"x","process":{"pid":0,"name":"curl"}}`, `{"number":1,"error":"\u001b"}`, `{"number":1,"socket":true}`, `{"number":1,"socket":true,"peer":{"name":"web","network":"front","addr":"198.18.0.7"}}`, `{"number":1,"peer":{"name":"\u2028","network":"","addr":"198.18.0.7"}}`,
	} {
		f.Add([]byte(s), 0)
		f.Add([]byte(s), 1)
	}
	f.Fuzz(func(t *testing.T, packet []byte, files int) {
		var r reply
		if decode(packet, &r) != nil || r.check(files) != nil {
			return
		}
		if p := r.Process; p != nil && (p.PID < 1 || len(p.Name) > maxProcess || files > 0 || r.Error != "") {
			t.Errorf("%s with %d files", packet, files)
		}
		if files > 1 || files == 1 && ((r.Peer == nil) == !r.Socket || r.Error != "") || len(r.Error) > maxError {
			t.Errorf("%s with %d files", packet, files)
		}
		if again, err := encode(&r); err != nil || len(again) > replyPackets.MaxBytes {
			t.Errorf("it has %d bytes: %v", len(again), err)
		}
	})
}

// A request of a daemon that was taken over is refused or within its bounds.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		`{"number":1,"add":{"id":"box","policy":"e30=","budget":{"BytesOut":1}}}`, `{"number":2,"remove":{"id":"box"}}`,
		`{"number":3,"set_policy":{"id":"box","policy":"e30="}}`, `{"remove":{"id":"a"},"add":{"id":"b"}}`, `{"number":-1}`, `{"report":true}`, `{"asks":true}`, `{"report":true,"asks":true}`, `{"number":1,"remove":{"id":"\u001b"}}`,
		`{"number":4,"set_secrets":{"id":"box","secrets":[{"Name":"a","Kind":"bearer","Value":"some-value","Binding":{"Host":"example.com","Placeholder":"sandboxd-placeholder"}}]}}`,
		`{"number":5,"reset_peers":{"id":"box","peers":["198.18.3.4"]}}`, `{"number":5,"reset_peers":{"id":"box","peers":["10.0.0.1"]}}`,
	} {
		f.Add([]byte(s), 0)
		f.Add([]byte(s), 1)
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, packet []byte, files int) {
		var r request
		if decode(packet, &r) != nil || r.check(files) != nil {
			return
		}
		ids := 0
		for _, set := range []bool{r.Add != nil, r.SetPolicy != nil, r.SetSecrets != nil, r.SetNetworks != nil, r.ResetPeers != nil, r.Remove != nil, r.Report, r.Asks} {
			if set {
				ids++
			}
		}
		if ids != 1 || (r.Add != nil) != (files == 3) || (r.Report || r.Asks) && files != 1 {
			t.Errorf("%s with %d files", packet, files)
		}
	})
}

func TestEventsOfATakenOverGateway(t *testing.T) {
	good := func() event {
		return *toWire(gateway.Event{Network: "box", Kind: gateway.Connection, Time: time.Unix(1, 2), Protocol: "tls", Name: "example.com", Addr: netip.MustParseAddr("1.2.3.4"), Port: 443, Allow: true, Rule: "r"})
	}
	e := good()
	got, err := e.event()
	want := gateway.Event{Network: "box", Kind: gateway.Connection, Time: time.Unix(1, 2), Protocol: "tls", Name: "example.com", Addr: netip.MustParseAddr("1.2.3.4"), Port: 443, Allow: true, Rule: "r"}
	if err != nil || !cmp.Equal(got, want, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("control: %+v, %v", got, err)
	}
	for name, change := range map[string]func(*event){
		"kind":            func(e *event) { e.Kind = "other" },
		"our own kind":    func(e *event) { e.Kind = Restarted },
		"protocol":        func(e *event) { e.Protocol = "\x1b" },
		"name":            func(e *event) { e.Name = "a b" },
		"long name":       func(e *event) { e.Name = strings.Repeat("a.", 127) + "a" },
		"method":          func(e *event) { e.Method = strings.Repeat("A", maxMethod+1) },
		"path":            func(e *event) { e.Path = "/\n" },
		"long path":       func(e *event) { e.Path = strings.Repeat("/", maxPath+1) },
		"rule":            func(e *event) { e.Rule = "\x00" },
		"reason":          func(e *event) { e.Reason = "\xff" },
		"duration":        func(e *event) { e.Duration = -1 },
		"bytes out":       func(e *event) { e.Out = -1 },
		"bytes in":        func(e *event) { e.In = -1 },
		"status":          func(e *event) { e.Status = 1000 },
		"negative status": func(e *event) { e.Status = -1 },
		"zone":            func(e *event) { e.Addr = netip.MustParseAddr("fe80::1%eth0") },
	} {
		e := good()
		change(&e)
		if got, err := e.event(); err == nil {
			t.Errorf("%s is accepted: %+v", name, got)
		}
	}
}

func TestRequestsOfATakenOverDaemon(t *testing.T) {
	for name, r := range map[string]request{
		"none":            {},
		"two":             {Remove: &remove{"a"}, SetPolicy: &setPolicy{ID: "a"}},
		"no id":           {Remove: &remove{}},
		"long id":         {Remove: &remove{strings.Repeat("a", maxID+1)}},
		"id for logs":     {Remove: &remove{"a\nb"}},
		"large policy":    {SetPolicy: &setPolicy{ID: "a", Policy: make([]byte, MaxPolicy+1)}},
		"without files":   {Add: &add{ID: "a"}},
		"negative budget": {Add: &add{ID: "a", Budget: gateway.Budget{Hosts: -1}}},
		"many networks":   {Add: &add{ID: "a", Networks: make([]string, MaxJoined+1)}},
		"a long network":  {Add: &add{ID: "a", Networks: []string{strings.Repeat("a", maxLabel+1)}}},
		"no peers":        {ResetPeers: &resetPeers{ID: "a"}},
		"many peers":      {ResetPeers: &resetPeers{"a", slices.Repeat([]netip.Addr{web.Addr}, maxReset+1)}},
		"no peer":         {ResetPeers: &resetPeers{"a", []netip.Addr{netip.MustParseAddr("127.0.0.1")}}},
		"peers of none":   {ResetPeers: &resetPeers{"", []netip.Addr{web.Addr}}},
		"asks and more":   {Asks: true, Remove: &remove{"a"}},
		"asks and report": {Asks: true, Report: true},
	} {
		files := 0
		if r.Add != nil && name != "without files" {
			files = 3
		}
		if err := r.check(files); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	for name, r := range map[string]reply{
		"long name":      {Number: 1, Peer: &peer{strings.Repeat("a", maxName+1), "n", netip.MustParseAddr("198.18.0.1")}},
		"other address":  {Number: 1, Peer: &peer{"a", "n", netip.MustParseAddr("127.0.0.1")}},
		"error for logs": {Number: 1, Error: "\x1b"},
	} {
		if err := r.check(0); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	full := request{Number: 1 << 60, Add: &add{ID: strings.Repeat("é", maxID/2), Policy: make([]byte, MaxPolicy)}}
	if packet, err := encode(&full); err != nil || len(packet) > requests.MaxBytes || full.check(3) != nil {
		t.Errorf("the largest request has %d bytes: %v, %v", len(packet), err, full.check(3))
	}
}

// No event of a gateway may look like one of a gateway that was taken over, whatever a sandbox
// sent.
func TestEventsPass(t *testing.T) {
	for _, protocol := range []string{"tcp", "tls", "http", "https", "h2", "websocket", "dns"} {
		sent := gateway.Event{
			Network: "box", Kind: gateway.Request, Time: time.Unix(1, 0).UTC(), Protocol: protocol, Name: "example.com", Addr: netip.MustParseAddr("192.0.2.7"),
			Port: 443, Method: "GET", Path: "/a", Status: 200, Allow: true, Rule: "rules[0]", Secret: "token", Out: 1, In: 2, Lost: 3,
		}
		got, err := toWire(sent).event()
		if err != nil || got.Time.UTC() != sent.Time {
			t.Errorf("%s: %v, %v", protocol, got.Time, err)
		}
		if got.Time = sent.Time; got != sent {
			t.Errorf("%s: %+v, want %+v", protocol, got, sent)
		}
	}
	hostile := gateway.Event{Network: "box", Kind: gateway.Connection, Protocol: "tls", Name: "a\nb.", Rule: "\x1b", Secret: "\x00", Reason: "\xff"}
	if got, err := toWire(hostile).event(); err != nil || got.Name != "" {
		t.Errorf("%+v, %v", got, err)
	}
}
