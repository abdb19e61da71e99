package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Sandbox is what the loop needs of a sandbox. [Client] gives it over the socket; the package's tests have a fake that
// runs programs in a temporary directory.
type Sandbox interface {
	// ID names the sandbox in the record.
	ID() string
	// Exec runs a program to its end and copies its output to stdout and stderr as it comes. A program that exits
	// with any code, or is killed at its timeout, is an outcome and not an error.
	Exec(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (Outcome, error)
	// ReadFile opens a regular file; the error for a missing one is an [*api.Problem] of [api.CodeNotFound].
	ReadFile(ctx context.Context, path string) (io.ReadCloser, error)
	// WriteFile writes a file whole or not at all and makes the directories above it. An empty user is the sandbox's.
	WriteFile(ctx context.Context, path string, r io.Reader, mode fs.FileMode, user string) error
	// ArchiveIn extracts a tar stream below path, which is created.
	ArchiveIn(ctx context.Context, path string, r io.Reader) error
	// ArchiveOut gives the tree at path as a tar stream with relative names.
	ArchiveOut(ctx context.Context, path string) (io.ReadCloser, error)
	// List calls on for everything below a directory, and says whether something was left out.
	List(ctx context.Context, path string, on func(api.FileEntry) error) (more bool, err error)
	// CPU is the processor time of everything in the sandbox since it runs; known is false where the kernel does not count it.
	CPU(ctx context.Context) (used time.Duration, known bool, err error)
	// Snapshot keeps the file system as it is, and gives its id.
	Snapshot(ctx context.Context, comment string) (string, error)
	// Stop ends everything in the sandbox and keeps its files.
	Stop(ctx context.Context) error
	// Delete ends everything in the sandbox and removes it.
	Delete(ctx context.Context) error
}

// Outcome is how a program in the sandbox ended.
type Outcome struct {
	Exit  api.Exit
	Usage api.Usage
}

// hasCode reports whether err is a problem of that code.
func hasCode(err error, code api.Code) bool {
	return errors.Is(err, &api.Problem{Code: code})
}

// lost reports whether err of an exec means that the sandbox itself is gone, rather than that this call was refused.
func lost(err error) bool {
	var p *api.Problem
	if !errors.As(err, &p) {
		return true // nothing that the daemon said: the connection or the daemon went away
	}
	switch p.Code {
	case api.CodeGone, api.CodeNotFound, api.CodeConflict, api.CodeUnavailable:
		return true
	case api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeExists, api.CodeProgramMissing, api.CodeProgramDenied,
		api.CodeUnenforceable, api.CodeRegistry, api.CodeImage, api.CodeBuild, api.CodeInternal:
	}
	return false
}
