package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
)

const (
	// limitsPackage runs in the machines whatever the native lanes did: what it tests differs between kernels and ways to delegate.
	limitsPackage = module + "/tests/limits"
	// machinesAtOnce is how many machines of the bed run beside each other.
	machinesAtOnce = 2
	// jobLimit is how long one user's tests may take: more than twice what they took beside busy native lanes on two cores. What is cut off
	// then is not tried again.
	jobLimit = "45m"
	// bedOut is where the testbed program puts logs and results; those of a later turn lie beside.
	bedOut = "build/testbed"
)

// tooLong are the bombs that are judged by `make testbed` alone: each takes many seconds in each machine, and beside the other lanes a
// minute. What holds most of them is tried natively (security.TestBombsEndBounded).
const tooLong = "^TestBombsDoNotSlowANeighbour$/^(fork|swap|io|descriptors|inodes|disk|log|terminals|pipes|timers|inotify|zombies|output)$"

// leftOut is what is not run in the machines of the default bed, but is in the other one: what is the same with every kernel and
// whoever has delegated the cgroup, so that processors which are emulated have it to do once. `make testbed` leaves nothing out.
var leftOut = map[string][]string{
	"6.1-tiny": {
		"TestCPUSetIsWhatTheSandboxSees", "TestChangesSurviveTheDaemon", "TestDaemonsShareACgroup",
		"TestHostedAgentRunIsHeldToItsProcessorTime", "TestIOLimitHoldsOperations", "TestIOLimitHoldsWrites",
		"TestParkedSandboxIsLimited", "TestUsageIsMeasured",
	},
	"newest-systemd": {
		"TestCPUWeightsShareACore", "TestChangedLimitsBite", "TestDeletedSandboxesLeaveNoCgroup", "TestKilledAtRandomNothingIsLeft",
		"TestLimitOfCPUDoesNotSlowTheEnd", "TestMemoryHighKillsNobody", "TestOOMOfTheMainProcess", "TestRefusedChangeChangesNothing",
		"TestRestartedDaemonAdoptsCgroups", "TestStatsAgreeWithTheKernel",
	},
}

// quiet are the tests of limits that measure short times, and so have their turn when the native lanes have had theirs; each in the
// machine that it has here.
var quiet = map[string]string{"TestTimeoutEndsATreeInTime": "6.1-tiny", "TestBombsDoNotSlowANeighbour": "newest-tiny"}

// skips are the flags of testbed for that in the turn of tests/limits, and in that of what is left over. A bed that somebody has chosen
// is run whole, but for the long bombs.
func skips(bed string) (ofLimits, ofRest []string) {
	if bed != defaultBed {
		for _, machine := range machinesOf(bed) {
			ofLimits = append(ofLimits, "-skip", machine+"="+tooLong)
		}
		return ofLimits, nil
	}
	for _, machine := range machinesOf(defaultBed) {
		ofLimits = append(ofLimits, "-skip", machine+"="+selection(slices.Concat(leftOut[machine], sortedKeys(quiet))))
	}
	for _, machine := range machinesOf(defaultRest) {
		patterns := []string{tooLong}
		for _, test := range sortedKeys(quiet) {
			if quiet[test] != machine {
				patterns = append(patterns, selection([]string{test}))
			}
		}
		ofRest = append(ofRest, "-skip", machine+"="+strings.Join(patterns, "|"))
	}
	return ofLimits, ofRest
}

// machinesOf are the machines of the bed, each once.
func machinesOf(bed string) (names []string) {
	for _, name := range lanesOf(bed) {
		machine, _ := (&lane{Name: name}).machine()
		if !slices.Contains(names, machine) {
			names = append(names, machine)
		}
	}
	return names
}

// testBed is the machines of tests/testbed as lanes.
type testBed struct {
	lanes []*lane
	// Where tests/limits is run, and where what the native lanes have skipped: as testbed -machines takes them.
	ofLimits, ofRest string
	program          string
	tests            string // directory of the test binaries that the native lanes run as well
	cancel           context.CancelFunc
	prepared         chan struct{} // closed when the image is made, or err says why not
	err              error
}

// startBed begins to make the image, beside all else: what it waits for is the network.
func startBed(ctx context.Context, o options) (*testBed, error) {
	b := &testBed{
		ofLimits: o.bed, ofRest: o.bed, program: filepath.Join(o.workDir, "testbed"), tests: static.dir(o), prepared: make(chan struct{}),
	}
	if o.bed == defaultBed {
		b.ofRest = defaultRest
	}
	all := b.ofLimits + "," + b.ofRest
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", b.program, "./tests/testbed")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the test bed: %w\n%s", err, out)
	}
	// Here, and not when everything else has run.
	if out, err := b.command(ctx, all, bedOut, "-check").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the machines %s of the test bed: %w\n%s", all, err, out)
	}
	for _, name := range lanesOf(all) {
		b.lanes = append(b.lanes, &lane{Name: name, inBed: true})
	}
	ctx, b.cancel = context.WithCancel(ctx)
	prepare := b.command(ctx, all, bedOut, "-prepare")
	prepare.Stdout, prepare.Stderr = os.Stdout, os.Stderr
	go func() {
		defer close(b.prepared)
		b.err = prepare.Run()
	}()
	return b, nil
}

// lanesOf are the names of the lanes of machines, each once.
func lanesOf(machines string) (names []string) {
	for word := range strings.SplitSeq(machines, ",") {
		machine, user, one := strings.Cut(word, "/")
		users := []string{user}
		if !one {
			users = []string{"dev", "root"} // as testbed -machines has it
		}
		for _, user := range users {
			if name := "bed/" + machine + "/" + user; !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// stop ends what startBed began, where the lanes have come to an end before the bed's turn.
func (b *testBed) stop() {
	b.cancel()
	<-b.prepared
}

func (b *testBed) command(ctx context.Context, machines, out string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.program, append([]string{"-machines", machines, "-short", briefly, "-tests", b.tests, "-out", out}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its machines
	cmd.WaitDelay = time.Minute
	return cmd
}

// A turn of the bed runs a plan in its machines, each of which is started for it.
type turn struct {
	machines string   // as testbed -machines takes them
	plan     string   // as testbed -plan takes it; empty: nothing is to run
	paths    []string // of the packages in it
	skips    []string // flags that leave some of it out
	out      string   // directory for logs and results
}

// limits is the first turn: tests/limits, whole, beside the native lanes, of which it needs to know nothing.
func (b *testBed) limits(ctx context.Context, o options) (map[*lane][]testresult.Package, error) {
	left, _ := skips(b.ofLimits)
	return b.take(ctx, o, turn{machines: b.ofLimits, plan: limitsPackage + "\t" + o.run + "\n", paths: []string{limitsPackage}, skips: left, out: bedOut})
}

// rest is the second turn: what the native lanes have skipped. Tests that fail, and machines that die, are results and no errors.
func (b *testBed) rest(ctx context.Context, o options, results *results) (map[*lane][]testresult.Package, error) {
	plan, paths := bedPlan(results)
	if b.ofLimits == defaultBed {
		plan, paths = plan+limitsPackage+"\t"+selection(sortedKeys(quiet))+"\n", append(paths, limitsPackage)
	}
	_, left := skips(b.ofLimits)
	return b.take(ctx, o, turn{machines: b.ofRest, plan: plan, paths: paths, skips: left, out: bedOut + "-rest"})
}

// together is what a lane did in both turns; a package that had a part in each is one.
func together(first, second []testresult.Package) []testresult.Package {
	for _, r := range second {
		i := slices.IndexFunc(first, func(its testresult.Package) bool { return its.Path == r.Path })
		if i < 0 {
			first = append(first, r)
			continue
		}
		first[i].Tests = append(first[i].Tests, r.Tests...)
		first[i].Output += r.Output
		first[i].Err, first[i].Elapsed = errors.Join(first[i].Err, r.Err), first[i].Elapsed+r.Elapsed
	}
	return first
}

// secondTries tries again what failed in either turn.
func (b *testBed) secondTries(ctx context.Context, o options, its map[*lane][]testresult.Package) error {
	if err := b.forget(bedOut + "-again"); err != nil {
		return err
	}
	for _, l := range b.lanes {
		if err := b.secondTry(ctx, o, l, its[l]); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// take waits for the image, runs a turn and returns what each lane's packages did.
func (b *testBed) take(ctx context.Context, o options, t turn) (map[*lane][]testresult.Package, error) {
	select {
	case <-b.prepared:
	case <-ctx.Done(): // what is still fetched for the image ends with the bed
		return nil, ctx.Err()
	}
	if b.err != nil {
		return nil, fmt.Errorf("its image could not be made, see above (BED=no leaves the bed out, and then nothing says that limits bite): %w", b.err)
	}
	// What an earlier run has left is not what this one did.
	if err := b.forget(t.out); err != nil {
		return nil, err
	}
	its := map[*lane][]testresult.Package{}
	if t.plan == "" {
		return its, nil
	}
	file := filepath.Join(o.workDir, filepath.Base(t.out)+"-plan")
	if err := os.WriteFile(file, []byte(t.plan), 0o600); err != nil {
		return nil, err
	}
	fmt.Printf("\n== bed: %s: %s\n", t.machines, strings.Join(shortNames(t.paths), ", "))
	args := append([]string{"-plan", file, "-timeout", jobLimit, "-again", "-parallel", fmt.Sprint(machinesAtOnce)}, t.skips...)
	test := b.command(ctx, t.machines, t.out, args...)
	test.Stdout, test.Stderr = os.Stdout, os.Stderr
	err := test.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return nil, err
	}
	for _, l := range b.lanes {
		if !slices.Contains(lanesOf(t.machines), l.Name) {
			continue
		}
		machine, user := l.machine()
		its[l] = testresult.ReadDir(ctx, filepath.Join(t.out, machine, "results", user), t.paths)
	}
	return its, ctx.Err()
}

// forget removes what these machines have left in a directory, alive or dead.
func (b *testBed) forget(out string) error {
	for _, l := range b.lanes {
		machine, _ := l.machine()
		for _, left := range []string{machine, machine + ".died"} {
			if err := os.RemoveAll(filepath.Join(out, left)); err != nil {
				return err
			}
		}
	}
	return nil
}

// secondTry runs the tests that failed once more, in a machine that does nothing else: they measure time where two cores
// emulate several. What passes then counts as passed, and the report names it. Where much failed, or a binary did not end
// as it should, nothing is tried again.
func (b *testBed) secondTry(ctx context.Context, o options, l *lane, its []testresult.Package) error {
	plan, paths := failedPlan(its)
	if plan == "" {
		return nil
	}
	file := filepath.Join(o.workDir, "bed-plan-again")
	if err := os.WriteFile(file, []byte(plan), 0o600); err != nil {
		return err
	}
	machine, user := l.machine()
	fmt.Printf("\n== bed: %s: what failed, once more\n", l.Name)
	out := bedOut + "-again"
	test := b.command(ctx, machine+"/"+user, out, "-plan", file, "-timeout", jobLimit, "-again")
	test.Stdout, test.Stderr = os.Stdout, os.Stderr
	err := test.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return err
	}
	for _, second := range testresult.ReadDir(ctx, filepath.Join(out, machine, "results", user), paths) {
		for i := range its {
			if its[i].Path == second.Path {
				l.again = append(l.again, passedAgain(&its[i], second)...)
			}
		}
	}
	return nil
}

// fewFailures is how many tests of a lane may fail for a second try to make sense.
const fewFailures = 3

// failedPlan writes the plan of the second try; it is empty where there is none.
func failedPlan(its []testresult.Package) (plan string, paths []string) {
	var lines strings.Builder
	n := 0
	for _, r := range its {
		failed := failedTests(r)
		if n += len(failed); r.Err != nil || n > fewFailures {
			return "", nil
		}
		if len(failed) > 0 {
			fmt.Fprintf(&lines, "%s\t%s\n", r.Path, selection(failed))
			paths = append(paths, r.Path)
		}
	}
	return lines.String(), paths
}

// failedTests are the tests, without their subtests, that failed.
func failedTests(r testresult.Package) []string {
	var failed []string
	for _, t := range r.Tests {
		if t.Outcome == testresult.Fail && !strings.Contains(t.Name, "/") {
			failed = append(failed, t.Name)
		}
	}
	return failed
}

// passedAgain puts the second outcome of tests in the place of their first, if all of a package's failures passed, and
// returns their names.
func passedAgain(first *testresult.Package, second testresult.Package) []string {
	failed := failedTests(*first)
	passed := func(name string) bool {
		return slices.ContainsFunc(second.Tests, func(t testresult.Test) bool { return t.Name == name && t.Outcome == testresult.Pass })
	}
	if !second.OK() || slices.ContainsFunc(failed, func(name string) bool { return !passed(name) }) {
		return nil
	}
	first.Tests = append(slices.DeleteFunc(slices.Clone(first.Tests), func(t testresult.Test) bool {
		top, _, _ := strings.Cut(t.Name, "/")
		return slices.Contains(failed, top)
	}), second.Tests...)
	var names []string
	for _, f := range failed {
		names = append(names, shortName(first.Path)+"."+f)
	}
	return names
}

// machine is which machine a lane of the bed runs in, and as whom.
func (l *lane) machine() (name, user string) {
	name, user, _ = strings.Cut(strings.TrimPrefix(l.Name, "bed/"), "/")
	return name, user
}

// bedPlan writes what the native lanes have left over as testbed -plan takes it. tests/limits has had its turn, but for
// what is added to it (quiet).
func bedPlan(results *results) (plan string, paths []string) {
	var lines strings.Builder
	for _, pkg := range sortedKeys(results.by) {
		run := selection(sortedKeys(results.leftOver(pkg)))
		if run == "" || pkg == limitsPackage {
			continue
		}
		fmt.Fprintf(&lines, "%s\t%s\n", pkg, run)
		paths = append(paths, pkg)
	}
	return lines.String(), paths
}

// selection is the -test.run for exactly these tests and subtests.
func selection(tests []string) string {
	var patterns []string
	for _, test := range tests {
		var levels []string
		for level := range strings.SplitSeq(test, "/") {
			levels = append(levels, "^"+regexp.QuoteMeta(level)+"$")
		}
		patterns = append(patterns, strings.Join(levels, "/"))
	}
	return strings.Join(patterns, "|")
}
