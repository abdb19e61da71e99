package inside

import (
	"testing"
	"time"
)

// The other execs of a sandbox are not killed because the machine stood still while one was:
// processes that are found then, in the first round or the next, prove nothing.
func TestOthersAreSparedWhereTheMachineStoodStill(t *testing.T) {
	for _, tc := range []struct {
		fresh   bool
		elapsed time.Duration
		round   int
		want    bool
	}{
		{true, 5 * killAll, 0, false},
		{true, 5 * killAll, killRounds - 1, false},
		{true, 2 * killAll, killRounds, true},
		{false, 2 * killAll, 100, false},
		{true, killAll / 2, 100, false},
	} {
		if got := hopeless(tc.fresh, tc.elapsed, tc.round); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
}
