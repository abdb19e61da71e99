// Package attack is the corpus of attempts by a hostile program from inside a sandbox, and the
// program that makes them.
//
// A program that contains it calls [Main] first thing and can then be put into a sandbox and told
// to attack. Tests do that with a small program of their own, `sandboxd doctor --attack` with its
// own binary. Every attack has a control, the same attempt where nothing but bare namespaces holds
// it: one that does not work there proves nothing.
//
// Attacks are harmless where they work: they only take the resources they need, and give them back
// or end with them.
package attack

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// mainArg is the first argument of a program that is to attack.
const mainArg = "attack"

// Attack is one that a program can be told to try.
type Attack struct {
	Name string
	// Layer is the layer that should stop it first; several mostly would.
	Layer string

	try func() error // nil: it worked
}

// Result is the outcome of one, as the attacking program prints it.
type Result struct {
	Attack string `json:"attack"`
	Worked bool   `json:"worked"`
	Errno  string `json:"errno,omitempty"` // name of the error that stopped it
	Detail string `json:"detail,omitempty"`
}

// The layers.
const (
	Filter       = "system call filter"
	Capabilities = "capabilities"
	Masked       = "masked paths"
	ReadOnly     = "read-only paths"
	Undumpable   = "undumpable init"
	Namespaces   = "namespaces"
	NoDevices    = "no device nodes"
	NoNewPrivs   = "no_new_privs, nosuid"
)

// Main is to be called first thing by a program that contains the corpus. Where it was told to
// attack it does so, prints a [Result] for each attempt, and handled is true: the caller then
// exits with the code and does nothing else.
func Main(args []string) (code int, handled bool) {
	if len(args) < 2 || args[0] != mainArg {
		return 0, false
	}
	switch {
	case len(args) == 2 && args[1] == "ids":
		fmt.Println(ids())
		return 0, true
	case len(args) == 2 && args[1] == "supervised":
		return supervised(), true
	case len(args) == 2 && args[1] == "calls":
		return measureCalls(), true
	case args[1] == "neighbours":
		return neighbours(args[2:])
	case len(args) >= 3:
		group := findAll(args[2:])
		switch {
		case group == nil:
		case args[1] == "try":
			try(group)
			return 0, true
		case args[1] == "control":
			control(args[2:])
			return 0, true
		}
	}
	fmt.Fprintln(os.Stderr, "usage: attack try ATTACK… | control ATTACK… | calls")
	return 2, true
}

// Try is the arguments that make a program that contains the corpus try attacks, one after the
// other. It may end before the last one; see [TryAll].
func Try(attacks ...string) []string { return append([]string{mainArg, "try"}, attacks...) }

// Calls is the arguments that make it measure which system calls reach the kernel; see [Measured].
func Calls() []string { return []string{mainArg, "calls"} }

// IDs is the arguments that make it print its ids and capabilities.
func IDs() []string { return []string{mainArg, "ids"} }

// control is PID 1 of fresh namespaces without any further layer. It gives the attacks a sandbox's
// surroundings (a /proc of its own, an empty /tmp, an init to attack: itself) and lets a child
// try.
func control(attacks []string) {
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{{"", "/", "", unix.MS_REC | unix.MS_PRIVATE}, {"proc", "/proc", "proc", 0}, {"tmpfs", "/tmp", "tmpfs", 0}} {
		// The program itself may lie in /tmp; the child is started from /proc/self/exe.
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			report("", fmt.Errorf("control cannot mount %s: %w", m.target, err))
			return
		}
	}
	if slices.ContainsFunc(attacks, isEgress) {
		w, err := Everything()
		if err != nil {
			report("", fmt.Errorf("control cannot begin: %w", err))
			return
		}
		defer w.Close() // with this program
		// The sysfs that is there shows another namespace. Some hosts let root alone mount one.
		_ = unix.Mount("sysfs", "/sys", "sysfs", 0, "")
	}
	child, err := os.StartProcess("/proc/self/exe", append([]string{"attacker"}, Try(attacks...)...),
		&os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		report("", fmt.Errorf("control cannot start: %w", err))
		return
	}
	if state, err := child.Wait(); err != nil || !state.Success() {
		report("", fmt.Errorf("the attempt ended with %v (%w)", state, err))
	}
}

// report prints the result of an attack; without a name, that of the next one of the group.
func report(name string, err error) {
	r := Result{Attack: name, Worked: err == nil}
	if err != nil {
		r.Detail = err.Error()
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			r.Errno = unix.ErrnoName(errno)
		}
	}
	_ = json.NewEncoder(os.Stdout).Encode(r) // the reader is gone
}
