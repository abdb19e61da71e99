package httpapi

import (
	"os"
	"testing"
)

// Root of the host is an operator of every daemon, and so is the daemon's own user. No other is.
func TestOperators(t *testing.T) {
	own := uint32(os.Geteuid())
	for uid, want := range map[uint32]bool{0: true, own: true, own + 1: false, unknownUID: false} {
		if p := (peer{uid: uid}); p.operator() != want || (p.tenant() == "") != want {
			t.Errorf("uid %d: operator %t, tenant %q", uid, p.operator(), p.tenant())
		}
	}
}
