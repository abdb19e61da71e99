package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
)

// Defaults of [Options].
const (
	DefaultMaxSteps         = 100
	DefaultMaxTokenLimit    = 65536
	DefaultMaxTokensPerCall = 65536
	DefaultToolTimeout      = 120 * time.Second
	DefaultTimeout          = 8 * time.Hour
)

const (
	// collectTime and deleteTime bound the work after the end of a run, also of an interrupted one.
	collectTime = 5 * time.Minute
	deleteTime  = time.Minute
	// idleTime bounds the sandbox's wait for a model. It exceeds a call that is queued, times out
	// and is repeated. A sandbox also outlives a killed agent by this time.
	idleTime = 2 * time.Hour
	// watchEvery is the interval at which a budget of processor time is checked during a turn.
	watchEvery = 500 * time.Millisecond
	// maxAnswer is the printed part of answer.txt in bytes.
	maxAnswer = 1 << 20
)

// Options describes one run. Zero values mean the defaults; in [Resume] and [Fork] they mean the
// values in the record.
type Options struct {
	Query     string // problem statement
	Model     llm.Model
	ModelName string // sent to the model; may be empty for a replay
	BaseURL   string // for the record
	Prompt    PromptConfig
	LLMName   string     // as the user named the model, for [Resume]: ModelName lacks the provider
	Price     *llm.Price // of the model; nil if unknown, and then a budget of cost is refused

	// Create creates the sandbox; Run deletes it.
	Create func(ctx context.Context, req api.CreateSandbox) (*Sandbox, error)
	// Open finds a sandbox by ID or name and runs it for the given lifetime; only [Resume] needs
	// it.
	Open   func(ctx context.Context, ref string, lifetime time.Duration) (*Sandbox, error)
	Image  string // "" means the host image
	Limits api.Limits
	// Network is the network of the run's sandbox. A run that goes on in another sandbox has its
	// whole budget again.
	Network api.Network

	InputDir string // directory whose children are copied into the sandbox; "" for none
	// RepoDir is a directory of the host that the run works on as its working directory: a
	// workspace, whose changes are left in [PatchName] and change nothing on the host; "" for
	// none. GitIgnore hides what its .gitignore files name, too.
	RepoDir   string
	GitIgnore bool
	OutputDir string // parent of the run's directory, which is named by its time
	// InputAllowed, if set, may refuse to copy the input: a record may name the directory.
	InputAllowed func(dir string) error

	Budget           Budget
	MaxTokensPerCall int
	Temperature      *float64 // nil means the provider's default
	ExtraBody        map[string]any
	ToolTimeout      time.Duration
	Collect          CollectLimits
	SaveRequests     bool // write request_NNN.json and response_NNN.json
	SnapshotTurns    bool // snapshot the sandbox after each turn
	// KeepInterrupted, if set, reports whether a run that ends by this cause keeps its sandbox,
	// stopped, for [Resume]. If the run is not resumed, the caller deletes the sandbox.
	KeepInterrupted func(cause error) bool

	Policy *policy.Policy // nil allows every call
	Asker  policy.Asker   // nil denies every call that the policy would ask about
	// Secrets are redacted from all records: a server may echo the model's key.
	Secrets []string
	// Message, if set, is sent to the model before a resumed run or a fork continues.
	Message string

	Now func() time.Time // nil means time.Now
	// withTimeout replaces context.WithTimeoutCause for the budget's time in tests.
	withTimeout func(context.Context, time.Duration, error) (context.Context, context.CancelFunc)

	// OnStart, OnStep, OnOutputs and OnNote, if set, are called in order and from one goroutine.
	// OnOutputs receives the list of the output directory before its collection.
	OnStart   func(Started)
	OnStep    func(Step)
	OnOutputs func(Outputs)
	OnNote    func(text string)
	// OnEvent, if set, receives every line of the record as written.
	OnEvent func(Event)
	// OnStatus, if set, receives the state of the run at its start, after each turn and at its end.
	OnStatus func(Summary)
	// OnOutput, if set, receives the output of a command while it runs, from other goroutines.
	OnOutput func([]byte)
	// OnDelta, if set, makes the model stream and receives its deltas, before OnStep receives the
	// turn.
	OnDelta func(llm.Delta)
}

// Started describes a run at its first turn.
type Started struct {
	SandboxID, Image, Dir, ModelSource string
}

// Result describes the end of a run.
type Result struct {
	ExitReason ExitReason `json:"exit_reason"`
	Detail     string     `json:"detail,omitempty"`
	Dir        string     `json:"output_dir"` // with files/, record.jsonl and trajectory.json
	Steps      int        `json:"total_steps"`
	Spent      Spent      `json:"spent"`
	Answer     string     `json:"answer,omitempty"` // content of files/answer.txt
	HasAnswer  bool       `json:"has_answer"`
	Usage      llm.Usage  `json:"usage"` // sum over all model calls
	Output     *Collected `json:"output,omitempty"`
	Patch      *Patch     `json:"patch,omitempty"`        // of a run with a repository
	Kept       string     `json:"kept_sandbox,omitempty"` // ID of the sandbox, if it was kept for [Resume]
}

// run is one process's work on a run. The ledger holds the state that outlasts the process.
type run struct {
	Options
	dir     string
	rec     *record
	l       *ledger
	policy  *policy.Policy
	sandbox *Sandbox

	began time.Time // start of this process's work
	base  Spent     // spending before that
	// budgetChecked reports whether this process has checked the budget for the open turn's
	// request.
	budgetChecked bool
	// marks holds the sandbox's files before the first turn; nil if another process has made it.
	marks *fileMarks
	// noPatch means that the changes of the repository are in the sandbox alone.
	noPatch bool
	// cpuStart is the kernel's count for the sandbox at the start of this process's work.
	cpuStart time.Duration
}

// Run performs a whole run. A run that ends without submit is a [Result] too. An error means that
// the run did not start, or that its record or output could not be kept. Once a sandbox exists, a
// result accompanies the error.
//
// When ctx ends, the loop stops. Run then still collects the output, and deletes the sandbox or, by
// [Options.KeepInterrupted], stops it.
func Run(ctx context.Context, opts Options) (*Result, error) {
	r, first, err := prepare(opts)
	if err != nil {
		return nil, err
	}
	if r.dir, err = MakeDir(r.OutputDir, runDirName(r.began)); err != nil {
		return nil, err
	}
	first.ID = filepath.Base(r.dir)
	nothing := func(err error) (*Result, error) {
		// No work was done, so no record is kept.
		return nil, errors.Join(err, r.closeRecord(), os.RemoveAll(r.dir))
	}
	if r.rec, err = createRecord(r.dir, r.Now, r.Secrets); err != nil {
		return nothing(err)
	}
	r.l = newLedger()
	if err := r.emit(Event{Run: first}, true); err != nil {
		return nothing(err)
	}
	if err := syncDir(r.dir); err != nil {
		return nothing(err)
	}
	err = r.makeSandbox(ctx, "", nil)
	if r.sandbox == nil {
		return nothing(err)
	}
	return r.finish(ctx, err)
}

// prepare checks the options and fills in the defaults. It has no side effects.
func prepare(opts Options) (*run, *RunEvent, error) {
	if opts.Query == "" {
		return nil, nil, errors.New("the query is empty: say what the model shall do")
	}
	if opts.InputDir != "" {
		fi, err := os.Stat(opts.InputDir)
		if err != nil {
			return nil, nil, fmt.Errorf("input directory: %w", err)
		}
		if !fi.IsDir() {
			return nil, nil, fmt.Errorf("input directory %s: not a directory", opts.InputDir)
		}
		if opts.InputDir, err = filepath.Abs(opts.InputDir); err != nil {
			return nil, nil, fmt.Errorf("input directory: %w", err)
		}
	}
	if opts.RepoDir != "" {
		if err := opts.checkRepo(); err != nil {
			return nil, nil, err
		}
	}
	if opts.MaxTokensPerCall < 0 || opts.ToolTimeout < 0 {
		return nil, nil, errors.New("a limit is negative")
	}
	if err := opts.Collect.check(); err != nil {
		return nil, nil, err
	}
	var err error
	if opts.Prompt == (PromptConfig{}) {
		if opts.Prompt, err = LoadPromptConfig(""); err != nil {
			return nil, nil, err
		}
	}
	if opts.RepoDir != "" {
		opts.Prompt = opts.Prompt.besideRepo()
	}
	system, user, err := opts.Prompt.Render(opts.Query)
	if err != nil {
		return nil, nil, fmt.Errorf("prompt config: %w", err)
	}
	if opts.RepoDir != "" {
		system += repoPrompt(opts.Prompt.WorkingDir)
	}
	setDefault(&opts.Budget.Turns, DefaultMaxSteps)
	setDefault(&opts.Budget.Conversation, DefaultMaxTokenLimit)
	setDefault(&opts.Budget.Time, DefaultTimeout)
	setDefault(&opts.MaxTokensPerCall, DefaultMaxTokensPerCall)
	setDefault(&opts.ToolTimeout, DefaultToolTimeout)
	setDefault(&opts.Image, api.HostImage)
	setDefault(&opts.OutputDir, "output")
	if opts.Collect.Paths, err = checkPaths(opts.Collect.Paths, opts.Prompt); err != nil {
		return nil, nil, err
	}
	r, err := newWork(opts)
	if err != nil {
		return nil, nil, err
	}
	first := &RunEvent{
		Query: opts.Query, System: system, User: user, Prompt: opts.Prompt, LLMName: opts.LLMName, Model: opts.ModelName, ModelSource: opts.Model.Describe(), BaseURL: opts.BaseURL,
		Image: opts.Image, Limits: opts.Limits, Network: opts.Network, InputDir: opts.InputDir, RepoDir: opts.RepoDir, GitIgnore: opts.GitIgnore, Budget: opts.Budget, PerCall: opts.MaxTokensPerCall, Temperature: opts.Temperature,
		ExtraBody: opts.ExtraBody, ToolTimeout: opts.ToolTimeout, Collect: opts.Collect, Policy: r.policy.Source(), Snapshots: opts.SnapshotTurns, SaveCalls: opts.SaveRequests,
	}
	return r, first, nil
}

// newWork returns the common start of [Run], [Resume] and [Fork].
func newWork(opts Options) (*run, error) {
	if err := opts.Budget.check(); err != nil {
		return nil, err
	}
	if opts.Budget.Cost > 0 && opts.Price == nil {
		return nil, errNoPrice
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.withTimeout == nil {
		opts.withTimeout = context.WithTimeoutCause
	}
	if opts.OnStart == nil {
		opts.OnStart = func(Started) {}
	}
	if opts.OnStep == nil {
		opts.OnStep = func(Step) {}
	}
	if opts.OnOutputs == nil {
		opts.OnOutputs = func(Outputs) {}
	}
	if opts.OnNote == nil {
		opts.OnNote = func(string) {}
	}
	if opts.OnEvent == nil {
		opts.OnEvent = func(Event) {}
	}
	if opts.OnStatus == nil {
		opts.OnStatus = func(Summary) {}
	}
	r := &run{Options: opts, policy: opts.Policy, began: opts.Now()}
	if r.policy == nil {
		var err error
		if r.policy, err = policy.Preset("open"); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// runDirName returns the name of a run that begins now: YYYYmmdd_HHMMSS.
func runDirName(now time.Time) string { return now.Format("20060102_150405") }

// MakeDir makes the directory parent/name durably, with a suffix _2, _3, ... if the name is taken.
func MakeDir(parent, name string) (string, error) {
	if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // results are readable by others, as the umask allows
		return "", fmt.Errorf("make the output directory: %w", err)
	}
	for n := 1; ; n++ {
		dir := filepath.Join(parent, name)
		if n > 1 {
			dir += "_" + strconv.Itoa(n)
		}
		err := os.Mkdir(dir, 0o755) //nolint:gosec // results are readable by others, as the umask allows
		if err == nil {
			return dir, syncDir(parent)
		}
		if !errors.Is(err, os.ErrExist) || n >= 10_000 {
			return "", fmt.Errorf("make the output directory: %w", err)
		}
	}
}

// emit appends an event to the record and applies it, as recorded, to the ledger.
func (r *run) emit(e Event, sync bool) error {
	e, err := r.rec.append(e, sync)
	if err != nil {
		return err
	}
	if err := r.l.apply(e); err != nil {
		return err
	}
	r.OnEvent(e)
	return nil
}

func (r *run) reportStatus(running bool) { r.OnStatus(*r.l.summary(r.dir, running)) }

func (r *run) closeRecord() error {
	if r.rec == nil {
		return nil
	}
	return r.rec.close()
}

// makeSandbox creates the run's sandbox from a snapshot, or anew with directories and input. It
// records the name before the creation, so that a later process can delete a sandbox of unknown
// state. Then it runs the calls of the steps in rebuild again.
func (r *run) makeSandbox(ctx context.Context, snapshot string, rebuild []Step) error {
	name := fmt.Sprintf("agent-%.24s-%s", r.began.Format("20060102-150405"), rand.Text()[:8])
	if err := r.emit(Event{Sandbox: &SandboxEvent{Name: name}}, true); err != nil {
		return err
	}
	req := api.CreateSandbox{
		Image: r.l.run.Image, Limits: r.l.run.Limits, Network: r.l.run.Network, Labels: map[string]string{"sandboxd.agent": "run"}, Name: name,
		Timeout: r.lifetime().Seconds(), IdleTimeout: idleTime.Seconds(),
	}
	if snapshot != "" {
		req.Image, req.Snapshot = "", snapshot
	}
	if err := r.withRepo(ctx, &req); err != nil {
		return err
	}
	sandbox, err := r.Create(ctx, req)
	if err != nil {
		return fmt.Errorf("create the sandbox: %w", err)
	}
	r.sandbox = sandbox
	if snapshot == "" {
		if err := r.setUp(ctx); err != nil {
			return err
		}
		r.markFiles(ctx)
	}
	ready := SandboxEvent{Name: name, ID: sandbox.ID(), Ready: true, Snapshot: snapshot}
	if len(rebuild) > 0 {
		done, err := r.rerun(ctx, rebuild)
		if err != nil {
			return fmt.Errorf("do the turns again: %w", err)
		}
		ready.Rebuilt, ready.Differences = done.Calls, len(done.Differences)
		r.OnNote(fmt.Sprintf("%d calls of %d turns were run again in a new sandbox; %d observations differ", done.Calls, done.Turns, len(done.Differences)))
	}
	used, err := r.checkCPU(ctx)
	if err != nil {
		return err
	}
	if len(rebuild) > 0 { // otherwise the whole count belongs to the run
		r.cpuStart = used
	}
	return r.emit(Event{Sandbox: &ready}, true)
}

// lifetime returns the lifetime of a sandbox: the rest of the run's time, and the time for its end.
func (r *run) lifetime() time.Duration {
	return max(r.l.run.Budget.Time-r.elapsed(), 0) + collectTime + deleteTime
}

// checkCPU returns the sandbox's processor time. It refuses a budget of processor time if the host
// does not count it.
func (r *run) checkCPU(ctx context.Context) (used time.Duration, err error) {
	if r.l.run.Budget.CPU == 0 {
		return 0, nil
	}
	used, known, err := r.sandbox.CPU(ctx)
	if err != nil {
		return 0, fmt.Errorf("ask for the sandbox's processor time: %w", err)
	}
	if !known {
		return 0, errors.New("a budget of processor time cannot be held here: this host does not count it by sandbox (sandboxd doctor says more)")
	}
	return used, nil
}

// elapsed returns the working time of all processes of the run.
func (r *run) elapsed() time.Duration { return r.base.Time + r.Now().Sub(r.began) }

// spend returns the current spending.
func (r *run) spend(ctx context.Context) Spent {
	s := r.l.spent
	s.Time = r.elapsed()
	if r.l.run.Budget.CPU > 0 && r.sandbox != nil {
		if used, known, err := r.sandbox.CPU(ctx); err == nil && known {
			if used < r.cpuStart { // it was restarted, and so was its count
				r.cpuStart = 0
			}
			s.CPU = max(s.CPU, r.base.CPU+used-r.cpuStart)
		}
	}
	return s
}

// watch ends a run's context when its processor time is used up. It returns when ctx has ended.
func (r *run) watch(ctx context.Context, end context.CancelCauseFunc) {
	if r.l.run.Budget.CPU == 0 {
		return
	}
	budget, base, start := r.l.run.Budget, r.base.CPU, r.cpuStart
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		used, known, err := r.sandbox.CPU(ctx)
		if err != nil || !known {
			continue // the next tool call reports it
		}
		if used < start {
			start = 0
		}
		if reason, detail := (Budget{CPU: budget.CPU}).over(Spent{CPU: base + used - start}); reason != "" {
			end(&budgetEnd{reason, detail})
			return
		}
	}
}

// finish works on a run with a sandbox until the run's end. If setUpErr is set, it only ends the
// run.
func (r *run) finish(ctx context.Context, setUpErr error) (*Result, error) {
	res := &Result{Dir: r.dir, ExitReason: ExitFailed}
	// The reason is separate from the error: a failure of ours must not hide that the model
	// submitted.
	reason, detail, missing, err := ExitReason(""), "", "", setUpErr
	if err == nil {
		r.reportStatus(true)
		r.OnStart(Started{SandboxID: r.sandbox.ID(), Image: r.l.run.Image, Dir: r.dir, ModelSource: r.Model.Describe()})
		reason, detail, err = r.work(ctx)
		collectErr := r.collect(ctx, res)
		if collectErr != nil {
			missing = collectErr.Error()
		}
		if collectErr != nil && reason == ExitSandboxLost {
			r.OnNote(missing)
			collectErr = nil
		}
		err = errors.Join(err, collectErr)
	}
	if reason == "" {
		reason, detail = ExitFailed, err.Error()
		if ctx.Err() != nil {
			reason, detail = ExitInterrupted, context.Cause(ctx).Error()
		}
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
	defer cancel()
	detail = WithoutSecrets(detail, r.Secrets)
	err = errors.Join(err, r.emit(Event{End: &EndEvent{Reason: reason, Detail: detail, Output: res.Output, Patch: res.Patch, Spent: r.spend(clean), OutputError: missing}}, true))
	err = errors.Join(err, r.l.trajectory().save(r.dir))
	// Record the end before the sandbox is deleted. After a crash in between, resume finds the end
	// and deletes the sandbox.
	keep := r.noPatch || reason == ExitInterrupted && r.KeepInterrupted != nil && setUpErr == nil && r.KeepInterrupted(context.Cause(ctx))
	if keep && r.sandbox.Stop(clean) == nil {
		res.Kept = r.sandbox.ID()
	} else if delErr := r.sandbox.Delete(clean); delErr != nil && !hasCode(delErr, api.CodeNotFound) {
		delErr = fmt.Errorf("delete the sandbox %s: %w", r.sandbox.ID(), delErr)
		if reason == ExitSandboxLost {
			r.OnNote(delErr.Error()) // the exit reason reports it
		} else {
			err = errors.Join(err, delErr)
		}
	}
	res.ExitReason, res.Detail, res.Steps, res.Spent, res.Usage = reason, detail, len(r.l.steps), r.l.spent, r.l.usage
	r.reportStatus(false)
	return res, errors.Join(err, r.closeRecord())
}

// WithoutSecrets redacts secrets from a text, except those too short to be told from other words.
func WithoutSecrets(text string, secrets []string) string {
	for _, s := range secrets {
		if len(s) >= minSecret {
			text = strings.ReplaceAll(text, s, "[secret]")
		}
	}
	return text
}

// work takes turns within the remaining time.
func (r *run) work(ctx context.Context) (ExitReason, string, error) {
	budget := r.l.run.Budget
	reason, detail := Budget{Time: budget.Time}.over(Spent{Time: budget.Time})
	timed, cancel := r.withTimeout(ctx, max(budget.Time-r.elapsed(), 0), &budgetEnd{reason, detail})
	defer cancel()
	loopCtx, end := context.WithCancelCause(timed)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		r.watch(loopCtx, end)
	}()
	defer func() {
		end(nil)
		<-watched
	}()
	return r.loop(loopCtx)
}

// collect lists the output directory, and then collects the files that may leave the sandbox.
func (r *run) collect(ctx context.Context, res *Result) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), collectTime)
	defer cancel()
	if r.l.run.RepoDir != "" {
		var patchErr error
		res.Patch, patchErr = r.collectPatch(ctx)
		r.noPatch = patchErr != nil
		defer func() { err = errors.Join(patchErr, err) }()
	}
	outputs, err := listOutputs(ctx, r.sandbox, r.l.run.Prompt.OutputDir, r.l.run.Collect)
	switch {
	case err != nil && lost(err):
		return err
	case err != nil:
		// The list is only informative. The collection applies the rules again, and must not
		// fail for want of a list.
		r.OnNote(err.Error())
	default:
		if err := r.listElsewhere(ctx, outputs); err != nil {
			r.OnNote(err.Error()) // informative too
		}
		if err := r.emit(Event{Outputs: outputs}, true); err != nil {
			return err
		}
		r.OnOutputs(*outputs)
	}
	// An existing directory belongs to an earlier end, and one with the suffix to a crash.
	filesDir := filepath.Join(r.dir, "files")
	partial := filesDir + ".part"
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("make the output directory: %w", err)
	}
	var collectErr error
	res.Output, collectErr = collect(ctx, r.sandbox, r.l.run.Prompt.OutputDir, partial, r.l.run.Collect)
	if res.Output == nil {
		return errors.Join(collectErr, os.RemoveAll(partial))
	}
	if err := r.keep(filesDir, partial); err != nil {
		return errors.Join(collectErr, err)
	}
	if collectErr != nil {
		return collectErr
	}
	if res.Answer, res.HasAnswer, collectErr = ReadAnswer(filesDir, maxAnswer); collectErr != nil || len(r.l.run.Collect.Paths) == 0 {
		return collectErr
	}
	dir := filepath.Join(r.dir, "collected")
	partial = dir + ".part"
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("make the directory for what is collected: %w", err)
	}
	if err := os.Mkdir(partial, 0o755); err != nil { //nolint:gosec // results are meant to be read by others, as the umask allows
		return fmt.Errorf("make the directory for what is collected: %w", err)
	}
	res.Output.Elsewhere, collectErr = r.collectElsewhere(ctx, partial, res.Output)
	return errors.Join(collectErr, r.keep(dir, partial))
}

// keep gives a collected directory its name. An earlier one of that name gets a number.
func (r *run) keep(dir, partial string) error {
	if err := os.Rename(dir, fmt.Sprintf("%s.%d", dir, r.l.resumed)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("keep the earlier output: %w", err)
	}
	if err := os.Rename(partial, dir); err != nil {
		return fmt.Errorf("keep the output: %w", err)
	}
	return nil
}

// setUp makes the directories in the sandbox and copies the input.
func (r *run) setUp(ctx context.Context) error {
	stderr := newHeadTail(4 << 10)
	outcome, err := r.sandbox.Exec(ctx, api.ExecRequest{
		Argv: []string{"mkdir", "-p", "--", r.l.run.Prompt.WorkingDir, r.l.run.Prompt.InputDir, r.l.run.Prompt.OutputDir}, Cwd: "/", Timeout: 60,
	}, stderr, stderr)
	if err != nil {
		return fmt.Errorf("make the directories in the sandbox: %w", err)
	}
	if outcome.Exit.Code != 0 {
		return fmt.Errorf("make the directories in the sandbox: mkdir exited %d: %s", outcome.Exit.Code, stderr.text(1000))
	}
	if r.l.run.InputDir == "" {
		return nil
	}
	if r.InputAllowed != nil {
		if err := r.InputAllowed(r.l.run.InputDir); err != nil {
			return err
		}
	}
	skipped, err := SendDir(ctx, r.sandbox, r.l.run.InputDir, r.l.run.Prompt.InputDir)
	if err != nil {
		return err
	}
	for _, s := range skipped {
		r.OnNote("input left out: " + s)
	}
	return nil
}
