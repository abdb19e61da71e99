// Command lanes compiles every test of the tree once and runs it in each lane: as root, and as an ordinary user with
// subordinate ids and a clean environment.
//
// It ends with one table of packages by lanes, and fails when a test failed, or when a test was skipped in every lane
// and is not on the list of expected skips: a promise that no lane checks is no promise.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// buildTags are those of the launcher, see the Makefile.
const buildTags = "seccomp osusergo netgo"

type options struct {
	lane     string // "root", "rootless" or "all"
	run      string // regexp of tests, empty for all
	packages string // pattern of packages
	parallel int    // packages compiled or tested at once
	workDir  string
}

func main() {
	var o options
	flag.StringVar(&o.lane, "lane", "all", "`root`, rootless or all")
	flag.StringVar(&o.run, "run", "", "run only tests that match the `regexp`; missing lanes and skips are then not judged")
	flag.StringVar(&o.packages, "pkg", "", "test only the packages that match the `pattern`; the same applies")
	flag.IntVar(&o.parallel, "p", 2, "how many packages to compile and to test at once")
	flag.Parse()
	if o.packages == "" {
		o.packages = "./..."
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

	began := time.Now()
	packages, err := compile(ctx, o)
	if err != nil {
		return false, err
	}
	fmt.Printf("compiled %d test binaries in %s\n", len(packages), time.Since(began).Round(time.Second))

	results := newResults(lanes)
	for _, lane := range lanes {
		if lane.Unavailable != "" {
			fmt.Printf("\n== lane %s: not run: %s\n", lane.Name, lane.Unavailable)
			continue
		}
		fmt.Printf("\n== lane %s\n", lane.Name)
		if err := runLane(ctx, o, lane, packages, results); err != nil {
			return false, fmt.Errorf("lane %s: %w", lane.Name, err)
		}
	}
	narrowed := o.run != "" || o.packages != "./..." || o.lane != "all"
	return results.report(os.Stdout, narrowed), nil
}

// expectedSkips are the tests that no lane of this machine can run, each with the reason. Anything else that is
// skipped everywhere is a failure.
// The test's name is that of its package below the module, a dot and its own.
var expectedSkips = []struct{ test, reason string }{
	{`^tests/security\.TestAttacksAreRefused/(socket-alg|tcp-ulp|x32-abi)$`, "the kernel at hand has not what is attacked"},
	{`^tests/functional\.Test(MemoryLimit|PidsLimit)`, "needs delegated cgroup v2 controllers; tests/limits tries the same in the test bed"},
	{`^tests/limits\.`, "needs delegated cgroup v2 controllers; make testbed runs it"},
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
	_, rest, _ := strings.Cut(pkg, "/sandboxd/sandboxd")
	if rest == "" {
		return "."
	}
	return strings.TrimPrefix(rest, "/")
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
