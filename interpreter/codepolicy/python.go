package codepolicy

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// maxAnswer is the maximum length in bytes of the answer of [PythonReader].
const maxAnswer = 256 << 10

// PythonReader is the program that reads imports with Python's own parser, inside the sandbox. It
// takes [PythonInput] on stdin.
//
//go:embed imports.py
var PythonReader string

// MaxPythonAnswer is the number of bytes of its answer to keep: a longer one is refused.
const MaxPythonAnswer = maxAnswer + 1

// PythonInput returns the stdin of [PythonReader]: the text, and for a cell the text without its
// magics.
func PythonInput(text string, isCell bool) []byte {
	plain := ""
	if isCell {
		plain, _ = cell(text)
	}
	return []byte(text + "\x00" + plain)
}

// ReadPython reads the answer of [PythonReader], which the sandbox can forge: it only ever adds
// imports to those that the daemon has read itself.
func ReadPython(answer []byte) ([]Import, error) {
	if len(answer) > maxAnswer {
		return nil, fmt.Errorf("longer than %d bytes", maxAnswer)
	}
	lines := bytes.Split(answer, []byte("\n"))
	if n := len(lines); n < 2 || len(lines[n-1]) > 0 || string(lines[n-2]) != "end" {
		return nil, errors.New("no end")
	}
	lines = lines[:len(lines)-2]
	if len(lines) > maxImports {
		return nil, fmt.Errorf("more than %d imports", maxImports)
	}
	var found []Import
	for _, text := range lines {
		number, name, ok := bytes.Cut(text, []byte(" "))
		line, err := strconv.Atoi(string(number))
		switch {
		case !ok || err != nil || line < 1 || len(name) == 0 || len(name) > maxName || !utf8.Valid(name):
			return nil, fmt.Errorf("no import: %q", clip(string(text)))
		case bytes.ContainsFunc(name, func(c rune) bool { return unicode.IsControl(c) || unicode.IsSpace(c) }):
			return nil, fmt.Errorf("no name: %q", clip(string(name)))
		}
		found = append(found, Import{Name: string(name), Line: line})
	}
	return found, nil
}
