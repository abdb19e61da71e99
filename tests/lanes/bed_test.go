package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/tests/testresult"
)

func test(name string, o testresult.Outcome) testresult.Test {
	return testresult.Test{Name: name, Outcome: o, Output: "    x_test.go:1: needs cgroup: none\n"}
}

// The bed gets what every native lane has skipped, and nothing else but tests/limits.
func TestBedPlan(t *testing.T) {
	root, rootless := &lane{Name: "root"}, &lane{Name: "rootless"}
	rs := newResults([]*lane{root, rootless})
	const module = module + "/"
	rs.add(root, testresult.Package{Path: module + "runtime/cgroup", Tests: []testresult.Test{
		test("TestRoot", testresult.Pass), test("TestBoth", testresult.Skip), test("TestSub", testresult.Pass), test("TestSub/a.b", testresult.Skip),
	}})
	rs.add(rootless, testresult.Package{Path: module + "runtime/cgroup", Tests: []testresult.Test{
		test("TestRoot", testresult.Skip), test("TestBoth", testresult.Skip), test("TestSub", testresult.Pass), test("TestSub/a.b", testresult.Skip),
	}})
	rs.add(root, testresult.Package{Path: module + "api", Tests: []testresult.Test{test("TestAPI", testresult.Pass)}})
	rs.add(root, testresult.Package{Path: limitsPackage, Tests: []testresult.Test{test("TestMemory", testresult.Skip)}})
	plan, paths := bedPlan(rs, "")
	want := module + "runtime/cgroup\t^TestBoth$|^TestSub$/^a\\.b$\n" + limitsPackage + "\t\n"
	if plan != want || len(paths) != 2 {
		t.Errorf("plan\n%s\nwant\n%s", plan, want)
	}
}

// A package is settled, for the bed to compile its tests, when each lane of this machine has run it, and only then.
func TestSettled(t *testing.T) {
	lanes := []*lane{{Name: "root"}, {Name: "rootless"}, {Name: "other", Unavailable: "not here"}, {Name: fuzzLane}, {Name: "bed/x/dev", inBed: true}}
	rs := newResults(lanes)
	var settled []string
	rs.settled = func(pkg string) { settled = append(settled, pkg) }
	for _, step := range []struct {
		lane int
		pkg  string
		want int
	}{{0, "a", 0}, {3, "a", 0}, {4, "a", 0}, {0, "b", 0}, {1, "b", 1}, {1, "a", 2}, {4, "b", 2}} {
		rs.add(lanes[step.lane], testresult.Package{Path: step.pkg, Tests: []testresult.Test{test("TestX", testresult.Pass)}})
		if len(settled) != step.want {
			t.Fatalf("after %s in %s there are settled %q", step.pkg, lanes[step.lane].Name, settled)
		}
	}
}

// What failed in the bed is tried once more, unless it is too much; only what then passed changes its outcome.
func TestSecondTry(t *testing.T) {
	const pkg = "github.com/sandboxd/sandboxd/tests/limits"
	first := testresult.Package{Path: pkg, Tests: []testresult.Test{
		test("TestGood", testresult.Pass), test("TestBad", testresult.Fail), test("TestBad/one", testresult.Fail), test("TestBad/two", testresult.Pass),
	}}
	plan, paths := failedPlan([]testresult.Package{{Path: "x", Tests: []testresult.Test{test("TestX", testresult.Pass)}}, first})
	if want := pkg + "\t^TestBad$\n"; plan != want || len(paths) != 1 {
		t.Errorf("plan %q, want %q", plan, want)
	}
	if plan, _ := failedPlan([]testresult.Package{first, {Path: "y", Err: errors.New("panic")}}); plan != "" {
		t.Errorf("a binary that broke is tried again: %q", plan)
	}
	many := testresult.Package{Path: pkg}
	for _, name := range []string{"TestA", "TestB", "TestC", "TestD"} {
		many.Tests = append(many.Tests, test(name, testresult.Fail))
	}
	if plan, _ := failedPlan([]testresult.Package{many}); plan != "" {
		t.Errorf("many are tried again: %q", plan)
	}
	for _, o := range []testresult.Outcome{testresult.Fail, testresult.Skip} {
		got := first
		if again := passedAgain(&got, testresult.Package{Path: pkg, Tests: []testresult.Test{test("TestBad", o)}}); again != nil || got.OK() {
			t.Errorf("second outcome %v counts as passed", o)
		}
	}
	again := passedAgain(&first, testresult.Package{Path: pkg, Tests: []testresult.Test{test("TestBad", testresult.Pass), test("TestBad/one", testresult.Pass)}})
	if !first.OK() || first.Count(testresult.Pass) != 3 || len(again) != 1 || again[0] != "tests/limits.TestBad" {
		t.Errorf("after the second try: %+v, %q", first, again)
	}
}

// A test that no lane ran is a failure, once the bed has had its turn and skipped it too.
func TestSkippedEverywhereFails(t *testing.T) {
	native, bed := &lane{Name: "root"}, &lane{Name: "bed/6.12-tiny/dev", inBed: true}
	run := func(inBed testresult.Outcome) (bool, string) {
		rs := newResults([]*lane{native, bed})
		const pkg = "github.com/sandboxd/sandboxd/tests/functional"
		rs.add(native, testresult.Package{Path: pkg, Tests: []testresult.Test{test("TestGood", testresult.Pass), test("TestMemory", testresult.Skip)}})
		rs.add(bed, testresult.Package{Path: pkg, Tests: []testresult.Test{test("TestMemory", inBed)}})
		var out strings.Builder
		return rs.report(&out, false), out.String()
	}
	if ok, out := run(testresult.Pass); !ok {
		t.Errorf("run in the bed:\n%s", out)
	}
	if ok, out := run(testresult.Skip); ok || !strings.Contains(out, "tests/functional.TestMemory: ") {
		t.Errorf("skipped in the bed too:\n%s", out)
	}
}

// Only the whole of the default bed judges what was skipped everywhere.
func TestAnotherBedIsNarrowed(t *testing.T) {
	for bed, want := range map[string]bool{"": false, defaultBed: false, "no": true, "6.12-systemd/dev": true} {
		if got := (options{packages: everything, lane: "all", bed: bed}).narrowed(); got != want {
			t.Errorf("with the bed %q a run is narrowed: %v", bed, got)
		}
	}
}
