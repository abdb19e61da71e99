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

// Control reports whether an attack works without the sandbox's layers: in a bare user namespace,
// or, for root, in bare namespaces without one. The mount, network and PID namespaces are there to
// keep the attempt off the host. Program is one that contains the corpus. Found is the obstacle if
// it does not work.
func Control(ctx context.Context, program, attack string) (worked bool, found string, err error) {
	const apart = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP
	tries := []struct {
		where string
		attr  *syscall.SysProcAttr
	}{{"in a bare user namespace", &syscall.SysProcAttr{
		Cloneflags:  apart | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}}}
	if os.Geteuid() == 0 {
		tries = append(tries, struct {
			where string
			attr  *syscall.SysProcAttr
		}{"as the host's root", &syscall.SysProcAttr{Cloneflags: apart}})
	}
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	var said []string
	for _, t := range tries {
		cmd := exec.CommandContext(ctx, program, mainArg, "control", attack)
		t.attr.Setsid = true // some attacks are on the terminal that they find: it must not be the caller's
		cmd.SysProcAttr = t.attr
		out, err := cmd.Output()
		if err != nil {
			said = append(said, fmt.Sprintf("%s: %v", t.where, err))
			continue
		}
		got, err := Decode(string(out))
		if err != nil {
			return false, "", fmt.Errorf("control %s: %w", t.where, err)
		}
		if got.Worked {
			return true, "", nil
		}
		said = append(said, fmt.Sprintf("%s: %s", t.where, got.Detail))
	}
	return false, strings.Join(said, "; "), nil
}
