package codepolicy

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
)

//go:embed presets.yaml
var presetData []byte

// presets parses the built-in documents once, when the first document is read.
var presets = sync.OnceValue(func() map[string]*Policy {
	var docs map[string]yaml.Node
	if err := yaml.Unmarshal(presetData, &docs); err != nil {
		panic(fmt.Sprintf("parse the presets of code policies: %v", err)) // the data is ours: TestPresets
	}
	all := make(map[string]*Policy)
	for name, doc := range docs {
		if strings.HasPrefix(name, "_") {
			continue // parts that several share
		}
		p := &parser{}
		var sets []module
		var patterns []pattern
		fields := p.rules(&p.policy.refuse)
		fields["sets"] = func(n *yaml.Node) {
			p.list(n, "sets", func(set string) error {
				part := docs["_"+set]
				sub := &parser{}
				sub.Mapping(&part, "set", sub.rules(new(api.CodeSeverity)))
				sets = append(sets, sub.policy.modules...)
				patterns = append(patterns, sub.policy.patterns...)
				p.policy.program += sub.policy.program
				p.Errs = append(p.Errs, sub.Errs...)
				return nil
			})
		}
		p.Mapping(&doc, "preset", fields)
		if len(p.Errs) > 0 {
			panic(fmt.Sprintf("parse the preset %s: %v", name, p.Errs[0]))
		}
		p.policy.modules = append(sets, p.policy.modules...)
		p.policy.patterns = append(patterns, p.policy.patterns...)
		all[name] = &p.policy
	}
	return all
})

// Presets returns the names of the built-in policies, sorted.
func Presets() []string { return slices.Sorted(maps.Keys(presets())) }

func noPreset(name string) error {
	return fmt.Errorf("no preset %q; there are %s", name, strings.Join(Presets(), ", "))
}

// Named returns a document that consists of the presets in a list with commas between them, such as
// "educational,web_scraping".
func Named(list string) ([]byte, error) {
	names := strings.Split(list, ",")
	for _, name := range names {
		if presets()[name] == nil {
			return nil, noPreset(name)
		}
	}
	return fmt.Appendf(nil, "version: %d\npresets: [%s]\n", Version, strings.Join(names, ", ")), nil
}
