package runtime

import (
	"slices"
	"testing"
)

// TestPhaseTransitions judges every pair of phases. A row is the phase left, a column the phase
// entered.
func TestPhaseTransitions(t *testing.T) {
	legal := []struct{ from, to string }{
		//               c r p P s e E S d D
		{"creating", "   . x . x . . x . . x"},
		{"running", "    . . x . . x x . x ."},
		{"pausing", "    . x . x . x x . x ."},
		{"paused", "     . . . . x x x . x ."},
		{"resuming", "   . x . x . x x . x ."},
		{"ending", "     . . . . . . x . x ."},
		{"ended", "      . . . . . . . x x ."},
		{"starting", "   . x . . . . x . x ."},
		{"deleting", "   . x . x . x x . . x"},
		{"deleted", "    . . . . . . . . . ."},
	}
	if len(legal) != int(phases) {
		t.Fatalf("%d rows for %d phases", len(legal), phases)
	}
	for from, row := range legal {
		if name := phase(from).String(); name != row.from {
			t.Errorf("phase %d is called %s, want %s", from, name, row.from)
		}
		cells := slices.DeleteFunc([]byte(row.to), func(c byte) bool { return c == ' ' })
		for to := range phases {
			if got, want := phase(from).mayBecome(to), cells[to] == 'x'; got != want {
				t.Errorf("%s may become %s: %v, want %v", phase(from), to, got, want)
			}
		}
	}
}

// TestNoPhaseIsATrap checks that every phase can be reached, and that a deletion can be reached
// from every one.
func TestNoPhaseIsATrap(t *testing.T) {
	reach := func(from phase) map[phase]bool {
		seen := map[phase]bool{}
		for next := []phase{from}; len(next) > 0; {
			p := next[0]
			next = next[1:]
			if !seen[p] {
				seen[p] = true
				next = append(next, phaseTransitions[p].next...)
			}
		}
		return seen
	}
	if n := len(reach(phaseCreating)); n != int(phases) {
		t.Errorf("%d of %d phases can be reached", n, phases)
	}
	for p := range phases {
		if !reach(p)[phaseDeleted] {
			t.Errorf("a sandbox that is %s cannot be deleted", p)
		}
		if p.live() && (!p.mayBecome(phaseEnding) || !p.mayBecome(phaseEnded) || !p.mayBecome(phaseDeleting)) {
			t.Errorf("a sandbox that is %s does not end", p)
		}
	}
}
