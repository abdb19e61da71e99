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

// confine holds the launcher, and what it starts, to the system calls that it has a use for. Nobody has asked for anything yet.
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
	// To ask which key ring is one's own is allowed to everybody, where no filter forbids it.
	if _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("confine the launcher: to use key rings is not refused, but answered with %v", err) //nolint:errorlint // there may be none
	}
	return nil
}
