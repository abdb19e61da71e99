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
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
)

const (
	// limitsPackage runs whole in every machine: what it tests differs between kernels and between ways to delegate.
	limitsPackage = module + "/tests/limits"
	// machinesAtOnce is how many machines of the bed run beside each other.
	machinesAtOnce = 2
	// jobLimit is how long one user's tests may take: two and a half times what they took on two cores with two machines.
	jobLimit = "25m"
	// bedOut is where the testbed program puts logs and results.
	bedOut = "build/testbed"
)

// testBed is the machines of tests/testbed as lanes.
type testBed struct {
	lanes    []*lane
	program  string
	machines string // as testbed -machines takes them
	tests    string // directory of the test binaries that are compiled ahead
	cancel   context.CancelFunc
	prepared chan struct{} // closed when the image is made, or err says why not
	err      error
	ahead    sync.WaitGroup // compiles, one at a time
	one      slots
}

// startBed begins to make the image, beside the native lanes: what it waits for is the network.
func startBed(ctx context.Context, o options) (*testBed, error) {
	b := &testBed{
		program: filepath.Join(o.workDir, "testbed"), machines: o.bed, tests: filepath.Join(o.workDir, "bed-tests"), prepared: make(chan struct{}),
		one: newSlots(1),
	}
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", b.program, "./tests/testbed")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the test bed: %w\n%s", err, out)
	}
	// Here, and not when everything else has run.
	if out, err := b.command(ctx, b.machines, bedOut, "-check").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the machines %s of the test bed: %w\n%s", o.bed, err, out)
	}
	for word := range strings.SplitSeq(o.bed, ",") {
		machine, user, one := strings.Cut(word, "/")
		users := []string{user}
		if !one {
			users = []string{"dev", "root"} // as testbed -machines has it
		}
		for _, user := range users {
			b.lanes = append(b.lanes, &lane{Name: "bed/" + machine + "/" + user, inBed: true})
		}
	}
	ctx, b.cancel = context.WithCancel(ctx)
	prepare := b.command(ctx, b.machines, bedOut, "-prepare")
	prepare.Stdout, prepare.Stderr = os.Stdout, os.Stderr
	go func() {
		defer close(b.prepared)
		b.err = prepare.Run()
	}()
	return b, nil
}

// stop ends what startBed began, where the lanes have come to an end before the bed's turn.
func (b *testBed) stop() {
	b.cancel()
	<-b.prepared
	b.ahead.Wait()
}

// compileAhead compiles the tests of a package for the bed, beside the native lanes, where these have left some of it over.
// What it could not compile is compiled when the bed's turn comes, which then says why not.
func (b *testBed) compileAhead(ctx context.Context, results *results, pkg string) {
	if pkg != limitsPackage && len(results.leftOver(pkg)) == 0 {
		return
	}
	b.ahead.Go(func() {
		b.one.with(func() { _ = lowly(ctx, b.program, "-compile", "-tests", b.tests, "-pkg", pkg).Run() })
	})
}

func (b *testBed) command(ctx context.Context, machines, out string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.program, append([]string{"-machines", machines, "-short", briefly, "-tests", b.tests, "-out", out}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its machines
	cmd.WaitDelay = time.Minute
	return cmd
}

// run runs tests/limits and whatever the native lanes have skipped in each machine, and adds what came of it. Tests that
// fail, and machines that die, are results and no errors.
func (b *testBed) run(ctx context.Context, o options, results *results) error {
	<-b.prepared
	b.ahead.Wait()
	if b.err != nil {
		return fmt.Errorf("its image could not be made, see above (BED=no leaves the bed out, and then nothing says that limits bite): %w", b.err)
	}
	plan, paths := bedPlan(results, o.run)
	if plan == "" {
		return nil
	}
	file := filepath.Join(o.workDir, "bed-plan")
	if err := os.WriteFile(file, []byte(plan), 0o600); err != nil {
		return err
	}
	// What an earlier run has left is not what this one did.
	for _, l := range b.lanes {
		machine, _ := l.machine()
		if err := os.RemoveAll(filepath.Join(bedOut, machine)); err != nil {
			return err
		}
	}
	fmt.Printf("\n== bed: %s\n", b.machines)
	test := b.command(ctx, b.machines, bedOut, "-plan", file, "-timeout", jobLimit, "-again", "-parallel", fmt.Sprint(machinesAtOnce))
	test.Stdout, test.Stderr = os.Stdout, os.Stderr
	err := test.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return err
	}
	for _, l := range b.lanes {
		machine, user := l.machine()
		its := testresult.ReadDir(ctx, filepath.Join(bedOut, machine, "results", user), paths)
		if err := b.secondTry(ctx, o, l, its); err != nil {
			return err
		}
		for _, r := range its {
			results.add(l, r)
		}
	}
	return ctx.Err()
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
	test := b.command(ctx, machine+"/"+user, out, "-plan", file, "-timeout", jobLimit)
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

// bedPlan writes what the bed has to run as testbed -plan takes it; narrow is what -run narrows to.
func bedPlan(results *results, narrow string) (plan string, paths []string) {
	var lines strings.Builder
	for _, pkg := range sortedKeys(results.by) {
		left := sortedKeys(results.leftOver(pkg))
		run := narrow
		if pkg != limitsPackage {
			if run = selection(left); run == "" {
				continue
			}
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
