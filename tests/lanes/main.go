// Command lanes compiles every test of the tree once and runs it in each lane: as root, and as an ordinary user with
// subordinate ids and a clean environment. What neither of them could run, it then runs in the machines of the test bed, which
// are lanes too (docs/testbed.md); tests/limits is run there from the beginning. Meanwhile the targets that read what strangers send
// are fuzzed.
//
// It ends with one table of packages by lanes, and fails when a test failed, or when a test was skipped in every lane
// and is not on the list of expected skips: a promise that no lane checks is no promise.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/tests/testresult"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

type options struct {
	lane     string // "root", "rootless" or "all"
	run      string // regexp of tests, empty for all
	packages string // pattern of packages
	parallel int    // packages compiled or tested at once
	bed      string // machines of the test bed; "no" for none, empty for the default
	workDir  string
}

// defaultBed is the oldest and the newest kernel, each flavour and each user, in the time that `make test` has for it. What the
// others do, all of them with each flavour and each user, is for `make testbed`, before a release.
const defaultBed = "6.1-tiny/dev,newest-systemd/root"

// defaultRest is where what the native lanes have skipped is run then: of that nothing asks for systemd, with which a machine takes a
// minute longer to start.
const defaultRest = "6.1-tiny/dev,newest-tiny/root"

// briefly are those machines in which long tests are brief: 300 sandboxes and 16 kills take five minutes where they are emulated
// beside the other lanes, and are for `make testbed`.
const briefly = "6.1-tiny,newest-systemd,newest-tiny"

// module is the import path that all our packages' begin with.
const module = "github.com/sandboxd/sandboxd"

// everything is the pattern of all packages.
const everything = "./..."

// narrowed says that the run was asked to leave something out, and so cannot be judged by what it left out. Other machines
// than the default's are left out too: what runs in those that were chosen is not known.
func (o options) narrowed() bool {
	return o.run != "" || o.packages != everything || o.lane != "all" || o.bed != "" && o.bed != defaultBed
}

func main() {
	var o options
	flag.StringVar(&o.lane, "lane", "all", "`root`, rootless or all")
	flag.StringVar(&o.run, "run", "", "run only tests that match the `regexp`; missing lanes and skips are then not judged")
	flag.StringVar(&o.packages, "pkg", "", "test only the packages that match the `pattern`; the same applies")
	flag.StringVar(&o.bed, "bed", "", "`machines` of the test bed, as testbed -machines takes them, or no;\n"+
		"the default is "+defaultBed+", and no where -lane, -run or -pkg narrow")
	flag.IntVar(&o.parallel, "p", 2, "how many packages to compile and to test at once")
	flag.Parse()
	if o.packages == "" {
		o.packages = everything
	}
	if o.bed == "" {
		if o.bed = defaultBed; o.narrowed() {
			o.bed = "no"
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "lanes:", err)
		os.Exit(1)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (ok bool, err error) {
	lanes, err := planLanes(o.lane, os.Geteuid())
	if err != nil {
		return false, err
	}
	o.workDir, err = os.MkdirTemp("", "sandboxd-lanes-")
	if err != nil {
		return false, err
	}
	defer func() { err = joinErr(err, removeTree(ctx, o.workDir)) }()
	// The ordinary user's lane runs binaries from here.
	if err := os.Chmod(o.workDir, 0o755); err != nil {
		return false, err
	}

	if !o.narrowed() { // then there is a lane of the ordinary user, the second
		lanes = append(lanes, &lane{Name: fuzzLane, user: lanes[1].user})
	}
	var bed *testBed
	if o.bed != "no" {
		if bed, err = startBed(ctx, o); err != nil {
			return false, err
		}
		defer bed.stop()
		lanes = append(lanes, bed.lanes...)
	}
	packages, err := listPackages(ctx, o)
	if err != nil {
		return false, err
	}
	results := newResults(lanes)
	began := time.Now()
	if err := compile(ctx, o, packages, static); err != nil {
		return false, err
	}
	// What needs a cgroup v2 host needs nothing of the lanes: its machines run beside them, and longest, so they begin while the rest
	// is compiled. What the lanes leave over comes last.
	inBed := map[*lane][]testresult.Package{}
	var beside, fuzzing errgroup.Group // what one could not do is no reason to end the other
	compiled, uncompiled := context.WithCancel(ctx)
	defer uncompiled()
	if bed != nil && slices.ContainsFunc(packages, func(p *testPackage) bool { return p.Path == limitsPackage }) {
		beside.Go(func() (err error) {
			if inBed, err = bed.limits(compiled, o); err != nil {
				return fmt.Errorf("test bed: %w", err)
			}
			return nil
		})
	}
	if err = compile(ctx, o, packages, plain, raced); err == nil {
		err = o.provide(ctx)
	}
	if err != nil {
		uncompiled()
		_ = beside.Wait() // it was ended
		return false, err
	}
	fmt.Printf("compiled %d test binaries in %s\n", len(packages), time.Since(began).Round(time.Second))
	for _, l := range lanes {
		if l.Name == fuzzLane { // it takes what the others leave, to the end
			fuzzing.Go(func() error { return finish(l, results, runFuzz(ctx, o, l, results)) })
		}
	}
	beside.Go(func() error { return runNative(ctx, o, lanes, packages, results) })
	if err = beside.Wait(); err == nil && bed != nil {
		var rest map[*lane][]testresult.Package
		rest, err = bed.rest(ctx, o, results)
		for l, its := range rest {
			inBed[l] = together(inBed[l], its)
		}
		if err == nil {
			err = bed.secondTries(ctx, o, inBed)
		}
		if err != nil {
			err = fmt.Errorf("test bed: %w", err)
		}
	}
	err = joinErr(err, fuzzing.Wait())
	// Whatever became of the others, what each did is told.
	for l, its := range inBed {
		for _, r := range its {
			results.add(l, r)
		}
	}
	ok = results.report(os.Stdout, o.narrowed())
	if o.narrowed() {
		fmt.Println("this run was narrowed: that a test was skipped everywhere was not judged")
	}
	if o.bed == "no" {
		fmt.Println("the test bed was left out: nothing here says that limits bite")
	}
	return ok && err == nil, err
}

// helpers is where the programs lie that tests need beside the built binaries.
func (o options) helpers() string { return filepath.Join(o.workDir, "helpers") }

// debs is where the packages lie that tests make images of.
func (o options) debs() string { return filepath.Join(o.workDir, "debs") }

// provide makes what all lanes need, once. What it takes from the network it keeps, in a cache that other users may not read.
func (o options) provide(ctx context.Context) error {
	for _, dir := range []string{o.helpers(), o.debs()} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := testtree.BuildHelpers(ctx, o.helpers()); err != nil {
		return err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	kept := filepath.Join(cache, "sandboxd-tests", "debs")
	if out, err := exec.CommandContext(ctx, "hack/debs.sh", kept).CombinedOutput(); err != nil {
		return fmt.Errorf("fetch packages: %w\n%s", err, out)
	}
	if out, err := exec.CommandContext(ctx, "sh", "-c", `install -m 644 "$1"/*.deb "$2"`, "sh", kept, o.debs()).CombinedOutput(); err != nil {
		return fmt.Errorf("copy packages: %w\n%s", err, out)
	}
	return nil
}

// runNative runs the lanes of this machine beside each other and writes what came of each.
func runNative(ctx context.Context, o options, lanes []*lane, packages []*testPackage, results *results) error {
	chains := 0 // of all lanes
	for _, l := range lanes {
		for name := range chainsOf(packages) {
			if l.native() && name != "" {
				chains++
			}
		}
	}
	free := newSlots(chains + max(o.parallel-1, 1)) // the tests that drive daemons mostly wait
	for range chains {
		free.take()
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, lane := range lanes {
		switch {
		case lane.Unavailable != "":
			fmt.Printf("\n== lane %s: not run: %s\n", lane.Name, lane.Unavailable)
			continue
		case lane.inBed, lane.Name == fuzzLane:
			continue
		}
		fmt.Printf("\n== lane %s\n", lane.Name)
		group.Go(func() error { return finish(lane, results, runLane(ctx, o, lane, free, packages, results)) })
	}
	return group.Wait()
}

// finish writes what a lane of this machine has done, unless it could not be run.
func finish(l *lane, results *results, err error) error {
	if err == nil {
		err = testresult.WriteJUnitFile(filepath.Join("build", "junit-"+l.Name+".xml"), results.of(l))
	}
	if err != nil {
		return fmt.Errorf("lane %s: %w", l.Name, err)
	}
	return nil
}

// expectedSkips are the tests that no lane can run, neither on this machine nor in the bed, each with the reason. Anything
// else that is skipped everywhere is a failure.
// The test's name is that of its package below the module, a dot and its own.
var expectedSkips = []struct{ test, reason string }{
	{
		`^tests/security\.TestAttacksAreRefused/(write-uevent-helper|write-binfmt|read-firmware|socket-(can|key|rds|sctp|tipc))$`,
		"a machine has that module, device or option or it does not: the attack is tried all the same, only its control does not work",
	},
	{`^tests/security\.TestAttacksAreRefused/mount-cgroup1$`, "a kernel has hierarchies of cgroup v1 that nobody has mounted, or it has none"},
	{`^tests/security\.TestAttacksAreRefused/x32-abi$`, "no cloud kernel of Debian is built with CONFIG_X86_X32_ABI"},
	{
		`^tests/functional\.TestChangeOfALargeFileIsACloneWhereItCanBe$`,
		"the kernel has no XFS or no loop devices, and the machines of the bed have none; where it has, the root lane must run it",
	},
	{
		`^internal/attack\.TestDockersCallsAreThoseOfItsProfile$`,
		"the list is of one version, which does not change: it is compared where `go mod download` has brought that",
	},
}

func expectedSkip(test string) (reason string, ok bool) {
	for _, e := range expectedSkips {
		if regexp.MustCompile(e.test).MatchString(test) {
			return e.reason, true
		}
	}
	return "", false
}

func joinErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// shortName turns an import path into what the table shows.
func shortName(pkg string) string {
	rest := strings.TrimPrefix(pkg, module)
	if rest == "" {
		return "."
	}
	return strings.TrimPrefix(rest, "/")
}

func shortNames(pkgs []string) []string {
	names := make([]string, len(pkgs))
	for i, pkg := range pkgs {
		names[i] = shortName(pkg)
	}
	return names
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
