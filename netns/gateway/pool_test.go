package gateway

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

func TestNetworksOfAPool(t *testing.T) {
	for descriptors, want := range map[uint64]int{0: 0, 100: 0, 140: 0, 256: 6, 1024: 45, 4096: 201, 20000: 1006, 1 << 20: maxNetworks, 1 << 63: maxNetworks} {
		p := NewPool(descriptors)
		if got := p.Networks(); got != want {
			t.Errorf("%d descriptors: %d networks, want %d", descriptors, got, want)
		}
		if most := uint64(p.Networks()*minimum + p.free*placeSize); most > 0 && most+reserved > descriptors {
			t.Errorf("%d descriptors: networks can use %d", descriptors, most)
		}
	}
	if own := 3 + 2; minimum != own+placeSize*(guaranteed[forConnection]+guaranteed[forQuestion]+guaranteed[forPipe]) {
		t.Errorf("the minimum is %d", minimum)
	}
}

// With 20,000 descriptors there are a thousand networks. However much one of them, or several, want
// of whatever, each other one gets its minimum, and the limit is not exceeded.
func TestGreedyNetworksLeaveTheMinimum(t *testing.T) {
	const descriptors, networks, wanted = 20000, 1000, 10000
	for name, tc := range map[string]struct {
		greedy int
		of     []use
	}{
		"connections":            {1, []use{forConnection}},
		"questions":              {1, []use{forQuestion}},
		"pipes":                  {1, []use{forPipe}},
		"everything":             {1, []use{forConnection, forQuestion, forPipe}},
		"everything, of ten":     {10, []use{forConnection, forQuestion, forPipe}},
		"everything, of all but": {networks - 1, []use{forConnection, forQuestion, forPipe}},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewPool(descriptors)
			begin := p.free
			shares := make([]share, networks)
			for i := range shares {
				shares[i].pool = p
			}
			for i := range tc.greedy {
				// Each network can have half of what is left, and wants more than that.
				for range max(wanted/(1+i), 100) {
					for _, u := range tc.of {
						shares[i].take(u)
					}
				}
				if s := &shares[i]; i == 0 && (s.pooled < begin/2 || s.pooled > begin/2+1) {
					t.Errorf("the first took %d places of a pool of %d", s.pooled, begin)
				}
			}
			for i := tc.greedy; i < networks; i++ {
				for u := range uses {
					for k := range guaranteed[u] {
						if !shares[i].take(u) {
							t.Fatalf("network %d gets no place %d of kind %d", i, k, u)
						}
					}
				}
			}
			used := reserved + p.Networks()*(minimum-placeSize*5)
			for i := range shares {
				for u := range uses {
					used += placeSize * shares[i].used[u]
				}
			}
			if used > descriptors {
				t.Errorf("%d descriptors are used of %d", used, descriptors)
			}
			for i := range shares {
				for u := range uses {
					shares[i].give(u, shares[i].used[u])
				}
				if s := &shares[i]; s.pooled != 0 || s.used != [uses]int{} {
					t.Fatalf("network %d still has %+v", i, s)
				}
			}
			if p.free != begin {
				t.Errorf("%d places came back of %d", p.free, begin)
			}
		})
	}
}

// small is a pool in which only the minimum of two networks is left.
func small() func(*Options, *limits) {
	p := &Pool{networks: 2}
	return func(o *Options, _ *limits) { o.Pool = p }
}

// Connections whose first bytes are not complete, and those that lead outside, come from one pool.
// A network that has used up its places is told why, and its neighbour has its own.
func TestConnectionsTakePlaces(t *testing.T) {
	pool := small()
	w, neighbour := newWorld(t, lan, pool), newWorld(t, lan, pool)
	for _, w := range []*world{w, neighbour} {
		w.raw("10.1.0.7:9000", echoServer)
		w.host("web.test", "93.184.215.14")
		w.http("93.184.215.14:80", echo)
		w.resolve("web.test", dnsmessage.TypeA)
		w.event()
	}
	half := w.dial("93.184.215.14:80")
	_, _ = half.Write([]byte("GET / HTTP/1.1\r\nHost: web"))
	w.waitHeads(1)
	outside := w.dial("10.1.0.7:9000")
	say(t, outside, "x")
	say(t, w.dial("10.1.0.7:9000"), "x")
	for range 10 {
		if b, reset := w.reset("10.1.0.7:9000"); !reset {
			t.Fatalf("%q and no reset", b)
		}
		if e := w.event(); e.Allow || e.Reason != "3 connections of this sandbox are open, as many as the gateway's limit of open files allows now" {
			t.Fatalf("%+v", e)
		}
	}
	for range guaranteed[forConnection] {
		say(t, neighbour.dial("10.1.0.7:9000"), "x")
	}
	// A place that is free again is given out. Those that are held go on.
	_ = outside.CloseWrite()
	if e := w.event(); !e.Allow {
		t.Errorf("%+v", e)
	}
	say(t, w.dial("10.1.0.7:9000"), "y")
	if _, body := get(t, half, bufio.NewReader(half), "GET", ".test\r\n\r\n"); body != "GET web.test / " {
		t.Error(body)
	}
	for _, w := range []*world{w, neighbour} {
		w.n.Close()
		if s := &w.n.places; s.used != [uses]int{} || s.pooled != 0 {
			t.Errorf("%+v is left", s)
		}
	}
}

// Questions beyond the places are answered SERVFAIL, over UDP and TCP. Those of a neighbour are
// asked.
func TestQuestionsTakePlaces(t *testing.T) {
	release, waiting := make(chan struct{}), make(chan struct{}, 10)
	slow := func(o *Options, _ *limits) {
		o.Lookup = func(context.Context, string, policy.Name) ([]netip.Addr, error) {
			waiting <- struct{}{}
			<-release
			return []netip.Addr{netip.MustParseAddr("93.184.215.14")}, nil
		}
	}
	pool := small()
	w, neighbour := newWorld(t, lan, pool, slow), newWorld(t, lan, pool, slow)
	answers := make(chan string)
	for i, w := range []*world{w, neighbour} {
		go func() {
			_, addrs := w.resolve(fmt.Sprintf("n%d.cdn.test", i), dnsmessage.TypeA)
			answers <- fmt.Sprint(addrs)
		}()
		<-waiting
	}
	if code, _ := w.resolve("more.cdn.test", dnsmessage.TypeA); code != dnsmessage.RCodeServerFailure {
		t.Errorf("one more: %s", code)
	}
	msg := question1(t, "more.cdn.test", dnsmessage.TypeA, true)
	var r dnsmessage.Message
	if err := r.Unpack(w.n.waitAnswer(&flow{n: w.n, ctx: t.Context()}, Ends{}, msg)); err != nil || r.RCode != dnsmessage.RCodeServerFailure || len(r.Questions) != 1 || !r.Response {
		t.Errorf("one more over TCP: %+v, %v", r, err)
	}
	close(release)
	for range 2 {
		if a := <-answers; a != "[93.184.215.14]" {
			t.Error(a)
		}
	}
	for _, w := range []*world{w, neighbour} {
		w.n.Close()
		if s := &w.n.places; s.used != [uses]int{} || s.pooled != 0 {
			t.Errorf("%+v is left", s)
		}
	}
}

// A flow beyond the places for pipes is passed on by copying.
func TestPipesTakePlaces(t *testing.T) {
	w := newWorld(t, lan, small())
	held, ok := w.n.takePipe()
	if !ok {
		t.Fatal("no pipe")
	}
	if _, ok := w.n.takePipe(); ok {
		t.Fatal("a second one")
	}
	w.raw("10.1.0.7:9000", echoServer)
	say(t, w.dial("10.1.0.7:9000"), strings.Repeat("x", 3*bufferSize))
	w.n.putPipe(held, true)
	w.n.Close()
	if s := &w.n.places; s.used != [uses]int{} || s.pooled != 0 {
		t.Errorf("%+v is left", s)
	}
}

// A network in quarantine resets connections and answers no question, whatever is sent.
func TestQuarantine(t *testing.T) {
	w := newWorld(t, lan, func(o *Options, _ *limits) { o.Quarantined = true })
	w.raw("10.1.0.7:80", echoServer)
	for range 3 {
		if b, reset := w.reset("10.1.0.7:80"); !reset {
			t.Errorf("%q and no reset", b)
		}
	}
	if code, _ := w.resolve("web.test", dnsmessage.TypeA); code != dnsmessage.RCodeServerFailure {
		t.Errorf("a question: %s", code)
	}
	if len(w.dialled)+len(w.asked) > 0 {
		t.Errorf("dialled %v, asked %v", w.dialled, w.asked)
	}
	if all := w.all(); len(all) > 0 {
		t.Errorf("%+v", all)
	}
}

// Nothing but the header of a message is read for SERVFAIL, and answers are not answered.
func FuzzServerFailure(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 11))
	f.Add(make([]byte, 12))
	f.Add(question1(f, "web.test", dnsmessage.TypeA, true))
	f.Fuzz(func(t *testing.T, msg []byte) {
		r := serverFailure(msg)
		if r == nil {
			return
		}
		if again := serverFailure(r); again != nil {
			t.Errorf("the answer %x is answered", r)
		}
		var p dnsmessage.Parser
		if h, err := p.Start(r); err != nil || !h.Response || h.RCode != dnsmessage.RCodeServerFailure || len(r) != len(msg) {
			t.Errorf("%x: %+v, %v", r, h, err)
		}
	})
}

// What was used before counts, and hosts that are known do not count again.
func TestBudgetGoesOn(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{BytesOut: 10, Connections: 4, Hosts: 3, Queries: 5, NameBytes: 100}), func(o *Options, _ *limits) {
		o.Spent = Spent{BytesOut: 7, Connections: 1, Hosts: 2, Known: []string{"10.1.0.7"}, Queries: 4, NameBytes: 99}
	})
	w.raw("10.1.0.7:9000", echoServer)
	counted := make(chan struct{})
	w.raw("10.1.0.8:9000", func(c *net.TCPConn) {
		close(counted)
		echoServer(c)
	})
	w.raw("10.1.0.9:9000", echoServer)
	say(t, w.dial("10.1.0.7:9000"), "123")
	say(t, w.dial("10.1.0.8:9000"), "")
	<-counted
	if _, reset := w.reset("10.1.0.9:9000"); !reset {
		t.Error("a fourth host")
	}
	if e := w.event(); e.Reason != "the budget of 3 hosts is used up" || !reflect.DeepEqual(e.Spent, &Spent{BytesOut: 10, BytesIn: 3, Connections: 4, Hosts: 3, Known: []string{"10.1.0.8"}, Queries: 4, NameBytes: 99}) {
		t.Errorf("%+v, %+v", e, e.Spent)
	}
	if _, reset := w.reset("10.1.0.7:9000"); !reset {
		t.Error("a fifth connection")
	}
	w.event()
	w.host("web.test", "93.184.215.14")
	if r := w.exchange(question1(t, "web.test", dnsmessage.TypeA, true)); explained(r) != "15 the budget of 100 bytes in names is used up" {
		t.Error(explained(r))
	}
	if r := w.exchange(question1(t, "web.test", dnsmessage.TypeA, true)); explained(r) != "15 the budget of 5 DNS queries is used up" {
		t.Error(explained(r))
	}
}

// The clock of a network without connections stands still, and runs when there is one.
func TestIdleNetworksSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks atomic.Int64 // at the clock, by the sweep alone
		n := New(Options{ID: "box", Record: func([]Event) {}, Now: func() time.Time {
			looks.Add(1)
			return time.Now()
		}})
		defer n.Close()
		sleeps := func() {
			t.Helper()
			time.Sleep(2500 * time.Millisecond) // between ticks; it notices that there are no connections
			before := looks.Load()
			time.Sleep(time.Hour)
			if n := looks.Load() - before; n > 0 {
				t.Errorf("it woke up %d times", n)
			}
		}
		sleeps()
		f := &flow{n: n, client: &stream{conn: new(net.TCPConn)}, cancel: func() {}}
		f.deadline.Store(time.Now().Add(time.Minute).UnixNano())
		n.mu.Lock()
		n.flows[f] = struct{}{}
		n.mu.Unlock()
		n.wake()
		n.wake() // does not wait
		time.Sleep(2 * time.Minute)
		if f.abortedBy() == nil {
			t.Error("a slow connection was not ended")
		}
		n.mu.Lock()
		delete(n.flows, f)
		n.mu.Unlock()
		sleeps()
	})
}

// What an earlier process is said to have used neither overflows nor lifts a budget.
func TestSpentIsBounded(t *testing.T) {
	l := newLedger(Budget{Connections: 4}, Spent{BytesOut: -1, Connections: math.MaxInt64}, time.Now)
	if reason := l.connection(); reason == "" {
		t.Error("a connection beyond the budget")
	}
	if s := l.spent(); s.BytesOut != 0 || s.Connections != MaxSpent {
		t.Errorf("%+v", s)
	}
}
