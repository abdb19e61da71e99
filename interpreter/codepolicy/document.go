package codepolicy

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/interpreter"
)

const (
	// Version is the version of documents that [Parse] reads.
	Version = 1

	// MaxDocument is the maximum size of a document in bytes.
	MaxDocument = 64 << 10

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

// Position is a place in a document. Both numbers count from 1.
type Position struct{ Line, Column int }

// Error is a mistake in a document.
type Error struct {
	Position
	Message string
}

func (e *Error) Error() string { return fmt.Sprintf("%d:%d: %s", e.Line, e.Column, e.Message) }

// Mistakes returns the mistakes in an error of [Parse] that have a place.
func Mistakes(err error) []*Error {
	if joined := (interface{ Unwrap() []error })(nil); errors.As(err, &joined) {
		var all []*Error
		for _, err := range joined.Unwrap() {
			all = append(all, Mistakes(err)...)
		}
		return all
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return []*Error{e}
	}
	return nil
}

// Parse reads a document in YAML, or in JSON, which is YAML. It returns every mistake in it, each
// an *[Error], joined. An unknown key is a mistake: a rule that is skipped would let code pass.
func Parse(data []byte) (*Policy, error) {
	if len(data) > MaxDocument {
		return nil, fmt.Errorf("parse the code policy: larger than %d bytes", MaxDocument)
	}
	root, err := document(data)
	if err != nil {
		return nil, fmt.Errorf("parse the code policy: %w", placed(err))
	}
	p := &parser{}
	p.top(root)
	if len(p.errs) > 0 {
		return nil, fmt.Errorf("parse the code policy: %w", errors.Join(p.errs...))
	}
	return &p.policy, nil
}

// document reads the one node of the one document in data.
func document(data []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) || err == nil && len(doc.Content) != 1 {
		return nil, errors.New("the document is empty")
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one document")
	}
	return doc.Content[0], nil
}

// placed returns an error of the YAML parser as an [Error]. The parser knows the line only, and of
// the first line not even that.
func placed(err error) error {
	message, ok := strings.CutPrefix(err.Error(), "yaml: ")
	if !ok {
		return err
	}
	at := Position{1, 1}
	if rest, ok := strings.CutPrefix(message, "line "); ok {
		line, after, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(line); err == nil {
			at.Line, message = n, after
		}
	}
	return &Error{at, message}
}

// A parser collects the rules and the mistakes of a document.
type parser struct {
	errs   []error
	policy Policy
	full   bool // the patterns are too large: further rules are not read
}

func (p *parser) fail(n *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, &Error{Position{n.Line, n.Column}, fmt.Sprintf(format, args...)})
}

// mapping calls the function of each key with its value.
func (p *parser) mapping(n *yaml.Node, what string, fields map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		p.fail(n, "%s is no mapping", what)
		return
	}
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, ok := fields[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || !ok:
			p.fail(key, "%s has no key %q", what, key.Value)
		case seen[key.Value]:
			p.fail(key, "key %q occurs twice", key.Value)
		default:
			seen[key.Value] = true
			read(value)
		}
	}
}

// list calls f with each scalar of a list, or with the one scalar that stands in its place.
func (p *parser) list(n *yaml.Node, what string, f func(string) error) {
	nodes := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		nodes = n.Content
	}
	switch {
	case len(nodes) == 0:
		p.fail(n, "%s: the list is empty", what)
	case len(nodes) > maxList:
		p.fail(n, "%s: more than %d entries", what, maxList)
		return
	}
	for _, e := range nodes {
		if e.Kind != yaml.ScalarNode || e.Tag == "!!null" {
			p.fail(e, "%s: no single value", what) // an alias is none either
		} else if err := f(e.Value); err != nil {
			p.fail(e, "%s: %v", what, err)
		}
	}
}

// scalar passes a single value to f.
func (p *parser) scalar(n *yaml.Node, what string, f func(string) error) {
	if n.Kind != yaml.ScalarNode {
		p.fail(n, "%s: no single value", what)
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
			p.fail(n, "version is not %d", Version)
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
	p.mapping(n, "policy", fields)
	if n.Kind == yaml.MappingNode && !version {
		p.fail(n, "the version is missing; write version: %d", Version)
	}
	p.policy.refuse = cmp.Or(refuse, strictest, api.SeverityLow)
	if rules := len(p.policy.patterns) + len(p.policy.modules); rules > maxRules {
		p.fail(n, "%d rules, of presets too, are more than %d", rules, maxRules)
	}
	if p.policy.program > maxProgram && !p.full { // with those of presets
		p.failSize(n)
	}
}

// failSize ends the reading of rules.
func (p *parser) failSize(n *yaml.Node) {
	p.full = true
	p.fail(n, "the patterns are too large together: more than %d instructions; write fewer, or smaller repetitions", maxProgram)
}

// rules returns the readers of the keys that documents and presets share.
func (p *parser) rules(refuse *api.CodeSeverity) map[string]func(*yaml.Node) {
	each := func(what string, f func(*yaml.Node)) func(*yaml.Node) {
		return func(n *yaml.Node) {
			if n.Kind != yaml.SequenceNode {
				p.fail(n, "%s is no list", what)
				return
			}
			if len(n.Content) > maxRules {
				p.fail(n, "%s: more than %d entries", what, maxRules)
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
	p.mapping(n, "rule", fields)
	if n.Kind == yaml.MappingNode && !given {
		p.fail(n, "the rule has no %s", key)
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
