package cgroup

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Value reads a file that holds one number. A file that is not there, or holds something else, has
// none.
func Value(dir, file string) (int64, bool) {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	return n, err == nil
}

// Keyed reads a file of lines "key value". It is empty where the file is not there.
func Keyed(dir, file string) map[string]int64 {
	values := make(map[string]int64)
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return values
	}
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseInt(value, 10, 64); err == nil {
			values[key] = n
		}
	}
	return values
}

// Nested are the values of one line of [ReadNested].
type Nested struct {
	Key    string
	Values map[string]string
}

// ReadNested reads a file of lines "key name=value name=value...", such as io.stat (a line a
// device) and the pressure files (one for "some", one for "full"), in the order of the lines. A
// kernel without PSI, or with it switched off, has none.
func ReadNested(dir, file string) []Nested {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil
	}
	var lines []Nested
	for line := range strings.Lines(string(data)) {
		key, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		// io.stat names devices of which it has nothing to tell.
		if values := pairs(rest); len(values) > 0 {
			lines = append(lines, Nested{Key: key, Values: values})
		}
	}
	return lines
}
