package functional

import (
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// common is the daemon of all tests that test no life cycle of one and look at their own sandboxes
// only.
var common harness.Shared

func TestMain(m *testing.M) { os.Exit(common.Stop(m.Run())) }

// shared returns the common daemon. The test runs in parallel with others of it.
func shared(t *testing.T) *harness.Daemon {
	t.Helper()
	t.Parallel()
	testenv.RequireUserNS(t)
	return common.Daemon(t)
}
