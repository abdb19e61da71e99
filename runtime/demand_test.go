package runtime_test

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/runtime"
)

func TestDemandIsLearnedAndForgotten(t *testing.T) {
	begin := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	type ask struct {
		at time.Duration
		n  int
	}
	for _, test := range []struct {
		name string
		asks []ask
		want map[time.Duration]int // in any order: each is a demand of its own
	}{
		{"nobody", nil, map[time.Duration]int{0: 0, time.Hour: 0}},
		{"one", []ask{{0, 1}}, map[time.Duration]int{0: 1, 9*time.Minute + 59*time.Second: 1, 10 * time.Minute: 0, 48 * time.Hour: 0}},
		{"a burst fades evenly", []ask{{time.Second, 10}}, map[time.Duration]int{
			time.Second: 10, 30 * time.Second: 10, 2 * time.Minute: 9, 5 * time.Minute: 6, 9 * time.Minute: 2, 10 * time.Minute: 1, 10*time.Minute + time.Second: 0,
		}},
		{"a burst over the edge of a slot is one", []ask{{900 * time.Millisecond, 4}, {1100 * time.Millisecond, 4}}, map[time.Duration]int{2 * time.Second: 8}},
		{"what is seconds apart is not", []ask{{0, 3}, {5 * time.Second, 4}, {10 * time.Second, 3}}, map[time.Duration]int{10 * time.Second: 4}},
		{"a steady rate is what comes in two seconds", []ask{{0, 2}, {time.Second, 2}, {2 * time.Second, 2}, {3 * time.Second, 2}}, map[time.Duration]int{3 * time.Second: 4}},
		{"a new burst counts more than an old one", []ask{{0, 10}, {9 * time.Minute, 3}}, map[time.Duration]int{9 * time.Minute: 3, 12 * time.Minute: 3, 18*time.Minute + 59*time.Second: 1}},
		{"after a long silence it begins anew", []ask{{0, 50}, {25 * time.Minute, 2}}, map[time.Duration]int{25 * time.Minute: 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for at, want := range test.want {
				var d runtime.Demand
				d.Wanted(begin)
				for _, a := range test.asks {
					for range a.n {
						d.Ask(begin.Add(a.at))
					}
				}
				if got := d.Wanted(begin.Add(at)); got != want {
					t.Errorf("after %s: %d, want %d", at, got, want)
				}
			}
		})
	}
}
