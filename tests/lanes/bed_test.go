package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/testresult"
)

func test(name string, o testresult.Outcome) testresult.Test {
	return testresult.Test{Name: name, Outcome: o, Output: "    x_test.go:1: needs cgroup: none\n"}
}

// The bed's second turn is what every native lane has skipped, and nothing else; tests/limits had the first.
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
	plan, paths := bedPlan(rs)
	want := module + "runtime/cgroup\t^TestBoth$|^TestSub$/^a\\.b$\n"
	if plan != want || len(paths) != 1 {
		t.Errorf("plan\n%s\nwant\n%s", plan, want)
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

// What is left over runs in the machines that are quick to start, and its lanes are judged with the others.
func TestLanesOfMachines(t *testing.T) {
	want := []string{"bed/6.1-tiny/dev", "bed/newest-systemd/root", "bed/newest-tiny/root"}
	if got := lanesOf(defaultBed + "," + defaultRest); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if got := lanesOf("6.12-tiny"); !slices.Equal(got, []string{"bed/6.12-tiny/dev", "bed/6.12-tiny/root"}) {
		t.Errorf("%q", got)
	}
}

// What one machine of the default bed leaves out, the other runs; and there is such a test.
func TestEveryLimitIsTriedSomewhere(t *testing.T) {
	out := map[string]string{}
	sources, err := filepath.Glob("../limits/*_test.go")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	var tests strings.Builder
	for _, name := range sources {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		tests.Write(text)
	}
	for machine, names := range leftOut {
		if !strings.Contains(defaultBed, machine) {
			t.Errorf("the bed has no machine %s", machine)
		}
		for _, name := range names {
			if other, twice := out[name]; twice {
				t.Errorf("%s is left out in %s and in %s", name, machine, other)
			}
			if out[name] = machine; !strings.Contains(tests.String(), "func "+name+"(") {
				t.Errorf("there is no test %s", name)
			}
		}
	}
	for name, machine := range quiet {
		if out[name] != "" || !strings.Contains(tests.String(), "func "+name+"(") || !slices.Contains(machinesOf(defaultRest), machine) {
			t.Errorf("%s of %s", name, machine)
		}
	}
	ofLimits, ofRest := skips(defaultBed)
	if len(ofLimits) != 4 || len(ofRest) != 4 || !strings.Contains(ofLimits[3], "^TestTimeoutEndsATreeInTime$") ||
		!strings.HasPrefix(ofRest[1], "6.1-tiny=") || strings.Contains(ofRest[1], "TestTimeout") || !strings.HasSuffix(ofRest[1], "|^TestBombsDoNotSlowANeighbour$") {
		t.Errorf("%q, %q", ofLimits, ofRest)
	}
	want := []string{"-skip", "6.12-tiny=" + tooLong}
	if got, rest := skips("6.12-tiny/root"); !slices.Equal(got, want) || rest != nil {
		t.Errorf("%q, %q", got, rest)
	}
}

// A package that is run in part in each turn is judged as one.
func TestTurnsTogether(t *testing.T) {
	bad := errors.New("it did not end")
	got := together(
		[]testresult.Package{{Path: "a", Tests: []testresult.Test{test("TestA", testresult.Pass)}, Output: "x", Elapsed: 1}},
		[]testresult.Package{
			{Path: "b"}, {Path: "a", Tests: []testresult.Test{test("TestB", testresult.Fail)}, Output: "y", Elapsed: 2, Err: bad},
		},
	)
	if len(got) != 2 || got[1].Path != "b" || len(got[0].Tests) != 2 || got[0].Output != "xy" || got[0].Elapsed != 3 || !errors.Is(got[0].Err, bad) {
		t.Errorf("%+v", got)
	}
}

// A turn that is called off waits for no image: what does not compile is told at once.
func TestTurnThatIsCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := &testBed{prepared: make(chan struct{})}
	done := make(chan error, 1)
	go func() { _, err := b.limits(ctx, options{}); done <- err }()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(testenv.Patience(10 * time.Second)):
		t.Error("it waits for the image")
	}
}
