package gateway

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	// retention is how long a connection may use an address after the last answer that had it.
	// Clients that keep addresses for longer than their lifetime are common.
	retention = time.Hour
	// lifetime is the TTL of records in answers. For that time an answer is given again without asking
	// the host's resolver, which does not tell how long it may be kept.
	lifetime = 30 * time.Second
	// peerLifetime is the TTL of addresses of peers, which come and go.
	peerLifetime = 5 * time.Second

	maxPairs   = 8192
	maxAnswers = 1024
	maxNames   = 64 // of one address; a connection asks the policy about each
)

// A memory holds which names were answered with which addresses. The oldest are forgotten first.
type memory struct {
	now func() time.Time

	mu      sync.Mutex
	answers map[question]answer
	pairs   map[pair]*list.Element // of *remembered
	order   *list.List             // oldest first
	names   map[netip.Addr][]policy.Name
}

type question struct {
	name policy.Name
	ipv6 bool
}

type answer struct {
	addrs []netip.Addr
	at    time.Time
}

type pair struct {
	name policy.Name
	addr netip.Addr
}

type remembered struct {
	pair
	at time.Time
}

func newMemory(now func() time.Time) *memory {
	return &memory{
		now: now, answers: make(map[question]answer), pairs: make(map[pair]*list.Element), order: list.New(), names: make(map[netip.Addr][]policy.Name),
	}
}

// answer returns the addresses of a question that was asked a short time ago.
func (m *memory) answer(q question) ([]netip.Addr, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.answers[q]
	if !ok || m.now().Sub(a.at) >= lifetime {
		return nil, false
	}
	m.remember(q.name, a.addrs)
	return a.addrs, true
}

// add remembers an answer.
func (m *memory) add(q question, addrs []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.answers) >= maxAnswers {
		clear(m.answers) // they only save questions to the host's resolver
	}
	m.answers[q] = answer{addrs, m.now()}
	m.remember(q.name, addrs)
}

// remember is called with mu held.
func (m *memory) remember(name policy.Name, addrs []netip.Addr) {
	for _, addr := range addrs {
		p := pair{name, addr}
		if e, ok := m.pairs[p]; ok {
			m.forget(e)
		}
		if len(m.names[addr]) >= maxNames {
			m.forget(m.pairs[pair{m.names[addr][0], addr}])
		}
		for len(m.pairs) >= maxPairs {
			m.forget(m.order.Front())
		}
		m.pairs[p] = m.order.PushBack(&remembered{p, m.now()})
		m.names[addr] = append(m.names[addr], name)
	}
}

// forget is called with mu held.
func (m *memory) forget(e *list.Element) {
	p := m.order.Remove(e).(*remembered).pair //nolint:forcetypeassert // the list holds nothing else
	delete(m.pairs, p)
	rest := slices.DeleteFunc(m.names[p.addr], func(n policy.Name) bool { return n == p.name })
	if len(rest) == 0 {
		delete(m.names, p.addr)
		return
	}
	m.names[p.addr] = rest
}

// namesOf returns the names that an address was answered for within the retention, oldest first.
func (m *memory) namesOf(addr netip.Addr) []policy.Name {
	m.mu.Lock()
	defer m.mu.Unlock()
	for e := m.order.Front(); e != nil && m.now().Sub(e.Value.(*remembered).at) >= retention; e = m.order.Front() { //nolint:forcetypeassert // the list holds nothing else
		m.forget(e)
	}
	return slices.Clone(m.names[addr])
}

// forgetAnswers makes the next question about each name go to the host's resolver. Addresses that a
// new policy opens are then in the answer.
func (m *memory) forgetAnswers() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.answers)
}
