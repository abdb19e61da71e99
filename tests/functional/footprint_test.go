package functional

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The daemon's binary and its idle resident set stay small.
func TestFootprint(t *testing.T) {
	testenv.SameForAll(t)
	const maxBinary, maxResident = 30_000_000, 24 << 10
	info, err := os.Stat(harness.Program(t, "sandboxd"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > maxBinary {
		t.Errorf("sandboxd has %d bytes, and %d at most", info.Size(), maxBinary)
	}
	d := harness.Start(t, harness.Options{})
	d.System(t) // it has answered a request
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", d.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "\nRss:")
	var resident int
	if _, err := fmt.Sscan(after, &resident); err != nil {
		t.Fatal(err)
	}
	if resident > maxResident {
		t.Errorf("an idle daemon has %d KiB resident, and %d at most\n%s", resident, maxResident, text)
	}
}
