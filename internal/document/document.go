// Package document reads documents in YAML, or in JSON, which is YAML, so that every mistake in
// them is told at once and with its place: policies of networks and of code.
package document

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Position is a place in a document. Both numbers count from 1; they are 0 in a preset.
type Position struct{ Line, Column int }

// At returns the place of a node.
func At(n *yaml.Node) Position { return Position{n.Line, n.Column} }

// Error is a mistake in a document.
type Error struct {
	Position
	Message string
}

func (e *Error) Error() string { return fmt.Sprintf("%d:%d: %s", e.Line, e.Column, e.Message) }

// Mistakes returns the mistakes in an error, which may be joined and wrapped ones.
func Mistakes(err error) []*Error {
	if joined := (interface{ Unwrap() []error })(nil); errors.As(err, &joined) {
		var all []*Error
		for _, err := range joined.Unwrap() {
			all = append(all, Mistakes(err)...)
		}
		return all
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return []*Error{e}
	}
	return nil
}

// Read returns the one node of the one document in data. Where the YAML is wrong, the error is an
// *[Error].
func Read(data []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) || err == nil && len(doc.Content) != 1 {
		return nil, errors.New("the document is empty")
	} else if err != nil {
		return nil, placed(err)
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one document")
	}
	return doc.Content[0], nil
}

// placed returns an error of the YAML parser as an [Error]. The parser knows the line only, and of
// the first line not even that.
func placed(err error) error {
	message, ok := strings.CutPrefix(err.Error(), "yaml: ")
	if !ok {
		return err
	}
	at := Position{1, 1}
	if rest, ok := strings.CutPrefix(message, "line "); ok {
		line, after, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(line); err == nil {
			at.Line, message = n, after
		}
	}
	return &Error{at, message}
}

// A Reader collects the mistakes of a document while its nodes are read.
type Reader struct{ Errs []error }

// Fail notes a mistake at a node.
func (r *Reader) Fail(n *yaml.Node, format string, args ...any) {
	r.Errs = append(r.Errs, &Error{At(n), fmt.Sprintf(format, args...)})
}

// Mapping calls the function of each key with its value. An unknown key is a mistake: a restriction
// that is skipped would make things look safer than they are.
func (r *Reader) Mapping(n *yaml.Node, what string, fields map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		r.Fail(n, "%s is no mapping", what)
		return
	}
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, ok := fields[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || !ok:
			r.Fail(key, "%s has no key %q", what, key.Value)
		case seen[key.Value]:
			r.Fail(key, "key %q occurs twice", key.Value)
		default:
			seen[key.Value] = true
			read(value)
		}
	}
}

// List calls f with each scalar of a list of at most so many, or with the one scalar that stands in
// its place.
func (r *Reader) List(n *yaml.Node, what string, most int, f func(*yaml.Node) error) {
	nodes := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		nodes = n.Content
	}
	switch {
	case len(nodes) == 0:
		r.Fail(n, "%s: the list is empty", what)
	case len(nodes) > most:
		r.Fail(n, "%s: more than %d entries", what, most)
		return
	}
	for _, e := range nodes {
		if e.Kind != yaml.ScalarNode || e.Tag == "!!null" {
			r.Fail(e, "%s: no single value", what) // an alias is none either
		} else if err := f(e); err != nil {
			r.Fail(e, "%s: %v", what, err)
		}
	}
}
