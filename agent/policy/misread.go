package policy

import (
	"regexp"
	"slices"
	"strings"
	"sync"

	"mvdan.cc/sh/v3/syntax"
)

// maxHeredocs bounds the here-documents of a line; a line with more is opaque.
const maxHeredocs = 100

// plainDelimiter matches the delimiters that the parser and all shells unquote alike.
var plainDelimiter = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:\\?[\w.+:=@%/,!-]+|'[\w.+:=@%/,! -]+'|"[\w.+:=@%/,! -]+")$`)
})

// misread reports whether a shell may read a line otherwise than the parser did.
func misread(file *syntax.File, line string) bool {
	if strings.ContainsAny(line, "\r\x00") { // The parser skips them. To a shell, \r is part of a word.
		return true
	}
	found, heredocs := false, 0
	var open []syntax.Node // the node and those around it
	syntax.Walk(file, func(n syntax.Node) bool {
		if n == nil {
			open = open[:len(open)-1]
			return true
		}
		open = append(open, n)
		switch n := n.(type) {
		case *syntax.Redirect:
			if n.Op == syntax.Hdoc || n.Op == syntax.DashHdoc {
				heredocs++
				found = found || heredocs > maxHeredocs || endsElsewhere(n, open, line)
			}
		case *syntax.TimeClause: // time -- NAME: a command follows the option
			first := n.Stmt
			for first != nil {
				pipe, ok := first.Cmd.(*syntax.BinaryCmd)
				if !ok {
					break
				}
				first = pipe.X
			}
			if first != nil {
				call, ok := first.Cmd.(*syntax.CallExpr)
				found = found || ok && len(call.Args) > 0 && strings.HasPrefix(newWord(call.Args[0]).prefix, "-")
			}
		}
		return true
	})
	return found
}

// endsElsewhere reports whether a shell may end a here-document at another line than the parser
// did. Text that the parser took for data would then be commands.
func endsElsewhere(r *syntax.Redirect, open []syntax.Node, line string) bool {
	word := line[r.Word.Pos().Offset():r.Word.End().Offset()]
	if !plainDelimiter().MatchString(word) {
		return true
	}
	delimiter := strings.Trim(word, `\'"`)
	quoted := delimiter != word
	end := r.Word.End()
	if r.Hdoc != nil {
		end = r.Hdoc.End() // after the delimiter
	}
	text := line[r.OpPos.Offset():end.Offset()]
	substituted := false
	for _, n := range open {
		switch n := n.(type) {
		case *syntax.CmdSubst:
			if n.Backquotes || !contains(n, r, end, line) { // backquotes remove backslashes first
				return true
			}
			substituted = true
		case *syntax.ProcSubst:
			if !contains(n, r, end, line) {
				return true
			}
			substituted = true
		}
	}
	if r.Hdoc == nil { // the delimiter follows at once
		return false
	}
	// The lines may include the rest of the command and other bodies, which can only add matches.
	lines := strings.Split(text, "\n")[1:]
	return len(lines) == 0 || slices.ContainsFunc(lines[:len(lines)-1], func(l string) bool {
		if r.Op == syntax.DashHdoc {
			l = strings.TrimLeft(l, "\t")
		}
		rest, begins := strings.CutPrefix(l, delimiter)
		return begins && rest == "" || // within an expansion, which the delimiter cuts
			begins && substituted && strings.ContainsAny(rest, ")}") || // the end of the substitution
			!quoted && strings.HasSuffix(l, `\`) // joined with the next line before it is compared
	}) || strings.TrimLeft(lines[len(lines)-1], "\t") != delimiter
}

// contains reports whether a here-document that begins within a substitution ends there, too.
func contains(n syntax.Node, r *syntax.Redirect, end syntax.Pos, line string) bool {
	return end.Offset() <= n.End().Offset() && strings.Contains(line[r.OpPos.Offset():n.End().Offset()], "\n")
}
