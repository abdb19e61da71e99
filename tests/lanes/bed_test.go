package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/testresult"
)

func test(name string, o testresult.Outcome) testresult.Test {
	return testresult.Test{Name: name, Outcome: o, Output: "    x_test.go:1: needs cgroup: none\n"}
}

// The bed's second turn is what every lane has skipped, and nothing else: tests/limits had the
// first, and what is expected to be skipped is expected to be skipped there too.
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
	const security = module + "tests/security"
	rs.add(root, testresult.Package{Path: security, Tests: []testresult.Test{
		test(attackTest, testresult.Pass), test(attackTest+"/x32-abi", testresult.Skip), test(attackTest+"/iopl", testresult.Skip),
	}})
	rs.addAll(map[*lane][]testresult.Package{{Name: "bed/newest-systemd/root", inBed: true}: {
		{Path: security, Tests: []testresult.Test{test(attackTest+"/iopl", testresult.Pass)}},
	}})
	plan, paths := bedPlan(rs)
	want := module + "runtime/cgroup\t^TestBoth$|^TestSub$/^a\\.b$\n"
	if plan != want || len(paths) != 1 {
		t.Errorf("plan\n%s\nwant\n%s", plan, want)
	}
}

// The first turn has the tests whose needs this machine lacks, found in their source, and the
// attacks whose controls fail here. Narrowed runs and soak runs leave them to the second turn.
func TestAheadOfTheNativeLanes(t *testing.T) {
	before := lacking
	t.Cleanup(func() { lacking = before })
	lacking = map[string]func(...string) string{
		"Cgroup": func(args ...string) string {
			if slices.Equal(args, []string{"memory", "pids"}) {
				return "none"
			}
			return ""
		},
		"Bed":      func(...string) string { return "no" },
		"Resource": func(...string) string { return "" },
	}
	source := strings.ReplaceAll(`func TestHere(t *testing.T) {
	need.RequireCgroup(t, "memory")
	need.RequireResource(t)
}
func TestThere(t *testing.T) {
	need.RequireCgroup(t, "memory", "pids")
}
func helper(t *testing.T) {
	need.RequireCgroup(t, "memory", "pids")
}
func TestBed(t *testing.T) {
	need.RequireBed(t)
}`, "need.", "testenv.") // this file is read too
	if got := forBed([]byte(source)); !slices.Equal(got, []string{"TestThere", "TestBed"}) {
		t.Errorf("for the bed: %q", got)
	}
	packages := []*testPackage{{Path: limitsPackage, ofBed: []string{"TestLimit"}}, {Path: module + "/api"}, {Path: module + "/x", ofBed: []string{"TestThere"}}}
	plan, paths := ahead(t.Context(), options{packages: everything, lane: "all"}, packages, "")
	if want := module + "/x\t^TestThere$\t" + aheadMachine + "\n"; plan != want || !slices.Equal(paths, []string{module + "/x"}) {
		t.Errorf("plan %q, %q", plan, paths)
	}
	if !slices.Contains(lanesOf(defaultBed), "bed/"+aheadMachine+"/root") {
		t.Errorf("the bed has no %s", aheadMachine)
	}
	for _, o := range []options{{packages: everything, lane: "all", soak: true}, {packages: everything, lane: "all", bed: "6.12-tiny/root"}, {packages: "./api", lane: "all"}} {
		if plan, _ := ahead(t.Context(), o, packages, ""); plan != "" {
			t.Errorf("%+v: %q", o, plan)
		}
	}
	var corpus []string
	for _, a := range attack.Corpus() {
		corpus = append(corpus, a.Name)
	}
	for _, name := range unusualControls {
		if !slices.Contains(corpus, name) {
			t.Errorf("there is no attack %s", name)
		}
	}
	if text, err := os.ReadFile("../security/doctor_test.go"); err != nil || !strings.Contains(string(text), "func "+attackTest+"(") {
		t.Errorf("there is no %s: %v", attackTest, err)
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
		return rs.report(&out, options{packages: everything, lane: "all"}), out.String()
	}
	if ok, out := run(testresult.Pass); !ok {
		t.Errorf("run in the bed:\n%s", out)
	}
	if ok, out := run(testresult.Skip); ok || !strings.Contains(out, "tests/functional.TestMemory: ") {
		t.Errorf("skipped in the bed too:\n%s", out)
	}
}

// A test that only a soak run runs is no failure of the gate, is not tried in the bed, and is
// named. In a soak run it is a failure: nothing may be left out of that.
func TestLeftToSoak(t *testing.T) {
	native, bed := &lane{Name: "root"}, &lane{Name: "bed/6.12-tiny/dev", inBed: true}
	skipped := func(why string) testresult.Test {
		return testresult.Test{Name: "TestRate", Outcome: testresult.Skip, Output: "    x_test.go:1: " + why + "\n"}
	}
	spy := &soakSpy{TB: t}
	testenv.Soak(spy, "it judges a rate")
	for name, inBed := range map[string]string{"in both lanes": spy.reason, "in one lane": "needs cgroup: none"} {
		rs := newResults([]*lane{native, bed})
		rs.add(native, testresult.Package{Path: limitsPackage, Tests: []testresult.Test{test("TestGood", testresult.Pass), skipped(spy.reason)}})
		rs.add(bed, testresult.Package{Path: limitsPackage, Tests: []testresult.Test{skipped(inBed)}})
		if left := rs.leftOver(limitsPackage); len(left) != 0 {
			t.Errorf("%s: left over are %q", name, left)
		}
		for _, soak := range []bool{false, true} {
			var out strings.Builder
			ok := rs.report(&out, options{packages: everything, lane: "all", soak: soak})
			if ok == soak || !strings.Contains(out.String(), "tests/limits.TestRate: ") {
				t.Errorf("%s: in a soak run %v: %v\n%s", name, soak, ok, out.String())
			}
		}
	}
}

// soakSpy keeps the reason of a skip.
type soakSpy struct {
	testing.TB
	reason string
}

func (*soakSpy) Helper()                            {}
func (s *soakSpy) Skipf(format string, args ...any) { s.reason = fmt.Sprintf(format, args...) }

// Packages whose tests are the same for every user run in one lane, if both lanes run, but for the
// tests that need root.
func TestShareOfALane(t *testing.T) {
	pure, rooted, asks := &testPackage{Path: "pure"}, &testPackage{Path: "rooted", ofRoot: []string{"TestRoot"}}, &testPackage{Path: "asks", asksForUser: true}
	all := []*testPackage{pure, rooted, asks}
	if got := (&lane{Name: "root", second: true}).share(all); !slices.Equal(got, all[1:]) {
		t.Errorf("root beside an ordinary user runs %d packages", len(got))
	}
	if got := (&lane{Name: rootlessLane}).share(all); !slices.Equal(got, all) {
		t.Errorf("the ordinary user runs %d packages", len(got))
	}
	t.Chdir("../..")
	for dir, want := range map[string]struct {
		asks   bool
		ofRoot []string
	}{
		"internal/idmap": {asks: true}, "tests/functional": {asks: true}, "agent/policy": {}, "tests/testbed": {},
		"internal/agents": {ofRoot: []string{"TestRunsThatMayNotBeLookedAt"}}, "image": {ofRoot: []string{"TestRemovalOnAFullDisk"}},
	} {
		got, err := newPackage(module+"/"+dir, dir)
		if err != nil || got.asksForUser != want.asks || !got.asksForUser && !slices.Equal(got.ofRoot, want.ofRoot) {
			t.Errorf("%s: %+v, %v", dir, got, err)
		}
	}
	for dir, want := range map[string]kind{"agent": raced, "seccomp": static, "internal/service": raced, "tests/functional": static, "internal/confine": plain} {
		if got, err := newPackage(module+"/"+dir, dir); err != nil || got.kind(false) != want || got.kind(true) == raced {
			t.Errorf("%s: %s, %v", dir, got.kind(false), err)
		}
	}
	for dir := range sameForAll {
		if text, err := exec.Command("sh", "-c", `cat "$1"/*.go`, "sh", dir).Output(); err != nil || !userMatters.Match(text) {
			t.Errorf("%s does not ask for the user: %v", dir, err)
		}
	}
}

// Only the whole of the default bed judges tests that were skipped everywhere.
func TestAnotherBedIsNarrowed(t *testing.T) {
	if (options{packages: everything, lane: "all", bed: wholeBed, soak: true}).narrowed() {
		t.Error("a soak run with the whole bed is narrowed")
	}
	for bed, want := range map[string]bool{"": false, defaultBed: false, "no": true, wholeBed: true, "6.12-systemd/dev": true} {
		if got := (options{packages: everything, lane: "all", bed: bed}).narrowed(); got != want {
			t.Errorf("with the bed %q a run is narrowed: %v", bed, got)
		}
	}
}

// Leftovers run in the machines that are quick to start, and their lanes are judged with the
// others.
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
	flags := skips(options{bed: defaultBed})
	if len(flags) != 4 || flags[1] != "6.1-tiny=^TestHostedAgentRunIsHeldToItsProcessorTime$" || !strings.HasPrefix(flags[3], "newest-systemd=^TestAllSandboxesTogetherHaveACeiling$|") {
		t.Errorf("%q", flags)
	}
	for _, whole := range []options{{bed: "6.12-tiny/root"}, {bed: wholeBed, soak: true}, {bed: defaultBed, soak: true}} {
		if flags := skips(whole); flags != nil {
			t.Errorf("%+v leaves out %q", whole, flags)
		}
	}
}

// Soak runs have tests of networks on every machine, and they exist.
func TestNetworksInEveryMachine(t *testing.T) {
	plan, paths := firstPlan(options{soak: true})
	if len(paths) != 1+len(ofNetworks) || strings.Count(plan, "\n") != len(paths) || !strings.Contains(plan, "^TestAttacksAreRefused$|") {
		t.Errorf("%q, %q", plan, paths)
	}
	for _, o := range []options{{}, {soak: true, run: "X"}} {
		if plan, paths := firstPlan(o); len(paths) != 1 || plan != limitsPackage+"\t"+o.run+"\n" {
			t.Errorf("%+v: %q, %q", o, plan, paths)
		}
	}
	for pkg, names := range ofNetworks {
		sources, err := filepath.Glob(filepath.Join("../..", strings.TrimPrefix(pkg, module), "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		var tests strings.Builder
		for _, name := range sources {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(text)
		}
		for _, name := range names {
			if !strings.Contains(tests.String(), "func "+name+"(") {
				t.Errorf("%s has no test %s", pkg, name)
			}
		}
	}
}

// A turn that is called off waits for no image: a compile error is reported at once.
func TestTurnThatIsCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := &testBed{prepared: make(chan struct{})}
	done := make(chan error, 1)
	go func() { _, err := b.limits(ctx, options{run: "X"}, nil); done <- err }()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(testenv.HungAfter):
		t.Error("it waits for the image")
	}
}
