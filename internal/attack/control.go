package attack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// controlTimeout is that of one control: one that waits for something does not work.
const controlTimeout = time.Minute

// Decode reads the output of the attacking program.
func Decode(line string) (Result, error) {
	var r Result
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return r, fmt.Errorf("the attacker printed %q: %w", line, err)
	}
	if strings.HasPrefix(r.Detail, "control cannot") {
		return r, errors.New(r.Detail)
	}
	return r, nil
}

// namespaces that keep an attempt off the host.
const apart = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP

// Control reports whether an attack works without the sandbox's layers: in a bare user namespace,
// or, for root, in bare namespaces without one. The mount, network and PID namespaces are there to
// keep the attempt off the host. Program is one that contains the corpus. Found is the obstacle if
// it does not work.
func Control(ctx context.Context, program, attack string) (worked bool, found string, err error) {
	worked, found, err = ControlInUserNamespace(ctx, program, attack)
	if worked || err != nil || os.Geteuid() != 0 {
		return worked, found, err
	}
	worked, asRoot, err := control1(ctx, program, attack, "as the host's root", &syscall.SysProcAttr{Cloneflags: apart})
	if worked || err != nil {
		return worked, "", err
	}
	return false, found + "; " + asRoot, nil
}

// ControlInUserNamespace is the part of [Control] without privileges: an attack that works there
// works with the capabilities of a user namespace alone. Of root of the host it has not even the
// id, to which many files belong.
func ControlInUserNamespace(ctx context.Context, program, attack string) (worked bool, found string, err error) {
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = nobody, nobody
	}
	return control1(ctx, program, attack, "in a bare user namespace", &syscall.SysProcAttr{
		Cloneflags:  apart | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}},
		Credential:  &syscall.Credential{NoSetGroups: true},
	})
}

const nobody = 65534

// control1 tries an attack in one kind of namespaces.
func control1(ctx context.Context, program, attack, where string, attr *syscall.SysProcAttr) (worked bool, found string, err error) {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	// By its descriptor: another user may not be able to enter the program's directory.
	f, err := os.Open(program)
	if err != nil {
		return false, "", err
	}
	defer f.Close() // only read
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", mainArg, "control", attack)
	cmd.ExtraFiles = []*os.File{f}
	attr.Setsid = true // some attacks are on the terminal that they find: it must not be the caller's
	cmd.SysProcAttr = attr
	out, err := cmd.Output()
	if err != nil {
		return false, fmt.Sprintf("%s: %v", where, err), nil
	}
	got, err := Decode(string(out))
	if err != nil {
		return false, "", fmt.Errorf("control %s: %w", where, err)
	}
	if got.Worked {
		return true, "", nil
	}
	return false, fmt.Sprintf("%s: %s", where, got.Detail), nil
}
