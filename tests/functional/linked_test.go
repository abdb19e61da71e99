package functional

import (
	"debug/buildinfo"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Only sandboxd-agent links the modules that talk to models and parse their answers. The daemon
// stays small without them, and the launcher and the init hold power over sandboxes.
func TestModelSDKsAreInTheAgentOnly(t *testing.T) {
	testenv.SameForAll(t)
	sdks := []string{"github.com/openai/", "github.com/anthropics/", "github.com/tidwall/", "go.opentelemetry.io/"}
	for _, program := range []string{"sandboxd-agent", "sandboxd", "sandboxd-launcher", "sandboxd-init"} {
		info, err := buildinfo.ReadFile(harness.Program(t, program))
		if err != nil {
			t.Fatal(err)
		}
		linked := map[string]bool{}
		for _, module := range info.Deps {
			for _, sdk := range sdks {
				if strings.HasPrefix(module.Path, sdk) {
					linked[sdk] = true
				}
			}
		}
		switch {
		case program == "sandboxd-agent" && len(linked) != len(sdks):
			t.Errorf("%s links %v of %v: the test looks for the wrong names", program, linked, sdks)
		case program != "sandboxd-agent" && len(linked) > 0:
			t.Errorf("%s links %v", program, linked)
		}
	}
}
