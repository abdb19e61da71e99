// Package testresult reads what test binaries print and writes it as the files that other programs
// read: test2json's events in, counts and JUnit XML out. The lanes and the test bed judge by the
// same reading.
package testresult

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Outcome is how a test ended, in test2json's words.
type Outcome string

// The outcomes. A test that began and never ended has failed.
const (
	Pass Outcome = "pass"
	Fail Outcome = "fail"
	Skip Outcome = "skip"
)

// Test is one test or subtest.
type Test struct {
	Name    string
	Outcome Outcome
	Elapsed time.Duration
	Output  string
}

// Reason is why a test was skipped: the last line that it logged.
func (t Test) Reason() string {
	remark := "no reason given"
	for line := range strings.Lines(t.Output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "--- ") && !strings.HasPrefix(line, "=== ") {
			remark = line
		}
	}
	return remark
}

// Package holds the results of one package's tests for one user.
type Package struct {
	Path    string // import path
	Tests   []Test // in the order in which they began
	Elapsed time.Duration
	// Processors is the time that the binary, and those of its descendants that were waited for, had
	// of them; 0 is unknown.
	Processors time.Duration
	Output     string // what belongs to no test: a panic, a race, the words of TestMain
	Err        error  // the binary did not end as a test binary should
}

// Count counts the tests that ended so.
func (p Package) Count(o Outcome) int {
	n := 0
	for _, t := range p.Tests {
		if t.Outcome == o {
			n++
		}
	}
	return n
}

// OK says that nothing failed.
func (p Package) OK() bool { return p.Err == nil && p.Count(Fail) == 0 }

// Flags make a test binary print what [Read] reads.
func Flags(timeout time.Duration, run string) []string {
	flags := []string{"-test.v=test2json", "-test.timeout=" + timeout.String(), "-test.paniconexit0"}
	if run != "" {
		flags = append(flags, "-test.run="+run)
	}
	return flags
}

// Read makes a result of the output of a test binary. ended is the error that it ended with, or
// nil.
func Read(ctx context.Context, path string, output []byte, ended error) Package {
	convert := exec.CommandContext(ctx, "go", "tool", "test2json", "-t", "-p", path)
	convert.Stdin = bytes.NewReader(output)
	events, err := convert.Output()
	if err != nil {
		return Package{Path: path, Err: fmt.Errorf("read the output of %s: test2json: %w", path, err)}
	}
	p := parse(path, events)
	if ended != nil && p.Err == nil && p.Count(Fail) == 0 {
		p.Err = fmt.Errorf("the test binary ended with: %w", ended)
	}
	return p
}

// parse reads the output of test2json.
func parse(path string, events []byte) Package {
	p := Package{Path: path}
	at := map[string]int{}
	output := map[string]*strings.Builder{"": {}}
	scan := bufio.NewScanner(bytes.NewReader(events))
	scan.Buffer(nil, 16<<20)
	for scan.Scan() {
		var e struct {
			Action, Test, Output string
			Elapsed              float64
		}
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			p.Err = fmt.Errorf("read test2json: %w", err)
			return p
		}
		if _, known := output[e.Test]; !known {
			output[e.Test] = new(strings.Builder)
			at[e.Test] = len(p.Tests)
			p.Tests = append(p.Tests, Test{Name: e.Test, Outcome: Fail})
		}
		switch {
		case e.Action == "output":
			output[e.Test].WriteString(e.Output)
		case e.Test != "" && (e.Action == string(Pass) || e.Action == string(Fail) || e.Action == string(Skip)):
			t := &p.Tests[at[e.Test]]
			t.Outcome, t.Elapsed = Outcome(e.Action), time.Duration(e.Elapsed*float64(time.Second))
		}
	}
	if err := scan.Err(); err != nil {
		p.Err = fmt.Errorf("read test2json: %w", err)
	}
	for i, t := range p.Tests {
		p.Tests[i].Output = output[t.Name].String()
	}
	p.Output = output[""].String()
	return p
}

// FileName returns the base name of a package's binary, output and end. pkg is its import path or
// its directory in the module.
func FileName(pkg string) string {
	if _, below, ok := strings.Cut(pkg, "/sandboxd/sandboxd/"); ok {
		pkg = below
	}
	return strings.ReplaceAll(strings.Trim(pkg, "/"), "/", "-")
}

// ReadDir reads the files of the test bed's suite.sh: for each package NAME.out, the output of its
// tests, and NAME.end, their exit status and duration in seconds. Without the latter they were cut
// off, or never begun.
func ReadDir(ctx context.Context, dir string, paths []string) []Package {
	var packages []Package
	for _, path := range paths {
		file := filepath.Join(dir, FileName(path))
		output, err := os.ReadFile(file + ".out")
		if err != nil {
			packages = append(packages, Package{Path: path, Err: fmt.Errorf("its tests were not begun: %w", err)})
			continue
		}
		var code int
		var seconds float64
		end, err := os.ReadFile(file + ".end")
		if err == nil {
			_, err = fmt.Sscan(string(end), &code, &seconds)
		}
		switch {
		case err != nil:
			err = fmt.Errorf("its tests were cut off: %w", err)
		case code != 0:
			err = fmt.Errorf("exit status %d", code)
		}
		p := Read(ctx, path, output, err)
		p.Elapsed = time.Duration(seconds * float64(time.Second))
		packages = append(packages, p)
	}
	return packages
}
