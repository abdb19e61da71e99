// Package config reads files of settings: a YAML mapping of names to values. The command line reads
// them when a daemon starts, and the broker when a confined daemon is told to read them again.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"
)

// maxFile is the maximum size of a file, in bytes.
const maxFile = 256 << 10

// Kind is the type of a setting's value.
type Kind int

// The kinds. A Size or a time span is Text.
const (
	String Kind = iota // a string
	Text               // a string or an integer
	Bool
	Integer
	Number // an integer or a fraction
	List   // strings, or one string
)

// wants are the kinds as messages tell them.
var wants = map[Kind]string{
	String: "a string", Text: "a string or a number", Bool: "true or false", Integer: "an integer", Number: "a number",
	List: "a list of strings",
}

// Setting is one value of a file.
type Setting struct {
	Name   string
	Values []string // one, except of a [List]
	Place  Place
}

// Place is a position in a file. Line and Column count from 1.
type Place struct {
	File         string
	Line, Column int
}

func (p Place) String() string { return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column) }

// Error is a mistake in a file.
type Error struct {
	Place   Place
	Message string
}

func (e *Error) Error() string { return e.Place.String() + ": " + e.Message }

// Errorf returns a mistake at a place.
func Errorf(at Place, format string, args ...any) *Error {
	return &Error{at, fmt.Sprintf(format, args...)}
}

// Read returns the content of a file that only its reader and root can have written: it belongs to
// one of them, and its mode lets no other user write. A missing file is [os.ErrNotExist].
func Read(path string) ([]byte, error) {
	// Without O_NONBLOCK a FIFO would be waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("read config: %s is no regular file", path)
	case !ok || st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("read config: %s belongs to neither uid %d nor root: chown %d %s", path, os.Geteuid(), os.Geteuid(), path)
	case fi.Mode().Perm()&0o022 != 0:
		return nil, fmt.Errorf("read config: other users can write %s: chmod go-w %s", path, path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("read config: %s is larger than %d bytes", path, maxFile)
	}
	return data, nil
}

// ReadAll reads files like [Read], and returns the contents by path. It leaves missing ones out.
func ReadAll(paths []string) (map[string][]byte, error) {
	contents := make(map[string][]byte)
	for _, path := range paths {
		data, err := Read(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		contents[path] = data
	}
	return contents, nil
}

// Parse reads the settings of a file, in its order. Kinds has the names that it may set. It returns
// every mistake, each an *[Error], joined, with the settings that have none. An empty file sets
// nothing.
func Parse(file string, data []byte, kinds map[string]Kind) ([]Setting, error) {
	p := parser{file: file, kinds: kinds}
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, p.placed(err)
	case len(doc.Content) != 1 || doc.Content[0].ShortTag() == "!!null":
		return nil, nil
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, Errorf(Place{file, max(more.Line, 1), max(more.Column, 1)}, "a second document begins; write all settings into one")
	}
	p.mapping(doc.Content[0])
	return p.settings, errors.Join(p.errs...)
}

type parser struct {
	file     string
	kinds    map[string]Kind
	settings []Setting
	errs     []error
}

func (p *parser) fail(n *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, Errorf(p.place(n), format, args...))
}

func (p *parser) place(n *yaml.Node) Place { return Place{p.file, n.Line, n.Column} }

// placed returns an error of the YAML parser with its place. The parser knows the line only, and of
// the first line not even that.
func (p *parser) placed(err error) error {
	message, at := strings.TrimPrefix(err.Error(), "yaml: "), Place{p.file, 1, 1}
	if rest, ok := strings.CutPrefix(message, "line "); ok {
		line, after, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(line); err == nil {
			at.Line, message = n, after
		}
	}
	return &Error{at, message}
}

func (p *parser) mapping(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		p.fail(n, "want settings, each as NAME: VALUE on a line")
		return
	}
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		kind, known := p.kinds[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			p.fail(key, "the name of a setting is a word, such as log-level")
		case !known:
			p.fail(key, "unknown setting %q%s", key.Value, p.suggestion(key.Value))
		case seen[key.Value] > 0:
			p.fail(key, "%s is set twice, first in line %d; remove one", key.Value, seen[key.Value])
		default:
			seen[key.Value] = key.Line
			p.setting(key.Value, kind, value)
		}
	}
}

func (p *parser) setting(name string, kind Kind, n *yaml.Node) {
	nodes := []*yaml.Node{n}
	if kind == List && n.Kind == yaml.SequenceNode {
		nodes = n.Content
	}
	s := Setting{Name: name, Place: p.place(n), Values: []string{}}
	for _, e := range nodes {
		switch {
		case e.Kind == yaml.AliasNode:
			p.fail(e, "%s: aliases are not read; write the value", name)
			return
		case e.Kind == yaml.ScalarNode && e.ShortTag() == "!!null":
			p.fail(e, "%s has no value; want %s, or remove the line", name, wants[kind])
			return
		case e.Kind != yaml.ScalarNode || !kind.takes(e.ShortTag()):
			p.fail(e, "%s: want %s%s", name, wants[kind], quoted(kind, e))
			return
		}
		s.Values = append(s.Values, e.Value)
	}
	p.settings = append(p.settings, s)
}

// takes reports whether a scalar with the YAML tag is a value of the kind.
func (k Kind) takes(tag string) bool {
	switch k {
	case Bool:
		return tag == "!!bool"
	case Integer:
		return tag == "!!int"
	case Number:
		return tag == "!!int" || tag == "!!float"
	case Text:
		return tag == "!!str" || tag == "!!int"
	case String, List:
		return tag == "!!str"
	}
	panic("a kind that is none of these")
}

// quoted proposes the value in quotes where a string is wanted and YAML reads something else.
func quoted(k Kind, n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode || k != String && k != List && k != Text {
		return ""
	}
	return fmt.Sprintf("; write %q", n.Value)
}

// suggestion proposes the known name that is nearest to a wrong one.
func (p *parser) suggestion(name string) string {
	plain := func(s string) string { return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(s)) }
	best, most := "", 3 // further names are no misspellings
	for known := range p.kinds {
		if d := distance(plain(name), plain(known)); d < most || d == most && best != "" && known < best {
			best, most = known, d
		}
	}
	if best == "" {
		return "; the names are those of the flags of sandboxd serve"
	}
	return "; did you mean " + best + "?"
}

// distance returns the Levenshtein distance of two words, of which the first counts to 64 bytes.
func distance(a, b string) int {
	a = a[:min(len(a), 64)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := []int{i + 1}
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			next = append(next, slices.Min([]int{row[j] + cost, row[j+1] + 1, next[j] + 1}))
		}
		row = next
	}
	return row[len(b)]
}
