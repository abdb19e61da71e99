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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// Mode is how the model works.
type Mode string

// The modes, by the names that users of LLM-in-Sandbox know.
const (
	ModeSandbox Mode = "llm-in-sandbox"
	ModeLLM     Mode = "llm" // one answer, without tools
)

// DefaultTimeout is what one problem may take.
const DefaultTimeout = 30 * time.Minute

// maxAnswer is how much of an answer is scored.
const maxAnswer = 1 << 20

// Options is one benchmark.
type Options struct {
	Task   *Task
	Config Config // for the record; Run begins with it
	Mode   Mode
	// Run is what every problem's run begins with: limits, policy, prices, how a sandbox is made. Its query, prompt, directories and
	// model are filled in.
	Run agent.Options
	// Model gives the model for one problem, of which so many turns are on record.
	Model func(p *Problem, turns int) (llm.Model, error)
	Judge *Judge // for [MethodJudge]
	// MaxResponse bounds an answer of [ModeLLM].
	MaxResponse int
	Start, End  int // which problems: from Start up to but not with End
	Workers     int

	OutputDir string // a new benchmark makes a directory below it
	Resume    string // the directory of one that goes on, in place of a new one

	Now func() time.Time // nil: time.Now
	// Remove deletes the sandbox of that id, in whatever state it is, and is content if there is none.
	Remove func(ctx context.Context, id string) error
	// Clean, if set, deletes the sandboxes that have all of these labels: those in which an earlier process, killed since, scored.
	Clean func(ctx context.Context, labels map[string]string) error

	// OnStart, OnResult and OnNote, if set, are told what happens, one at a time.
	OnStart  func(dir string, problems, done int)
	OnResult func(Result)
	OnNote   func(text string)
}

// bench is what one process knows of a benchmark.
type bench struct {
	Options
	dir string
	l   *ledger

	tell sync.Mutex
	stop context.CancelCauseFunc
}

// Run works on a benchmark until every problem is scored, or ctx ends. It gives the results as far as they go, which are written to results.json
// too; an error with them says why it stopped.
//
// When it returns, there is no sandbox of its own left.
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

// open makes a benchmark's directory and record, or opens those that are there.
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
	if b.dir, err = makeDir(b.OutputDir, name); err != nil {
		return nil, err
	}
	if err = os.Mkdir(filepath.Join(b.dir, "logs"), 0o755); err == nil { //nolint:gosec // results are meant to be read by others, as the umask allows
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

func makeDir(parent, name string) (string, error) {
	if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // as above
		return "", fmt.Errorf("make the output directory: %w", err)
	}
	for n := 1; ; n++ {
		dir := filepath.Join(parent, name)
		if n > 1 {
			dir += "_" + strconv.Itoa(n)
		}
		err := os.Mkdir(dir, 0o755) //nolint:gosec // as above
		if err == nil {
			return dir, syncDir(parent)
		}
		if !errors.Is(err, fs.ErrExist) || n >= 10_000 {
			return "", fmt.Errorf("make the output directory: %w", err)
		}
	}
}

// fileName makes a name of a file of one that comes from a task or a model.
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

// work has every problem answered and scored.
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

// solve brings one problem from wherever it stands to its score.
func (b *bench) solve(ctx context.Context, p *Problem) error {
	a, s := b.l.of(p.Index)
	if s != nil {
		return nil
	}
	name := fmt.Sprintf("%05d-%s", p.Index, fileName(p.ID))
	logName := name
	if fileName(p.ID) == p.ID { // no other id comes to the same name
		logName = p.ID
	}
	if a == nil {
		log, err := os.OpenFile(filepath.Join(b.dir, "logs", logName+".txt"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644) //nolint:gosec // as above
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

// score gives what an answer is worth. Its error is nobody's answer's fault.
func (b *bench) score(ctx context.Context, p *Problem, a *Answered) (*Scored, error) {
	s := &Scored{Index: p.Index}
	var err error
	switch b.Task.Scoring.Method {
	case MethodJudge:
		if trim(a.Answer) == "" {
			return s, nil // there is nothing to judge
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

// run has a problem solved in a sandbox: by a run that was begun before, where there is one that can go on, or a new one.
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
			// It had not begun when the process ended.
		case last.State == agent.RunEnded && settled(last.ExitReason):
			return b.recorded(ctx, p, last.Dir, attempts)
		case last.State == agent.RunStopped, last.ExitReason == agent.ExitSandboxLost: // the daemon was lost, perhaps, and the sandbox not
			opts, err := b.options(p, last.Turns, log)
			if err != nil {
				return nil, err
			}
			opts.Prompt, opts.Query, opts.Budget, opts.Policy = agent.PromptConfig{}, "", agent.Budget{}, nil // as on record
			if _, answered, err := agent.RecordedModel(last.Dir); err != nil {
				return nil, err
			} else if opts.Model, err = b.model(p, answered); err != nil {
				return nil, err
			}
			res, err := agent.Resume(ctx, last.Dir, opts)
			if res != nil || !errors.Is(err, agent.ErrEnded) {
				return b.answered(ctx, res, err, attempts, b.Now().Sub(began))
			}
			// Its sandbox is gone, or it had ended after all.
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
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // as above
		return nil, err
	}
	opts.OutputDir = dir
	if opts.InputDir, err = b.inputDir(p, filepath.Join(dir, "input")); err != nil {
		return nil, fmt.Errorf("write its input: %w", err)
	}
	res, err := agent.Run(ctx, opts)
	if attempts == 0 && res != nil && res.ExitReason == agent.ExitSandboxLost && ctx.Err() == nil {
		// The sandbox, or the daemon: in the latter case the second attempt stops the benchmark.
		b.note(fmt.Sprintf("problem %s has lost its sandbox, and is tried again: %s", p.ID, res.Detail))
		return b.run(ctx, p, below, log)
	}
	return b.answered(ctx, res, err, attempts+1, b.Now().Sub(began))
}

// addEarlier adds what the runs took that were begun before the one that gave the answer, and could not go on: somebody pays for them.
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

// settled reports an end that another attempt would not be likely to change.
func settled(reason agent.ExitReason) bool {
	switch reason {
	case agent.ExitSubmitted, agent.ExitMaxSteps, agent.ExitTokenLimit, agent.ExitTimeLimit, agent.ExitCostLimit, agent.ExitCPULimit, agent.ExitNoToolCall:
		return true
	case agent.ExitModelError, agent.ExitSandboxLost, agent.ExitInterrupted, agent.ExitFailed:
	}
	return false
}

// options are those of one problem's run.
func (b *bench) options(p *Problem, turns int, log io.Writer) (agent.Options, error) {
	opts := b.Run
	opts.Query, opts.Prompt = p.Statement, b.Task.Prompt
	opts.OnStep = func(s agent.Step) { _ = agent.PrintStep(log, s) } // the record has it
	opts.OnNote = func(text string) { _, _ = fmt.Fprintln(log, agent.Printable(text)) }
	opts.OnStart, opts.OnOutputs = nil, nil
	var err error
	opts.Model, err = b.model(p, turns)
	return opts, err
}

// answered is what a run's end amounts to. Its error stops the benchmark.
func (b *bench) answered(ctx context.Context, res *agent.Result, err error, attempts int, took time.Duration) (*Answered, error) {
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx) // what was done so far is on record, and not scored
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

// recorded is what a run amounts to that had ended when another process was killed.
func (b *bench) recorded(ctx context.Context, p *Problem, dir string, attempts int) (*Answered, error) {
	_, t, err := agent.LoadRun(dir)
	if err != nil {
		return nil, err
	}
	// Its sandbox is there still if the process had no time to delete it, or half of it: it is not opened, which could fail.
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

// ask has a problem answered in one turn, without tools.
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
		if err := os.MkdirAll(filepath.Join(b.dir, below), 0o755); err != nil { //nolint:gosec // as above
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
		if len(a.Answer) > maxAnswer { // the end is where the answer stands
			a.Answer = strings.ToValidUTF8(a.Answer[len(a.Answer)-maxAnswer:], "")
		}
	}
	_, err = fmt.Fprintf(log, "Query:\n%s\n\nResponse:\n%s\n", agent.Printable(text), agent.Printable(b.clean(a.Answer)))
	if err == nil && a.Error != "" {
		_, err = fmt.Fprintf(log, "Error: %s\n", agent.Printable(b.clean(a.Error)))
	}
	return a, err
}

// model is the model for a problem. An error that all other problems would meet as well stops the benchmark.
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

// Complete asks the model, and stops the benchmark where nobody lets it in or answers at all.
func (w *watched) Complete(ctx context.Context, req llm.Request) (*llm.Response, error) {
	resp, err := w.Model.Complete(ctx, req)
	if e, ok := errors.AsType[*llm.Error](err); ok && ctx.Err() == nil && (e.Kind == llm.KindAuth || e.Kind == llm.KindNetwork) {
		w.stop(err)
	}
	return resp, err
}

// clean takes the keys out of what servers say, which may have said them back. Those that are shorter than eight bytes stand in other words.
func (b *bench) clean(text string) string {
	for _, s := range b.Run.Secrets {
		if len(s) >= 8 {
			text = strings.ReplaceAll(text, s, "[secret]")
		}
	}
	return text
}

func (b *bench) note(text string) {
	if b.OnNote != nil {
		b.tell.Lock()
		defer b.tell.Unlock()
		b.OnNote(text)
	}
}

// writeBelow writes a new file below root, with the directories above it.
func writeBelow(root *os.Root, name, text string) error {
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return root.WriteFile(name, []byte(text), 0o644)
}
