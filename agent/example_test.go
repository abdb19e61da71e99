package agent

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/api"
)

var update = flag.Bool("update", false, "rewrite the recorded example from a run of it")

// The example for new users must work, with the recorded results. This test uses the fake sandbox,
// tests/functional a real one.
func TestQuickstartExample(t *testing.T) {
	example := filepath.Join("..", "examples", "quickstart")
	replay, err := llm.OpenReplay(filepath.Join(example, "trajectory.json"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	sandbox := &fakeSandbox{dir: dir}
	prompt, err := LoadPromptConfig("")
	if err != nil {
		t.Fatal(err)
	}
	here := func(p string) string { return filepath.Join(dir, p) }
	prompt.WorkingDir, prompt.InputDir, prompt.OutputDir = here(prompt.WorkingDir), here(prompt.InputDir), here(prompt.OutputDir)
	opts := Options{
		Query: replay.Recording().ProblemStatement, Model: replay, ModelName: "replay", Prompt: prompt,
		InputDir: filepath.Join(example, "input"), OutputDir: here("output"),
		Create: func(context.Context, api.CreateSandbox) (*Sandbox, error) { return sandbox.open(t), nil },
	}
	if *update {
		opts.Now = func() time.Time { return testTime } // reproducible figures
	}
	res, err := Run(t.Context(), opts)
	if err != nil || res.ExitReason != ExitSubmitted {
		t.Fatalf("%+v, %v", res, err)
	}
	tr := readTrajectory(t, res.Dir)
	for i, s := range tr.Steps {
		if strings.Contains(s.Observation, "Error") {
			t.Errorf("step %d: %s", i+1, s.Observation)
		}
	}
	if *update {
		tr.Metadata.ModelSource = "written by hand for this example; the observations are what its commands really printed"
		tr.Metadata.SandboxID = ""
		for i := range tr.Steps {
			s := &tr.Steps[i]
			s.Observation = strings.ReplaceAll(s.Observation, dir, "")
			for j := range s.ToolCalls {
				s.ToolCalls[j].Observation = strings.ReplaceAll(s.ToolCalls[j].Observation, dir, "")
			}
		}
		if err := tr.save(example); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(example, "answer.txt"), []byte(res.Answer), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(filepath.Join(example, "answer.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), res.Answer); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
}
