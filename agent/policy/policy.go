package policy

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"go.yaml.in/yaml/v3"
)

// Action is a policy's decision.
type Action string

// Actions of a rule. The zero value is none of them and never lets a call through.
const (
	Allow Action = "allow"
	Deny  Action = "deny"
	Ask   Action = "ask"
)

func (a Action) valid() bool { return a == Allow || a == Deny || a == Ask }

// Verdict is the decision about one call. After an [Ask] it holds the answer, and By names the one
// that answered.
type Verdict struct {
	Action Action `json:"action"`
	Rule   string `json:"rule,omitempty"`   // rule that decided; empty for the policy's default
	Reason string `json:"reason,omitempty"` // sent to the model with a denial
	By     string `json:"by"`               // "policy", or the source of the answer
	Asked  bool   `json:"asked,omitempty"`  // the rule's action was Ask
	// Command is the shell line that runs in place of the model's, if the one that was asked changed
	// it.
	Command string `json:"command,omitempty"`
}

const (
	// evaluationCost bounds the work of one expression, in CEL's units: a model decides how long the
	// facts are.
	evaluationCost = 300_000
	// interruptEvery is the number of comprehension steps between checks of the context.
	interruptEvery = 100
	maxRules       = 1000
	maxPolicy      = 1 << 20
)

// Policy is a compiled set of rules. It is safe for concurrent use.
type Policy struct {
	source   string
	fallback Action // if no rule matches
	rules    []rule
}

type rule struct {
	name, reason string
	action       Action
	program      cel.Program
}

// document is the YAML form of a policy.
type document struct {
	// Presets are built-in rule sets, tried in this order after the rules of the file.
	Presets []string `yaml:"presets"`
	// Default decides if no rule matches. If empty, the first preset's default holds, else "allow".
	Default Action `yaml:"default"`
	Rules   []struct {
		Name   string `yaml:"name"`
		When   string `yaml:"when"`
		Action Action `yaml:"action"`
		Reason string `yaml:"reason"`
	} `yaml:"rules"`
}

//go:embed presets.yaml
var presetData []byte

// presets parses the built-in rule sets, once and on demand: most commands of the binary need none.
var presets = sync.OnceValues(func() (map[string]document, error) {
	var m map[string]document
	if err := decode(presetData, &m); err != nil {
		return nil, fmt.Errorf("parse the presets: %w", err)
	}
	return m, nil
})

// Presets returns the names of the built-in rule sets, sorted.
func Presets() []string {
	m, err := presets()
	if err != nil { // TestPresets fails first
		return nil
	}
	return slices.Sorted(maps.Keys(m))
}

// Preset returns the policy that consists of one built-in rule set.
func Preset(name string) (*Policy, error) {
	return Parse([]byte(fmt.Sprintf("presets: [%q]\n", name)))
}

func decode(data []byte, into any) error {
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	err := d.Decode(into)
	if errors.Is(err, io.EOF) {
		return errors.New("the document is empty")
	}
	return err
}

// Parse reads a policy file and compiles its rules. An unknown key is an error: a rule that is
// skipped would make a run look safer than it is.
func Parse(data []byte) (*Policy, error) {
	if len(data) > maxPolicy {
		return nil, fmt.Errorf("policy larger than %d bytes", maxPolicy)
	}
	var doc document
	if err := decode(data, &doc); err != nil {
		return nil, fmt.Errorf("parse the policy: %w", err)
	}
	env, err := environment()
	if err != nil {
		return nil, err
	}
	known, err := presets()
	if err != nil {
		return nil, err
	}
	p := &Policy{source: string(data), fallback: doc.Default}
	if err := p.add(env, doc, ""); err != nil {
		return nil, err
	}
	for _, name := range doc.Presets {
		preset, ok := known[name]
		if !ok {
			return nil, fmt.Errorf("preset %q: unknown; known are %s", name, strings.Join(Presets(), ", "))
		}
		if err := p.add(env, preset, name+"/"); err != nil {
			return nil, fmt.Errorf("preset %s: %w", name, err)
		}
		if p.fallback == "" {
			p.fallback = preset.Default
		}
	}
	if p.fallback == "" {
		p.fallback = Allow
	}
	if !p.fallback.valid() {
		return nil, fmt.Errorf("default %q: want allow, deny or ask", p.fallback)
	}
	if len(p.rules) > maxRules {
		return nil, fmt.Errorf("policy with more than %d rules", maxRules)
	}
	return p, nil
}

func (p *Policy) add(env *cel.Env, doc document, prefix string) error {
	for i, r := range doc.Rules {
		name := r.Name
		if name == "" {
			name = fmt.Sprintf("rule %d", i+1)
		}
		if !r.Action.valid() {
			return fmt.Errorf("%s: action %q: want allow, deny or ask", name, r.Action)
		}
		if strings.TrimSpace(r.When) == "" {
			return fmt.Errorf("%s: no condition; \"true\" always holds", name)
		}
		ast, issues := env.Compile(r.When)
		if err := issues.Err(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if ast.OutputType() != cel.BoolType {
			return fmt.Errorf("%s: the condition gives a %s, want true or false", name, ast.OutputType())
		}
		program, err := env.Program(ast, cel.CostLimit(evaluationCost), cel.InterruptCheckFrequency(interruptEvery))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		p.rules = append(p.rules, rule{name: prefix + name, reason: r.Reason, action: r.Action, program: program})
	}
	return nil
}

// environment declares the names that expressions may use: the variables of [Facts], CEL's standard
// functions, and under(path, dir). An environment is immutable, so all policies share one.
var environment = sync.OnceValues(func() (*cel.Env, error) {
	text, texts := cel.StringType, cel.ListType(cel.StringType)
	env, err := cel.NewEnv(
		cel.Variable("tool", text), cel.Variable("arguments", cel.MapType(text, cel.DynType)),
		cel.Variable("command", text), cel.Variable("words", texts), cel.Variable("programs", texts), cel.Variable("opaque", cel.BoolType),
		cel.Variable("evaluates", cel.BoolType),
		cel.Variable("paths", texts), cel.Variable("writes", texts), cel.Variable("hosts", texts),
		cel.Variable("working_dir", text), cel.Variable("input_dir", text), cel.Variable("output_dir", text),
		cel.Variable("turn", cel.IntType), cel.Variable("repeats", cel.IntType),
		cel.Variable("spent", cel.MapType(text, cel.DoubleType)), cel.Variable("budget", cel.MapType(text, cel.DoubleType)),
		cel.Variable("count", cel.MapType(text, cel.IntType)),
		cel.Function("under", cel.Overload("under_string_string", []*cel.Type{text, text}, cel.BoolType,
			cel.BinaryBinding(func(p, dir ref.Val) ref.Val {
				name, ok := p.(types.String)
				top, ok2 := dir.(types.String)
				return types.Bool(ok && ok2 && under(string(name), string(top)))
			}))),
	)
	if err != nil {
		return nil, fmt.Errorf("prepare the policy: %w", err)
	}
	return env, nil
})

// under reports whether a path is dir or below it, by name only.
func under(name, dir string) bool {
	name, dir = path.Clean(name), path.Clean(dir)
	return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
}

// Source returns the text that the policy was parsed from, for the record.
func (p *Policy) Source() string { return p.source }

// HasRules reports whether anything but the default decides.
func (p *Policy) HasRules() bool { return len(p.rules) > 0 }

// Decide returns the verdict of the first rule that matches. A rule that fails to evaluate denies,
// since its outcome is unknown.
func (p *Policy) Decide(ctx context.Context, f Facts) Verdict {
	vars := f.variables()
	for _, r := range p.rules {
		out, _, err := r.program.ContextEval(ctx, vars)
		if err != nil {
			return Verdict{Action: Deny, Rule: r.name, Reason: "the rule could not be evaluated: " + err.Error(), By: "policy"}
		}
		if out == types.True {
			return Verdict{Action: r.action, Rule: r.name, Reason: r.reason, By: "policy"}
		}
	}
	return Verdict{Action: p.fallback, By: "policy"}
}
