package gateway

import (
	"fmt"
	"net/netip"
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
	// Known are some of the hosts, names and addresses: they are not counted again. Events have none.
	Known []string `json:",omitempty"`
}

// A ledger holds the used part of a budget.
type ledger struct {
	budget           Budget
	now              func() time.Time
	connections      *rate.Limiter
	queries          *rate.Limiter
	out, in          atomic.Int64
	connected, asked atomic.Int64
	nameBytes        atomic.Int64
	mu               sync.Mutex // guards hosts
	hosts            map[host]struct{}
	more             int64 // hosts of an earlier process that are not known
}

// A host is a name, or an address without one.
type host struct {
	name policy.Name
	addr netip.Addr
}

func newLedger(b Budget, s Spent, now func() time.Time) *ledger {
	s = s.bounded()
	l := &ledger{budget: b, now: now, connections: limiter(b.ConnectionRate), queries: limiter(b.QueryRate), hosts: make(map[host]struct{})}
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
	return l
}

// spent returns what was used until now; nil if there is no budget for the whole life.
func (l *ledger) spent() *Spent {
	b := l.budget
	if b.BytesOut|b.BytesIn|b.Connections|b.Hosts|b.Queries|b.NameBytes == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Spent{
		BytesOut: l.out.Load(), BytesIn: l.in.Load(), Connections: l.connected.Load(), Queries: l.asked.Load(), NameBytes: l.nameBytes.Load(),
		Hosts: l.more + int64(len(l.hosts)),
	}.bounded()
	return &s
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
func take(used *atomic.Int64, n, budget int64, what string) string {
	if total := used.Add(n); budget > 0 && total > budget {
		used.Add(-n)
		return fmt.Sprintf("the budget of %d %s is used up", budget, what)
	}
	return ""
}

func (l *ledger) connection() string {
	if !l.connections.AllowN(l.now(), 1) {
		return fmt.Sprintf("more than %g connections per second", l.budget.ConnectionRate)
	}
	return take(&l.connected, 1, l.budget.Connections, "connections")
}

func (l *ledger) query() string {
	if !l.queries.AllowN(l.now(), 1) {
		return fmt.Sprintf("more than %g DNS queries per second", l.budget.QueryRate)
	}
	return take(&l.asked, 1, l.budget.Queries, "DNS queries")
}

func (l *ledger) lookup(n policy.Name) string {
	return take(&l.nameBytes, int64(len(n.String())), l.budget.NameBytes, "bytes in names")
}

func (l *ledger) sent(n int) string {
	return take(&l.out, int64(n), l.budget.BytesOut, "bytes out")
}

func (l *ledger) received(n int) string {
	return take(&l.in, int64(n), l.budget.BytesIn, "bytes in")
}

// host counts a name, or an address if the name is absent. Without a budget it keeps none.
func (l *ledger) host(n policy.Name, addr netip.Addr) string {
	if l.budget.Hosts <= 0 {
		return ""
	}
	h := host{name: n}
	if n.IsZero() {
		h.addr = addr
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.hosts[h]; !known {
		if l.more+int64(len(l.hosts)) >= l.budget.Hosts {
			return fmt.Sprintf("the budget of %d hosts is used up", l.budget.Hosts)
		}
		l.hosts[h] = struct{}{}
	}
	return ""
}
