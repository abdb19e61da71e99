package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Sandbox is the part of a sandbox that the loop uses. [Client] implements it over the socket; the
// package's tests run programs in a temporary directory.
type Sandbox interface {
	// ID identifies the sandbox in the record.
	ID() string
	// Exec runs a program to its end and copies its output to stdout and stderr as it arrives. Any
	// exit code, and a kill at the timeout, is an outcome and not an error.
	Exec(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (Outcome, error)
	// ReadFile opens a regular file. The error for a missing one is an [*api.Problem] of
	// [api.CodeNotFound].
	ReadFile(ctx context.Context, path string) (io.ReadCloser, error)
	// WriteFile writes a file as a whole or not at all, and makes its parent directories. An empty
	// user means the sandbox's.
	WriteFile(ctx context.Context, path string, r io.Reader, mode fs.FileMode, user string) error
	// ArchiveIn extracts a tar stream below path, and makes path.
	ArchiveIn(ctx context.Context, path string, r io.Reader) error
	// ArchiveOut returns the tree at path as a tar stream with relative names.
	ArchiveOut(ctx context.Context, path string) (io.ReadCloser, error)
	// List calls on for every file below a directory, and reports omissions.
	List(ctx context.Context, path string, on func(api.FileEntry) error) (more bool, err error)
	// CPU returns the processor time of all processes since the sandbox's start; known is false if
	// the kernel does not count it.
	CPU(ctx context.Context) (used time.Duration, known bool, err error)
	// Snapshot keeps the current file system and returns its ID.
	Snapshot(ctx context.Context, comment string) (string, error)
	// Stop ends all processes of the sandbox and keeps its files.
	Stop(ctx context.Context) error
	// Delete ends all processes of the sandbox and removes it.
	Delete(ctx context.Context) error
}

// Outcome describes the end of a program in the sandbox.
type Outcome struct {
	Exit  api.Exit
	Usage api.Usage
}

// hasCode reports whether err is a problem of that code.
func hasCode(err error, code api.Code) bool {
	return errors.Is(err, &api.Problem{Code: code})
}

// lost reports whether err of an exec means that the sandbox is gone, and not that the call was
// refused.
func lost(err error) bool {
	var p *api.Problem
	if !errors.As(err, &p) {
		return true // not from the daemon: the connection or the daemon is gone
	}
	switch p.Code {
	case api.CodeGone, api.CodeNotFound, api.CodeConflict, api.CodeUnavailable:
		return true
	case api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeExists, api.CodeProgramMissing, api.CodeProgramDenied,
		api.CodeUnenforceable, api.CodeRegistry, api.CodeImage, api.CodeBuild, api.CodeInternal:
	}
	return false
}
