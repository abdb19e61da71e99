package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/doctor"
	"github.com/sandboxd/sandboxd/internal/errand"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Once the daemon has started it may touch its own directories and sockets only (package confine). What else it needs is done by
// this program, started a second time before: it has the launcher started anew, examines the host, reads credentials, which may
// take a program of the user's, finds addresses, writes the layer of the host image, starts a process for each run of the agent, and
// removes the daemon's cgroups. It does these for a daemon that may have been taken over: what to start, and where, it is told before anything hostile is read.

// outsideArg is the first argument of the daemon's own program where it is to run errands.
const outsideArg = "run-errands"

// What the daemon has done outside.
const (
	errandBegin       = "begin"       // the first, and once: its argument is the outside
	errandLauncher    = "launcher"    // start it
	errandAdopt       = "adopt"       // one that runs: its pid
	errandLeave       = "leave"       // the cgroups
	errandAbandon     = "abandon"     // the cgroups of a daemon that has not come to start
	errandChecks      = "checks"      // of the host
	errandCredentials = "credentials" // for a registry
	errandLookup      = "lookup"      // of a host
	errandHostLayer   = "host-layer"  // written to a file
	errandAgent       = "agent"       // start a process for a run of the agent, with these for its stdin and stdout: its pid
	errandAgentSignal = "agent-signal"
)

// outside is what the errands are about, as the first of them says.
type outside struct {
	Launcher launcher.Options `json:"launcher"`
	Name     string           `json:"name"` // of the daemon's cgroups
	Agents   agentWorkers     `json:"agents"`
}

// agentWorkers is what processes for runs of the agent are started with, and how many there may be. In such a process itself it has what
// the flags say, and the socket is where all commands have it.
type agentWorkers struct {
	Socket string   `json:"socket"`
	Runs   string   `json:"runs"`
	Inputs []string `json:"inputs,omitempty"`
	Max    int      `json:"max"`
}

// errandRunner runs them.
type errandRunner struct {
	mu      sync.Mutex
	begun   bool
	about   outside
	adopted cgroup.Subtree      // where an adopted launcher runs
	agents  map[int]*os.Process // by pid, those that were started and have not ended
}

// get returns what the errands are about, and the cgroups of an adopted launcher.
func (r *errandRunner) get() (outside, cgroup.Subtree) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.about, r.adopted
}

func (r *errandRunner) begin(_ context.Context, about outside) (none, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.begun {
		return none{}, errors.New("the errands have begun already")
	}
	about.Launcher.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	r.begun, r.about = true, about
	return none{}, nil
}

func (r *errandRunner) adopt(_ context.Context, pid int) (_ none, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.adopted, err = cgroup.Of(pid, r.about.Name)
	return none{}, err
}

// startAgent starts this program to work on a run of the agent. It goes on when we end: runs outlive a daemon that is killed.
func (r *errandRunner) startAgent(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
	if len(files) != 2 {
		return nil, fmt.Errorf("%d files, not one to read from and one to write to", len(files))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.about.Agents
	if !r.begun || len(r.agents) >= o.Max {
		return nil, fmt.Errorf("%d processes for agent runs are there, which is the most", len(r.agents))
	}
	cmd := exec.Command("/proc/self/exe", o.arguments()...) //nolint:noctx,gosec // our own program; it outlives the request
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = files[0], files[1], os.Stderr // where a panic is told
	// A session of its own: Ctrl-C at the terminal of a daemon in the foreground is the daemon's to act on.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a process for an agent run: %w", err)
	}
	if r.agents == nil {
		r.agents = map[int]*os.Process{}
	}
	pid := cmd.Process.Pid
	r.agents[pid] = cmd.Process
	go func() {
		err := cmd.Wait()
		r.mu.Lock()
		delete(r.agents, pid)
		log := r.about.Launcher.Log
		r.mu.Unlock()
		if err != nil {
			log.Warn("the process of an agent run has ended", "pid", pid, "error", err)
		}
	}()
	return pid, nil
}

// arguments are those of such a process.
func (a agentWorkers) arguments() []string {
	args := []string{"--socket", a.Socket, "agent", "worker", "--runs", a.Runs}
	for _, dir := range a.Inputs {
		args = append(args, "--inputs", dir)
	}
	return args
}

// agentSignal is for a process that works on a run.
type agentSignal struct {
	PID  int  `json:"pid"`
	Kill bool `json:"kill"`
}

// signalAgent has one of those processes end. No other is touched, whatever its pid: whoever asks may have been taken over.
func (r *errandRunner) signalAgent(_ context.Context, s agentSignal) (none, error) {
	r.mu.Lock()
	process := r.agents[s.PID]
	r.mu.Unlock()
	if process == nil {
		return none{}, fmt.Errorf("no process for an agent run has the pid %d", s.PID)
	}
	sig := syscall.SIGTERM
	if s.Kill {
		sig = syscall.SIGKILL
	}
	if err := process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return none{}, fmt.Errorf("end process %d of an agent run: %w", s.PID, err)
	}
	return none{}, nil
}

// outsideMain is this program's main function where it is to run errands.
func outsideMain(args []string) (code int, handled bool) {
	if len(args) != 1 || args[0] != outsideArg {
		return 0, false
	}
	// The daemon's end is ours, in an orderly way: what a terminal or a service manager sends to all is for it. Not ignored, for
	// that would be inherited.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if err := errand.Serve(context.Background(), new(errandRunner).errands()); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		return 1, true
	}
	return 0, true
}

// registry is what credentials are for: an authn.Resource as it travels.
type registry struct {
	Repository string `json:"repository"`
	Address    string `json:"address"`
}

func (r registry) String() string      { return r.Repository }
func (r registry) RegistryStr() string { return r.Address }

// none is an argument or a result that says nothing.
type none struct{}

func (r *errandRunner) errands() map[string]errand.Handler {
	return map[string]errand.Handler{
		errandBegin: errand.Handle(r.begin),
		errandAdopt: errand.Handle(r.adopt),
		errandLauncher: errand.Handle(func(ctx context.Context, _ none) (none, error) {
			o, _ := r.get()
			return none{}, launcher.Start(ctx, o.Launcher)
		}),
		errandLeave: errand.Handle(func(ctx context.Context, _ none) (none, error) {
			o, adopted := r.get()
			return none{}, errors.Join(adopted.Leave(ctx), o.Launcher.Cgroup.Leave(ctx))
		}),
		errandAbandon: errand.Handle(func(context.Context, none) (none, error) {
			o, _ := r.get()
			return none{}, o.Launcher.Cgroup.Abandon()
		}),
		errandChecks: errand.Handle(func(ctx context.Context, _ none) ([]api.Check, error) {
			o, _ := r.get()
			return doctor.Run(ctx, o.Launcher.DataDir), nil
		}),
		errandCredentials: errand.Handle(func(ctx context.Context, r registry) (*authn.AuthConfig, error) {
			auth, err := authn.Resolve(ctx, authn.DefaultKeychain, r)
			if err != nil || auth == authn.Anonymous {
				return nil, err
			}
			return authn.Authorization(ctx, auth)
		}),
		errandLookup: errand.Handle(func(ctx context.Context, host string) ([]netip.Addr, error) {
			found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
			for i := range found {
				found[i] = found[i].Unmap()
			}
			return found, err
		}),
		errandHostLayer: func(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
			if len(files) != 1 {
				return nil, fmt.Errorf("%d files, not one to write to", len(files))
			}
			return image.WriteHostLayer("/", files[0])
		},
		errandAgent:       r.startAgent,
		errandAgentSignal: errand.Handle(r.signalAgent),
	}
}

// assistant is the program that runs errands, as the daemon sees it.
type assistant struct{ *errand.Runner }

// startOutside starts it.
func startOutside(ctx context.Context, o outside) (assistant, error) {
	runner, err := errand.Start(outsideArg)
	if err != nil {
		return assistant{}, err
	}
	if err := runner.Run(ctx, errandBegin, &o, nil); err != nil {
		return assistant{}, errors.Join(err, runner.Close())
	}
	return assistant{runner}, nil
}

// Run is [errand.Runner.Run]. A runner that is gone is told of in the same way whatever it was wanted for.
func (a assistant) Run(ctx context.Context, name string, args, result any, files ...*os.File) error {
	err := a.Runner.Run(ctx, name, args, result, files...)
	if errors.Is(err, errand.ErrGone) {
		return &api.Problem{
			Code: api.CodeUnavailable, Title: "Unavailable", Status: api.CodeUnavailable.Status(), Detail: err.Error(), Hint: goneRemedy,
		}
	}
	return err
}

// gone reports whether nobody runs errands any more. Who is confined starts no other: it would be confined as well.
func (a assistant) gone() bool {
	select {
	case <-a.Gone():
		return true
	default:
		return false
	}
}

// What it means that the runner is gone, and what to do.
const (
	goneMeans = "launchers that die are not replaced, agent runs do not begin, credentials and addresses of registries are not found, " +
		"and the host is not examined"
	goneRemedy = "start the daemon anew, and sandboxes go on: sandboxd shutdown --keep-sandboxes, then sandboxd serve"
)

func (a assistant) startLauncher(ctx context.Context) error {
	return a.Run(ctx, errandLauncher, none{}, nil)
}

func (a assistant) abandon(ctx context.Context) error {
	return a.Run(ctx, errandAbandon, none{}, nil)
}

func (a assistant) leave(ctx context.Context) error { return a.Run(ctx, errandLeave, none{}, nil) }

func (a assistant) adopt(ctx context.Context, pid int) error {
	return a.Run(ctx, errandAdopt, pid, nil)
}

// checks are of the host, or say why it could not be examined.
func (a assistant) checks(ctx context.Context) (found []api.Check) {
	switch err := a.Runner.Run(ctx, errandChecks, none{}, &found); {
	case errors.Is(err, errand.ErrGone):
		return []api.Check{{Name: "errands", Found: errand.ErrGone.Error(), Means: goneMeans, Remedy: goneRemedy}}
	case err != nil:
		return []api.Check{{Name: "checks", Found: err.Error(), Means: "the host could not be examined", Remedy: "try again"}}
	}
	return found
}

func (a assistant) lookup(ctx context.Context, host string) (found []netip.Addr, err error) {
	err = a.Run(ctx, errandLookup, host, &found)
	return found, err
}

func (a assistant) hostLayer(ctx context.Context, to *os.File) (hostDirs []string, err error) {
	err = a.Run(ctx, errandHostLayer, none{}, &hostDirs, to)
	return hostDirs, err
}

func (a assistant) startAgent(ctx context.Context, stdin, stdout *os.File) (pid int, err error) {
	err = a.Run(ctx, errandAgent, none{}, &pid, stdin, stdout)
	return pid, err
}

func (a assistant) signalAgent(ctx context.Context, pid int, kill bool) error {
	return a.Run(ctx, errandAgentSignal, agentSignal{pid, kill}, nil)
}

// Resolve implements authn.Keychain.
func (a assistant) Resolve(r authn.Resource) (authn.Authenticator, error) {
	return a.ResolveContext(context.Background(), r)
}

// ResolveContext implements authn.ContextKeychain.
func (a assistant) ResolveContext(ctx context.Context, r authn.Resource) (authn.Authenticator, error) {
	var found *authn.AuthConfig
	if err := a.Run(ctx, errandCredentials, registry{r.String(), r.RegistryStr()}, &found); err != nil {
		return nil, err
	}
	if found == nil {
		return authn.Anonymous, nil
	}
	return authn.FromConfig(*found), nil
}

// tooOld is why a daemon is not confined.
const tooOld = "this kernel's Landlock is none, or too old"

// checkConfined says what holds the daemon itself.
func checkConfined(d confine.Daemon) api.Check {
	c := api.Check{
		Name: "the daemon itself", OK: d.ABI > 0,
		Found: fmt.Sprintf("held to its own directories by Landlock, ABI %d", d.ABI),
		Means: "whoever takes the daemon over, by what a registry, an image or a sandbox sends, can do on the host what " +
			"its user can",
		Remedy: kernel.LandlockRemedy,
	}
	if !c.OK {
		c.Found = "not held to its own directories: " + tooOld
	}
	for _, missing := range d.Missing() {
		c.Found += "; " + missing
	}
	return c
}
