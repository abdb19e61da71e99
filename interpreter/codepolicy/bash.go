package codepolicy

import (
	"path"
	"slices"
	"strings"
)

const (
	maxScripts = 4   // levels of scripts in the arguments of shells
	maxHeredoc = 64  // here-documents that begin in one line
	maxNested  = 256 // substitutions within one another
)

// shell reads the names of programs in a script. It has no grammar: a word where a command may
// stand is one.
type shell struct {
	src   string
	at    int
	line  int
	words []string // of the command under way
	stack []level

	word    *strings.Builder
	started bool // word has begun; it may be empty
	dynamic bool // word has an expansion, so it is no known text
	quoted  bool // part of word was quoted
	redirect,
	begin bool // the next word is a command's
	loose bool // it may be one: behind sudo, xargs
	docs  []heredoc

	found   []Import
	scripts []script
	comment func(from, to int)
}

// level is a substitution, or a string in double quotes, with the command around it.
type level struct {
	until byte // ) ` or "
	state shellState
}

type shellState struct {
	words                          []string
	word                           *strings.Builder
	quoted, redirect, begin, loose bool
}

type heredoc struct {
	until  string
	tabs   bool
	quoted bool
}

type script struct {
	text  string
	line  int
	level int
}

// reserved words of the shell are followed by a command.
var reserved = []string{"if", "then", "elif", "else", "do", "while", "until", "!", "{", "}", "time", "coproc", "fi", "done", "esac"}

// launchers are programs that start the one that their arguments name.
var launchers = []string{
	"sudo", "doas", "env", "exec", "command", "builtin", "nohup", "xargs", "nice", "timeout", "stdbuf", "setsid", "busybox", "watch", "chroot", "unshare", "ionice", "strace",
}

// shells run a script that is one of their arguments.
var shells = []string{"sh", "bash", "dash", "zsh", "ksh", "eval", "trap"}

// commands returns the programs that a script visibly starts, and the files that it sources.
func commands(src string, line int) []Import {
	var found []Import
	todo := []script{{src, line, 0}}
	for len(todo) > 0 && len(found) < maxImports {
		next := todo[0]
		todo = todo[1:]
		s := &shell{src: next.text, line: next.line, word: new(strings.Builder)}
		s.read()
		found = append(found, s.found...)
		if next.level < maxScripts {
			for _, more := range s.scripts {
				more.level = next.level + 1
				todo = append(todo, more)
			}
		}
	}
	return found
}

func bashWithoutComments(src string) string {
	out := []byte(src)
	s := &shell{src: src, line: 1, word: new(strings.Builder), comment: func(from, to int) {
		for i := from; i < to; i++ {
			out[i] = ' '
		}
	}}
	s.read()
	return string(out)
}

func (s *shell) read() {
	s.begin = true
	for s.at < len(s.src) {
		s.step()
	}
	s.endWord()
	s.endCommand()
	for len(s.stack) > 0 {
		s.pop()
		s.endWord()
		s.endCommand()
	}
}

// inQuotes reports whether the text is that of a string in double quotes.
func (s *shell) inQuotes() bool { return len(s.stack) > 0 && s.stack[len(s.stack)-1].until == '"' }

func (s *shell) step() {
	c := s.src[s.at]
	rest := s.src[s.at:]
	if c == '\\' {
		if len(rest) > 1 && rest[1] == '\n' {
			s.line++
		} else if len(rest) > 1 {
			s.put(rest[1:2])
			s.quoted = true
		}
		s.at += min(2, len(rest))
		return
	}
	switch {
	case strings.HasPrefix(rest, "$("), strings.HasPrefix(rest, "<(") && !s.inQuotes(), strings.HasPrefix(rest, ">(") && !s.inQuotes():
		s.push(')')
		s.at += 2
		return
	case c == '`':
		s.at++
		if at := slices.IndexFunc(s.stack, func(l level) bool { return l.until == '`' }); at >= 0 {
			s.closeTo(at)
		} else {
			s.push('`')
		}
		return
	case c == '"':
		s.at++
		if s.inQuotes() {
			s.unquote()
		} else {
			s.quote()
		}
		return
	case c == '$' && len(rest) > 1 && (isLetter(rune(rest[1])) || rest[1] == '{' || strings.IndexByte("@*#?!0123456789", rest[1]) >= 0):
		s.put("")
		s.dynamic = true
		s.at++
		if rest[1] == '{' { // ${name...}: its text is skipped to the end of the name
			s.at++
			for s.at < len(s.src) && (isLetter(rune(s.src[s.at])) || s.src[s.at] >= '0' && s.src[s.at] <= '9') {
				s.at++
			}
		}
		return
	case s.inQuotes():
		if c == '\n' {
			s.line++
		}
		s.put(rest[:1])
		s.at++
		return
	}
	s.bare(c, rest)
}

// bare reads a character outside of quotes.
func (s *shell) bare(c byte, rest string) {
	switch c {
	case '\'':
		s.put("")
		s.quoted = true
		s.at++
		to := strings.IndexByte(s.src[s.at:], '\'')
		if to < 0 {
			to = len(s.src) - s.at
		}
		inner := s.src[s.at : s.at+to]
		s.put(inner)
		s.line += strings.Count(inner, "\n")
		s.at = min(len(s.src), s.at+to+1)
	case ' ', '\t', '\r':
		s.endWord()
		s.at++
	case '#':
		if s.started {
			s.put("#")
			s.at++
			return
		}
		to := strings.IndexByte(rest, '\n')
		if to < 0 {
			to = len(rest)
		}
		if s.comment != nil {
			s.comment(s.at, s.at+to)
		}
		s.at += to
	case '\n':
		s.endWord()
		s.endCommand()
		s.line++
		s.at++
		s.skipDocs()
	case ';', '&', '|', '(':
		if c == '&' && s.redirect { // 2>&1
			s.at++
			return
		}
		s.endWord()
		s.endCommand()
		if c == '(' {
			s.push(')')
		}
		s.at++
	case ')':
		s.at++
		if len(s.stack) > 0 && s.stack[len(s.stack)-1].until == ')' {
			s.closeTo(len(s.stack) - 1)
		} else { // of a case
			s.endWord()
			s.endCommand()
		}
	case '<', '>':
		if strings.HasPrefix(rest, "<<<") {
			s.endWord()
			s.at += 3
			s.redirect = true
			return
		}
		if strings.HasPrefix(rest, "<<") {
			s.heredoc(rest)
			return
		}
		if isNumber(s.word.String()) { // 2>
			s.word.Reset()
			s.started = false
		}
		s.endWord()
		s.redirect = true
		s.at++
	default:
		s.put(rest[:1])
		s.at++
	}
}

func isNumber(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

func (s *shell) put(text string) {
	s.started = true
	s.word.WriteString(text)
}

// push begins a substitution, in which commands stand.
func (s *shell) push(until byte) {
	s.put("")
	s.dynamic = true
	if len(s.stack) >= maxNested {
		return
	}
	s.stack = append(s.stack, level{until, shellState{s.words, s.word, s.quoted, s.redirect, s.begin, s.loose}})
	s.words, s.started, s.quoted, s.dynamic, s.redirect, s.begin, s.loose = nil, false, false, false, false, true, false
	s.word = new(strings.Builder)
}

func (s *shell) quote() {
	if len(s.stack) >= maxNested {
		s.put("")
		return
	}
	s.put("")
	s.quoted = true
	s.stack = append(s.stack, level{until: '"'})
}

func (s *shell) unquote() { s.stack = s.stack[:len(s.stack)-1] }

// pop ends the innermost level; its last word and command have ended.
func (s *shell) pop() {
	last := s.stack[len(s.stack)-1]
	s.stack = s.stack[:len(s.stack)-1]
	if last.until == '"' {
		return
	}
	st := last.state
	s.words, s.word, s.quoted, s.redirect, s.begin, s.loose = st.words, st.word, st.quoted, st.redirect, st.begin, st.loose
	s.started, s.dynamic = true, true
}

// closeTo ends a substitution, and all that are still open within it.
func (s *shell) closeTo(at int) {
	for len(s.stack) > at {
		if s.stack[len(s.stack)-1].until != '"' {
			s.endWord()
			s.endCommand()
		}
		s.pop()
	}
}

func (s *shell) endWord() {
	if !s.started {
		return
	}
	text, dynamic, quoted := s.word.String(), s.dynamic, s.quoted
	s.word.Reset()
	s.started, s.dynamic, s.quoted = false, false, false
	if s.redirect {
		s.redirect = false
		return
	}
	if !s.begin {
		s.words = append(s.words, text)
		if slices.Contains([]string{"-exec", "-execdir", "-ok"}, text) {
			s.begin, s.loose = true, true // of find
		}
		return
	}
	name, _, assigns := strings.Cut(text, "=")
	switch {
	case assigns && !strings.HasPrefix(text, "=") && strings.Trim(name, "+[]") != "" && !strings.ContainsAny(name, "/ -"):
		return
	case !quoted && !dynamic && slices.Contains(reserved, text):
		return
	case s.loose && (strings.HasPrefix(text, "-") || isNumber(strings.TrimRight(text, "smhd.0123456789")+"0") && text != "" && text[0] >= '0' && text[0] <= '9'):
		return
	case dynamic && text == "":
		s.begin = s.loose
		return
	}
	base := path.Base(text)
	if !dynamic || !strings.HasSuffix(text, "/") {
		s.add(base)
	}
	s.loose = slices.Contains(launchers, base)
	s.begin = s.loose
	s.words = append(s.words, base)
}

func (s *shell) add(name string) {
	if name != "" && name != "." && name != "/" && len(name) <= maxName && len(s.found) < maxImports {
		s.found = append(s.found, Import{Name: name, Line: s.line, Language: "bash"})
	}
}

func (s *shell) endCommand() {
	words := s.words
	s.words, s.begin, s.loose, s.redirect = nil, true, false, false
	if len(words) == 0 {
		return
	}
	at := slices.IndexFunc(words, func(w string) bool { return slices.Contains(shells, w) })
	if at >= 0 {
		for _, arg := range words[at+1:] {
			if len(s.scripts) < maxImports && strings.ContainsAny(arg, " \t\n;|&$(`") || words[at] == "eval" {
				s.scripts = append(s.scripts, script{text: arg, line: s.line})
			}
		}
	}
	if (words[0] == "source" || words[0] == ".") && len(words) > 1 {
		s.add(words[1])
	}
}

// heredoc reads the delimiter of a here-document.
func (s *shell) heredoc(rest string) {
	s.endWord()
	doc := heredoc{}
	n := 2
	if strings.HasPrefix(rest[n:], "-") {
		doc.tabs = true
		n++
	}
	for n < len(rest) && (rest[n] == ' ' || rest[n] == '\t') {
		n++
	}
	from := n
	for n < len(rest) && strings.IndexByte(" \t\n;|&<>()", rest[n]) < 0 {
		n++
	}
	doc.until = strings.NewReplacer(`'`, "", `"`, "", `\`, "").Replace(rest[from:n])
	doc.quoted = doc.until != rest[from:n]
	if len(s.docs) < maxHeredoc && doc.until != "" {
		s.docs = append(s.docs, doc)
	}
	s.at += n
}

// skipDocs passes over the here-documents that began in the line before. Substitutions in them are
// read, and text for a shell is not told from other text.
func (s *shell) skipDocs() {
	docs := s.docs
	s.docs = nil
	for _, doc := range docs {
		for s.at < len(s.src) {
			line, _, found := strings.Cut(s.src[s.at:], "\n")
			s.at += len(line)
			if found {
				s.at++
			}
			text := line
			if doc.tabs {
				text = strings.TrimLeft(line, "\t")
			}
			if text == doc.until {
				s.line++
				break
			}
			if !doc.quoted {
				s.substitutions(line)
			}
			s.line++
		}
	}
}

// substitutions keeps the commands in a line of a here-document to be read later.
func (s *shell) substitutions(line string) {
	for _, open := range []string{"$(", "`"} {
		if at := strings.Index(line, open); at >= 0 && len(s.scripts) < maxImports {
			s.scripts = append(s.scripts, script{text: `: "` + line[at:], line: s.line})
		}
	}
}
