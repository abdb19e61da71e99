package codepolicy

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/document"
	"github.com/sandboxd/sandboxd/interpreter"
)

const (
	// Version is the version of documents that [Parse] reads.
	Version = 1

	// maxDocument bounds a document in bytes.
	maxDocument = 64 << 10

	maxRules  = 500
	maxList   = 100 // modules or languages of one rule
	maxReason = 200 // bytes
	maxName   = 200 // bytes of a module
	// maxPattern bounds the bytes of a pattern: parsed, a class such as \pL takes 5 KiB.
	maxPattern = 4096
	// maxProgram bounds the instructions of all patterns. The cost of a check is their number times
	// the length of the code.
	maxProgram = 4096
)

// Policy is a checked document. It is safe for concurrent use. The zero Policy finds nothing.
type Policy struct {
	refuse   api.CodeSeverity
	patterns []pattern
	modules  []module
	program  int // bound of the instructions of the patterns
}

// scope is the part that both kinds of rules have.
type scope struct {
	languages []string // names; empty means every language
	severity  api.CodeSeverity
	reason    string
}

func (s *scope) covers(language string) bool {
	return len(s.languages) == 0 || slices.Contains(s.languages, language)
}

type pattern struct {
	scope

	text string
	re   *regexp.Regexp
	size int // bound of the instructions of its program
}

type module struct {
	scope

	names []string
}

// Parse reads a document in YAML, or in JSON, which is YAML. It returns every mistake in it, each
// a *[document.Error], joined. An unknown key is a mistake: a rule that is skipped would let code
// pass.
func Parse(data []byte) (*Policy, error) {
	if len(data) > maxDocument {
		return nil, fmt.Errorf("parse the code policy: larger than %d bytes", maxDocument)
	}
	root, err := document.Read(data)
	if err != nil {
		return nil, fmt.Errorf("parse the code policy: %w", err)
	}
	p := &parser{}
	p.top(root)
	if len(p.Errs) > 0 {
		return nil, fmt.Errorf("parse the code policy: %w", errors.Join(p.Errs...))
	}
	return &p.policy, nil
}

// A parser collects the rules and the mistakes of a document.
type parser struct {
	document.Reader

	policy Policy
	full   bool // the patterns are too large: further rules are not read
}

// list calls f with each scalar of a list, or with the one scalar that stands in its place.
func (p *parser) list(n *yaml.Node, what string, f func(string) error) {
	p.List(n, what, maxList, func(n *yaml.Node) error { return f(n.Value) })
}

// scalar passes a single value to f.
func (p *parser) scalar(n *yaml.Node, what string, f func(string) error) {
	if n.Kind != yaml.ScalarNode {
		p.Fail(n, "%s: no single value", what)
		return
	}
	p.list(n, what, f)
}

func (p *parser) top(n *yaml.Node) {
	version := false
	var refuse, strictest api.CodeSeverity
	fields := p.rules(&refuse)
	fields["version"] = func(n *yaml.Node) {
		version = true
		if n.Kind != yaml.ScalarNode || n.Value != strconv.Itoa(Version) {
			p.Fail(n, "version is not %d", Version)
		}
	}
	fields["presets"] = func(n *yaml.Node) {
		p.list(n, "presets", func(name string) error {
			preset := presets()[name]
			if preset == nil {
				return noPreset(name)
			}
			for _, r := range preset.patterns {
				known := func(s pattern) bool { return s.text == r.text && slices.Equal(s.languages, r.languages) }
				if !slices.ContainsFunc(p.policy.patterns, known) { // presets share many
					p.policy.patterns = append(p.policy.patterns, r)
					p.policy.program += r.size
				}
			}
			p.policy.modules = append(p.policy.modules, preset.modules...)
			if strictest == "" || preset.refuse.Rank() < strictest.Rank() {
				strictest = preset.refuse
			}
			return nil
		})
	}
	p.Mapping(n, "policy", fields)
	if n.Kind == yaml.MappingNode && !version {
		p.Fail(n, "the version is missing; write version: %d", Version)
	}
	p.policy.refuse = cmp.Or(refuse, strictest, api.SeverityLow)
	if rules := len(p.policy.patterns) + len(p.policy.modules); rules > maxRules {
		p.Fail(n, "%d rules, of presets too, are more than %d", rules, maxRules)
	}
	if p.policy.program > maxProgram && !p.full { // with those of presets
		p.failSize(n)
	}
}

// failSize ends the reading of rules.
func (p *parser) failSize(n *yaml.Node) {
	p.full = true
	p.Fail(n, "the patterns are too large together: more than %d instructions; write fewer, or smaller repetitions", maxProgram)
}

// rules returns the readers of the keys that documents and presets share.
func (p *parser) rules(refuse *api.CodeSeverity) map[string]func(*yaml.Node) {
	each := func(what string, f func(*yaml.Node)) func(*yaml.Node) {
		return func(n *yaml.Node) {
			if n.Kind != yaml.SequenceNode {
				p.Fail(n, "%s is no list", what)
				return
			}
			if len(n.Content) > maxRules {
				p.Fail(n, "%s: more than %d entries", what, maxRules)
				return
			}
			for _, e := range n.Content {
				if p.full {
					return
				}
				f(e)
			}
		}
	}
	return map[string]func(*yaml.Node){
		"refuse":   func(n *yaml.Node) { p.scalar(n, "refuse", severity(refuse)) },
		"patterns": each("patterns", p.pattern),
		"modules":  each("modules", p.module),
	}
}

func (p *parser) pattern(n *yaml.Node) {
	r := pattern{scope: scope{severity: api.SeverityMedium}}
	fields := p.scope(&r.scope)
	fields["pattern"] = func(n *yaml.Node) {
		p.scalar(n, "pattern", func(s string) (err error) {
			if r.size, err = measure(s); err != nil {
				return err
			}
			if p.policy.program += r.size; p.policy.program > maxProgram {
				p.failSize(n)
				return nil
			}
			r.text = s
			r.re, err = compile(s)
			return err
		})
	}
	if p.rule(n, fields, "pattern") {
		p.policy.patterns = append(p.policy.patterns, r)
	}
}

// measure returns a bound of the size of a pattern's program. It does not make the program: a few
// bytes of text can stand for a million instructions.
func measure(s string) (int, error) {
	if len(s) > maxPattern {
		return 0, fmt.Errorf("longer than %d bytes", maxPattern)
	}
	parsed, err := syntax.Parse(s, syntax.Perl&^syntax.OneLine)
	if e, ok := errors.AsType[*syntax.Error](err); ok {
		return 0, fmt.Errorf("%s: %q; the syntax is RE2's, which has no lookaround and no backreference", e.Code, e.Expr)
	}
	if err != nil {
		return 0, err
	}
	return 2 + instructions(parsed), nil
}

// instructions returns a bound of the instructions of an expression, at most maxProgram + 1. Large
// classes count more, as they take memory.
func instructions(re *syntax.Regexp) int {
	n := 0
	for _, sub := range re.Sub {
		n = min(n+instructions(sub), maxProgram+1)
	}
	switch op := re.Op; {
	case op == syntax.OpLiteral:
		n = len(re.Rune)
	case op == syntax.OpCharClass:
		n = 1 + len(re.Rune)/64
	case op == syntax.OpRepeat && re.Max < 0:
		n = n*max(re.Min, 1) + 2
	case op == syntax.OpRepeat:
		n = (n + 1) * re.Max
	case op == syntax.OpAlternate:
		n += len(re.Sub)
	case op != syntax.OpConcat: // empty expressions, captures, stars
		n += 2
	}
	return min(max(n, 1), maxProgram+1)
}

// compile returns a pattern. ^ and $ are those of lines.
func compile(s string) (*regexp.Regexp, error) {
	re, err := regexp.Compile("(?m)" + s)
	switch {
	case err != nil:
		return nil, err
	case re.MatchString(""):
		return nil, fmt.Errorf("%q matches every text", s)
	}
	return re, nil
}

func (p *parser) module(n *yaml.Node) {
	r := module{scope: scope{severity: api.SeverityMedium}}
	fields := p.scope(&r.scope)
	fields["module"] = func(n *yaml.Node) {
		p.list(n, "module", func(s string) error {
			if s == "" || len(s) > maxName || strings.ContainsFunc(s, func(c rune) bool { return unicode.IsSpace(c) || unicode.IsControl(c) }) {
				return fmt.Errorf("%q is no name", s)
			}
			r.names = append(r.names, s)
			return nil
		})
	}
	if p.rule(n, fields, "module") {
		p.policy.modules = append(p.policy.modules, r)
	}
}

// rule reads a rule that needs this key, and reports whether it has it.
func (p *parser) rule(n *yaml.Node, fields map[string]func(*yaml.Node), key string) bool {
	given := false
	read := fields[key]
	fields[key] = func(n *yaml.Node) {
		given = true
		read(n)
	}
	p.Mapping(n, "rule", fields)
	if n.Kind == yaml.MappingNode && !given {
		p.Fail(n, "the rule has no %s", key)
	}
	return given
}

func (p *parser) scope(s *scope) map[string]func(*yaml.Node) {
	return map[string]func(*yaml.Node){
		"languages": func(n *yaml.Node) {
			p.list(n, "languages", func(name string) error {
				lang := interpreter.Find(name)
				if lang == nil {
					return fmt.Errorf("%q is none of %s", name, strings.Join(interpreter.Names(), ", "))
				}
				s.languages = append(s.languages, lang.Name)
				return nil
			})
		},
		"severity": func(n *yaml.Node) { p.scalar(n, "severity", severity(&s.severity)) },
		"reason": func(n *yaml.Node) {
			p.scalar(n, "reason", func(text string) error {
				if text == "" || len(text) > maxReason || strings.ContainsFunc(text, unicode.IsControl) {
					return fmt.Errorf("no line of 1 to %d bytes", maxReason)
				}
				s.reason = text
				return nil
			})
		},
	}
}

func severity(to *api.CodeSeverity) func(string) error {
	return func(s string) error {
		*to = api.CodeSeverity(s)
		if to.Rank() == 0 {
			return fmt.Errorf("%q is none of low, medium, high, critical", s)
		}
		return nil
	}
}
