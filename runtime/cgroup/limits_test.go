package cgroup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParseCPUs(t *testing.T) {
	for list, want := range map[string][]int{
		"": {}, "0": {0}, "0-1,3": {0, 1, 3}, "3,0-1": {0, 1, 3}, "8191": {8191}, "1-1": {1},
	} {
		got, err := ParseCPUs(list)
		if err != nil || len(got) != len(want) {
			t.Errorf("%q: %v, %v", list, got, err)
		}
		for _, c := range want {
			if !got[c] {
				t.Errorf("%q has no %d", list, c)
			}
		}
	}
	for _, list := range []string{",", "0,", "a", "1-", "-1", "2-1", "0--1", "0-3:1/2", " 0", "0\n", "8192", "99999999999999999999", "+1", "0x1"} {
		if got, err := ParseCPUs(list); err == nil {
			t.Errorf("%q is %v", list, got)
		}
	}
}

// The kernel rounds and formats; a value that it does not hold is found all the same.
func TestHoldsKnowsHowTheKernelWrites(t *testing.T) {
	for _, c := range []struct {
		file, got, want string
		holds           bool
	}{
		{"memory.max", "67108864\n", "67108864", true},
		{"memory.max", "67108864\n", "67108865", true}, // whole pages
		{"memory.max", "max\n", "67108864", false},
		{"memory.max", "67104768\n", "67108864", false},
		{"memory.oom.group", "0\n", "1", false},
		{"cpu.max", "50000 100000\n", "50000 100000", true},
		{"cpu.max", "max 100000\n", "50000 100000", false},
		{"cpuset.cpus", "0-2\n", "0,1,2", true},
		{"cpuset.cpus", "\n", "", true},
		{"cpuset.cpus", "0\n", "0-1", false},
		{"io.max", "8:0 rbps=1 wbps=max riops=max wiops=max\n259:0 rbps=max wbps=5 riops=max wiops=7\n", "259:0 rbps=max wbps=5 riops=max wiops=7", true},
		{"io.max", "259:0 rbps=max wbps=5 riops=max wiops=max\n", "259:0 rbps=max wbps=5 riops=max wiops=7", false},
		{"io.max", "", "259:0 rbps=max wbps=max riops=max wiops=max", true},
		{"io.max", "", "259:0 rbps=max wbps=5 riops=max wiops=max", false},
		{"io.weight", "default 50\n8:0 100\n", "50", true},
		{"io.bfq.weight", "50\n", "50", true},
		{"io.weight", "default 100\n8:0 50\n", "50", false},
	} {
		if got := holds(c.file, c.got, c.want); got != c.holds {
			t.Errorf("%s: %q for %q: %v", c.file, c.got, c.want, got)
		}
	}
}

// fake is a directory with the files of a cgroup, which take whatever is written.
func fake(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, value := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A change that fails takes those before it back.
func TestApplyIsWholeOrNothing(t *testing.T) {
	dir := fake(t, map[string]string{"pids.max": "00", "cpu.weight": "000"})
	changes := []Change{{"pids.max", "10", "20"}, {"cpu.weight", "100", "300"}}
	if err := Apply(t.Context(), dir, changes); err != nil {
		t.Fatal(err)
	}
	err := Apply(t.Context(), dir, append([]Change{{"pids.max", "20", "40"}, {"cpu.weight", "300", "100"}}, Change{"memory.high", "max", "5"}))
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), `set memory.high to "5"`) {
		t.Errorf("a file that is not there: %v", err)
	}
	for file, want := range map[string]string{"pids.max": "20", "cpu.weight": "300"} {
		if got, _ := os.ReadFile(filepath.Join(dir, file)); string(got) != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
	// The write worked and something else stands there: a kernel that takes a value for another one.
	if err := os.Remove(filepath.Join(dir, "cpu.weight")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/null", filepath.Join(dir, "cpu.weight")); err != nil {
		t.Fatal(err)
	}
	if err := Apply(t.Context(), dir, []Change{{"cpu.weight", "300", "100"}}); err == nil || !strings.Contains(err.Error(), "the kernel holds") {
		t.Errorf("a value that is not held: %v", err)
	}
}

// The client has gone by then, and was told that nothing is changed.
func TestApplyDoesNothingAfterItsContext(t *testing.T) {
	dir := fake(t, map[string]string{"pids.max": "10"})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Apply(ctx, dir, []Change{{"pids.max", "10", "20"}}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: %v", err)
	}
	if got, _ := os.ReadFile(filepath.Join(dir, "pids.max")); string(got) != "10" {
		t.Errorf("pids.max is %q", got)
	}
	// While memory is reclaimed: earlier changes are undone.
	dir = fake(t, map[string]string{"pids.max": "10", "memory.max": "200", "memory.high": "max", "memory.current": "150"})
	err := Apply(&endsAfter{Context: t.Context(), n: 2}, dir, []Change{{"pids.max", "10", "20"}, {"memory.max", "200", "100"}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it ends half way: %v", err)
	}
	for file, want := range map[string]string{"pids.max": "10", "memory.max": "200", "memory.high": "max"} {
		if got, _ := os.ReadFile(filepath.Join(dir, file)); string(got) != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
}

// endsAfter has ended when it was asked n times.
type endsAfter struct {
	context.Context //nolint:containedctx // it is one

	n int
}

func (c *endsAfter) Err() error {
	if c.n--; c.n < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

func TestMemoryInUseIsNotLimitedAway(t *testing.T) {
	files := map[string]string{"memory.max": "134217728", "memory.high": "max", "memory.current": "67108864"}
	dir := fake(t, files)
	err := Apply(t.Context(), dir, []Change{{"memory.max", "134217728", "33554432"}})
	if !errors.Is(err, ErrInUse) {
		t.Errorf("half of what is in use: %v", err)
	}
	for _, file := range []string{"memory.max", "memory.high"} {
		// A fake file keeps the end of a longer value.
		if got, _ := os.ReadFile(filepath.Join(dir, file)); !strings.HasPrefix(string(got), files[file]) {
			t.Errorf("%s is %q afterwards", file, got)
		}
	}
	if err := Apply(t.Context(), dir, []Change{{"memory.max", "134217728", "100663296"}}); err != nil && !strings.Contains(err.Error(), "holds") {
		t.Errorf("more than is in use: %v", err)
	}
}

func TestChangesAreOfFilesThatBothHave(t *testing.T) {
	got := Changes([]Setting{{"a", "1"}, {"b", "2"}, {"c", "3"}}, []Setting{{"d", "9"}, {"c", "4"}, {"b", "2"}, {"a", "5"}})
	if want := []Change{{"c", "3", "4"}, {"a", "1", "5"}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestNested(t *testing.T) {
	dir := fake(t, map[string]string{
		"io.stat":      "8:0 \n259:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n",
		"cpu.pressure": "some avg10=1.50 avg60=0.00 avg300=0.00 total=12345\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"memory.peak":  "max\n", "pids.current": "7\n",
	})
	if got := ReadNested(dir, "io.stat"); len(got) != 1 || got[0].Key != "259:0" || got[0].Values["wios"] != "4" {
		t.Errorf("io.stat: %v", got)
	}
	if got := ReadNested(dir, "cpu.pressure"); len(got) != 2 || got[0].Values["avg10"] != "1.50" || got[1].Key != "full" {
		t.Errorf("cpu.pressure: %v", got)
	}
	if got := ReadNested(dir, "memory.pressure"); got != nil {
		t.Errorf("a file that is not there: %v", got)
	}
	if n, ok := Value(dir, "pids.current"); n != 7 || !ok {
		t.Errorf("pids.current: %d, %v", n, ok)
	}
	for _, file := range []string{"memory.peak", "nothing"} {
		if n, ok := Value(dir, file); ok {
			t.Errorf("%s has the value %d", file, n)
		}
	}
}
