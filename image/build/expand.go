package build

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/moby/buildkit/frontend/dockerfile/shell"
)

// Limits of variable expansion. A few lines that double each other, or name a long variable a
// thousand times, would be gigabytes.
const (
	maxGrowth  = 64 << 20 // bytes of a word during its expansion
	maxFilled  = 4 << 20  // bytes of expansions, of one instruction
	maxAll     = 16 << 20 // bytes of expansions, of all instructions
	maxPattern = 1 << 10  // bytes of a pattern, as in ${name#pattern}
	maxMatch   = 16 << 20 // bytes of patterns times bytes of their subjects, of all instructions
)

// filled counts the cost of expansions.
type filled struct{ instruction, all, match int }

// scope holds the variables that instructions see: those of the image, and arguments. The last
// setting wins, of either kind, as with BuildKit.
type scope struct {
	list  []string        // "name=value" in order, one string shared by all users
	at    map[string]int  // index in list
	args  []string        // names of arguments in order, including those that the image has overridden
	isArg map[string]bool // of the names in args: whether the last setting was an argument
	bytes int             // of arguments
}

func newScope() *scope { return &scope{at: make(map[string]int), isArg: make(map[string]bool)} }

func (s *scope) clone() *scope {
	return &scope{slices.Clone(s.list), maps.Clone(s.at), slices.Clone(s.args), maps.Clone(s.isArg), s.bytes}
}

// Get returns the value of a variable, and whether it is set.
func (s *scope) Get(key string) (string, bool) {
	i, ok := s.at[key]
	if !ok {
		return "", false
	}
	return s.list[i][len(key)+1:], true
}

func (s *scope) has(key string) bool {
	_, ok := s.at[key]
	return ok
}

// Keys returns all names.
func (s *scope) Keys() []string { return slices.Collect(maps.Keys(s.at)) }

// set sets a variable of an image: "name=value".
func (s *scope) set(key, pair string) {
	i, ok := s.at[key]
	if !ok {
		s.at[key] = len(s.list)
		s.list = append(s.list, pair)
		return
	}
	if s.isArg[key] {
		s.bytes -= len(s.list[i])
		s.isArg[key] = false
	}
	s.list[i] = pair
}

// setArg sets an argument.
func (s *scope) setArg(key, value string) error {
	old := 0
	if s.isArg[key] {
		old = len(s.list[s.at[key]])
	}
	n := s.bytes - old + len(key) + 1 + len(value)
	if len(value) > maxValue || strings.IndexByte(value, 0) >= 0 {
		return invalidf("ARG %s: a value has at most %d bytes, and no NUL", clip(key), maxValue)
	}
	_, known := s.isArg[key]
	if n > maxArgs || !known && len(s.args) >= maxVariables {
		return invalidf("ARG %s: there are at most %d arguments with %d bytes together", clip(key), maxVariables, maxArgs)
	}
	s.set(key, key+"="+value)
	if s.bytes, s.isArg[key] = n, true; !known {
		s.args = append(s.args, key)
	}
	return nil
}

// expand fills variables into a word.
func (p *Plan) expand(word string, env shell.EnvGetter) (string, error) {
	out, _, err := p.expandWith(shell.NewLex(p.file.escape), word, env)
	return out, err
}

// expandWith fills variables into a word and splits the result at its blanks.
func (p *Plan) expandWith(lex *shell.Lex, word string, env shell.EnvGetter) (string, []string, error) {
	if growth(word, env) > maxGrowth {
		return "", nil, invalidf("%q could grow without measure when its variables are filled in", clip(word))
	}
	work, err := matching(word, env)
	if err != nil {
		return "", nil, err
	}
	if p.filled.match += work; p.filled.match > maxMatch {
		return "", nil, invalidf("%q: the patterns of the file would be compared with too much", clip(word))
	}
	out, err := lex.ProcessWordWithMatches(word, env)
	if err != nil {
		return "", nil, &invalid{errors.New(clip(err.Error()))}
	}
	n := len(out.Result)
	if n > maxWord {
		return "", nil, invalidf("%q has %d bytes with its variables filled in, %d are allowed", clip(word), n, maxWord)
	}
	p.filled.instruction += n
	p.filled.all += n
	if p.filled.instruction > maxFilled || p.filled.all > maxAll {
		return "", nil, invalidf("%q: with variables filled in an instruction has at most %d bytes, and all of them %d", clip(word), maxFilled, maxAll)
	}
	return out.Result, out.Words, nil
}

// growth returns an upper bound for the length of an expansion. Every "$" puts in one of the
// variables that the word names. Each ${name//pattern/replacement} may put its replacement, itself
// perhaps an expansion, in place of every byte.
func growth(word string, env shell.EnvGetter) int {
	longest, n := 0, 0
	for rest := word; ; n++ {
		_, after, found := strings.Cut(rest, "$")
		if !found {
			break
		}
		rest = after
		v, _ := env.Get(named(strings.TrimPrefix(rest, "{")))
		longest = max(longest, len(v))
	}
	most := len(word) + n*longest
	if strings.Contains(word, "${") {
		for range strings.Count(word, "//") {
			if most *= longest + 1; most > maxGrowth {
				break
			}
		}
	}
	return most
}

// matching returns an upper bound for the cost of a word's patterns: each becomes a regular
// expression that is compared with a variable. A pattern without variables has its written length.
func matching(word string, env shell.EnvGetter) (int, error) {
	work := 0
	for rest := word; ; {
		_, after, found := strings.Cut(rest, "${")
		if !found {
			return work, nil
		}
		name := named(after)
		rest = after[len(name):]
		if rest == "" || strings.IndexByte("#%/", rest[0]) < 0 {
			continue
		}
		end := byte('}')
		if rest[0] == '/' {
			end = '/'
		}
		pattern := strings.TrimPrefix(rest[1:], rest[:1]) // ##, %%, //
		n := strings.IndexAny(pattern, "$'\"\\`"+string(end))
		if n < 0 || pattern[n] != end {
			n = growth(pattern, env)
		}
		if n > maxPattern {
			return 0, invalidf("%q: a pattern has at most %d bytes", clip(word), maxPattern)
		}
		value, _ := env.Get(name)
		work += (n + 1) * (len(value) + 1)
	}
}

// named returns the variable's name at the beginning of s, as the shell package reads it: digits,
// or one special character, or letters with digits.
func named(s string) string {
	for i, r := range s {
		switch {
		case i == 0 && strings.ContainsRune("@*#?-$!", r):
			return s[:utf8.RuneLen(r)]
		case unicode.IsDigit(r), i > 0 && !unicode.IsDigit(rune(s[0])) && (unicode.IsLetter(r) || r == '_'), i == 0 && (unicode.IsLetter(r) || r == '_'):
			continue
		}
		return s[:i]
	}
	return s
}
