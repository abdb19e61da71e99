package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// web is the only peer of network a, in the tests of this file.
var web = gateway.Peer{Name: "web", Network: "front", Addr: netip.MustParseAddr("198.18.3.4")}

// onlyWeb knows one peer of one network. Connections to it are the clients of a listener.
func onlyWeb(t *testing.T, asks chan<- string) Peers {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return Peers{
		Find: func(network string, name policy.Name) (gateway.Peer, error) {
			asks <- network + " " + name.String()
			if network != "a" || name.String() != "web" {
				return gateway.Peer{}, gateway.ErrNoPeer
			}
			return web, nil
		},
		Dial: func(ctx context.Context, network string, to netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
			asks <- network + " " + to.String()
			switch {
			case network != "a" || to.Addr() != web.Addr:
				return nil, gateway.Peer{}, gateway.ErrNoPeer
			case to.Port() == 82:
				return nil, gateway.Peer{}, gateway.Refused("too many")
			case to.Port() != 80:
				return nil, web, errors.New("connection\nrefused")
			}
			c, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			if err != nil {
				return nil, web, err
			}
			return c.(*net.TCPConn), web, nil
		},
	}
}

// A gateway that was taken over gets only peers of the network that it asks for.
func TestAsksOfATakenOverGateway(t *testing.T) {
	asks := make(chan string, 100)
	type heard struct {
		reply
		files int
	}
	replies := make(chan heard, 100)
	g, s := performFor(t, Config{Events: func(gateway.Event) {}, Peers: onlyWeb(t, asks)}, func(p *player) {
		p.say(greeting)
		for {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
			if r.Add.ID == "b" {
				break
			}
		}
		for i, q := range []string{
			`"a","name":"web"`, `"a","name":"db"`, `"b","name":"web"`,
			`"a","dial":"198.18.3.4:80"`, `"a","dial":"198.18.3.4:81"`, `"a","dial":"198.18.3.5:80"`, `"b","dial":"198.18.3.4:80"`, `"a","dial":"198.18.3.4:82"`,
			`"gone","name":"web"`, `"gone","dial":"198.18.3.4:80"`, `"gone","socket":80`,
		} {
			p.ask(fmt.Sprintf(`{"number":%d,"network":%s}`, 100+i, q))
		}
		for range 11 {
			r, files, err := p.heard()
			if err != nil {
				return
			}
			replies <- heard{r, files}
		}
		_, _ = p.hear() // until the daemon closes it
	})
	for _, id := range []string{"a", "b"} {
		if err := g.Add(t.Context(), Network{ID: id, Policy: []byte(allowsNothing), Sockets: newBox(t).Sockets, Networks: []string{"front"}}); err != nil {
			t.Fatal(err)
		}
		if r := s.next(); len(r.Add.Networks) != 1 || r.Add.Networks[0] != "front" {
			t.Errorf("added %+v", r.Add)
		}
	}
	got := make(map[uint64]string)
	for range 11 {
		r := <-replies
		text := fmt.Sprintf("%d files %s", r.files, r.Error)
		if r.Peer != nil {
			text += fmt.Sprintf("%+v", *r.Peer)
		}
		got[r.Number] = text
	}
	for number, want := range map[uint64]string{
		100: "0 files {Name:web Network:front Addr:198.18.3.4}", 101: "0 files ", 102: "0 files ",
		103: "1 files {Name:web Network:front Addr:198.18.3.4}", 104: "0 files connection\ufffdrefused{Name:web Network:front Addr:198.18.3.4}", 105: "0 files ", 106: "0 files ", 107: "0 files too many",
		108: "0 files ", 109: "0 files ", 110: "0 files the sandbox has ended",
	} {
		if got[number] != want {
			t.Errorf("ask %d: %q, want %q", number, got[number], want)
		}
	}
}

// An ask that no gateway of ours sends ends it, before the daemon does anything for it.
func TestHostileAsks(t *testing.T) {
	for name, packet := range map[string]string{
		"no network":           `{"number":1,"name":"web"}`,
		"nothing":              `{"number":1,"network":"a"}`,
		"both":                 `{"number":1,"network":"a","name":"web","dial":"198.18.3.4:80"}`,
		"two kinds":            `{"number":1,"network":"a","name":"web"},"answer":{"number":1}`,
		"case":                 `{"number":1,"network":"a","name":"WEB"}`,
		"a trailing dot":       `{"number":1,"network":"a","name":"web."}`,
		"a number":             `{"number":1,"network":"a","name":"127.0.0.1"}`,
		"a long name":          `{"number":1,"network":"a","name":"` + strings.Repeat("a.", 127) + `a"}`,
		"loopback":             `{"number":1,"network":"a","dial":"127.0.0.1:80"}`,
		"below the range":      `{"number":1,"network":"a","dial":"198.17.255.255:80"}`,
		"above the range":      `{"number":1,"network":"a","dial":"198.20.0.0:80"}`,
		"a mapped address":     `{"number":1,"network":"a","dial":"[::ffff:198.18.3.4]:80"}`,
		"no port":              `{"number":1,"network":"a","dial":"198.18.3.4:0"}`,
		"a port too large":     `{"number":1,"network":"a","dial":"198.18.3.4:65536"}`,
		"an address alone":     `{"number":1,"network":"a","dial":"198.18.3.4"}`,
		"a zone":               `{"number":1,"network":"a","dial":"[fe80::1%lo]:80"}`,
		"a socket and a name":  `{"number":1,"network":"a","name":"web","socket":80}`,
		"a socket and a dial":  `{"number":1,"network":"a","dial":"198.18.3.4:80","socket":80}`,
		"a socket's path":      `{"number":1,"network":"a","socket":"/run/docker.sock"}`,
		"a socket's port":      `{"number":1,"network":"a","socket":65536}`,
		"a process and a name": `{"number":1,"network":"a","name":"web","process":{"protocol":"tcp","program":"192.0.2.1:4000","server":"10.0.0.1:80"}}`,
		"a process's protocol": `{"number":1,"network":"a","process":{"protocol":"unix","program":"192.0.2.1:4000","server":"10.0.0.1:80"}}`,
		"a process's end":      `{"number":1,"network":"a","process":{"protocol":"tcp","program":"192.0.2.1:4000"}}`,
		"a process's zone":     `{"number":1,"network":"a","process":{"protocol":"tcp","program":"[fe80::1%lo]:4000","server":"10.0.0.1:80"}}`,
		"an unknown field":     `{"number":1,"network":"a","name":"web","port":80}`,
		"a negative number":    `{"number":-1,"network":"a","name":"web"}`,
	} {
		t.Run(name, func(t *testing.T) {
			asks := make(chan string, 100)
			turn := make(chan struct{})
			process := func(context.Context, string, gateway.Ends) *gateway.Process {
				asks <- "a process"
				return nil
			}
			g, s := performFor(t, Config{Events: func(gateway.Event) {}, Peers: onlyWeb(t, asks), Process: process}, func(p *player) {
				p.say(greeting)
				r, err := p.hear()
				if err != nil {
					return
				}
				p.got <- r
				p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
				<-turn
				p.ask(packet)
				_, _ = p.hear() // until the daemon gives it up
			}, honest)
			if err := addBox(t, g, "a"); err != nil {
				t.Fatal(err)
			}
			s.next()
			close(turn)
			if r := s.next(); r.Add == nil || r.Add.ID != "a" {
				t.Errorf("the next process got %+v", r)
			}
			if len(asks) > 0 {
				t.Errorf("the daemon was asked: %s", <-asks)
			}
		})
	}
}

// A gateway that asks for more at once than ours ever does is ended. One that stays at the bound
// gets a reply to each.
func TestAsksAreBounded(t *testing.T) {
	for _, more := range []int{0, 1} {
		t.Run(fmt.Sprint(more), func(t *testing.T) {
			begun, release, replied := make(chan struct{}, 2*mostAsks), make(chan struct{}), make(chan struct{}, 2*mostAsks)
			peers := Peers{Dial: func(context.Context, string, netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
				begun <- struct{}{}
				<-release
				return nil, gateway.Peer{}, gateway.ErrNoPeer
			}}
			g, s := performFor(t, Config{Events: func(gateway.Event) {}, Peers: peers}, func(p *player) {
				p.say(greeting)
				r, err := p.hear()
				if err != nil {
					return
				}
				p.got <- r
				p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
				for i := range mostAsks + more {
					p.ask(fmt.Sprintf(`{"number":%d,"network":"a","dial":"198.18.3.4:80"}`, 1+i))
				}
				for range mostAsks {
					if _, _, err := p.heard(); err != nil {
						return
					}
					replied <- struct{}{}
				}
				_, _ = p.hear() // until the daemon closes it
			}, honest)
			if err := addBox(t, g, "a"); err != nil {
				t.Fatal(err)
			}
			s.next()
			for range mostAsks {
				<-begun
			}
			if more > 0 {
				s.next() // the next process has the network
			}
			close(release)
			if more == 0 {
				for range mostAsks {
					<-replied
				}
			}
			if len(begun) > 0 {
				t.Errorf("%d asks beyond the bound were begun", len(begun))
			}
		})
	}
}

// What a process asked for ends with it, and does not count for the next.
func TestAsksEndWithTheirProcess(t *testing.T) {
	begun, ended := make(chan struct{}, 10*mostAsks), make(chan struct{}, 10*mostAsks)
	peers := Peers{Dial: func(ctx context.Context, _ string, _ netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
		begun <- struct{}{}
		<-ctx.Done()
		ended <- struct{}{}
		return nil, gateway.Peer{}, context.Cause(ctx)
	}}
	var turns [3]chan struct{}
	var parts []part
	for i := range turns {
		turns[i] = make(chan struct{})
		parts = append(parts, func(p *player) {
			p.say(greeting)
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
			for n := range mostAsks {
				p.ask(fmt.Sprintf(`{"number":%d,"network":"a","dial":"198.18.3.4:80"}`, 1+n))
			}
			<-turns[i]
		})
	}
	g, s := performFor(t, Config{Events: func(gateway.Event) {}, Peers: peers}, append(parts, honest)...)
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	for i := range turns {
		s.next()
		for range mostAsks {
			<-begun
		}
		close(turns[i])
		for range mostAsks {
			<-ended
		}
		if pause := i - 1; pause >= 0 { // the first process is replaced at once
			for s.time.next(t, append(ignored, helloIn)...) != firstPause<<pause {
			}
			s.time.fire(firstPause << pause)
		}
	}
	if r := s.next(); r.Add == nil || r.Add.ID != "a" {
		t.Errorf("the last process got %+v", r)
	}
}

// A network whose events are too many delays no ask.
func TestEventsDelayNoAsks(t *testing.T) {
	const each = 200 // events of a packet
	turn, replied := make(chan struct{}), make(chan reply, 1)
	g, s := performFor(t, Config{Events: func(gateway.Event) {}, Peers: onlyWeb(t, make(chan string, 1))}, func(p *player) {
		p.say(greeting)
		r, err := p.hear()
		if err != nil {
			return
		}
		p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
		packet := `{"events":[` + strings.Repeat(`{"network":"a","kind":"query","protocol":"dns","addr":""},`, each-1) + `{"network":"a","kind":"query","protocol":"dns","addr":""}]}`
		for range eventRate/each + 1 {
			p.say(packet)
		}
		<-turn
		p.ask(`{"number":1,"network":"a","name":"web"}`)
		if r, _, err := p.heard(); err == nil {
			replied <- r
		}
		_, _ = p.hear() // until the daemon closes it
	})
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	pause := s.time.next(t, append(ignored, helloIn)...) // events are not read now
	close(turn)
	select {
	case r := <-replied:
		if r.Peer == nil || r.Peer.Addr != web.Addr {
			t.Errorf("the reply is %+v", r)
		}
	case <-time.After(testenv.HungAfter):
		t.Error("no reply")
	}
	s.time.fire(pause)
}

// The refusal of a bound is told apart from the failure of a connection.
func TestRefusedConnectionsToPeers(t *testing.T) {
	var a *asker
	a = newAsker(func(q *ask) error {
		return a.deliver(received{reply: reply{Number: q.Number, Error: "too many"}})
	})
	_, p, err := a.peers("a", []string{"front"}).Dial(t.Context(), netip.MustParseAddrPort("198.18.3.4:80"))
	if refused, ok := errors.AsType[gateway.Refused](err); !ok || refused != "too many" || p != (gateway.Peer{}) {
		t.Errorf("%+v, %v", p, err)
	}
}

// A connection whose client has gone before the daemon has replied is closed, and its place is free
// only then: else the daemon would have more asks than the bound.
func TestRepliesThatComeLate(t *testing.T) {
	sent := make(chan ask, 1)
	a := newAsker(func(q *ask) error { sent <- *q; return nil })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	done := make(chan struct{}, 1)
	go func() {
		_, err := a.ask(ctx, ask{Network: "a", Name: "web"}, func() { done <- struct{}{} })
		ended <- err
	}()
	q := <-sent
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if len(done) > 0 {
		t.Error("the place is free before the reply")
	}
	ours, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if err := ours.SetReadDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	if err := a.deliver(received{reply: reply{Number: q.Number}, file: theirs}); err != nil {
		t.Error(err)
	}
	<-done
	if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the file is open: %v", err)
	}
	if err := a.deliver(received{reply: reply{Number: q.Number}}); err == nil {
		t.Error("a second reply is accepted")
	}
	if len(a.open) > 0 {
		t.Errorf("left: %v", a.open)
	}
}

// listen serves a port of a sandbox with an echo.
func (s sandbox) listen(t *testing.T, address string) {
	t.Helper()
	var l net.Listener
	err := osthread.Run(func() (err error) {
		if err := unix.Setns(int(s.NS.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		l, err = net.Listen("tcp", address)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	serveEcho(t, l)
}

// ends connects from within and returns how the connection ends; a reset may come before connect
// has returned.
func (s sandbox) ends(t *testing.T, address string) error {
	t.Helper()
	return osthread.Run(func() error {
		if err := unix.Setns(int(s.NS.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		c, err := net.Dial("tcp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
			return err
		}
		_, err = io.ReadAll(c)
		return err
	})
}

// The confined gateway connects two namespaces over the daemon, many at once, and again after it
// was killed. Servers on a sandbox's loopback are not reached.
func TestPathToAPeer(t *testing.T) {
	if !inWorld(t) {
		return
	}
	front, back := newSandbox(t), newSandbox(t)
	g, s, e := startGatewayFor(t, Peers{
		Find: func(network string, name policy.Name) (gateway.Peer, error) {
			if network != "front" || name.String() != "web" {
				return gateway.Peer{}, gateway.ErrNoPeer
			}
			return web, nil
		},
		Dial: func(ctx context.Context, network string, to netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
			if network != "front" || to.Addr() != web.Addr {
				return nil, gateway.Peer{}, gateway.ErrNoPeer
			}
			socket, err := netns.Socket(back.NS, "tcp")
			if err != nil {
				return nil, web, err
			}
			defer socket.Close()
			c, err := netns.ConnectOwn(ctx, socket, to.Port())
			if err != nil {
				return nil, web, err
			}
			return c.(*net.TCPConn), web, nil
		},
	})
	for id, n := range map[string]Network{"front": {Sockets: front.sockets(), Networks: []string{"net"}}, "back": {Sockets: back.sockets(), Networks: []string{"net"}}} {
		n.ID, n.Policy = id, []byte(allowsNothing)
		if err := g.Add(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	back.listen(t, "0.0.0.0:8080")
	back.listen(t, "127.0.0.1:8081")
	for _, network := range []string{"udp", "tcp"} {
		code, answers := front.lookup(t, network, "WEB.net")
		if code != dnsmessage.RCodeNameError { // this daemon knows it by one form only
			t.Errorf("WEB.net over %s: %v, %v", network, code, answers)
		}
		if code, answers := front.lookup(t, network, "Web"); code != dnsmessage.RCodeSuccess || len(answers) != 1 {
			t.Errorf("Web over %s: %v, %v", network, code, answers)
		}
	}
	if code, _ := back.lookup(t, "udp", "web"); code != dnsmessage.RCodeNameError {
		t.Errorf("a name of another's peer: %v", code)
	}
	const size = 8 << 20
	c := front.dial(t, "tcp", "198.18.3.4:8080")
	go func() {
		_, _ = io.Copy(c, io.LimitReader(zeroReader{}, size))
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, c); n != size || err != nil {
		t.Errorf("%d bytes of %d came back: %v", n, size, err)
	}
	var all sync.WaitGroup
	for range 5 * maxAsks {
		c := front.dial(t, "tcp", "198.18.3.4:8080")
		all.Go(func() {
			defer c.Close()
			got := make([]byte, 5)
			if _, err := io.WriteString(c, "\x00peer"); err != nil {
				t.Error(err)
			} else if _, err := io.ReadFull(c, got); err != nil || string(got) != "\x00peer" {
				t.Errorf("%q came back: %v", got, err)
			}
		})
	}
	all.Wait()
	for name, to := range map[string]struct {
		from sandbox
		at   string
	}{
		"the peer's loopback": {front, "198.18.3.4:8081"}, "the peer's port 1": {front, "198.18.3.4:1"}, "the peer's port 2": {front, "198.18.3.4:2"},
		"another address": {front, "198.18.3.5:8080"}, "another's peer": {back, "198.18.3.4:8080"}, "another range": {front, "198.20.3.4:8080"},
	} {
		if err := to.from.ends(t, to.at); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", name, err)
		}
	}
	counts := make(map[string]int)
	for n := range 1 + 5*maxAsks + 6 {
		v := e.next(t)
		for v.Kind != gateway.Connection || v.Port == 53 {
			v = e.next(t)
		}
		if n == 0 && (v.Out != size || v.In != size || v.Name != "web") {
			t.Errorf("%+v", v)
		}
		counts[fmt.Sprintf("%t %s", v.Allow, v.Rule)]++
	}
	if want := 1 + 5*maxAsks + 3; counts["true network front"] != want || counts["false "] != 3 {
		t.Errorf("recorded %v, want %d over the network and 3 refusals", counts, want)
	}
	held := front.dial(t, "tcp", "198.18.3.4:8080")
	exchange(t, held, "\x00before")
	if err := g.ResetPeers(t.Context(), "front", []netip.Addr{web.Addr.Next()}); err != nil {
		t.Error(err)
	}
	exchange(t, held, "\x00another peer's")
	if err := g.ResetPeers(t.Context(), "front", []netip.Addr{web.Addr}); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadAll(held); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that was reset ends with %v", err)
	}
	held = front.dial(t, "tcp", "198.18.3.4:8080")
	exchange(t, held, "\x00again")
	s.kill()
	if _, err := io.ReadAll(held); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection of a killed gateway ends with %v", err)
	}
	exchange(t, front.dial(t, "tcp", "198.18.3.4:8080"), "\x00after")
	if err := g.Remove(t.Context(), "back"); err != nil {
		t.Error(err)
	}
	exchange(t, front.dial(t, "tcp", "198.18.3.4:8080"), "\x00still")
}

// A gateway gets the sockets of the ports that it asks for, if the daemon gives them.
func TestAsksForSockets(t *testing.T) {
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	asked := make(chan string, 10)
	dial := func(_ context.Context, network string, port uint16) (*net.UnixConn, error) {
		asked <- fmt.Sprint(network, " ", port)
		if port != 80 {
			return nil, errors.New("no such\nsocket")
		}
		return net.DialUnix("unix", nil, &net.UnixAddr{Name: l.Addr().String(), Net: "unix"})
	}
	replies := make(chan string, 10)
	g, s := performFor(t, Config{Events: func(gateway.Event) {}, DialSocket: dial}, func(p *player) {
		p.say(greeting)
		r, err := p.hear()
		if err != nil {
			return
		}
		p.got <- r
		p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
		a := newAsker(func(q *ask) error {
			packet, err := encode(q)
			p.ask(string(packet))
			return err
		})
		go func() {
			for {
				var r reply
				fds, err := replyPackets.Receive(p.asksRaw, 0, func(packet []byte) error { return decode(packet, &r) })
				if err != nil {
					return
				}
				files := unixmsg.Files(fds, "reply")
				if err := errors.Join(r.check(len(files)), a.deliver(received{r, first(files)})); err != nil {
					replies <- err.Error()
				}
			}
		}()
		connect := a.dialSocket("a")
		for _, port := range []uint16{80, 81} {
			c, err := connect(context.Background(), port)
			if err == nil {
				_, err = io.WriteString(c, "hello")
				err = errors.Join(err, c.Close())
			}
			replies <- fmt.Sprint(port, " ", err)
		}
		_, _ = p.hear() // until the daemon closes it
	})
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	s.next()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	for _, want := range []string{"80 <nil>", "81 no such\ufffdsocket"} {
		if got := <-replies; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, want := range []string{"a 80", "a 81"} {
		if got := <-asked; got != want {
			t.Errorf("asked %q, want %q", got, want)
		}
	}
}

func first(files []*os.File) *os.File {
	if len(files) == 0 {
		return nil
	}
	return files[0]
}
