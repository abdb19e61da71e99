package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Names that a scoring program finds in its working directory scoreDir.
const (
	scoreDir    = "/score"
	recordName  = "problem.json" // record of the problem
	answerName  = "answer.txt"   // the answer
	outputName  = "output"       // files that the model has left
	inputName   = "input"        // input of the problem
	questionOut = "question.txt"
)

const (
	scoreTime    = 2 * time.Minute
	cleanTime    = time.Minute
	maxQuestion  = 64 << 20
	scoreCapture = 64 << 10
)

// rewardDriver calls reward.py as LLM-in-Sandbox does.
const rewardDriver = `import json
from reward import compute_score
problem = json.load(open("problem.json", encoding="utf-8"))
answer = open("answer.txt", encoding="utf-8", errors="replace", newline="").read()
truth = problem.pop("ground_truth", "")
print("\nscore:", float(compute_score(answer, truth, **problem)))
`

// promptDriver calls vanilla_llm_prompt.py as LLM-in-Sandbox does.
const promptDriver = `import json
import vanilla_llm_prompt as module
problem = json.load(open("problem.json", encoding="utf-8"))
make = getattr(module, "create_prompt", lambda problem: problem["problem_statement"])
open("question.txt", "w", encoding="utf-8", newline="").write(make(problem))
`

// tried is an answer to score.
type tried struct {
	problem *Problem
	answer  string
	files   string // directory with the model's files; "" for none
}

// scoreSandbox runs the scoring program in a new sandbox. If the last line of its stdout is "score:
// " and a number from 0 to 1, that is the score. Otherwise exit status 0 scores 1, and exit status
// 1 scores 0. Any other end is an error.
func (b *bench) scoreSandbox(ctx context.Context, t tried) (float64, error) {
	s := b.Task.Scoring
	argv := s.Command
	if s.Method == MethodReward {
		argv = []string{"python3", "-c", rewardDriver}
	}
	var out, said tail
	var exit api.Exit
	err := b.inSandbox(ctx, t, argv, &out, &said, func(_ *agent.Sandbox, o *client.End) error {
		exit = o.Exit
		return nil
	})
	if err != nil {
		return 0, err
	}
	// stderr does not count: it is for people, and a warning may follow the score there.
	text := strings.TrimSpace(string(out.kept))
	last := strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:])
	given, says := strings.CutPrefix(last, "score:")
	switch {
	case exit.Timeout:
		return 0, errScore(fmt.Errorf("it took longer than %v", b.scoreTime()))
	case exit.Signal != "" || exit.OOM || exit.Code > 1 || s.Method == MethodReward && (exit.Code != 0 || !says):
		return 0, errScore(fmt.Errorf("it ended with %d %s: %s", exit.Code, exit.Signal, clip(strings.TrimSpace(text+"\n"+string(said.kept)))))
	case !says:
		return bit(exit.Code == 0), nil
	}
	score, err := strconv.ParseFloat(strings.TrimSpace(given), 64)
	if err == nil {
		err = valid(score)
	}
	if err != nil {
		return 0, errScore(err)
	}
	return score, nil
}

// scoreError is the failure of a scoring program, which concerns this problem only.
type scoreError struct{ err error }

func errScore(err error) error { return &scoreError{err} }

func (e *scoreError) Error() string { return "the program that scores: " + e.err.Error() }

func (e *scoreError) Unwrap() error { return e.err }

// checkScripts loads the task's Python files in a sandbox, so that a broken file is found before
// any model is called.
func (b *bench) checkScripts(ctx context.Context) error {
	for name, used := range map[string]bool{rewardName: b.Task.Scoring.Method == MethodReward, promptName: b.Mode == ModeLLM && b.Task.LLMPrompt == "" && b.Task.scripts[promptName] != nil} {
		if !used {
			continue
		}
		var out tail
		err := b.inSandbox(ctx, tried{problem: &Problem{Record: json.RawMessage("{}")}}, []string{"python3", "-c", "import " + strings.TrimSuffix(name, ".py")}, &out, &out, func(_ *agent.Sandbox, o *client.End) error {
			if o.Exit.Code != 0 {
				return fmt.Errorf("it exited %d: %s", o.Exit.Code, clip(string(out.kept)))
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("load %s in a sandbox (--score_image names one that has what it needs, --scoring a method that does without it): %w", name, err)
		}
	}
	return nil
}

// question returns the prompt of a problem in [ModeLLM].
func (b *bench) question(ctx context.Context, p *Problem) (text string, err error) {
	if b.Task.LLMPrompt != "" {
		var files strings.Builder
		for _, name := range slices.Sorted(maps.Keys(p.Files)) {
			fmt.Fprintf(&files, "<file name=%q>\n%s\n</file>\n", name, p.Files[name])
		}
		return strings.NewReplacer("{problem_statement}", p.Statement, "{input_files}", files.String()).Replace(b.Task.LLMPrompt), nil
	}
	if b.Task.scripts[promptName] == nil {
		return p.Statement, nil
	}
	var out tail
	err = b.inSandbox(ctx, tried{problem: p}, []string{"python3", "-c", promptDriver}, &out, &out, func(s *agent.Sandbox, o *client.End) error {
		if o.Exit.Code != 0 {
			return fmt.Errorf("%s exited %d: %s", promptName, o.Exit.Code, clip(string(out.kept)))
		}
		r, err := s.ReadFile(ctx, scoreDir+"/"+questionOut)
		if err != nil {
			return err
		}
		text, err = readText(r)
		return errors.Join(err, r.Close())
	})
	return text, err
}

func readText(r io.Reader) (string, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxQuestion+1))
	if err == nil && len(data) > maxQuestion {
		err = fmt.Errorf("the question has more than %d bytes", maxQuestion)
	}
	return string(data), err
}

func (b *bench) scoreTime() time.Duration {
	if b.Task.Scoring.Timeout > 0 {
		return b.Task.Scoring.Timeout
	}
	return scoreTime
}

// inSandbox runs a program of the task in its own sandbox, with the task's files, the record, the
// answer and the output. It passes the sandbox and the outcome to then.
func (b *bench) inSandbox(ctx context.Context, t tried, argv []string, stdout, stderr *tail, then func(*agent.Sandbox, *client.End) error) (err error) {
	image := b.Run.Image
	if b.Task.Scoring.Image != "" {
		image = b.Task.Scoring.Image
	}
	sandbox, err := b.Run.Create(ctx, api.CreateSandbox{
		Image: image, Limits: b.Run.Limits, Labels: b.scoreLabels(), Timeout: (b.scoreTime() + 2*cleanTime).Seconds(),
	})
	if err != nil {
		return fmt.Errorf("create a sandbox: %w", err)
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		err = errors.Join(err, sandbox.Delete(clean))
	}()
	if b.Task.Inputs != "" { // first, so that a problem's files replace the task's, as in its run
		if _, err := agent.SendDir(ctx, sandbox, b.Task.Inputs, scoreDir+"/"+inputName); err != nil {
			return err
		}
	}
	var files bytes.Buffer
	if err := b.packScore(&files, t); err != nil {
		return err
	}
	if err := sandbox.ArchiveIn(ctx, scoreDir, &files); err != nil {
		return fmt.Errorf("copy the task's files: %w", err)
	}
	if t.files != "" {
		if _, err := agent.SendDir(ctx, sandbox, t.files, scoreDir+"/"+outputName); err != nil {
			return err
		}
	}
	outcome, err := sandbox.Exec(ctx, api.ExecRequest{Argv: argv, Cwd: scoreDir, Timeout: b.scoreTime().Seconds()}, stdout, stderr)
	if err != nil {
		return fmt.Errorf("run %s: %w", argv[0], err)
	}
	return then(sandbox, outcome)
}

// scoreLabels returns the labels of the sandboxes in which this benchmark scores.
func (b *bench) scoreLabels() map[string]string {
	return map[string]string{"sandboxd.agent": "score", "sandboxd.agent.bench": b.l.begin.ID}
}

// packScore writes the texts for a program of the task as a tar.
func (b *bench) packScore(w io.Writer, t tried) error {
	files := maps.Clone(b.Task.scripts)
	files[recordName], files[answerName] = t.problem.Record, []byte(t.answer)
	for name, text := range t.problem.Files {
		files[inputName+"/"+name] = []byte(text)
	}
	tw := tar.NewWriter(w)
	for _, dir := range []string{inputName, outputName} {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(files[name]))}); err != nil {
			return err
		}
		if _, err := tw.Write(files[name]); err != nil {
			return err
		}
	}
	return tw.Close()
}

// tail is a writer that keeps the end.
type tail struct{ kept []byte }

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p[max(0, len(p)-scoreCapture):]...)
	if len(t.kept) > 2*scoreCapture {
		t.kept = append(t.kept[:0], t.kept[len(t.kept)-scoreCapture:]...)
	}
	return len(p), nil
}

// clip shortens a program's output to its end.
func clip(text string) string {
	const most = 2000
	if len(text) > most {
		text = "..." + text[len(text)-most:]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// inputDir writes a problem's input below dir, for a run to copy into its sandbox. It returns "" if
// there is none.
func (b *bench) inputDir(p *Problem, dir string) (string, error) {
	if len(p.Files) == 0 {
		return b.Task.Inputs, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if b.Task.Inputs != "" {
		if err := os.CopyFS(dir, os.DirFS(b.Task.Inputs)); err != nil {
			return "", err
		}
	} else if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // as readable as the task
		return "", err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	for name, text := range p.Files {
		if err = errors.Join(err, writeBelow(root, name, text)); err != nil {
			break
		}
	}
	return dir, errors.Join(err, root.Close())
}
