package quota

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

const mib = 1 << 20

// world is a file system with sandboxes that write at constant rates, and a clock that the watch
// moves by its waits.
type world struct {
	watch *Watch
	at    time.Time
	free  Free
	cost  time.Duration // of one measurement
	all   map[string]*writer
}

type writer struct {
	used, rate Usage // per second
	held       bool
	measured   int
	holds      int
	err        error
	ended      string
}

func newWorld(free Free) *world {
	m := &world{at: time.Unix(1e9, 0), free: free, all: make(map[string]*writer)}
	m.watch = New(func() (Free, error) { return m.free, nil }, func(string, error) {})
	m.watch.now = func() time.Time { return m.at }
	m.watch.running = true // the test looks itself
	return m
}

func (m *world) add(id string, limit, rate Usage) *writer {
	w := &writer{rate: rate}
	m.all[id] = w
	m.watch.Set(id, Subject{
		Limit: limit,
		Measure: func(Usage) (Usage, error) {
			w.measured++
			m.pass(m.cost)
			return w.used, w.err
		},
		Hold: func(context.Context) (func(), error) {
			w.holds++
			w.held = true
			return func() { w.held = false }, nil
		},
		End: func(reason string) {
			w.ended, w.rate = reason, Usage{}
		},
	})
	return w
}

// pass lets time pass, in which all write.
func (m *world) pass(d time.Duration) {
	m.at = m.at.Add(d)
	for _, w := range m.all {
		if w.held {
			continue
		}
		n := Usage{int64(float64(w.rate.Bytes) * d.Seconds()), int64(float64(w.rate.Inodes) * d.Seconds())}
		w.used = w.used.plus(n)
		m.free.Bytes, m.free.Available = m.free.Bytes-n.Bytes, m.free.Available-n.Bytes
		if m.free.Inodes >= 0 {
			m.free.Inodes -= n.Inodes
		}
	}
}

// run looks until the time is over or done.
func (m *world) run(t *testing.T, d time.Duration, done func() bool) (looks int) {
	t.Helper()
	for end := m.at.Add(d); m.at.Before(end) && !done(); looks++ {
		next, ok := m.watch.look()
		if !ok || next < shortest || next > longest {
			t.Fatalf("the next look is after %v, %v", next, ok)
		}
		m.pass(next)
	}
	return looks
}

var plenty = Free{1 << 40, 1 << 30, 1 << 40}

// The excess is what can be written between two looks near the limit, whatever the limit and the
// rate, and never a part of the limit.
func TestExcessIsBounded(t *testing.T) {
	for name, free := range map[string]Free{"counted": plenty, "counted late": {-1, -1, 1 << 40}} {
		for _, rate := range []int64{1 * mib, 100 * mib, 1000 * mib, fastestBytes} {
			for _, limit := range []int64{16 * mib, 1 << 30, 100 << 30} {
				m := newWorld(free)
				m.cost = 20 * time.Millisecond // 10,000 files
				w := m.add("a", Usage{Bytes: limit}, Usage{Bytes: rate})
				m.run(t, time.Hour*24*365, func() bool { return w.ended != "" })
				most := int64(float64(rate) * (2*shortest + 2*m.cost).Seconds())
				if over := w.used.Bytes - limit; over < 0 || over > most {
					t.Errorf("%s: limit %d MiB, %d MiB/s: %d KiB too much, want at most %d", name, limit>>20, rate>>20, over>>10, most>>10)
				}
				if !strings.Contains(w.ended, "the limit is") {
					t.Errorf("ended: %q", w.ended)
				}
			}
		}
		m := newWorld(free)
		w := m.add("a", Usage{Inodes: 100_000}, Usage{Inodes: 200_000})
		m.run(t, time.Hour, func() bool { return w.ended != "" })
		if over := w.used.Inodes - 100_000; over < 0 || over > 200_000/50 || !strings.Contains(w.ended, "100000 files") {
			t.Errorf("%d files too many: %q", over, w.ended)
		}
	}
}

// A sandbox that could exceed its limit while it is measured stands still.
func TestSandboxStandsStillNearItsLimit(t *testing.T) {
	m := newWorld(plenty)
	m.cost = 200 * time.Millisecond
	w := m.add("a", Usage{Bytes: 1 << 30}, Usage{Bytes: 500 * mib})
	m.run(t, time.Hour, func() bool { return w.ended != "" })
	if w.holds == 0 || w.held || w.ended == "" {
		t.Errorf("held %d times, now %v: %q", w.holds, w.held, w.ended)
	}
}

// A sandbox that writes nothing is measured once in a while, also while another one fills the disk,
// and stands still for nobody else's sake.
func TestIdleSandboxIsLeftAlone(t *testing.T) {
	m := newWorld(plenty)
	m.cost = 10 * time.Millisecond
	idle := m.add("idle", Usage{Bytes: 100 * mib, Inodes: 1000}, Usage{})
	looks := m.run(t, time.Minute, func() bool { return false })
	if idle.measured > 13 || looks > 60*1000/24 {
		t.Errorf("alone: measured %d times in a minute, %d looks", idle.measured, looks)
	}
	idle.measured = 0
	m.add("busy", Usage{}, Usage{Bytes: 4096 * mib})
	m.run(t, time.Minute, func() bool { return false })
	if spent := time.Duration(idle.measured) * m.cost; idle.holds > 0 || spent > time.Minute/share {
		t.Errorf("beside a busy one: measured %d times, held %d times", idle.measured, idle.holds)
	}
}

// A sandbox hides its growth behind another one that deletes as much for the time between two
// measurements in any case, and no longer.
func TestHiddenGrowthIsSeen(t *testing.T) {
	m := newWorld(plenty)
	w := m.add("a", Usage{Bytes: 1 << 30}, Usage{Bytes: mib})
	m.add("deletes", Usage{}, Usage{Bytes: -mib})
	m.run(t, time.Hour, func() bool { return w.ended != "" })
	if over := w.used.Bytes - 1<<30; over > 6*mib || w.ended == "" {
		t.Errorf("%d MiB too much: %q", over>>20, w.ended)
	}
}

func TestEndIsTriedAgain(t *testing.T) {
	m := newWorld(plenty)
	ends := 0
	m.watch.Set("a", Subject{
		Limit:   Usage{Bytes: mib},
		Measure: func(Usage) (Usage, error) { return Usage{2 * mib, 1}, nil },
		Hold:    func(context.Context) (func(), error) { return nil, errors.New("none") },
		End:     func(string) { ends++ },
	})
	m.run(t, 3*time.Second, func() bool { return false })
	if ends < 2 || ends > 4 {
		t.Errorf("ended %d times", ends)
	}
	m.watch.Remove("a")
	if _, ok := m.watch.look(); ok {
		t.Error("nothing is watched, and the watch goes on")
	}
}

// What cannot be counted is not allowed.
func TestUncountableIsEnded(t *testing.T) {
	m := newWorld(plenty)
	w := m.add("a", Usage{Bytes: mib}, Usage{})
	w.err = ErrDeep
	m.watch.look()
	if w.ended != ErrDeep.Error() {
		t.Errorf("%q", w.ended)
	}
}

// A limit that was raised counts at once, and so does one that was lowered below the usage.
func TestChangedLimitCounts(t *testing.T) {
	m := newWorld(plenty)
	w := m.add("a", Usage{Bytes: 100 * mib}, Usage{})
	w.used = Usage{50 * mib, 1}
	m.watch.look()
	s := m.watch.subjects["a"].Subject
	s.Limit.Bytes = 10 * mib
	m.watch.Set("a", s)
	m.watch.look()
	if !strings.Contains(w.ended, "50 MiB are used, and the limit is 10 MiB") {
		t.Errorf("%q", w.ended)
	}
	if used, ok := m.watch.Used("a"); !ok || used.Bytes != 50*mib {
		t.Errorf("%+v, %v", used, ok)
	}
}

// Of those without a limit, the one that fills the disk goes before the reserve is used up, and
// the large one that does not grow stays.
func TestReserveIsKept(t *testing.T) {
	for _, rate := range []Usage{{100 * mib, 100}, {1000 * mib, 1}, {0, 300_000}} {
		m := newWorld(Free{10 << 30, 1_000_000, 10 << 30})
		m.watch.SetReserve(Reserve{1024 * mib, 200_000})
		large := m.add("large", Usage{}, Usage{})
		large.used = Usage{100 << 30, 1000}
		slow := m.add("slow", Usage{Bytes: 20 << 30}, Usage{10 << 10, 0})
		fast := m.add("fast", Usage{}, rate)
		m.run(t, 10*time.Minute, func() bool { return fast.ended != "" })
		if !strings.Contains(fast.ended, "the disk is short") || large.ended != "" || slow.ended != "" {
			t.Errorf("%+v: fast %q, slow %q, large %q", rate, fast.ended, slow.ended, large.ended)
		}
		if m.free.Available < 256*mib || m.free.Inodes < 50_000 {
			t.Errorf("%+v: %d MiB and %d inodes are left", rate, m.free.Available>>20, m.free.Inodes)
		}
	}
}

// What another program of the host writes ends no sandbox.
func TestHostFillsTheDisk(t *testing.T) {
	m := newWorld(Free{10 << 30, 1_000_000, 10 << 30})
	m.watch.SetReserve(Reserve{1024 * mib, 200_000})
	a, b := m.add("a", Usage{}, Usage{}), m.add("b", Usage{Bytes: 1 << 30}, Usage{Bytes: 100})
	m.all["host"] = &writer{rate: Usage{Bytes: 100 * mib}}
	m.run(t, 10*time.Minute, func() bool { return m.free.Available < 0 })
	if a.ended != "" || b.ended != "" || a.measured < 2 {
		t.Errorf("ended: %q, %q; measured %d times", a.ended, b.ended, a.measured)
	}
}

// A sandbox with many files that writes fast after a long time of rest exceeds its limit by what it
// can write during two walks.
func TestSandboxWakesUp(t *testing.T) {
	for _, cost := range []time.Duration{20 * time.Millisecond, time.Second, 4 * time.Second} { // 1.3 million files
		for rest := range 30 {
			const rate = 1000 * mib
			m := newWorld(plenty)
			m.cost = cost
			w := m.add("a", Usage{Bytes: 10 << 30}, Usage{})
			m.run(t, time.Duration(rest)*time.Second, func() bool { return false })
			w.rate.Bytes = rate
			m.run(t, time.Hour, func() bool { return w.ended != "" })
			most := int64(float64(rate) * (2*shortest + 2*cost).Seconds())
			if over := w.used.Bytes - 10<<30; over < 0 || over > most {
				t.Errorf("walks of %v, after %d s: %d MiB too much, want at most %d", cost, rest, over>>20, most>>20)
			}
		}
	}
}

// What a walk counts twice, because it was moved meanwhile, ends no sandbox: it is counted again as
// it stands still.
func TestMovesEndNothing(t *testing.T) {
	m := newWorld(Free{10 << 30, 1_000_000, 10 << 30})
	m.watch.SetReserve(Reserve{1024 * mib, 200_000})
	ended, held := "", false
	subject := Subject{
		Measure: func(Usage) (Usage, error) {
			if held {
				return Usage{60 * mib, 1000}, nil
			}
			return Usage{120 * mib, 2000}, nil
		},
		Hold: func(context.Context) (func(), error) {
			held = true
			return func() { held = false }, nil
		},
		End: func(reason string) { ended = reason },
	}
	subject.Limit.Bytes = 100 * mib
	m.watch.Set("a", subject)
	m.watch.look()
	if used, _ := m.watch.Used("a"); ended != "" || used.Bytes != 60*mib || held {
		t.Errorf("ended %q at %+v, held %v", ended, used, held)
	}
	// Nor does it below the reserve.
	m.watch.Remove("a")
	once := subject
	once.Limit = Usage{}
	walks := 0
	once.Measure = func(Usage) (Usage, error) {
		if walks++; walks == 1 || held {
			return Usage{60 * mib, 1000}, nil
		}
		return Usage{120 * mib, 2000}, nil
	}
	m.watch.Set("b", once)
	m.all["host"] = &writer{rate: Usage{Bytes: 100 * mib}}
	m.run(t, 10*time.Minute, func() bool { return m.free.Available < 0 })
	if ended != "" || walks < 3 {
		t.Errorf("ended %q after %d walks", ended, walks)
	}
}

// A sandbox that cannot be counted is the first to go below the reserve, also if it could not be
// counted before.
func TestUncountableGoesFirst(t *testing.T) {
	for name, make := range map[string]func(*writer){
		"deep": func(w *writer) { w.err = ErrDeep },
		"many": func(w *writer) { w.used.Inodes, w.rate = countable+1, Usage{} },
	} {
		m := newWorld(Free{10 << 30, 1_000_000, 10 << 30})
		m.watch.SetReserve(Reserve{1024 * mib, 200_000})
		w, other := m.add("a", Usage{}, Usage{Bytes: 10 * mib}), m.add("b", Usage{}, Usage{Bytes: 4 * mib})
		make(w)
		m.run(t, time.Hour, func() bool { return w.ended != "" })
		if w.ended == "" || other.ended != "" || m.free.Available < 450*mib {
			t.Errorf("%s: ended %q, the other %q, %d MiB are left", name, w.ended, other.ended, m.free.Available>>20)
		}
	}
}
