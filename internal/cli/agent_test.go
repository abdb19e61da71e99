package cli

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// A command line is sandboxd-agent's if it names agent, wherever flags stand, and so are its help
// and its completion.
func TestForAgent(t *testing.T) {
	for line, want := range map[string]bool{
		"agent":                           true,
		"agent run --query x":             true,
		"--socket /s agent list":          true,
		"agent --socket /s --help":        true,
		"help agent run":                  true,
		"__complete agent run --":         true,
		"__completeNoDesc agent r":        true,
		"__complete agent":                false,
		"help":                            false,
		"__complete":                      false,
		"":                                false,
		"run agent":                       false,
		"exec --socket agent sb1 -- true": false,
		"--socket agent ps":               false,
		"--nope agent":                    false,
	} {
		if got := forAgent(newRoot(deps{Deps: cmdline.Deps{}}), strings.Fields(line)); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
}

// A build without sandboxd-agent says which file is missing, and where it belongs.
func TestAgentIsMissing(t *testing.T) {
	got := cmdtest.Finish(t, cmdtest.Command(t, "/none", "agent", "list"))
	if got.Code != cmdline.CodeOurs || !strings.Contains(got.Stderr, "find sandboxd-agent") || !strings.Contains(got.Stderr, "belongs beside") {
		t.Errorf("exit %d, stderr %q", got.Code, got.Stderr)
	}
}
