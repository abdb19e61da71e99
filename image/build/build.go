// Package build plans what a Dockerfile asks for: which stages are needed, what each instruction means once variables
// are filled in, which files a COPY takes and what layer that makes.
//
// # Theory of operation
//
// Everything here is computation on values: no file of an image is opened, no path is resolved by a kernel. A root file
// system is a [Tree], read from the tar streams of its layers; the context of a build is one, too. A COPY looks up its
// sources in one tree and its destination in another, follows the links that it meets in there, and writes the outcome
// as a tar stream, which is applied by whoever applies pulled layers, with the same checks. So there is no link, "..",
// mount or race by which a Dockerfile or a context could reach a file of the host: there are no files.
//
// Parsing is BuildKit's own, and what instructions mean follows it; docs/reference/builds.md says where it does not. Instructions and
// flags that are not supported are refused by name and line before anything runs. What depends on variables, on files or
// on a base is refused when its stage is reached. Comments for linters are ignored, and so are the host's side of EXPOSE
// and devices in layers.
//
// [Parse] reads the Dockerfile, [File.Plan] chooses the stages, and [Stage.Evaluate] turns one into [Step]s as soon as the
// configuration of its base is known. A step that changes files has a key: the digest of all that its result follows from.
package build

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrInvalid is the class of errors that the Dockerfile, the context or the options are to blame for.
var ErrInvalid = errors.New("cannot be built")

// Error is what is wrong with a line of a Dockerfile. It is of the class [ErrInvalid] unless what it wraps is of another.
type Error struct {
	File string
	Line int // 0: of no line
	Err  error
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err)
}

// Unwrap gives what the line did.
func (e *Error) Unwrap() error { return e.Err }

type invalid struct{ err error }

func (e *invalid) Error() string   { return e.err.Error() }
func (e *invalid) Unwrap() []error { return []error{ErrInvalid, e.err} }

func invalidf(format string, args ...any) error { return &invalid{fmt.Errorf(format, args...)} }

// Bounds of what a Dockerfile and a context may ask for. They are far above what people write.
const (
	maxDockerfile = 1 << 20
	maxStages     = 100
	maxCommands   = 1000      // of all stages
	maxValue      = 32 << 10  // bytes of one variable
	maxVariables  = 1000      // of one stage
	maxArgs       = 512 << 10 // bytes of the arguments of one stage
	maxCreatedBy  = 4 << 10   // bytes of an entry of the history
	maxHistory    = 1 << 20   // bytes of all entries of a build; those beyond are short
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

// DefaultLimits are what a build on a machine of a few GiB can hold: an entry takes some 300 bytes of memory.
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

// clipTo cuts a text between its characters.
func clipTo(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "..."
}
