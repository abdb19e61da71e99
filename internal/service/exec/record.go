package exec

import (
	"context"
	"errors"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// Record is the record of an exec: the API's, but for the reason of a lost exec, which a face
// turns into an error of its own protocol.
type Record struct {
	api.Exec
	Failure *Failure `json:"failure,omitempty"` // nil unless the exec is lost
}

// convert reads a record of an earlier version, which has a problem document.
func (r *Record) convert() {
	if r.Error != nil {
		r.Failure = &Failure{Class: string(r.Error.Code), Message: r.Error.Detail}
		r.Error = nil
	}
}

// Failure is the reason why the exit of a detached exec is unknown, as its record keeps it.
type Failure struct {
	Class   string `json:"class"`
	Message string `json:"message"`
}

// Names of the classes in records. Earlier versions kept the API's codes, some of which are these.
const (
	failedGone        = "gone"
	failedUnavailable = "unavailable"
	failedMissing     = "program_not_found"
	failedDenied      = "program_not_allowed"
	failedOtherwise   = "internal"

	maxFailure = 2048 // bytes of a message: a part of it may come from a sandbox
)

// failureOf returns err as a record keeps it.
func failureOf(err error) *Failure {
	f := &Failure{Class: failedOtherwise, Message: strings.ToValidUTF8(err.Error(), "\uFFFD")}
	if len(f.Message) > maxFailure {
		f.Message = strings.ToValidUTF8(f.Message[:maxFailure], "") + " ..."
	}
	switch marked := class.Marked(err); {
	case errors.Is(marked, class.ErrGone):
		f.Class = failedGone
	case errors.Is(marked, class.ErrProgramMissing):
		f.Class = failedMissing
	case errors.Is(marked, class.ErrProgramDenied):
		f.Class = failedDenied
	case errors.Is(marked, class.ErrUnavailable), errors.Is(marked, class.ErrStopping), errors.Is(marked, context.DeadlineExceeded):
		f.Class = failedUnavailable
	}
	return f
}

func (f *Failure) Error() string { return f.Message }

// Unwrap returns the class of the failure, nil for an internal one.
func (f *Failure) Unwrap() error {
	switch f.Class {
	case failedGone:
		return class.ErrGone
	case failedUnavailable:
		return class.ErrUnavailable
	case failedMissing:
		return class.ErrProgramMissing
	case failedDenied:
		return class.ErrProgramDenied
	}
	return nil
}
