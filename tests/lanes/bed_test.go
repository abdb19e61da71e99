package main

import (
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
	const module = "github.com/sandboxd/sandboxd/"
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
