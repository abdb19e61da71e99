package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// twoRules has a rule with a budget and one without.
func twoRules(budget string) string {
	return "version: 1\nrules:\n- {name: small, allow: 10.1.0.7, ports: any, budget: {" + budget + "}}\n- {name: free, allow: 10.1.0.8, ports: any}\n"
}

// other checks that the rule without a budget goes on.
func other(t *testing.T, w *world) {
	t.Helper()
	w.raw("10.1.0.8:9000", echoServer)
	say(t, w.dial("10.1.0.8:9000"), "still open")
}

func TestBudgetOfARule(t *testing.T) {
	for name, tc := range map[string]struct {
		budget, reason string
		use            func(w *world) // to the end
	}{
		"bytes out": {"bytes_out: 10", "the rule's budget of 10 bytes out is used up", func(w *world) {
			c := w.dial("10.1.0.7:9000")
			say(t, c, "0123456789")
			_, _ = io.WriteString(c, "x")
			if b, reset := wasReset(c); len(b) > 0 || !reset {
				t.Errorf("%q, reset %v", b, reset)
			}
		}},
		"bytes in": {"bytes_in: 4", "the rule's budget of 4 bytes in is used up", func(w *world) {
			c := w.dial("10.1.0.7:9000")
			say(t, c, "0123")
			_, _ = io.WriteString(c, "x")
			if b, reset := wasReset(c); len(b) > 0 || !reset {
				t.Errorf("%q, reset %v", b, reset)
			}
		}},
		"connections": {"connections: 2", "the rule's budget of 2 connections is used up", func(w *world) {
			for range 2 {
				say(t, w.dial("10.1.0.7:9000"), "x")
			}
			if _, reset := w.reset("10.1.0.7:9000"); !reset {
				t.Error("a third connection")
			}
		}},
		"rate": {"connection_rate: 1", "more than 1 connections per second", func(w *world) {
			for range 2 {
				say(t, w.dial("10.1.0.7:9000"), "x")
			}
			if _, reset := w.reset("10.1.0.7:9000"); !reset {
				t.Error("a third connection in the burst")
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, twoRules(tc.budget))
			w.raw("10.1.0.7:9000", echoServer)
			tc.use(w)
			e := w.event()
			for e.Allow { // connections before
				e = w.event()
			}
			if e.Rule != "small" || e.Reason != tc.reason {
				t.Errorf("%+v", e)
			}
			// Where HTTP is spoken, the reason and the rule are told.
			c := w.dial("10.1.0.7:80")
			p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("10.1.0.7", "/"))
			if p.StatusCode != 403 || !strings.Contains(body, tc.reason+"\nrule: small\n") {
				t.Errorf("HTTP: %d %s", p.StatusCode, body)
			}
			other(t, w)
			if name == "rate" {
				w.clock.advance(time.Second)
				say(t, w.dial("10.1.0.7:9000"), "x")
			}
		})
	}
}

// Names below a suffix are counted, and those that are known go on.
func TestBudgetOfHostsOfARule(t *testing.T) {
	w := newWorld(t, `{version: 1, rules: [{name: few, allow: "*.cdn.test", ports: 80, budget: {hosts: 2}}, {allow: web.test, ports: 80}]}`)
	for i, host := range []string{"a.cdn.test", "b.cdn.test", "c.cdn.test", "web.test"} {
		w.host(host, fmt.Sprintf("93.184.215.1%d", i))
		w.http(fmt.Sprintf("93.184.215.1%d:80", i), echo)
		w.resolve(host, dnsmessage.TypeA)
	}
	for _, tc := range []struct {
		i, status int
		host      string
	}{{0, 200, "a.cdn.test"}, {1, 200, "b.cdn.test"}, {2, 403, "c.cdn.test"}, {0, 200, "a.cdn.test"}, {3, 200, "web.test"}} {
		c := w.dial(fmt.Sprintf("93.184.215.1%d:80", tc.i))
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom(tc.host, "/")); p.StatusCode != tc.status {
			t.Errorf("%s: %d %s", tc.host, p.StatusCode, body)
		}
	}
}

// A request counts in the rules that cover it, and a part of a connection that no rule covers in
// none.
func TestBudgetOfRequests(t *testing.T) {
	w := newWorld(t, `{version: 1, rules: [
	{name: posts, allow: web.test, ports: 80, inspect: true, methods: [POST], budget: {bytes_out: 400, connections: 1}},
	{name: reads, allow: web.test, ports: 80, inspect: true, methods: [GET]}]}`)
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", echo)
	w.resolve("web.test", dnsmessage.TypeA)
	post := func(size int) string {
		return fmt.Sprintf("POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: %d\r\n\r\n%s", size, strings.Repeat("x", size))
	}
	c := w.dial("93.184.215.14:80")
	r := bufio.NewReader(c)
	for range 10 {
		if p, body := get(t, c, r, "GET", getFrom("web.test", "/"+strings.Repeat("x", 100))); p.StatusCode != 200 {
			t.Fatalf("GET: %d %s", p.StatusCode, body)
		}
	}
	for range 2 { // on one connection
		if p, body := get(t, c, r, "POST", post(100)); p.StatusCode != 200 {
			t.Fatalf("POST: %d %s", p.StatusCode, body)
		}
	}
	// The third would not fit, and is refused as a whole.
	p, body := get(t, c, r, "POST", post(300))
	if p.StatusCode != 403 || !strings.Contains(body, "the rule's budget of 400 bytes out is used up\nrule: posts\n") {
		t.Errorf("%d %s", p.StatusCode, body)
	}
	c = w.dial("93.184.215.14:80")
	if p, body := get(t, c, bufio.NewReader(c), "POST", post(1)); p.StatusCode != 403 || !strings.Contains(body, "1 connections is used up") {
		t.Errorf("POST on another connection: %d %s", p.StatusCode, body)
	}
	c = w.dial("93.184.215.14:80")
	if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("web.test", "/")); p.StatusCode != 200 {
		t.Errorf("GET on another connection: %d %s", p.StatusCode, body)
	}
}

// A response that does not fit is answered with the reason if none of it has passed.
func TestResponseBeyondTheBudgetOfARule(t *testing.T) {
	w := newWorld(t, twoRules("bytes_in: 60"))
	w.http("10.1.0.7:80", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, strings.Repeat("x", 5000)) })
	c := w.dial("10.1.0.7:80")
	if _, err := io.WriteString(c, getFrom("10.1.0.7", "/")); err != nil {
		t.Fatal(err)
	}
	if b, _ := wasReset(c); len(b) > 60 {
		t.Errorf("%d bytes", len(b))
	}
	c = w.dial("10.1.0.7:80")
	if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("10.1.0.7", "/")); p.StatusCode != 403 || !strings.Contains(body, "rule: small") {
		t.Errorf("%d %s", p.StatusCode, body)
	}
	other(t, w)
}

// A connection counts where its host does, not where another name of its address does.
func TestSharedAddressesCountByName(t *testing.T) {
	w := newWorld(t, `{version: 1, rules: [
	{name: small, allow: a.test, ports: 80, budget: {connections: 1}}, {name: free, allow: b.test, ports: 80}, {allow: 93.184.215.0/24, ports: 80}]}`)
	w.http("93.184.215.14:80", echo)
	for _, host := range []string{"a.test", "b.test"} {
		w.host(host, "93.184.215.14")
		w.resolve(host, dnsmessage.TypeA)
	}
	for _, tc := range []struct {
		host   string
		status int
	}{{"b.test", 200}, {"a.test", 200}, {"a.test", 403}, {"b.test", 200}, {"a.test", 403}} {
		c := w.dial("93.184.215.14:80")
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom(tc.host, "/")); p.StatusCode != tc.status {
			t.Errorf("%s: %d %s", tc.host, p.StatusCode, body)
		}
	}
}

// A server that speaks first uses the budget too.
func TestServerThatBeginsUsesTheBudget(t *testing.T) {
	w := newWorld(t, `{version: 1, rules: [{name: small, allow: a.test, ports: any, budget: {bytes_in: 100}}, {allow: b.test, ports: any}]}`)
	for _, host := range []string{"b.test", "a.test"} {
		w.host(host, "93.184.215.14")
	}
	w.resolve("a.test", dnsmessage.TypeA)
	w.resolve("b.test", dnsmessage.TypeA)
	w.raw("93.184.215.14:9000", func(c *net.TCPConn) {
		fmt.Fprint(c, strings.Repeat("x", 5000))
		_, _ = io.Copy(io.Discard, c)
	})
	if b, reset := w.reset("93.184.215.14:9000"); len(b) > 100 || !reset {
		t.Errorf("%d bytes, reset %v", len(b), reset)
	}
	e := w.event()
	for e.Kind == Query {
		e = w.event()
	}
	if e.Rule != "small" || e.Reason != "the rule's budget of 100 bytes in is used up" {
		t.Errorf("%+v", e)
	}
}

// A new policy changes bounds, and keeps the use of rules by their names, for connections too that
// are open.
func TestBudgetsOfRulesAfterAChange(t *testing.T) {
	w := newWorld(t, twoRules("bytes_out: 10"))
	change := func(doc string) {
		t.Helper()
		p, err := policy.Parse([]byte(doc))
		if err != nil {
			t.Fatal(err)
		}
		w.n.SetPolicy(p)
	}
	w.raw("10.1.0.7:9000", echoServer)
	w.raw("10.1.0.8:9000", echoServer)
	c, d := w.dial("10.1.0.7:9000"), w.dial("10.1.0.8:9000")
	say(t, c, "01234567")
	say(t, d, "x")
	change(strings.Replace(twoRules("bytes_out: 15"), "ports: any}", "ports: any, budget: {bytes_out: 3}}", 1)) // free has one now
	say(t, c, "0123456")
	_, _ = io.WriteString(c, "x")
	if _, reset := wasReset(c); !reset {
		t.Error("16 bytes of 15")
	}
	say(t, d, "123")
	_, _ = io.WriteString(d, "x")
	if _, reset := wasReset(d); !reset {
		t.Error("4 bytes of 3 on a connection that was open before")
	}
	change(twoRules("bytes_out: 15"))
	if _, reset := w.reset("10.1.0.7:9000"); !reset {
		t.Error("the use of a rule was forgotten")
	}
	say(t, w.dial("10.1.0.8:9000"), "0123456789") // the rule has none any more
	change(lan)
	change(twoRules("bytes_out: 15"))
	say(t, w.dial("10.1.0.7:9000"), "0123456789") // the rule was gone meanwhile
}

// What rules have used goes from one process to the next, and each event tells what has changed.
func TestBudgetsOfRulesGoOn(t *testing.T) {
	doc := "version: 1\nrules:\n"
	for i := range 6 {
		doc += fmt.Sprintf("- {name: r%d, allow: 10.1.0.%d, ports: any, budget: {bytes_out: 10, hosts: 2}}\n", i, i)
	}
	var spent []RuleSpent
	for life := range 2 {
		w := newWorld(t, doc, func(o *Options, _ *limits) { o.Spent.Rules = spent })
		for i := range 6 {
			w.raw(fmt.Sprintf("10.1.0.%d:9000", i), echoServer)
		}
		told := map[string]RuleSpent{}
		for i := range 6 {
			c := w.dial(fmt.Sprintf("10.1.0.%d:9000", i))
			say(t, c, "012")
			_ = c.Close()
			e := w.event()
			if e.Spent == nil || len(e.Spent.Rules) != 1 {
				t.Fatalf("life %d: %+v", life, e.Spent)
			}
			told[e.Spent.Rules[0].Rule] = e.Spent.Rules[0]
		}
		var known []string
		if life == 0 {
			known = []string{"10.1.0.3"}
		}
		want := RuleSpent{Rule: "r3", BytesOut: int64(3 * (life + 1)), BytesIn: int64(3 * (life + 1)), Connections: int64(life + 1), Hosts: 1, Known: known}
		if !reflect.DeepEqual(told["r3"], want) {
			t.Errorf("life %d: %+v, want %+v", life, told["r3"], want)
		}
		for i := range 6 {
			spent = append(spent, told[fmt.Sprintf("r%d", i)])
		}
		if life == 0 {
			continue
		}
		c := w.dial("10.1.0.3:9000")
		say(t, c, "0123")
		_, _ = io.WriteString(c, "x")
		if _, reset := wasReset(c); !reset {
			t.Error("11 bytes of 10 in two lives")
		}
	}
}

// Reports go around, and one that was lost is repeated.
func TestReportsOfRules(t *testing.T) {
	doc := "version: 1\nrules:\n"
	for i := range 10 {
		doc += fmt.Sprintf("- {name: r%d, allow: 10.1.0.%d, budget: {hosts: 2}}\n", i, i)
	}
	w := newWorld(t, doc)
	r := w.n.rules.Load()
	for _, name := range r.names {
		r.ledgers[name].host(policy.Name{}, ownAddr)
	}
	names := func(all []RuleSpent) (s string) {
		for _, one := range all {
			s += one.Rule + strings.Join(one.Known, ",") + " "
		}
		return s
	}
	const own = "93.184.215.1 "
	first := r.report()
	if got := names(first); got != "r0"+own+"r1"+own+"r2"+own+"r3"+own {
		t.Error(got)
	}
	r.untell(first[1:2])
	if got := names(r.report()); got != "r4"+own+"r5"+own+"r6"+own+"r7"+own {
		t.Error(got)
	}
	if got := names(r.report()); got != "r8"+own+"r9"+own+"r1"+own {
		t.Error(got)
	}
	if got := names(r.report()); got != "" {
		t.Error(got)
	}
}

// Requests within TLS count in the rules that cover them, each for itself.
func TestBudgetOfInspectedRequests(t *testing.T) {
	for name, version := range protocols {
		t.Run(name, func(t *testing.T) {
			w := newInspected(t, func(o *Options, _ *limits) {
				p, err := policy.Parse([]byte(`{version: 1, rules: [
				{name: uploads, allow: api.test, ports: 443, inspect: true, methods: [PUT], budget: {bytes_out: 20000, connections: 1}},
				{name: large, allow: api.test, ports: 443, inspect: true, methods: [GET], paths: /large, budget: {bytes_in: 20000}},
				{name: reads, allow: api.test, ports: 443, inspect: true, methods: [GET], paths: /small}]}`))
				if err != nil {
					t.Fatal(err)
				}
				o.Policy = p
			})
			w.secure("93.184.215.21:443", "api.test", func(rw http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if r.URL.Path == "/large" {
					_, _ = io.WriteString(rw, strings.Repeat("x", 12000))
				}
			}, version...)
			c := w.trusting(version...)
			put := func(size int) (int, string) {
				p, body := fetch(t, c, "PUT", "https://api.test/up", strings.NewReader(strings.Repeat("x", size)))
				return p.StatusCode, body
			}
			get := func(path string) (int, string, error) {
				p, err := c.Get("https://api.test" + path)
				if err != nil {
					return 0, "", err
				}
				defer p.Body.Close()
				body, err := io.ReadAll(p.Body)
				return p.StatusCode, string(body), err
			}
			if status, body := put(12000); status != 200 {
				t.Fatalf("%d %s", status, body)
			}
			if status, body := put(12000); status != 403 || !strings.Contains(body, "20000 bytes out is used up\nrule: uploads\n") {
				t.Errorf("an upload beyond the budget: %d %s", status, body)
			}
			for range 10 {
				if status, body, err := get("/small"); status != 200 || err != nil {
					t.Fatalf("%d %s %v", status, body, err)
				}
			}
			if status, body, err := get("/large"); status != 200 || len(body) != 12000 || err != nil {
				t.Fatalf("%d, %d bytes, %v", status, len(body), err)
			}
			if _, body, err := get("/large"); err == nil || len(body) >= 12000 {
				t.Errorf("a response beyond the budget: %d bytes, %v", len(body), err)
			}
			if status, body, err := get("/large"); status != 403 || !strings.Contains(body, "20000 bytes in is used up\nrule: large\n") {
				t.Errorf("after it: %d %s %v", status, body, err)
			}
			if status, body, err := get("/small"); status != 200 || err != nil {
				t.Errorf("another rule: %d %s %v", status, body, err)
			}
			c.CloseIdleConnections()
			if status, body := put(1); status != 403 {
				t.Errorf("on another connection: %d %s", status, body)
			}
			refused := map[string]int{}
			events := w.all()
			for _, e := range events {
				if !e.Allow {
					refused[e.Rule]++
				}
			}
			if refused["uploads"] < 2 || refused["large"] < 2 || len(refused) != 2 {
				t.Errorf("refusals recorded by rule: %v, of %+v", refused, events)
			}
		})
	}
}

// A body whose length is not told is cut off within the budget.
func TestUploadOfUnknownLength(t *testing.T) {
	for name, version := range protocols {
		t.Run(name, func(t *testing.T) {
			w := newInspected(t, func(o *Options, _ *limits) {
				p, err := policy.Parse([]byte(`{version: 1, rules: [{name: uploads, allow: api.test, ports: 443, inspect: true, budget: {bytes_out: 20000}}]}`))
				if err != nil {
					t.Fatal(err)
				}
				o.Policy = p
			})
			passed := make(chan int64, 1)
			w.secure("93.184.215.21:443", "api.test", func(_ http.ResponseWriter, r *http.Request) {
				n, _ := io.Copy(io.Discard, r.Body)
				passed <- n
			}, version...)
			p, err := w.trusting(version...).Post("https://api.test/up", "text/plain", io.MultiReader(strings.NewReader(strings.Repeat("x", 500000))))
			if err == nil {
				_ = p.Body.Close()
				if p.StatusCode != 403 {
					t.Errorf("status %d", p.StatusCode)
				}
			}
			if n := <-passed; n > 20000 {
				t.Errorf("%d bytes passed", n)
			}
			e := w.event()
			for e.Allow {
				e = w.event()
			}
			if e.Rule != "uploads" || e.Out > 20000 {
				t.Errorf("%+v", e)
			}
		})
	}
}
