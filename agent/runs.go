package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/policy"
)

// RunState is the phase of a run.
type RunState string

// States of a run.
const (
	RunRunning RunState = "running" // a process works on it
	RunStopped RunState = "stopped" // no process works on it, and its record has no end: a crash; it can be resumed
	RunEnded   RunState = "ended"
)

// Summary describes one run in a list.
type Summary struct {
	ID         string     `json:"id"`
	Dir        string     `json:"dir"`
	State      RunState   `json:"state"`
	ExitReason ExitReason `json:"exit_reason,omitempty"`
	ExitDetail string     `json:"exit_detail,omitempty"`
	SandboxID  string     `json:"sandbox_id,omitempty"`
	Turns      int        `json:"turns"`
	Calls      int        `json:"tool_calls"`
	Denied     int        `json:"denied"`
	Spent      Spent      `json:"spent"`
	// Unpriced counts the model calls that Spent.Cost omits because their price is unknown.
	Unpriced  int       `json:"unpriced_calls,omitempty"`
	Model     string    `json:"model"`
	Query     string    `json:"query"`
	StartedAt time.Time `json:"started_at"`
	// Error is the reason why the record is unreadable; then only ID and Dir are set.
	Error string `json:"error,omitempty"`
}

// LoadRun derives the state of the run in dir from its record, whether the run is over or not.
func LoadRun(dir string) (*Summary, *Trajectory, error) {
	events, running, err := ReadRecord(dir)
	if err != nil {
		return nil, nil, err
	}
	l, err := readLedger(events)
	if err != nil {
		return nil, nil, err
	}
	return l.summary(dir, running), l.trajectory(), nil
}

// summary returns the state of the run.
func (l *ledger) summary(dir string, running bool) *Summary {
	s := &Summary{
		ID: l.run.ID, Dir: dir, State: RunStopped, Turns: len(l.steps), Calls: l.total, Denied: l.denied, Spent: l.spent, Unpriced: l.usage.UnpricedCalls, Model: l.run.Model,
		Query: l.run.Query, StartedAt: l.started, SandboxID: l.sandbox.ID,
	}
	switch {
	case running:
		s.State = RunRunning
	case l.end != nil:
		s.State, s.ExitReason, s.ExitDetail = RunEnded, l.end.Reason, l.end.Detail
	}
	return s
}

// ListRuns returns the runs below an output directory, sorted by name, which is by time. A run with
// an unreadable record is listed with the reason.
func ListRuns(outputDir string) ([]Summary, error) {
	entries, err := os.ReadDir(outputDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the runs: %w", err)
	}
	var runs []Summary
	for _, e := range entries {
		dir := filepath.Join(outputDir, e.Name())
		if _, err := os.Lstat(filepath.Join(dir, RecordName)); err != nil || !e.IsDir() {
			continue
		}
		s, _, err := LoadRun(dir)
		if err != nil {
			s = &Summary{ID: e.Name(), Dir: dir, Error: err.Error()}
		}
		runs = append(runs, *s)
	}
	slices.SortFunc(runs, func(a, b Summary) int { return strings.Compare(a.Dir, b.Dir) })
	return runs, nil
}

// NoRunError is the error of [FindRun] for a run that is not there.
type NoRunError struct{ Ref, OutputDir string }

// Error names the places that were searched.
func (e *NoRunError) Error() string {
	return fmt.Sprintf("there is no run %q, neither as a directory nor in %s (sandboxd agent list shows them)", e.Ref, e.OutputDir)
}

// FindRun returns the directory of a run that is named by its path, or by its name below outputDir.
func FindRun(outputDir, ref string) (string, error) {
	for _, dir := range []string{ref, filepath.Join(outputDir, ref)} {
		if _, err := os.Stat(filepath.Join(dir, RecordName)); err == nil && ref != "" {
			return dir, nil
		}
	}
	return "", &NoRunError{ref, outputDir}
}

// RecordedModel returns the settings of the run in dir, and the number of turns that its model has
// given.
func RecordedModel(dir string) (was RunEvent, answered int, err error) {
	events, _, err := ReadRecord(dir)
	if err != nil {
		return RunEvent{}, 0, err
	}
	l, err := readLedger(events)
	if err != nil {
		return RunEvent{}, 0, err
	}
	answered = len(l.steps)
	if l.open != nil && l.open.response != nil {
		answered++
	}
	return l.run, answered, nil
}

var errNoPrice = errors.New("a budget of money needs the price of this model, which is unknown")

// parsePolicy parses the policy in a record.
func parsePolicy(source string) (*policy.Policy, error) {
	p, err := policy.Parse([]byte(source))
	if err != nil {
		return nil, fmt.Errorf("the policy on record: %w", err)
	}
	return p, nil
}
