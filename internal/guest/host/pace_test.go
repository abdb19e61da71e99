package host

import (
	"testing"
	"time"
)

// A flood is read at the rate, however much each read gives; other output is never delayed.
func TestPace(t *testing.T) {
	const each = 20 * time.Microsecond
	now := time.Unix(1e9, 0)
	t.Run("a burst", func(t *testing.T) {
		var p Pace
		for i := range int(paceBurst / (paceShare * each)) {
			if wait := p.read(now, 1, each); wait != 0 {
				t.Fatalf("read %d waits %v", i, wait)
			}
		}
		if wait := p.read(now, 1, each); wait != paceShare*each {
			t.Errorf("after the burst: %v", wait)
		}
		if wait := p.read(now.Add(time.Hour), 1, each); wait != 0 {
			t.Errorf("an hour later: %v", wait)
		}
	})
	t.Run("a flood", func(t *testing.T) {
		var p Pace
		after := now
		for range 10_000 {
			after = after.Add(p.read(after, 2, each))
		}
		if took, want := after.Sub(now), 2*10_000*paceShare*each-paceBurst; took != want {
			t.Errorf("it is read in %v, %v are due", took, want)
		}
	})
	t.Run("no flood", func(t *testing.T) {
		var p Pace
		after := now
		for range 100_000 {
			if wait := p.read(after, 1, each); wait != 0 {
				t.Fatalf("it waits %v", wait)
			}
			after = after.Add(paceShare * each)
		}
	})
	t.Run("what has ended", func(t *testing.T) {
		p := Pace{due: time.Now().Add(time.Hour)}
		over := make(chan struct{})
		close(over)
		p.Wait(over, 1) // or for an hour
	})
	if at := readTime(); at < fastestRead || at > slowestRead {
		t.Errorf("%v to read what a pipe holds", at)
	}
}
