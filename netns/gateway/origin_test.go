package gateway

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// finder answers searches for processes when a test lets it.
type finder struct {
	asked chan Ends
	tell  chan *Process
}

func newFinder() *finder { return &finder{make(chan Ends, 1000), make(chan *Process)} }

func (s *finder) in(o *Options, _ *limits) {
	o.Process = func(ctx context.Context, ends Ends) *Process {
		s.asked <- ends
		select {
		case p := <-s.tell:
			return p
		case <-ctx.Done():
			return nil
		}
	}
}

var curl = &Process{PID: 7, Name: "curl", Exec: "x1"}

// A connection that is refused is held until its process was looked for: afterwards the kernel does
// not tell. The search is for the ends of the connection.
func TestRefusalsWaitForTheProcess(t *testing.T) {
	s := newFinder()
	w := newWorld(t, lan, s.in)
	c := w.dial("10.9.0.1:22")
	want := Ends{"tcp", netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort("10.9.0.1:22")}
	if got := <-s.asked; got != want {
		t.Errorf("asked for %+v, want %+v", got, want)
	}
	if len(w.events) > 0 {
		t.Error("it is recorded before its process is known")
	}
	s.tell <- curl
	if _, reset := wasReset(c); !reset {
		t.Error("no reset")
	}
	if e := w.event(); e.Allow || e.Process != curl {
		t.Errorf("%+v", e)
	}
}

// A request that is refused is held too, and a question.
func TestRefusedRequestsAndQuestionsHaveAProcess(t *testing.T) {
	s := newFinder()
	w := newWorld(t, lan, s.in)
	answer := func(server string) {
		if got := <-s.asked; got.Server.String() != server {
			t.Errorf("asked for %+v, want the server %s", got, server)
		}
		s.tell <- curl
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		answer("10.9.0.1:80")
	}()
	response, err := w.client().Get("http://10.9.0.1/")
	if err != nil {
		t.Fatal(err)
	}
	<-done
	if _ = response.Body.Close(); response.StatusCode != http.StatusForbidden {
		t.Error(response.Status)
	}
	if e := w.event(); e.Kind != Request || e.Allow || e.Process != curl {
		t.Errorf("%+v", e)
	}
	done = make(chan struct{})
	go func() {
		defer close(done)
		if got := <-s.asked; got.Protocol != "udp" || got.Server.Port() != 53 {
			t.Errorf("asked for %+v", got)
		}
		s.tell <- curl
	}()
	if code, _ := w.resolve("evil.test", dnsmessage.TypeA); code != dnsmessage.RCodeNameError {
		t.Error(code)
	}
	<-done
	if e := w.event(); e.Kind != Query || e.Allow || e.Process != curl {
		t.Errorf("%+v", e)
	}
}

// A connection that is allowed does not wait for the search, only its entry in the record does.
func TestAllowedConnectionsDoNotWait(t *testing.T) {
	s := newFinder()
	w := newWorld(t, lan, s.in)
	w.raw("10.1.0.7:9000", echoServer)
	c := w.dial("10.1.0.7:9000")
	<-s.asked
	say(t, c, "x")
	_ = c.CloseWrite()
	if b, reset := wasReset(c); reset || len(b) > 0 {
		t.Errorf("%q, reset: %t", b, reset)
	}
	s.tell <- curl
	if e := w.event(); !e.Allow || e.Process != curl {
		t.Errorf("%+v", e)
	}
}

// Searches are bounded for each network. Beyond the bound flows are recorded without a process, and
// those of refusals are not used up by connections that are allowed.
func TestSearchesAreBounded(t *testing.T) {
	asked := make(chan Ends, 1000)
	w := newWorld(t, lan, func(o *Options, _ *limits) {
		o.Process = func(_ context.Context, ends Ends) *Process {
			asked <- ends
			return curl
		}
	})
	w.raw("10.1.0.7:9000", echoServer)
	var found []bool
	for range originBurst + 2 {
		c := w.dial("10.1.0.7:9000")
		_ = c.CloseWrite()
		_, _ = wasReset(c)
		found = append(found, w.event().Process != nil)
	}
	if n := slices.Index(found, false); n != originBurst || slices.Contains(found[n:], true) {
		t.Errorf("allowed connections have a process: %v", found)
	}
	if _, reset := w.reset("10.9.0.1:22"); !reset || w.event().Process != curl {
		t.Error("a refusal has none")
	}
	for range originBurst {
		w.reset("10.9.0.1:22")
		w.event()
	}
	if n := len(asked); n != 2*originBurst {
		t.Errorf("%d searches, want %d", n, 2*originBurst)
	}
}

// A connection beyond a bound is refused without a search: it would hold up the next one.
func TestNoSearchForConnectionsBeyondABound(t *testing.T) {
	s := newFinder()
	w := newWorld(t, lan, s.in, func(_ *Options, l *limits) { l.flows = 1 })
	w.raw("10.1.0.7:9000", echoServer)
	say(t, w.dial("10.1.0.7:9000"), "x")
	<-s.asked
	if _, reset := w.reset("10.1.0.7:9000"); !reset {
		t.Error("no reset")
	}
	if e := w.event(); e.Allow || e.Process != nil || len(s.asked) > 0 {
		t.Errorf("%+v, %d searches", e, len(s.asked))
	}
}
