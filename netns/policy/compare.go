package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Example is one thing that a policy allows: a name that is resolved, or a connection, with the
// request on it where requests are inspected.
type Example struct {
	Flow Flow
	// Method and Path are the request; empty if none is inspected.
	Method string
	Path   string
	// Target is where a port of [HostName] leads, as [Service.Target] has it; empty for other flows.
	Target string
	// Resolve reports that only the name is resolved; of Flow it alone is set.
	Resolve bool
	// Beyond is the budget of a rule that bounds this in the first policy, with its value; empty where
	// the first policy refuses it.
	Beyond string
}

func (e Example) String() string {
	text := e.Flow.String()
	switch {
	case e.Resolve:
		return fmt.Sprintf("the name %s is resolved", e.Flow.Name)
	case e.Method != "":
		text = fmt.Sprintf("%s %s on %s", e.Method, e.Path, e.Flow)
	}
	if e.Target != "" {
		text += ", which is " + e.Target
	}
	if e.Beyond != "" {
		text += ", beyond " + e.Beyond
	}
	return text
}

// ErrTooLarge is the error of policies that have too many rules to be compared in a bounded time.
var ErrTooLarge = errors.New("policies are too large to compare")

// compareWork bounds one comparison, in rules that are evaluated: a second or so at most.
const compareWork = 5_000_000

// Widens reports whether b allows anything that a refuses, with an example. It is exact: names,
// addresses, ports, methods and paths fall into finitely many classes that no rule of either policy
// tells apart, and one member of each is tried.
//
// What a budget of a rule in a bounds, one of a single rule in b must bound as tightly. Several
// rules of b that do so only together are taken for wider.
func Widens(a, b *Policy) (Example, bool, error) {
	work := compareWork
	s := newSamples(a, b)
	for i := range b.rules {
		if r := &b.rules[i]; !r.deny {
			if e, found := s.search(r, a, b, &work); found {
				return e, true, nil
			}
		}
	}
	if e, found := s.unbounded(a, b, &work); found {
		return e, true, nil
	}
	if work <= 0 || s.cut {
		return Example{}, false, ErrTooLarge
	}
	return Example{}, false, nil
}

// dead returns warnings about those of the first n rules without which the policy decides the same.
// A rule for which the comparison takes too long gets none.
func (p *Policy) dead(n int) []Warning {
	var warnings []Warning
	work := compareWork / 5
	s := newSamples(p, p)
	for i := range n {
		r := &p.rules[i]
		without := &Policy{rules: slices.Concat(p.rules[:i], p.rules[i+1:]), services: p.services}
		less, more := without, p
		message := "other rules deny or allow all that it covers"
		switch {
		case r.deny:
			less, more = p, without
			message = "no rule allows anything that it covers"
		case r.bounded(): // it bounds what other rules allow too
			less = &Policy{}
			message = "other rules deny all that it covers"
		}
		_, effect := s.search(r, less, more, &work)
		if work <= 0 || s.cut {
			return warnings
		}
		if !effect {
			warnings = append(warnings, Warning{r.at, r.name, "the rule has no effect: " + message})
		}
	}
	return warnings
}

// Samples has a member of each class that the rules of two policies distinguish.
type samples struct {
	names   []Name // the zero Name among them
	addrs   []netip.Addr
	ports   []uint16
	methods []string
	paths   []Path
	cut     bool // there are more paths
}

func newSamples(policies ...*Policy) *samples {
	s := &samples{
		names:   []Name{{}},
		addrs:   []netip.Addr{netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("2606:4700::1111")},
		ports:   []uint16{1},
		methods: []string{"SANDBOXD"},
	}
	// A label that no rule has.
	fresh := "any"
	for _, p := range policies {
		for _, r := range p.rules {
			for _, t := range r.patterns {
				for strings.Contains(t.name, fresh) {
					fresh += "x"
				}
			}
			for _, t := range r.paths {
				for slices.ContainsFunc(t.segments, func(seg string) bool { return strings.Contains(seg, fresh) }) {
					fresh += "x"
				}
			}
		}
	}
	s.paths = append(s.paths, Path{"/" + fresh, "/" + fresh})
	prefixes := false
	var patterns []pathPattern
	for _, p := range policies {
		for _, r := range p.rules {
			for _, t := range r.patterns {
				s.names = append(s.names, Name{strings.TrimSuffix(fresh+"."+t.name, ".")})
				if !t.wildcard {
					s.names[len(s.names)-1] = Name{t.name}
				}
			}
			for _, t := range r.prefixes {
				prefixes = true
				s.around(t)
			}
			for _, t := range r.ports {
				s.ports = append(s.ports, t.first)
				if t.last < 65535 {
					s.ports = append(s.ports, t.last+1)
				}
			}
			s.methods = append(s.methods, r.methods...)
			patterns = append(patterns, r.paths...)
		}
	}
	s.around(netip.PrefixFrom(HostAddress, HostAddress.BitLen()))
	if prefixes { // which open some special ranges and not others
		for _, t := range special {
			s.around(t.prefix)
		}
		for _, t := range metadata {
			s.around(netip.PrefixFrom(t, t.BitLen()))
		}
	}
	patterns, s.cut = intersections(patterns)
	for _, t := range patterns {
		s.paths = append(s.paths, t.example(fresh))
	}
	s.names = unique(s.names)
	s.addrs = unique(s.addrs)
	s.ports = unique(s.ports)
	s.methods = unique(s.methods)
	s.paths = unique(s.paths)
	return s
}

// maxIntersections bounds patterns such as /a/*/*, /*/b/* and /*/*/c: each subset of these has an
// intersection of its own.
const maxIntersections = 2000

// intersections returns the patterns with those of the paths that several of them match, or the
// first maxIntersections and true.
func intersections(patterns []pathPattern) (all []pathPattern, cut bool) {
	seen := make(map[string]bool)
	add := func(p pathPattern) {
		if k := p.key(); !seen[k] {
			seen[k] = true
			all = append(all, p)
		}
	}
	for _, p := range patterns {
		add(p)
	}
	for i := 0; i < len(all); i++ {
		if len(all) > maxIntersections {
			return all[:maxIntersections], true
		}
		for j := range i {
			if both, ok := all[i].unify(all[j]); ok {
				add(both)
			}
		}
	}
	return all, false
}

// around adds the first address of a prefix and the one after its last. Prefixes nest or are
// disjoint, so these are in every class.
func (s *samples) around(p netip.Prefix) {
	s.addrs = append(s.addrs, p.Addr())
	b := p.Addr().AsSlice()
	for i := range b {
		for bit := range 8 {
			if i*8+bit >= p.Bits() {
				b[i] |= 0x80 >> bit
			}
		}
	}
	last, _ := netip.AddrFromSlice(b)
	if next := last.Next(); next.IsValid() {
		s.addrs = append(s.addrs, next)
	}
}

func unique[T comparable](all []T) []T {
	seen := make(map[T]bool)
	return slices.DeleteFunc(all, func(v T) bool {
		had := seen[v]
		seen[v] = true
		return had
	})
}

// search looks for a name, flow or request of the rule that more allows and less refuses. It
// subtracts each evaluated rule from work and gives up at zero.
func (s *samples) search(r *rule, less, more *Policy, work *int) (Example, bool) {
	cost := len(less.rules) + len(more.rules) + 1
	for _, name := range s.names {
		if *work -= cost; *work <= 0 {
			return Example{}, false
		}
		if !name.IsZero() && r.hasName(name) && more.Resolve(name).Allow && !less.Resolve(name).Allow {
			return Example{Flow: Flow{Name: name}, Resolve: true}, true
		}
		if !name.IsZero() && !more.Resolve(name).Allow {
			continue // there is no flow with this name
		}
		for _, addr := range s.addrs {
			if _, k, refusal := target(Flow{Addr: addr, Port: 1}); refusal != "" || !r.hasHost(name, addr, k) {
				continue
			}
			for _, f := range s.flows(r, name, addr) {
				if *work -= cost; *work <= 0 {
					return Example{}, false
				}
				if e, found := s.compare(f, less, more, work, cost); found {
					return e, true
				}
			}
		}
	}
	return Example{}, false
}

// flows returns the flows to an address that the rule's transports cover.
func (s *samples) flows(r *rule, name Name, addr netip.Addr) []Flow {
	var all []Flow
	for _, protocol := range []Protocol{TCP, UDP} {
		for _, port := range s.ports {
			if f := (Flow{protocol, name, addr, port}); r.hasTransport(f) {
				all = append(all, f)
			}
		}
	}
	return all
}

func (s *samples) compare(f Flow, less, more *Policy, work *int, cost int) (Example, bool) {
	m, l := more.Connect(f), less.Connect(f)
	target := ""
	if f.Name.s == HostName {
		ms, _ := more.service(f.Port)
		ls, _ := less.service(f.Port)
		if target = ms.Target(); l.Allow && target != ls.Target() {
			l = Verdict{} // less allows another server
		}
	}
	switch {
	case !m.Allow:
		return Example{}, false
	case !m.Inspect && (!l.Allow || l.Inspect): // what is not inspected need not even be HTTP
		return Example{Flow: f, Target: target}, true
	case !m.Inspect:
		return Example{}, false
	}
	for _, method := range s.methods {
		for _, path := range s.paths {
			if *work -= cost; *work <= 0 {
				return Example{}, false
			}
			if permits(more, m, f, method, path) && !permits(less, l, f, method, path) {
				return Example{Flow: f, Method: method, Path: path.s, Target: target}, true
			}
		}
	}
	return Example{}, false
}

// permits reports whether a request is allowed on a flow with the given verdict.
func permits(p *Policy, v Verdict, f Flow, method string, path Path) bool {
	return v.Allow && (!v.Inspect || p.Request(f, method, path).Allow)
}
