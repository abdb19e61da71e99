package policy

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/internal/document"
)

//go:embed presets.yaml
var presetData []byte

// presets parses the built-in rule sets once, when the first document is read.
var presets = sync.OnceValue(func() map[string]*Policy {
	var lists map[string]yaml.Node
	if err := yaml.Unmarshal(presetData, &lists); err != nil {
		panic(fmt.Sprintf("parse the presets: %v", err)) // the data is ours: TestPresets
	}
	all := make(map[string]*Policy)
	for name, list := range lists {
		p := &parser{}
		for i, n := range list.Content {
			p.rule(n, i)
		}
		if len(p.Errs) > 0 {
			panic(fmt.Sprintf("parse the preset %s: %v", name, p.Errs[0]))
		}
		for i := range p.rules {
			p.rules[i].name = fmt.Sprintf("%s[%d]", name, i)
			p.rules[i].at = document.Position{}
		}
		all[name] = &Policy{rules: p.rules}
	}
	return all
})

// Presets returns the names of the built-in rule sets, sorted.
func Presets() []string { return slices.Sorted(maps.Keys(presets())) }

// Public returns the policy of the mode full, which is also a preset: every name and every address
// that is public, on every port of TCP. Special-purpose addresses are refused as ever.
func Public() *Policy { return presets()["public"] }

// Named returns a document that consists of the built-in rule sets in a list with commas between
// them, such as "pypi,github-read".
func Named(list string) ([]byte, error) {
	names := strings.Split(list, ",")
	for i, name := range names {
		switch {
		case !slices.Contains(Presets(), name):
			return nil, noPreset(name)
		case slices.Contains(names[:i], name):
			return nil, fmt.Errorf("the preset %s is named twice", name)
		}
	}
	return fmt.Appendf(nil, "version: %d\npresets: [%s]\n", Version, strings.Join(names, ", ")), nil
}

func noPreset(name string) error {
	return fmt.Errorf("no preset %q; there are %s", name, strings.Join(Presets(), ", "))
}

// Preset returns the policy that consists of one built-in rule set.
func Preset(name string) (*Policy, error) {
	p, ok := presets()[name]
	if !ok {
		return nil, noPreset(name)
	}
	return p, nil
}
