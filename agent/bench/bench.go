package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// Mode is the way in which the model works.
type Mode string

// Modes, by their names in LLM-in-Sandbox.
const (
	ModeSandbox Mode = "llm-in-sandbox"
	ModeLLM     Mode = "llm" // a single answer, without tools
)

// DefaultTimeout is the default time limit of one problem.
const DefaultTimeout = 30 * time.Minute

// maxAnswer is the scored part of an answer in bytes.
const maxAnswer = 1 << 20

// Options describes one benchmark.
type Options struct {
	Task   *Task
	Config Config // for the record
	Mode   Mode
	// Run is the template of every problem's run: limits, policy, prices, the creation of sandboxes.
	// Its query, prompt, directories and model are filled in.
	Run agent.Options
	// Model returns the model for one problem whose record holds the given number of turns.
	Model func(p *Problem, turns int) (llm.Model, error)
	Judge *Judge // for [MethodJudge]
	// MaxResponse is the answer ceiling of [ModeLLM] in tokens.
	MaxResponse int
	Start, End  int // indices of the first problem, and of the one after the last
	Workers     int

	OutputDir string // parent of a new benchmark's directory
	Resume    string // directory of the benchmark to continue; "" begins a new one

	Now func() time.Time // nil means time.Now
	// Remove deletes the sandbox with that ID in any state. A missing one is no error.
	Remove func(ctx context.Context, id string) error
	// Clean, if set, deletes the sandboxes with all of these labels, in which a killed process
	// scored.
	Clean func(ctx context.Context, labels map[string]string) error

	// OnStart, OnResult and OnNote, if set, are called one at a time.
	OnStart  func(dir string, problems, done int)
	OnResult func(Result)
	OnNote   func(text string)
}

// bench is one process's work on a benchmark.
type bench struct {
	Options
	dir string
	l   *ledger

	tell sync.Mutex
	stop context.CancelCauseFunc
}

// Run works on a benchmark until every problem is scored or ctx ends. It returns the results so far
// and writes them to results.json; an error beside them is the reason why it stopped.
//
// When Run returns, none of its sandboxes is left.
func Run(ctx context.Context, opts Options) (res *Results, err error) {
	b, err := open(&opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.l.file.Close()) }()
	if b.Resume != "" && b.Clean != nil && b.l.begin.ID != "" {
		if err := b.Clean(ctx, b.scoreLabels()); err != nil {
			return nil, fmt.Errorf("delete sandboxes that were left: %w", err)
		}
	}
	if err := b.checkScripts(ctx); err != nil {
		return nil, errors.Join(err, b.discard())
	}
	problems := b.Task.Problems[b.Start:b.End]
	done := 0
	for i := range problems {
		if _, s := b.l.of(problems[i].Index); s != nil {
			done++
		}
	}
	if b.OnStart != nil {
		b.OnStart(b.dir, len(problems), done)
	}
	err = b.work(ctx, problems)
	res, saveErr := b.save(problems)
	return res, errors.Join(err, saveErr)
}

// open creates a benchmark's directory and record, or opens existing ones.
func open(opts *Options) (*bench, error) {
	switch {
	case opts.Start < 0 || opts.Start > opts.End || opts.End > len(opts.Task.Problems):
		return nil, fmt.Errorf("problems from %d to %d: the task has %d", opts.Start, opts.End, len(opts.Task.Problems))
	case opts.Workers < 1:
		return nil, errors.New("less than one worker")
	case opts.Task.Scoring.Method == MethodJudge && opts.Judge == nil:
		return nil, errors.New("the task is scored by a judge, and no model is named for one")
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	b := &bench{Options: *opts, dir: opts.Resume}
	if b.dir != "" {
		var err error
		if b.l, err = openLedger(b.dir, opts.Now); err != nil {
			return nil, err
		}
		if b.l.begin.Digest != b.Task.Digest || b.l.begin.Scoring != b.Task.Scoring.Method {
			return nil, errors.Join(errors.New("the task is not as it was when the benchmark began: its configuration, data or scoring has changed"), b.l.file.Close())
		}
		if err := b.l.add(event{Resumed: &struct{}{}}); err != nil {
			return nil, errors.Join(err, b.l.file.Close())
		}
		return b, nil
	}
	kind := "LLMinSandbox"
	if b.Mode == ModeLLM {
		kind = "vanillaLLM"
	}
	name := opts.Now().Format("20060102_150405") + "_" + fileName(b.Task.Name) + "_" + fileName(b.Run.ModelName) + "_" + kind
	var err error
	if b.dir, err = agent.MakeDir(b.OutputDir, name); err != nil {
		return nil, err
	}
	if err = os.Mkdir(filepath.Join(b.dir, "logs"), 0o755); err == nil { //nolint:gosec // results are readable by others, as the umask allows
		b.Config.ID = rand.Text()
		b.l, err = createLedger(b.dir, b.Config, opts.Now)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(b.dir))
	}
	return b, nil
}

// discard removes the directory of a benchmark that has not begun.
func (b *bench) discard() error {
	if b.Resume != "" {
		return nil
	}
	return os.RemoveAll(b.dir)
}

// fileName converts a name of a task or a model to a file name.
func fileName(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-', r == '.', r == '#':
			return r
		}
		return '-'
	}, text)
	text = strings.TrimLeft(text, ".")
	return text[:min(len(text), 80)]
}

// work solves and scores all problems.
func (b *bench) work(ctx context.Context, problems []Problem) error {
	ctx, b.stop = context.WithCancelCause(ctx)
	defer b.stop(nil)
	next := make(chan *Problem)
	var all sync.WaitGroup
	for range min(b.Workers, max(len(problems), 1)) {
		all.Go(func() {
			for p := range next {
				if err := b.solve(ctx, p); err != nil {
					b.stop(fmt.Errorf("problem %s: %w", p.ID, err))
				}
			}
		})
	}
	for i := range problems {
		if ctx.Err() != nil {
			break
		}
		select {
		case next <- &problems[i]:
		case <-ctx.Done():
		}
	}
	close(next)
	all.Wait()
	return context.Cause(ctx)
}

// solve brings one problem from its recorded state to its score.
func (b *bench) solve(ctx context.Context, p *Problem) error {
	a, s := b.l.of(p.Index)
	if s != nil {
		return nil
	}
	name := fmt.Sprintf("%05d-%s", p.Index, fileName(p.ID))
	logName := name
	if fileName(p.ID) == p.ID { // no other ID has this file name
		logName = p.ID
	}
	if a == nil {
		log, err := os.OpenFile(filepath.Join(b.dir, "logs", logName+".txt"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644) //nolint:gosec // results are readable by others, as the umask allows
		if err != nil {
			return fmt.Errorf("open its log: %w", err)
		}
		if b.Mode == ModeLLM {
			a, err = b.ask(ctx, p, filepath.Join("runs", name), log)
		} else {
			a, err = b.run(ctx, p, filepath.Join("runs", name), log)
		}
		if err = errors.Join(err, log.Close()); err != nil {
			return err
		}
		if b.Mode == ModeSandbox {
			if err := b.addEarlier(a, filepath.Join("runs", name)); err != nil {
				return err
			}
		}
		a.Index, a.ID, a.Answer, a.Error = p.Index, p.ID, b.clean(a.Answer), b.clean(a.Error)
		if err := b.l.add(event{Answered: a}); err != nil {
			return err
		}
	}
	s, err := b.score(ctx, p, a)
	if err != nil {
		return err
	}
	s.Error = b.clean(s.Error)
	if err := b.l.add(event{Scored: s}); err != nil {
		return err
	}
	if b.OnResult != nil {
		b.tell.Lock()
		defer b.tell.Unlock()
		b.OnResult(newResult(p, a, s))
	}
	return nil
}

// score scores an answer. An error is not the answer's fault.
func (b *bench) score(ctx context.Context, p *Problem, a *Answered) (*Scored, error) {
	s := &Scored{Index: p.Index}
	var err error
	switch b.Task.Scoring.Method {
	case MethodJudge:
		if trim(a.Answer) == "" {
			return s, nil // an empty answer needs no judge
		}
		s.Score, s.Judge, err = b.judged(ctx, p, a.Answer)
	case MethodCommand, MethodReward:
		t := tried{problem: p, answer: a.Answer}
		if a.Run != "" {
			t.files = filepath.Join(b.dir, a.Run, "files")
			if _, statErr := os.Stat(t.files); errors.Is(statErr, fs.ErrNotExist) {
				t.files = ""
			}
		}
		s.Score, err = b.scoreSandbox(ctx, t)
		if own, ok := errors.AsType[*scoreError](err); ok {
			s.Error, err = own.Error(), nil
		}
	case MethodExact, MethodNumeric, MethodLetter, MethodChoices, MethodRegex, MethodF1, MethodRougeL:
		if s.Score, err = b.Task.Scoring.scoreText(a.Answer, p.Truth); err != nil {
			s.Error, err = err.Error(), nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("score: %w", err)
	}
	return s, nil
}

// run solves a problem in a sandbox. It resumes an earlier run if possible.
func (b *bench) run(ctx context.Context, p *Problem, below string, log io.Writer) (*Answered, error) {
	dir := filepath.Join(b.dir, below)
	runs, err := agent.ListRuns(dir)
	if err != nil {
		return nil, err
	}
	attempts := len(runs)
	began := b.Now()
	if attempts > 0 {
		last := runs[attempts-1]
		switch {
		case last.Error != "":
			// The process ended before the run had begun.
		case last.State == agent.RunEnded && settled(last.ExitReason):
			return b.recorded(ctx, p, last.Dir, attempts)
		case last.State == agent.RunStopped, last.ExitReason == agent.ExitSandboxLost: // if the daemon was lost, the sandbox may exist
			opts, err := b.options(p, last.Turns, log)
			if err != nil {
				return nil, err
			}
			opts.Prompt, opts.Query, opts.Budget, opts.Policy = agent.PromptConfig{}, "", agent.Budget{}, nil // from the record
			if _, answered, err := agent.RecordedModel(last.Dir); err != nil {
				return nil, err
			} else if opts.Model, err = b.model(p, answered); err != nil {
				return nil, err
			}
			res, err := agent.Resume(ctx, last.Dir, opts)
			if res != nil || !errors.Is(err, agent.ErrEnded) {
				return b.answered(ctx, res, err, attempts, b.Now().Sub(began))
			}
			// Its sandbox is gone, or it had ended.
			if s, _, loadErr := agent.LoadRun(last.Dir); loadErr == nil && s.State == agent.RunEnded && settled(s.ExitReason) {
				return b.recorded(ctx, p, last.Dir, attempts)
			}
			b.note(fmt.Sprintf("problem %s is begun anew: %v", p.ID, err))
		}
	}
	opts, err := b.options(p, 0, log)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // results are readable by others, as the umask allows
		return nil, err
	}
	opts.OutputDir = dir
	if opts.InputDir, err = b.inputDir(p, filepath.Join(dir, "input")); err != nil {
		return nil, fmt.Errorf("write its input: %w", err)
	}
	res, err := agent.Run(ctx, opts)
	if attempts == 0 && res != nil && res.ExitReason == agent.ExitSandboxLost && ctx.Err() == nil {
		// Either the sandbox or the daemon was lost. In the latter case the second attempt stops the
		// benchmark.
		b.note(fmt.Sprintf("problem %s has lost its sandbox, and is tried again: %s", p.ID, res.Detail))
		return b.run(ctx, p, below, log)
	}
	return b.answered(ctx, res, err, attempts+1, b.Now().Sub(began))
}

// addEarlier adds the usage of earlier runs of the problem, which could not be resumed: they were
// paid for.
func (b *bench) addEarlier(a *Answered, below string) error {
	runs, err := agent.ListRuns(filepath.Join(b.dir, below))
	if err != nil {
		return err
	}
	for _, r := range runs {
		if r.Error != "" || filepath.Base(r.Dir) == filepath.Base(a.Run) {
			continue
		}
		_, t, err := agent.LoadRun(r.Dir)
		if err != nil {
			return err
		}
		a.Usage.Add(t.Metadata.Usage)
	}
	return nil
}

// settled reports whether another attempt would probably end alike.
func settled(reason agent.ExitReason) bool {
	switch reason {
	case agent.ExitSubmitted, agent.ExitMaxSteps, agent.ExitTokenLimit, agent.ExitTimeLimit, agent.ExitCostLimit, agent.ExitCPULimit, agent.ExitNoToolCall:
		return true
	case agent.ExitModelError, agent.ExitSandboxLost, agent.ExitInterrupted, agent.ExitFailed:
	}
	return false
}

// options returns the options of one problem's run.
func (b *bench) options(p *Problem, turns int, log io.Writer) (agent.Options, error) {
	opts := b.Run
	opts.Query, opts.Prompt = p.Statement, b.Task.Prompt
	opts.OnStep = func(s agent.Step) { _ = agent.PrintStep(log, s) } // the record holds it too
	opts.OnNote = func(text string) { _, _ = fmt.Fprintln(log, agent.Printable(text)) }
	opts.OnStart, opts.OnOutputs = nil, nil
	var err error
	opts.Model, err = b.model(p, turns)
	return opts, err
}

// answered converts the end of a run. Its error stops the benchmark.
func (b *bench) answered(ctx context.Context, res *agent.Result, err error, attempts int, took time.Duration) (*Answered, error) {
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx) // the record keeps the work so far, unscored
	case res == nil:
		return nil, err
	}
	a := &Answered{ExitReason: res.ExitReason, Answer: trim(res.Answer), Steps: res.Steps, Usage: res.Usage, Attempts: attempts, Seconds: took.Seconds()}
	if err == nil && (res.ExitReason == agent.ExitModelError || res.ExitReason == agent.ExitSandboxLost || res.ExitReason == agent.ExitFailed) {
		err = errors.New(res.Detail)
	}
	if err != nil {
		a.Error = clip(err.Error())
	}
	a.Run, err = filepath.Rel(b.dir, res.Dir)
	return a, err
}

// recorded converts a run that had ended when another process was killed.
func (b *bench) recorded(ctx context.Context, p *Problem, dir string, attempts int) (*Answered, error) {
	_, t, err := agent.LoadRun(dir)
	if err != nil {
		return nil, err
	}
	// The sandbox may still exist, or be half deleted. It is not opened, since that could fail.
	if t.Metadata.SandboxID != "" {
		if err := b.Remove(ctx, t.Metadata.SandboxID); err != nil {
			b.note(fmt.Sprintf("delete the sandbox %s of problem %s: %v", t.Metadata.SandboxID, p.ID, err))
		}
	}
	a := &Answered{ExitReason: t.Metadata.ExitReason, Steps: t.Metadata.TotalSteps, Usage: t.Metadata.Usage, Attempts: attempts, Seconds: t.Metadata.Spent.Time.Seconds()}
	if a.Answer, _, err = agent.ReadAnswer(filepath.Join(dir, "files"), maxAnswer); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	a.Answer = trim(a.Answer)
	a.Run, err = filepath.Rel(b.dir, dir)
	return a, err
}

// ask has the model answer a problem in one turn, without tools.
func (b *bench) ask(ctx context.Context, p *Problem, below string, log io.Writer) (*Answered, error) {
	text, err := b.question(ctx, p)
	if err != nil {
		return nil, err
	}
	model, err := b.model(p, 0)
	if err != nil {
		return nil, err
	}
	limit := b.Run.Budget.Time
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := b.Now()
	req := llm.Request{
		Model: b.Run.ModelName, Messages: []llm.Message{{Role: llm.RoleUser, Content: text}}, MaxTokens: b.MaxResponse,
		Temperature: b.Run.Temperature, ExtraBody: b.Run.ExtraBody,
	}
	if b.Run.SaveRequests {
		if err := os.MkdirAll(filepath.Join(b.dir, below), 0o755); err != nil { //nolint:gosec // results are readable by others, as the umask allows
			return nil, err
		}
		if err := agent.SaveRequest(filepath.Join(b.dir, below), 1, req, b.Run.BaseURL, b.Run.Secrets); err != nil {
			return nil, err
		}
	}
	resp, err := model.Complete(timed, req)
	if err == nil && b.Run.SaveRequests {
		if err := agent.SaveResponse(filepath.Join(b.dir, below), 1, resp, b.Run.Secrets); err != nil {
			return nil, err
		}
	}
	a := &Answered{Attempts: 1, Seconds: b.Now().Sub(began).Seconds()}
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case timed.Err() != nil:
		a.ExitReason, a.Error = agent.ExitTimeLimit, fmt.Sprintf("no answer within %v", limit)
	case err != nil:
		a.ExitReason, a.Error = agent.ExitModelError, clip(err.Error())
	default:
		a.Answer, a.Steps, a.Usage = resp.Content, 1, priced(resp.Usage, b.Run.Price)
		if len(a.Answer) > maxAnswer { // the result stands at the end
			a.Answer = strings.ToValidUTF8(a.Answer[len(a.Answer)-maxAnswer:], "")
		}
	}
	_, err = fmt.Fprintf(log, "Query:\n%s\n\nResponse:\n%s\n", agent.Printable(text), agent.Printable(b.clean(a.Answer)))
	if err == nil && a.Error != "" {
		_, err = fmt.Fprintf(log, "Error: %s\n", agent.Printable(b.clean(a.Error)))
	}
	return a, err
}

// model returns the model for a problem. An error that would recur for all other problems stops the
// benchmark.
func (b *bench) model(p *Problem, turns int) (llm.Model, error) {
	m, err := b.Model(p, turns)
	if err != nil {
		return nil, err
	}
	return &watched{m, func(err error) { b.stop(errors.New(b.clean(err.Error()))) }}, nil
}

type watched struct {
	llm.Model

	stop func(error)
}

// Complete calls the model. If the model is unreachable or refuses the key, it stops the benchmark.
func (w *watched) Complete(ctx context.Context, req llm.Request) (*llm.Response, error) {
	resp, err := w.Model.Complete(ctx, req)
	if e, ok := errors.AsType[*llm.Error](err); ok && ctx.Err() == nil && (e.Kind == llm.KindAuth || e.Kind == llm.KindNetwork) {
		w.stop(err)
	}
	return resp, err
}

// clean redacts keys, which a server may have echoed.
func (b *bench) clean(text string) string { return agent.WithoutSecrets(text, b.Run.Secrets) }

func (b *bench) note(text string) {
	if b.OnNote != nil {
		b.tell.Lock()
		defer b.tell.Unlock()
		b.OnNote(text)
	}
}

// writeBelow writes a new file below root, and creates its parent directories.
func writeBelow(root *os.Root, name, text string) error {
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return root.WriteFile(name, []byte(text), 0o644)
}
