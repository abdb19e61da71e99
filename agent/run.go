package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
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
	// maxAnswer is how much of answer.txt is printed.
	maxAnswer = 1 << 20
)

// Options is one run. Zero values mean the default where one exists.
type Options struct {
	Query     string // the problem statement
	Model     llm.Model
	ModelName string // sent to the model; may be empty for a replay
	BaseURL   string // for the record
	Prompt    PromptConfig

	// Create makes the sandbox; Run deletes it.
	Create func(ctx context.Context, req api.CreateSandbox) (Sandbox, error)
	Image  string // "" means the host image
	Limits api.Limits

	InputDir  string // its children are copied into the sandbox; "" for none
	OutputDir string // each run makes a directory named by its time below it

	MaxSteps         int
	MaxTokenLimit    int // of the whole conversation, checked before each call
	MaxTokensPerCall int
	Temperature      *float64 // nil: the provider's default
	ExtraBody        map[string]any
	ToolTimeout      time.Duration
	Timeout          time.Duration // of the whole run
	Collect          CollectLimits
	SaveRequests     bool // keep request_NNN.json and response_NNN.json

	Now func() time.Time // nil: time.Now
	// OnStart, OnStep and OnNote, if set, are told what happens, in order and from one goroutine.
	OnStart func(Started)
	OnStep  func(Step)
	OnNote  func(text string)
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
	Dir        string     `json:"output_dir"` // holds files/ and trajectory.json
	Steps      int        `json:"total_steps"`
	Answer     string     `json:"answer,omitempty"` // of files/answer.txt
	HasAnswer  bool       `json:"has_answer"`
	Usage      llm.Usage  `json:"usage"` // of all model calls
	Output     *Collected `json:"output,omitempty"`
}

// run is the state of one run.
type run struct {
	Options
	started    time.Time
	dir        string
	trajectory Trajectory
	sandbox    Sandbox
}

// Run does one whole run. A run that ends without submit is a [Result] like any other; an error means that it could not be
// started, or that its record or output could not be kept. There is a result beside the error from the time when
// there is a sandbox.
//
// When ctx ends, the loop stops, and the output is still collected and the sandbox deleted before Run returns.
func Run(ctx context.Context, opts Options) (*Result, error) {
	r, system, user, err := prepare(opts)
	if err != nil {
		return nil, err
	}
	if r.dir, err = makeRunDir(r.OutputDir, r.started); err != nil {
		return nil, err
	}
	res := &Result{Dir: r.dir, ExitReason: ExitFailed}
	if err := r.trajectory.save(r.dir); err != nil {
		return res, err
	}
	// The reason is kept apart from the error: what is wrong on our side must not hide that the model submitted.
	reason, detail, err := r.work(ctx, system, user, res)
	if err != nil && reason == "" {
		reason, detail = ExitFailed, err.Error()
		if ctx.Err() != nil {
			reason, detail = ExitInterrupted, context.Cause(ctx).Error()
		}
	}
	if r.sandbox == nil {
		// Nothing has happened, so there is nothing to record.
		return nil, errors.Join(err, os.Remove(filepath.Join(r.dir, "trajectory.json")), os.Remove(r.dir))
	}
	res.ExitReason, res.Detail, res.Steps = reason, detail, len(r.trajectory.Steps)
	meta := &r.trajectory.Metadata
	res.Usage = meta.Usage
	finished := r.Now().UTC()
	meta.ExitReason, meta.ExitDetail, meta.FinishedAt, meta.Output = reason, detail, &finished, res.Output
	return res, errors.Join(err, r.trajectory.save(r.dir))
}

// prepare checks the options and fills in the defaults. It touches nothing.
func prepare(opts Options) (r *run, system, user string, err error) {
	if opts.Query == "" {
		return nil, "", "", errors.New("the query is empty: say what the model shall do")
	}
	if opts.InputDir != "" {
		if fi, err := os.Stat(opts.InputDir); err != nil {
			return nil, "", "", fmt.Errorf("input directory: %w", err)
		} else if !fi.IsDir() {
			return nil, "", "", fmt.Errorf("input directory %s: not a directory", opts.InputDir)
		}
	}
	if opts.MaxSteps < 0 || opts.MaxTokenLimit < 0 || opts.MaxTokensPerCall < 0 || opts.ToolTimeout < 0 || opts.Timeout < 0 {
		return nil, "", "", errors.New("a limit is negative")
	}
	if opts.Prompt == (PromptConfig{}) {
		if opts.Prompt, err = LoadPromptConfig(""); err != nil {
			return nil, "", "", err
		}
	}
	if system, user, err = opts.Prompt.Render(opts.Query); err != nil {
		return nil, "", "", fmt.Errorf("prompt config: %w", err)
	}
	setDefault(&opts.MaxSteps, DefaultMaxSteps)
	setDefault(&opts.MaxTokenLimit, DefaultMaxTokenLimit)
	setDefault(&opts.MaxTokensPerCall, DefaultMaxTokensPerCall)
	setDefault(&opts.ToolTimeout, DefaultToolTimeout)
	setDefault(&opts.Timeout, DefaultTimeout)
	setDefault(&opts.Image, api.HostImage)
	setDefault(&opts.OutputDir, "output")
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.OnStart == nil {
		opts.OnStart = func(Started) {}
	}
	if opts.OnStep == nil {
		opts.OnStep = func(Step) {}
	}
	if opts.OnNote == nil {
		opts.OnNote = func(string) {}
	}
	r = &run{Options: opts, started: opts.Now()}
	r.trajectory = Trajectory{ProblemStatement: opts.Query, Steps: []Step{}, Metadata: RunMetadata{
		Model: opts.ModelName, ModelSource: opts.Model.Describe(), Image: opts.Image, StartedAt: r.started.UTC(),
	}}
	return r, system, user, nil
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

// work is the part of a run during which there is a sandbox.
func (r *run) work(ctx context.Context, system, user string, res *Result) (reason ExitReason, detail string, err error) {
	r.sandbox, err = r.Create(ctx, api.CreateSandbox{
		Image: r.Image, Limits: r.Limits, Labels: map[string]string{"sandboxd.agent": "run"},
		Timeout: (r.Timeout + collectTime + deleteTime).Seconds(), IdleTimeout: idleTime.Seconds(),
	})
	if err != nil {
		return "", "", fmt.Errorf("create the sandbox: %w", err)
	}
	defer func() {
		// Always, and with a context of its own: the run's may have ended long ago.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
		defer cancel()
		if delErr := r.sandbox.Delete(clean); delErr != nil && !hasCode(delErr, api.CodeNotFound) {
			delErr = fmt.Errorf("delete the sandbox %s: %w", r.sandbox.ID(), delErr)
			if reason == ExitSandboxLost {
				r.OnNote(delErr.Error()) // it said so already
				return
			}
			err = errors.Join(err, delErr)
		}
	}()
	r.trajectory.Metadata.SandboxID = r.sandbox.ID()

	if err := r.setUp(ctx); err != nil {
		return "", "", err
	}
	r.OnStart(Started{SandboxID: r.sandbox.ID(), Image: r.Image, Dir: r.dir, ModelSource: r.Model.Describe()})

	loopCtx, cancel := context.WithTimeoutCause(ctx, r.Timeout, errTimeLimit)
	defer cancel()
	reason, detail, err = r.loop(loopCtx, system, user)

	collectCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), collectTime)
	defer cancel()
	filesDir := filepath.Join(r.dir, "files")
	var collectErr error
	res.Output, collectErr = collect(collectCtx, r.sandbox, r.Prompt.OutputDir, filesDir, r.Collect)
	if collectErr == nil {
		res.Answer, res.HasAnswer, collectErr = readAnswer(filesDir, maxAnswer)
	} else if reason == ExitSandboxLost {
		r.OnNote(collectErr.Error())
		collectErr = nil
	}
	return reason, detail, errors.Join(err, collectErr)
}

// setUp makes the directories and copies the input.
func (r *run) setUp(ctx context.Context) error {
	stderr := newEnds(4 << 10)
	outcome, err := r.sandbox.Exec(ctx, api.ExecRequest{
		Argv: []string{"mkdir", "-p", "--", r.Prompt.WorkingDir, r.Prompt.InputDir, r.Prompt.OutputDir}, Cwd: "/", Timeout: 60,
	}, stderr, stderr)
	if err != nil {
		return fmt.Errorf("make the directories in the sandbox: %w", err)
	}
	if outcome.Exit.Code != 0 {
		return fmt.Errorf("make the directories in the sandbox: mkdir exited %d: %s", outcome.Exit.Code, stderr.text(1000))
	}
	if r.InputDir == "" {
		return nil
	}
	skipped, err := sendDir(ctx, r.sandbox, r.InputDir, r.Prompt.InputDir)
	if err != nil {
		return err
	}
	for _, s := range skipped {
		r.OnNote("input left out: " + s)
	}
	return nil
}
