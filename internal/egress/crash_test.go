package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

func init() { roles["faulty"] = faulty }

// faulty is a gateway that crashes when a certain name is looked up. It does so in a goroutine that
// was started for the lookup, as a library's may be.
func faulty([]string) error {
	askHost = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		if host == "crash.example.com." {
			go panic("as planned\ngoroutine 1 [running labels:{\"network\": \"good\"}]:\nmain.main()")
			select {}
		}
		return nil, errors.New("not this one")
	}
	Main([]string{Argument})
	return nil
}

// lookUp asks for the address of a name and does not wait for the answer.
func (b *box) lookUp(t *testing.T, name string) {
	t.Helper()
	q := dnsmessage.Message{Header: dnsmessage.Header{ID: 1, RecursionDesired: true}, Questions: []dnsmessage.Question{{
		Name: dnsmessage.MustNewName(name + "."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
	}}}
	msg, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("udp", b.dns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(msg); err != nil {
		t.Fatal(err)
	}
}

// A network that crashes the gateway again and again is served no more, and the others are. That it
// names another one in the value of a panic does not help.
func TestQuarantine(t *testing.T) {
	g, s, e := startGateway(t, "faulty")
	boxes := map[string]*box{"bad": newBox(t), "good": newBox(t)}
	add := func(id string) {
		t.Helper()
		doc := []byte(`{"version": 1, "rules": [{"name": "ours", "allow": ["example.com", "*.example.com"]}]}`)
		if err := g.Add(t.Context(), Network{ID: id, Policy: doc, Sockets: boxes[id].Sockets}); err != nil {
			t.Fatal(err)
		}
	}
	add("bad")
	add("good")
	for i := range maxCrashes {
		boxes["bad"].lookUp(t, "crash.example.com")
		told := make(map[string]string)
		for len(told) < 2 {
			if v := e.next(t); v.Kind == Restarted {
				told[v.Network] = v.Reason
			}
		}
		want := "this network has crashed it"
		if i == maxCrashes-1 {
			want = "this network has crashed it 3 times: all connections are refused until the sandbox is started again"
		}
		if told["bad"] != want || told["good"] != "it has ended" {
			t.Errorf("crash %d: the records have %q", i+1, told)
		}
		if code := boxes["good"].resolve(t, "example.com"); code != dnsmessage.RCodeSuccess {
			t.Errorf("the other network after crash %d: %v", i+1, code)
		}
	}
	boxes["bad"].lookUp(t, "crash.example.com")
	boxes["bad"].refused(t)
	if code := boxes["bad"].resolve(t, "example.com"); code != dnsmessage.RCodeServerFailure {
		t.Errorf("a network in quarantine: %v", code)
	}
	if code := boxes["good"].resolve(t, "example.com"); code != dnsmessage.RCodeSuccess || s.starts() != 1+maxCrashes {
		t.Errorf("the other network: %v, after %d starts", code, s.starts())
	}
	add("good") // which waits until all networks are restored
	if c := g.Check(); !c.OK || !strings.Contains(c.Found, "refuses all connections of 1 sandboxes") {
		t.Errorf("%+v", c)
	}
	// A change of its policy does not help; a new start does.
	if err := g.SetPolicy(t.Context(), "bad", []byte(allowsExample)); err != nil {
		t.Fatal(err)
	}
	if code := boxes["bad"].resolve(t, "example.com"); code != dnsmessage.RCodeServerFailure {
		t.Errorf("a network in quarantine with another policy: %v", code)
	}
	if err := g.Remove(t.Context(), "bad"); err != nil {
		t.Fatal(err)
	}
	add("bad")
	if code := boxes["bad"].resolve(t, "www.example.com"); code != dnsmessage.RCodeSuccess {
		t.Errorf("after a new start: %v", code)
	}
}

// reportOf returns the end of a pipe that has a report.
func reportOf(t *testing.T, report string) int {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(p[1], []byte(report)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(p[1]); err != nil {
		t.Fatal(err)
	}
	return p[0]
}

// Crashes that are far apart do not add up to a quarantine. The end of a process that was killed is
// blamed on no network.
func TestBlame(t *testing.T) {
	now := time.Unix(1e9, 0)
	g := &Gateway{cfg: Config{Log: slog.New(slog.DiscardHandler)}, networks: map[string]*network{"a": {id: "a"}, "b": {id: "b"}}}
	crash := func(report string) *conn {
		c := &conn{report: -1}
		if report != "" {
			c.report = reportOf(t, report)
		}
		return c
	}
	const of = "panic: x\n\ngoroutine 7 [running labels:{\"network\": %q}]:\nmain.f()\n\ngoroutine 8 [running labels:{\"network\": \"b\"}]:\n"
	for i := range 10 {
		if id, _ := g.blame(crash(fmt.Sprintf(of, "a")), now); id != "a" {
			t.Errorf("crash %d is blamed on %q", i, id)
		}
		now = now.Add(crashWindow)
	}
	for _, report := range []string{
		"", "panic: x", fmt.Sprintf(of, "c"), "panic: x\n\ngoroutine 1 [running]:\ngoroutine 7 [running labels:{\"network\": \"a\"}]:\n",
		"runtime: failed to create new OS thread (have 9 already; errno=11)\nfatal error: newosproc\n\ngoroutine 7 [running labels:{\"network\": \"a\"}]:\n", "goroutine 1 [running labels:{\"network\": \"a", strings.Repeat("x", 1<<16),
	} {
		if id, told := g.blame(crash(report), now); id != "" || told != "" {
			t.Errorf("%q is blamed on %q", report, id)
		}
	}
	if n := g.networks["a"]; n.quarantined || n.crashes != 1 {
		t.Errorf("%+v", n)
	}
	for range maxCrashes - 1 {
		g.blame(crash(fmt.Sprintf(of, "a")), now)
	}
	if n := g.networks["a"]; n.quarantined {
		t.Errorf("the window is over: %+v", n)
	}
	g.blame(crash(fmt.Sprintf(of, "a")), now)
	if n := g.networks["a"]; !n.quarantined || g.networks["b"].crashes != 0 {
		t.Errorf("%+v", n)
	}
}

func FuzzCrashed(f *testing.F) {
	f.Add("a", "x")
	f.Add("b\"\\\n", "x\n\ngoroutine 7 [running labels:{\"network\": \"a\"}]:\nmain.f()\n")
	f.Add("", "goroutine 1 [running]:")
	f.Add("\xff", "\ngoroutine 7 [running labels:{\"network\": \"")
	f.Fuzz(func(t *testing.T, id, value string) {
		// As the runtime writes it: the further lines of a value have a tab in front.
		report := "panic: " + strings.ReplaceAll(value, "\n", "\n\t") + "\n\ngoroutine 7 [running labels:{\"network\": " + strconv.Quote(id) + "}]:\nmain.f()\n"
		if got := crashed(report); got != id {
			t.Errorf("%q is blamed for %q", got, report)
		}
		_ = crashed(value) // does not panic
		cut := report[:len(report)*2/3]
		if got := crashed(cut); got != "" && got != id {
			t.Errorf("%q is blamed for %q", got, cut)
		}
	})
}

// What was used of a budget counts in the next process too, and with the next daemon.
func TestBudgetOutlivesTheProcess(t *testing.T) {
	g, s, e := startGateway(t)
	b := newBox(t)
	if err := g.Add(t.Context(), Network{ID: "box", Policy: []byte(allowsNothing), Budget: gateway.Budget{Queries: 3}, Sockets: b.Sockets}); err != nil {
		t.Fatal(err)
	}
	var got []string
	var used gateway.Spent
	ask := func() {
		b.resolve(t, "example.com")
		v := e.next(t)
		for v.Kind == Restarted {
			v = e.next(t)
		}
		if v.Spent != nil {
			used = *v.Spent
		}
		got = append(got, v.Reason)
	}
	for range 2 {
		ask()
		ask()
		s.kill()
	}
	const refused, over = "no rule allows example.com", "the budget of 3 DNS queries is used up"
	if want := []string{refused, refused, refused, over}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if err := g.Remove(t.Context(), "box"); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(t.Context(), Network{ID: "box", Policy: []byte(allowsNothing), Budget: gateway.Budget{Queries: 3}, Sockets: b.Sockets, Spent: used}); err != nil {
		t.Fatal(err)
	}
	if ask(); got[len(got)-1] != over {
		t.Errorf("with what was used before: %q", got)
	}
}

// The check for doctor tells a bound that is lower than the number of sandboxes.
func TestCheckTellsTheBound(t *testing.T) {
	for networks, told := range map[int]bool{enough - 1: true, enough: false} {
		g, _ := perform(t, func(gateway.Event) {}, func(p *player) {
			p.say(fmt.Sprintf(`{"hello":{"landlock":1,"networks":%d}}`, networks))
			_, _ = p.hear() // until the end
		})
		if c := g.Check(); !c.OK || strings.Contains(c.Found, "LimitNOFILE") != told {
			t.Errorf("%d networks: %+v", networks, c)
		}
	}
}
