package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

// A timers is a clock whose timers fire when the test says so.
type timers struct {
	asked chan time.Duration // each call of after

	mu   sync.Mutex // guards those below
	now  time.Time
	wait map[time.Duration][]chan time.Time
}

func newTimers() *timers {
	return &timers{asked: make(chan time.Duration, 10000), now: time.Unix(1e9, 0), wait: make(map[time.Duration][]chan time.Time)}
}

func (c *timers) clock() clock {
	return clock{
		now: func() time.Time {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.now
		},
		after: func(d time.Duration) <-chan time.Time {
			c.mu.Lock()
			defer c.mu.Unlock()
			ch := make(chan time.Time, 1)
			c.wait[d] = append(c.wait[d], ch)
			c.asked <- d
			return ch
		},
	}
}

func (c *timers) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// fire fires all timers of a duration.
func (c *timers) fire(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.wait[d] {
		ch <- c.now
	}
	delete(c.wait, d)
}

// next waits until a timer is asked for that is not one of those to ignore.
func (c *timers) next(t *testing.T, ignore ...time.Duration) time.Duration {
	t.Helper()
	for {
		select {
		case d := <-c.asked:
			if !slices.Contains(ignore, d) {
				return d
			}
		case <-time.After(testenv.HungAfter):
			t.Fatal("no timer")
		}
	}
}

// A part is played by a test in the place of a gateway process. It returns when it has ended.
type part func(p *player)

// A player is the process's side of a connection.
type player struct {
	conn *net.UnixConn
	raw  syscall.RawConn
	got  chan request // what the honest part was asked

	asks    *net.UnixConn // once hear has met it, before the first request with an answer
	asksRaw syscall.RawConn
}

func (p *player) say(packet string) { _, _ = p.conn.Write([]byte(packet)) }

// ask is say at the socket for asks.
func (p *player) ask(packet string) { _, _ = p.asks.Write([]byte(packet)) }

// hear returns the next request that has an answer.
func (p *player) hear() (r request, err error) {
	fds, err := requests.Receive(p.raw, 0, func(packet []byte) error { return decode(packet, &r) })
	if r.Asks && len(fds) == 1 {
		p.asks, p.asksRaw, err = rawConn(os.NewFile(uintptr(fds[0]), "asks"))
		fds = nil
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err == nil && (r.Report || r.Asks) {
		return p.hear()
	}
	return r, err
}

// heard returns the next reply and the number of its files.
func (p *player) heard() (r reply, files int, err error) {
	fds, err := replyPackets.Receive(p.asksRaw, 0, func(packet []byte) error { return decode(packet, &r) })
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	return r, len(fds), err
}

const greeting = `{"hello":{"landlock":1,"networks":9}}`

// honest greets and answers all requests.
func honest(p *player) {
	p.say(greeting)
	for {
		r, err := p.hear()
		if err != nil {
			return
		}
		p.got <- r
		p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
	}
}

// honestUntil is honest, and hangs up when end is closed.
func honestUntil(end <-chan struct{}) part {
	return func(p *player) {
		go func() {
			<-end
			_ = p.conn.CloseWrite()
		}()
		honest(p)
	}
}

// breaking answers some requests, waits for its turn and sends a packet that breaks the protocol.
func breaking(packet string, requests int, turn <-chan struct{}) part {
	return func(p *player) {
		p.say(greeting)
		for range requests {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
		}
		<-turn
		p.say(packet)
		_, _ = p.hear() // until the daemon gives it up
	}
}

// stage starts parts, the last again and again.
type stage struct {
	t    *testing.T
	time *timers
	got  chan request

	mu    sync.Mutex // guards those below
	parts []part
	fail  error
	count int
	done  sync.WaitGroup
}

func (s *stage) start(_ context.Context, socket *os.File) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	fd, err := duplicate(socket)
	if err != nil {
		return err
	}
	conn, err := unixConn(os.NewFile(uintptr(fd), "player"))
	if err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	play := s.parts[min(s.count, len(s.parts)-1)]
	s.count++
	s.done.Go(func() {
		defer conn.Close()
		p := &player{conn: conn, raw: raw, got: s.got}
		play(p)
		if p.asks != nil {
			_ = p.asks.Close()
		}
	})
	return nil
}

// perform starts a gateway on a stage.
func perform(t *testing.T, onEvent func(gateway.Event), parts ...part) (*Gateway, *stage) {
	t.Helper()
	return performFor(t, Config{Events: onEvent}, parts...)
}

// performFor is perform for a daemon with a configuration.
func performFor(t *testing.T, cfg Config, parts ...part) (*Gateway, *stage) {
	t.Helper()
	s := &stage{t: t, time: newTimers(), got: make(chan request, 1000), parts: parts}
	cfg.Start, cfg.Log, cfg.time = s.start, slog.New(slog.DiscardHandler), s.time.clock()
	g, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		s.done.Wait()
	})
	return g, s
}

func (s *stage) next() request {
	s.t.Helper()
	select {
	case r := <-s.got:
		return r
	case <-time.After(testenv.HungAfter):
		s.t.Fatal("no request")
		panic("unreachable")
	}
}

// addBox adds a network with sockets that the parts do not use.
func addBox(t *testing.T, g *Gateway, id string) error {
	t.Helper()
	return g.Add(t.Context(), Network{ID: id, Policy: []byte(allowsNothing), Sockets: newBox(t).Sockets})
}

// ignored are the timers that every operation has.
var ignored = []time.Duration{answerIn, gapIn}

// A gateway that breaks the protocol is replaced, and the next one gets all networks and their
// present policies. No packet harms the daemon.
func TestHostileGateway(t *testing.T) {
	for name, packet := range map[string]string{
		"garbage":              "\xff\x00",
		"no kind":              `{}`,
		"an unknown field":     `{"events":[{"network":"a","more":1}]}`,
		"a second hello":       greeting,
		"an unasked answer":    `{"answer":{"number":99}}`,
		"an answer again":      `{"answer":{"number":1}}`,
		"a malformed event":    `{"events":[{"network":"a","kind":"connection","protocol":"tcp","addr":"","reason":"\u001b[31m"}]}`,
		"a budget given back":  `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"BytesOut":-1}}]}`,
		"more than any budget": `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Connections":9223372036854775807}}]}`,
		"hosts of an event":    `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Known":["a","b","c","d","e"]}}]}`,
		"no host":              `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Known":["A b"]}}]}`,
		"rules of an event":    `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Rules":[{"Rule":"a"},{"Rule":"b"},{"Rule":"c"},{"Rule":"d"},{"Rule":"e"}]}}]}`,
		"hosts of a rule":      `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Rules":[{"Rule":"a","Known":["a","b","c","d","e"]}]}}]}`,
		"a rule given back":    `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Rules":[{"Rule":"a","BytesIn":-1}]}}]}`,
		"a rule without name":  `{"events":[{"network":"a","kind":"query","protocol":"dns","addr":"","spent":{"Rules":[{"BytesIn":1}]}}]}`,
		"a packet too large":   `{"answer":{"number":1,"error":"` + strings.Repeat("x", messages.MaxBytes) + `"}}`,
		"an error too long":    `{"answer":{"number":1,"error":"` + strings.Repeat("x", maxError+1) + `"}}`,
		"deeply nested":        strings.Repeat("[", 9000),
		"bytes after a value":  `{"answer":{"number":1}} x`,
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var record []gateway.Event
			turn := make(chan struct{})
			g, s := perform(t, func(e gateway.Event) {
				mu.Lock()
				defer mu.Unlock()
				record = append(record, e)
			}, breaking(packet, 2, turn), honest)
			if err := addBox(t, g, "a"); err != nil {
				t.Fatal(err)
			}
			if err := g.SetPolicy(t.Context(), "a", []byte(allowsExample)); err != nil {
				t.Fatal(err)
			}
			s.next()
			s.next()
			close(turn)
			if r := s.next(); r.Add == nil || r.Add.ID != "a" || string(r.Add.Policy) != allowsExample {
				t.Errorf("the next process got %+v", r)
			}
			if err := g.Remove(t.Context(), "a"); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if len(record) != 1 || record[0].Kind != Restarted || record[0].Network != "a" || record[0].Reason == "" {
				t.Errorf("%+v", record)
			}
		})
	}
}

// Descriptors that a gateway sends are not kept.
func TestGatewaySendsFiles(t *testing.T) {
	closed := make(chan error, 1)
	g, s := perform(t, func(gateway.Event) {}, func(p *player) {
		p.say(greeting)
		ours, theirs, err := os.Pipe()
		if err != nil {
			closed <- err
			return
		}
		fd, err := duplicate(theirs)
		if err == nil {
			_, _, err = p.conn.WriteMsgUnix([]byte(`{"answer":{"number":1}}`), unix.UnixRights(fd), nil)
		}
		_ = errors.Join(unix.Close(fd), theirs.Close())
		if err == nil {
			_, err = io.ReadAll(ours) // ends when no copy is left
		}
		closed <- errors.Join(err, ours.Close())
	}, honest)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := addBox(t, g, "a"); err != nil {
		t.Error(err)
	}
	if r := s.next(); r.Add == nil {
		t.Errorf("%+v", r)
	}
}

// A gateway that does not answer is replaced, and the operation goes to the next.
func TestDeafGateway(t *testing.T) {
	deaf := func(p *player) {
		p.say(greeting)
		for {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
		}
	}
	g, s := perform(t, func(gateway.Event) {}, deaf, honest)
	added := make(chan error)
	go func() { added <- addBox(t, g, "a") }()
	s.next()
	s.time.fire(answerIn)
	if err := <-added; err != nil {
		t.Error(err)
	}
	if r := s.next(); r.Add == nil || r.Add.ID != "a" {
		t.Errorf("the next process got %+v", r)
	}
}

// Starts that fail are tried again with growing pauses. Meanwhile an operation that needs the
// process waits and then fails with its own class, and the others work.
func TestPausesBetweenStarts(t *testing.T) {
	end := make(chan struct{})
	g, s := perform(t, func(gateway.Event) {}, honestUntil(end), honest)
	for _, id := range []string{"a", "b"} {
		if err := addBox(t, g, id); err != nil {
			t.Fatal(err)
		}
		s.next()
	}
	noFork := errors.New("no process")
	s.mu.Lock()
	s.fail = noFork
	s.mu.Unlock()
	close(end)
	pauses := []time.Duration{firstPause, 2 * firstPause, 4 * firstPause, 8 * firstPause, 16 * firstPause, 32 * firstPause, 64 * firstPause, 128 * firstPause, 256 * firstPause, longestPause, longestPause}
	for i, want := range pauses {
		if got := s.time.next(t, ignored...); got != want {
			t.Fatalf("pause %d is %v, want %v", i, got, want)
		}
		if i < len(pauses)-1 {
			s.time.fire(want)
		}
	}
	if c := g.Check(); c.OK || !strings.Contains(c.Found, noFork.Error()) {
		t.Errorf("%+v", c)
	}
	failed := make(chan error)
	go func() { failed <- addBox(t, g, "c") }()
	for s.time.next(t) != gapIn {
	}
	s.time.fire(gapIn)
	if err := <-failed; !errors.Is(err, ErrUnavailable) || !errors.Is(err, noFork) {
		t.Errorf("an operation without a process: %v", err)
	}
	if err := errors.Join(g.SetPolicy(t.Context(), "a", []byte(allowsExample)), g.Remove(t.Context(), "b")); err != nil {
		t.Errorf("without a process: %v", err)
	}
	waiting := make(chan error)
	go func() { waiting <- addBox(t, g, "d") }()
	for s.time.next(t) != gapIn {
	}
	s.mu.Lock()
	s.fail = nil
	s.mu.Unlock()
	s.time.fire(longestPause)
	if err := <-waiting; err != nil {
		t.Errorf("an operation that waited for the process: %v", err)
	}
	if r := s.next(); r.Add == nil || r.Add.ID != "a" || string(r.Add.Policy) != allowsExample {
		t.Errorf("the next process got first %+v", r)
	}
	if r := s.next(); r.Add == nil || r.Add.ID != "d" {
		t.Errorf("the next process got second %+v", r)
	}
}

// A process that has run for long is replaced at once, whatever was before.
func TestPausesBeginAnew(t *testing.T) {
	ends := make(chan struct{})
	g, s := perform(t, func(gateway.Event) {}, func(p *player) {
		p.say(greeting)
		go func() {
			<-ends
			_ = p.conn.CloseWrite()
		}()
		_, _ = p.hear()
	})
	t.Cleanup(func() { close(ends) })
	running := func(count int) { // waits until so many have been started
		for {
			g.mu.Lock()
			ready := g.ready
			g.mu.Unlock()
			<-ready
			s.mu.Lock()
			now := s.count
			s.mu.Unlock()
			if now == count {
				return
			}
		}
	}
	ends <- struct{}{}
	running(2) // at once
	ends <- struct{}{}
	if got := s.time.next(t, helloIn); got != firstPause {
		t.Errorf("the first pause is %v", got)
	}
	s.time.fire(firstPause)
	running(3)
	s.time.advance(longestPause)
	ends <- struct{}{}
	running(4) // at once
	ends <- struct{}{}
	if got := s.time.next(t, helloIn); got != firstPause {
		t.Errorf("the first pause afterwards is %v", got)
	}
}

// A gateway that refuses leaves everything as it was.
func TestRefusals(t *testing.T) {
	g, s := perform(t, func(gateway.Event) {}, func(p *player) {
		p.say(greeting)
		for {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			if r.Remove != nil || r.Add != nil && r.Add.ID == "good" && string(r.Add.Policy) == allowsNothing {
				p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
			} else {
				p.say(fmt.Sprintf(`{"answer":{"number":%d,"error":"no, since I am full"}}`, r.Number))
			}
		}
	})
	if err := addBox(t, g, "bad"); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "I am full") {
		t.Errorf("refused: %v", err)
	}
	if err := g.Remove(t.Context(), "bad"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a network that was refused: %v", err)
	}
	if err := addBox(t, g, "good"); err != nil {
		t.Fatal(err)
	}
	if err := g.SetPolicy(t.Context(), "good", []byte(allowsExample)); !errors.Is(err, ErrRefused) {
		t.Errorf("a policy that is refused: %v", err)
	}
	if err := g.Add(t.Context(), Network{ID: "good", Policy: []byte(allowsExample), Sockets: newBox(t).Sockets}); !errors.Is(err, ErrRefused) {
		t.Errorf("a replacement that is refused: %v", err)
	}
	n := g.all()
	if len(n) != 1 || string(n[0].policy) != allowsNothing || len(n[0].fds) != 3 {
		t.Errorf("networks are %+v", n)
	}
	_ = s
}

// Mistakes of the caller are found without the process, which would be restarted for nothing.
func TestInvalidNetworks(t *testing.T) {
	g, s := perform(t, func(gateway.Event) {}, honest)
	b := newBox(t)
	for name, n := range map[string]Network{
		"no id":           {Policy: []byte(allowsNothing), Sockets: b.Sockets},
		"no policy":       {ID: "a", Sockets: b.Sockets},
		"a large policy":  {ID: "a", Policy: []byte(allowsNothing + strings.Repeat(" ", MaxPolicy)), Sockets: b.Sockets},
		"a mistake":       {ID: "a", Policy: []byte(`{"version": 1, "rules": [{"name": "x"}]}`), Sockets: b.Sockets},
		"negative budget": {ID: "a", Policy: []byte(allowsNothing), Budget: gateway.Budget{BytesIn: -1}, Sockets: b.Sockets},
	} {
		if err := g.Add(t.Context(), n); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := g.Add(t.Context(), Network{ID: "a", Policy: []byte(allowsNothing)}); !errors.Is(err, os.ErrInvalid) {
		t.Errorf("no sockets: %v", err)
	}
	if err := g.SetPolicy(t.Context(), "a", []byte("x")); !errors.Is(err, ErrInvalid) {
		t.Errorf("a policy that is none: %v", err)
	}
	if err := g.SetPolicy(t.Context(), "a", []byte(allowsNothing)); !errors.Is(err, ErrNotFound) {
		t.Errorf("the policy of no network: %v", err)
	}
	if len(s.got) != 0 {
		t.Errorf("the process was asked: %+v", <-s.got)
	}
}

// A slow reader of events loses some, which are counted, and delays no operation and no other
// network's events. After Remove there are none.
func TestSlowEvents(t *testing.T) {
	const sent = 3 * maxQueued
	release, slow := make(chan struct{}), make(chan gateway.Event, sent)
	fast := make(chan gateway.Event, 10)
	line := func(id string) string {
		return `{"events":[{"network":"` + id + `","kind":"query","protocol":"dns","addr":""}]}`
	}
	g, _ := perform(t, func(e gateway.Event) {
		if e.Network == "fast" {
			fast <- e
			return
		}
		<-release
		slow <- e
	}, func(p *player) {
		p.say(greeting)
		for {
			r, err := p.hear()
			if err != nil {
				return
			}
			if r.Add != nil && r.Add.ID == "fast" {
				for range sent {
					p.say(line("slow"))
				}
				p.say(line("nobody"))
				p.say(line("fast"))
			}
			if r.Remove != nil {
				p.say(line("slow"))
			}
			p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
			if r.Remove != nil {
				p.say(line("slow")) // a lie
			}
		}
	})
	for _, id := range []string{"slow", "fast"} {
		if err := addBox(t, g, id); err != nil {
			t.Fatal(err)
		}
	}
	<-fast
	close(release)
	var count int
	var lost uint64
	for range maxQueued { // then there is room for the one that tells of those that were lost
		lost += (<-slow).Lost
		count++
	}
	if err := g.Remove(t.Context(), "slow"); err != nil {
		t.Fatal(err)
	}
	close(slow) // a further event would panic
	for e := range slow {
		count++
		lost += e.Lost
	}
	if uint64(count)+lost > sent+2 || count < maxQueued || lost == 0 {
		t.Errorf("%d events and %d lost of %d", count, lost, sent+2)
	}
	if err := g.Remove(t.Context(), "fast"); err != nil {
		t.Fatal(err)
	}
}

// Operations in progress end with Close, and later ones fail at once.
func TestClose(t *testing.T) {
	var handed int
	s := &stage{t: t, time: newTimers(), got: make(chan request, 10), parts: []part{honest}}
	g, err := Start(t.Context(), Config{Start: s.start, Events: func(gateway.Event) { handed++ }, Log: slog.New(slog.DiscardHandler), time: s.time.clock()})
	if err != nil {
		t.Fatal(err)
	}
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	s.done.Wait()
	if err := addBox(t, g, "b"); !errors.Is(err, ErrClosed) {
		t.Errorf("add: %v", err)
	}
	if err := g.Remove(t.Context(), "a"); !errors.Is(err, ErrClosed) {
		t.Errorf("remove: %v", err)
	}
	if err := g.SetPolicy(t.Context(), "a", []byte(allowsNothing)); !errors.Is(err, ErrClosed) {
		t.Errorf("set policy: %v", err)
	}
	if handed != 0 {
		t.Errorf("%d events", handed)
	}
}

// A process that ends before it is confined is an error of Start.
func TestStartFails(t *testing.T) {
	for name, p := range map[string]part{
		"ends":    func(*player) {},
		"garbage": func(p *player) { p.say("x"); _, _ = p.hear() },
		"answers": func(p *player) { p.say(`{"answer":{"number":1}}`); _, _ = p.hear() },
	} {
		s := &stage{t: t, time: newTimers(), got: make(chan request, 10), parts: []part{p}}
		if g, err := Start(t.Context(), Config{Start: s.start, Log: slog.New(slog.DiscardHandler), time: s.time.clock()}); err == nil {
			t.Errorf("%s: started", name)
			_ = g.Close()
		}
		s.done.Wait()
	}
}

// A gateway that is killed between and during operations loses none of them.
func TestKilledAtRandom(t *testing.T) {
	g, s, e := startGateway(t)
	random := rand.New(rand.NewSource(1))
	boxes := make(map[string]*box)
	policies := make(map[string]string)
	var killing sync.WaitGroup
	for range 60 {
		id := fmt.Sprintf("box%d", random.Intn(4))
		b := boxes[id]
		if random.Intn(3) == 0 {
			killing.Go(s.kill) // while the next operation is made
		}
		switch {
		case b == nil:
			b = newBox(t)
			if err := g.Add(t.Context(), Network{ID: id, Policy: []byte(allowsNothing), Sockets: b.Sockets}); err != nil {
				t.Fatal(err)
			}
			boxes[id], policies[id] = b, allowsNothing
		case random.Intn(4) == 0:
			if err := g.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			delete(boxes, id)
		default:
			if policies[id] = allowsExample; random.Intn(2) == 0 {
				policies[id] = allowsNothing
			}
			if err := g.SetPolicy(t.Context(), id, []byte(policies[id])); err != nil {
				t.Fatal(err)
			}
		}
		killing.Wait()
	}
	for id, b := range boxes {
		want := dnsmessage.RCodeNameError
		if policies[id] == allowsExample {
			want = dnsmessage.RCodeSuccess
		}
		if code := b.resolve(t, "example.com"); code != want {
			t.Errorf("%s answers %v, want %v", id, code, want)
		}
		b.refused(t)
	}
	for v := e.next(t); v.Kind != Restarted; v = e.next(t) {
	}
}

// Events are read at a bounded rate, whatever a gateway sends.
func TestRateOfEvents(t *testing.T) {
	const more = 5
	_, s := perform(t, func(gateway.Event) {}, func(p *player) {
		p.say(greeting)
		for range eventRate + more {
			p.say(`{"events":[{"network":"a","kind":"query","protocol":"dns","addr":""}]}`)
		}
		_, _ = p.hear()
	})
	for range more { // the clock stands still
		pause := s.time.next(t, helloIn)
		if pause <= 0 || pause > time.Second {
			t.Errorf("a pause of %v", pause)
		}
		s.time.fire(pause)
	}
}
