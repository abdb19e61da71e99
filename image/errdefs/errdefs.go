// Package errdefs holds the classes of errors of package image and the packages below it, each for
// one remedy of the caller. An error of no class is this host's: a full disk, a launcher that is
// gone, a caller that gave up.
package errdefs

import (
	"context"
	"errors"
	"fmt"
)

// The classes, for errors.Is. Their own texts are not part of the messages.
var (
	ErrReference = errors.New("bad image reference") // the name or platform is malformed; give another
	ErrNotFound  = errors.New("no such image")       // not stored here; pull it
	ErrRegistry  = errors.New("registry error")      // unreachable, unauthorized, or without the image
	ErrInUse     = errors.New("image is in use")     // held by a sandbox; delete that first
	ErrInvalid   = errors.New("image is invalid")    // wrong digest, size, manifest, configuration or layer
)

type classed struct {
	class, err error
}

func (e *classed) Error() string   { return e.err.Error() }
func (e *classed) Unwrap() []error { return []error{e.class, e.err} }

// Classf is [fmt.Errorf] for an error of a class.
func Classf(class error, format string, args ...any) error {
	return &classed{class, fmt.Errorf(format, args...)}
}

// Canceled reports whether the caller ended the request, which is no error of the registry or
// image.
func Canceled(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, context.Canceled)
}
