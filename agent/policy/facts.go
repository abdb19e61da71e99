package policy

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"mvdan.cc/sh/v3/syntax"
)

// Facts are what a rule can look at. Each is a variable of the name in its comment.
type Facts struct {
	Tool      string         // tool
	Arguments map[string]any // arguments: as the tool has read them, not the model's text
	Command   string         // command: a shell line; "" for other tools

	Words    []string // words: the line's literal words
	Programs []string // programs: base names of what it runs, as far as it says so itself
	Opaque   bool     // opaque: it runs what cannot be told by reading it, or cannot be read
	Paths    []string // paths: absolute names that it mentions, relative ones from the working directory
	Writes   []string // writes: those of them that it writes to, as far as it says so itself
	Hosts    []string // hosts: names and addresses that it mentions, in lower case and without port

	WorkingDir, InputDir, OutputDir string // working_dir, input_dir, output_dir

	Turn    int                // turn: from 1
	Repeats int                // repeats: how often the run has made the very same call before
	Spent   map[string]float64 // spent: turns, tokens, cost (dollars), seconds, cpu_seconds
	Budget  map[string]float64 // budget: of the same names; 0 where there is no ceiling
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
	// maxLine bounds the command lines that are read; longer ones are opaque.
	maxLine = 256 << 10
	// maxNested bounds lines within lines: bash -c "bash -c ...".
	maxNested = 8
)

// Shell reads a command line and fills in what it says: words, programs, paths, writes, hosts, opaque.
func (f *Facts) Shell(line string) {
	f.Command = line
	r := reader{facts: f}
	r.line(line, 0)
	f.Hosts = append(f.Hosts, hosts(line)...)
	for _, l := range []*[]string{&f.Words, &f.Programs, &f.Paths, &f.Writes, &f.Hosts} {
		slices.Sort(*l)
		*l = slices.Compact(*l)
	}
}

// File says that a tool reads or writes one file.
func (f *Facts) File(name string, written bool) {
	name = f.absolute(name)
	f.Paths = append(f.Paths, name)
	if written {
		f.Writes = append(f.Writes, name)
	}
}

func (f *Facts) absolute(name string) string {
	if !path.IsAbs(name) {
		name = path.Join(f.WorkingDir, name)
	}
	return path.Clean(name)
}

type reader struct{ facts *Facts }

func (r *reader) line(line string, depth int) {
	if len(line) > maxLine || depth > maxNested {
		r.facts.Opaque = true
		return
	}
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(line), "")
	if err != nil {
		r.facts.Opaque = true
		// What a rule looks for may stand in it all the same.
		for w := range strings.FieldsSeq(line) {
			r.facts.Words = append(r.facts.Words, w)
			r.facts.Programs = append(r.facts.Programs, path.Base(strings.Trim(w, "\"'`();|&$")))
		}
		return
	}
	functions := map[string]bool{}
	syntax.Walk(file, func(n syntax.Node) bool {
		if d, ok := n.(*syntax.FuncDecl); ok && d.Name != nil {
			functions[d.Name.Value] = true
		}
		return true
	})
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.CallExpr:
			r.call(n, functions, depth)
		case *syntax.Redirect:
			r.redirect(n)
		case *syntax.Word:
			if text, ok := literal(n); ok {
				r.facts.Words = append(r.facts.Words, text)
				r.path(text)
			}
		}
		return true
	})
}

// call looks at one simple command.
func (r *reader) call(c *syntax.CallExpr, functions map[string]bool, depth int) {
	for _, a := range c.Assigns {
		// They decide what is run in the place of what is named.
		if a.Name != nil && (slices.Contains([]string{"PATH", "IFS", "BASH_ENV", "ENV", "SHELLOPTS"}, a.Name.Value) || strings.HasPrefix(a.Name.Value, "LD_")) {
			r.facts.Opaque = true
		}
	}
	if len(c.Args) == 0 {
		return
	}
	var words []string // "" where a word is not literal
	for _, w := range c.Args {
		text, _ := literal(w)
		words = append(words, text)
	}
	if words[0] != "[" && expands(c.Args[0]) {
		words[0] = ""
	}
	r.run(words, functions, depth)
}

// wrappers run the program that their arguments name; the value are the options that take an argument of their own.
var wrappers = map[string]string{
	"env": "uSC", "nice": "n", "nohup": "", "time": "fo", "timeout": "ks", "setsid": "", "stdbuf": "ioe", "exec": "a", "command": "",
	"builtin": "", "sudo": "ugpCDhRrTtU", "doas": "uC", "ionice": "cnp", "chroot": "", "unshare": "", "xargs": "aEdILnPs", "busybox": "", "toybox": "",
}

var shells = map[string]bool{"sh": true, "bash": true, "dash": true, "ash": true, "zsh": true, "ksh": true, "mksh": true}

// run looks at a program with its arguments.
func (r *reader) run(words []string, functions map[string]bool, depth int) {
	if len(words) == 0 || depth > maxNested {
		return
	}
	if words[0] == "" {
		r.facts.Opaque = true // $program
		return
	}
	name := path.Base(words[0])
	if functions[words[0]] {
		return // its body is read where it stands
	}
	r.facts.Programs = append(r.facts.Programs, name)
	switch {
	case name == "eval" || name == "source" || name == "." || name == "trap" || name == "alias" || name == "parallel":
		if name == "eval" && !slices.Contains(words[1:], "") {
			r.line(strings.Join(words[1:], " "), depth+1)
			return
		}
		r.facts.Opaque = true
	case shells[name]:
		r.shell(words[1:], depth)
	case name == "find":
		for i, w := range words {
			if (w == "-exec" || w == "-execdir" || w == "-ok" || w == "-okdir") && i+1 < len(words) {
				r.run(words[i+1:], nil, depth+1)
			}
		}
	default:
		if options, ok := wrappers[name]; ok {
			r.run(skipOptions(name, options, words[1:]), nil, depth+1)
		}
	}
}

// shell looks at the arguments of a shell: its -c is a line, all else is a script that is not here to be read.
func (r *reader) shell(args []string, depth int) {
	for i, w := range args {
		if strings.HasPrefix(w, "-") && !strings.HasPrefix(w, "--") && strings.Contains(w, "c") {
			for _, line := range args[i+1:] {
				if strings.HasPrefix(line, "-") {
					continue
				}
				if line == "" {
					break
				}
				r.line(line, depth+1)
				return
			}
			break
		}
	}
	r.facts.Opaque = true
}

// skipOptions gives what follows a wrapper's own options, assignments and, for some, first argument.
func skipOptions(name, takes string, args []string) []string {
	for len(args) > 0 {
		w := args[0]
		switch {
		case w == "--":
			args = args[1:]
		case strings.HasPrefix(w, "-") && len(w) > 1:
			args = args[1:]
			if len(w) == 2 && strings.Contains(takes, w[1:]) && len(args) > 0 {
				args = args[1:]
			}
			continue
		case name == "env" && strings.Contains(w, "="):
			args = args[1:]
			continue
		}
		break
	}
	if (name == "timeout" || name == "chroot") && len(args) > 0 {
		args = args[1:]
	}
	return args
}

func (r *reader) redirect(n *syntax.Redirect) {
	text, ok := literal(n.Word)
	if slices.Contains([]syntax.RedirOperator{syntax.RdrIn, syntax.Hdoc, syntax.DashHdoc, syntax.WordHdoc, syntax.DplIn}, n.Op) {
		return // it reads
	}
	if n.Op == syntax.DplOut && ok && (text == "-" || strings.Trim(text, "0123456789-") == "") {
		return // 2>&1; but >&name writes to the file
	}
	if ok && !expands(n.Word) {
		r.facts.Writes = append(r.facts.Writes, r.facts.absolute(text))
	} else {
		r.facts.Opaque = true
	}
}

// path takes a word that looks like a file's name: it has a slash, or begins with a tilde or a dot.
func (r *reader) path(word string) {
	if _, after, ok := strings.Cut(word, "="); ok && strings.Contains(after, "/") { // dd of=/x, --output=/x
		word = after
	}
	switch {
	case strings.Contains(word, "://"), len(word) > 4096, strings.ContainsAny(word, "\n"):
	case strings.HasPrefix(word, "~"):
		r.facts.Paths = append(r.facts.Paths, path.Join("/root", strings.TrimLeft(word, "~")))
	case strings.Contains(word, "/") || word == "." || word == "..":
		r.facts.Paths = append(r.facts.Paths, r.facts.absolute(word))
	}
}

// literal is what a word means where nothing is put into it when it runs.
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

// expands reports a word that the shell makes something else of: {curl,x}, /usr/bin/c?rl.
func expands(w *syntax.Word) bool {
	for _, p := range w.Parts {
		if lit, ok := p.(*syntax.Lit); ok && strings.ContainsAny(lit.Value, "{*?[~") {
			return true
		}
	}
	return false
}

// unescape takes the backslashes out: c\url is curl.
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

// hostPatterns find hosts in a text, whatever the program: URLs, addresses of both kinds, user@host, bash's /dev/tcp.
var hostPatterns = sync.OnceValue(func() []*regexp.Regexp {
	return []*regexp.Regexp{
		regexp.MustCompile(`(?i)[a-z][a-z0-9+.-]*://(?:[^/@\s"'` + "`" + `]*@)?(\[[0-9a-f:.]+\]|[^/:?#\s"'` + "`" + `\\)]+)`),
		regexp.MustCompile(`(?i)/dev/(?:tcp|udp)/([^/\s"']+)/`),
		regexp.MustCompile(`\b(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})\b`),
		regexp.MustCompile(`(?i)(?:^|[\s"'=])[a-z0-9._-]+@([a-z0-9-]+(?:\.[a-z0-9-]+)+)`),
	}
})

// hosts are those that a text mentions.
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
