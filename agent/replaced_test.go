package agent

import (
	"context"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/agent/policy"
)

// answers is an asker that gives the same answer to each question.
type answers struct{ policy.Answer }

func (answers) By() string { return "test" }

func (a answers) Ask(context.Context, policy.Question) (policy.Answer, error) { return a.Answer, nil }

// A command that a person has given in place of the model's is the one that runs, now and in a
// replay, and the model is told. What the policy denies stays denied.
func TestReplacedCommand(t *testing.T) {
	asks, err := policy.Parse([]byte(`
rules:
  - {name: no curl, when: '"curl" in programs', action: deny, reason: never}
  - {name: all, when: tool == "execute_bash", action: ask}
`))
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		command, says string
		ran           bool
	}{
		"runs":               {"echo mine > out/answer.txt; cat out/answer.txt", "Note: the command was changed before it ran. What ran is:\necho mine > out/answer.txt; cat out/answer.txt\n\nExit code: 0\n", true},
		"is denied":          {"curl http://x", "The policy of this run does not allow it (no curl); test was asked: never", false},
		"is no command":      {"\x00", "replaced by one that cannot run", false},
		"has the model's no": {" ", "replaced by one that cannot run", false},
	} {
		t.Run(name, func(t *testing.T) {
			opts, sandbox, _ := newRun(t, turn(llmtest.Bash("echo yours > out/answer.txt")), turn(llmtest.Submit()))
			opts.Policy, opts.Asker = asks, answers{policy.Answer{Allow: true, Command: tc.command}}
			res, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
			call := tr.Steps[0].ToolCalls[0]
			if !strings.Contains(call.Observation, tc.says) || call.NotRun == tc.ran || res.HasAnswer != tc.ran || tc.ran && res.Answer != "mine\n" {
				t.Errorf("answer %q, call %+v", res.Answer, call)
			}
			if !tc.ran {
				return
			}
			again, err := ReplayRun(t.Context(), res.Dir, opts)
			if err != nil || again.Calls != 1 || len(again.Differences) != 0 || len(again.Times) != 0 {
				t.Errorf("replay: %+v, %v", again, err)
			}
			var shown strings.Builder
			if err := PrintStep(&shown, tr.Steps[0]); err != nil || !strings.Contains(shown.String(), "! changed to: echo mine") {
				t.Errorf("shown: %v\n%s", err, shown.String())
			}
		})
	}
}
