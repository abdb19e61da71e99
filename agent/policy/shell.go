package policy

import (
	"path"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// reader reads one command line, and the lines within it.
type reader struct {
	facts     *Facts
	variables variables
	// Names as written, and the directories that they may be relative to. A line may change its
	// directory with cd; which of its commands that affects is not tracked, so every combination
	// counts.
	paths, writes, dirs []string

	length int                        // of all lines read, in bytes
	depth  int                        // of number
	seen   map[*syntax.DblQuoted]bool // by quoted
}

func newReader(f *Facts) reader {
	return reader{facts: f, dirs: []string{path.Clean("/" + f.WorkingDir)}, variables: newVariables(), seen: map[*syntax.DblQuoted]bool{}}
}

const (
	// maxLine bounds the command lines that are parsed; longer ones are opaque.
	maxLine = 256 << 10
	// maxNested bounds lines within lines: bash -c "bash -c ...".
	maxNested = 8
	// maxDirs bounds the directories of a line; a line with more is opaque.
	maxDirs = 16
)

// resolve returns absolute, clean names; relative ones are taken from dir.
func resolve(dir string, names []string) []string {
	var out []string
	for _, name := range names {
		if !path.IsAbs(name) {
			name = path.Join(dir, name)
		}
		out = append(out, path.Clean(name))
	}
	return out
}

// evaluates records that the shell evaluates data.
func (r *reader) evaluates() { r.facts.Opaque, r.facts.Evaluates = true, true }

// script is one parsed line.
type script struct {
	text      string
	functions map[string]uint // certain functions, by the offset at which the definition ends
	tables    map[string]uint // certain associative arrays, by the offset of the declaration
}

// line reads a command line. A line for a shell other than bash is read in both dialects, since sh
// is dash on some images and bash on others; everything that either would run counts.
func (r *reader) line(line string, depth int, dialect syntax.LangVariant) {
	// A line for sh is read twice, so the work doubles with every level.
	if r.length += len(line); depth > maxNested || len(line) > maxLine || r.length > 2*maxLine {
		if depth == 0 || r.length <= 3*maxLine {
			r.addOpaque(strings.Fields(line))
		}
		r.evaluates()
		return
	}
	if dialect == syntax.LangPOSIX {
		r.lineOfSh(line, depth)
	}
	file, err := parse(line, syntax.LangBash)
	if err != nil || misread(file, line) { // bash may understand it all the same
		r.addOpaque(strings.Fields(line))
		r.evaluates()
	}
	if err != nil {
		return
	}
	r.walk(file, script{text: line, functions: functions(file), tables: tables(file)}, depth)
}

// lineOfSh reads a line as POSIX sh.
func (r *reader) lineOfSh(line string, depth int) {
	file, err := parse(line, syntax.LangPOSIX)
	if err != nil || misread(file, line) { // sh may understand it all the same, or run a part of it
		r.facts.Opaque = true
	}
	if err != nil {
		return
	}
	r.walk(file, script{text: line}, depth)
}

// SameInSh reports whether a POSIX shell runs the same programs for a line of bash, and writes the
// same files. A keyword of bash is a program to sh: [[ a || rm b ]] runs rm.
func SameInSh(line string) bool {
	bash, sh := Facts{}, Facts{}
	bash.Shell(line)
	r := newReader(&sh)
	if len(line) > maxLine {
		return false
	}
	r.lineOfSh(line, 0)
	r.settle()
	subset := func(some, all []string) bool {
		return !slices.ContainsFunc(some, func(s string) bool { return !slices.Contains(all, s) && !keywords[s] && s[0] != '-' })
	}
	return (bash.Opaque || !sh.Opaque) && (bash.Evaluates || !sh.Evaluates) && subset(sh.Programs, bash.Programs) && subset(sh.Writes, bash.Writes)
}

// keywords lists the words that bash does not run as programs. In sh they are builtins or unknown,
// and so is [[, which the reader never takes for a program.
var keywords = map[string]bool{
	"declare": true, "typeset": true, "local": true, "export": true, "readonly": true, "let": true, "time": true,
}

func parse(line string, dialect syntax.LangVariant) (*syntax.File, error) {
	return syntax.NewParser(syntax.Variant(dialect)).Parse(strings.NewReader(line), "")
}

func (r *reader) walk(file *syntax.File, s script, depth int) {
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.CallExpr:
			r.call(n, s, depth)
		case *syntax.Redirect:
			r.redirect(n, s)
			if n.Hdoc != nil {
				r.quoted(n.Hdoc)
			}
		case *syntax.Word:
			r.word(n)
		case *syntax.Assign:
			r.assignment(n, s)
		case *syntax.ForClause:
			if loop, ok := n.Loop.(*syntax.WordIter); ok {
				r.iterate(loop, n.Select)
			}
		case *syntax.DeclClause:
			r.declare(n)
		case *syntax.FuncDecl:
			if n.Name != nil {
				r.variables.unknown(command(n.Name.Value))
			}
		case *syntax.ParamExp:
			r.expansion(n, s)
		case *syntax.ArithmExp:
			r.arithmetic(n.X, s)
		case *syntax.ArithmCmd:
			r.arithmetic(n.X, s)
		case *syntax.CStyleLoop:
			r.arithmetic(n.Init, s)
			r.arithmetic(n.Cond, s)
			r.arithmetic(n.Post, s)
		case *syntax.LetClause:
			r.let(n, s)
		case *syntax.CoprocClause:
			r.facts.Opaque = true
		case *syntax.DblQuoted:
			if n.Dollar { // $"...": a translation, which is expanded in turn
				r.evaluates()
			}
			if !r.seen[n] {
				r.quoted(n)
			}
		case *syntax.BinaryTest:
			r.compare(n, s)
		case *syntax.UnaryTest:
			if n.Op == syntax.TsVarSet || n.Op == syntax.TsRefVar {
				if w, _ := n.X.(*syntax.Word); !isName(textOf(w)) {
					r.evaluates() // [[ -v a[...] ]]
				}
			}
		}
		return true
	})
}

// quoted inspects an expansion within double quotes or a here-document. There single quotes are
// characters like any other to the shell, but quotes to the parser: "${x:-'$(ls)'}" runs ls.
func (r *reader) quoted(n syntax.Node) {
	syntax.Walk(n, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.CmdSubst:
			return false
		case *syntax.DblQuoted:
			r.seen[n] = true
		case *syntax.SglQuoted:
			if n.Dollar || strings.ContainsAny(n.Value, "$`\"}\\") {
				r.evaluates()
			}
		}
		return true
	})
}

// functions returns the functions that a line certainly defines, with the offset at which each
// definition ends. A function of a subshell or behind a condition may not exist when its name is
// called, and neither does one that is called before its definition. A special builtin goes before
// a function of its name in sh, so such a function hides nothing.
//
// The parser takes f() { ls; } | cat for a function with a pipeline as its body. To the shell, it
// is a pipeline that defines f in a subshell.
func functions(file *syntax.File) map[string]uint {
	found := map[string]uint{}
	for _, s := range file.Stmts {
		d, ok := s.Cmd.(*syntax.FuncDecl)
		if !ok || d.Name == nil || s.Background || s.Coprocess || specialBuiltins[d.Name.Value] || strings.Contains(d.Name.Value, "/") {
			continue
		}
		if _, isList := d.Body.Cmd.(*syntax.BinaryCmd); !isList {
			found[d.Name.Value] = d.End().Offset()
		}
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		if w, ok := n.(*syntax.Word); ok {
			if text := textOf(w); text == "eval" || strings.Contains(text, "unset") {
				clear(found) // eval and unset can remove them
			}
		}
		return true
	})
	return found
}

var specialBuiltins = map[string]bool{
	".": true, ":": true, "break": true, "continue": true, "eval": true, "exec": true, "exit": true, "export": true, "readonly": true, "return": true,
	"set": true, "shift": true, "source": true, "times": true, "trap": true, "unset": true,
}

// tables returns the associative arrays that a line certainly declares. Their subscripts are
// strings; those of all other arrays are arithmetic. A declaration counts if it stands by itself,
// is the first mention of the name, and is the only one. A prefix assignment hides the array from
// the function that it is for. An exported function may run in another shell, without the array.
func tables(file *syntax.File) map[string]uint {
	declared := map[string]*syntax.DeclClause{}
	for _, s := range file.Stmts {
		d, ok := s.Cmd.(*syntax.DeclClause)
		// A redirection that fails leaves the command out; other options ask or declare something else.
		if !ok || s.Background || s.Coprocess || s.Negated || len(s.Redirs) > 0 || d.Variant.Value != "declare" && d.Variant.Value != "typeset" {
			continue
		}
		for i, a := range d.Args {
			if i == 0 {
				if a.Name != nil || textOf(a.Value) != "-A" && textOf(a.Value) != "-gA" {
					break
				}
			} else if a.Name == nil {
				break
			} else if name := a.Name.Value; a.Index == nil && a.Value == nil && declared[name] == nil && !isShells(name) {
				declared[name] = d
			}
		}
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.DeclClause:
			for _, a := range n.Args {
				if a.Name != nil && declared[a.Name.Value] != n {
					delete(declared, a.Name.Value)
				}
				if option := textOf(a.Value); a.Name == nil && strings.HasPrefix(option, "-") && strings.Contains(option, "f") { // export -f
					clear(declared)
				}
			}
		case *syntax.Assign:
			if n.Name != nil && declared[n.Name.Value] != nil && n.Pos().Offset() < declared[n.Name.Value].Pos().Offset() {
				delete(declared, n.Name.Value)
			}
		case *syntax.CallExpr:
			for _, a := range n.Assigns {
				if a.Name != nil && len(n.Args) > 0 {
					delete(declared, a.Name.Value)
				}
			}
			sets := false
			for _, w := range n.Args {
				text := textOf(w)
				if slices.Contains([]string{"eval", "trap", "allexport", "export", "declare", "typeset"}, text) || sets && (text == "" || text[0] == '-' && strings.Contains(text, "a")) {
					clear(declared)
				}
				sets = sets || text == "set" // perhaps after command or builtin
				name, _, _ := strings.Cut(text, "=")
				name, _, _ = strings.Cut(name, "[")
				delete(declared, name) // unset, read, mapfile and others change it
			}
		case *syntax.WordIter:
			delete(declared, n.Name.Value)
		case *syntax.ParamExp: // also in arithmetic, which can assign
			if n.Param != nil && declared[n.Param.Value] != nil && n.Pos().Offset() < declared[n.Param.Value].Pos().Offset() {
				delete(declared, n.Param.Value)
			}
		case *syntax.Lit:
			for name, d := range declared {
				if n.Pos().Offset() < d.Pos().Offset() && strings.Contains(n.Value, name) {
					delete(declared, name)
				}
			}
		}
		return true
	})
	found := map[string]uint{}
	for name, d := range declared {
		found[name] = d.Pos().Offset()
	}
	return found
}

// isShells reports whether the shell may have a variable of this name that is no associative array,
// or cannot become one.
func isShells(name string) bool {
	return dynamic[name] || filled[name] || integers[name] || strings.HasPrefix(name, "BASH") || strings.HasPrefix(name, "COMP") ||
		slices.Contains([]string{"COPROC", "DIRSTACK", "FUNCNAME", "GROUPS", "MAPFILE", "PIPESTATUS", "READLINE_LINE", "REPLY"}, name)
}

// addOpaque adds the words of text that is not parsed: a name that a rule looks for may stand there
// all the same.
func (r *reader) addOpaque(words []string) {
	r.facts.Opaque = true
	for _, w := range words {
		if w == "" || len(w) > 255 { // longer than any file name
			continue
		}
		r.facts.Words = append(r.facts.Words, w)
		r.facts.Programs = append(r.facts.Programs, path.Base(strings.Trim(w, "\"'`();|&$")))
	}
}

// word inspects any word of a line. NAME=VALUE may be an assignment wherever it stands: env, export
// and set -k make it one.
func (r *reader) word(n *syntax.Word) {
	w := newWord(n)
	if name, value, ok := strings.Cut(w.prefix, "="); ok {
		name, _, _ = strings.Cut(strings.TrimSuffix(name, "+"), "[")
		r.named(name)
		if w.text == "" {
			r.modules(name)
		}
		if isName(name) && (w.text == "" || !isNumeral(value)) {
			r.variables.unknown(name)
		}
		if (word{prefix: value}).mayConnect() {
			r.variables.connections[name] = true
		}
	}
	if text, ok := literal(n); ok {
		r.facts.Words = append(r.facts.Words, text)
		r.addPath(text)
	}
}

// call inspects one simple command.
func (r *reader) call(c *syntax.CallExpr, s script, depth int) {
	if len(c.Args) == 0 {
		return
	}
	var words []word
	for _, w := range c.Args {
		a := newWord(w)
		if a.text == "" {
			a.names, a.number = r.number(w.Parts)
		}
		words = append(words, a)
		// The parser takes {NAME[...]}>FILE for a word and a redirection.
		if first, last := edges(w); strings.HasPrefix(first, "{") && strings.HasSuffix(last, "}") && strings.Contains(first, "[") {
			r.evaluates()
		}
	}
	if c := textOf(c.Args[0]); c == "[" || c == "[[" {
		words[0] = word{text: c, prefix: c}
	}
	if end, ok := s.functions[words[0].text]; ok && end <= c.Pos().Offset() {
		return // the body is inspected where it is defined
	}
	r.run(words, depth)
}

// changeDir adds the directories that the line may change to.
func (r *reader) changeDir(args []string) {
	args = slices.DeleteFunc(slices.Clone(args), func(w string) bool { return len(w) > 1 && w[0] == '-' })
	if len(args) != 1 || args[0] == "" || args[0] == "-" || strings.HasPrefix(args[0], "+") || len(r.dirs) >= maxDirs {
		r.facts.Opaque = true // the home or a previous directory
		return
	}
	for _, dir := range slices.Clone(r.dirs) {
		if to := resolve(dir, args)[0]; !slices.Contains(r.dirs, to) {
			r.dirs = append(r.dirs, to)
		}
	}
}

func (r *reader) redirect(n *syntax.Redirect, s script) {
	if n.N != nil && strings.HasPrefix(n.N.Value, "{") { // {fd}>file
		if name := strings.Trim(n.N.Value, "{}"); isName(name) {
			r.named(name)
			r.variables.number(name, nil)
		} else {
			r.evaluates()
		}
	}
	text, ok := literal(n.Word)
	if slices.Contains([]syntax.RedirOperator{syntax.Hdoc, syntax.DashHdoc, syntax.WordHdoc, syntax.DplIn}, n.Op) {
		return // opens no file
	}
	r.opens(n.Word, s)
	if n.Op == syntax.RdrIn {
		return
	}
	if n.Op == syntax.DplOut && ok && (text == "-" || strings.Trim(text, "0123456789-") == "") {
		return // 2>&1; but >&name writes to the file
	}
	if ok && !expands(n.Word) {
		r.writes = append(r.writes, text)
	} else {
		r.facts.Opaque = true
	}
}

// devices are the beginnings of names that bash takes for connections: /dev/tcp/HOST/PORT.
var devices = []string{"/dev/tcp/", "/dev/udp/"}

// opens inspects the name of a file that the shell opens for a redirection.
func (r *reader) opens(n *syntax.Word, s script) {
	w := newWord(n)
	host, found := "", false
	for _, device := range devices {
		if rest, ok := strings.CutPrefix(w.prefix, device); ok {
			found = true
			host, _, ok = strings.Cut(rest, "/")
			if !ok { // an expansion follows
				host = ""
			}
		}
	}
	switch {
	case found && host != "":
		r.facts.Hosts = append(r.facts.Hosts, strings.ToLower(host))
	case found, w.text == "" && strings.HasPrefix(w.prefix, "/dev/") && w.mayConnect():
		r.facts.Hosts = append(r.facts.Hosts, s.text[n.Pos().Offset():n.End().Offset()])
	}
	if w.text != "" || len(n.Parts) == 0 {
		return
	}
	if _, ok := n.Parts[0].(*syntax.ProcSubst); ok { // /dev/fd/63
		return
	}
	if strings.HasPrefix(w.pattern, "~/") {
		r.variables.need(false, unassigned("HOME"))
		return
	}
	parts := n.Parts
	if q, ok := parts[0].(*syntax.DblQuoted); ok {
		parts = append(slices.Clone(q.Parts), parts[1:]...)
	}
	// "$x/name" is $x with the name, or the name alone.
	if len(parts) > 0 {
		if name := newWord(&syntax.Word{Parts: parts[:1]}).of; name != "" {
			r.variables.opened[name] = true
			if parts = parts[1:]; len(parts) == 0 {
				return
			}
		}
	}
	if newWord(&syntax.Word{Parts: parts}).mayConnect() {
		r.facts.Opaque = true
	}
}

// mayConnect reports whether the value of a word may be the name of a connection, or the beginning
// of one.
func (w word) mayConnect() bool {
	if w.pattern != "" && strings.ContainsAny(w.pattern[:1], "*?[") && !strings.Contains(w.pattern, "{") {
		return false // matches relative names only
	}
	return slices.ContainsFunc(devices, func(device string) bool {
		prefix := strings.ToLower(w.prefix) // as after declare -l
		return strings.HasPrefix(device, prefix) || strings.HasPrefix(prefix, device)
	})
}

// addPath adds a word that looks like a file name: it has a slash, or begins with a tilde or a dot.
func (r *reader) addPath(word string) {
	if _, after, ok := strings.Cut(word, "="); ok && strings.Contains(after, "/") { // dd of=/x, --output=/x
		word = after
	}
	switch {
	case strings.Contains(word, "://"), len(word) > 4096, strings.ContainsAny(word, "\n"):
	case strings.HasPrefix(word, "~"):
		r.paths = append(r.paths, path.Join("/root", strings.TrimLeft(word, "~")))
	case strings.Contains(word, "/") || word == "." || word == "..":
		r.paths = append(r.paths, word)
	}
}

// word is an argument of a command, as far as its text tells.
type word struct {
	text    string   // value; "" if it is not known
	prefix  string   // literal beginning of the value
	suffix  string   // literal end of the value
	pattern string   // text of a word that the shell expands to names of files
	many    bool     // may become several words, or none
	number  bool     // has an unknown value that is a number, if the variables of names hold numbers
	names   []string // nil unless number is set
	of      string   // variable that is the whole word; "" if there is none
}

// newWord reads an argument.
func newWord(w *syntax.Word) word {
	var a word
	known := true
	add := func(text string) {
		if known {
			a.prefix += text
		}
		a.suffix += text
	}
	unknown := func() { known, a.suffix = false, "" }
	var parts func(list []syntax.WordPart, quoted bool)
	parts = func(list []syntax.WordPart, quoted bool) {
		for _, p := range list {
			switch p := p.(type) {
			case *syntax.Lit:
				if quoted {
					add(unescapeQuoted(p.Value))
					continue
				}
				text := p.Value
				if i := strings.IndexAny(blankBraces(text), metacharacters); i >= 0 {
					add(unescape(text[:i]))
					unknown()
					a.many = true
					text = text[strings.LastIndexAny(blankBraces(text), metacharacters+"]}")+1:]
				}
				add(unescape(text))
			case *syntax.SglQuoted:
				if p.Dollar && strings.Contains(p.Value, `\`) {
					unknown()
					continue
				}
				add(p.Value)
			case *syntax.DblQuoted:
				parts(p.Parts, true)
			default:
				unknown()
				x, isExpansion := p.(*syntax.ParamExp)
				a.many = a.many || !quoted || isExpansion && (x.Param != nil && x.Param.Value == "@" || isAll(x.Index) || x.Names == syntax.NamesPrefixWords)
				if isExpansion && len(list) == 1 && x.Param != nil && x.Exp == nil && x.Slice == nil && x.Repl == nil && !x.Excl && !x.Length {
					a.of = x.Param.Value
				}
			}
		}
	}
	parts(w.Parts, false)
	if known {
		a.text = a.prefix
	}
	if text, ok := literal(w); ok && !known {
		a.pattern = text
	}
	return a
}

// isAll reports whether a subscript stands for all elements.
func isAll(x syntax.ArithmExpr) bool {
	w, ok := x.(*syntax.Word)
	return ok && textOf(w) == "@"
}

// edges returns the first and the last literal of a word.
func edges(w *syntax.Word) (first, last string) {
	if lit, ok := w.Parts[0].(*syntax.Lit); ok {
		first = lit.Value
	}
	if lit, ok := w.Parts[len(w.Parts)-1].(*syntax.Lit); ok {
		last = lit.Value
	}
	return first, last
}

// textOf returns the value of a word without expansions, or "".
func textOf(w *syntax.Word) string {
	text, _ := literal(w)
	return text
}

// literal returns the value of a word without expansions; ok is false for any other word.
func literal(w *syntax.Word) (string, bool) {
	if w == nil {
		return "", false
	}
	var b strings.Builder
	for _, p := range w.Parts {
		switch p := p.(type) {
		case *syntax.Lit:
			b.WriteString(unescape(p.Value))
		case *syntax.SglQuoted:
			if p.Dollar && strings.Contains(p.Value, `\`) {
				return "", false // $'\x63url'
			}
			b.WriteString(p.Value)
		case *syntax.DblQuoted:
			for _, q := range p.Parts {
				lit, ok := q.(*syntax.Lit)
				if !ok {
					return "", false
				}
				b.WriteString(unescapeQuoted(lit.Value))
			}
		default:
			return "", false
		}
	}
	text := b.String()
	return text, text != ""
}

// metacharacters begin an expansion to several words or to a name of a file or a directory.
const metacharacters = "{*?[~"

// blankBraces replaces {}, which the shell does not expand.
func blankBraces(s string) string { return strings.ReplaceAll(s, "{}", "  ") }

// expands reports whether the shell expands a word: {curl,x}, /usr/bin/c?rl.
func expands(w *syntax.Word) bool {
	for _, p := range w.Parts {
		if lit, ok := p.(*syntax.Lit); ok && strings.ContainsAny(blankBraces(lit.Value), metacharacters) {
			return true
		}
	}
	return false
}

// unescape removes backslashes: c\url is curl.
func unescape(s string) string { return unescapeAny(s, "") }

// unescapeQuoted removes backslashes as within double quotes: from few characters only.
func unescapeQuoted(s string) string { return unescapeAny(s, "$`\"\\\n") }

// unescapeAny removes the backslashes before characters of a set, or before all if it is empty.
func unescapeAny(s, set string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) && (set == "" || strings.IndexByte(set, s[i+1]) >= 0) {
			i++
			if s[i] == '\n' {
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
