package bench

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// Result is the outcome of one problem.
type Result struct {
	ID         string           `json:"id"`
	Domain     string           `json:"domain"`
	Score      float64          `json:"score"`
	Error      string           `json:"error,omitempty"`
	ExitReason agent.ExitReason `json:"exit_reason,omitempty"`
	Steps      int              `json:"steps"`
	Seconds    float64          `json:"seconds"`
	Attempts   int              `json:"attempts"`
	Usage      llm.Usage        `json:"usage"`
	Run        string           `json:"run,omitempty"` // directory of the run, relative to the benchmark's
}

func newResult(p *Problem, a *Answered, s *Scored) Result {
	r := Result{
		ID: p.ID, Domain: p.Domain, Score: s.Score, ExitReason: a.ExitReason, Steps: a.Steps, Seconds: a.Seconds, Attempts: a.Attempts, Usage: a.Usage, Run: a.Run,
	}
	r.Error = strings.Join(slices.DeleteFunc([]string{a.Error, s.Error}, func(e string) bool { return e == "" }), "; ")
	return r
}

// Summary aggregates the results of several problems.
type Summary struct {
	Domain string  `json:"domain,omitempty"`
	Total  int     `json:"total"`
	Mean   float64 `json:"mean_score"`
	// Low and High bound the 95 % confidence interval by Wilson's formula, which assumes independent
	// problems. It is accurate for scores of 0 and 1, and conservative for scores in between.
	Low    float64   `json:"ci95_low"`
	High   float64   `json:"ci95_high"`
	Errors int       `json:"num_errors"`
	Usage  llm.Usage `json:"usage"`
	Steps  int       `json:"steps"`
}

// Results is the content of results.json.
type Results struct {
	Config map[string]any `json:"config"`
	Task   string         `json:"task"`
	Summary

	Elapsed  float64   `json:"elapsed_time_seconds"`
	Problems int       `json:"problems"` // number of problems; exceeds Total if the benchmark is unfinished
	Judge    llm.Usage `json:"judge_usage,omitzero"`
	Domains  []Summary `json:"domains"`
	Results  []Result  `json:"results"`
	Dir      string    `json:"-"`
}

// interval returns Wilson's interval for the mean of n scores from 0 to 1.
func interval(mean float64, n int) (low, high float64) {
	if n == 0 {
		return 0, 1
	}
	const z = 1.959964
	size := float64(n)
	scale := 1 + z*z/size
	middle := (mean + z*z/(2*size)) / scale
	half := z / scale * math.Sqrt(mean*(1-mean)/size+z*z/(4*size*size))
	low, high = max(middle-half, 0), min(middle+half, 1)
	if mean == 0 { // rounding misses it
		low = 0
	}
	if mean == 1 {
		high = 1
	}
	return low, high
}

func summarize(domain string, results []Result) Summary {
	s := Summary{Domain: domain, Total: len(results)}
	for i := range results {
		r := &results[i]
		s.Mean += r.Score
		s.Steps += r.Steps
		s.Usage.Add(r.Usage)
		if r.Error != "" {
			s.Errors++
		}
	}
	if s.Total > 0 {
		s.Mean /= float64(s.Total)
	}
	s.Low, s.High = interval(s.Mean, s.Total)
	return s
}

// save writes results.json and trajectory.json for the problems scored so far.
func (b *bench) save(problems []Problem) (*Results, error) {
	res := &Results{Task: b.Task.Name, Problems: len(problems), Dir: b.dir, Domains: []Summary{}, Results: []Result{}}
	var done []*Problem
	for i := range problems {
		p := &problems[i]
		if a, s := b.l.of(p.Index); s != nil {
			done = append(done, p)
			res.Results = append(res.Results, newResult(p, a, s))
			res.Judge.Add(s.Judge)
		}
	}
	res.Summary = summarize("", res.Results)
	byDomain := map[string][]Result{}
	for _, r := range res.Results {
		byDomain[r.Domain] = append(byDomain[r.Domain], r)
	}
	for domain, list := range byDomain {
		res.Domains = append(res.Domains, summarize(domain, list))
	}
	slices.SortFunc(res.Domains, func(x, y Summary) int { return cmp.Compare(x.Domain, y.Domain) })
	res.Elapsed = b.l.elapsed().Seconds()
	text, err := json.Marshal(b.l.begin)
	if err == nil {
		err = json.Unmarshal(text, &res.Config)
	}
	if err != nil {
		return res, fmt.Errorf("results: %w", err)
	}
	return res, errors.Join(
		whole(filepath.Join(b.dir, "trajectory.json"), func(w *bufio.Writer) error { return b.trajectories(w, done) }),
		whole(filepath.Join(b.dir, "results.json"), func(w *bufio.Writer) error {
			enc := json.NewEncoder(w)
			enc.SetEscapeHTML(false) // the file is for people
			enc.SetIndent("", "  ")
			return enc.Encode(res)
		}))
}

// trajectories writes the trajectory.json of LLM-in-Sandbox: by problem ID, the turns, the answer
// and the score.
func (b *bench) trajectories(w *bufio.Writer, done []*Problem) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	for i, p := range done {
		a, s := b.l.of(p.Index)
		steps := []agent.Step{}
		if a.Run != "" {
			_, t, err := agent.LoadRun(filepath.Join(b.dir, a.Run))
			if err != nil {
				return err
			}
			steps = t.Steps
		}
		id, err := json.Marshal(p.ID)
		if err != nil {
			return err
		}
		before := ",\n"
		if i == 0 {
			before = "{\n"
		}
		if _, err := fmt.Fprintf(w, "%s%s: ", before, id); err != nil {
			return err
		}
		if err := enc.Encode(map[string]any{
			"problem_statement": p.Statement, "trajectory": steps, "reward": s.Score, "agent_answer": a.Answer, "ground_truth": p.Truth,
		}); err != nil {
			return err
		}
	}
	if len(done) == 0 {
		if _, err := w.WriteString("{"); err != nil {
			return err
		}
	}
	_, err := w.WriteString("}\n")
	return err
}

// whole writes a file as a whole or not at all: beside it first, then renamed.
func whole(name string, write func(*bufio.Writer) error) error {
	f, err := os.OpenFile(name+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644) //nolint:gosec // results are readable by others, as the umask allows
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	err = write(w)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, errors.Join(err, os.Remove(name+".new")))
	}
	return os.Rename(name+".new", name)
}
