package codepolicy

import (
	goparser "go/parser"
	gotoken "go/token"
	"path"
	"strconv"
	"strings"
	"unicode"
)

// maxImports bounds the imports that are read. Code that has more of them is judged by these.
const maxImports = 10_000

// Import is a module that code names.
type Import struct {
	Name     string
	Line     int    // from 1 on; 0: none
	Language string // if it is not that of the code
}

// reader collects imports.
type reader struct {
	*lexer

	found []Import
}

func (r *reader) add(name string, line int) {
	if name != "" && len(name) <= maxName && len(r.found) < maxImports {
		r.found = append(r.found, Import{Name: name, Line: line})
	}
}

// imports returns the modules that the text visibly imports.
func imports(code *Code) []Import {
	src := code.Text
	switch code.Language {
	case "bash":
		return commands(src, 1)
	case "go":
		return goImports(src)
	case "java": // decodes these before anything else
		src = decodeUnicode(src)
	}
	g := grammars[code.Language]
	if g == nil {
		return nil
	}
	r := &reader{lexer: newLexer(g, src)}
	if code.Cell && code.Language == "python" {
		// Both: a line that looks like a magic may be the middle of a string.
		plain, found := cell(src)
		r.python()
		r.found = append(r.found, found...)
		r.lexer = newLexer(g, plain)
	}
	switch code.Language {
	case "python":
		r.python()
	case "javascript", "typescript":
		r.script()
	case "c", "cpp":
		r.c()
	case "java":
		r.java()
	case "ruby":
		r.ruby()
	case "r":
		r.r()
	}
	if code.Cell { // which has more ends of lines than those that count
		last := 1 + strings.Count(code.Text, "\n")
		for i := range r.found {
			r.found[i].Line = min(r.found[i].Line, last)
		}
	}
	return r.found
}

// argument returns the string that is the first argument of a call whose name was read.
func (r *reader) argument(bare bool) (token, bool) {
	t := r.next()
	opened := t.is(mark, "(")
	if opened {
		if t = r.next(); t.is(mark, "(") { // require(("x"))
			t = r.next()
		}
	}
	if t.kind == text && (opened || bare) {
		return t, true
	}
	r.back(t)
	return t, false
}

// dotted reads the rest of a name with dots behind its first part.
func (r *reader) dotted(first string) string {
	name := first
	for {
		t := r.next()
		if !t.is(mark, ".") {
			r.back(t)
			return name
		}
		if t = r.next(); t.kind != word {
			r.back(t)
			return name
		}
		if len(name) <= maxName {
			name += "." + t.value
		}
	}
}

func (r *reader) python() {
	start := true // of a statement
	for t := r.next(); t.kind != end; t = r.next() {
		switch {
		case t.kind == newline, t.is(mark, ";"), t.is(mark, ":"):
			start = true
			continue
		case start && t.is(word, "import"):
			r.pythonNames("", false)
		case start && t.is(word, "from"):
			r.pythonFrom()
		case t.is(word, "__import__"), t.is(word, "import_module"):
			if arg, ok := r.argument(false); ok {
				r.add(arg.value, arg.line)
			}
		}
		start = false
	}
}

func (r *reader) pythonFrom() {
	t := r.next()
	if t.kind != word {
		r.back(t) // a relative import
		return
	}
	line, base := t.line, r.dotted(t.value)
	if t = r.next(); !t.is(word, "import") {
		r.back(t)
		return
	}
	r.add(base, line)
	t = r.next()
	if t.is(mark, "(") {
		r.pythonNames(base+".", true)
		return
	}
	r.back(t)
	r.pythonNames(base+".", false)
}

// pythonNames reads names with commas between them, each with a possible "as".
func (r *reader) pythonNames(base string, lines bool) {
	for t := r.next(); ; t = r.next() {
		for lines && t.kind == newline {
			t = r.next()
		}
		if t.kind != word {
			r.back(t)
			return
		}
		r.add(base+r.dotted(t.value), t.line)
		t = r.next()
		for lines && t.kind == newline {
			t = r.next()
		}
		if t.is(word, "as") {
			r.next()
			t = r.next()
		}
		if !t.is(mark, ",") {
			r.back(t)
			return
		}
	}
}

func (r *reader) script() {
	add := func(t token) { r.add(strings.TrimPrefix(t.value, "node:"), t.line) }
	for t := r.next(); t.kind != end; t = r.next() {
		switch {
		case t.is(word, "from"), t.is(word, "import"), t.is(word, "require"), t.is(word, "getBuiltinModule"):
		default:
			continue
		}
		bare := t.value != "require" && t.value != "getBuiltinModule"
		if t.value == "from" { // no call, such as Array.from
			if t = r.next(); t.kind == text {
				add(t)
			} else {
				r.back(t)
			}
			continue
		}
		for t = r.next(); t.is(mark, "?") || t.is(mark, "."); { // require?.("x")
			t = r.next()
		}
		r.back(t)
		if arg, ok := r.argument(bare); ok {
			add(arg)
		}
	}
}

// c reads directives, and the imports of C++20.
func (r *reader) c() {
	start := true
	for t := r.next(); t.kind != end; t = r.next() {
		switch {
		case t.kind == newline:
			start = true
			continue
		case start && t.is(mark, "%"): // %: is another #
			if t = r.next(); t.is(mark, ":") {
				r.directive()
			}
		case start && t.is(mark, "#"), start && t.is(word, "export"):
			r.directive()
		case start && t.is(word, "import"):
			r.back(t)
			r.directive()
		case t.is(mark, ";"):
			start = true
			continue
		}
		start = false
	}
}

func (r *reader) directive() {
	t := r.next()
	switch t.value {
	case "include", "include_next", "import", "embed":
	default:
		r.back(t)
		return
	}
	switch name := r.next(); {
	case name.is(mark, "<"):
		rest := r.rest()
		if at := strings.IndexAny(rest, ">\n"); at >= 0 && rest[at] == '>' {
			r.add(strings.TrimSpace(strings.ReplaceAll(rest[:at], "\\\n", "")), name.line)
			r.skip(at + 1)
		}
	case name.kind == text:
		r.add(name.value, name.line)
	case name.kind == word && t.value == "import":
		r.add(r.dotted(name.value), name.line)
	default:
		r.back(name)
	}
}

// java reads imports, and names with dots that need none.
func (r *reader) java() {
	for t := r.next(); t.kind != end; t = r.next() {
		switch {
		case t.kind != word:
		case t.value == "import":
			name := r.afterNewlines()
			if name.is(word, "static") || name.is(word, "module") {
				name = r.afterNewlines()
			}
			if name.kind == word {
				r.add(r.javaName(name.value), name.line)
			} else {
				r.back(name)
			}
		default:
			name := r.javaName(t.value)
			if strings.Count(name, ".") >= 2 {
				r.add(name, t.line)
			}
			if strings.HasSuffix("."+name, ".forName") || strings.HasSuffix("."+name, ".loadClass") {
				if arg, ok := r.argument(false); ok {
					r.add(arg.value, arg.line)
				}
			}
		}
	}
}

func (r *reader) afterNewlines() token {
	t := r.next()
	for t.kind == newline {
		t = r.next()
	}
	return t
}

// javaName reads a name with dots, which may have lines between its parts.
func (r *reader) javaName(first string) string {
	name := first
	for {
		t := r.afterNewlines()
		if !t.is(mark, ".") {
			r.back(t)
			return name
		}
		if t = r.afterNewlines(); t.kind != word && !t.is(mark, "*") {
			r.back(t)
			return name
		}
		if len(name) <= maxName {
			name += "." + t.value
		}
	}
}

func (r *reader) ruby() {
	for t := r.next(); t.kind != end; t = r.next() {
		switch t.value {
		case "require", "require_relative", "load", "gem":
			if t.kind != word {
				continue
			}
			if arg, ok := r.argument(true); ok {
				r.add(strings.TrimSuffix(strings.TrimSuffix(arg.value, ".rb"), ".so"), arg.line)
			}
		case "autoload":
			for range 6 { // autoload(:Name, "file")
				if t = r.next(); t.kind == text || t.kind == newline || t.kind == end {
					break
				}
			}
			if t.kind == text {
				r.add(t.value, t.line)
			} else {
				r.back(t)
			}
		}
	}
}

func (r *reader) r() {
	for t := r.next(); t.kind != end; t = r.next() {
		if t.kind != word && t.kind != text {
			continue
		}
		switch t.value {
		case "library", "require", "requireNamespace", "loadNamespace", "attachNamespace", "use", "source":
			open := r.next()
			if !open.is(mark, "(") {
				r.back(open)
				continue
			}
			name := r.afterNewlines()
			if name.is(word, "package") {
				if eq := r.next(); eq.is(mark, "=") {
					name = r.next()
				} else {
					r.back(eq)
				}
			}
			if name.kind == text || name.kind == word && t.value != "source" {
				r.add(r.dotted(name.value), name.line)
			} else {
				r.back(name)
			}
			continue
		}
		line, name := t.line, r.dotted(t.value)
		if colon := r.next(); !colon.is(mark, ":") { // name::function
			r.back(colon)
		} else if colon = r.next(); colon.is(mark, ":") {
			r.add(name, line)
		} else {
			r.back(colon)
		}
	}
}

// goImports reads imports with Go's own parser, which stops behind them.
func goImports(src string) []Import {
	files := gotoken.NewFileSet()
	f, _ := goparser.ParseFile(files, "main.go", src, goparser.ImportsOnly) // of a file with mistakes there is a part
	if f == nil {
		return nil
	}
	r := &reader{}
	for _, im := range f.Imports {
		if name, err := strconv.Unquote(im.Path.Value); err == nil {
			r.add(path.Clean(name), files.PositionFor(im.Pos(), false).Line)
		}
	}
	return r.found
}

// decodeUnicode replaces \u0061 by its character, which keeps lines.
func decodeUnicode(src string) string {
	if !strings.Contains(src, `\u`) {
		return src
	}
	var out strings.Builder
	for {
		at := strings.Index(src, `\u`)
		if at < 0 {
			out.WriteString(src)
			return out.String()
		}
		out.WriteString(src[:at])
		digits := strings.TrimLeft(src[at+1:], "u")
		v, err := int64(0), strconv.ErrSyntax
		if len(digits) >= 4 {
			v, err = strconv.ParseInt(digits[:4], 16, 32)
		}
		if err != nil || v < 0 || unicode.IsControl(rune(v)) {
			out.WriteString(`\u`)
			src = src[at+2:]
			continue
		}
		out.WriteRune(rune(v))
		src = digits[4:]
	}
}
