package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/confine"
)

const (
	// cancelEvery is the polling interval of the cancel file.
	cancelEvery = 200 * time.Millisecond
	// shownQuery limits the length of a task in lists, in bytes.
	shownQuery = 4000
)

// workerFlags name the directory of runs, and the directories that runs may read.
type workerFlags struct {
	Runs   string
	Inputs []string
}

// newWorker returns the command that the daemon's broker starts: the other side of package agents.
func newWorker(d cmdline.Deps) *cobra.Command {
	var held workerFlags
	cmd := &cobra.Command{
		Use:    "worker",
		Short:  "Work on one run for the daemon",
		Hidden: true,
		Args:   cmdline.UsageArgs(cobra.NoArgs),
		RunE:   func(cmd *cobra.Command, _ []string) error { return runWorker(cmd.Context(), held, d) },
	}
	cmd.Flags().StringVar(&held.Runs, "runs", "", "`directory` of all runs")
	cmd.Flags().StringArrayVar(&held.Inputs, "inputs", nil, "`directory` below which a run may have its input; repeatable")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// cancelled is the cause of a run's end by a client of the daemon.
type cancelled struct{ keep bool }

func (*cancelled) Error() string { return "cancelled" }

var errNotByHand = errors.New("this command is for the daemon, which says on stdin what is to be done")

func runWorker(ctx context.Context, a workerFlags, d cmdline.Deps) error {
	if !filepath.IsAbs(a.Runs) {
		return errNotByHand
	}
	// The daemon, which writes to our stdin, may have been taken over, and a model's answers are
	// hostile too.
	confined, err := a.confine(d)
	if err != nil {
		return reply(d, agents.Reply{Problem: &api.Problem{
			Code: api.CodeInternal, Title: "The agent's process cannot begin", Status: api.CodeInternal.Status(), Detail: err.Error(),
		}})
	}
	defer confined.Close()
	text, err := io.ReadAll(io.LimitReader(d.Stdin, agents.MaxRequest+1))
	if err != nil {
		return err
	}
	var req agents.Request
	if err := json.Unmarshal(text, &req); err != nil || len(text) > agents.MaxRequest || !isValid(req) {
		return errNotByHand
	}
	if req.Remove {
		return reply(d, a.remove(ctx, req.Run, d))
	}
	// Messages go into the record. Other output for a terminal may have a model's words or a key, and
	// is dropped.
	if d.Stderr, err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
		return err
	}
	defer d.Stderr.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &worker{a: a, d: d, cancel: cancel, ended: make(chan struct{})}
	secrets, err := w.work(ctx, req)
	close(w.ended)
	w.watched.Wait()
	if w.held != nil {
		err = errors.Join(err, w.held.Close())
	}
	if err != nil && !w.replied {
		return w.reply(agents.Reply{Problem: agentProblem(err, secrets)})
	}
	return err
}

// isValid reports whether a request asks for exactly one action.
func isValid(r agents.Request) bool {
	asked := 0
	for _, is := range []bool{r.Start != nil, r.Resume != nil, r.Remove} {
		if is {
			asked++
		}
	}
	return asked == 1 && (r.Start != nil) == (r.Run == "") && (r.Run == "" || agents.IsID(r.Run))
}

// confine confines this process to the runs, the daemon's socket and the runs' inputs, if the
// kernel can.
func (a workerFlags) confine(d cmdline.Deps) (*confine.Held, error) {
	// Load files that are read only once: the host's certificates and its time zone.
	if _, err := x509.SystemCertPool(); err != nil {
		return nil, fmt.Errorf("read the host's certificates: %w", err)
	}
	_, _ = time.Now().Zone()
	w, err := a.confinement(d)
	if err != nil {
		return nil, err
	}
	if !w.Probe() {
		return new(confine.Held), nil // the daemon is not confined either, and has warned
	}
	return w.Plan().Apply()
}

// confinement returns the input of the worker's plan.
func (a workerFlags) confinement(d cmdline.Deps) (confine.Worker, error) {
	files, dirs, err := confine.Resolver()
	if err != nil {
		return confine.Worker{}, err
	}
	// Settings that are unreadable or invalid are reported when they are used.
	settings, file, _ := agent.LoadSettings("", os.Getenv)
	for _, name := range []string{file, settings.PromptConfig} {
		if _, err := os.Stat(name); name != "" && err == nil {
			files = append(files, name)
		}
	}
	for _, dir := range a.Inputs {
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return confine.Worker{Socket: d.SocketPath(), Runs: a.Runs, Files: files, Dirs: dirs}, nil
}

// input returns the real path of a file or directory named in a request, if runs may read it.
func (a workerFlags) input(field, path string) (string, error) {
	refuse := func(why string) error {
		return &api.Problem{
			Code: api.CodeInvalid, Title: "Invalid argument", Status: api.CodeInvalid.Status(), Detail: fmt.Sprintf("%s %q: %s", field, path, why),
			Hint: "name what is below a directory that the daemon was started with: sandboxd serve --agent-inputs DIR",
		}
	}
	if !filepath.IsAbs(path) {
		return "", refuse("want an absolute path")
	}
	if len(a.Inputs) == 0 {
		return "", refuse("this daemon lets agent runs read no directory of its host")
	}
	found, err := filepath.EvalSymlinks(path)
	for _, dir := range a.Inputs {
		// The error does not reveal whether a path outside exists.
		if err == nil && (found == dir || strings.HasPrefix(found, dir+"/")) {
			return found, nil
		}
	}
	return "", refuse("there is no such thing in the directories that agent runs may read")
}

// remove removes an idle run.
func (a workerFlags) remove(ctx context.Context, id string, d cmdline.Deps) agents.Reply {
	c := d.Client()
	defer c.Close()
	dir := filepath.Join(a.Runs, id)
	_, err := agent.RemoveRun(ctx, c, dir, false)
	if errors.Is(err, agent.ErrUnreadable) {
		// Any directory here is a run's, and the daemon knows that the run is idle. A symbolic link is
		// not removed.
		if info, lerr := os.Lstat(dir); lerr == nil && info.IsDir() {
			_, err = agent.RemoveUnreadable(ctx, c, dir)
		}
	}
	if err != nil {
		if p := agentProblem(err, nil); p.Code != api.CodeInvalid {
			return agents.Reply{Problem: p}
		}
		return agents.Reply{Problem: &api.Problem{
			Code: api.CodeInternal, Title: "The agent's run cannot be removed", Status: api.CodeInternal.Status(), Detail: strings.ToValidUTF8(err.Error(), "\uFFFD"),
		}}
	}
	return agents.Reply{Run: &api.AgentRun{ID: id}}
}

// agentProblem returns the daemon's answer for a run that has not begun.
func agentProblem(err error, secrets []string) *api.Problem {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return p
	}
	code := api.CodeInvalid
	switch {
	case errors.Is(err, agent.ErrEnded), errors.Is(err, agent.ErrRunning):
		code = api.CodeConflict
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		code = api.CodeInternal // the disk's fault, not the request's
	}
	text := agent.WithoutSecrets(strings.ToValidUTF8(err.Error(), "\uFFFD"), secrets)
	return &api.Problem{Code: code, Title: "The agent's run cannot begin", Status: code.Status(), Detail: text}
}

// worker works on one run.
type worker struct {
	a       workerFlags
	d       cmdline.Deps
	cancel  context.CancelCauseFunc
	replied bool
	failed  error // an error of reporting
	held    io.Closer
	ended   chan struct{}
	watched sync.WaitGroup
}

func (w *worker) reply(r agents.Reply) error {
	w.replied = true
	return reply(w.d, r)
}

// reply writes the worker's line.
func reply(d cmdline.Deps, r agents.Reply) error {
	line, err := json.Marshal(r)
	if err == nil {
		_, err = d.Stdout.Write(append(line, '\n'))
	}
	return err
}

// work does the run, and returns the secrets that errors must not have.
func (w *worker) work(ctx context.Context, req agents.Request) (secrets []string, err error) {
	if req.Start != nil {
		run, err := startOptions(ctx, req, w.a, w.d)
		secrets = slices.Concat(run.Secrets, []string{req.Start.Model.Key, req.Start.PolicyHook})
		if err != nil {
			return secrets, err
		}
		defer w.attend(&run)()
		_, err = agent.Run(ctx, run)
		return secrets, errors.Join(err, w.failed)
	}
	dir := filepath.Join(w.a.Runs, req.Run)
	run, err := resumeRunOptions(ctx, req, w.a, w.d)
	secrets = slices.Concat(run.Secrets, []string{req.Resume.Model.Key, req.Resume.PolicyHook})
	if err != nil {
		return secrets, err
	}
	if err := os.Remove(filepath.Join(dir, agents.CancelName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return secrets, err
	}
	defer w.attend(&run)()
	_, err = agent.Resume(ctx, dir, run)
	return secrets, errors.Join(err, w.failed)
}

// attend gives a run the daemon, and reports its progress through the files that the daemon reads.
func (w *worker) attend(run *agent.Options) (end func()) {
	// Never start a daemon from here: either the daemon that has started this process is running, or
	// it has ended on purpose.
	end = connect(run, func(context.Context) (*client.Client, error) { return w.d.Client(), nil }, w.d)
	run.InputAllowed = func(dir string) error { // a resumed run's input may have been allowed earlier
		_, err := w.a.input("input_dir", dir)
		return err
	}
	run.KeepInterrupted = func(cause error) bool {
		if c, ok := errors.AsType[*cancelled](cause); ok {
			return c.keep
		}
		return true // the daemon is ending: the next one may resume the run
	}
	run.OnStatus = func(s agent.Summary) {
		if err := saveStatus(s); err != nil {
			w.failed = err
		}
	}
	run.OnStart = func(s agent.Started) {
		held, err := agents.Hold(s.Dir)
		if err != nil {
			w.failed = err // the daemon could neither count the run nor cancel it
			w.cancel(err)
			return
		}
		w.held = held
		w.watched.Go(func() { w.watch(filepath.Join(s.Dir, agents.CancelName)) })
		if err := w.reply(agents.Reply{Run: &api.AgentRun{ID: filepath.Base(s.Dir)}}); err != nil {
			w.cancel(err) // the daemon is gone, and no client knows of the run
		}
	}
	return end
}

// watch ends the run when its cancel file appears.
func (w *worker) watch(path string) {
	tick := time.NewTicker(cancelEvery)
	defer tick.Stop()
	for {
		how, err := os.ReadFile(path)
		if err == nil {
			w.cancel(&cancelled{keep: string(how) == agents.CancelKeep})
			return
		}
		select {
		case <-w.ended:
			return
		case <-tick.C:
		}
	}
}

// saveStatus writes the status file.
func saveStatus(s agent.Summary) error {
	data, err := json.Marshal(api.AgentRun{
		ID: s.ID, Dir: s.Dir, ExitReason: string(s.ExitReason), ExitDetail: agent.OneLine(s.ExitDetail, shownQuery), Turns: s.Turns, ToolCalls: s.Calls, Denied: s.Denied,
		Tokens: s.Spent.Tokens, Cost: s.Spent.Cost, UnpricedCalls: s.Unpriced, Time: s.Spent.Time.Seconds(), CPU: s.Spent.CPU.Seconds(), Model: agent.OneLine(s.Model, 200),
		Query: agent.OneLine(s.Query, shownQuery), SandboxID: s.SandboxID, StartedAt: s.StartedAt, UpdatedAt: time.Now().UTC(),
	})
	if err != nil {
		return err
	}
	path := filepath.Join(s.Dir, agents.StatusName)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("save the status: %w", err)
	}
	_, err = f.Write(data)
	if err == nil && s.State == agent.RunEnded {
		err = f.Sync() // earlier statuses are replaced soon, and need no sync
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("save the status: %w", err)
	}
	return os.Rename(path+".new", path)
}

// setting is a flag and its value in a request.
type setting struct {
	flag  string
	value string
	given bool
}

func setText(flag, value string) setting { return setting{flag, value, value != ""} }

func setNumber[T int | int64 | float64](flag string, v T) setting {
	return setting{flag, fmt.Sprint(v), v != 0}
}

func setSeconds(flag string, v float64) setting {
	return setting{flag, strconv.FormatFloat(v, 'f', -1, 64), v != 0}
}

// modelSettings and budgetSettings return a request's values as flags, so that one place checks
// both.
func modelSettings(m api.AgentModel) []setting {
	s := []setting{setText("llm_name", m.Name), setText("llm_base_url", m.BaseURL), setText("api_key", m.Key)}
	if m.Replay != "" {
		s = append(s, setText("llm", "replay:"+m.Replay))
	}
	if m.Retries != nil {
		s = append(s, setting{"llm_retries", strconv.Itoa(*m.Retries), true})
	}
	return s
}

func budgetSettings(b api.AgentBudget) []setting {
	return []setting{
		setNumber("max_steps", b.Turns), setNumber("max_token_limit", b.Conversation), setNumber("max_total_tokens", b.Tokens), setNumber("max_cost", b.Cost),
		setSeconds("timeout", b.Time), setSeconds("max_cpu", b.CPU),
	}
}

func apply(f *pflag.FlagSet, all ...[]setting) error {
	for _, s := range slices.Concat(all...) {
		if !s.given {
			continue
		}
		if err := f.Set(s.flag, s.value); err != nil {
			return &api.Problem{Code: api.CodeInvalid, Title: "Invalid argument", Status: api.CodeInvalid.Status(), Detail: err.Error()}
		}
	}
	return nil
}

// policyOf reads the policy of a request: the name of a preset, or rules.
func policyOf(source string) (*policy.Policy, error) {
	switch {
	case source == "":
		return nil, nil
	case slices.Contains(policy.Presets(), source):
		return policy.Preset(source)
	}
	return policy.Parse([]byte(source))
}

// startOptions returns the options of a new run.
func startOptions(ctx context.Context, req agents.Request, a workerFlags, d cmdline.Deps) (run agent.Options, err error) {
	r := req.Start
	for _, in := range []struct {
		name string
		path *string
	}{{"input_dir", &r.InputDir}, {"model.replay", &r.Model.Replay}} {
		if *in.path == "" {
			continue
		}
		if *in.path, err = a.input(in.name, *in.path); err != nil {
			return run, err
		}
	}
	var o runOptions
	f := pflag.NewFlagSet("worker", pflag.ContinueOnError)
	o.addFlags(f)
	more := []setting{
		setText("query", r.Query), setText("image", r.Image), setText("input_dir", r.InputDir), setText("output_dir", a.Runs), setNumber("max_tokens_per_call", r.MaxTokensPerCall),
		setNumber("memory", r.Limits.Memory), setNumber("cpus", r.Limits.CPUs), setNumber("pids", r.Limits.Pids), setText("policy_hook", r.PolicyHook),
		setNumber("output_limit", r.OutputLimit), setNumber("output_file_limit", r.OutputFileLimit),
	}
	if r.Temperature != nil {
		more = append(more, setting{"temperature", strconv.FormatFloat(*r.Temperature, 'g', -1, 64), true})
	}
	if len(r.ExtraBody) > 0 {
		body, err := json.Marshal(r.ExtraBody)
		if err != nil {
			return run, err
		}
		more = append(more, setText("extra_body", string(body)))
	}
	if err := apply(f, modelSettings(r.Model), budgetSettings(r.Budget), more); err != nil {
		return run, err
	}
	limits := r.Limits
	if limits.Memory, limits.CPUs, limits.Pids = 0, 0, 0; limits != (api.Limits{}) {
		return run, errors.New("limits: an agent's sandbox is held by memory, cpus and pids")
	}
	o.snapshotTurns, o.outputDeny, o.outputLinks, o.collect = r.SnapshotTurns, r.OutputDeny, r.OutputLinks, r.Collect
	if run, err = o.resolve(ctx, f.Changed, os.Getenv, func(string) {}); err != nil {
		return run, err
	}
	run.Network = r.Network
	if r.PromptConfig != "" {
		if run.Prompt, err = agent.ParsePromptConfig([]byte(r.PromptConfig)); err != nil {
			return run, err
		}
	}
	if run.Policy, err = policyOf(r.Policy); err != nil {
		return run, err
	}
	return run, o.policyFlags.resolve(&run, d)
}

// resumeRunOptions returns the options of a resumed run.
func resumeRunOptions(ctx context.Context, req agents.Request, a workerFlags, d cmdline.Deps) (run agent.Options, err error) {
	r, dir := req.Resume, filepath.Join(a.Runs, req.Run)
	if r.Model.Replay == "" && r.Model.Name == "" { // the recorded model
		was, _, err := agent.RecordedModel(dir)
		if err != nil {
			return run, err
		}
		if file, ok := strings.CutPrefix(was.LLMName, "replay:"); ok {
			r.Model.Replay = file
		}
	}
	if r.Model.Replay != "" {
		if r.Model.Replay, err = a.input("model.replay", r.Model.Replay); err != nil {
			return run, err
		}
	}
	var o resumeOptions
	f := pflag.NewFlagSet("worker", pflag.ContinueOnError)
	o.addFlags(f)
	if err := apply(f, modelSettings(r.Model), budgetSettings(r.Budget), []setting{setText("message", r.Message), setText("policy_hook", r.PolicyHook)}); err != nil {
		return run, err
	}
	if _, run, err = o.resolve(ctx, dir, -1, f.Changed, d); err != nil {
		return run, err
	}
	run.Policy, err = policyOf(r.Policy)
	return run, err
}
