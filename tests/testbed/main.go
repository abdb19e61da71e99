// Command testbed runs tests in a machine of its own: a small Debian in QEMU, where cgroup v2 has
// its controllers and an ordinary user has a subtree of it. docs/testbed.md says how to use it.
//
//	main.go      what is asked for, and what its outcome means
//	image.go     the image and the kernels, made once by image.sh and kept by the hash of their recipe
//	payload.go   what goes into the machine, and what comes back
//	qemu.go      one machine, from its start to its end; the protocol with the agent
//	guest/       what runs inside: PID 1 of the flavour tiny, the agent, testbed-as
//	suite.sh     what the agent runs, once for each user, to run the test binaries
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
)

// exitDead is the exit status where a machine died, hung or could not be made: nothing is known of
// the tests.
const exitDead = 125

var (
	kernels  = []string{"6.1", "6.12", newest}
	flavours = []string{"tiny", "systemd"}
	users    = []string{"dev", "root"}
)

type options struct {
	kernels, flavours, users []string
	machines                 []spec // instead of all combinations of these
	parallel                 int    // machines that run at once
	soak                     bool   // tests are to judge the clock, and to repeat random choices many times

	plan     string        // file with packages and the tests of each
	packages string        // patterns of test packages, separated by spaces
	run      string        // regexp of tests
	skips    skips         // regexps of tests that are left out
	payload  string        // directory to take along instead of the suite
	argv     []string      // command to run in it
	shell    bool          // a shell instead of the job
	prepare  bool          // make the image and end
	check    bool          // read the flags and end
	timeout  time.Duration // of the job
	out      string        // directory for logs and results
	bin      string        // directory of the built binaries
	tests    string        // directory of test binaries that need not be compiled
}

// choice is a flag that takes some of a few words, separated by commas, or "all".
type choice struct {
	of     []string
	chosen *[]string
}

func (c choice) String() string {
	if c.chosen == nil {
		return ""
	}
	return strings.Join(*c.chosen, ",")
}

func (c choice) Set(s string) error {
	if s == "all" {
		*c.chosen = c.of
		return nil
	}
	words := strings.Split(s, ",")
	for _, w := range words {
		if !slices.Contains(c.of, w) {
			return fmt.Errorf("want %s or all", strings.Join(c.of, ", "))
		}
	}
	*c.chosen = words
	return nil
}

// spec is a machine and the users that run the job in it.
type spec struct {
	kernel, flavour string
	users           []string
}

func (s spec) String() string { return s.kernel + "-" + s.flavour }

// specs is a flag of machines: 6.1-tiny,6.12-systemd/root. Without a user it is all of them.
type specs struct{ to *[]spec }

func (specs) String() string { return "" }

func (l specs) Set(s string) error {
	for word := range strings.SplitSeq(s, ",") {
		machine, user, one := strings.Cut(word, "/")
		kernel, flavour, _ := strings.Cut(machine, "-")
		m := spec{kernel: kernel, flavour: flavour, users: users}
		if one {
			m.users = []string{user}
		}
		if !slices.Contains(kernels, kernel) || !slices.Contains(flavours, flavour) || one && !slices.Contains(users, user) {
			return fmt.Errorf("%q is not a kernel, a flavour and perhaps a user: 6.12-tiny/dev", word)
		}
		same := slices.IndexFunc(*l.to, func(other spec) bool { return other.String() == m.String() })
		if same < 0 {
			*l.to = append(*l.to, m)
		} else {
			(*l.to)[same].users = slices.Compact(slices.Sorted(slices.Values(append((*l.to)[same].users, m.users...))))
		}
	}
	return nil
}

// skips is a flag of tests that a machine leaves out.
type skips map[string]string

func (skips) String() string { return "" }

func (s skips) Set(v string) error {
	machine, tests, ok := strings.Cut(v, "=")
	kernel, flavour, _ := strings.Cut(machine, "-")
	if !ok || !slices.Contains(kernels, kernel) || !slices.Contains(flavours, flavour) {
		return fmt.Errorf("%q is not a machine and what it leaves out: 6.1-tiny=^TestSlow$", v)
	}
	s[machine] = tests
	return nil
}

func main() {
	o := options{skips: skips{}, kernels: []string{"6.12"}, flavours: []string{"tiny"}, users: users}
	flag.Var(choice{kernels, &o.kernels}, "kernel", "kernels to run on: 6.1, 6.12, newest (that Debian offers today) or all")
	flag.Var(choice{flavours, &o.flavours}, "flavour", "how the machine is started: tiny (an init of ours), systemd or all")
	flag.Var(choice{users, &o.users}, "as", "who runs the job: dev (an ordinary user with a delegated cgroup), root or all")
	flag.Var(specs{&o.machines}, "machines", "`list` of machines instead, each with all users or one: 6.1-tiny,6.12-systemd/root")
	flag.IntVar(&o.parallel, "parallel", 1, "how many machines run at once; their consoles are shown for 1 only")
	flag.BoolVar(&o.soak, "soak", false, "run what `make soak` adds: tests that judge the clock, and many rounds of random choices")
	flag.StringVar(&o.packages, "pkg", "./tests/limits", "test `packages` to compile and run")
	flag.StringVar(&o.run, "run", "", "run only tests that match the `regexp`")
	flag.Var(o.skips, "skip", "leave out tests that match a regexp, as go test does, in one machine: `6.1-tiny=REGEXP`; repeatable")
	flag.StringVar(&o.plan, "plan", "", "`file` that says instead what to run: lines of a package, a regexp of its tests and the one machine that it is for, separated by tabs")
	flag.StringVar(&o.payload, "payload", "", "take this `directory` along instead, and run the command given as arguments in it")
	flag.BoolVar(&o.shell, "shell", false, "open a shell of root in the machine; testbed-as dev bash is one of dev")
	flag.BoolVar(&o.prepare, "prepare", false, "make the image where it is missing, and end")
	flag.BoolVar(&o.check, "check", false, "end once the flags have been read")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "how long the job may take for each user, a minute at least")
	flag.StringVar(&o.out, "out", "build/testbed", "`directory` for logs and results")
	flag.StringVar(&o.bin, "bin", "bin", "`directory` of the built binaries")
	flag.StringVar(&o.tests, "tests", "", "`directory` of static test binaries that are taken as they are")
	flag.Parse()
	o.argv = flag.Args()
	if len(o.machines) == 0 {
		for _, kernel := range o.kernels {
			for _, flavour := range o.flavours {
				o.machines = append(o.machines, spec{kernel, flavour, o.users})
			}
		}
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if o.shell {
		// Typed signals are the machine's business.
		stop()
		ctx, stop = signal.NotifyContext(context.Background(), syscall.SIGTERM)
	}
	code, err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbed:", err)
	}
	os.Exit(code)
}

func run(ctx context.Context, o options) (code int, err error) {
	if (o.payload == "") != (len(o.argv) == 0) {
		return exitDead, errors.New("-payload and a command belong together")
	}
	if o.timeout < time.Minute {
		return exitDead, fmt.Errorf("-timeout %s: a minute is the least that a job can be given", o.timeout)
	}
	if o.check {
		return 0, nil
	}
	var wanted []string
	for _, s := range o.machines {
		wanted = append(wanted, s.kernel)
	}
	made, err := prepare(ctx, wanted)
	if err != nil || o.prepare {
		return codeOf(err), err
	}
	p, err := makePlan(ctx, o)
	if err != nil {
		return exitDead, err
	}
	payload, remove, err := assemble(ctx, o, p)
	if err != nil {
		return exitDead, err
	}
	defer remove()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // guards code and errs
		errs  []error
		slots = make(chan struct{}, max(o.parallel, 1))
	)
	for _, s := range o.machines {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			its, err := o.runMachine(ctx, s, made, payload, p)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", s, err))
			}
			if err != nil || code == 0 {
				code = its
			}
		})
	}
	wg.Wait()
	return code, errors.Join(errs...)
}

// runMachine runs the job in one machine and writes its results; an error comes with the code
// [exitDead].
func (o options) runMachine(ctx context.Context, s spec, made images, payload string, p plan) (code int, err error) {
	root, vmlinuz := made.of(s.kernel)
	m := machine{
		name: s.String(), root: root, vmlinuz: vmlinuz, flavour: s.flavour, users: s.users, payload: payload, shell: o.shell, quiet: o.parallel > 1,
		soak: o.soak,
		out:  filepath.Join(o.out, s.String()),
		// The job's own limits end it first, with its results.
		limit: time.Duration(len(s.users))*(o.timeout+15*time.Second) + bootLimit,
	}
	what := s.String()
	if s.kernel == newest {
		what += " (" + made.newest + ")"
	}
	fmt.Printf("== %s\n", what)
	outcome, err := m.run(ctx)
	if err != nil {
		return exitDead, err
	}
	fmt.Printf("== %s: exit %d; agent up after %s, whole run %s, of processors %s; logs and results in %s\n",
		what, outcome.code, outcome.boot.Round(100*time.Millisecond), outcome.wall.Round(100*time.Millisecond), outcome.cpu.Round(time.Second), m.out)
	if len(p) == 0 {
		return outcome.code, nil
	}
	var lanes []testresult.Lane
	for _, user := range s.users {
		results := testresult.ReadDir(ctx, filepath.Join(m.out, "results", user), p.paths(s.String()))
		lanes = append(lanes, testresult.Lane{Name: "bed/" + s.String() + "/" + user, Packages: results})
	}
	if err := testresult.WriteJUnitFile(filepath.Join(m.out, "junit.xml"), lanes...); err != nil {
		return exitDead, err
	}
	return outcome.code, nil
}

func codeOf(err error) int {
	if err != nil {
		return exitDead
	}
	return 0
}
