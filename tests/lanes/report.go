package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// packageResult is what one package's tests did in one lane.
type packageResult struct {
	passed, failed int               // tests and subtests
	skipped        map[string]string // test -> the reason it gave
	ran            map[string]bool   // tests that passed or failed
	failures       []string          // output of those that failed
	elapsed        time.Duration
	err            error // the binary did not end as a test binary should
}

// parseEvents reads the output of test2json.
func parseEvents(events []byte) packageResult {
	r := packageResult{skipped: map[string]string{}, ran: map[string]bool{}}
	output := map[string]*strings.Builder{}
	scan := bufio.NewScanner(bytes.NewReader(events))
	scan.Buffer(nil, 16<<20)
	for scan.Scan() {
		var e struct{ Action, Test, Output string }
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			r.err = fmt.Errorf("read test2json: %w", err)
			return r
		}
		text := output[e.Test]
		if text == nil {
			text = new(strings.Builder)
			output[e.Test] = text
		}
		switch e.Action {
		case "output":
			text.WriteString(e.Output)
		case "pass":
			if e.Test != "" {
				r.passed++
				r.ran[e.Test] = true
			}
		case "skip":
			if e.Test != "" {
				r.skipped[e.Test] = lastRemark(text.String())
			}
		case "fail":
			if e.Test != "" {
				r.failed++
				r.ran[e.Test] = true
				r.failures = append(r.failures, text.String())
			} else if r.failed == 0 {
				r.failures = append(r.failures, text.String())
			}
		}
	}
	return r
}

// lastRemark is the last line that the test itself logged: the reason given to Skip.
func lastRemark(output string) string {
	remark := "no reason given"
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "--- ") && !strings.HasPrefix(line, "=== ") {
			remark = line
		}
	}
	return remark
}

// results gathers every package's result in every lane. Its methods may be called from several goroutines.
type results struct {
	lanes []*lane

	mu sync.Mutex
	by map[string]map[string]packageResult // package -> lane -> result
}

func newResults(lanes []*lane) *results {
	return &results{lanes: lanes, by: map[string]map[string]packageResult{}}
}

func (rs *results) add(l *lane, p *testPackage, r packageResult) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.by[p.Path] == nil {
		rs.by[p.Path] = map[string]packageResult{}
	}
	rs.by[p.Path][l.Name] = r
	// As `go test` writes it, because that is what people and machines look for.
	verdict := "ok  "
	if r.failed > 0 || r.err != nil {
		verdict = "FAIL"
	}
	fmt.Printf("%s\t%s\t%.3fs\t(%s: %d passed, %d failed, %d skipped)\n",
		verdict, p.Path, r.elapsed.Seconds(), l.Name, r.passed, r.failed, len(r.skipped))
	for _, text := range r.failures {
		fmt.Println(indent(text))
	}
	if r.err != nil {
		fmt.Println(indent(r.err.Error()))
	}
}

func indent(s string) string {
	return "    " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n    ")
}

// report writes the summary and says whether all is well. A narrowed run is not judged by what it left out.
func (rs *results) report(w io.Writer, narrowed bool) bool {
	ok := true
	var passed, failed, skipped int

	fmt.Fprintf(w, "\n== summary: tests passed / failed / skipped\n\n")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(table, "package")
	for _, l := range rs.lanes {
		fmt.Fprintf(table, "\t%s", l.Name)
	}
	fmt.Fprintln(table)
	for _, pkg := range sortedKeys(rs.by) {
		fmt.Fprint(table, shortName(pkg))
		for _, l := range rs.lanes {
			r, did := rs.by[pkg][l.Name]
			switch {
			case !did:
				fmt.Fprint(table, "\t-")
			case r.err != nil:
				fmt.Fprint(table, "\tbroken")
				failed++
			default:
				fmt.Fprintf(table, "\t%d / %d / %d", r.passed, r.failed, len(r.skipped))
			}
			passed, failed, skipped = passed+r.passed, failed+r.failed, skipped+len(r.skipped)
		}
		fmt.Fprintln(table)
	}
	if err := table.Flush(); err != nil {
		ok = false
	}

	for _, l := range rs.lanes {
		if l.Unavailable != "" {
			fmt.Fprintf(w, "\nlane %s was not run: %s\n", l.Name, l.Unavailable)
			narrowed = true // its own tests were skipped for a good reason
		}
	}
	if bad := rs.skippedEverywhere(w); len(bad) > 0 && !narrowed {
		fmt.Fprintf(w, "\nskipped in every lane that ran, and not on the list of expected skips:\n  %s\n", strings.Join(bad, "\n  "))
		failed += len(bad)
	}
	// The form that does not depend on the language of the tests.
	fmt.Fprintf(w, "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return ok && failed == 0 && passed > 0
}

// skippedEverywhere lists the tests that no lane ran and that are not expected to be skipped; the expected ones are
// written with their reasons.
func (rs *results) skippedEverywhere(w io.Writer) []string {
	var bad, expected []string
	for _, pkg := range sortedKeys(rs.by) {
		reasons, ran := map[string]string{}, map[string]bool{}
		for _, r := range rs.by[pkg] {
			maps.Copy(reasons, r.skipped)
			maps.Copy(ran, r.ran)
		}
		for _, test := range sortedKeys(reasons) {
			if ran[test] {
				continue
			}
			name := shortName(pkg) + "." + test
			if reason, ok := expectedSkip(name); ok {
				expected = append(expected, name+": "+reason)
			} else {
				bad = append(bad, name+": "+reasons[test])
			}
		}
	}
	if len(expected) > 0 {
		slices.Sort(expected)
		fmt.Fprintf(w, "\nskipped in every lane, as expected:\n  %s\n", strings.Join(expected, "\n  "))
	}
	return bad
}
