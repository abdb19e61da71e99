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

// byPattern returns a finder of failures in text that matches an expression with the groups name,
// value and, at the end of the text that is kept, all. The last match counts.
func byPattern(expr string) func(stderr string) *api.CodeFailure {
	compiled := pattern(expr)
	return func(stderr string) *api.CodeFailure {
		re := compiled()
		all := re.FindAllStringSubmatchIndex(stderr, -1)
		if len(all) == 0 {
			return nil
		}
		m := all[len(all)-1]
		group := func(name string) string {
			if i := 2 * re.SubexpIndex(name); i > 0 && m[i] >= 0 {
				return stderr[m[i]:m[i+1]]
			}
			return ""
		}
		f := &api.CodeFailure{Name: group("name"), Value: strings.TrimSpace(group("value")), Traceback: stderr[m[0]:]}
		if f.Name == "" {
			f.Name = "Error"
		}
		return f
	}
}
