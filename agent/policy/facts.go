package policy

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"mvdan.cc/sh/v3/syntax"
)

// Facts holds the variables of a rule's condition. A field's comment begins with the name of its
// variable.
type Facts struct {
	Tool      string         // tool
	Arguments map[string]any // arguments: as parsed by the tool, not the model's text
	Command   string         // command: a shell line; "" for other tools

	Words    []string // words: the line's literal words
	Programs []string // programs: base names of the programs that the line names
	Opaque   bool     // opaque: the line runs code that cannot be determined from its text, or cannot be parsed
	Paths    []string // paths: absolute names in the call; relative ones are resolved against the working directory
	Writes   []string // writes: files that the call visibly writes to
	Hosts    []string // hosts: of URLs, user@host, IPv4 addresses and /dev/tcp, in lower case and without port

	WorkingDir, InputDir, OutputDir string // working_dir, input_dir, output_dir

	Turn    int                // turn: from 1
	Repeats int                // repeats: earlier identical calls of the run
	Spent   map[string]float64 // spent: turns, tokens, cost (dollars), seconds, cpu_seconds
	Budget  map[string]float64 // budget: ceilings under the same names; 0 if there is none
	Count   map[string]int     // count: calls, denied, failed, and the calls of each tool by its name
}

func (f Facts) variables() map[string]any {
	return map[string]any{
		"tool": f.Tool, "arguments": orEmpty(f.Arguments), "command": f.Command,
		"words": list(f.Words), "programs": list(f.Programs), "opaque": f.Opaque, "paths": list(f.Paths), "writes": list(f.Writes), "hosts": list(f.Hosts),
		"working_dir": f.WorkingDir, "input_dir": f.InputDir, "output_dir": f.OutputDir,
		"turn": f.Turn, "repeats": f.Repeats, "spent": orEmpty(f.Spent), "budget": orEmpty(f.Budget), "count": orEmpty(f.Count),
	}
}

func list(l []string) []string {
	if l == nil {
		return []string{}
	}
	return l
}

func orEmpty[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}

const (
	// maxLine bounds the command lines that are parsed; longer ones are opaque.
	maxLine = 256 << 10
	// maxNested bounds lines within lines: bash -c "bash -c ...".
	maxNested = 8
)

// Shell parses a command line and fills in its words, programs, paths, writes, hosts and opaque.
func (f *Facts) Shell(line string) {
	f.Command = line
	r := reader{facts: f, dirs: []string{path.Clean("/" + f.WorkingDir)}}
	r.line(line, 0)
	for _, dir := range r.dirs {
		f.Paths = append(f.Paths, resolve(dir, r.paths)...)
		f.Writes = append(f.Writes, resolve(dir, r.writes)...)
	}
	f.Hosts = append(f.Hosts, hosts(line)...)
	for _, l := range []*[]string{&f.Words, &f.Programs, &f.Paths, &f.Writes, &f.Hosts} {
		slices.Sort(*l)
		*l = slices.Compact(*l)
	}
}

// File adds a file that the tool reads or, if written is set, writes.
func (f *Facts) File(name string, written bool) {
	names := resolve(path.Clean("/"+f.WorkingDir), []string{name})
	f.Paths = append(f.Paths, names...)
	if written {
		f.Writes = append(f.Writes, names...)
	}
}

type reader struct {
	facts *Facts
	// Names as written, and the directories that they may be relative to. A line may change its
	// directory with cd; which of its commands that affects is not tracked, so every combination
	// counts.
	paths, writes, dirs []string
}

// maxDirs bounds the directories of a line; a line with more is opaque.
const maxDirs = 16

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

// functions returns the functions that a line certainly defines, with the offset at which each
// definition ends. A function of a subshell or behind a condition may not exist when its name is
// called, and neither does one that is called before its definition.
func functions(file *syntax.File) map[string]uint {
	found := map[string]uint{}
	for _, s := range file.Stmts {
		if d, ok := s.Cmd.(*syntax.FuncDecl); ok && d.Name != nil && !s.Background && !s.Coprocess {
			found[d.Name.Value] = d.End().Offset()
		}
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		if w, ok := n.(*syntax.Word); ok {
			if text, _ := literal(w); text == "eval" || strings.Contains(text, "unset") {
				clear(found) // eval and unset can remove them
			}
		}
		return true
	})
	return found
}

func (r *reader) line(line string, depth int) {
	if depth > maxNested || len(line) > maxLine {
		r.addOpaque(strings.Fields(line))
		return
	}
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(line), "")
	if err != nil {
		r.addOpaque(strings.Fields(line))
		return
	}
	known := functions(file)
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.CallExpr:
			r.call(n, known, depth)
		case *syntax.Redirect:
			r.redirect(n)
		case *syntax.Word:
			if text, ok := literal(n); ok {
				r.facts.Words = append(r.facts.Words, text)
				r.addPath(text)
				r.assigns(text)
			}
		case *syntax.Assign:
			if n.Name != nil {
				r.assigns(n.Name.Value)
			}
		case *syntax.WordIter:
			r.assigns(n.Name.Value)
		case *syntax.DeclClause:
			r.declare(n)
		case *syntax.ParamExp:
			// ${!x} and ${x@P} are evaluated once more, and so are the numbers of ${x:y}.
			if n.Excl || n.Exp != nil && n.Exp.Op == syntax.OtherParamOps || n.Slice != nil && (!number(n.Slice.Offset) || !number(n.Slice.Length)) {
				r.facts.Opaque = true
			}
		case *syntax.ArithmExp:
			r.arithmetic(n.X)
		case *syntax.ArithmCmd:
			r.arithmetic(n.X)
		case *syntax.CStyleLoop:
			r.arithmetic(n.Init)
			r.arithmetic(n.Cond)
			r.arithmetic(n.Post)
		case *syntax.LetClause, *syntax.CoprocClause:
			r.facts.Opaque = true
		case *syntax.BinaryTest:
			if slices.Contains([]syntax.BinTestOperator{syntax.TsEql, syntax.TsNeq, syntax.TsLeq, syntax.TsGeq, syntax.TsLss, syntax.TsGtr}, n.Op) {
				r.facts.Opaque = true
			}
		case *syntax.UnaryTest:
			if n.Op == syntax.TsVarSet || n.Op == syntax.TsRefVar {
				r.facts.Opaque = true
			}
		}
		return true
	})
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

// assigns inspects the name of an assignment, or NAME=VALUE. Some variables decide which program a
// name runs.
func (r *reader) assigns(text string) {
	name, _, _ := strings.Cut(text, "=")
	name, _, _ = strings.Cut(strings.TrimSuffix(name, "+"), "[")
	switch {
	case strings.HasPrefix(name, "LD_"), strings.HasPrefix(name, "BASH_") && name != "BASH_SOURCE":
		r.facts.Opaque = true
	case slices.Contains([]string{"PATH", "IFS", "ENV", "SHELLOPTS", "BASHOPTS", "PROMPT_COMMAND", "PS0", "PS1", "PS2", "PS4", "CDPATH"}, name):
		r.facts.Opaque = true
	}
}

// declare inspects declare, export and the like. A name reference or an integer variable is
// evaluated when a value is assigned to it.
func (r *reader) declare(d *syntax.DeclClause) {
	for _, a := range d.Args {
		if !a.Naked || a.Value == nil {
			continue
		}
		text, ok := literal(a.Value)
		if !ok || strings.Contains(text, "[") || strings.HasPrefix(text, "-") && strings.ContainsAny(text, "ni") {
			r.facts.Opaque = true
		}
	}
}

// arithmetic inspects an arithmetic expression. The shell evaluates a variable's value in it as an
// expression too, and that can run commands.
func (r *reader) arithmetic(x syntax.ArithmExpr) {
	if !number(x) {
		r.facts.Opaque = true
	}
}

// number reports whether x consists of numbers alone.
func number(x syntax.ArithmExpr) bool {
	if x == nil {
		return true
	}
	all := true
	syntax.Walk(x, func(n syntax.Node) bool {
		if w, ok := n.(*syntax.Word); ok {
			text, ok := literal(w)
			all = all && ok && strings.Trim(text, "0123456789") == ""
		}
		return true
	})
	return all
}

// call inspects one simple command.
func (r *reader) call(c *syntax.CallExpr, known map[string]uint, depth int) {
	if len(c.Args) == 0 {
		return
	}
	var words []string // "" for a word whose value is not known
	for i, w := range c.Args {
		text, _ := literal(w)
		if expands(w) && (i > 0 || text != "[") {
			text = ""
		}
		words = append(words, text)
	}
	if end, ok := known[words[0]]; ok && end <= c.Pos().Offset() {
		return // the body is inspected where it is defined
	}
	r.run(words, depth)
}

// wrappers run the program that their arguments name. A value lists the options that take an
// argument of their own.
var wrappers = map[string]string{
	"env": "uC", "nice": "n", "nohup": "", "time": "fo", "timeout": "ks", "setsid": "", "stdbuf": "ioe", "exec": "a", "command": "",
	"builtin": "", "sudo": "ugpCDhRrTtU", "doas": "uC", "ionice": "cnp", "chroot": "", "unshare": "", "xargs": "aEdILnPs", "busybox": "", "toybox": "",
}

var shells = map[string]bool{"sh": true, "bash": true, "dash": true, "ash": true, "zsh": true, "ksh": true, "mksh": true}

// runners run code from their arguments, or from outside the line.
var runners = map[string]bool{
	"source": true, ".": true, "trap": true, "alias": true, "hash": true, "enable": true, "bind": true, "complete": true, "compgen": true, "fc": true,
	"parallel": true, "su": true, "runuser": true, "script": true, "watch": true, "flock": true, "strace": true, "ltrace": true, "gdb": true, "setpriv": true,
	"taskset": true, "chrt": true, "nsenter": true, "start-stop-daemon": true, "systemd-run": true,
}

// writers write to the files that their arguments name; true means only to the last one.
var writers = map[string]bool{
	"tee": false, "rm": false, "rmdir": false, "unlink": false, "shred": false, "mv": false, "touch": false, "truncate": false, "mkdir": false, "mkfifo": false,
	"mknod": false, "chmod": false, "chown": false, "chgrp": false, "cp": true, "install": true, "ln": true, "rsync": true,
}

// run inspects a program with its arguments.
func (r *reader) run(words []string, depth int) {
	if len(words) == 0 {
		return
	}
	if words[0] == "" { // $program
		r.facts.Opaque = true
		return
	}
	if depth > maxNested {
		r.addOpaque(words)
		return
	}
	name, args := path.Base(words[0]), words[1:]
	r.facts.Programs = append(r.facts.Programs, name)
	options, wraps := wrappers[name]
	switch {
	case runners[name] || strings.HasPrefix(name, "ld-linux"):
		r.addOpaque(args)
	case name == "eval":
		if slices.Contains(args, "") {
			r.facts.Opaque = true
			return
		}
		r.line(strings.Join(args, " "), depth+1)
	case name == "cd" || name == "pushd" || name == "popd":
		r.changeDir(args)
	case name == "test" || name == "[" || name == "printf" || name == "read" || name == "unset" || name == "mapfile" || name == "readarray":
		// They take names of variables, and the shell evaluates an index in such a name.
		if slices.ContainsFunc(args, func(w string) bool { return w == "-v" || w == "-R" || w == "-C" }) ||
			name != "test" && name != "[" && name != "printf" && slices.ContainsFunc(args, func(w string) bool { return w == "" || strings.Contains(w, "[") }) {
			r.facts.Opaque = true
		}
	case shells[name]:
		r.shell(args, depth)
	case name == "find":
		for i, w := range words {
			if (w == "-exec" || w == "-execdir" || w == "-ok" || w == "-okdir") && i+1 < len(words) {
				r.run(words[i+1:], depth+1)
			}
		}
	case wraps:
		rest, known := skipOptions(name, options, args)
		if !known {
			r.addOpaque(args)
			return
		}
		if _, again := wrappers[path.Base(first(rest))]; name == "xargs" && (again || shells[path.Base(first(rest))]) {
			r.facts.Opaque = true // the program comes from standard input
		}
		r.run(rest, depth+1)
	}
	r.addWrites(name, args)
}

func first(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return words[0]
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

// addWrites adds the files that a program visibly writes to.
func (r *reader) addWrites(name string, args []string) {
	last, ok := writers[name]
	inPlace := name == "sed" && slices.ContainsFunc(args, func(w string) bool {
		return strings.HasPrefix(w, "--in-place") || strings.HasPrefix(w, "-") && !strings.HasPrefix(w, "--") && strings.Contains(w, "i")
	})
	if name == "dd" {
		for _, w := range args {
			if to, ok := strings.CutPrefix(w, "of="); ok {
				r.writes = append(r.writes, to)
			}
		}
	}
	if !ok && !inPlace {
		return
	}
	var names []string
	for i, w := range args {
		if to, ok := strings.CutPrefix(w, "--target-directory="); ok {
			r.writes = append(r.writes, to)
		}
		if w == "-t" && last && i+1 < len(args) {
			r.writes = append(r.writes, args[i+1])
		}
		if w != "" && w[0] != '-' {
			names = append(names, w)
		}
	}
	if last && len(names) > 1 {
		names = names[len(names)-1:]
	}
	r.writes = append(r.writes, names...)
}

// shell inspects the arguments of a shell. The argument of -c is a line; all others name a script
// whose text is not known here.
func (r *reader) shell(args []string, depth int) {
	isLine := false
	for len(args) > 0 {
		w := args[0]
		if w == "" || w[0] != '-' && w[0] != '+' {
			break
		}
		args = args[1:]
		switch {
		case w == "--" || w == "-":
		case strings.HasPrefix(w, "--"):
			if w == "--rcfile" || w == "--init-file" {
				r.facts.Opaque = true
				args = args[min(1, len(args)):]
			}
			continue
		default:
			isLine = isLine || w[0] == '-' && strings.Contains(w, "c")
			if strings.ContainsAny(w, "oO") { // each takes the name of an option
				args = args[min(strings.Count(w, "o")+strings.Count(w, "O"), len(args)):]
			}
			continue
		}
		break
	}
	if !isLine || first(args) == "" {
		r.addOpaque(args)
		return
	}
	r.line(args[0], depth+1)
}

// skipOptions returns the words after a wrapper's options and assignments, and after the first
// argument of timeout and chroot. known is false if an option may or may not take the next word.
func skipOptions(name, takes string, args []string) (rest []string, known bool) {
	for len(args) > 0 {
		w := args[0]
		switch {
		case w == "--":
			args = args[1:]
		case strings.HasPrefix(w, "--"):
			if !strings.Contains(w, "=") || strings.HasPrefix(w, "--split-string") {
				return nil, false
			}
			args = args[1:]
			continue
		case strings.HasPrefix(w, "-") && len(w) > 1:
			if name == "env" && strings.Contains(w, "S") {
				return nil, false // -S has a syntax of its own
			}
			args = args[1:]
			if i := strings.IndexAny(w[1:], takes); i == len(w)-2 && len(args) > 0 {
				args = args[1:]
			}
			continue
		case (name == "env" || name == "sudo" || name == "doas") && strings.Contains(w, "="):
			args = args[1:]
			continue
		}
		break
	}
	if (name == "timeout" || name == "chroot") && len(args) > 0 {
		args = args[1:]
	}
	return args, true
}

func (r *reader) redirect(n *syntax.Redirect) {
	text, ok := literal(n.Word)
	if slices.Contains([]syntax.RedirOperator{syntax.RdrIn, syntax.Hdoc, syntax.DashHdoc, syntax.WordHdoc, syntax.DplIn}, n.Op) {
		return // input only
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
				b.WriteString(unescape(lit.Value))
			}
		default:
			return "", false
		}
	}
	text := b.String()
	return text, text != ""
}

// expands reports whether the shell expands a word: {curl,x}, /usr/bin/c?rl.
func expands(w *syntax.Word) bool {
	for _, p := range w.Parts {
		if lit, ok := p.(*syntax.Lit); ok && strings.ContainsAny(lit.Value, "{*?[~") {
			return true
		}
	}
	return false
}

// unescape removes backslashes: c\url is curl.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
			if s[i] == '\n' {
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// hostPatterns match hosts in any text: URLs, IP addresses, user@host, bash's /dev/tcp.
var hostPatterns = sync.OnceValue(func() []*regexp.Regexp {
	return []*regexp.Regexp{
		regexp.MustCompile(`(?i)[a-z][a-z0-9+.-]*://(?:[^/@\s"'` + "`" + `]*@)?(\[[0-9a-f:.]+\]|[^/:?#\s"'` + "`" + `\\)]+)`),
		regexp.MustCompile(`(?i)/dev/(?:tcp|udp)/([^/\s"']+)/`),
		regexp.MustCompile(`\b(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})\b`),
		regexp.MustCompile(`(?i)(?:^|[\s"'=])[a-z0-9._-]+@([a-z0-9-]+(?:\.[a-z0-9-]+)+)`),
	}
})

// hosts returns the hosts that a text mentions.
func hosts(text string) []string {
	if len(text) > maxLine {
		text = text[:maxLine]
	}
	var found []string
	for _, re := range hostPatterns() {
		for _, m := range re.FindAllStringSubmatch(text, 1000) {
			found = append(found, strings.ToLower(strings.Trim(m[1], "[].")))
		}
	}
	return found
}
