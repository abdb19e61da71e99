package egress

import (
	"context"
	"testing"
)

// One network cannot take the connections of another, however many it opens, and a flow counts
// once. Descriptors come back when flows end.
func TestShare(t *testing.T) {
	const descriptors = 20000
	p := newPool(descriptors)
	begin := p.free
	fill := func(s *share) (end []context.CancelFunc) {
		for {
			ctx, cancel := context.WithCancel(t.Context())
			if s.take(ctx) != nil {
				cancel()
				return end
			}
			if s.take(ctx) != nil {
				t.Fatal("a flow counts again")
			}
			end = append(end, cancel)
		}
	}
	greedy, second := p.share(), p.share()
	first := fill(greedy)
	if n := len(first); n < guaranteed+begin/2-1 || n > guaranteed+begin/2+1 {
		t.Errorf("one network has %d connections of a pool of %d", n, begin)
	}
	if n := len(fill(second)); n < guaranteed+begin/4-1 {
		t.Errorf("a second one has %d connections of a pool of %d", n, begin)
	}
	for range maxNetworks(descriptors) - 2 {
		if n := len(fill(p.share())); n < guaranteed {
			t.Errorf("a further one has %d connections", n)
		}
	}
	if most := maxNetworks(descriptors)*minimum + perConnection*begin + reserved; most > descriptors {
		t.Errorf("%d descriptors could be used, of %d", most, descriptors)
	}
	free := p.free
	for ctx := range greedy.taken {
		greedy.give(ctx)
	}
	if p.free != free+len(first)-guaranteed || greedy.pooled != 0 {
		t.Errorf("%d connections came back to the pool of %d, %d still counted", len(first)-guaranteed, p.free-free, greedy.pooled)
	}
	for _, end := range first {
		end()
	}
}

func TestMaxNetworks(t *testing.T) {
	for descriptors, want := range map[uint64]int{0: 0, 100: 0, 256: 0, 1024: 1, 4096: 8, 20000: 40, 524288: 1059, 1 << 20: 2119} {
		if got := maxNetworks(descriptors); got != want {
			t.Errorf("%d descriptors: %d networks, want %d", descriptors, got, want)
		}
	}
}
