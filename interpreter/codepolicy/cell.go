package codepolicy

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/sandboxd/sandboxd/interpreter"
)

var (
	// wrappers are magics whose cell, or whose line, is Python that they run.
	wrappers = []string{"time", "timeit", "capture", "prun", "memit"}
	// displays are magics whose cell is shown.
	displays = []string{"html", "HTML", "markdown", "latex", "svg", "SVG", "javascript", "js"}
	// scriptMagics are magics whose cell, or whose line, is a script.
	scriptMagics = []string{"bash", "sh", "script", "system", "sx", "sc", "!"}
	// programs are magics and aliases of the same names as programs that they start.
	programs = []string{
		"pip", "conda", "mamba", "micromamba", "uv", "run",
		"ls", "lf", "lk", "ll", "ldir", "lx", "cat", "mkdir", "rmdir", "rm", "cp", "mv", "man", "more", "less",
	}

	// prompts are those of Python and IPython, which takes them away.
	prompts = regexp.MustCompile(`^\s*(?:(?:>>>|\.\.\.)(?:\s|$)|(?:In \[\d+\]|\.{3,}):\s?)+`)
	// assigned is the end of an assignment of a magic's result.
	assigned = regexp.MustCompile(`=\s*[!%]`)
	// breaks are ends of lines for IPython.
	breaks = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\v", "\n", "\f", "\n", "\x1c", "\n", "\x1d", "\n", "\x1e", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n")
)

// magics collects the imports of magics.
type magics struct{ found []Import }

// cell takes the magics out of the code of a Python context, and returns their imports. A shell
// escape imports subprocess, which runs it, and the programs that it names. So does a magic of a
// cell that is not known to run Python only.
func cell(src string) (string, []Import) {
	var m magics
	lines := strings.Split(breaks.Replace(src), "\n")
	at := 0
	for ; at < len(lines); at++ {
		first := strings.TrimSpace(prompts.ReplaceAllString(lines[at], ""))
		if first == "" {
			continue
		}
		magic, ok := strings.CutPrefix(first, "%%")
		if !ok {
			break
		}
		name, args := cut(magic)
		switch {
		case slices.Contains(displays, name):
			return "", m.found
		case !slices.Contains(wrappers, name):
			m.script(name, args, strings.Join(lines[at+1:], "\n"), at+1)
			return "", m.found
		}
		lines[at] = ""
		if name == "timeit" { // runs it before the cell
			lines[at] = options(args)
		}
	}
	unindent(lines[at:])
	alone := !slices.ContainsFunc(lines[min(at+1, len(lines)):], func(s string) bool { return strings.TrimSpace(s) != "" })
	for i := 0; i < len(lines); i++ {
		if _, what, _ := magic(lines[i]); what != 0 {
			to := i
			for to+1 < len(lines) && strings.HasSuffix(lines[to], `\`) {
				to++
			}
			whole := strings.ReplaceAll(strings.Join(lines[i:to+1], "\n"), "\\\n", " ")
			clear(lines[i : to+1])
			lines[i] = m.line(whole, i+1, alone)
			i = to
		} else if alone {
			m.automagic(lines[i], i+1)
		}
	}
	return strings.Join(lines, "\n"), m.found
}

// script reads a cell that a program runs.
func (m *magics) script(name, args, body string, line int) {
	args = options(args)
	m.runs(args, line, name == "script")
	program := name
	if name == "script" {
		program, _ = cut(args)
		program = path.Base(program)
	} else if name != "" && !slices.Contains(scriptMagics, name) {
		m.found = append(m.found, Import{Name: clip(name), Line: line, Language: "bash"})
	}
	lang := interpreter.Find(strings.ToLower(strings.TrimRight(program, "0123456789.")))
	if lang == nil || lang.Name == "bash" {
		if lang != nil || slices.Contains(scriptMagics, name) {
			m.runs(body, line+1, true)
		}
		return
	}
	for _, im := range imports(&Code{Language: lang.Name, Text: body}) {
		if im.Language == "" && lang.Name != "python" {
			im.Language = lang.Name
		}
		im.Line += line
		m.found = append(m.found, im)
	}
}

// runs notes a script, or arguments that are none.
func (m *magics) runs(script string, line int, isScript bool) {
	if len(m.found) >= maxImports {
		return
	}
	m.found = append(m.found, Import{Name: "subprocess", Line: line})
	if isScript {
		m.found = append(m.found, commands(script, line)...)
	}
}

// line returns a line that begins with a magic as Python.
func (m *magics) line(line string, n int, alone bool) string {
	start, what, rest := magic(line)
	for ; what != 0; _, what, rest = magic(line) {
		if what == '!' {
			m.runs(strings.TrimPrefix(rest, "!"), n, true)
			break
		}
		name, args := cut(rest)
		if slices.Contains(wrappers, name) {
			line, alone = options(args), true
			continue
		}
		m.named(name, args, n)
		break
	}
	if what == 0 {
		if alone {
			m.automagic(line, n)
		}
		return start + line
	}
	if strings.TrimSpace(start) != "" {
		return start + "None"
	}
	return start + "pass"
}

func (m *magics) named(name, args string, line int) {
	switch {
	case slices.Contains(scriptMagics, name):
		m.runs(args, line, true)
	case slices.Contains(programs, name):
		m.runs(name+" "+args, line, true)
	case (name == "load_ext" || name == "reload_ext") && args != "" && len(args) <= maxName:
		m.found = append(m.found, Import{Name: args, Line: line})
	}
}

// automagic reads the only line of a cell, which may be a magic without its sign.
func (m *magics) automagic(line string, n int) {
	name, args := cut(line)
	if before, _, ok := strings.Cut(name, "("); ok && (before == "sx" || before == "system") {
		m.runs("", n, false)
	} else if !strings.HasPrefix(args, "=") && !strings.HasPrefix(args, "(") {
		m.named(name, args, n)
	}
}

// cut splits a line behind its first word.
func cut(line string) (word, rest string) {
	line = strings.TrimSpace(line)
	at := strings.IndexFunc(line, unicode.IsSpace)
	if at < 0 {
		return line, ""
	}
	return line[:at], strings.TrimSpace(line[at:])
}

// options takes the options of a magic away.
func options(args string) string {
	for strings.HasPrefix(args, "-") {
		_, args = cut(args)
	}
	return args
}

// unindent takes indentation and prompts away, as IPython does if the first lines have them.
func unindent(lines []string) {
	for range 2 {
		if len(lines) == 0 {
			return
		}
		indent := lines[0][:len(lines[0])-len(strings.TrimLeft(lines[0], " \t"))]
		prompted := slices.ContainsFunc(lines[:min(2, len(lines))], prompts.MatchString)
		for i, line := range lines {
			if prompted {
				line = prompts.ReplaceAllString(line, "")
			}
			lines[i] = strings.TrimPrefix(line, indent)
		}
	}
}

// magic splits a line that is a shell escape or a magic, with a possible assignment before it. In
// Python's own grammar no line begins so, but in a string of many lines one may.
func magic(line string) (before string, what byte, rest string) {
	at := strings.IndexAny(line, "!%")
	if at < 0 {
		return "", 0, ""
	}
	if strings.TrimSpace(line[:at]) != "" {
		found := assigned.FindStringIndex(line)
		if found == nil {
			return "", 0, ""
		}
		at = found[1] - 1
		before := line[:at]
		quotes := strings.Count(before, `"`) + strings.Count(before, "'")
		if strings.Count(before, `"`)%2 != 0 || strings.Count(before, "'")%2 != 0 || quotes == 0 && strings.Contains(before, "#") {
			return "", 0, ""
		}
	}
	return line[:at], line[at], line[at+1:]
}
