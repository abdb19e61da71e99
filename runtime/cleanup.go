package runtime

import (
	"errors"
	"fmt"
	"slices"
)

// cleanup undoes a half-finished operation, last step first. A function that builds something
// defers unwind, adds a step after each part, and calls release when all parts stand.
type cleanup struct {
	steps []cleanupStep
}

type cleanupStep struct {
	doing string // "delete sandbox of the engine": begins the error, should undoing fail
	undo  func() error
}

func (c *cleanup) add(doing string, undo func() error) {
	c.steps = append(c.steps, cleanupStep{doing, undo})
}

func (c *cleanup) release() { c.steps = nil }

// unwind runs the steps that were not released and joins what goes wrong to *err.
func (c *cleanup) unwind(err *error) {
	for _, v := range slices.Backward(c.steps) {
		if uerr := v.undo(); uerr != nil {
			*err = errors.Join(*err, fmt.Errorf("undo: %s: %w", v.doing, uerr))
		}
	}
	c.steps = nil
}
