package host

import (
	"os"
	"testing"
	"time"
)

// An init that gets no processor is waited for, a bounded time; one that runs and is silent is not.
func TestPatience(t *testing.T) {
	const grace = 10 * time.Second
	start := time.Unix(1000, 0)
	for _, tc := range []struct {
		name string
		// The load of each look, and the extensions that come of it: 0 means none, and ends the test.
		looks func(n int, since time.Duration) (Load, bool)
		want  []time.Duration
	}{
		{"unknown", func(int, time.Duration) (Load, bool) { return Load{}, false }, []time.Duration{0}},
		{"sleeps", func(int, time.Duration) (Load, bool) { return Load{Run: time.Second}, true }, []time.Duration{probe, 0}},
		{"runs", func(_ int, since time.Duration) (Load, bool) {
			return Load{Run: since, Due: true}, true
		}, []time.Duration{probe, 0}},
		{"waits a little", func(_ int, since time.Duration) (Load, bool) {
			return Load{Run: since / 2, Wait: since / 10}, true
		}, []time.Duration{probe, 0}},
		{"waits for ever", func(_ int, since time.Duration) (Load, bool) {
			return Load{Wait: since}, true
		}, append(repeat(probe, int(starvedFor/probe)+1), 0)},
		{"waits on a queue for ever, which is counted at its end", func(int, time.Duration) (Load, bool) {
			return Load{Due: true}, true
		}, append(repeat(probe, int(starvedFor/probe)+1), 0)},
		{"waits, and then runs and is silent", func(n int, since time.Duration) (Load, bool) {
			return Load{Wait: min(since, 2*time.Second), Run: since}, true
		}, []time.Duration{probe, probe, probe, grace, probe, 0}},
		{"a busy host", func(_ int, since time.Duration) (Load, bool) {
			return Load{Wait: since / 2, Host: true}, true
		}, []time.Duration{probe, 0}},
		{"a host without a processor to spare", func(n int, since time.Duration) (Load, bool) {
			return Load{Wait: since * 99 / 100, Host: true}, n < 3
		}, []time.Duration{probe, probe, probe, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			now, n := start, 0
			c := &Client{Load: func() (Load, bool) { n++; return tc.looks(n-1, now.Sub(start)) }}
			p := patience{client: c}
			for i, want := range tc.want {
				until, ok := p.extend(now, grace)
				if got := until.Sub(now); ok != (want > 0) || ok && got != want {
					t.Fatalf("look %d: %v, %v, want %v", i, got, ok, want)
				}
				now = until
			}
		})
	}
	held := start.Add(-time.Second)
	p := patience{client: &Client{Held: func() time.Time { return held }}}
	if until, ok := p.extend(start, grace); !ok || !until.Equal(held.Add(grace)) {
		t.Errorf("held a second ago: %v, %v", until, ok)
	}
	held = start.Add(-grace)
	if _, ok := p.extend(start, grace); ok {
		t.Error("held long ago, and waited for")
	}
}

func repeat(d time.Duration, n int) []time.Duration {
	var all []time.Duration
	for range n {
		all = append(all, d)
	}
	return all
}

func TestLoad(t *testing.T) {
	l, ok := LoadOf(os.Getpid())
	if !ok || l.Host || l.Run <= 0 {
		t.Errorf("of this process: %+v, %v", l, ok)
	}
	if more, ok := LoadOf(os.Getpid()); !ok || more.Run < l.Run || more.Wait < l.Wait {
		t.Errorf("of this process: %+v, then %+v, %v", l, more, ok)
	}
	for text, want := range map[string]time.Duration{
		"some avg10=98.79 avg60=98.54 avg300=98.60 total=13101533609\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n": 13101533609 * time.Microsecond,
		"full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n":                                                              -1,
		"some avg10=0.00 total=\n": -1,
		"":                         -1,
	} {
		if l, ok := hostLoad(text); ok != (want >= 0) || ok && (l.Wait != want || !l.Host) {
			t.Errorf("%q: %+v, %v", text, l, ok)
		}
	}
}
