package bench

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// Method is a scoring method.
type Method string

// Scoring methods.
const (
	MethodExact   Method = "exact"   // equal except for case and surrounding space
	MethodNumeric Method = "numeric" // equal as numbers, or as formulas without spacing
	MethodLetter  Method = "letter"  // names the same choice
	MethodChoices Method = "choices" // F1 of two sets of choices, separated by commas
	MethodRegex   Method = "regex"
	MethodF1      Method = "f1"      // F1 of the words
	MethodRougeL  Method = "rouge_l" // F-measure of the longest common subsequence of words
	MethodCommand Method = "command" // a program of the task, in a sandbox
	MethodReward  Method = "reward"  // compute_score of the task's reward.py, in a sandbox
	MethodJudge   Method = "judge"   // a model
)

// Methods returns all methods.
func Methods() []Method {
	return []Method{MethodExact, MethodNumeric, MethodLetter, MethodChoices, MethodRegex, MethodF1, MethodRougeL, MethodCommand, MethodReward, MethodJudge}
}

// Scoring holds a task's scoring rules. In config.yaml it is a method's name, or a mapping with
// these keys.
type Scoring struct {
	Method Method `yaml:"method"`
	// CaseSensitive applies to exact.
	CaseSensitive bool `yaml:"case_sensitive"`
	// Tolerance is the allowed difference of a decimal for numeric; 0 means 1e-6. Relative is an
	// allowed difference relative to the expected number. Integers and fractions must be equal.
	Tolerance float64 `yaml:"tolerance"`
	Relative  float64 `yaml:"relative"`
	// Pattern applies to regex: its first group, or its whole match, is compared with the expected
	// answer as by exact. If empty, the expected answer is the pattern, to be found in the answer.
	Pattern string `yaml:"pattern"`
	// NoStemmer makes rouge_l compare words instead of their stems.
	NoStemmer bool `yaml:"no_stemmer"`

	// Command is a program with its arguments for command; see scoreSandbox. Files are the files of
	// the task's directory that it needs.
	Command []string `yaml:"command"`
	Files   []string `yaml:"files"`
	Image   string   `yaml:"image"` // image of its sandbox; "" means the image of the runs
	// Timeout is the time limit of a scoring program; 0 means 2 minutes.
	Timeout time.Duration `yaml:"timeout"`

	// Repeats is the number of questions to a judge; 0 means 4. Prompt replaces [judgePrompt].
	Repeats int    `yaml:"repeats"`
	Prompt  string `yaml:"prompt"`
}

// UnmarshalYAML decodes a name or a mapping. An unknown key is an error: the rule would be ignored.
func (s *Scoring) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.ScalarNode {
		s.Method = Method(node.Value)
		return nil
	}
	text, err := yaml.Marshal(node)
	if err != nil {
		return err
	}
	type plain Scoring
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode((*plain)(s)); err != nil {
		return fmt.Errorf("scoring: %w", err)
	}
	return nil
}

// check validates the rules before any model is called.
func (s *Scoring) check(t *Task) error {
	if !slices.Contains(Methods(), s.Method) {
		return fmt.Errorf("scoring: unknown method %q; known are %v", s.Method, Methods())
	}
	switch {
	case s.Method == MethodCommand && len(s.Command) == 0:
		return errors.New("scoring: method command wants a command, a list of words")
	case s.Method == MethodReward && t.scripts[rewardName] == nil:
		return fmt.Errorf("scoring: %s does not exist", rewardName)
	case !(s.Tolerance >= 0) || !(s.Relative >= 0) || s.Timeout < 0 || s.Repeats < 0 || s.Repeats > 100: // !(x >= 0) covers NaN
		return errors.New("scoring: a figure is out of range")
	}
	for _, name := range s.Files {
		switch first, _, _ := strings.Cut(name, "/"); first {
		case recordName, answerName, outputName, inputName:
			return fmt.Errorf("scoring: files: %s is the name of what a program that scores is given", first)
		}
	}
	if s.Pattern != "" {
		if _, err := regexp.Compile(s.Pattern); err != nil {
			return fmt.Errorf("scoring: pattern: %w", err)
		}
	}
	return nil
}

// Override replaces the task's own method.
func (t *Task) Override(m Method) error {
	t.Scoring.Method = m
	return t.Scoring.check(t)
}

// scoreText scores by the answer's text alone, for the methods that need neither a sandbox nor a
// model.
func (s *Scoring) scoreText(answer, truth string) (float64, error) {
	switch s.Method {
	case MethodExact:
		return bit(exact(answer, truth, s.CaseSensitive)), nil
	case MethodNumeric:
		return bit(numeric(answer, truth, s.Tolerance, s.Relative)), nil
	case MethodLetter:
		return bit(letter(answer, truth)), nil
	case MethodChoices:
		return choices(answer, truth), nil
	case MethodRegex:
		return s.regex(answer, truth)
	case MethodF1:
		return wordF1(answer, truth), nil
	case MethodRougeL:
		return rougeL(answer, truth, !s.NoStemmer)
	case MethodCommand, MethodReward, MethodJudge:
	}
	return 0, fmt.Errorf("method %s does not score by text alone", s.Method)
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// space reports whether Python's str.strip and \s treat r as white space.
func space(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

func trim(s string) string { return strings.TrimFunc(s, space) }

// exact compares two texts. Empty texts are never equal.
func exact(answer, truth string, cased bool) bool {
	answer, truth = trim(answer), trim(truth)
	if answer == "" || truth == "" {
		return false
	}
	if cased {
		return answer == truth
	}
	return strings.ToLower(answer) == strings.ToLower(truth) //nolint:staticcheck // SA6005: folding takes more for the same than lower case does, by which the original compares
}

// boxed returns the content of the last \boxed{...} with balanced braces.
func boxed(text string) (inner string, found bool) {
	const open = `\boxed{`
	start := strings.LastIndex(text, open)
	if start < 0 {
		return "", false
	}
	rest := text[start+len(open):]
	depth := 1
	for i := range len(rest) {
		switch rest[i] {
		case '{':
			depth++
		case '}':
			depth--
		}
		if depth == 0 {
			return trim(rest[:i]), true
		}
	}
	return "", false
}

// letterPatterns are the ways to name a choice, in the order of their trial. The character after
// the letter is checked separately: \b of package regexp knows ASCII only.
var letterPatterns = sync.OnceValue(func() []*regexp.Regexp {
	const ws = `[\s\p{Z}\x{85}\x0b\x1c-\x1f]`
	return []*regexp.Regexp{
		regexp.MustCompile(`(?i)"answer"` + ws + `*:` + ws + `*"([A-Z])"`),
		regexp.MustCompile(`(?i)answer` + ws + `*[:：]` + ws + `*([A-Z])`),
		regexp.MustCompile(`(?i)(?:answer|choice)` + ws + `+is` + ws + `+([A-Z])`),
	}
})

// letter compares the choice that an answer names with the expected one.
func letter(answer, truth string) bool {
	truth = strings.ToUpper(trim(truth))
	return truth != "" && (strings.ToUpper(trim(answer)) == truth || choice(answer) == truth)
}

// choice returns the letter that an answer names: by the words "answer" or "choice", in a box, or
// standing alone. Otherwise it is the first letter, or "" if there is none.
func choice(answer string) string {
	for i, p := range letterPatterns() {
		for at := 0; at < len(answer); {
			m := p.FindStringSubmatchIndex(answer[at:])
			if m == nil {
				break
			}
			if i == 0 || !wordAt(answer[at+m[3]:]) {
				return strings.ToUpper(answer[at+m[2] : at+m[3]])
			}
			at += m[0] + 1
		}
	}
	if inner, found := boxed(answer); found && inner != trim(answer) {
		if first := firstRune(inner); unicode.IsLetter(first) {
			return strings.ToUpper(string(first))
		}
	}
	var alone string
	before := rune(-1)
	upper := []rune(strings.ToUpper(answer))
	for i, r := range upper {
		if r >= 'A' && r <= 'Z' && !word(before) && (i+1 == len(upper) || !word(upper[i+1])) {
			alone = string(r)
		}
		before = r
	}
	if alone != "" {
		return alone
	}
	if first := firstRune(trim(answer)); unicode.IsLetter(first) {
		return strings.ToUpper(string(first))
	}
	return ""
}

func firstRune(s string) rune {
	for _, r := range s {
		return r
	}
	return -1
}

// word reports whether Python's \w matches r.
func word(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r) }

func wordAt(s string) bool { return word(firstRune(s)) }

// choices returns the F1 of two sets of choices.
func choices(answer, truth string) float64 {
	got, want := set(answer), set(truth)
	both := 0
	for c := range got {
		if want[c] {
			both++
		}
	}
	return f1(both, len(got), len(want))
}

func set(text string) map[string]bool {
	out := map[string]bool{}
	for c := range strings.SplitSeq(text, ",") {
		if c = strings.ToUpper(trim(c)); c != "" {
			out[c] = true
		}
	}
	return out
}

// f1 returns the F1 for the numbers of common, given and expected items.
func f1(both, got, want int) float64 {
	if both == 0 {
		return 0
	}
	precision, recall := float64(both)/float64(got), float64(both)/float64(want)
	return 2 * precision * recall / (precision + recall)
}

func (s *Scoring) regex(answer, truth string) (float64, error) {
	if s.Pattern == "" {
		p, err := regexp.Compile(truth)
		if err != nil {
			return 0, fmt.Errorf("the expected answer is no pattern: %w", err)
		}
		return bit(truth != "" && p.MatchString(answer)), nil
	}
	p, err := regexp.Compile(s.Pattern)
	if err != nil {
		return 0, fmt.Errorf("pattern: %w", err)
	}
	m := p.FindStringSubmatch(answer)
	if m == nil {
		return 0, nil
	}
	return bit(exact(m[min(1, len(m)-1)], truth, s.CaseSensitive)), nil
}

// wordF1 compares words as SQuAD does: without case, punctuation and articles, with multiplicity.
func wordF1(answer, truth string) float64 {
	got, want := words(answer), words(truth)
	if len(got) == 0 || len(want) == 0 {
		return bit(len(got) == len(want))
	}
	left := map[string]int{}
	for _, w := range want {
		left[w]++
	}
	both := 0
	for _, w := range got {
		if left[w] > 0 {
			left[w]--
			both++
		}
	}
	return f1(both, len(got), len(want))
}

func words(text string) []string {
	text = strings.Map(func(r rune) rune {
		if strings.ContainsRune("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", r) {
			return -1
		}
		return r
	}, strings.ToLower(text))
	return slices.DeleteFunc(strings.FieldsFunc(text, space), func(w string) bool { return w == "a" || w == "an" || w == "the" })
}

// valid reports an error unless score is from 0 to 1.
func valid(score float64) error {
	if !(score >= 0 && score <= 1) || math.IsInf(score, 0) {
		return fmt.Errorf("%v is no score from 0 to 1", score)
	}
	return nil
}
