package gateway

import "sync"

// A Pool shares the descriptors of a process among its networks, in places of two descriptors.
//
// Each network always has its minimum: its sockets, a connection that each listener has just
// accepted, three connections, a question at the host's resolver, and a pipe. Further places come
// from the pool. No network takes more of them than are left afterwards, so that with n greedy
// networks one more finds 1/(n+1) of the pool.
type Pool struct {
	networks int

	mu   sync.Mutex // guards free and the shares
	free int        // places
}

// A use is a purpose of a place: each has its own guaranteed number, so that a network cannot use
// up its minimum for one purpose by another.
type use int

const (
	forConnection use = iota // both sides
	forQuestion              // a socket to the host's resolver, and the file that is read before
	forPipe
	uses
)

// guaranteed is the number of places of each network.
var guaranteed = [uses]int{forConnection: 3, forQuestion: 1, forPipe: 1}

const (
	placeSize = 2   // descriptors
	reserved  = 128 // descriptors of the process itself: its own, empty pipes, those of a request
	// minimum is the number of descriptors of each network: three sockets, one for each of two
	// listeners, five places.
	minimum = 3 + 2 + 5*placeSize
	// maxNetworks exceeds the number of sandboxes of a daemon. Descriptors of a high limit that so
	// many minima leave over belong to the pool.
	maxNetworks = 2048
)

// NewPool returns the pool of a process with a limit of descriptors. A quarter of them, or more,
// are in no network's minimum.
func NewPool(descriptors uint64) *Pool {
	usable := max(0, int(min(descriptors, 1<<30))-reserved)
	networks := min(usable*19/25/minimum, maxNetworks)
	return &Pool{networks: networks, free: (usable - networks*minimum) / placeSize}
}

// Networks returns the number of networks that have their minimum.
func (p *Pool) Networks() int { return p.networks }

// A share counts the places of one network. Without a pool it is unbounded.
type share struct {
	pool   *Pool
	used   [uses]int
	pooled int // places beyond the guaranteed ones
}

// take takes a place. It reports false if there is none.
func (s *share) take(u use) bool {
	if s.pool == nil {
		return true
	}
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if s.used[u] >= guaranteed[u] {
		if s.pooled >= s.pool.free {
			return false
		}
		s.pool.free--
		s.pooled++
	}
	s.used[u]++
	return true
}

// give gives places back that were taken.
func (s *share) give(u use, places int) {
	if s.pool == nil {
		return
	}
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	for range places {
		if s.used[u] > guaranteed[u] {
			s.pool.free++
			s.pooled--
		}
		s.used[u]--
	}
}
