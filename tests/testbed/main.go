// Command testbed runs tests in a machine of its own: a small Debian in QEMU, where cgroup v2 has its controllers and an
// ordinary user has a subtree of it. docs/testbed.md says how to use it.
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
	"syscall"
	"time"
)

// exitDead is the exit status where a machine died, hung or could not be made: nothing is known of the tests.
const exitDead = 125

var (
	kernels  = []string{"6.1", "6.12", newest}
	flavours = []string{"tiny", "systemd"}
	users    = []string{"dev", "root"}
)

type options struct {
	kernels, flavours, users []string

	packages string        // patterns of test packages, separated by spaces
	run      string        // regexp of tests
	payload  string        // directory to take along instead of the suite
	argv     []string      // command to run in it
	shell    bool          // a shell instead of the job
	prepare  bool          // make the image and end
	timeout  time.Duration // of the job
	out      string        // directory for logs and results
	bin      string        // directory of the built binaries
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

func main() {
	o := options{kernels: []string{"6.12"}, flavours: []string{"tiny"}, users: users}
	flag.Var(choice{kernels, &o.kernels}, "kernel", "kernels to run on: 6.1, 6.12, newest (that Debian offers today) or all")
	flag.Var(choice{flavours, &o.flavours}, "flavour", "how the machine is started: tiny (an init of ours), systemd or all")
	flag.Var(choice{users, &o.users}, "as", "who runs the job: dev (an ordinary user with a delegated cgroup), root or all")
	flag.StringVar(&o.packages, "pkg", "./tests/limits", "test `packages` to compile and run")
	flag.StringVar(&o.run, "run", "", "run only tests that match the `regexp`")
	flag.StringVar(&o.payload, "payload", "", "take this `directory` along instead, and run the command given as arguments in it")
	flag.BoolVar(&o.shell, "shell", false, "open a shell of root in the machine; testbed-as dev bash is one of dev")
	flag.BoolVar(&o.prepare, "prepare", false, "make the image where it is missing, and end")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "how long the job may take for each user")
	flag.StringVar(&o.out, "out", "build/testbed", "`directory` for logs and results")
	flag.StringVar(&o.bin, "bin", "bin", "`directory` of the built binaries")
	flag.Parse()
	o.argv = flag.Args()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if o.shell {
		// What is typed is the machine's business.
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
	made, err := prepare(ctx, o.kernels)
	if err != nil || o.prepare {
		return codeOf(err), err
	}
	payload, remove, err := assemble(ctx, o)
	if err != nil {
		return exitDead, err
	}
	defer remove()
	var errs []error
	for _, kernel := range o.kernels {
		for _, flavour := range o.flavours {
			name := kernel + "-" + flavour
			fmt.Printf("== %s\n", name)
			root, vmlinuz := made.of(kernel)
			m := machine{
				root: root, vmlinuz: vmlinuz, flavour: flavour, payload: payload, shell: o.shell,
				out: filepath.Join(o.out, name),
				// The job's own limits end it first, with its results.
				limit: time.Duration(len(o.users))*(o.timeout+15*time.Second) + bootLimit,
			}
			outcome, err := m.run(ctx)
			if err != nil {
				code = exitDead
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
				continue
			}
			fmt.Printf("== %s: exit %d; agent up after %s, whole run %s; logs and results in %s\n",
				name, outcome.code, outcome.boot.Round(100*time.Millisecond), outcome.wall.Round(100*time.Millisecond), m.out)
			if code == 0 {
				code = outcome.code
			}
		}
	}
	return code, errors.Join(errs...)
}

func codeOf(err error) int {
	if err != nil {
		return exitDead
	}
	return 0
}
