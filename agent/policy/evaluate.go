package policy

import (
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// variables collects the variables of a line, of all its nested lines, functions and subshells
// together, without regard to order. A variable that is only ever assigned numbers can be evaluated
// safely. Commands are tracked under names that end in "()": unknown ones are functions.
type variables struct {
	sources  map[string][]string // by variable: the names whose values it takes
	unknowns map[string]bool     // variables that may hold anything
	needed   map[string]bool     // names that must hold numbers; true if the shell evaluates their values
	arrays   map[string]bool
	texts    map[string][]string // variables that declare assigns a value, with names that must hold numbers
	options  map[string]bool     // variables that may hold a word that begins with a dash
	operands map[string]bool     // variables that are operands of a program with options that run code

	opened      map[string]bool // variables that begin the name of a file that the shell opens
	files       map[string]bool // variables that are assigned a value that is no connection's name
	connections map[string]bool // variables that may hold the name of a connection, or a beginning of it
}

func newVariables() variables {
	return variables{
		sources: map[string][]string{}, unknowns: map[string]bool{}, needed: map[string]bool{}, arrays: map[string]bool{},
		texts: map[string][]string{}, options: map[string]bool{}, operands: map[string]bool{},
		opened: map[string]bool{}, files: map[string]bool{}, connections: map[string]bool{},
	}
}

// command returns the name under which a command is tracked.
func command(name string) string { return name + "()" }

// unassigned returns the name that stands for a number as long as no part of the line assigns the
// variable. A program that prints numbers may print a word instead, such as null. Arithmetic takes
// that for the name of a variable.
func unassigned(name string) string { return "=" + name }

// unknown records an assignment of a value that is not known to be a number.
func (v *variables) unknown(name string) { v.unknowns[name] = true }

// number records an assignment of a number, provided that the names of sources hold numbers.
func (v *variables) number(name string, sources []string) {
	v.sources[name] = append(v.sources[name], sources...)
}

// need records that names must hold numbers, or the line is opaque. evaluated is set if the shell
// evaluates their values.
func (v *variables) need(evaluated bool, names ...string) {
	for _, name := range names {
		v.needed[name] = v.needed[name] || evaluated
	}
}

// dynamic lists the variables that hold numbers although no line assigns them.
var dynamic = map[string]bool{
	"RANDOM": true, "SRANDOM": true, "SECONDS": true, "LINENO": true, "EPOCHSECONDS": true, "UID": true, "EUID": true, "PPID": true, "BASHPID": true,
}

// integers lists the variables whose new values bash evaluates.
var integers = map[string]bool{
	"RANDOM": true, "SRANDOM": true, "SECONDS": true, "LINENO": true, "EPOCHSECONDS": true, "EPOCHREALTIME": true, "UID": true, "EUID": true, "PPID": true,
	"BASHPID": true, "BASH_SUBSHELL": true, "OPTIND": true, "OPTERR": true, "HISTCMD": true, "FUNCNEST": true, "MAILCHECK": true,
}

// filled lists the variables that the shell itself assigns data.
var filled = map[string]bool{
	"_": true, "REPLY": true, "OPTARG": true, "PWD": true, "OLDPWD": true, "MAPFILE": true, "COPROC": true, "DIRSTACK": true, "FUNCNAME": true,
	"HOSTNAME": true, "HOME": true, "SHELL": true, "TERM": true, "PATH": true, "GROUPS": true, "HISTCMD": true,
}

// settle completes the facts that need the whole line: names that must be numbers,
// and the directories that the line may be in.
func (r *reader) settle() {
	for _, dir := range r.dirs {
		r.facts.Paths = append(r.facts.Paths, resolve(dir, r.paths)...)
		r.facts.Writes = append(r.facts.Writes, resolve(dir, r.writes)...)
	}
	v := &r.variables
	for name := range integers {
		if _, ok := v.sources[name]; ok || v.unknowns[name] {
			v.need(true, name)
		}
	}
	bad := func(name string) bool {
		name, isUnassigned := strings.CutPrefix(name, "=")
		_, assigned := v.sources[name]
		if isUnassigned {
			return assigned || v.unknowns[name]
		}
		return !assigned && !dynamic[name] && !strings.HasSuffix(name, "()") || v.unknowns[name] || filled[name] ||
			strings.HasPrefix(name, "BASH") && !dynamic[name] && !integers[name]
	}
	// What takes the value of a bad one is bad, too. Each name is visited once: a line may have
	// thousands.
	takers, found := map[string][]string{}, map[string]bool{}
	var queue []string
	spoil := func(name string) {
		if !found[name] {
			found[name] = true
			queue = append(queue, name)
		}
	}
	for name, from := range v.sources {
		if bad(name) {
			spoil(name)
		}
		for _, source := range from {
			takers[source] = append(takers[source], name)
			if bad(source) {
				spoil(source)
			}
		}
	}
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		for _, taker := range takers[name] {
			spoil(taker)
		}
	}
	holds := func(name string) bool { return !found[name] && !bad(name) }
	for name, evaluated := range v.needed {
		switch {
		case holds(name):
		case evaluated:
			r.evaluates()
		default:
			r.facts.Opaque = true
		}
	}
	for name, from := range v.texts {
		if v.arrays[name] && slices.ContainsFunc(from, func(s string) bool { return !holds(s) }) { // declare a=$x, and $x is "(...)"
			r.evaluates()
		}
	}
	for name := range v.opened {
		if !v.files[name] || v.connections[name] || filled[name] {
			r.facts.Opaque = true
		}
	}
	for name := range v.operands {
		if v.options[name] {
			r.facts.Opaque = true
		}
	}
}

// assign records the value of a word. A nil word is an empty value.
func (r *reader) assign(name string, value *syntax.Word) {
	r.named(name)
	if value == nil {
		r.variables.number(name, nil)
		r.variables.files[name] = true
		return
	}
	if newWord(value).mayConnect() {
		r.variables.connections[name] = true
	}
	r.variables.files[name] = true
	if newWord(value).text == "" {
		r.modules(name)
	}
	if w := newWord(value); w.text == "" && w.prefix == "" && w.many || strings.HasPrefix(w.prefix, "-") {
		r.variables.options[name] = true
	}
	if from, ok := r.number(value.Parts); ok {
		r.variables.number(name, from)
		return
	}
	r.variables.unknown(name)
}

// fill records that a variable receives data.
func (r *reader) fill(name string) {
	if isName(name) {
		r.named(name)
		r.modules(name)
		r.variables.unknown(name)
		r.variables.connections[name] = true
	}
}

// assignment inspects NAME=VALUE, NAME[SUBSCRIPT]=VALUE and NAME=(...).
func (r *reader) assignment(a *syntax.Assign, s script) {
	if a.Name == nil || a.Naked {
		return
	}
	name := a.Name.Value
	if a.Index != nil {
		r.variables.arrays[name] = true
		r.subscript(name, a.Index, a.Pos().Offset(), s)
	}
	if a.Array == nil {
		r.assign(name, a.Value)
		return
	}
	r.variables.arrays[name] = true
	r.named(name)
	r.variables.number(name, nil)
	for _, e := range a.Array.Elems {
		if e.Index != nil {
			r.subscript(name, e.Index, a.Pos().Offset(), s)
		}
		if e.Value != nil {
			r.item(name, e.Value)
		}
	}
}

// item records an element of a list, which may be a sequence in braces.
func (r *reader) item(name string, w *syntax.Word) {
	if len(w.Parts) == 1 {
		if lit, ok := w.Parts[0].(*syntax.Lit); ok && isSequence(lit.Value) {
			r.variables.number(name, nil)
			return
		}
	}
	r.assign(name, w)
}

// isSequence reports whether a word is a sequence of numbers: {1..10..2}.
func isSequence(s string) bool {
	inner, ok := strings.CutPrefix(s, "{")
	inner, closed := strings.CutSuffix(inner, "}")
	return ok && closed && strings.Contains(inner, "..") && strings.Trim(inner, "0123456789-.") == ""
}

// iterate inspects for NAME in WORDS, and select.
func (r *reader) iterate(loop *syntax.WordIter, isSelect bool) {
	name := loop.Name.Value
	r.named(name)
	if isSelect || !loop.InPos.IsValid() { // the arguments of the script or function
		r.variables.unknown(name)
		r.variables.options[name] = true
		r.variables.connections[name] = true
		return
	}
	r.variables.number(name, nil)
	for _, w := range loop.Items {
		r.item(name, w)
	}
}

// subscript inspects the subscript of an array, which is arithmetic unless the array is certainly
// an associative one.
func (r *reader) subscript(name string, x syntax.ArithmExpr, at uint, s script) {
	if w, ok := x.(*syntax.Word); ok && len(w.Parts) == 1 {
		if lit, ok := w.Parts[0].(*syntax.Lit); ok && (lit.Value == "@" || lit.Value == "*") {
			return
		}
	}
	if end, ok := s.tables[name]; ok && end <= at {
		r.variables.need(true, command("declare"), command("typeset")) // as a function it declares nothing
		return
	}
	r.arithmetic(x, s)
}

// expansion inspects ${...}.
func (r *reader) expansion(p *syntax.ParamExp, s script) {
	if p.Param == nil || !p.Dollar.IsValid() { // a[i] is an operand
		return
	}
	name := p.Param.Value
	if p.Index != nil {
		r.subscript(name, p.Index, p.Pos().Offset(), s)
	}
	keys := false // ${!name[@]}
	if w, ok := p.Index.(*syntax.Word); ok {
		keys = textOf(w) == "@" || textOf(w) == "*"
	}
	if p.Excl && p.Names == 0 && !keys {
		r.evaluates() // ${!x} takes a name from a value, with its subscript
	}
	if p.Slice != nil {
		r.arithmetic(p.Slice.Offset, s)
		r.arithmetic(p.Slice.Length, s)
	}
	if p.Exp != nil {
		op := p.Exp.Op
		if op == syntax.OtherParamOps && !slices.Contains([]string{"Q", "E", "U", "u", "L", "A", "a", "K", "k"}, textOf(p.Exp.Word)) {
			r.evaluates() // ${x@P}
		}
		if op == syntax.AssignUnset || op == syntax.AssignUnsetOrNull {
			r.assign(name, p.Exp.Word)
		}
	}
}

// declare inspects declare, export and the like. A name reference or an integer variable is
// evaluated when a value is assigned to it, and the value of an array is a list of subscripts.
func (r *reader) declare(d *syntax.DeclClause) {
	isArray, isInteger := false, false
	for _, a := range d.Args {
		if a.Name != nil {
			name := a.Name.Value
			if isInteger { // every value is evaluated
				r.variables.need(true, name)
			}
			if isArray {
				r.variables.arrays[name] = true
			}
			if dynamic[name] || integers[name] {
				r.evaluates() // it may lose its meaning
			}
			if a.Value != nil {
				if w := newWord(a.Value); w.text == "" && w.prefix == "" || strings.HasPrefix(w.prefix, "(") {
					from, ok := r.number(a.Value.Parts)
					if !ok {
						from = []string{""} // holds no number
					}
					r.variables.texts[name] = append(r.variables.texts[name], from...)
				}
			}
			continue
		}
		if a.Value == nil {
			continue
		}
		w := newWord(a.Value)
		if strings.HasPrefix(w.text, "-") && strings.Trim(w.text[1:], "airx") == "" {
			isInteger = isInteger || strings.Contains(w.text, "i")
		} else {
			r.declareWord(w)
		}
		isArray = isArray || strings.HasPrefix(w.text, "-") && strings.ContainsAny(w.text, "aA")
	}
}

// declareWord inspects an argument of declare that is no plain assignment: an option, or NAME=VALUE
// with quotes around the name.
func (r *reader) declareWord(w word) {
	if w.text == "" || w.many || strings.ContainsAny(w.text, "[(") || strings.HasPrefix(w.text, "-") && strings.ContainsAny(w.text, "ni") {
		r.evaluates()
	}
}

// compare inspects the arithmetic operators of [[ ]].
func (r *reader) compare(b *syntax.BinaryTest, s script) {
	if !slices.Contains([]syntax.BinTestOperator{syntax.TsEql, syntax.TsNeq, syntax.TsLeq, syntax.TsGeq, syntax.TsLss, syntax.TsGtr}, b.Op) {
		return
	}
	for _, x := range []syntax.TestExpr{b.X, b.Y} {
		if w, ok := x.(*syntax.Word); ok {
			r.operand(w, s)
		} else {
			r.evaluates()
		}
	}
}

// let inspects let, whose arguments are words as well as expressions: the shell removes quotes and
// expands file names first.
func (r *reader) let(l *syntax.LetClause, s script) {
	for _, x := range l.Exprs {
		text := s.text[x.Pos().Offset():x.End().Offset()]
		if w, ok := x.(*syntax.Word); ok && !expands(w) && textOf(w) != "" {
			r.letText(textOf(w))
		} else if strings.ContainsAny(text, "*?[{~\\'\"`$") {
			r.evaluates()
		} else {
			r.arithmetic(x, s)
		}
	}
}

// letText inspects an expression that is an argument.
func (r *reader) letText(text string) {
	x, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Arithmetic(strings.NewReader(text))
	if err != nil || strings.ContainsAny(text, "$`\\\"'") {
		r.evaluates()
		return
	}
	r.arithmetic(x, script{})
}

// arithmetic inspects an arithmetic expression. The shell evaluates a variable's value in it as an
// expression too, and a subscript in that runs commands. So only numbers may stand in it, and
// variables that can hold nothing else.
func (r *reader) arithmetic(x syntax.ArithmExpr, s script) {
	switch x := x.(type) {
	case nil:
	case *syntax.Word:
		if x != nil {
			r.operand(x, s)
		}
	case *syntax.ParenArithm:
		r.arithmetic(x.X, s)
	case *syntax.UnaryArithm:
		if x.Op == syntax.Inc || x.Op == syntax.Dec {
			r.assignNumber(x.X, s)
		}
		r.arithmetic(x.X, s)
	case *syntax.BinaryArithm:
		assigns := strings.HasSuffix(x.Op.String(), "=") && !slices.Contains([]syntax.BinAritOperator{syntax.Eql, syntax.Neq, syntax.Leq, syntax.Geq}, x.Op)
		if assigns {
			r.assignNumber(x.X, s)
		}
		if x.Op != syntax.Assgn { // which does not read its target
			r.arithmetic(x.X, s)
		}
		r.arithmetic(x.Y, s)
	default:
		r.evaluates()
	}
}

// assignNumber records the target of an assignment within arithmetic.
func (r *reader) assignNumber(x syntax.ArithmExpr, s script) {
	w, ok := x.(*syntax.Word)
	if !ok || len(w.Parts) != 1 {
		r.evaluates()
		return
	}
	switch p := w.Parts[0].(type) {
	case *syntax.Lit:
		if isName(p.Value) {
			r.named(p.Value)
			r.variables.number(p.Value, nil)
			return
		}
	case *syntax.ParamExp:
		if !p.Dollar.IsValid() && p.Param != nil {
			r.named(p.Param.Value)
			r.variables.arrays[p.Param.Value] = true
			r.variables.number(p.Param.Value, nil)
			r.element(p, s)
			return
		}
	}
	r.evaluates()
}

// operand inspects one operand of arithmetic.
func (r *reader) operand(w *syntax.Word, s script) {
	if len(w.Parts) == 1 {
		switch p := w.Parts[0].(type) {
		case *syntax.Lit:
			if isName(p.Value) {
				r.variables.need(true, p.Value)
				return
			}
			if isConstant(p.Value) {
				return
			}
		case *syntax.ParamExp:
			if !p.Dollar.IsValid() && p.Param != nil {
				r.variables.need(true, p.Param.Value)
				r.element(p, s)
				return
			}
		}
	}
	names, ok := r.number(w.Parts)
	if !ok {
		r.evaluates()
		return
	}
	r.variables.need(true, names...)
}

// element inspects the subscript of an array in arithmetic. Some versions of bash evaluate even
// that of an associative array, if it is no plain word.
func (r *reader) element(p *syntax.ParamExp, s script) {
	if end, ok := s.tables[p.Param.Value]; ok && end <= p.Pos().Offset() {
		if w, ok := p.Index.(*syntax.Word); ok && isName(textOf(w)) {
			r.variables.need(true, command("declare"), command("typeset"))
			return
		}
	}
	r.arithmetic(p.Index, s)
}

// isConstant reports whether an operand is a number: 10, 0x1f, 16#ff.
func isConstant(s string) bool {
	return s != "" && s[0] >= '0' && s[0] <= '9' && !strings.ContainsFunc(s, func(c rune) bool {
		return c != '#' && c != '@' && c != '_' && !isAlphanumeric(c)
	})
}

func isAlphanumeric(c rune) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// isName reports whether s can be the name of a variable.
func isName(s string) bool {
	return s != "" && (s[0] < '0' || s[0] > '9') && !strings.ContainsFunc(s, func(c rune) bool { return c != '_' && !isAlphanumeric(c) })
}

// isNumeral reports whether s consists of the characters of a number, which evaluate to one in
// whatever order they come.
func isNumeral(s string) bool { return strings.Trim(s, "0123456789+-#") == "" }

// maxNumber bounds expansions within expansions of a number.
const maxNumber = 12

// number reports whether the value of a word consists of the characters of numbers, provided that
// the variables named hold numbers.
func (r *reader) number(parts []syntax.WordPart) (names []string, ok bool) {
	if r.depth++; r.depth > maxNumber {
		r.depth--
		return nil, false
	}
	defer func() { r.depth-- }()
	for _, p := range parts {
		switch p := p.(type) {
		case *syntax.Lit:
			if !isNumeral(p.Value) {
				return nil, false
			}
		case *syntax.SglQuoted:
			if p.Dollar || !isNumeral(p.Value) {
				return nil, false
			}
		case *syntax.DblQuoted:
			more, ok := r.number(p.Parts)
			if p.Dollar || !ok {
				return nil, false
			}
			names = append(names, more...)
		case *syntax.ArithmExp: // its operands are inspected where they are
		case *syntax.ParamExp:
			more, ok := r.numberExpansion(p)
			if !ok {
				return nil, false
			}
			names = append(names, more...)
		case *syntax.CmdSubst:
			more, ok := r.count(p)
			if !ok {
				return nil, false
			}
			names = append(names, more...)
		default:
			return nil, false
		}
	}
	return names, true
}

// numberExpansion is the part of number for ${...}.
func (r *reader) numberExpansion(p *syntax.ParamExp) (names []string, ok bool) {
	switch {
	case p.Param == nil || p.Excl || p.Repl != nil || p.Names != 0 || len(p.Modifiers) > 0 || p.NestedParam != nil || p.Flags != nil:
		return nil, false
	case p.Length:
		return nil, true
	case p.Param.Value == "?" || p.Param.Value == "#" || p.Param.Value == "$" || p.Param.Value == "!":
	case isName(p.Param.Value):
		names = []string{p.Param.Value}
	default:
		return nil, false
	}
	if p.Exp == nil || p.Exp.Word == nil {
		return names, p.Exp == nil || p.Exp.Op != syntax.OtherParamOps
	}
	if slices.Contains([]syntax.ParExpOperator{syntax.RemSmallPrefix, syntax.RemLargePrefix, syntax.RemSmallSuffix, syntax.RemLargeSuffix}, p.Exp.Op) {
		return names, true // a part of a number
	}
	if slices.Contains([]syntax.ParExpOperator{
		syntax.DefaultUnset, syntax.DefaultUnsetOrNull, syntax.AlternateUnset, syntax.AlternateUnsetOrNull, syntax.AssignUnset, syntax.AssignUnsetOrNull,
	}, p.Exp.Op) {
		more, ok := r.number(p.Exp.Word.Parts)
		return append(names, more...), ok
	}
	return nil, false
}

// count reports whether the output of a substituted command is numbers: $(wc -l < f).
func (r *reader) count(c *syntax.CmdSubst) (names []string, ok bool) {
	if len(c.Stmts) != 1 {
		return nil, false
	}
	s := c.Stmts[0]
	for {
		pipe, ok := s.Cmd.(*syntax.BinaryCmd)
		if !ok {
			break
		}
		if pipe.Op != syntax.Pipe || s.Background || s.Negated || len(s.Redirs) > 0 {
			return nil, false
		}
		s = pipe.Y
	}
	call, ok := s.Cmd.(*syntax.CallExpr)
	if !ok || len(call.Assigns) > 0 || len(call.Args) == 0 || s.Background || s.Coprocess {
		return nil, false
	}
	for _, redirect := range s.Redirs {
		if redirect.Op != syntax.RdrIn && (redirect.Op != syntax.RdrOut || redirect.N == nil || redirect.N.Value != "2") { // 2>&1 adds messages
			return nil, false
		}
	}
	name, args := textOf(call.Args[0]), call.Args[1:]
	names = []string{command(name)}
	switch name {
	case "wc": // with a file it prints the name as well
		return names, len(args) > 0 && !slices.ContainsFunc(args, func(w *syntax.Word) bool {
			text := textOf(w)
			return len(text) < 2 || text[0] != '-' || strings.Trim(text[1:], "lcmwL") != "" && text != "--lines"
		})
	case "grep":
		files, counts := -1, false
		for _, w := range args {
			switch text := textOf(w); {
			case text == "" || expands(w):
				return nil, false
			case text[0] != '-':
				files++
			case len(text) < 2 || strings.Trim(text[1:], "cEFivwxs") != "":
				return nil, false
			default:
				counts = counts || strings.Contains(text, "c")
			}
		}
		return names, counts && files <= 1
	case "nproc":
		return names, len(args) == 0
	case "id":
		return names, len(args) == 1 && (textOf(args[0]) == "-u" || textOf(args[0]) == "-g")
	case "stat":
		return names, len(args) == 3 && textOf(args[0]) == "-c" && slices.Contains([]string{"%s", "%Y", "%a", "%h"}, textOf(args[1])) && textOf(args[2]) != "" &&
			!strings.HasPrefix(textOf(args[2]), "-") && !expands(args[2]) // the name of a file may be an option
	case "jq": // of NaN the length is null, and ~/.jq may define another length
		return append(names, unassigned("null"), unassigned("true"), unassigned("false")), len(args) > 0 && len(args) < 3 && textOf(args[0]) == "length" &&
			(len(args) < 2 || textOf(args[1]) != "" && !strings.HasPrefix(textOf(args[1]), "-") && !expands(args[1]))
	case "date":
		format, ok := "", len(args) == 1
		if ok {
			format, ok = strings.CutPrefix(textOf(args[0]), "+")
		}
		for i := 0; i < len(format); i++ { // once from left to right: %%s is no field
			if format[i] != '%' {
				continue
			}
			if i+1 == len(format) || !strings.ContainsRune("sYmdHMSjuw", rune(format[i+1])) {
				return nil, false
			}
			format = format[:i] + "0" + format[i+2:]
		}
		return names, ok && isNumeral(format)
	case "seq", "expr":
		if name == "seq" { // of numbers that are too large
			names = append(names, unassigned("inf"), unassigned("nan"), unassigned("infinity"))
		}
		for _, w := range args {
			if name == "expr" && slices.Contains([]string{"+", "-", "/", "%"}, textOf(w)) {
				continue
			}
			more, ok := r.number(w.Parts)
			if !ok {
				return nil, false
			}
			names = append(names, more...)
		}
		return names, len(args) > 0
	}
	return nil, false
}
