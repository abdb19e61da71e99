package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"text/template"
	"text/template/parse"
	"unicode"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// formatUsage describes the flag --format.
const formatUsage = "print each by a Go `template`: '{{.ID}} {{json .Labels}}', 'table {{.ID}}\\t{{.Name}}' or json"

// format prints values by a template, as people know it from docker.
type format struct {
	template *template.Template
	table    bool // columns are aligned below a head
}

// newFormat parses a value of --format; nil if it is empty.
func newFormat(text string) (*format, error) {
	if text == "" {
		return nil, nil
	}
	f := new(format)
	if text == "json" {
		text = "{{json .}}"
	}
	if rest, ok := strings.CutPrefix(text, "table "); ok {
		f.table, text = true, strings.TrimSpace(rest)
	}
	text = strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(text) // a shell's quotes keep them as they are
	t, err := template.New("format").Option("missingkey=error").Funcs(template.FuncMap{
		"json":     toJSON,
		"join":     strings.Join,
		"split":    strings.Split,
		"lower":    func(v any) string { return strings.ToLower(fmt.Sprint(v)) },
		"upper":    func(v any) string { return strings.ToUpper(fmt.Sprint(v)) },
		"truncate": truncate,
	}).Parse(text)
	if err != nil {
		return nil, cmdline.Usagef("--format: %v", err)
	}
	f.template = t
	return f, nil
}

func toJSON(v any) (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return strings.TrimSuffix(b.String(), "\n"), err
}

func truncate(s string, n int) string {
	if r := []rune(s); n >= 0 && len(r) > n {
		return string(r[:n])
	}
	return s
}

// render returns the line of one value.
func (f *format) render(v any) (string, error) {
	var b strings.Builder
	if err := f.template.Execute(&b, v); err != nil {
		return "", cmdline.Usagef("--format: %v", err)
	}
	return visible(b.String()), nil
}

// visible escapes what a terminal would obey, but for line ends and tabs: names and labels may come
// from an image or a sandbox.
func visible(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		i := strings.IndexFunc(s, func(r rune) bool { return r == '\n' || r == '\t' })
		if i < 0 {
			i = len(s)
		}
		b.WriteString(cmdline.Printable(s[:i]))
		if s = s[i:]; s != "" {
			b.WriteByte(s[0])
			s = s[1:]
		}
	}
	return b.String()
}

// line prints one value, for lists that have no end.
func (f *format) line(w io.Writer, v any) error {
	line, err := f.render(v)
	if err == nil {
		_, err = fmt.Fprintln(w, line)
	}
	return err
}

// printAll prints a list by a format.
func printAll[T any](w io.Writer, f *format, list []T) error {
	var b bytes.Buffer
	if f.table {
		b.WriteString(f.head() + "\n")
	}
	for i := range list {
		if err := f.line(&b, list[i]); err != nil {
			return err
		}
	}
	if !f.table {
		_, err := w.Write(b.Bytes())
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	if _, err := t.Write(b.Bytes()); err != nil {
		return err
	}
	return t.Flush()
}

// head returns the head of a table: the name of the last field of each action, and the text between
// them.
func (f *format) head() string {
	var b strings.Builder
	for _, node := range f.template.Root.Nodes {
		switch n := node.(type) {
		case *parse.TextNode:
			b.Write(n.Text)
		case *parse.ActionNode:
			b.WriteString(heading(n.Pipe))
		}
	}
	return visible(b.String())
}

// heading returns the last field of a pipeline in capitals: CREATED AT for .CreatedAt.
func heading(pipe *parse.PipeNode) string {
	name := ""
	for _, cmd := range pipe.Cmds {
		for _, arg := range cmd.Args {
			if field, ok := arg.(*parse.FieldNode); ok {
				name = field.Ident[len(field.Ident)-1]
			}
		}
	}
	var b strings.Builder
	before := ' '
	for _, r := range name {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			b.WriteByte(' ')
		}
		b.WriteRune(unicode.ToUpper(r))
		before = r
	}
	return b.String()
}
