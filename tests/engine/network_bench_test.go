package engine

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// BenchmarkCreate starts sandboxes in turn without a network and with one whose namespace was made
// ahead, so that both share what else the machine does. It reports the medians.
func BenchmarkCreate(b *testing.B) {
	testenv.RequireUserNS(b)
	f := newFixture(b)
	requireNetworks(b, f)
	d := describe(b, f)
	maker := makerOf(b, d.PID)
	b.Logf("the maker's own memory: %d KB; the launcher's: %d KB", private(b, maker), private(b, d.PID))
	_, control := listen(b)
	var took [2][]time.Duration
	for i := 0; i < b.N+1; i++ {
		for with := range 2 {
			spec := f.NewSpec(nil, fmt.Sprintf("bench%d%d", with, i))
			spec.Network = with == 1
			began := time.Now()
			st, err := f.Engine.Create(b.Context(), spec, control)
			if err != nil {
				b.Fatal(err)
			}
			if i > 0 { // the first network is not made ahead
				took[with] = append(took[with], time.Since(began))
			}
			if err := st.Pidfd.Close(); err != nil {
				b.Fatal(err)
			}
			if err := f.Engine.Delete(b.Context(), spec.ID); err != nil {
				b.Fatal(err)
			}
			if spec.Network {
				filled(b, d.PID, 0)
			}
		}
	}
	var medians [2]float64
	for i, unit := range []string{"without-ms", "with-ms"} {
		slices.Sort(took[i])
		medians[i] = took[i][len(took[i])/2].Seconds() * 1000
		b.ReportMetric(medians[i], unit)
	}
	b.ReportMetric(medians[1]/medians[0], "ratio")
	b.ReportMetric(0, "ns/op")
	b.Logf("after use: the maker's own memory: %d KB; the launcher's: %d KB", private(b, maker), private(b, d.PID))
}

func makerOf(t testing.TB, parent int) int {
	t.Helper()
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", parent, parent))
	if err != nil {
		t.Fatal(err)
	}
	for word := range strings.FieldsSeq(string(list)) {
		if line, _ := os.ReadFile("/proc/" + word + "/cmdline"); strings.Contains(string(line), "network-confined") {
			pid, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("process %d has no maker: %q", parent, list)
	return 0
}

// private returns the memory of a process that it shares with no other, in KB.
func private(t testing.TB, pid int) (kb int) {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Private_"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[1])
			if err != nil {
				t.Fatal(err)
			}
			kb += n
		}
	}
	return kb
}
