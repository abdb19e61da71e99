package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/testresult"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// testUser is the ordinary user that is made for the rootless lane when the lanes are run by root.
// Tests of the root lane then run programs as that user, too.
const testUser = testenv.Account

// testTimeout ends the tests of one package in one lane if they hang. soakTimeout is that of a
// soak run.
const (
	testTimeout = 30 * time.Minute
	soakTimeout = 6 * time.Hour
)

// timeout returns the limit of one package's tests.
func (o options) timeout() time.Duration {
	if o.soak {
		return soakTimeout
	}
	return testTimeout
}

// rootlessLane is the name of the ordinary user's lane.
const rootlessLane = "rootless"

// A lane is a user that runs the tests, here or in a machine of the test bed.
type lane struct {
	Name        string
	Unavailable string   // why it cannot be run here
	require     string   // needs that must not be skipped in this lane (SANDBOXD_TEST_REQUIRE)
	sudo        bool     // reach root through sudo
	user        *account // become this user; nil: stay as we are
	// second is set if the ordinary user's lane runs beside this one. That one runs the tests that are
	// the same for every user, and looks for races.
	second bool
	inBed  bool // run by the test bed: the fields above are not for it
}

// native says that the lane runs all tests on this machine.
func (l *lane) native() bool { return !l.inBed && l.Unavailable == "" }

// share returns the packages that a lane runs. Of a package whose tests are the same for every
// user, a second lane runs the tests that need root.
func (l *lane) share(packages []*testPackage) []*testPackage {
	if !l.second {
		return packages
	}
	return slices.DeleteFunc(slices.Clone(packages), func(p *testPackage) bool { return !p.asksForUser && len(p.ofRoot) == 0 })
}

// account is the ordinary user of a lane.
type account struct {
	uid, gid uint32
	name     string
	home     string
}

// planLanes returns the lanes of this machine. It is pure but for looking for sudo and the test
// user.
func planLanes(which string, euid int) ([]*lane, error) {
	root := &lane{Name: "root", require: "userns,root,ownids,peer"}
	if testenv.CanReflink() {
		root.require += ",reflink"
	}
	rootless := &lane{Name: rootlessLane, require: "userns,subids,user,peer"}
	if which == "root" || which == "all" {
		if euid != 0 {
			root.sudo = true
			if err := exec.Command("sudo", "-n", "true").Run(); err != nil {
				root.Unavailable = "not root, and sudo wants a password"
			}
		}
	}
	if (which == "rootless" || which == "all") && euid == 0 {
		u, err := ensureTestUser()
		if err != nil {
			return nil, err
		}
		rootless.user = u
		root.require += ",account"
	}
	switch which {
	case "root":
		return []*lane{root}, nil
	case "rootless":
		return []*lane{rootless}, nil
	case "all":
		return []*lane{root, rootless}, nil
	}
	return nil, fmt.Errorf("unknown lane %q", which)
}

// ensureTestUser makes the ordinary user, with a range of subordinate ids, where there is none yet.
func ensureTestUser() (*account, error) {
	if _, err := user.Lookup(testUser); err != nil {
		if _, ok := errors.AsType[user.UnknownUserError](err); !ok {
			return nil, fmt.Errorf("look up user %s: %w", testUser, err)
		}
		if out, err := exec.Command("useradd", "--create-home", "--shell", "/bin/sh", testUser).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("make user %s: %w: %s", testUser, err, out)
		}
	}
	for _, f := range []struct{ file, flag string }{{"/etc/subuid", "--add-subuids"}, {"/etc/subgid", "--add-subgids"}} {
		data, err := os.ReadFile(f.file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		if strings.Contains("\n"+string(data), "\n"+testUser+":") {
			continue
		}
		// useradd gives ranges only where login.defs says so; a fixed range far from the usual ones then.
		if out, err := exec.Command("usermod", f.flag, "900000000-900065535", testUser).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("give %s subordinate ids: %w: %s", testUser, err, out)
		}
	}
	u, err := user.Lookup(testUser)
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &account{uid: uint32(uid), gid: uint32(gid), name: u.Username, home: u.HomeDir}, nil
}

// A testPackage is one package with tests and its compiled binary.
type testPackage struct {
	Path     string          // import path
	Dir      string          // relative to the module root
	binaries map[kind]string // as far as they are compiled
	// drives is set if its tests drive whole daemons.
	drives bool
	// asksForUser is set if its tests may differ between users, so that both lanes run them.
	asksForUser bool
	// ofRoot are the tests that need root.
	ofRoot []string
	// ofBed are the tests that need something which this machine lacks and the test bed has.
	ofBed []string
	// concurrent is set if its code starts goroutines.
	concurrent bool
}

// userMatters matches code whose outcome depends on the user: it asks for the uid, or a test needs
// a privilege that root and others get in different ways.
var userMatters = regexp.MustCompile(`\bGete?uid\(\)|\btestenv\.Require(OrdinaryUser|UserNS|SubIDs|Cgroup|Systemd)\w*\(`)

// sameForAll are packages that ask for the uid, with the reason why their tests are the same for
// every user, but for those that need root.
var sameForAll = map[string]string{
	"cmd/sandboxd-agent": "only the browser's flags differ",
	"image":              "layers are unpacked as in image/layer, whose tests run in both lanes",
	"internal/agents":    "the uid is compared with that of files",
	"internal/cli":       "tests of an ordinary user become one",
	"internal/daemon":    "the uid is logged",
	"internal/httpapi":   "the uid is compared with that of clients",
	"internal/service":   "the uid is reported",
	"netns/gateway":      "its sockets are those of any user, also in a namespace of one",
	"tests/docs":         "documents are for every user",
	"tests/pyclient":     "the client has what the API has, which functional tests have as each user",
	"tests/tsclient":     "as tests/pyclient",
}

// goroutine matches code that starts one.
var goroutine = regexp.MustCompile(`(?m)^\s*(defer )?go \S|\.Go\(|\.Parallel\(\)`)

// needsRoot matches the beginning of a function, whose name it captures, or a need of root in one.
var needsRoot = regexp.MustCompile(`(?m)^func (?:\([^)]*\) )?(\w+)|\btestenv\.Require(?:Root|Reflink|OwnIDs)\(`)

// needsBed matches the beginning of a function, whose name it captures, or a need in one that the
// bed's machines meet, with its arguments.
var needsBed = regexp.MustCompile(`(?m)^func (?:\([^)]*\) )?(\w+)|\btestenv\.Require(Cgroup|Resource|Bed)\(t((?:, "\w+")*)\)`)

// lacking are the probes of those needs, which tests ask too. Each returns what is missing here.
var lacking = map[string]func(args ...string) string{
	"Cgroup":   testenv.LacksCgroup,
	"Resource": func(...string) string { return testenv.LacksResource() },
	"Bed":      func(...string) string { return testenv.LacksBed() },
}

// forBed returns the tests of a file that no native lane can run. A need that a helper function
// asks for is not found: its tests are left over, and the bed's second turn runs them.
func forBed(text []byte) (tests []string) {
	function := ""
	for _, m := range needsBed.FindAllSubmatch(text, -1) {
		if name := string(m[1]); name != "" {
			function = name
			continue
		}
		var args []string
		for arg := range strings.SplitSeq(strings.TrimPrefix(string(m[3]), ", "), ", ") {
			if arg != "" {
				args = append(args, strings.Trim(arg, `"`))
			}
		}
		if strings.HasPrefix(function, "Test") && lacking[string(m[2])](args...) != "" {
			tests = append(tests, function)
		}
	}
	return tests
}

// newPackage reads the Go files of a package, test or not: its tests depend on the user if
// [userMatters] matches one, and those functions need root that [needsRoot] matches.
func newPackage(importPath, dir string) (*testPackage, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	p := &testPackage{Path: importPath, Dir: dir, binaries: map[kind]string{}, drives: strings.HasPrefix(dir, "tests/")}
	_, same := sameForAll[filepath.ToSlash(dir)]
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		p.asksForUser = p.asksForUser || !same && userMatters.Match(text)
		p.concurrent = p.concurrent || goroutine.Match(text)
		p.ofBed = append(p.ofBed, forBed(text)...)
		function := ""
		for _, m := range needsRoot.FindAllSubmatch(text, -1) {
			switch name := string(m[1]); {
			case name != "":
				function = name
			case strings.HasPrefix(function, "Test"):
				p.ofRoot = append(p.ofRoot, function)
			default:
				p.asksForUser = true // through a function of several tests
			}
		}
	}
	slices.Sort(p.ofRoot)
	p.ofRoot = slices.Compact(p.ofRoot)
	slices.Sort(p.ofBed)
	p.ofBed = slices.Compact(p.ofBed)
	return p, nil
}

// listPackages lists those that have tests.
func listPackages(ctx context.Context, o options) ([]*testPackage, error) {
	list := exec.CommandContext(ctx, "go", "list", "-tags", testtree.Tags, "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles", o.packages)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	var packages []*testPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read package list: %w", err)
		}
		if len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			continue
		}
		rel, err := filepath.Rel(root, p.Dir)
		if err != nil {
			return nil, err
		}
		its, err := newPackage(p.ImportPath, rel)
		if err != nil {
			return nil, err
		}
		packages = append(packages, its)
	}
	return packages, nil
}

// compile builds the test binaries of a kind that the lanes run, one per package: several lanes,
// and several users, run the same ones.
func compile(ctx context.Context, o options, k kind, lanes []*lane, packages []*testPackage) error {
	its := slices.DeleteFunc(slices.Clone(packages), func(p *testPackage) bool {
		return p.binaries[k] != "" || !slices.ContainsFunc(lanes, func(l *lane) bool {
			return l.native() && p.kind(l.second) == k && slices.Contains(l.share(packages), p)
		})
	})
	if len(its) == 0 {
		return nil
	}
	return k.compile(ctx, o, its)
}

// A kind is how test binaries are compiled.
type kind string

const (
	// static is for packages that only drive the built binaries, for packages without goroutines, and
	// for a second lane. The bed's machines, which have another libc, run them too.
	static kind = "static"
	plain  kind = "plain" // without cgo
	raced  kind = "raced" // with the race detector
)

// kind returns that of the binary that a lane runs. The race detector takes four to nine times the
// processor time, so races are looked for in one lane, and where there can be one.
func (p *testPackage) kind(second bool) kind {
	switch {
	case slices.Contains(withoutCgo, p.Dir):
		return plain
	case p.drives || second || !p.concurrent:
		return static
	}
	return raced
}

// dir is where its binaries are.
func (k kind) dir(o options) string { return filepath.Join(o.workDir, "tests-"+string(k)) }

// compile makes all binaries of a kind by one command: each that is run reads the packages of the
// whole tree first. Paths are trimmed, so that the work of one clone of the tree serves the next.
// The binaries are kept in the user's cache, where the go command leaves those that are up to date
// alone: linking all of them takes as long as a tenth of the tests.
func (k kind) compile(ctx context.Context, o options, packages []*testPackage) error {
	kept, unlock, err := testtree.Kept(ctx, "tests-"+string(k))
	if err != nil {
		return err
	}
	defer unlock()
	// The linter has vetted the tree, and vet would look at the imports of each kind again.
	args := []string{"test", "-c", "-vet=off", "-trimpath", "-buildvcs=false", "-p", strconv.Itoa(o.parallel), "-tags", testtree.Tags, "-o", kept + "/"}
	cgo := "CGO_ENABLED=1"
	switch k {
	case static:
		args = append(args, `-ldflags=-w -linkmode external -extldflags "-static"`)
	case raced:
		args = append(args, "-ldflags=-w", "-race")
	case plain:
		args, cgo = append(args, "-ldflags=-w"), "CGO_ENABLED=0"
	}
	for _, p := range packages {
		args = append(args, p.Path)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile tests: %w\n%s", err, out)
	}
	if err := os.MkdirAll(k.dir(o), 0o755); err != nil {
		return err
	}
	for _, p := range packages {
		binary := filepath.Join(k.dir(o), testresult.FileName(p.Path)+".test")
		if err := testtree.LinkOrCopy(filepath.Join(kept, path.Base(p.Path)+".test"), binary); err != nil { // two of one name are an error of the command
			return err
		}
		p.binaries[k] = binary
	}
	return nil
}

// withoutCgo are the packages whose tests make a system call on all threads, which only a program
// without cgo can, as the product's daemon is one. Nor can they look for races then.
var withoutCgo = []string{"internal/confine", "internal/egress"}

// Packages that drive daemons, and their tests, mostly wait: so many run at once, of both lanes
// together, that two processors are busy. More would take more processor time for the same tests.
const (
	driversAtOnce = 5
	driversOfLane = 3 // of one lane, so that the longest of each begin first
	testsAtOnce   = 3 // of each
)

// split returns the packages that drive daemons, and the others.
func split(packages []*testPackage) (drivers, others []*testPackage) {
	for _, p := range packages {
		if p.drives {
			drivers = append(drivers, p)
		} else {
			others = append(others, p)
		}
	}
	return drivers, others
}

// places bound how many packages run at once, in both lanes together.
type places struct{ drivers, others slots }

// slots bounds how many things run at once.
type slots chan struct{}

func newSlots(n int) slots { return make(slots, max(n, 1)) }

func (s slots) take()    { s <- struct{}{} }
func (s slots) release() { <-s }

// each calls f for every package, in their order, as many at a time as there are slots, and
// returns when all have returned.
func each(s slots, packages []*testPackage, f func(*testPackage)) {
	var wg sync.WaitGroup
	for _, p := range packages {
		s.take()
		wg.Go(func() {
			defer s.release()
			f(p)
		})
	}
	wg.Wait()
}

// longest are the packages that take longest. They begin, so that what runs alone at the end is
// short.
var longest = []string{
	"agent", "image/layer", "internal/guest/host", "image", "internal/cli", "internal/service", "netns/gateway", "internal/attack", "cmd/sandboxd-agent",
	"internal/agents",
	"tests/functional", "tests/security", "tests/network", "tests/docker", "tests/code", "tests/mcpclients", "tests/engine", "tests/pyclient", "tests/tsclient",
}

// byLength orders packages.
func byLength(a, b *testPackage) int {
	place := func(p *testPackage) int {
		return (slices.Index(longest, p.Dir) + len(longest) + 1) % (len(longest) + 1)
	}
	return cmp.Compare(place(a), place(b))
}

// runLane runs every binary in a copy of the tree that belongs to the lane's user: a clone below
// /root, say, is out of an ordinary user's reach, and a test that writes beside its source must
// not write into ours. Packages that drive daemons run beside all others and those of the other
// lane: they mostly wait.
//
// They begin when emulated is closed. Each sandbox is some sessions, and the kernel gives
// each session a share of the processors (sched(7)). An emulated machine is one session: beside
// sandboxes it got so little that requests in it took longer than the minute that they may.
func runLane(ctx context.Context, o options, l *lane, places places, packages []*testPackage, emulated <-chan struct{}, results *results) (err error) {
	tree := filepath.Join(o.workDir, "tree-"+l.Name)
	if err := testtree.Copy(ctx, tree); err != nil {
		return err
	}
	bin := filepath.Join(tree, "bin")
	if err := testtree.CopyBinaries("bin", bin); err != nil {
		return err
	}
	if err := testtree.CopyHelpers(o.helpers(), bin); err != nil {
		return err
	}
	tmp, runtimeDir := filepath.Join(o.workDir, l.Name+"-tmp"), filepath.Join(o.workDir, l.Name+"-run")
	for _, dir := range []string{tmp, runtimeDir} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	remove, inMemory := l.scratch(ctx, tmp, o.soak)
	defer func() {
		if ctx.Err() != nil {
			endLeftovers(context.WithoutCancel(ctx), o.workDir) // as long as their sockets and logs can be reached
		}
		err = joinErr(err, remove())
	}()
	if l.Name == "root" {
		// As /var/lib: root's sandboxes run as high ids, which must be able to pass. An ordinary user's
		// home is 0700 on Debian, and so is its lane's directory.
		if err := os.Chmod(tmp, 0o755); err != nil {
			return err
		}
	}
	home := os.Getenv("HOME")
	switch {
	case l.sudo:
		home = "/root" // or root would leave files of its own in the user's
	case l.user != nil:
		home = l.user.home
	}
	if err := l.own(ctx, tree, tmp, runtimeDir); err != nil {
		return err
	}
	search := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if tool, err := exec.LookPath("go"); err == nil {
		search += ":" + filepath.Dir(tool) // last, for the tests that read what test binaries print
	}
	env := []string{
		"PATH=" + search, "HOME=" + home, "LANG=C.UTF-8",
		"TMPDIR=" + tmp, "XDG_RUNTIME_DIR=" + runtimeDir, "GORACE=atexit_sleep_ms=100",
		"SANDBOXD_BIN=" + bin, "SANDBOXD_TEST_DEBS=" + o.debs(), "SANDBOXD_TEST_NPM=" + o.npm(), "SANDBOXD_TEST_REQUIRE=" + l.require,
	}
	if more := os.Getenv("SANDBOXD_TEST_REQUIRE"); more != "" {
		env[len(env)-1] += "," + more
	}
	if !inMemory && !o.soak { // else the files of all daemons of a soak run would stay until its end
		env = append(env, "SANDBOXD_TEST_DISPOSABLE="+tmp)
	}
	for _, v := range os.Environ() { // how long tests/faults goes on, and with which choices
		if strings.HasPrefix(v, "SANDBOXD_FAULT_") || strings.HasPrefix(v, "SANDBOXD_AGENT_FAULT_") {
			env = append(env, v)
		}
	}
	if o.soak {
		env = append(env, "SANDBOXD_TEST_SOAK=yes")
	}
	if l.second {
		env = append(env, testenv.SecondVariable+"=yes")
	}
	one := func(p *testPackage) { results.add(l, runPackage(ctx, o, l, p, tree, env)) }
	var wg sync.WaitGroup
	drivers, others := split(slices.SortedStableFunc(slices.Values(packages), byLength))
	wg.Go(func() {
		select {
		case <-emulated:
		case <-ctx.Done():
		}
		each(newSlots(driversOfLane), drivers, func(p *testPackage) {
			places.drivers.take()
			defer places.drivers.release()
			one(p)
		})
	})
	each(places.others, others, one)
	wg.Wait()
	return ctx.Err()
}

// own gives files to the lane's user, if that is another than ours.
func (l *lane) own(ctx context.Context, dirs ...string) error {
	if l.user == nil {
		return nil
	}
	args := append([]string{"-R", fmt.Sprintf("%d:%d", l.user.uid, l.user.gid)}, dirs...)
	if out, err := exec.CommandContext(ctx, "chown", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("give the copy to %s: %w: %s", l.user.name, err, out)
	}
	return nil
}

// credential makes a process the lane's user; nil: it stays as we are.
func (l *lane) credential() *syscall.Credential {
	if l.user == nil {
		return nil
	}
	return &syscall.Credential{Uid: l.user.uid, Gid: l.user.gid}
}

// runPackage runs one test binary and returns the results of its tests.
func runPackage(ctx context.Context, o options, l *lane, p *testPackage, tree string, env []string) testresult.Package {
	run := o.run
	if l.second && !p.asksForUser && run == "" {
		run = selection(p.ofRoot)
	}
	args := testresult.Flags(o.timeout(), run)
	if p.drives {
		args = append(args, "-test.parallel="+strconv.Itoa(testsAtOnce))
	}
	name := p.binaries[p.kind(l.second)]
	if l.sudo {
		// env(1) because sudo replaces the environment.
		args = append(append(append([]string{"-n", "env", "-i"}, env...), name), args...)
		name = "sudo"
	}
	limited, cancel := context.WithTimeout(ctx, o.timeout()+time.Minute)
	defer cancel()
	test := exec.CommandContext(limited, name, args...)
	test.Dir = filepath.Join(tree, p.Dir)
	test.Env = env
	test.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: l.credential()}
	// The daemons that a killed test leaves behind may hold its output open.
	test.WaitDelay = 5 * time.Second
	began := time.Now()
	out, err := test.CombinedOutput()
	r := testresult.Read(ctx, p.Path, out, err)
	r.Elapsed = time.Since(began)
	if ended := test.ProcessState; ended != nil {
		r.Processors = ended.UserTime() + ended.SystemTime()
	}
	return r
}

// removeTree removes the work directory, with sudo for files that root's lane left in it. Files of
// subordinate ids go without sudo too.
func removeTree(ctx context.Context, dir string) error {
	if err := harness.RemoveAll(dir); err == nil {
		return nil
	}
	out, err := exec.CommandContext(context.WithoutCancel(ctx), "sudo", "-n", "rm", "-rf", "--one-file-system", "--", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("remove %s: %w: %s", dir, err, out)
	}
	return nil
}
