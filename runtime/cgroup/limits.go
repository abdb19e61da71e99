package cgroup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Setting is what one file of a cgroup shall hold.
type Setting struct {
	File  string `json:"file"`
	Value string `json:"value"`
}

// Change leads from one setting of a file to another.
type Change struct{ File, From, To string }

// Changes returns the changes from one list of settings to another. A file that only one of them
// has is not changed.
func Changes(from, to []Setting) []Change {
	held := make(map[string]string, len(from))
	for _, s := range from {
		held[s.File] = s.Value
	}
	var all []Change
	for _, s := range to {
		if was, ok := held[s.File]; ok && was != s.Value {
			all = append(all, Change{File: s.File, From: was, To: s.Value})
		}
	}
	return all
}

// ErrInUse means that a limit lies below the usage, and the kernel cannot reclaim the difference.
var ErrInUse = errors.New("more than that is in use")

// The files whose values need more than a write and a comparison.
const (
	fileMemoryMax  = "memory.max"
	fileMemoryHigh = "memory.high"
	fileCPUs       = "cpuset.cpus"
	fileIOMax      = "io.max"
)

// Apply makes the changes in order and reads each back: a value that the kernel took for another
// one is an error. On error all files are as before. Apply checks the context before each change:
// no change begins after its end, and earlier ones are undone.
func Apply(ctx context.Context, dir string, changes []Change) error {
	for i, c := range changes {
		err := apply(ctx, dir, c)
		if err == nil {
			continue
		}
		err = fmt.Errorf("set %s to %q: %w", c.File, c.To, err)
		// The failed one too: the kernel may have taken it, for less than it says.
		for _, done := range slices.Backward(changes[:i+1]) {
			if _, uerr := set(dir, done.File, done.From); uerr != nil {
				err = errors.Join(err, fmt.Errorf("set %s back to %q: %w", done.File, done.From, uerr))
			}
		}
		return err
	}
	return nil
}

func apply(ctx context.Context, dir string, c Change) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.File == fileMemoryMax && c.To != "max" {
		if err := makeRoom(ctx, dir, c.To); err != nil {
			return err
		}
	}
	value, err := set(dir, c.File, c.To)
	if err != nil {
		return err
	}
	got, err := os.ReadFile(filepath.Join(dir, c.File))
	if err != nil {
		return err
	}
	if !holds(c.File, string(got), value) {
		return fmt.Errorf("the kernel holds %q", strings.TrimSpace(string(got)))
	}
	if c.File == fileCPUs {
		return onlineCPUs(dir, value)
	}
	return nil
}

// set writes a value and returns the value written. The kernel does not let a cgroup with processes
// have an empty list of cores again: such a cgroup gets the list of all available ones.
func set(dir, file, value string) (string, error) {
	err := write(dir, file, value)
	if file != fileCPUs || value != "" || !errors.Is(err, unix.ENOSPC) {
		return value, err
	}
	all, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "cpuset.cpus.effective"))
	if err != nil {
		return "", err
	}
	value = strings.TrimSpace(string(all))
	return value, write(dir, file, value)
}

// makeRoom reclaims memory beyond a limit that is about to be set. A memory.max written below the
// usage makes the kernel kill until it fits. A memory.high only reclaims, and slows down processes
// that go on allocating, so that the usage does not grow meanwhile.
func makeRoom(ctx context.Context, dir, limit string) error {
	most, err := strconv.ParseInt(limit, 10, 64)
	if err != nil {
		return err
	}
	used, ok := Value(dir, "memory.current")
	if !ok || used <= most {
		return nil
	}
	high, err := os.ReadFile(filepath.Join(dir, fileMemoryHigh))
	if err != nil {
		return err
	}
	defer func() {
		// The old value goes back last, when memory.max holds or is given up; it was valid before.
		_ = write(dir, fileMemoryHigh, strings.TrimSpace(string(high)))
	}()
	for range 3 { // the kernel gives up early when little comes back, and when a signal arrives
		if err := write(dir, fileMemoryHigh, limit); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err // reclaim to a slow disk takes its time
		}
		if used, ok = Value(dir, "memory.current"); !ok || used <= most {
			return write(dir, fileMemoryMax, limit) // before memory.high lets it grow again
		}
	}
	return fmt.Errorf("%w: %d bytes are, and could not be taken back", ErrInUse, used)
}

func write(dir, file, value string) error {
	if value == "" {
		value = "\n" // a write of nothing would not reach the kernel
	}
	path := filepath.Join(dir, file)
	// Not os.OpenFile: cgroup files can be polled, so Go makes them non-blocking, and Linux 6.16 and
	// later then take a memory.high or memory.max without reclaiming anything.
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	// One write: the kernel takes each for a whole value.
	if _, err = unix.Write(fd, []byte(value)); err != nil {
		err = &os.PathError{Op: "write", Path: path, Err: err}
	}
	return errors.Join(err, unix.Close(fd))
}

// holds reports whether the kernel's text means the value that was written, given how the kernel
// rounds and formats. It is pure.
func holds(file, got, want string) bool {
	got = strings.TrimSpace(got)
	switch {
	case file == fileIOMax:
		device, values, _ := strings.Cut(want, " ")
		shown := "rbps=max wbps=max riops=max wiops=max" // devices without a limit are not listed
		for line := range strings.Lines(got) {
			if d, v, _ := strings.Cut(strings.TrimSpace(line), " "); d == device {
				shown = v
			}
		}
		return maps.Equal(pairs(shown), pairs(values))
	case file == "io.weight" || file == "io.bfq.weight":
		for line := range strings.Lines(got) {
			if strings.TrimSpace(line) == want || strings.TrimSpace(line) == "default "+want {
				return true
			}
		}
		return false
	case file == fileCPUs:
		a, aerr := ParseCPUs(got)
		b, berr := ParseCPUs(want)
		return aerr == nil && berr == nil && maps.Equal(a, b)
	case strings.HasPrefix(file, "memory."):
		if n, err := strconv.ParseInt(want, 10, 64); err == nil && n > 1 {
			page := int64(os.Getpagesize()) // the kernel counts whole pages
			want = strconv.FormatInt(n/page*page, 10)
		}
	}
	return got == want
}

// pairs are the words "key=value" of a line.
func pairs(line string) map[string]string {
	m := make(map[string]string)
	for word := range strings.FieldsSeq(line) {
		k, v, _ := strings.Cut(word, "=")
		m[k] = v
	}
	return m
}

// onlineCPUs refuses cores that the cgroup does not get: the kernel accepts any that could exist,
// and without one that does it gives the parent's.
func onlineCPUs(dir, list string) error {
	want, err := ParseCPUs(list)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, "cpuset.cpus.effective"))
	if err != nil {
		return err
	}
	have, err := ParseCPUs(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	for cpu := range want {
		if !have[cpu] {
			above, _ := os.ReadFile(filepath.Join(filepath.Dir(dir), "cpuset.cpus.effective")) // for the message only
			return fmt.Errorf("core %d is not there to be used; there are %s", cpu, strings.TrimSpace(string(above)))
		}
	}
	return nil
}

// maxCPU is beyond every kernel's NR_CPUS.
const maxCPU = 8191

// ParseCPUs reads a list of cores as cpuset.cpus has it: "0-1,3". The empty list is none.
func ParseCPUs(list string) (map[int]bool, error) {
	cpus := make(map[int]bool)
	if list == "" {
		return cpus, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		from, err := parseCPU(first)
		if err != nil {
			return nil, fmt.Errorf("list of cores %q: %w", list, err)
		}
		to := from
		if isRange {
			if to, err = parseCPU(last); err != nil {
				return nil, fmt.Errorf("list of cores %q: %w", list, err)
			}
		}
		if to < from {
			return nil, fmt.Errorf("list of cores %q: %q goes backwards", list, part)
		}
		for c := from; c <= to; c++ {
			cpus[c] = true
		}
	}
	return cpus, nil
}

func parseCPU(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n > maxCPU {
		return 0, fmt.Errorf("%q is not a number of a core", s)
	}
	return int(n), nil
}
