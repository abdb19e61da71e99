package image

import (
	"context"
	"errors"
	"fmt"
)

// The classes of errors, each for what a caller can do about it. An error of none of them is this host's: a full disk,
// a launcher that is gone, a caller that gave up.
var (
	ErrReference = errors.New("bad image reference") // the name or platform cannot be one; another must be given
	ErrNotFound  = errors.New("no such image")       // not stored here; pull it
	ErrRegistry  = errors.New("registry error")      // unreachable, unauthorized, or has no such image
	ErrInUse     = errors.New("image is in use")     // a sandbox holds it; delete that first
	ErrInvalid   = errors.New("image is invalid")    // digest, size, manifest, configuration or a layer is not what it must be
)

// classed is an error of a class, without the class's words in its message.
type classed struct {
	class, err error
}

func (e *classed) Error() string   { return e.err.Error() }
func (e *classed) Unwrap() []error { return []error{e.class, e.err} }

func classf(class error, format string, args ...any) error {
	return &classed{class, fmt.Errorf(format, args...)}
}

// gaveUp reports whether the caller ended the request, which is no error of the registry or the image.
func gaveUp(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, context.Canceled)
}
