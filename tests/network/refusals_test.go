package network

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// allAttacks are the attacks of this package, with the names of the world that they use.
func allAttacks() (attacks []attack, hosts map[string]*host) {
	hosts = maps.Clone(attackedHosts)
	for _, f := range []func() ([]attack, map[string]*host){
		addressAttacks, ownAttacks, nameAttacks,
		func() ([]attack, map[string]*host) { return webAttacks(), nil },
		func() ([]attack, map[string]*host) { return datagramAttacks(), nil },
		func() ([]attack, map[string]*host) { return callAttacks(), nil },
	} {
		some, names := f()
		attacks = append(attacks, some...)
		maps.Copy(hosts, names)
	}
	return attacks, hosts
}

// callAttacks are system calls on the sandbox's own network.
func callAttacks() (attacks []attack) {
	outside, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		panic(err) // without it the prober makes no call
	}
	for _, name := range slices.Sorted(maps.Keys(op.Calls())) {
		attacks = append(attacks, attack{name: "call " + name, op: op.Op{Kind: op.Call, Name: name, Outside: outside}, here: true})
	}
	return attacks
}

func opsOf(attacks []attack) (ops []op.Op) {
	for i := range attacks {
		ops = append(ops, attacks[i].op)
	}
	return ops
}

// prepare sets names and servers of the attacks, and forgets what came before.
func prepare(t *testing.T, w *world, hosts map[string]*host) {
	t.Helper()
	w.names.set(hosts)
	for _, addr := range []string{sharedAddr, apiAddr} {
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // the world has its bytes
			fmt.Fprint(rw, "ok")
		})}
		l := w.listen(t, addr+":80")
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = s.Serve(l) // until it is closed
		}()
		t.Cleanup(func() {
			_ = s.Close() // its connections are of this test
			<-done
		})
	}
	// The first bytes of the attacks that may come partly are no reason to end.
	w.serve(t, webAddr+":80", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }) // the world has its bytes
	forget(t, w)
}

func forget(t *testing.T, w *world) {
	t.Helper()
	w.take()
	w.names.take()
	if _, err := w.tap.take(); err != nil {
		t.Fatal(err)
	}
}

// settled waits until every connection that came to the world has ended, and returns all arrivals.
func settled(t *testing.T, w *world) []*arrival {
	t.Helper()
	all := w.take()
	harness.Eventually(t, func() error {
		all = append(all, w.take()...)
		for _, a := range all {
			a.mu.Lock()
			ended := a.ended
			a.mu.Unlock()
			if !ended {
				return fmt.Errorf("the connection to %s goes on", a.to)
			}
		}
		return nil
	})
	return all
}

// Every attack is refused and recorded, and no byte of it leaves: as each user, under each profile.
func TestAttacksAreRefused(t *testing.T) {
	attacks, hosts := allAttacks()
	t.Logf("%d attacks", len(attacks))
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		for _, profile := range profiles(t, d) {
			t.Run(profile, func(t *testing.T) {
				for name := range hosts { // a new resolver's first answers
					hosts[name].times = 0
				}
				prepare(t, w, hosts)
				s := connected(t, d, profile, attacked)
				results := probe(t, s, opsOf(attacks))
				for i := range attacks {
					if err := attacks[i].judge(&results[i]); err != nil {
						t.Errorf("%s: %v", attacks[i].name, err)
					}
				}
				judgeWorld(t, w, attacks)
				judgeFlows(t, attacks, func() []api.Flow { return s.Flows(t) })
			})
		}
	})
}

// judge compares a result with the refusal that is due.
func (a *attack) judge(r *op.Result) error {
	statuses := statuses(r.Read)
	switch {
	case a.op.Kind == op.Resolve:
		if r.Error != "" || r.Code != int(a.code) || !slices.Equal(r.Addresses, a.addresses) {
			return fmt.Errorf("%+v; want code %s and the addresses %v", *r, a.code, a.addresses)
		}
	case a.op.Kind == op.Send: // nothing tells the program
	case a.here, a.op.Kind == op.UDP, a.op.Kind == op.Call:
		if r.Error == "" {
			return fmt.Errorf("it was done: %q", r.Read)
		}
	case a.status > 0:
		if len(statuses) != len(a.reached)+1 || statuses[len(statuses)-1] != a.status {
			return fmt.Errorf("statuses %v, then %q; want %d", statuses, r.Error, a.status)
		}
		if r.Code = a.status; a.reason != "" && a.reason != "." && !bytes.Contains(r.Read, []byte(a.reason)) {
			return fmt.Errorf("the response does not tell the reason: %s", r.Read)
		}
	case len(statuses) > 0 || r.Error != "ECONNRESET":
		return fmt.Errorf("statuses %v, %q; want a reset", statuses, r.Error)
	}
	return nil
}

// statuses returns the statuses of the HTTP responses in the bytes.
func statuses(data []byte) (all []int) {
	for r := bufio.NewReader(bytes.NewReader(data)); ; {
		p, err := http.ReadResponse(r, nil)
		if err != nil {
			return all
		}
		all = append(all, p.StatusCode)
		if _, err := io.Copy(io.Discard, p.Body); err != nil {
			return all
		}
	}
}

// judgeWorld looks for bytes and packets of attacks at every address.
func judgeWorld(t *testing.T, w *world, attacks []attack) {
	t.Helper()
	var reached []string             // requests
	dialled := make(map[string]bool) // destinations that may be dialled
	partly := make(map[string][][]byte)
	for i := range attacks {
		a := &attacks[i]
		reached = append(reached, a.reached...)
		if a.dialled || a.partly || a.reached != nil {
			dialled[a.op.To] = true
		}
		if a.partly {
			partly[a.op.To] = append(partly[a.op.To], a.op.Bytes)
		}
	}
	var got []string
	for _, a := range settled(t, w) {
		data := a.bytes()
		switch to := a.to.String(); {
		case a.network == "tcp" && dialled[to] && len(data) == 0:
		case a.network == "tcp" && slices.ContainsFunc(partly[to], func(b []byte) bool { return len(data) < len(b) && bytes.HasPrefix(b, data) }):
		case a.network == "tcp" && dialled[to]:
			got = append(got, requests(data)...)
		default:
			t.Errorf("%s %s was reached by %q", a.network, to, data)
		}
	}
	slices.Sort(got)
	slices.Sort(reached)
	if !slices.Equal(got, reached) {
		t.Errorf("the servers got %q, want %q", got, reached)
	}
	packets, err := w.tap.take()
	if err != nil {
		t.Fatal(err)
	}
	for p := range packets {
		resolver := p.answer || p.to.String() == resolverAt+":53"
		if !resolver && (p.protocol != unix.IPPROTO_TCP || !dialled[p.to.String()]) {
			t.Errorf("a packet: %s", p)
		}
	}
	for _, q := range w.names.take() {
		_, name, _ := strings.Cut(q, " ")
		if !resolvable(name) {
			t.Errorf("the host's resolver was asked %q", q)
		}
	}
}

// resolvable reports whether the policy of the attacks allows to resolve a name.
func resolvable(name string) bool {
	switch name {
	case "web.test", "shared.test", "api.test", "git.test", "db.test":
		return true
	case "evil.cdn.test":
		return false
	}
	return strings.HasSuffix(name, ".cdn.test") || strings.HasSuffix(name, ".allowed.test")
}

// requests are the HTTP requests in the bytes, as "GET host /path". The rest follows as it is.
func requests(data []byte) (all []string) {
	in := bytes.NewReader(data)
	for r := bufio.NewReader(in); ; {
		left := r.Buffered() + in.Len()
		q, err := http.ReadRequest(r)
		if err != nil {
			if left > 0 {
				all = append(all, fmt.Sprintf("%q", data[len(data)-left:]))
			}
			return all
		}
		_, _ = io.Copy(io.Discard, q.Body) // a body that is cut shows as the rest
		all = append(all, q.Method+" "+q.Host+" "+q.URL.Path)
	}
}

// judgeFlows looks for the record of each attack. One flow records one attack. A flow is recorded
// after the program inside has seen its end.
func judgeFlows(t *testing.T, attacks []attack, flows func() []api.Flow) {
	t.Helper()
	var all []api.Flow
	harness.Eventually(t, func() error {
		all = flows()
		names := unrecorded(attacks, all)
		if n := len(names); n > 0 && !slices.ContainsFunc(all, func(f api.Flow) bool { return f.Lost > 0 }) {
			return fmt.Errorf("%d attacks are not recorded: %q", n, names)
		}
		return nil
	})
	for _, f := range all {
		if f.Lost > 0 {
			t.Errorf("%d flows are lost before %+v", f.Lost, f)
		}
		if !f.Allow && f.Reason == "" {
			t.Errorf("a refusal without a reason: %+v", f)
		}
	}
}

// unrecorded returns the names of the attacks that are left without a flow of their own. The flows
// come in any order: on a busy machine a connection that was reset may be recorded behind some
// later ones. A flow may be the record of several attacks, as the words of one reason are in many.
// So an attack that finds all of its flows taken asks those that have them to take others. These
// are the augmenting paths of a bipartite matching, the largest there is when none is left.
func unrecorded(attacks []attack, flows []api.Flow) (names []string) {
	owner := make([]int, len(flows)) // index of the attack, plus one
	for i := range attacks {
		if attacks[i].reason == "" {
			continue
		}
		asked := make([]bool, len(flows))
		var take func(i int) bool
		take = func(i int) bool {
			for j := range flows {
				if asked[j] || !attacks[i].records(&flows[j]) {
					continue
				}
				asked[j] = true
				if owner[j] == 0 || take(owner[j]-1) {
					owner[j] = i + 1
					return true
				}
			}
			return false
		}
		if !take(i) {
			names = append(names, attacks[i].name)
		}
	}
	return names
}

// Flows record their attacks in whatever order they come, and each records one.
func TestFlowsInAnyOrderRecordAttacks(t *testing.T) {
	var attacks []attack
	var flows []api.Flow
	for _, a := range []struct{ name, reason, recorded string }{
		{"any host", "host", "the host is no name"},
		{"a byte", "byte", "a byte of the host"},
		{"a target", "target", "the target has another host and a byte"},
	} {
		attacks = append(attacks, attack{name: a.name, op: op.Op{Kind: op.TCP, To: webAddr + ":80"}, reason: a.reason})
		flows = append(flows, api.Flow{Kind: api.FlowRequest, Address: webAddr, Port: 80, Reason: a.recorded})
	}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		var in []api.Flow
		for _, i := range order {
			in = append(in, flows[i])
		}
		if names := unrecorded(attacks, in); len(names) > 0 {
			t.Errorf("in the order %v: %q are not recorded", order, names)
		}
		if names := unrecorded(attacks, in[1:]); len(names) != 1 {
			t.Errorf("in the order %v, of two flows: %q are not recorded", order, names)
		}
	}
}

// records reports whether a flow is the record of the attack's refusal.
func (a *attack) records(f *api.Flow) bool {
	reason := strings.TrimPrefix(a.reason, ".")
	if f.Allow || f.Reason == "" || !strings.Contains(f.Reason, reason) {
		return false
	}
	if a.op.Kind == op.Resolve {
		return f.Kind == api.FlowQuery && (f.Name == strings.ToLower(a.op.Name) || f.Name == "" && reason != "")
	}
	to, err := netip.ParseAddrPort(a.op.To)
	if err != nil || f.Kind == api.FlowQuery || f.Port != to.Port() {
		return false
	}
	addr, err := netip.ParseAddr(f.Address)
	return err == nil && (addr.Unmap() == to.Addr().Unmap() || addr == behind(to.Addr()))
}

// behind returns the IPv4 address behind one of NAT64.
func behind(addr netip.Addr) netip.Addr {
	if b := addr.As16(); addr.Is6() && netip.MustParsePrefix("64:ff9b::/96").Contains(addr) {
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}

// Without a sandbox every attack works, so that none is refused by the world: its packets arrive,
// the names are resolved, the calls succeed.
func TestAttacksWorkOutside(t *testing.T) {
	w := internet(t)
	attacks, hosts := allAttacks()
	prepare(t, w, hosts)
	var calls, rest []attack
	for _, a := range attacks {
		switch {
		case a.op.Kind == op.Call && a.op.Name != "abstract": // the world has the abstract socket
			calls = append(calls, a)
		case !a.nowhere:
			rest = append(rest, a)
		}
	}
	for i, r := range probeOutside(t, w.bare, opsOf(calls)) {
		if absent[r.Error] {
			t.Logf("%s is not tried: the kernel has it not: %s", calls[i].name, r.Error)
		} else if r.Error != "" {
			t.Errorf("%s: %s", calls[i].name, r.Error)
		}
	}
	ops := opsOf(rest)
	for i := range ops {
		ops[i].Before = nil // their questions would count as those of attacks
		arriving(&ops[i])
	}
	results := probeOutside(t, w.enter, ops)
	arrivals := settled(t, w)
	asked := w.names.take()
	for i := range rest {
		a := &rest[i]
		switch {
		case a.op.Kind == op.Resolve && a.op.To != "": // it arrives at the canary of UDP
			if !arrived(&arrivals, a, false) {
				t.Errorf("%s did not arrive: %+v", a.name, results[i])
			}
		case a.op.Kind == op.Resolve:
			q := strings.TrimPrefix(dnsmessage.Type(max(a.op.Type, 1)).String(), "Type") + " " + strings.ToLower(strings.Trim(a.op.Name, "."))
			if !slices.Contains(asked, q) {
				t.Errorf("%s: the nameserver was not asked %q: %+v", a.name, q, results[i])
			}
		case a.op.Kind == op.Call:
			if results[i].Error != "" {
				t.Errorf("%s: %s", a.name, results[i].Error)
			}
		case !arrived(&arrivals, a, !a.here):
			t.Errorf("%s did not arrive: %+v", a.name, results[i])
		}
	}
}

// absent are errors of kernels without a module or device.
var absent = map[string]bool{"EAFNOSUPPORT": true, "EPROTONOSUPPORT": true, "ENOTSUP": true, "EOPNOTSUPP": true, "ENOENT": true, "ENODEV": true, "ENXIO": true, "ESOCKTNOSUPPORT": true}

// arriving makes an operation end when a canary has what it sends.
func arriving(o *op.Op) {
	switch o.Kind {
	case op.TCP:
		o.HalfClose = true
	case op.UDP:
		o.Kind = op.Send
	case op.Resolve:
		if o.To != "" { // a canary does not answer
			o.Kind, o.Bytes = op.Send, []byte(o.Name)
		}
	case op.Send, op.Call, op.Client, op.Hold, op.Flood:
	}
}

// arrived reports whether the bytes of an attack came to its port, and exactly to its address, and
// takes the arrival out.
func arrived(arrivals *[]*arrival, a *attack, exactly bool) bool {
	to := netip.MustParseAddrPort(a.op.To)
	network := "udp"
	if a.op.Kind == op.TCP {
		network = "tcp"
	}
	i := slices.IndexFunc(*arrivals, func(b *arrival) bool {
		if b.network != network || b.to.Port() != to.Port() {
			return false
		}
		if network == "tcp" && exactly && b.to.Addr() != to.Addr().Unmap() && b.to.Addr() != behind(to.Addr()) {
			return false
		}
		data := b.bytes()
		return a.op.Kind == op.Resolve || len(data) > 0 && bytes.HasPrefix(a.op.Bytes, data)
	})
	if i >= 0 {
		*arrivals = slices.Delete(*arrivals, i, i+1)
	}
	return i >= 0
}

// Where rules allow everything that they can, the bytes of attacks arrive, however odd they are.
func TestAttacksWorkWhereRulesAllowThem(t *testing.T) {
	w := internet(t)
	attacks, hosts := allAttacks()
	prepare(t, w, hosts)
	attacks = slices.DeleteFunc(attacks, func(a attack) bool { return a.op.Kind != op.TCP || a.never || a.here })
	ops := opsOf(attacks)
	for i := range ops {
		ops[i].Before = nil // a name would be asked for
		arriving(&ops[i])
	}
	s := connected(t, shared(t, w, "root"), "default", open)
	results := probe(t, s, ops)
	arrivals := settled(t, w)
	for i := range attacks {
		if !arrived(&arrivals, &attacks[i], true) {
			t.Errorf("%s did not arrive: %+v", attacks[i].name, results[i])
		}
	}
	for _, f := range s.Flows(t) {
		if !f.Allow {
			t.Errorf("refused: %+v", f)
		}
	}
}
