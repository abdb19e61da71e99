package functional

import (
	"debug/buildinfo"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/tests/harness"
)

// The launcher and the init start with every sandbox and hold its power or its processes: what
// talks to models or parses their answers must not be linked into them.
func TestModelSDKsAreInTheCommandLineOnly(t *testing.T) {
	sdks := []string{"github.com/openai/", "github.com/anthropics/", "github.com/tidwall/", "go.opentelemetry.io/"}
	for _, program := range []string{"sandboxd", "sandboxd-launcher", "sandboxd-init"} {
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
		case program == "sandboxd" && len(linked) != len(sdks):
			t.Errorf("%s links %v of %v: the test looks for the wrong names", program, linked, sdks)
		case program != "sandboxd" && len(linked) > 0:
			t.Errorf("%s links %v", program, linked)
		}
	}
}
