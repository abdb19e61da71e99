package interpreter

import (
	"regexp"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/api"
)

// lastLine returns the offset of the last line of text that begins with prefix, or -1.
func lastLine(text, prefix string) int {
	for end := len(text); ; {
		at := strings.LastIndex(text[:end], prefix)
		if at <= 0 || text[at-1] == '\n' {
			return at
		}
		end = at
	}
}

// isDotted reports whether s is one or more identifiers with dots between them, as the names of
// exceptions are.
func isDotted(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" {
			return false
		}
		for i, c := range part {
			letter := c == '_' || c == '$' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
			if !letter && (i == 0 || c < '0' || c > '9') {
				return false
			}
		}
	}
	return true
}

// compileError returns the failure of a compiler with this output. Its value is the first line that
// says error, or else the first line.
func compileError(output string) *api.CodeFailure {
	first := ""
	for line := range strings.SplitSeq(output, "\n") {
		if first == "" {
			first = strings.TrimSpace(line)
		}
		if strings.Contains(line, "error") {
			first = strings.TrimSpace(line)
			break
		}
	}
	return &api.CodeFailure{Name: "CompileError", Value: first, Traceback: output}
}

// CompileFailure returns the failure of a compiler of the language with this output.
func (l *Language) CompileFailure(output string) *api.CodeFailure { return compileError(output) }

// pattern is a regular expression that is compiled at its first use.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

// A report is the form in which a language's runtime reports an uncaught exception.
type report struct {
	// head matches a whole line with the groups name, which is Error by default, and value.
	head func() *regexp.Regexp
	// first takes the first line that matches, not the last: causes come behind.
	first bool
	// with is part of every such report, behind the head; empty: nothing is.
	with string
	// until are beginnings of lines that end the value. Without any, the value is of one line.
	until []string
}

// maxHead bounds the lines that are compared with a head, in bytes.
const maxHead = 4 << 10

// find reads the report in a program's stderr, which may be hostile: it takes time in proportion to
// the text's length.
func (r *report) find(stderr string) *api.CodeFailure {
	re := r.head()
	var match []string
	at, rest := -1, 0
	for i := 0; i < len(stderr); {
		line, _, _ := strings.Cut(stderr[i:], "\n")
		if len(line) <= maxHead {
			if m := re.FindStringSubmatch(line); m != nil {
				match, at, rest = m, i, i+len(line)
				if r.first {
					break
				}
			}
		}
		i += len(line) + 1
	}
	if at < 0 || r.with != "" && !strings.Contains(stderr[rest:], r.with) {
		return nil
	}
	f := &api.CodeFailure{Name: "Error", Traceback: stderr[at:]}
	for i, group := range re.SubexpNames() {
		switch {
		case group == "name" && match[i] != "":
			f.Name = match[i]
		case group == "value":
			f.Value = match[i]
		}
	}
	if len(r.until) > 0 {
		f.Value = strings.TrimSpace(f.Value + stderr[rest:r.end(stderr, rest)])
	}
	return f
}

// end returns the offset, from rest on, of the first line that ends the value.
func (r *report) end(stderr string, rest int) int {
	for i := rest; i < len(stderr); {
		newline := strings.IndexByte(stderr[i:], '\n')
		if newline < 0 {
			break
		}
		i += newline + 1
		for _, prefix := range r.until {
			if strings.HasPrefix(stderr[i:], prefix) {
				return i
			}
		}
	}
	return len(stderr)
}
