package image

import (
	"github.com/sandboxd/sandboxd/image/errdefs"
)

// The classes of errors, each for one remedy of the caller; see [errdefs].
var (
	ErrReference = errdefs.ErrReference
	ErrNotFound  = errdefs.ErrNotFound
	ErrRegistry  = errdefs.ErrRegistry
	ErrInUse     = errdefs.ErrInUse
	ErrInvalid   = errdefs.ErrInvalid
)
