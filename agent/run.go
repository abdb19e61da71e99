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
	// collectTime and deleteTime bound what is done after the run has ended, by an interrupt perhaps.
	collectTime = 5 * time.Minute
	deleteTime  = time.Minute
	// idleTime is how long the sandbox may wait for a model. It has to outlast a call that is queued, times out and is
	// repeated; and it is how long a sandbox outlives an agent that was killed.
	idleTime = 2 * time.Hour
	// watchEvery is how often a budget of processor time is looked at while a turn goes on.
	watchEvery = 500 * time.Millisecond
	// maxAnswer is how much of answer.txt is printed.
	maxAnswer = 1 << 20
)

// Options is one run. Zero values mean the default where one exists, and in [Resume] and [Fork] what the record says.
type Options struct {
	Query     string // the problem statement
	Model     llm.Model
	ModelName string // sent to the model; may be empty for a replay
	BaseURL   string // for the record
	Prompt    PromptConfig
	LLMName   string     // as the user has named the model, for [Resume]: ModelName lacks the provider
	Price     *llm.Price // of the model; nil where nobody knows it, and then there is no budget of money

	// Create makes the sandbox; Run deletes it.
	Create func(ctx context.Context, req api.CreateSandbox) (Sandbox, error)
	// Open finds a sandbox by id or name and has it running for so long; [Resume] needs it.
	Open   func(ctx context.Context, ref string, lifetime time.Duration) (Sandbox, error)
	Image  string // "" means the host image
	Limits api.Limits

	InputDir  string // its children are copied into the sandbox; "" for none
	OutputDir string // each run makes a directory named by its time below it
	// InputAllowed, if set, may refuse to have the input copied: the directory may be one that a record names.
	InputAllowed func(dir string) error

	Budget           Budget
	MaxTokensPerCall int
	Temperature      *float64 // nil: the provider's default
	ExtraBody        map[string]any
	ToolTimeout      time.Duration
	Collect          CollectLimits
	SaveRequests     bool // keep request_NNN.json and response_NNN.json
	SnapshotTurns    bool // keep the sandbox's files as they are after each turn
	// KeepInterrupted, if set, says whether a run that this cause has interrupted leaves its sandbox, stopped, for [Resume] to go on in.
	// Nothing runs in it then; who does not resume the run deletes it.
	KeepInterrupted func(cause error) bool

	Policy *policy.Policy // nil: every call is allowed
	Asker  policy.Asker   // nil: what the policy says to ask is denied
	// Secrets are taken out of everything that is recorded: the model's key, which a server may say back.
	Secrets []string
	// Message, if set, is said to the model before a resumed run or a branch goes on.
	Message string

	Now func() time.Time // nil: time.Now
	// OnStart, OnStep, OnOutputs and OnNote, if set, are told what happens, in order and from one goroutine. OnOutputs has what is
	// about to leave the sandbox.
	OnStart   func(Started)
	OnStep    func(Step)
	OnOutputs func(Outputs)
	OnNote    func(text string)
	// OnEvent, if set, is given every line of the record when it is written, as it stands there.
	OnEvent func(Event)
	// OnStatus, if set, is told how the run stands when it begins, after each turn and when it has ended.
	OnStatus func(Summary)
	// OnOutput, if set, is given what a command writes while it runs. It is called from other goroutines.
	OnOutput func([]byte)
	// OnDelta, if set, asks the model to stream and is given what it writes, before OnStep has the whole turn.
	OnDelta func(llm.Delta)
}

// Started is what is known when the first turn begins.
type Started struct {
	SandboxID, Image, Dir, ModelSource string
}

// Result is how a run ended.
type Result struct {
	ExitReason ExitReason `json:"exit_reason"`
	Detail     string     `json:"detail,omitempty"`
	Dir        string     `json:"output_dir"` // holds files/, record.jsonl and trajectory.json
	Steps      int        `json:"total_steps"`
	Spent      Spent      `json:"spent"`
	Answer     string     `json:"answer,omitempty"` // of files/answer.txt
	HasAnswer  bool       `json:"has_answer"`
	Usage      llm.Usage  `json:"usage"` // of all model calls
	Output     *Collected `json:"output,omitempty"`
	Kept       string     `json:"kept_sandbox,omitempty"` // id of the sandbox, if it was left for [Resume]
}

// run is what one process knows of a run that it works on; all that must outlast it is in the ledger.
type run struct {
	Options
	dir     string
	rec     *record
	l       *ledger
	policy  *policy.Policy
	sandbox Sandbox

	began time.Time // when this process took it up
	base  Spent     // what had been spent then
	// fits: the budget was looked at for the question that is open.
	fits bool
	// cpuStart is what the kernel had counted of the sandbox when this process took it up.
	cpuStart time.Duration
}

// Run does one whole run. A run that ends without submit is a [Result] like any other; an error means that it could not be
// started, or that its record or output could not be kept. There is a result beside the error from the time when
// there is a sandbox.
//
// When ctx ends, the loop stops, and the output is still collected and the sandbox deleted, or with [Options.KeepInterrupted] stopped,
// before Run returns.
func Run(ctx context.Context, opts Options) (*Result, error) {
	r, first, err := prepare(opts)
	if err != nil {
		return nil, err
	}
	if r.dir, err = makeRunDir(r.OutputDir, r.began); err != nil {
		return nil, err
	}
	first.ID = filepath.Base(r.dir)
	nothing := func(err error) (*Result, error) {
		// Nothing has happened, so there is nothing to keep.
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
	if err := r.l.trajectory().save(r.dir, false); err != nil {
		return nothing(err)
	}
	err = r.makeSandbox(ctx, "", nil)
	if r.sandbox == nil {
		return nothing(err)
	}
	return r.finish(ctx, err)
}

// prepare checks the options and fills in the defaults. It touches nothing.
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
	system, user, err := opts.Prompt.Render(opts.Query)
	if err != nil {
		return nil, nil, fmt.Errorf("prompt config: %w", err)
	}
	setDefault(&opts.Budget.Turns, DefaultMaxSteps)
	setDefault(&opts.Budget.Conversation, DefaultMaxTokenLimit)
	setDefault(&opts.Budget.Time, DefaultTimeout)
	setDefault(&opts.MaxTokensPerCall, DefaultMaxTokensPerCall)
	setDefault(&opts.ToolTimeout, DefaultToolTimeout)
	setDefault(&opts.Image, api.HostImage)
	setDefault(&opts.OutputDir, "output")
	r, err := newWork(opts)
	if err != nil {
		return nil, nil, err
	}
	first := &RunEvent{
		Query: opts.Query, System: system, User: user, Prompt: opts.Prompt, LLMName: opts.LLMName, Model: opts.ModelName, ModelSource: opts.Model.Describe(), BaseURL: opts.BaseURL,
		Image: opts.Image, Limits: opts.Limits, InputDir: opts.InputDir, Budget: opts.Budget, PerCall: opts.MaxTokensPerCall, Temperature: opts.Temperature,
		ExtraBody: opts.ExtraBody, ToolTimeout: opts.ToolTimeout, Collect: opts.Collect, Policy: r.policy.Source(), Snapshots: opts.SnapshotTurns, SaveCalls: opts.SaveRequests,
	}
	return r, first, nil
}

// newWork is what [Run], [Resume] and [Fork] begin with.
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

// makeRunDir makes parent/YYYYmmdd_HHMMSS, with _2, _3, ... behind it while another run of the same second has the name.
func makeRunDir(parent string, now time.Time) (string, error) {
	if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // results are meant to be read by others, as the umask allows
		return "", fmt.Errorf("make the output directory: %w", err)
	}
	stamp := now.Format("20060102_150405")
	for n := 1; ; n++ {
		name := stamp
		if n > 1 {
			name += "_" + strconv.Itoa(n)
		}
		dir := filepath.Join(parent, name)
		err := os.Mkdir(dir, 0o755) //nolint:gosec // as above
		if err == nil {
			return dir, syncDir(parent)
		}
		if !errors.Is(err, os.ErrExist) || n >= 10_000 {
			return "", fmt.Errorf("make the output directory: %w", err)
		}
	}
}

// emit appends an event to the record and takes it into the ledger, as it stands in the record.
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

func (r *run) tellStatus(running bool) { r.OnStatus(*r.l.summary(r.dir, running)) }

func (r *run) closeRecord() error {
	if r.rec == nil {
		return nil
	}
	return r.rec.close()
}

// makeSandbox makes the run's sandbox, of a snapshot or anew with directories and input. That it is about to be made is on record
// first, with its name: who finds that and no more deletes what there is of that name. The calls of the steps to rebuild are run
// in it again.
func (r *run) makeSandbox(ctx context.Context, snapshot string, rebuild []Step) error {
	name := fmt.Sprintf("agent-%.24s-%s", r.began.Format("20060102-150405"), rand.Text()[:8])
	if err := r.emit(Event{Sandbox: &SandboxEvent{Name: name}}, true); err != nil {
		return err
	}
	req := api.CreateSandbox{
		Image: r.l.run.Image, Limits: r.l.run.Limits, Labels: map[string]string{"sandboxd.agent": "run"}, Name: name,
		Timeout: r.lifetime().Seconds(), IdleTimeout: idleTime.Seconds(),
	}
	if snapshot != "" {
		req.Image, req.Snapshot = "", snapshot
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
	}
	ready := SandboxEvent{Name: name, ID: sandbox.ID(), Ready: true, Snapshot: snapshot}
	if len(rebuild) > 0 {
		done, err := r.again(ctx, rebuild)
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
	if len(rebuild) > 0 { // else all that was counted is the run's
		r.cpuStart = used
	}
	return r.emit(Event{Sandbox: &ready}, true)
}

// lifetime is how long a sandbox is given: what is left of the run, and the time for its end.
func (r *run) lifetime() time.Duration {
	return max(r.l.run.Budget.Time-r.worked(), 0) + collectTime + deleteTime
}

// checkCPU asks for what the sandbox has used, and refuses a budget of processor time where nobody counts it.
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

// worked is how long processes have worked on the run.
func (r *run) worked() time.Duration { return r.base.Time + r.Now().Sub(r.began) }

// spend is what has been spent by now.
func (r *run) spend(ctx context.Context) Spent {
	s := r.l.spent
	s.Time = r.worked()
	if r.l.run.Budget.CPU > 0 && r.sandbox != nil {
		if used, known, err := r.sandbox.CPU(ctx); err == nil && known {
			if used < r.cpuStart { // it was started anew, and counts from there
				r.cpuStart = 0
			}
			s.CPU = max(s.CPU, r.base.CPU+used-r.cpuStart)
		}
	}
	return s
}

// watch ends a run's context when its processor time is used up, and returns when ctx has ended.
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
			continue // the next call of a tool finds out
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

// finish works on a run that has a sandbox until it ends. setUpErr is why it cannot.
func (r *run) finish(ctx context.Context, setUpErr error) (*Result, error) {
	res := &Result{Dir: r.dir, ExitReason: ExitFailed}
	// The reason is kept apart from the error: what is wrong on our side must not hide that the model submitted.
	reason, detail, missing, err := ExitReason(""), "", "", setUpErr
	if err == nil {
		r.tellStatus(true)
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
	err = errors.Join(err, r.emit(Event{End: &EndEvent{Reason: reason, Detail: detail, Output: res.Output, Spent: r.spend(clean), OutputError: missing}}, true))
	// The end is on record before the sandbox goes: a crash in between leaves a sandbox, which resume deletes, and no doubt.
	if reason == ExitInterrupted && r.KeepInterrupted != nil && setUpErr == nil && r.KeepInterrupted(context.Cause(ctx)) && r.sandbox.Stop(clean) == nil {
		res.Kept = r.sandbox.ID()
	} else if delErr := r.sandbox.Delete(clean); delErr != nil && !hasCode(delErr, api.CodeNotFound) {
		delErr = fmt.Errorf("delete the sandbox %s: %w", r.sandbox.ID(), delErr)
		if reason == ExitSandboxLost {
			r.OnNote(delErr.Error()) // it said so already
		} else {
			err = errors.Join(err, delErr)
		}
	}
	res.ExitReason, res.Detail, res.Steps, res.Spent, res.Usage = reason, detail, len(r.l.steps), r.l.spent, r.l.usage
	r.tellStatus(false)
	return res, errors.Join(err, r.l.trajectory().save(r.dir, true), r.closeRecord())
}

// WithoutSecrets takes secrets out of a text, but for those that are too short to be told from other words.
func WithoutSecrets(text string, secrets []string) string {
	for _, s := range secrets {
		if len(s) >= leastSecret {
			text = strings.ReplaceAll(text, s, "[secret]")
		}
	}
	return text
}

// work takes turns within the time that is left.
func (r *run) work(ctx context.Context) (ExitReason, string, error) {
	budget := r.l.run.Budget
	reason, detail := Budget{Time: budget.Time}.over(Spent{Time: budget.Time})
	timed, cancel := context.WithTimeoutCause(ctx, max(budget.Time-r.worked(), 0), &budgetEnd{reason, detail})
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

// collect lists what the model has left, and then takes what may leave.
func (r *run) collect(ctx context.Context, res *Result) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), collectTime)
	defer cancel()
	outputs, err := listOutputs(ctx, r.sandbox, r.l.run.Prompt.OutputDir, r.l.run.Collect)
	switch {
	case err != nil && lost(err):
		return err
	case err != nil:
		// The list is for who reads it. What leaves is held to the rules again, and must not be lost for want of one.
		r.OnNote(err.Error())
	default:
		if err := r.emit(Event{Outputs: outputs}, true); err != nil {
			return err
		}
		r.OnOutputs(*outputs)
	}
	// A directory that is there is of an end before this one, and one with the other name of a crash.
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
	if err := os.Rename(filesDir, filepath.Join(r.dir, fmt.Sprintf("files.%d", r.l.resumed))); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(collectErr, fmt.Errorf("keep the earlier output: %w", err))
	}
	if err := os.Rename(partial, filesDir); err != nil {
		return errors.Join(collectErr, fmt.Errorf("keep the output: %w", err))
	}
	if collectErr != nil {
		return collectErr
	}
	res.Answer, res.HasAnswer, collectErr = ReadAnswer(filesDir, maxAnswer)
	return collectErr
}

// setUp makes the directories and copies the input.
func (r *run) setUp(ctx context.Context) error {
	stderr := newEnds(4 << 10)
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
