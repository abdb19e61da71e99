package policy

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.yaml.in/yaml/v3"
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
		if len(p.errs) > 0 {
			panic(fmt.Sprintf("parse the preset %s: %v", name, p.errs[0]))
		}
		for i := range p.rules {
			p.rules[i].name = fmt.Sprintf("%s[%d]", name, i)
			p.rules[i].at = Position{}
		}
		all[name] = &Policy{rules: p.rules}
	}
	return all
})

// Presets returns the names of the built-in rule sets, sorted.
func Presets() []string { return slices.Sorted(maps.Keys(presets())) }

// Preset returns the policy that consists of one built-in rule set.
func Preset(name string) (*Policy, error) {
	p, ok := presets()[name]
	if !ok {
		return nil, fmt.Errorf("no preset %q", name)
	}
	return p, nil
}
