// Package build plans the execution of a Dockerfile: the needed stages, the meaning of each
// instruction after variables are filled in, and the files and layer of each COPY.
//
// # Theory of operation
//
// Everything here is computation on values: no file of an image is opened, and no path is resolved
// by a kernel. A root file system is a [Tree], read from the tar streams of its layers; the context
// of a build is one, too. A COPY looks up its sources in one tree and its destination in another
// and follows their links in there. Its result is a tar stream, which is applied like a pulled
// layer, with all checks. So no link, "..", mount or race lets a Dockerfile or a context reach a
// file of the host: there are no files.
//
// Parsing is BuildKit's own, and instructions mean the same as there; docs/reference/builds.md
// lists the differences. Unsupported instructions and flags are refused by name and line before
// anything runs. Errors that depend on variables, files or a base appear when their stage is
// reached. Comments for linters are ignored, and so are the host's side of EXPOSE and devices in
// layers.
//
// [Parse] parses the Dockerfile, [File.Plan] chooses the stages, and [Stage.Evaluate] turns a stage
// into [Step]s once the configuration of its base is known. A step that changes files has a key:
// the digest of all its inputs.
package build

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrInvalid is the class of errors caused by the Dockerfile, the context or the options.
var ErrInvalid = errors.New("cannot be built")

// Error is an error in a line of a Dockerfile. It is of the class [ErrInvalid] unless it wraps an
// error of another.
type Error struct {
	File string
	Line int // 0 if of no line
	Err  error
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

type invalid struct{ err error }

func (e *invalid) Error() string   { return e.err.Error() }
func (e *invalid) Unwrap() []error { return []error{ErrInvalid, e.err} }

func invalidf(format string, args ...any) error { return &invalid{fmt.Errorf(format, args...)} }

// Limits of Dockerfiles and contexts, far above those in use.
const (
	maxDockerfile = 1 << 20
	maxStages     = 100
	maxCommands   = 1000      // of all stages
	maxValue      = 32 << 10  // bytes of one variable
	maxVariables  = 1000      // of one stage
	maxArgs       = 512 << 10 // bytes of the arguments of one stage
	maxCreatedBy  = 4 << 10   // bytes of an entry of the history
	maxHistory    = 1 << 20   // bytes of all entries of a build; entries beyond are shortened
	maxWord       = 1 << 20   // bytes that one word may grow to
	maxConfig     = 512 << 10 // bytes of an image's configuration
	maxName       = 4095      // bytes of a path
	maxDepth      = 128       // of a tree, as layers may have
	maxLinks      = 255       // symbolic links on the way to one file
)

// Limits bound trees. A zero field means the one of [DefaultLimits].
type Limits struct {
	Entries int   // of all trees of a build together
	Bytes   int64 // of file contents in one archive
}

// DefaultLimits returns limits for a machine of a few GiB: an entry takes some 300 bytes of memory.
func DefaultLimits() Limits { return Limits{Entries: 1_000_000, Bytes: 32 << 30} }

func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	if l.Entries <= 0 {
		l.Entries = d.Entries
	}
	if l.Bytes <= 0 {
		l.Bytes = d.Bytes
	}
	return l
}

func clip(s string) string { return clipTo(s, 200) }

// clipTo cuts a text between two characters.
func clipTo(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}
