package attack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
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

// Controlled is the outcome of the control of an attack.
type Controlled struct {
	Worked bool
	Found  string // the obstacle, if it does not work
}

// Controls reports which attacks work without the sandbox's layers: in a bare user namespace, or,
// for root, in bare namespaces without one. The mount, network and PID namespaces are there to keep
// attempts off the host. Program is one that contains the corpus.
func Controls(ctx context.Context, program string, attacks ...string) (map[string]Controlled, error) {
	all, err := ControlsInUserNamespace(ctx, program, attacks...)
	if err != nil || os.Geteuid() != 0 {
		return all, err
	}
	left := slices.DeleteFunc(slices.Clone(attacks), func(name string) bool { return all[name].Worked })
	asRoot, err := controls(ctx, program, left, "as the host's root", func() *syscall.SysProcAttr { return &syscall.SysProcAttr{Cloneflags: apart} })
	if err != nil {
		return nil, err
	}
	for name, c := range asRoot {
		if !c.Worked {
			c.Found = all[name].Found + "; " + c.Found
		}
		all[name] = c
	}
	return all, nil
}

// ControlsInUserNamespace is the part of [Controls] without privileges: an attack that works there
// works with the capabilities of a user namespace alone. Of root of the host it has not even the
// id, to which many files belong.
func ControlsInUserNamespace(ctx context.Context, program string, attacks ...string) (map[string]Controlled, error) {
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = nobody, nobody
	}
	return controls(ctx, program, attacks, "in a bare user namespace", func() *syscall.SysProcAttr {
		return &syscall.SysProcAttr{
			Cloneflags:  apart | syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}},
			Credential:  &syscall.Credential{NoSetGroups: true},
		}
	})
}

const nobody = 65534

// controls tries attacks in one kind of namespaces. Those that leave nothing behind, though they
// work, are tried in the same ones.
func controls(ctx context.Context, program string, attacks []string, where string, attr func() *syscall.SysProcAttr) (map[string]Controlled, error) {
	all := make(map[string]Controlled)
	run := func(group []string) (said string, killed bool, err error) {
		return runControl(ctx, program, group, attr())
	}
	err := tryAll(groups(attacks, nothing), run, func(name string, r Result) error {
		if r.Worked {
			all[name] = Controlled{Worked: true}
		} else {
			all[name] = Controlled{Found: where + ": " + r.Detail}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("control %s: %w", where, err)
	}
	return all, nil
}

func runControl(ctx context.Context, program string, group []string, attr *syscall.SysProcAttr) (said string, killed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(group))*controlTimeout)
	defer cancel()
	// By its descriptor: another user may not be able to enter the program's directory.
	f, err := os.Open(program)
	if err != nil {
		return "", false, err
	}
	defer f.Close() // only read
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", append([]string{mainArg, "control"}, group...)...)
	cmd.ExtraFiles = []*os.File{f}
	attr.Setsid = true // some attacks are on the terminal that they find: it must not be the caller's
	cmd.SysProcAttr = attr
	out, failed := cmd.Output()
	if failed != nil && len(out) == 0 {
		out, err = json.Marshal(Result{Detail: failed.Error()})
	}
	return string(out), false, err
}
