// Package kernel probes the running kernel's abilities for sandboxes.
//
// A probe decides by trying, not by version: distributions take features away (AppArmor, sysctls,
// an outer container) and bring them back to old kernels. Every probe leaves nothing behind and
// may be called at any time; none is remembered.
//
// Some things can be tried only inside a fresh user namespace, in a process that can be thrown
// away. Those probes execute the running program again with the arguments [childArg] and a name. A
// program that uses them calls [Main] before anything else; in one that did not, they answer
// [ErrNotHooked] instead of starting the program a second time.
package kernel

import (
	"errors"
	"fmt"
)

// ErrNotHooked says that a probe needs a child process and the program cannot be one.
var ErrNotHooked = errors.New("this program did not call kernel.Main, so it cannot be executed again as a probe")

// UnsupportedError means that the kernel, as it is set up, lacks something that a sandbox needs.
// Err is its answer.
type UnsupportedError struct {
	Feature string // "user namespaces"
	Since   string // the first Linux that has it, "5.11"; a newer one refuses for another reason
	Err     error
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s (Linux %s): %v", e.Feature, e.Since, e.Err)
}

func (e *UnsupportedError) Unwrap() error { return e.Err }
