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

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/tests/testresult"
)

const (
	// limitsPackage runs in the machines whatever the native lanes did: its tests need a cgroup v2
	// host.
	limitsPackage = module + "/tests/limits"
	// machinesAtOnce is the number of machines of the bed that run beside each other.
	machinesAtOnce = 2
	// jobLimit ends a job that hangs: one user's tests in one machine.
	jobLimit = "60m"
	// bedOut is the directory of the bed's logs and results; those of the second turn lie beside it.
	bedOut = "build/testbed"
)

// leftOut are the tests of limits that one machine of the default bed leaves to the other. They
// judge our code, or a file of the kernel's that has one meaning in all versions, so that emulated
// processors run them once: in the machine without systemd, because that with systemd starts slower
// and has the tests of systemd. What only a new kernel can refuse is left to that. Soak runs and
// `make testbed` leave nothing out.
var leftOut = map[string][]string{
	"6.1-tiny": {"TestHostedAgentRunIsHeldToItsProcessorTime"},
	"newest-systemd": {
		"TestAllSandboxesTogetherHaveACeiling", "TestBombsAreHeldByTheCgroup", "TestCgroupsOfADeadLauncherAreRemoved", "TestCPUSetIsWhatTheSandboxSees", "TestCPUWeightsShareACore", "TestChangedLimitsBite",
		"TestChangesSurviveTheDaemon", "TestDaemonsShareACgroup", "TestDeletedSandboxesLeaveNoCgroup", "TestExplicitLimitsAreRefusedWithoutDelegation",
		"TestKilledAtRandomNothingIsLeft", "TestMemoryHighKillsNobody", "TestMemoryLimitKillsTheProgram", "TestOOMGroupEndsTheSandbox", "TestOOMOfTheMainProcess",
		"TestParkedInterpreterTakesNoMemoryOfASmallerSandbox", "TestParkedSandboxIsLimited", "TestPidsLimitIsTheCgroups", "TestPidsLimitStopsAForkBomb", "TestRefusedChangeChangesNothing",
		"TestRestartedDaemonAdoptsCgroups", "TestStatsAgreeWithTheKernel", "TestTimeoutEndsATreeInTime", "TestUsageIsMeasured",
	},
}

// ofNetworks are the tests of networks that every kernel of the bed runs in a soak run: modes,
// attacks, clients, budgets, published ports, a gateway that is killed. Those of tests/network have
// daemons of both users.
var ofNetworks = map[string][]string{
	module + "/tests/network": {
		"TestAttacksAreRefused", "TestBudgets", "TestFullOpensNoSpecialAddress", "TestGatewayIsKilled", "TestInspectedClients",
		"TestNoneReachesNothing", "TestOwnServers", "TestPolicyChangesWhileConnectionsAreOpen", "TestProcessesOfFlows", "TestSecretsStayOutside",
	},
	module + "/tests/functional": {"TestServersInSandboxesAreReached"},
}

// firstPlan returns what the machines run beside the native lanes, as testbed -plan takes it.
func firstPlan(o options) (plan string, paths []string) {
	plan, paths = limitsPackage+"\t"+o.run+"\n", []string{limitsPackage}
	if !o.soak || o.run != "" {
		return plan, paths
	}
	for _, pkg := range sortedKeys(ofNetworks) {
		plan += pkg + "\t" + selection(ofNetworks[pkg]) + "\n"
		paths = append(paths, pkg)
	}
	return plan, paths
}

// aheadMachine is the machine of the default bed that runs, beside tests/limits, the tests that no
// native lane can run: root's, with the newest kernel.
const aheadMachine = "newest-systemd"

// attackTest is the test in tests/security whose subtests are attacks. A subtest is skipped where
// the attack fails with nothing to hold it.
const attackTest = "TestAttacksAreRefused"

// unusualControls are the attacks that fail on some kernels, or as the root of a container, with
// nothing to hold them: they take modules, devices, files of the kernel or privileges. The control
// of each is tried before the first turn of the bed. Those whose controls fail in the bed too are
// not here (expectedSkips). What is missing here does no harm: its subtest is left over, and the
// second turn runs it.
var unusualControls = []string{
	"delete-module", "finit-module", "huge-pipe", "init-module", "io-flusher", "ioperm", "iopl", "kexec-file-load", "never-out-of-memory",
	"open-disk", "open-mem", "raise-hard-limit", "read-firmware", "read-kcore", "replace-own-exe", "socket-alg", "tcp-ulp",
	"write-modprobe", "write-sysrq",
}

// ahead returns the plan of the tests that the native lanes will skip, as far as that can be known
// before they run, and the packages in it. A narrowed run and a soak run leave them to the second
// turn.
func ahead(ctx context.Context, o options, packages []*testPackage, program string) (plan string, paths []string) {
	if o.narrowed() || o.soak {
		return "", nil
	}
	for _, p := range packages {
		tests := slices.Clone(p.ofBed)
		if p.Path == module+"/tests/security" {
			controls, err := attack.Controls(ctx, program, unusualControls...)
			for _, name := range unusualControls {
				if err == nil && !controls[name].Worked { // else the native lanes say what is wrong
					tests = append(tests, attackTest+"/"+name)
				}
			}
		}
		if len(tests) == 0 || p.Path == limitsPackage {
			continue
		}
		plan += p.Path + "\t" + selection(tests) + "\t" + aheadMachine + "\n"
		paths = append(paths, p.Path)
	}
	return plan, paths
}

// skips returns the flags of testbed that leave tests of limits out. A bed that was chosen is run
// whole, and so is that of a soak run.
func skips(o options) (flags []string) {
	if o.bed != defaultBed || o.soak {
		return nil
	}
	for _, machine := range sortedKeys(leftOut) {
		flags = append(flags, "-skip", machine+"="+selection(leftOut[machine]))
	}
	return flags
}

// testBed is the machines of tests/testbed as lanes.
type testBed struct {
	lanes []*lane
	// Machines for tests/limits, and for tests that the native lanes have skipped, as testbed
	// -machines takes them.
	ofLimits, ofRest string
	program          string
	tests            string // directory of the test binaries that the native lanes run as well
	cancel           context.CancelFunc
	prepared         chan struct{} // closed when the image is made, or err says why not
	err              error
}

// startBed begins to make the image, beside all else: it mostly waits for the network.
func startBed(ctx context.Context, o options) (*testBed, error) {
	b := &testBed{
		ofLimits: o.bed, ofRest: o.bed, program: filepath.Join(o.workDir, "testbed"), tests: static.dir(o), prepared: make(chan struct{}),
	}
	if o.bed == o.ownBed() {
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
	cmd := exec.CommandContext(ctx, b.program, append([]string{"-machines", machines, "-tests", b.tests, "-out", out}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its machines
	cmd.WaitDelay = time.Minute
	return cmd
}

// A turn of the bed runs a plan in its machines, each of which is started for it.
type turn struct {
	machines string   // as testbed -machines takes them
	plan     string   // as testbed -plan takes it; empty: nothing is to run
	paths    []string // of the packages in it that all machines run
	ahead    []string // of those that only [aheadMachine] runs
	skips    []string // flags that leave some of it out
	out      string   // directory for logs and results
}

// limits is the first turn: tests/limits, whole, and what the native lanes will skip; in a soak run
// tests of networks. It goes on beside the native lanes, of which it needs to know nothing.
func (b *testBed) limits(ctx context.Context, o options, packages []*testPackage) (map[*lane][]testresult.Package, error) {
	plan, paths := firstPlan(o)
	more, others := ahead(ctx, o, packages, filepath.Join("bin", "sandboxd"))
	return b.take(ctx, o, turn{machines: b.ofLimits, plan: plan + more, paths: paths, ahead: others, skips: skips(o), out: bedOut})
}

// rest is the second turn: tests that every lane has skipped. Mostly there are none, and then no
// machine is started. Tests that fail, and machines that die, are results and no errors.
func (b *testBed) rest(ctx context.Context, o options, results *results) (map[*lane][]testresult.Package, error) {
	plan, paths := bedPlan(results)
	return b.take(ctx, o, turn{machines: b.ofRest, plan: plan, paths: paths, out: bedOut + "-rest"})
}

// take waits for the image, runs a turn and returns what each lane's packages did.
func (b *testBed) take(ctx context.Context, o options, t turn) (map[*lane][]testresult.Package, error) {
	select {
	case <-b.prepared:
	case <-ctx.Done(): // a download for the image ends with the bed
		return nil, ctx.Err()
	}
	if b.err != nil {
		return nil, fmt.Errorf("its image could not be made, see above (BED=no leaves the bed out, and then nothing says that limits bite): %w", b.err)
	}
	// Results of an earlier run are not this one's.
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
	fmt.Printf("\n== bed: %s: %s\n", t.machines, strings.Join(shortNames(slices.Concat(t.paths, t.ahead)), ", "))
	args := append([]string{"-plan", file, "-timeout", jobLimit, "-parallel", fmt.Sprint(machinesAtOnce)}, t.skips...)
	if o.soak {
		args = append(args, "-soak")
	}
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
		paths := t.paths
		if machine == aheadMachine {
			paths = slices.Concat(paths, t.ahead)
		}
		its[l] = testresult.ReadDir(ctx, filepath.Join(t.out, machine, "results", user), paths)
	}
	return its, ctx.Err()
}

// forget removes what these machines have left in a directory, alive or dead.
func (b *testBed) forget(out string) error {
	for _, l := range b.lanes {
		machine, _ := l.machine()
		if err := os.RemoveAll(filepath.Join(out, machine)); err != nil {
			return err
		}
	}
	return nil
}

// machine returns the machine and the user of a lane of the bed.
func (l *lane) machine() (name, user string) {
	name, user, _ = strings.Cut(strings.TrimPrefix(l.Name, "bed/"), "/")
	return name, user
}

// bedPlan writes what all lanes have skipped so far as testbed -plan takes it. tests/limits has had
// its turn, and a skip that is expected in the bed too starts no machine.
func bedPlan(results *results) (plan string, paths []string) {
	var lines strings.Builder
	for _, pkg := range sortedKeys(results.by) {
		left := slices.DeleteFunc(sortedKeys(results.leftOver(pkg)), func(test string) bool {
			_, expected := expectedSkip(shortName(pkg) + "." + test)
			return expected
		})
		if len(left) == 0 || pkg == limitsPackage {
			continue
		}
		fmt.Fprintf(&lines, "%s\t%s\n", pkg, selection(left))
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
