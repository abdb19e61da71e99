// Command lanes compiles every test of the tree once and runs it in each lane: as an ordinary user
// with subordinate ids and a clean environment, and as root. A package that neither asks for its
// uid nor for privileges of the kernel runs in the ordinary user's lane only, but for its tests
// that need root. Races are looked for in that lane. Soak runs run all in both. Tests that no lane
// of this machine can run run in the machines of the test bed, which are lanes too
// (docs/testbed.md), beside the native lanes. Those that turn out to be left over come last.
//
// The run ends with one table of packages by lanes. It fails if a test failed, or if a test was
// skipped in every lane and is neither left to a soak run ([testenv.Soak]) nor on the list of
// expected skips: a promise that no lane checks is no promise. No test is tried twice.
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
	soak     bool   // set SANDBOXD_TEST_SOAK for the tests
	workDir  string
}

// defaultBed is the oldest and the newest kernel, each flavour and each user. All other
// combinations are for soak runs.
const defaultBed = "6.1-tiny/dev,newest-systemd/root"

// defaultRest is the machine for tests that all lanes have skipped, the first turn of the bed
// included: one that can run all of them. None needs systemd, with which a machine takes a minute
// longer to start.
const defaultRest = "newest-tiny/root"

// wholeBed are all machines: the default bed of a soak run.
const wholeBed = "6.1-tiny,6.12-tiny,newest-tiny,6.1-systemd,6.12-systemd,newest-systemd"

// module is the import path that all our packages' begin with.
const module = "github.com/sandboxd/sandboxd"

// everything is the pattern of all packages.
const everything = "./..."

// narrowed reports whether the run leaves something out, so that tests skipped everywhere cannot
// be judged. A bed that was chosen narrows it too: it may lack a need.
func (o options) narrowed() bool {
	return o.run != "" || o.packages != everything || o.lane != "all" || o.bed != "" && o.bed != o.ownBed()
}

// ownBed returns the machines that a whole run has.
func (o options) ownBed() string {
	if o.soak {
		return wholeBed
	}
	return defaultBed
}

func main() {
	var o options
	flag.StringVar(&o.lane, "lane", "all", "`root`, rootless or all")
	flag.StringVar(&o.run, "run", "", "run only tests that match the `regexp`; missing lanes and skips are then not judged")
	flag.StringVar(&o.packages, "pkg", "", "test only the packages that match the `pattern`; the same applies")
	flag.StringVar(&o.bed, "bed", "", "`machines` of the test bed, as testbed -machines takes them, or no;\n"+
		"the default is "+defaultBed+", and no if -lane, -run or -pkg narrow")
	flag.BoolVar(&o.soak, "soak", false, "add the tests that judge the clock, and many rounds of random choices; hours")
	flag.IntVar(&o.parallel, "p", 2, "how many packages to compile and to test at once")
	flag.Parse()
	if o.packages == "" {
		o.packages = everything
	}
	if o.bed == "" {
		if o.bed = o.ownBed(); o.narrowed() {
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
	// A soak run leaves nothing out, in no lane.
	ordinary := !o.soak && slices.ContainsFunc(lanes, func(l *lane) bool { return l.Name == rootlessLane && l.native() })
	for _, l := range lanes {
		l.second = ordinary && l.Name != rootlessLane
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
	drivers, _ := split(packages)
	if err := compile(ctx, o, static, lanes, drivers); err != nil {
		return false, err
	}
	// The machines need nothing of the native lanes and run longest, so they begin while the rest is
	// compiled.
	inBed := map[*lane][]testresult.Package{}
	var beside errgroup.Group // one that could not run does not end the other
	compiled, uncompiled := context.WithCancel(ctx)
	defer uncompiled()
	emulated := make(chan struct{}) // closed when the machines have had their first turn
	if bed == nil || !slices.ContainsFunc(packages, func(p *testPackage) bool { return p.Path == limitsPackage }) {
		close(emulated)
	} else {
		beside.Go(func() (err error) {
			defer close(emulated)
			if inBed, err = bed.limits(compiled, o, packages); err != nil {
				return fmt.Errorf("test bed: %w", err)
			}
			return nil
		})
	}
	for _, k := range []kind{static, plain, raced} {
		if err == nil {
			err = compile(ctx, o, k, lanes, packages)
		}
	}
	if err == nil {
		err = o.provide(ctx)
	}
	if err != nil {
		uncompiled()
		_ = beside.Wait() // it was ended
		return false, err
	}
	fmt.Printf("compiled %d test binaries in %s\n", len(packages), time.Since(began).Round(time.Second))
	beside.Go(func() error { return runNative(ctx, o, lanes, packages, emulated, results) })
	// The results of all lanes are reported, whatever became of one.
	err = beside.Wait()
	results.addAll(inBed)
	if err == nil && bed != nil {
		var rest map[*lane][]testresult.Package
		if rest, err = bed.rest(ctx, o, results); err != nil {
			err = fmt.Errorf("test bed: %w", err)
		}
		results.addAll(rest)
	}
	ok = results.report(os.Stdout, o)
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

// npm is where the npm packages lie that tests run or build with.
func (o options) npm() string { return filepath.Join(o.workDir, "npm") }

// provide makes the helpers and packages that all lanes need, once. Downloads are kept in a cache
// that other users may not read.
func (o options) provide(ctx context.Context) error {
	if err := os.Mkdir(o.helpers(), 0o755); err != nil {
		return err
	}
	if err := testtree.BuildHelpers(ctx, o.helpers()); err != nil {
		return err
	}
	for _, from := range []struct{ name, script, to string }{{"debs", "hack/debs.sh", o.debs()}, {"npm", "hack/npm.sh", o.npm()}} {
		if err := fetch(ctx, from.name, from.script, from.to); err != nil {
			return err
		}
	}
	return nil
}

// fetch runs a script that gets packages for a directory of the cache, and copies them.
func fetch(ctx context.Context, name, script, to string) error {
	kept, unlock, err := testtree.Kept(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	if out, err := exec.CommandContext(ctx, script, kept).CombinedOutput(); err != nil {
		return fmt.Errorf("get the packages of %s: %w\n%s", script, err, out)
	}
	const place = `cp -r --link "$1" "$2" 2>/dev/null || { rm -rf "$2"; cp -r "$1" "$2"; }`
	if out, err := exec.CommandContext(ctx, "sh", "-c", place, "sh", kept, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the packages of %s: %w\n%s", script, err, out)
	}
	return nil
}

// runNative runs the lanes of this machine beside each other and writes what came of each. Packages
// that drive daemons wait until emulated is closed.
func runNative(ctx context.Context, o options, lanes []*lane, packages []*testPackage, emulated <-chan struct{}, results *results) error {
	places := places{drivers: newSlots(driversAtOnce), others: newSlots(o.parallel)}
	group, ctx := errgroup.WithContext(ctx)
	for _, lane := range lanes {
		switch {
		case lane.Unavailable != "":
			fmt.Printf("\n== lane %s: not run: %s\n", lane.Name, lane.Unavailable)
			continue
		case lane.inBed:
			continue
		}
		fmt.Printf("\n== lane %s\n", lane.Name)
		group.Go(func() error {
			return finish(lane, results, runLane(ctx, o, lane, places, lane.share(packages), emulated, results))
		})
	}
	return group.Wait()
}

// finish writes the results of a lane of this machine, unless it could not be run.
func finish(l *lane, results *results, err error) error {
	if err == nil {
		err = testresult.WriteJUnitFile(filepath.Join("build", "junit-"+l.Name+".xml"), results.of(l))
	}
	if err != nil {
		return fmt.Errorf("lane %s: %w", l.Name, err)
	}
	return nil
}

// expectedSkips are the tests that no lane can run, neither on this machine nor in the bed, each
// with the reason. Anything else that is skipped everywhere is a failure. The test's name is that
// of its package below the module, a dot and its own.
var expectedSkips = []struct{ test, reason string }{
	{
		`^tests/security\.TestAttacksAreRefused/(write-uevent-helper|write-binfmt|read-firmware|socket-(can|key|rds|sctp|tipc))$`,
		"a machine has that module, device or option or it does not: the attack is tried all the same, only its control does not work",
	},
	{`^tests/security\.TestAttacksAreRefused/mount-cgroup1$`, "a kernel has hierarchies of cgroup v1 that nobody has mounted, or it has none"},
	{
		`^tests/security\.TestAttacksAreRefused/next-mount-namespace$`,
		"the kernel asks for the host's first PID namespace, and controls run in one of their own: the attack is tried all the same",
	},
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

// shortName turns an import path into the name in the table.
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
