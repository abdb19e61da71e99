package codepolicy

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// grammar is the part of a language's lexis that tells words, strings and comments apart.
type grammar struct {
	line   string // begins a comment to the end of the line
	block  bool   // /* */ is a comment
	triple string // quotes that begin a string of many lines when they stand three times
	long   string // quotes of strings of many lines
	short  string // quotes of strings that end with their line
	python bool   // prefixes of strings, f-strings
	script bool   // JavaScript: templates, regular expressions
	ruby   bool   // =begin, and # as a comment only behind a space
	c      bool   // spliced lines, raw strings, digit separators
	r      bool   // raw strings
}

var grammars = map[string]*grammar{
	"python":     {line: "#", triple: `'"`, short: `'"`, python: true},
	"javascript": {line: "//", block: true, short: `'"`, script: true},
	"typescript": {line: "//", block: true, short: `'"`, script: true},
	"go":         {line: "//", block: true, short: `'"`, long: "`"},
	"java":       {line: "//", block: true, triple: `"`, short: `'"`},
	"c":          {line: "//", block: true, short: `'"`, c: true},
	"cpp":        {line: "//", block: true, short: `'"`, c: true},
	"ruby":       {line: "#", short: "'\"`", ruby: true},
	"r":          {line: "#", long: "'\"`", r: true},
}

// maxRegexp bounds the search for the end of a regular expression, which is made at every slash.
const maxRegexp = 1000

type kind int

const (
	end kind = iota
	word
	text // a string; its value has the escapes decoded
	mark // a character of punctuation
	newline
)

type token struct {
	kind  kind
	value string
	line  int
}

func (t token) is(k kind, value string) bool { return t.kind == k && t.value == value }

// nest is an expression within a string: of an f-string, or of a template.
type nest struct {
	quote string // that ends the string
	raw   bool
	depth int // of brackets that are open in the expression
}

// lexer splits source text into tokens. It never fails: text that is no program of the language
// gives some tokens. Its memory is that of the nests.
type lexer struct {
	g     *grammar
	src   string
	at    int
	line  int
	nests []nest
	prev  token // tells a regular expression from a division
	held  *token
	// cooked means that a raw string without an end was seen: further ones are not looked for, as each
	// would be to the end of the text.
	cooked bool
	// comment is called with each comment's place; nil: they are skipped.
	comment func(from, to int)
}

func newLexer(g *grammar, src string) *lexer { return &lexer{g: g, src: src, line: 1} }

// withoutComments returns the text with spaces in place of comments. Lines stay.
func withoutComments(language, src string) string {
	g := grammars[language]
	if g == nil {
		return bashWithoutComments(src)
	}
	var out []byte
	l := newLexer(g, src)
	l.comment = func(from, to int) {
		if out == nil {
			out = []byte(src)
		}
		for i := from; i < to; i++ {
			if out[i] != '\n' {
				out[i] = ' '
			}
		}
	}
	for l.next().kind != end {
	}
	if out == nil {
		return src
	}
	return string(out)
}

// back makes next return a token again.
func (l *lexer) back(t token) { l.held = &t }

func (l *lexer) next() token {
	if l.held != nil {
		t := *l.held
		l.held = nil
		return t
	}
	t := l.scan()
	if t.kind != newline {
		l.prev = t
	}
	return t
}

func (l *lexer) rest() string { return l.src[l.at:] }

// skip moves on by n bytes and counts lines.
func (l *lexer) skip(n int) {
	l.line += strings.Count(l.src[l.at:l.at+n], "\n")
	l.at += n
}

func (l *lexer) scan() token {
	for l.at < len(l.src) {
		rest := l.rest()
		c := rest[0]
		switch {
		case c == '\n':
			t := token{newline, "\n", l.line}
			l.skip(1)
			return t
		case c == '\\' && strings.HasPrefix(strings.TrimPrefix(rest[1:], "\r"), "\n"):
			l.skip(strings.IndexByte(rest, '\n') + 1) // a spliced line
			continue
		case c <= ' ':
			l.at++
			continue
		case l.isComment(rest):
			n := l.commentLength(rest)
			if l.comment != nil {
				l.comment(l.at, l.at+n)
			}
			l.skip(n)
			continue
		}
		return l.visible(rest)
	}
	return token{kind: end, line: l.line}
}

func (l *lexer) isComment(rest string) bool {
	g := l.g
	switch {
	case g.block && strings.HasPrefix(rest, "/*"):
		return true
	case g.ruby && strings.HasPrefix(rest, "=begin") && (l.at == 0 || l.src[l.at-1] == '\n'):
		return true
	case !strings.HasPrefix(rest, g.line):
		return false
	case g.ruby: // else interpolation, or part of a word
		return l.at == 0 || l.src[l.at-1] <= ' ' && !strings.HasPrefix(rest, "#{")
	}
	return len(l.nests) == 0 || !g.python // in f"{x:#x}" it is none
}

func (l *lexer) commentLength(rest string) int {
	closing := "\n"
	switch {
	case strings.HasPrefix(rest, "/*"):
		closing = "*/"
	case strings.HasPrefix(rest, "=begin"):
		closing = "\n=end"
	}
	at := strings.Index(rest[1:], closing)
	switch {
	case at < 0:
		return len(rest)
	case closing == "\n":
		return at + 1
	case closing == "*/" && at == 0: // of "/*/"
		if at = strings.Index(rest[2:], closing); at < 0 {
			return len(rest)
		}
		return at + 2 + len(closing)
	}
	return at + 1 + len(closing)
}

// visible scans a token that begins here.
func (l *lexer) visible(rest string) token {
	line := l.line
	if quote, prefix, ok := l.opens(rest); ok {
		l.skip(len(prefix) + len(quote))
		raw := strings.ContainsAny(prefix, "rR")
		formatted := l.g.python && strings.ContainsAny(prefix, "fFtT") || quote == "`" && l.g.script
		return token{text, l.str(quote, raw, formatted), line}
	}
	if (l.g.c || l.g.r) && !l.cooked {
		if n, value := rawString(rest, l.g.c); n > 0 {
			l.skip(n)
			return token{text, value, line}
		} else if n < 0 {
			l.cooked = true
		}
	}
	c, size := utf8.DecodeRuneInString(rest)
	switch {
	case isLetter(c) || unicode.IsDigit(c) || l.g.script && c == '\\':
		n := l.wordLength(rest)
		l.skip(n)
		value := rest[:n]
		if l.g.script && strings.Contains(value, `\`) {
			value = unescape(value)
		}
		value = strings.ReplaceAll(value, "\\\n", "")
		return token{word, value, line}
	case l.g.script && c == '/' && l.regexpMayFollow():
		l.skip(regexpLength(rest))
		return token{text, "", line}
	}
	l.skip(size)
	return l.bracket(rest[:size], line)
}

// bracket returns a token of punctuation. One that ends the expression within a string ends with
// the string.
func (l *lexer) bracket(s string, line int) token {
	if len(l.nests) > 0 {
		n := &l.nests[len(l.nests)-1]
		switch s {
		case "(", "[", "{":
			n.depth++
		case ")", "]", "}":
			n.depth--
		}
		if n.depth < 0 {
			closed := *n
			l.nests = l.nests[:len(l.nests)-1]
			l.str(closed.quote, closed.raw, true)
			return token{mark, s, line}
		}
	}
	return token{mark, s, line}
}

// opens returns the quote of a string that begins here, and its prefix.
func (l *lexer) opens(rest string) (quote, prefix string, ok bool) {
	if l.g.python {
		n := 0
		for n < 2 && n < len(rest) && strings.IndexByte("rRbBuUfFtT", rest[n]) >= 0 {
			n++
		}
		if n < len(rest) && (rest[n] == '\'' || rest[n] == '"') {
			prefix, rest = rest[:n], rest[n:]
		}
	}
	c := rest[:1]
	switch {
	case strings.Contains(l.g.triple, c) && strings.HasPrefix(rest, c+c+c):
		return c + c + c, prefix, true
	case strings.Contains(l.g.short, c), strings.Contains(l.g.long, c), l.g.script && c == "`":
		return c, prefix, true
	}
	return "", "", false
}

// str scans to the end of a string, behind its quote, and returns its value. A formatted one ends
// at its first expression, and goes on when that has ended.
func (l *lexer) str(quote string, raw, formatted bool) string {
	short := len(quote) == 1 && strings.Contains(l.g.short, quote)
	from := l.at
	value := func() string {
		if raw {
			return l.src[from:l.at]
		}
		return unescape(l.src[from:l.at])
	}
	for l.at < len(l.src) {
		rest := l.rest()
		switch {
		case rest[0] == '\\' && quote != "`" || rest[0] == '\\' && l.g.script:
			l.skip(min(2, len(rest)))
			continue
		case strings.HasPrefix(rest, quote):
			out := value()
			l.skip(len(quote))
			return out
		case short && rest[0] == '\n':
			return value()
		case formatted && l.g.python && (strings.HasPrefix(rest, "{{") || strings.HasPrefix(rest, "}}")):
			l.at++
		case formatted && (l.g.python && rest[0] == '{' || l.g.script && strings.HasPrefix(rest, "${")):
			out := value()
			l.skip(strings.IndexByte(rest, '{') + 1)
			l.nests = append(l.nests, nest{quote, raw, 0})
			return out
		}
		l.skip(1)
	}
	return value()
}

// rawString returns the length and value of R"x(...)x" of C++ or r"---(...)---" of R: 0 if none
// begins here, and -1 if it has no end.
func rawString(rest string, c bool) (int, string) {
	n := 0
	switch {
	case c:
		for _, prefix := range []string{"R", "u8R", "LR", "uR", "UR"} {
			if strings.HasPrefix(rest, prefix+`"`) {
				n = len(prefix)
			}
		}
	case rest[0] == 'r' || rest[0] == 'R':
		n = 1
	}
	if n == 0 || n >= len(rest) || rest[n] != '"' && (c || rest[n] != '\'') {
		return 0, ""
	}
	quote := rest[n : n+1]
	open := strings.IndexAny(rest[n+1:min(len(rest), n+24)], "([{")
	if open < 0 || strings.ContainsAny(rest[n+1:n+1+open], " \n\t)\\\"'") {
		return 0, ""
	}
	fence, begin := rest[n+1:n+1+open], n+2+open
	closing := map[byte]string{'(': ")", '[': "]", '{': "}"}[rest[begin-1]] + fence + quote
	at := strings.Index(rest[begin:], closing)
	if at < 0 {
		return -1, ""
	}
	return begin + at + len(closing), rest[begin : begin+at]
}

func isLetter(c rune) bool {
	return unicode.IsLetter(c) || c == '_' || c == '$' || c > 127 && unicode.Is(unicode.M, c)
}

func (l *lexer) wordLength(rest string) int {
	number := rest[0] >= '0' && rest[0] <= '9'
	n := 0
	for n < len(rest) {
		c, size := utf8.DecodeRuneInString(rest[n:])
		switch {
		case isLetter(c) || unicode.IsDigit(c):
		case l.g.script && strings.HasPrefix(rest[n:], `\u{`):
			size = 1 + max(2, strings.IndexByte(rest[n:min(len(rest), n+12)], '}')) // \u{72}
		case l.g.script && strings.HasPrefix(rest[n:], `\u`):
		case l.g.c && strings.HasPrefix(rest[n:], "\\\n"):
			size = 2
		case l.g.c && number && c == '\'': // a digit separator
		default:
			return max(n, 1)
		}
		n += size
	}
	return n
}

// regexpMayFollow reports whether a slash begins a regular expression: behind the end of an operand
// it divides.
func (l *lexer) regexpMayFollow() bool {
	switch l.prev.kind {
	case word:
		switch l.prev.value {
		case "return", "typeof", "case", "in", "of", "do", "else", "void", "delete", "instanceof", "new", "throw", "yield", "await":
			return true
		}
		return false
	case text:
		return false
	case mark:
		return l.prev.value != ")" && l.prev.value != "]" && l.prev.value != "}"
	case end, newline:
	}
	return true
}

// regexpLength returns the length of a regular expression, or 1 if the line ends before it.
func regexpLength(rest string) int {
	class := false
	for i := 1; i < min(len(rest), maxRegexp); i++ {
		switch c := rest[i]; {
		case c == '\n':
			return 1
		case c == '\\':
			i++
		case c == '[':
			class = true
		case c == ']':
			class = false
		case c == '/' && !class:
			return i + 1
		}
	}
	return 1
}

// unescape decodes the escapes that languages share. Others stand for their character.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); {
		if s[i] != '\\' || i+1 == len(s) {
			out.WriteByte(s[i])
			i++
			continue
		}
		c, n := escape(s[i+1:])
		if c >= 0 {
			out.WriteRune(c)
		}
		i += 1 + n
	}
	return out.String()
}

// escape decodes an escape without its backslash, and returns its length. A negative character is
// none.
func escape(s string) (rune, int) {
	number := func(digits string, base, n int) (rune, int) {
		v, err := strconv.ParseUint(digits, base, 32)
		if err != nil || v > unicode.MaxRune {
			return rune(s[0]), 1
		}
		return rune(v), n
	}
	switch s[0] {
	case 'x', 'u', 'U':
		if strings.HasPrefix(s[1:], "{") {
			if to := strings.IndexByte(s[:min(len(s), 12)], '}'); to > 0 {
				return number(s[2:to], 16, to+1)
			}
		}
		if n := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[0]]; len(s) > n {
			return number(s[1:1+n], 16, 1+n)
		}
	case '0', '1', '2', '3', '4', '5', '6', '7':
		n := 1
		for n < 3 && n < len(s) && s[n] >= '0' && s[n] <= '7' {
			n++
		}
		return number(s[:n], 8, n)
	case '\n':
		return -1, 1
	case 'n':
		return '\n', 1
	case 't':
		return '\t', 1
	}
	return utf8.DecodeRuneInString(s)
}
