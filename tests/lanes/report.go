package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/testresult"
)

// results gathers every package's result in every lane. Its methods may be called from several
// goroutines.
type results struct {
	lanes []*lane

	mu sync.Mutex
	by map[string]map[string]testresult.Package // package -> lane -> result
}

func newResults(lanes []*lane) *results {
	return &results{lanes: lanes, by: map[string]map[string]testresult.Package{}}
}

// add adds a result and writes what came of it.
func (rs *results) add(l *lane, r testresult.Package) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.by[r.Path] == nil {
		rs.by[r.Path] = map[string]testresult.Package{}
	}
	rs.by[r.Path][l.Name] = r
	// As `go test` writes it, because that is what people and machines look for.
	verdict := "ok  "
	if !r.OK() {
		verdict = "FAIL"
	}
	fmt.Printf("%s\t%s\t%.3fs\t(%s: %d passed, %d failed, %d skipped; processors %s)\n", verdict, r.Path, r.Elapsed.Seconds(), l.Name,
		r.Count(testresult.Pass), r.Count(testresult.Fail), r.Count(testresult.Skip), r.Processors.Round(100*time.Millisecond))
	for _, t := range r.Tests {
		if t.Outcome == testresult.Fail {
			fmt.Println(indent(t.Output))
		}
	}
	if r.Err != nil {
		fmt.Println(indent(r.Output + r.Err.Error()))
	}
}

// addAll adds the results of lanes of the bed.
func (rs *results) addAll(its map[*lane][]testresult.Package) {
	for l, packages := range its {
		for _, r := range packages {
			rs.add(l, r)
		}
	}
}

// of are the results of one lane, sorted by package.
func (rs *results) of(l *lane) testresult.Lane {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	its := testresult.Lane{Name: l.Name}
	for _, pkg := range sortedKeys(rs.by) {
		if r, did := rs.by[pkg][l.Name]; did {
			its.Packages = append(its.Packages, r)
		}
	}
	return its
}

func indent(s string) string {
	return "    " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n    ")
}

// report writes the summary and reports whether all is well. A narrowed run is not judged by the
// tests that it left out.
func (rs *results) report(w io.Writer, o options) bool {
	ok, narrowed := true, o.narrowed()
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
			p, f, s := r.Count(testresult.Pass), r.Count(testresult.Fail), r.Count(testresult.Skip)
			switch {
			case !did:
				fmt.Fprint(table, "\t-")
			case r.Err != nil:
				fmt.Fprint(table, "\tbroken")
				failed++
			default:
				fmt.Fprintf(table, "\t%d / %d / %d", p, f, s)
			}
			passed, failed, skipped = passed+p, failed+f, skipped+s
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
	if left := rs.leftToSoak(); len(left) > 0 {
		fmt.Fprintf(w, "\nleft to `make soak`:\n  %s\n", strings.Join(left, "\n  "))
		if o.soak {
			fmt.Fprintln(w, "which this is: SANDBOXD_TEST_SOAK did not reach them")
			failed += len(left)
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

// skips returns the tests of a package that every lane so far has skipped, with the reasons that
// they gave: those that need something, and those that only a soak run runs.
func (rs *results) skips(pkg string) (needy, soak map[string]string) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	needy, soak = map[string]string{}, map[string]string{}
	ran := map[string]bool{}
	for _, r := range rs.by[pkg] {
		for _, t := range r.Tests {
			switch reason := t.Reason(); {
			case t.Outcome != testresult.Skip:
				ran[t.Name] = true
			case testenv.SkippedForSoak(reason):
				soak[t.Name] = reason
			default:
				needy[t.Name] = reason
			}
		}
	}
	for test := range ran {
		delete(needy, test)
		delete(soak, test)
	}
	for test := range soak { // another lane may lack something else
		delete(needy, test)
	}
	return needy, soak
}

// leftOver returns the tests of a package that every lane so far has skipped because they need
// something, with the reasons that they gave.
func (rs *results) leftOver(pkg string) map[string]string {
	needy, _ := rs.skips(pkg)
	return needy
}

// leftToSoak lists the tests that only a soak run runs.
func (rs *results) leftToSoak() (names []string) {
	for _, pkg := range sortedKeys(rs.by) {
		_, soak := rs.skips(pkg)
		for _, test := range sortedKeys(soak) {
			names = append(names, shortName(pkg)+"."+test+": "+soak[test])
		}
	}
	return names
}

// skippedEverywhere lists the tests that no lane ran and that are not expected to be skipped; the
// expected ones are written with their reasons.
func (rs *results) skippedEverywhere(w io.Writer) []string {
	var bad, expected []string
	for _, pkg := range sortedKeys(rs.by) {
		reasons := rs.leftOver(pkg)
		for _, test := range sortedKeys(reasons) {
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
