//go:build !mutant

package main

import (
	"errors"
	"fmt"
	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/runtime/libct"
	"github.com/sandboxd/sandboxd/seccomp"
)

// confine restricts the launcher, and everything that it starts, to the system calls that it needs.
// No request has been read yet.
func confine() error {
	actions, err := kernel.SeccompActions()
	if err != nil {
		return fmt.Errorf("confine the launcher: %w", err)
	}
	plan, err := seccomp.Plan(seccomp.Launcher(), goruntime.GOARCH, seccomp.Abilities{Actions: actions})
	if err != nil {
		return fmt.Errorf("confine the launcher: %w", err)
	}
	if err := libct.LoadFilter(plan); err != nil {
		return fmt.Errorf("confine the launcher: %w", err)
	}
	// Every process may ask for its key ring if no filter forbids it.
	if _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("confine the launcher: to use key rings is not refused, but answered with %v", err) //nolint:errorlint // there may be none
	}
	return nil
}
