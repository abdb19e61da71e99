package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Aggregate bounds all sandboxes of a daemon together, and the launcher with them. The bounds are
// those of [Subtree.Path], whose files the launcher cannot write to where the daemon is root.
type Aggregate struct {
	Memory    int64 // bytes; zero means no bound
	NoSwap    bool  // nothing of it goes to swap
	Pids      int64 // processes and threads; zero means no bound
	CPUWeight int   // of the default 100, against the daemon beside it; zero means the default
}

// aggregateSetting is a setting of an aggregate, and whether the aggregate asks for it: a file that
// is to have its default may be missing.
type aggregateSetting struct {
	Setting
	wanted bool
}

func (a Aggregate) settings() []aggregateSetting {
	orMax := func(n int64) string {
		if n <= 0 {
			return "max"
		}
		return strconv.FormatInt(n, 10)
	}
	swap, weight := "max", "100"
	if a.NoSwap {
		swap = "0"
	}
	if a.CPUWeight > 0 {
		weight = strconv.Itoa(a.CPUWeight)
	}
	return []aggregateSetting{
		// Without swap before the bound of memory: what that takes back must not go there.
		{Setting{"memory.swap.max", swap}, false}, // a kernel without swap has no such file
		{Setting{fileMemoryMax, orMax(a.Memory)}, a.Memory > 0},
		{Setting{"pids.max", orMax(a.Pids)}, a.Pids > 0},
		{Setting{"cpu.weight", weight}, a.CPUWeight > 0},
	}
}

// Hold sets the bounds of all sandboxes together and reads them back. Files that lack, of a
// controller that is not delegated, are an error if a bound is asked for.
func (s Subtree) Hold(ctx context.Context, a Aggregate) error {
	var changes []Change
	for _, want := range a.settings() {
		if s.Path == "" {
			if want.wanted {
				return fmt.Errorf("bound all sandboxes together: %s: there is no cgroup for them; sandboxd doctor says how to get one", want.File)
			}
			continue
		}
		now, err := os.ReadFile(filepath.Join(s.Path, want.File))
		switch {
		case errors.Is(err, fs.ErrNotExist) && !want.wanted:
			continue
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("bound all sandboxes together: %s: the controller is not delegated; sandboxd doctor says how to get it", want.File)
		case err != nil:
			return fmt.Errorf("bound all sandboxes together: %w", err)
		}
		if from := strings.TrimSpace(string(now)); !holds(want.File, from, want.Value) {
			changes = append(changes, Change{File: want.File, From: from, To: want.Value})
		}
	}
	if err := Apply(ctx, s.Path, changes); err != nil {
		return fmt.Errorf("bound all sandboxes together: %w", err)
	}
	return nil
}

// Ceiling returns the least bound that the cgroups above the sandboxes have in this file, such as
// memory.max; zero if none has one.
func (s Subtree) Ceiling(file string) int64 {
	least := int64(0)
	if s.Path == "" {
		return 0
	}
	for dir := filepath.Dir(s.Path); len(dir) >= len(s.Mount); dir = filepath.Dir(dir) {
		if n, ok := Value(dir, file); ok && n > 0 && (least == 0 || n < least) {
			least = n
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return least
}
