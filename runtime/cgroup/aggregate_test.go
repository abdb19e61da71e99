package cgroup

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestAggregateSettings(t *testing.T) {
	for _, test := range []struct {
		all    Aggregate
		want   []string
		wanted []bool
	}{
		{Aggregate{}, []string{"memory.swap.max=max", "memory.max=max", "pids.max=max", "cpu.weight=100"}, []bool{false, false, false, false}},
		{
			Aggregate{Memory: 4096, NoSwap: true, Pids: 7, CPUWeight: 50},
			[]string{"memory.swap.max=0", "memory.max=4096", "pids.max=7", "cpu.weight=50"},
			[]bool{false, true, true, true},
		},
	} {
		var got []string
		var wanted []bool
		for _, s := range test.all.settings() {
			got, wanted = append(got, s.File+"="+s.Value), append(wanted, s.wanted)
		}
		if !slices.Equal(got, test.want) || !slices.Equal(wanted, test.wanted) {
			t.Errorf("%+v: %q, %v", test.all, got, wanted)
		}
	}
}

// A bound that is asked for and cannot be had is an error; without one nothing is missed.
func TestAggregateThatCannotBeHeld(t *testing.T) {
	for _, s := range []Subtree{{}, {Path: t.TempDir()}} {
		if err := s.Hold(t.Context(), Aggregate{}); err != nil {
			t.Error(err)
		}
		for _, all := range []Aggregate{{Memory: 4096}, {Pids: 7}, {CPUWeight: 50}} {
			if err := s.Hold(t.Context(), all); err == nil || !strings.Contains(err.Error(), "sandboxd doctor") {
				t.Errorf("%+v: %v", all, err)
			}
		}
	}
}

func TestCeilingIsTheLeastAbove(t *testing.T) {
	mount := t.TempDir()
	path := filepath.Join(mount, "a", "b", "sandboxd-1")
	if err := os.MkdirAll(path, 0o700); err != nil {
		t.Fatal(err)
	}
	for dir, value := range map[string]string{"": "max\n", "a": "5000\n", "a/b": "7000\n", "a/b/sandboxd-1": "1\n"} {
		if err := os.WriteFile(filepath.Join(mount, dir, "memory.max"), []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := Subtree{Mount: mount, Path: path}
	if got, none := s.Ceiling("memory.max"), s.Ceiling("pids.max"); got != 5000 || none != 0 || (Subtree{}).Ceiling("memory.max") != 0 {
		t.Errorf("%d, %d", got, none)
	}
}
