package policy

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"mvdan.cc/sh/v3/syntax"
)

// wrappers run the program that their arguments name. A value lists the options that take an
// argument of their own.
var wrappers = map[string]string{
	"env": "uC", "nice": "n", "nohup": "", "time": "fo", "timeout": "ks", "setsid": "", "stdbuf": "ioe", "exec": "a", "command": "",
	"builtin": "", "sudo": "ugpCDhRrTtU", "doas": "uC", "ionice": "cnp", "chroot": "", "unshare": "", "xargs": "aEdILnPs", "busybox": "", "toybox": "",
}

// shells take a line with -c. The dialects of foreign ones are not read in full.
var (
	shells        = map[string]bool{"sh": true, "bash": true, "dash": true, "ash": true, "zsh": true, "ksh": true, "mksh": true, "rbash": true}
	foreignShells = map[string]bool{"zsh": true, "ksh": true, "mksh": true}
)

// runners run code from their arguments, or from outside the line.
var runners = map[string]bool{
	"source": true, ".": true, "trap": true, "alias": true, "hash": true, "enable": true, "bind": true, "complete": true, "compgen": true, "compopt": true,
	"fc": true, "history": true, "coproc": true, "csh": true, "tcsh": true, "fish": true, "ed": true, "ex": true, "vi": true, "vim": true, "nvim": true,
	"view": true, "emacs": true, "parallel": true, "su": true, "runuser": true, "script": true, "watch": true, "flock": true, "strace": true, "ltrace": true,
	"gdb": true, "setpriv": true, "taskset": true, "chrt": true, "nsenter": true, "start-stop-daemon": true, "systemd-run": true,
}

// evaluators are the runners whose arguments the shell itself evaluates, now or later.
var evaluators = map[string]bool{"alias": true, "bind": true, "complete": true, "compgen": true, "compopt": true, "enable": true, "fc": true}

// writers write to the files that their arguments name; true means only to the last one.
var writers = map[string]bool{
	"tee": false, "rm": false, "rmdir": false, "unlink": false, "shred": false, "mv": false, "touch": false, "truncate": false, "mkdir": false, "mkfifo": false,
	"mknod": false, "chmod": false, "chown": false, "chgrp": false, "gzip": false, "gunzip": false, "bzip2": false, "bunzip2": false, "xz": false, "unxz": false,
	"cp": true, "install": true, "ln": true, "rsync": true,
}

// hooks lists, by program, the options that make it run another program. The value of a long option
// may be any beginning of its name.
var hooks = map[string][]string{
	"sort": {"--compress-program"},
	"tar":  {"-I", "-F", "--use-compress-program", "--to-command", "--checkpoint-action", "--rsh-command", "--rmt-command", "--info-script", "--new-volume-script"},
	"zip":  {"-TT", "--unzip-command"},
	"sed":  {"-f", "--file"},
	"awk":  {"-l", "-i", "-E", "--load", "--include", "--exec"},
	"find": {}, "more": {},
	"split": {"--filter"},
	"git": {
		"-c", "-x", "-O", "--exec", "--exec-path", "--config-env", "--upload-pack", "--receive-pack", "--extcmd", "--open-files-in-pager",
		"--upload-archive",
	},
	"rg": {"--pre", "--hostname-bin"}, "man": {"-P", "-H", "--pager", "--html"}, "less": {"-P"}, "rsync": {"-e", "--rsh", "--rsync-path"},
	"gcc": {"-wrapper", "-fplugin", "-specs", "-B"}, "g++": {"-wrapper", "-fplugin", "-specs", "-B"}, "cc": {"-wrapper", "-fplugin", "-specs", "-B"},
	"go": {"-toolexec", "-exec", "-vettool"}, "tcpdump": {"-z"}, "scp": {"-S", "-o"}, "ssh": {"-o"}, "curl": {"-K", "--config"},
	"wget": {"--use-askpass"}, "jobs": {"-x"},
}

// variants lists the other names of programs.
var variants = map[string]string{"gawk": "awk", "mawk": "awk", "nawk": "awk", "gsed": "sed", "gtar": "tar", "bsdtar": "tar", "gsort": "sort", "gfind": "find"}

// interpreters lists the options that are followed by a program's text.
var interpreters = map[string]string{
	"python": "c", "python2": "c", "python3": "c", "perl": "eE", "ruby": "e", "node": "ep", "nodejs": "ep", "Rscript": "e", "php": "r", "lua": "e",
}

// These variables make programs run code, and so do those that begin with LD_ and GIT_. The
// evaluated ones a shell evaluates.
var (
	evaluatedVariables = []string{"ENV", "SHELLOPTS", "BASHOPTS", "PROMPT_COMMAND", "PS0", "PS1", "PS2", "PS4"}
	codeVariables      = []string{
		"PATH", "IFS", "CDPATH", "SHELL", "TEXTDOMAIN", "TEXTDOMAINDIR", "GCONV_PATH", "LOCPATH", "NLSPATH", "HOSTALIASES", "RES_OPTIONS",
		"PAGER", "MANPAGER", "MANOPT", "LESS", "LESSOPEN", "LESSCLOSE", "LESSKEY", "EDITOR", "VISUAL", "FCEDIT", "BROWSER", "TAR_OPTIONS", "TAPE", "ZIPOPT",
		"RSYNC_RSH", "CVS_RSH", "GREP_OPTIONS", "AWKPATH", "AWKLIBPATH", "MAKEFILES", "MAKEFLAGS", "GNUMAKEFLAGS", "GCC_EXEC_PREFIX", "COMPILER_PATH",
		"PERL5OPT", "PERL5DB", "RUBYOPT", "NODE_OPTIONS", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONWARNINGS",
		"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CURL_HOME", "WGETRC", "SYSTEMD_PAGER", "DEBUGINFOD_URLS",
	}
	// A literal directory of modules is as readable as the name of a script.
	moduleVariables = []string{"PYTHONPATH", "PERL5LIB", "PERLLIB", "RUBYLIB", "NODE_PATH", "CLASSPATH", "LUA_PATH", "LUA_CPATH", "R_LIBS", "R_LIBS_USER"}
)

// named inspects the name of a variable that is assigned. Some decide which program a name runs, or
// are code themselves.
func (r *reader) named(name string) {
	switch {
	case slices.Contains(evaluatedVariables, name), strings.HasPrefix(name, "BASH_") && name != "BASH_SOURCE":
		r.evaluates()
	case strings.HasPrefix(name, "LD_"), strings.HasPrefix(name, "GIT_"), strings.HasPrefix(name, "DYLD_"), slices.Contains(codeVariables, name):
		r.facts.Opaque = true
	case strings.HasSuffix(name, "()") || strings.HasSuffix(name, "%%"): // a function in the environment
		r.evaluates()
	}
}

// modules inspects a variable that names directories of modules, and that does not do so literally.
func (r *reader) modules(name string) {
	if slices.Contains(moduleVariables, name) {
		r.facts.Opaque = true
	}
}

// systemDirs lists the directories whose programs are what their names say. Others may be writable.
var systemDirs = []string{"/bin/", "/usr/bin/", "/sbin/", "/usr/sbin/"}

// texts returns the values of words, "" for each that is not known.
func texts(words []word) []string {
	var out []string
	for _, w := range words {
		out = append(out, w.text)
	}
	return out
}

// mayBe reports whether a word whose value is not known can be text.
func (w word) mayBe(text string) bool {
	return w.text == "" && strings.HasPrefix(text, w.prefix) && strings.HasSuffix(text, w.suffix)
}

// mustBeNumber reports whether a word can be a number, and records that it has to be one.
func (r *reader) mustBeNumber(w word) bool {
	if w.number {
		r.variables.need(true, w.names...)
	}
	return w.number
}

// run inspects a program with its arguments.
func (r *reader) run(words []word, depth int) {
	if len(words) == 0 {
		return
	}
	if words[0].text == "" || strings.Contains(words[0].text, "{}") { // $program, xargs -I{} {}
		r.facts.Opaque = true
		return
	}
	if depth > maxNested {
		r.addOpaque(texts(words))
		return
	}
	name, args := path.Base(words[0].text), words[1:]
	if words[0].text == "[[" { // a keyword that sh does not know
		return
	}
	r.facts.Programs = append(r.facts.Programs, name)
	if dir, _ := path.Split(words[0].text); dir != "" && !slices.Contains(systemDirs, dir) {
		r.facts.Programs = append(r.facts.Programs, words[0].text)
	}
	options, wraps := wrappers[name]
	switch {
	case runners[name] || strings.HasPrefix(name, "ld-linux"):
		r.runner(name, args, depth)
	case name == "eval":
		if slices.ContainsFunc(args, func(w word) bool { return w.text == "" }) {
			r.evaluates()
			return
		}
		r.line(strings.Join(texts(args), " "), depth+1, syntax.LangPOSIX)
	case name == "cd" || name == "pushd" || name == "popd":
		r.changeDir(texts(args))
	case shells[name]:
		r.shell(name, args, depth)
	case wraps:
		r.wrapper(name, options, args, depth)
	default:
		r.builtin(name, args)
	}
	r.program(name, args, depth)
	r.addWrites(name, args)
}

// runner inspects a command whose arguments are code, or name it.
func (r *reader) runner(name string, args []word, depth int) {
	r.addOpaque(texts(args))
	if evaluators[name] || name == "history" || name == "hash" && len(args) > 0 {
		r.evaluates()
	}
	switch name {
	case "trap":
		args = slices.DeleteFunc(slices.Clone(args), func(w word) bool { return w.text == "--" })
		if len(args) == 0 || len(args) == 1 && args[0].text != "" {
			return
		}
		if args[0].text == "" {
			r.evaluates()
			return
		}
		r.line(args[0].text, depth+1, syntax.LangPOSIX)
	case "alias":
		for _, w := range args {
			if _, value, ok := strings.Cut(w.text, "="); ok {
				r.line(value, depth+1, syntax.LangPOSIX)
			}
		}
	}
}

// builtin inspects a command of the shell that takes names of variables. The shell evaluates a
// subscript in such a name, and some names arrive in options.
func (r *reader) builtin(name string, args []word) {
	switch name {
	case "test", "[":
		r.test(args)
	case "printf":
		r.printf(args)
	case "read", "mapfile", "readarray", "getopts", "wait":
		r.fills(name, args)
	case "unset":
		for _, w := range args {
			if w.text == "" || strings.Contains(w.text, "[") {
				r.evaluates()
			} else {
				r.fill(w.text)
			}
		}
	case "declare", "typeset", "local", "export", "readonly": // as a word: command declare
		for _, w := range args {
			r.declareWord(w)
			if strings.HasPrefix(w.text, "-") && strings.ContainsAny(w.text, "aA") { // later values of the name are not followed
				r.evaluates()
			}
		}
	case "let":
		for _, w := range args {
			if w.text == "" {
				r.evaluates()
			} else {
				r.letText(w.text)
			}
		}
	case "set":
		r.set(args)
	case "shopt":
		for _, w := range args {
			if !slices.Contains([]string{
				"-s", "-u", "-q", "-p", "-sq", "-qs", "nullglob", "globstar", "dotglob", "nocaseglob", "failglob", "nocasematch", "extglob",
				"inherit_errexit", "lastpipe", "globasciiranges", "globskipdots", "checkwinsize", "histappend", "xpg_echo",
			}, w.text) {
				r.facts.Opaque = true
			}
		}
	}
}

// test inspects test and [, in which -v takes the name of a variable. An operator can also stand in
// a word that is not known.
func (r *reader) test(args []word) {
	for i, w := range args {
		isOption := w.text == "-v" || w.text == "-R"
		if w.text == "" {
			isOption = w.mayBe("-v") || w.mayBe("-R")
			if w.many && (isOption || w.pattern == "") && !r.mustBeNumber(w) { // $x may be several words
				r.evaluates()
			}
		}
		if isOption && i+1 < len(args) {
			if name := args[i+1]; (name.text == "" || strings.Contains(name.text, "[")) && !r.mustBeNumber(w) && !r.mustBeNumber(name) {
				r.evaluates()
			}
		}
	}
}

// printf inspects printf, whose first argument may be -v with the name of a variable.
func (r *reader) printf(args []word) {
	if len(args) == 0 {
		return
	}
	w := args[0]
	switch {
	case w.text == "--":
	case strings.HasPrefix(w.text, "-v"):
		name := w.text[2:]
		if name == "" && len(args) > 1 {
			name = args[1].text
		}
		r.facts.Opaque = true
		r.fill(name)
		if !isName(name) {
			r.evaluates()
		}
	case w.text != "":
	case w.pattern != "" && w.prefix != "" && w.prefix[0] != '-':
	case w.many,
		// In -vNAME, a literal end tells whether it can be a name.
		(w.prefix == "" || w.prefix == "-" || strings.HasPrefix(w.prefix, "-v")) && (strings.HasSuffix(w.suffix, "]") ||
			!strings.ContainsFunc(w.suffix, func(c rune) bool { return c != '_' && !isAlphanumeric(c) })):
		if !r.mustBeNumber(w) {
			r.evaluates()
		}
	}
}

// fills inspects the commands that assign to the variables that they name.
func (r *reader) fills(name string, args []word) {
	takes := map[string]string{"read": "pdnNtui", "mapfile": "dnOsuc", "readarray": "dnOsuc"}[name]
	if name == "wait" && !slices.ContainsFunc(args, func(w word) bool { return w.text == "" && !w.number || strings.HasPrefix(w.text, "-") }) {
		for _, w := range args {
			r.mustBeNumber(w)
		}
		return
	}
	for i := 0; i < len(args); i++ {
		w := args[i]
		switch {
		case w.text == "", strings.Contains(w.text, "["), takes == "dnOsuc" && strings.HasPrefix(w.text, "-") && strings.Contains(w.text, "C"):
			r.evaluates()
		case strings.HasPrefix(w.text, "-") && len(w.text) > 1:
			for j := 2; j < len(w.text); j++ {
				r.fillArray(w.text[j:]) // -aNAME
			}
			if strings.ContainsAny(w.text[len(w.text)-1:], takes) && takes != "" && i+1 < len(args) && !args[i+1].many {
				i++
			}
		default:
			r.fillArray(w.text)
		}
	}
}

func (r *reader) fillArray(name string) {
	r.fill(name)
	r.variables.arrays[name] = true
}

// set inspects the options of set. Some change how the shell reads the rest of the line.
func (r *reader) set(args []word) {
	for i := 0; i < len(args); i++ {
		w := args[i].text
		switch {
		case w == "--" || w == "-":
			return
		case w == "":
			if args[i].prefix == "" || args[i].prefix[0] == '-' {
				r.facts.Opaque = true
			}
		case w[0] != '-' && w[0] != '+':
			return
		case w[0] == '-' && strings.ContainsAny(w, "kH"):
			r.facts.Opaque = true
		case strings.HasSuffix(w, "o") && i+1 < len(args):
			i++
			if w[0] == '-' && !slices.Contains([]string{
				"allexport", "braceexpand", "errexit", "errtrace", "functrace", "hashall", "ignoreeof", "monitor", "noclobber", "noexec", "noglob", "nolog",
				"notify", "nounset", "onecmd", "physical", "pipefail", "privileged", "verbose", "xtrace",
			}, args[i].text) {
				r.facts.Opaque = true
			}
		}
	}
}

// wrapper inspects a program that runs another.
func (r *reader) wrapper(name, options string, args []word, depth int) {
	rest, known := skipOptions(name, options, args)
	if !known {
		r.addOpaque(texts(args))
		return
	}
	for _, w := range args[:len(args)-len(rest)] {
		if w.text == "" {
			r.facts.Opaque = true
		}
	}
	if name == "env" && len(rest) > 0 && rest[0].text == "" {
		r.evaluates() // $x may assign a variable that is evaluated
	}
	if name == "xargs" && len(rest) > 0 {
		inner := path.Base(rest[0].text)
		if _, again := wrappers[inner]; again || shells[inner] || runners[inner] || inner == "eval" {
			r.facts.Opaque = true // the program comes from standard input
			if shells[inner] && len(args) > len(rest) && slices.ContainsFunc(args[:len(args)-len(rest)], func(w word) bool { return strings.HasPrefix(w.text, "-") && strings.ContainsAny(w.text, "Ii") }) {
				r.evaluates() // data takes the place of {} in the line
			}
		}
	}
	r.run(rest, depth+1)
}

// program inspects the arguments of programs that can run others, or write files.
func (r *reader) program(name string, args []word, depth int) {
	if v, ok := variants[name]; ok {
		name = v
	}
	if letters, ok := interpreters[name]; ok {
		for i, w := range args {
			if len(w.text) > 1 && w.text[0] == '-' && w.text[1] != '-' && strings.ContainsAny(w.text[len(w.text)-1:], letters) && i+1 < len(args) {
				r.code(args[i+1])
			}
		}
	}
	hooks, ok := hooks[name]
	if !ok {
		return
	}
	ended := false // by --
	for _, w := range args {
		switch {
		case ended:
		case w.text == "--":
			ended = true
		case w.text == "" && w.prefix == "":
			if w.pattern != "" {
				r.facts.Opaque = true // * may be an option
			} else if w.of != "" {
				r.variables.operands[w.of] = true
			}
		case slices.ContainsFunc(hooks, func(option string) bool {
			return isOption(w.prefix, option, name == "tar" || name == "sed" || name == "zip")
		}):
			r.facts.Opaque = true
			if _, command, ok := strings.Cut(w.text, "="); ok {
				r.addOpaque(strings.Fields(command))
			}
		}
	}
	switch name {
	case "find":
		for i, w := range args {
			switch w.text {
			case "-exec", "-execdir", "-ok", "-okdir":
				if i+1 < len(args) {
					if shells[path.Base(args[i+1].text)] && slices.ContainsFunc(args[i+2:], func(w word) bool { return strings.Contains(w.prefix, "{}") && w.text != "{}" }) {
						r.evaluates() // a name takes the place of {} in the line
					}
					r.run(args[i+1:], depth+1)
				}
			case "-fprint", "-fprint0", "-fls", "-fprintf":
				if i+1 < len(args) {
					r.write(args[i+1])
				}
			case "-delete":
				for _, at := range args {
					if strings.HasPrefix(at.prefix, "-") || at.text == "(" || at.text == "!" {
						break
					}
					r.write(at)
				}
			}
		}
	case "awk":
		r.awk(args)
	case "sed":
		r.sed(args)
	case "tar":
		r.tar(args)
	case "git":
		if slices.ContainsFunc(args, func(w word) bool {
			return slices.Contains([]string{"filter-branch", "foreach", "bisect", "difftool", "mergetool"}, w.text)
		}) {
			r.facts.Opaque = true
		}
	}
}

// isOption reports whether a word is an option: -I, -IVALUE; --to-command=x, --to-c=x; and -cIVALUE
// if clusters is set.
func isOption(w, option string, clusters bool) bool {
	name, _, _ := strings.Cut(w, "=")
	switch {
	case strings.HasPrefix(option, "--"):
		return len(name) > 2 && strings.HasPrefix(option, name)
	case len(option) > 2:
		return strings.HasPrefix(w, option)
	}
	return strings.HasPrefix(w, option) || clusters && len(w) > 1 && w[0] == '-' && w[1] != '-' && strings.Contains(w, option[1:])
}

// code inspects a word that is a program's text. Only numbers may take the place of its variables.
func (r *reader) code(w word) {
	switch {
	case w.text != "":
	case w.number:
		r.variables.need(false, w.names...)
	default:
		r.facts.Opaque = true
	}
}

// operand returns the index of the first argument that is no option. takes lists the options that
// take the next argument.
func operand(args []word, takes string) int {
	for i := 0; i < len(args); i++ {
		w := args[i].prefix
		switch {
		case args[i].text == "--":
			return i + 1
		case len(w) < 2 || w[0] != '-':
			return i
		case len(w) == 2 && strings.Contains(takes, w[1:]):
			i++
		}
	}
	return len(args)
}

// awkPatterns match awk programs that run commands, and those that pipe or write their output.
var awkPatterns = sync.OnceValue(func() [3]*regexp.Regexp {
	return [...]*regexp.Regexp{
		regexp.MustCompile(`system|getline|@load|@include|@\w+\s*\(`),
		regexp.MustCompile(`(?s)print.*([^|]\|([^|]|$)|>)`),
		regexp.MustCompile(`"(\\.|[^"\\])*"`),
	}
})

// awk inspects an awk program.
func (r *reader) awk(args []word) {
	if slices.ContainsFunc(args, func(w word) bool { return strings.HasPrefix(w.prefix, "-f") || strings.HasPrefix(w.prefix, "--file") }) {
		return // the name of a script, as for other interpreters
	}
	i := operand(args, "vF")
	if i >= len(args) {
		return
	}
	r.code(args[i])
	runs, prints, quoted := awkPatterns()[0], awkPatterns()[1], awkPatterns()[2]
	text := args[i].text
	stripped := text
	if !strings.Contains(text, "/") { // else a quote may be part of a regular expression
		stripped = quoted.ReplaceAllString(text, `""`)
	}
	if runs.MatchString(text) || prints.MatchString(stripped) {
		r.facts.Opaque = true
	}
}

// sed inspects the scripts of sed, which can run commands (e) and write files (w).
func (r *reader) sed(args []word) {
	given := false
	for i := 0; i < len(args); i++ {
		w := args[i]
		value, isLong := strings.CutPrefix(w.prefix, "--expression=")
		switch {
		case w.text == "--":
		case isLong:
			given = true
			if w.text != "" {
				w.text, w.prefix = value, value
			}
			r.sedScript(w)
			continue
		case len(w.text) > 1 && w.text[0] == '-' && w.text[1] != '-':
			flags := w.text[1:]
			if j := strings.IndexByte(flags, 'e'); j >= 0 && !strings.ContainsAny(flags[:j], "il") {
				given = true
				if j+1 < len(flags) {
					r.sedScript(word{text: flags[j+1:]})
				} else if i+1 < len(args) {
					i++
					r.sedScript(args[i])
				}
			}
			continue
		}
	}
	if i := operand(args, "el"); !given && i < len(args) {
		r.sedScript(args[i])
	}
}

func (r *reader) sedScript(w word) {
	r.code(w)
	if w.text != "" && !sedReads(w.text) {
		r.facts.Opaque = true
	}
}

// sedReads reports whether a script certainly runs nothing and writes nothing.
func sedReads(s string) bool {
	// part returns the text after the next unescaped delimiter. Versions of sed differ about
	// delimiters in brackets, which are therefore not understood.
	part := func(s string, delimiter byte) (string, bool) {
		bracket := -1
		for i := 0; i < len(s); i++ {
			switch c := s[i]; {
			case c == '\\':
				i++
			case c == delimiter:
				return s[i+1:], bracket < 0
			case c == '[' && bracket < 0:
				bracket = i
			case c == ']' && bracket >= 0 && i > bracket+1 && (i > bracket+2 || s[bracket+1] != '^'):
				bracket = -1
			}
		}
		return "", false
	}
	var ok bool
	for {
		s = strings.TrimLeft(s, " \t\n;{}!,+~$0123456789") // addresses
		switch {
		case s == "":
			return true
		case s[0] == '/':
			if s, ok = part(s[1:], '/'); !ok {
				return false
			}
			s = strings.TrimLeft(s, "IM")
			continue
		case s[0] == '\\' && len(s) > 1:
			if s, ok = part(s[2:], s[1]); !ok {
				return false
			}
			continue
		}
		command := s[0]
		s = s[1:]
		switch command {
		case '=', 'd', 'D', 'g', 'G', 'h', 'H', 'n', 'N', 'p', 'P', 'x', 'z', 'F':
		case 'q', 'Q', 'l', 'L':
		case 's', 'y':
			if s == "" {
				return false
			}
			delimiter := s[0]
			if s, ok = part(s[1:], delimiter); !ok {
				return false
			}
			if s, ok = part(s, delimiter); !ok {
				return false
			}
			flags := strings.TrimLeft(s, "gpiIMm0123456789 \t")
			if flags != "" && !strings.ContainsRune(";}\n#", rune(flags[0])) {
				return false
			}
			s = flags
		case 'b', 't', 'T', ':', 'v': // GNU's labels end at a semicolon
			if i := strings.IndexAny(s, ";}\n"); i >= 0 {
				s = s[i:]
			} else {
				s = ""
			}
		case '#', 'a', 'i', 'c', 'r', 'R':
			_, s, _ = strings.Cut(s, "\n")
		default: // e, w, W
			return false
		}
	}
}

// tar inspects the files that tar writes.
func (r *reader) tar(args []word) {
	if len(args) == 0 {
		return
	}
	flags := strings.TrimPrefix(args[0].text, "-") // also without a dash
	if !strings.HasPrefix(args[0].text, "-") && strings.ContainsAny(flags, "IF") {
		r.facts.Opaque = true
	}
	extracts := strings.HasPrefix(flags, "x") || strings.Contains(flags, "x") && !strings.HasPrefix(flags, "-")
	for i, w := range args {
		switch {
		case w.text == "-C" && i+1 < len(args) && extracts:
			r.write(args[i+1])
		case i == 0 && strings.HasSuffix(flags, "f") && !strings.HasPrefix(flags, "-") && !extracts && !strings.Contains(flags, "t") && i+1 < len(args):
			r.write(args[i+1])
		}
	}
}

// write records a file that is written to.
func (r *reader) write(w word) {
	switch {
	case strings.Contains(w.text, "{}"): // of find or xargs
	case w.text != "":
		r.writes = append(r.writes, w.text)
	case w.pattern != "":
		r.writes = append(r.writes, r.matched(w.pattern)...)
	}
}

// matched returns names for a pattern: itself, and the input directory if the pattern may stand for
// it or for a file in it.
func (r *reader) matched(pattern string) []string {
	if rest, ok := strings.CutPrefix(pattern, "~"); ok {
		pattern = path.Join("/root", rest)
	}
	names := []string{pattern}
	input := path.Clean("/" + r.facts.InputDir)
	if r.facts.InputDir == "" {
		return names
	}
	for _, dir := range r.dirs {
		full := resolve(dir, []string{pattern})[0]
		parts, want := strings.Split(full, "/"), strings.Split(input, "/")
		if len(parts) > len(want) {
			parts = parts[:len(want)]
		} else {
			want = want[:len(parts)]
		}
		if len(parts) == len(strings.Split(input, "/")) && slices.EqualFunc(parts, want, mayMatch) {
			names = append(names, input)
		}
	}
	return names
}

// mayMatch reports whether a component of a pattern may stand for a name.
func mayMatch(pattern, name string) bool {
	if strings.Contains(pattern, "{") {
		return true
	}
	ok, err := path.Match(pattern, name)
	return ok || err != nil
}

// addWrites adds the files that a program visibly writes to.
func (r *reader) addWrites(name string, args []word) {
	last, ok := writers[name]
	switch name {
	case "sed":
		ok = slices.ContainsFunc(args, func(w word) bool {
			return strings.HasPrefix(w.text, "--in-place") || strings.HasPrefix(w.text, "-") && !strings.HasPrefix(w.text, "--") && strings.Contains(w.text, "i")
		})
	case "dd":
		for _, w := range args {
			if to, ok := strings.CutPrefix(w.text, "of="); ok {
				r.writes = append(r.writes, to)
			}
		}
	case "sort":
		for i, w := range args {
			if to, ok := strings.CutPrefix(w.text, "--output="); ok {
				r.writes = append(r.writes, to)
			} else if len(w.text) > 1 && w.text[0] == '-' && w.text[1] != '-' && strings.Contains(w.text, "o") {
				if _, to, _ := strings.Cut(w.text, "o"); to != "" {
					r.writes = append(r.writes, to)
				} else if i+1 < len(args) {
					r.write(args[i+1])
				}
			} else if w.text == "--output" && i+1 < len(args) {
				r.write(args[i+1])
			}
		}
	case "uniq", "xxd":
		if i := operand(args, "fswNlcogs"); i+1 < len(args) {
			r.write(args[i+1])
		}
	case "zip":
		if i := operand(args, ""); i < len(args) {
			r.write(args[i])
		}
	case "unzip":
		for i, w := range args {
			if w.text == "-d" && i+1 < len(args) {
				r.write(args[i+1])
			}
		}
	case "history":
		for _, w := range args {
			r.write(w)
		}
	case "split":
		if i := operand(args, "abClnt"); i+1 < len(args) {
			r.write(args[i+1])
		}
	case "gzip", "gunzip", "bzip2", "bunzip2", "xz", "unxz":
		ok = !slices.ContainsFunc(args, func(w word) bool {
			return w.text == "--stdout" || w.text == "--list" || w.text == "--test" || len(w.text) > 1 && w.text[0] == '-' && w.text[1] != '-' && strings.ContainsAny(w.text, "clt")
		})
	}
	if !ok {
		return
	}
	var names []word
	for i, w := range args {
		if to, ok := strings.CutPrefix(w.text, "--target-directory="); ok {
			r.writes = append(r.writes, to)
		}
		if w.text == "-t" && last && i+1 < len(args) {
			r.write(args[i+1])
		}
		if w.text != "" && w.text[0] != '-' || w.pattern != "" {
			names = append(names, w)
		}
	}
	if last && len(names) > 1 {
		names = names[len(names)-1:]
	}
	for _, w := range names {
		r.write(w)
	}
}

// shell inspects the arguments of a shell. The argument of -c is a line; all others name a script
// whose text is not known here.
func (r *reader) shell(name string, args []word, depth int) {
	dialect := syntax.LangPOSIX
	if name == "bash" || name == "rbash" {
		dialect = syntax.LangBash
	}
	if foreignShells[name] {
		r.facts.Opaque = true
	}
	isLine := false
	for len(args) > 0 {
		w := args[0].text
		if w == "" || w[0] != '-' && w[0] != '+' {
			break
		}
		args = args[1:]
		switch {
		case w == "--" || w == "-":
		case strings.HasPrefix(w, "--"):
			if w == "--rcfile" || w == "--init-file" {
				args = args[min(1, len(args)):]
			}
			if w != "--norc" && w != "--noprofile" {
				r.facts.Opaque = true // --login reads files, and so may others
			}
			if w == "--posix" {
				dialect = syntax.LangPOSIX
			}
			continue
		default:
			isLine = isLine || w[0] == '-' && strings.Contains(w, "c")
			if w[0] == '-' && strings.ContainsAny(w, "iklHsr") { // read files, or change how the line is read
				r.facts.Opaque = true
			}
			if strings.Contains(w, "a") || len(args) > 0 && args[0].text == "allexport" { // exports functions
				r.evaluates()
			}
			if n := strings.Count(w, "o") + strings.Count(w, "O"); n > 0 { // each takes the name of an option
				for _, option := range args[:min(n, len(args))] {
					if !slices.Contains([]string{"errexit", "nounset", "pipefail", "xtrace", "verbose", "noglob", "noclobber", "posix", "extglob", "globstar", "nullglob", "dotglob", "inherit_errexit"}, option.text) {
						r.facts.Opaque = true
					}
				}
				args = args[min(n, len(args)):]
			}
			continue
		}
		break
	}
	switch {
	case isLine && len(args) > 0 && args[0].text != "":
		r.line(args[0].text, depth+1, dialect)
	case isLine && len(args) > 0:
		r.addOpaque(texts(args))
		r.evaluates()
	default:
		r.addOpaque(texts(args))
	}
}

// skipOptions returns the words after a wrapper's options and assignments, and after the first
// argument of timeout and chroot. known is false if an option may or may not take the next word.
func skipOptions(name, takes string, args []word) (rest []word, known bool) {
	for len(args) > 0 {
		w := args[0].text
		switch {
		case w == "--":
			args = args[1:]
		case strings.HasPrefix(w, "--"):
			if !strings.Contains(w, "=") || isOption(w, "--split-string", false) {
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
