package gateway

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// Budget bounds all that a network does in its life. Zero means unbounded, in each field.
type Budget struct {
	// BytesOut and BytesIn are bytes of connections from and to the sandbox. A connection that would
	// exceed them is reset before the bytes are passed on.
	BytesOut, BytesIn int64
	// Connections is the number of TCP connections, without those of DNS.
	Connections int64
	// Hosts is the number of different names, and of addresses without a name, that are connected to.
	Hosts int64
	// Queries is the number of DNS questions.
	Queries int64
	// NameBytes is the total length of the names that the host's resolver is asked. It bounds a tunnel
	// through names below an allowed suffix, which a guess by entropy would not.
	NameBytes int64
	// ConnectionRate and QueryRate are per second. A burst of two seconds' worth is allowed.
	ConnectionRate, QueryRate float64
}

// Spent is the used part of a [Budget]. It goes from a process that has ended to the next.
type Spent struct {
	BytesOut    int64 `json:",omitempty"`
	BytesIn     int64 `json:",omitempty"`
	Connections int64 `json:",omitempty"`
	Queries     int64 `json:",omitempty"`
	NameBytes   int64 `json:",omitempty"`
	// Hosts is the number of different hosts.
	Hosts int64 `json:",omitempty"`
	// Known are some of the hosts, names and addresses: they are not counted again. Those of an event
	// are of the hosts that were counted since the event before, MaxFresh at most.
	Known []string `json:",omitempty"`
	// Rules are the budgets of rules; in an event, MaxRuleSpent of those that have changed at most.
	Rules []RuleSpent `json:",omitempty"`
}

const (
	// MaxKnown bounds the hosts that go from one process to the next.
	MaxKnown = 64
	// MaxFresh bounds the hosts in one report of an event.
	MaxFresh = 4
)

// A ledger holds the used part of a budget.
type ledger struct {
	rule             string // whose budget it is; empty for that of the network
	budget           atomic.Pointer[Budget]
	now              func() time.Time
	connections      *rate.Limiter
	queries          *rate.Limiter
	out, in          atomic.Int64
	connected, asked atomic.Int64
	nameBytes        atomic.Int64

	mu    sync.Mutex // guards those below
	hosts map[host]struct{}
	more  int64    // hosts of an earlier process that are not known
	fresh []string // hosts that no event has told yet
	kept  int      // hosts that were told, or will be
	told  Spent    // by the last event about the rule
}

// A host is a name, or an address without one.
type host struct {
	name policy.Name
	addr netip.Addr
}

func newLedger(b Budget, s Spent, now func() time.Time) *ledger {
	s = s.bounded()
	l := &ledger{now: now, connections: limiter(b.ConnectionRate), queries: limiter(b.QueryRate), hosts: make(map[host]struct{})}
	l.budget.Store(&b)
	l.out.Store(s.BytesOut)
	l.in.Store(s.BytesIn)
	l.connected.Store(s.Connections)
	l.asked.Store(s.Queries)
	l.nameBytes.Store(s.NameBytes)
	for _, k := range s.Known {
		if addr, err := netip.ParseAddr(k); err == nil {
			l.hosts[host{addr: addr}] = struct{}{}
		} else if name, err := policy.ParseName(k); err == nil {
			l.hosts[host{name: name}] = struct{}{}
		}
	}
	l.more = max(0, s.Hosts-int64(len(l.hosts)))
	l.kept = len(l.hosts)
	l.told = l.used()
	return l
}

// bound replaces the budget of a rule, whose used part stays.
func (l *ledger) bound(b Budget) {
	of := limiter(b.ConnectionRate)
	l.connections.SetLimitAt(l.now(), of.Limit())
	l.connections.SetBurstAt(l.now(), of.Burst())
	l.budget.Store(&b)
}

// spent returns the used part of the budget for an event; nil if there is no budget for the whole
// life.
func (l *ledger) spent() *Spent {
	b := l.budget.Load()
	if b.BytesOut|b.BytesIn|b.Connections|b.Hosts|b.Queries|b.NameBytes == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.used()
	s.Known = l.takeFresh()
	return &s
}

// used returns the used part of the budget without hosts. It needs mu.
func (l *ledger) used() Spent {
	return Spent{
		BytesOut: l.out.Load(), BytesIn: l.in.Load(), Connections: l.connected.Load(), Queries: l.asked.Load(), NameBytes: l.nameBytes.Load(),
		Hosts: l.more + int64(len(l.hosts)),
	}.bounded()
}

// takeFresh returns hosts that no event has told yet. It needs mu.
func (l *ledger) takeFresh() []string {
	n := min(MaxFresh, len(l.fresh))
	taken := slices.Clone(l.fresh[:n])
	l.fresh = slices.Delete(l.fresh, 0, n)
	if n == 0 {
		return nil
	}
	return taken
}

// tell returns the used part of a rule's budget, and whether it has changed since the last call.
func (l *ledger) tell() (RuleSpent, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.used()
	changed := len(l.fresh) > 0 || s.BytesOut != l.told.BytesOut || s.BytesIn != l.told.BytesIn || s.Connections != l.told.Connections || s.Hosts != l.told.Hosts
	if !changed {
		return RuleSpent{}, false
	}
	l.told = s
	return RuleSpent{Rule: l.rule, BytesOut: s.BytesOut, BytesIn: s.BytesIn, Connections: s.Connections, Hosts: s.Hosts, Known: l.takeFresh()}, true
}

// untell makes a later event repeat what one that was lost had told.
func (l *ledger) untell(hosts []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told.BytesOut = -1
	l.fresh = append(hosts, l.fresh...)
}

func limiter(perSecond float64) *rate.Limiter {
	if perSecond <= 0 {
		return rate.NewLimiter(rate.Inf, 0)
	}
	return rate.NewLimiter(rate.Limit(perSecond), max(1, int(2*perSecond)))
}

// MaxSpent bounds each value of a [Spent]. What a process uses beyond it is far from an overflow.
const MaxSpent = 1 << 53

// bounded returns values from 0 to MaxSpent.
func (s Spent) bounded() Spent {
	for _, v := range []*int64{&s.BytesOut, &s.BytesIn, &s.Connections, &s.Queries, &s.NameBytes, &s.Hosts} {
		*v = min(max(0, *v), MaxSpent)
	}
	return s
}

// take adds n to a use unless that exceeds its budget. It returns the reason to refuse, or "".
func (l *ledger) take(used *atomic.Int64, n, budget int64, what string) string {
	if total := used.Add(n); budget > 0 && total > budget {
		used.Add(-n)
		return l.over(budget, what)
	}
	return ""
}

// over returns the reason to refuse what exceeds a budget.
func (l *ledger) over(budget int64, what string) string {
	if l.rule != "" {
		return policy.UsedUp(budget, what)
	}
	return fmt.Sprintf("the budget of %d %s is used up", budget, what)
}

// takeBytes takes bytes. Those that exceed the budget of a rule use it up: the connection is cut,
// and what follows is refused at its begin rather than cut too.
func (l *ledger) takeBytes(used *atomic.Int64, n int, budget int64, what string) string {
	reason := l.take(used, int64(n), budget, what)
	if reason != "" && l.rule != "" {
		used.Store(budget)
	}
	return reason
}

// usedUp reports that no byte is left of a budget, or not as many as are known to go out.
func (l *ledger) usedUp(out int64) string {
	b := l.budget.Load()
	switch used := l.out.Load(); {
	case b.BytesOut > 0 && used >= b.BytesOut, b.BytesOut > 0 && out > b.BytesOut-used:
		return l.over(b.BytesOut, "bytes out")
	case b.BytesIn > 0 && l.in.Load() >= b.BytesIn:
		return l.over(b.BytesIn, "bytes in")
	}
	return ""
}

func (l *ledger) connection() string {
	b := l.budget.Load()
	if !l.connections.AllowN(l.now(), 1) {
		return fmt.Sprintf("more than %g connections per second", b.ConnectionRate)
	}
	return l.take(&l.connected, 1, b.Connections, "connections")
}

func (l *ledger) query() string {
	if !l.queries.AllowN(l.now(), 1) {
		return fmt.Sprintf("more than %g DNS queries per second", l.budget.Load().QueryRate)
	}
	return l.take(&l.asked, 1, l.budget.Load().Queries, "DNS queries")
}

func (l *ledger) lookup(n policy.Name) string {
	return l.take(&l.nameBytes, int64(len(n.String())), l.budget.Load().NameBytes, "bytes in names")
}

func (l *ledger) sent(n int) string {
	return l.takeBytes(&l.out, n, l.budget.Load().BytesOut, "bytes out")
}

func (l *ledger) received(n int) string {
	return l.takeBytes(&l.in, n, l.budget.Load().BytesIn, "bytes in")
}

// host counts a name, or an address if the name is absent. Without a budget it keeps none.
func (l *ledger) host(n policy.Name, addr netip.Addr) string {
	budget := l.budget.Load().Hosts
	if budget <= 0 {
		return ""
	}
	h, text := host{name: n}, n.String()
	if n.IsZero() {
		h.addr, text = addr, addr.String()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.hosts[h]; !known {
		if l.more+int64(len(l.hosts)) >= budget {
			return l.over(budget, "hosts")
		}
		l.hosts[h] = struct{}{}
		if l.kept < MaxKnown {
			l.kept++
			l.fresh = append(l.fresh, text)
		}
	}
	return ""
}
