package policy

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/publicsuffix"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// siblings is the number of names below one domain, or of entries of one directory in paths, from
	// which a pattern takes their place.
	siblings = 8
	// lookedUp is the number of names in a comment.
	lookedUp = 20
)

// Learn returns the smallest policy that allows what the flows did, as a document with comments.
// Flows that were refused are left out, and so are names that were looked up and never connected
// to. Names and paths are exact, unless eight or more share their parent: then a pattern takes
// their place, and a comment says so. A domain below which anyone may register a name is never such
// a parent.
func Learn(flows []api.Flow) ([]byte, error) {
	l, err := gather(flows)
	if err != nil {
		return nil, fmt.Errorf("learn a policy: %w", err)
	}
	d := written{head: l.head()}
	l.generalize()
	d.rules = l.rules()
	doc, err := d.encode()
	if err != nil {
		return nil, err
	}
	p, err := Parse(doc)
	if err != nil {
		return nil, fmt.Errorf("learn a policy: %w", err)
	}
	for a := range l.acts {
		if v := p.recorded(a); !v.Allow && a.kind != api.FlowQuery {
			return nil, fmt.Errorf("learn a policy: the record has %s, which no policy allows: %s", a.Flow, v.Reason)
		}
	}
	return doc, nil
}

// A place is a port of a host that was connected to.
type place struct {
	host     string // pattern of a name, or an address
	protocol Protocol
	port     uint16
}

// An access counts the connections and requests at a place.
type access struct {
	connections int
	// plain reports that requests were not read, or not all of them.
	plain bool
	// requests counts by method and path pattern, and unread those that no rule for requests allows.
	requests map[string]map[string]int
	unread   int
	// names is the number of names that a suffix stands for; 0 unless host is one.
	names int
}

type learner struct {
	acts    map[act]int
	places  map[place]*access
	lookups map[string]int // names, with the number of questions
	used    map[string]bool

	first, last time.Time
	refused     int
	lost        uint64
}

// gather counts the flows by place.
func gather(flows []api.Flow) (*learner, error) {
	l := &learner{acts: map[act]int{}, places: map[place]*access{}, lookups: map[string]int{}, used: map[string]bool{}}
	for i, f := range flows {
		if l.first.IsZero() || f.Time.Before(l.first) {
			l.first = f.Time
		}
		if f.Time.After(l.last) {
			l.last = f.Time
		}
		l.lost += f.Lost
		if !f.Allow {
			l.refused++
			continue
		}
		a, err := readFlow(f)
		if err != nil {
			return nil, fmt.Errorf("flow %d: %w", i+1, err)
		}
		if f.Protocol == "dns" && a.kind == api.FlowConnection {
			continue // the gateway answers it itself
		}
		if toPeer(f) {
			continue // of no policy
		}
		l.acts[a]++
	}
	for a, n := range l.acts {
		if a.kind == api.FlowQuery {
			l.lookups[a.Name.s] += n
			continue
		}
		l.used[a.Name.s] = true
		for _, host := range a.hosts() {
			l.add(place{host, a.Protocol, a.Port}, a, n)
		}
	}
	for _, at := range l.places {
		at.plain = at.plain || len(at.requests) == 0
	}
	return l, nil
}

// hosts returns the hosts that have to be allowed for a flow. A name does not open a
// special-purpose address, but without its rule it is not resolved.
func (a *act) hosts() []string {
	addr := canonical(a.Addr)
	k, _ := classify(addr)
	switch {
	case a.Name.IsZero():
		return []string{addr.String()}
	case k == public || k == hostOnly:
		return []string{a.Name.s}
	default:
		return []string{a.Name.s, addr.String()}
	}
}

func (l *learner) add(where place, a act, n int) {
	at := l.places[where]
	if at == nil {
		at = &access{requests: map[string]map[string]int{}}
		l.places[where] = at
	}
	switch {
	case a.kind == api.FlowConnection:
		at.connections += n
		at.plain = at.plain || a.opaque
	case !validMethod(a.method) || a.path.s == "" || a.Protocol == UDP:
		at.plain = true
		at.unread += n
	default:
		if at.requests[a.method] == nil {
			at.requests[a.method] = map[string]int{}
		}
		at.requests[a.method][literal(a.path).String()] += n
	}
}

// literal returns the narrowest pattern that covers a path. Segments with a * cannot be written,
// and behind a %2F the two readings of a path have different segments.
func literal(p Path) pathPattern {
	segments := strings.Split(p.s[1:], "/")
	for i, seg := range segments {
		switch {
		case strings.Contains(seg, "%2F"), strings.Contains(seg, "*") && i == len(segments)-1:
			return pathPattern{segments[:i], true}
		case strings.Contains(seg, "*"):
			segments[i] = "*"
		}
	}
	return pathPattern{segments, false}
}

// generalize puts patterns in the place of many paths and of many names.
func (l *learner) generalize() {
	for _, at := range l.places {
		for method, paths := range at.requests {
			at.requests[method] = collapse(paths)
		}
	}
	families := map[place]map[string][]place{} // suffix, signature, members
	for where, at := range l.places {
		if parent, ok := parentOf(where.host); ok {
			suffix := place{"*." + parent, where.protocol, where.port}
			if families[suffix] == nil {
				families[suffix] = map[string][]place{}
			}
			families[suffix][at.signature()] = append(families[suffix][at.signature()], where)
		}
	}
	suffixes := map[place]*access{}
	for suffix, members := range families {
		for _, signature := range slices.Sorted(maps.Keys(members)) { // plain access, if there is any, is first
			if len(members[signature]) >= siblings {
				suffixes[suffix] = l.places[members[signature][0]].uncounted()
				break
			}
		}
	}
	above := func(a, b place) int {
		return cmp.Or(cmp.Compare(len(a.host), len(b.host)), strings.Compare(a.host, b.host), cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.port, b.port))
	}
	for _, suffix := range slices.SortedFunc(maps.Keys(suffixes), above) {
		into := suffixes[suffix]
		p := pattern{strings.TrimPrefix(suffix.host, "*."), true}
		for where, at := range l.places {
			if where.protocol == suffix.protocol && where.port == suffix.port && p.matches(Name{where.host}) && where.host != HostName &&
				(into.plain || into.signature() == at.signature()) {
				into.join(at)
				delete(l.places, where)
			}
		}
	}
	for suffix, at := range suffixes {
		if at.names > 0 { // otherwise a suffix above has taken the names
			l.places[suffix] = at
		}
	}
}

// uncounted returns an access that allows the same, with all counts at zero.
func (a *access) uncounted() *access {
	b := &access{plain: a.plain, requests: map[string]map[string]int{}}
	for method, paths := range a.requests {
		b.requests[method] = map[string]int{}
		for path := range paths {
			b.requests[method][path] = 0
		}
	}
	return b
}

// join adds the access of a name to that of its suffix, which has the same requests or is plain.
func (a *access) join(other *access) {
	a.names++
	a.connections += other.connections
	a.unread += other.unread
	for method, paths := range other.requests {
		if a.requests[method] == nil {
			a.requests[method] = map[string]int{}
		}
		for path, n := range paths {
			a.requests[method][path] += n
		}
	}
}

// signature is equal for places at which the same is allowed.
func (a *access) signature() string {
	var all []string
	for _, p := range a.parts() {
		all = append(all, p.key())
	}
	return strings.Join(all, "\n\n")
}

// parentOf returns the domain in which a name is, unless anyone may register a name there.
func parentOf(host string) (string, bool) {
	if _, err := netip.ParseAddr(host); err == nil || host == HostName {
		return "", false
	}
	_, parent, ok := strings.Cut(host, ".")
	if !ok {
		return "", false
	}
	_, err := publicsuffix.EffectiveTLDPlusOne(parent)
	return parent, err == nil
}

// collapse puts a pattern in the place of the entries of each directory that has many. Keys are
// patterns.
func collapse(paths map[string]int) map[string]int {
	type item struct {
		segments []string
		prefix   bool
		n        int
	}
	all := map[string]int{}
	var walk func(above []string, items []item)
	walk = func(above []string, items []item) {
		below := map[string][]item{}
		total, prefix := 0, false
		for _, it := range items {
			switch {
			case len(it.segments) > 0:
				below[it.segments[0]] = append(below[it.segments[0]], item{it.segments[1:], it.prefix, it.n})
			case !it.prefix:
				all[pathPattern{above, false}.String()] += it.n
				continue
			default:
				prefix = true
			}
			total += it.n
		}
		if prefix || len(below) >= siblings {
			all[pathPattern{above, true}.String()] += total
			return
		}
		for seg, items := range below {
			walk(append(slices.Clone(above), seg), items)
		}
	}
	var items []item
	for path, n := range paths {
		p := patternOf(path)
		items = append(items, item{p.segments, p.prefix, n})
	}
	walk(nil, items)
	return all
}

// patternOf undoes [pathPattern.String].
func patternOf(s string) pathPattern {
	p := pathPattern{segments: strings.Split(s[1:], "/")}
	if last := len(p.segments) - 1; p.segments[last] == "*" {
		p.segments, p.prefix = p.segments[:last], true
	}
	return p
}

// A part is what one rule can say of an access: requests of these methods, each with all of these
// paths. The zero part stands for every byte.
type part struct {
	methods, paths []string
	requests       int
}

func (p part) key() string { return strings.Join(p.methods, " ") + "\n" + strings.Join(p.paths, "\n") }

// parts returns the access as the fewest parts that allow no other request.
func (a *access) parts() []part {
	total := a.unread
	byPaths := map[string]part{}
	for method, counts := range a.requests {
		paths := slices.Sorted(maps.Keys(counts))
		p := byPaths[strings.Join(paths, "\n")]
		p.paths = paths
		p.methods = append(p.methods, method)
		for _, n := range counts {
			p.requests += n
			total += n
		}
		byPaths[strings.Join(paths, "\n")] = p
	}
	if a.plain {
		return []part{{requests: total}}
	}
	all := slices.Collect(maps.Values(byPaths))
	for i := range all {
		slices.Sort(all[i].methods)
	}
	slices.SortFunc(all, func(a, b part) int { return strings.Compare(a.key(), b.key()) })
	return all
}

// rules returns the rules for all places: hosts with the same ports and requests share one.
func (l *learner) rules() []entry {
	type hostPart struct {
		host     string
		protocol Protocol
		part     string
	}
	type use struct {
		part
		ports       []uint16
		connections int
		names       int
	}
	uses := map[hostPart]use{}
	for where, at := range l.places {
		for _, p := range at.parts() {
			key := hostPart{where.host, where.protocol, p.key()}
			u := uses[key]
			requests := u.requests + p.requests
			u.part = p
			u.requests = requests
			u.ports = append(u.ports, where.port)
			u.connections += at.connections
			u.names = max(u.names, at.names)
			uses[key] = u
		}
	}
	groups := map[string][]hostPart{}
	for key, u := range uses {
		slices.Sort(u.ports)
		group := fmt.Sprint(key.protocol, u.ports, key.part)
		groups[group] = append(groups[group], key)
	}
	var all []entry
	for _, members := range groups {
		slices.SortFunc(members, func(a, b hostPart) int { return compareHosts(a.host, b.host) })
		u := uses[members[0]]
		paths := slices.Collect(slices.Chunk(u.paths, maxList))
		if len(paths) == 0 {
			paths = [][]string{nil}
		}
		for ports := range slices.Chunk(u.ports, maxList) {
			for hosts := range slices.Chunk(members, maxTargets) {
				for _, some := range paths {
					e := entry{rule: rule{protocols: []Protocol{members[0].protocol}, inspect: some != nil, methods: u.methods}, hosts: map[string]string{}}
					for _, port := range ports {
						e.ports = append(e.ports, portRange{port, port})
					}
					for _, h := range hosts {
						e.addHost(h.host)
						e.hosts[h.host] = remark(h.host, uses[h].connections, uses[h].requests, uses[h].names)
					}
					for _, path := range some {
						e.addPath(path)
					}
					all = append(all, e)
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b entry) int {
		return cmp.Or(compareHosts(a.hostList()[0], b.hostList()[0]), cmp.Compare(a.ports[0].first, b.ports[0].first),
			cmp.Compare(len(a.ports), len(b.ports)), cmp.Compare(a.protocols[0], b.protocols[0]), slices.Compare(a.methods, b.methods),
			slices.CompareFunc(a.paths, b.paths, func(a, b pathPattern) int { return strings.Compare(a.String(), b.String()) }),
			slices.CompareFunc(a.ports, b.ports, func(a, b portRange) int { return int(a.first) - int(b.first) }))
	})
	for i := range all {
		all[i].name = fmt.Sprintf("rules[%d]", i)
	}
	return all
}

// compareHosts sorts names before addresses, and a suffix beside its domain.
func compareHosts(a, b string) int {
	x, errA := netip.ParseAddr(a)
	y, errB := netip.ParseAddr(b)
	switch {
	case errA == nil && errB == nil:
		return x.Compare(y)
	case errA == nil:
		return 1
	case errB == nil:
		return -1
	}
	return cmp.Or(strings.Compare(strings.TrimPrefix(a, "*."), strings.TrimPrefix(b, "*.")), strings.Compare(a, b))
}

func (e *entry) addHost(host string) {
	if addr, err := netip.ParseAddr(host); err == nil {
		e.prefixes = append(e.prefixes, netip.PrefixFrom(addr, addr.BitLen()))
		return
	}
	suffix, wildcard := strings.CutPrefix(host, "*.")
	e.patterns = append(e.patterns, pattern{suffix, wildcard})
}

func (e *entry) addPath(path string) {
	p := patternOf(path)
	if e.paths = append(e.paths, p); p.prefix || slices.Contains(p.segments, "*") {
		e.head = "A path with a * stands for several that were seen, and allows others too."
	}
}

// remark is the comment after a host.
func remark(host string, connections, requests, names int) string {
	var parts []string
	add := func(n int, one, many string) {
		switch {
		case n == 1:
			parts = append(parts, "1 "+one)
		case n > 1:
			parts = append(parts, fmt.Sprintf("%d %s", n, many))
		}
	}
	add(connections, "connection", "connections")
	add(requests, "request", "requests")
	if names > 0 {
		parts = append(parts, fmt.Sprintf("of %d names; allows every name below", names))
	}
	if host == HostName {
		parts = append(parts, "leads to the host's loopback; a server elsewhere is listed under services")
	}
	return strings.Join(parts, ", ")
}

// head is the comment above the document.
func (l *learner) head() string {
	total := 0
	for _, n := range l.acts {
		total += n
	}
	lines := []string{fmt.Sprintf("Learned from %d flows.", total)}
	if !l.first.IsZero() {
		const form = "2006-01-02 15:04:05"
		lines[0] = fmt.Sprintf("Learned from %d flows, %s to %s UTC.", total, l.first.UTC().Format(form), l.last.UTC().Format(form))
	}
	if l.refused > 0 {
		lines = append(lines, fmt.Sprintf("Flows that were refused are left out: %d.", l.refused))
	}
	if l.lost > 0 {
		lines = append(lines, fmt.Sprintf("The record is not complete: %d entries of it were dropped.", l.lost))
	}
	var unused []string
	for name := range l.lookups {
		if !l.used[name] {
			unused = append(unused, name)
		}
	}
	if slices.Sort(unused); len(unused) > 0 {
		lines = append(lines, "Names that were looked up and never connected to are left out:")
		for _, name := range unused[:min(len(unused), lookedUp)] {
			lines = append(lines, fmt.Sprintf("  %s (%d)", name, l.lookups[name]))
		}
		if len(unused) > lookedUp {
			lines = append(lines, fmt.Sprintf("  and %d more", len(unused)-lookedUp))
		}
	}
	return strings.Join(lines, "\n")
}
