package security

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// attempt is what the attacker prints.
type attempt struct {
	Attack string `json:"attack"`
	Worked bool   `json:"worked"`
	Errno  string `json:"errno"`
	Detail string `json:"detail"`
}

// TestAttacksAreRefused runs every attack in a sandbox of the host image: kernel surface at large, nested namespaces,
// mounts, /proc and /sys, init and its descriptors, cgroups, odd socket families.
func TestAttacksAreRefused(t *testing.T) {
	testenv.RequireUserNS(t)
	program := harness.Helper(t, "attacker")
	list, err := exec.CommandContext(t.Context(), program, "list").Output()
	if err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	inside := plant(t, s, program)

	for attack := range strings.FieldsSeq(string(list)) {
		t.Run(attack, func(t *testing.T) {
			if worked, found := control(t, program, attack); !worked {
				t.Skipf("the attack does not work on this machine even where nothing holds it: %s", found)
			}
			result := s.Exec(t, api.ExecRequest{Argv: []string{inside, "try", attack}, Timeout: 20})
			if result.Exit.Signal == "SIGSYS" {
				return // killed by the filter is refused as well
			}
			got, err := decode(result.Stdout)
			if err != nil {
				t.Fatalf("%v; exit %+v, stderr %s", err, result.Exit, result.Stderr)
			}
			if got.Worked {
				t.Error("the attack worked")
			}
		})
	}
	// Whatever was tried, the sandbox still stands.
	if got := s.Sh(t, "echo alive"); got != "alive\n" {
		t.Errorf("after the attacks: %q", got)
	}
}

// control says whether the attack works without the sandbox's layers: in a bare user namespace, or, for root, in bare
// namespaces without one. The mount, network and PID namespaces are there to keep the attempt off the host.
func control(t *testing.T, program, attack string) (worked bool, found string) {
	t.Helper()
	const apart = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP
	bare := &syscall.SysProcAttr{
		Cloneflags:  apart | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	tries := map[string]*syscall.SysProcAttr{"in a bare user namespace": bare}
	if os.Geteuid() == 0 {
		tries["as the host's root"] = &syscall.SysProcAttr{Cloneflags: apart}
	}
	var said []string
	for where, attributes := range tries {
		cmd := exec.CommandContext(t.Context(), program, "control", attack)
		cmd.SysProcAttr = attributes
		out, err := cmd.Output()
		if err != nil {
			said = append(said, fmt.Sprintf("%s: %v", where, err))
			continue
		}
		got, err := decode(string(out))
		if err != nil {
			t.Fatalf("control %s: %v", where, err)
		}
		if got.Worked {
			return true, ""
		}
		said = append(said, fmt.Sprintf("%s: %s", where, got.Detail))
	}
	return false, strings.Join(said, "; ")
}

func decode(line string) (attempt, error) {
	var a attempt
	if err := json.Unmarshal([]byte(line), &a); err != nil {
		return a, fmt.Errorf("the attacker printed %q: %w", line, err)
	}
	if strings.HasPrefix(a.Detail, "control cannot") {
		return a, errors.New(a.Detail)
	}
	return a, nil
}

// plant puts a program into the sandbox.
func plant(t *testing.T, s *harness.Sandbox, program string) string {
	t.Helper()
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	const path = "/tmp/attacker"
	if err := s.Put(t.Context(), path, data); err != nil {
		t.Fatalf("put the attacker: %v", err)
	}
	s.Sh(t, "chmod 755 "+path)
	return path
}
