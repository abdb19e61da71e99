package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

// Theory of operation: like the probes of internal/kernel. [Probe] executes its own program again
// in new user and network namespaces; the child makes one namespace and says "ok".

// childArg is the only argument of a program that is the probe's child.
const childArg = "netns-probe"

const childOK = "ok\n"

// Remedy says what to do where [Probe] fails and user namespaces can be made.
const Remedy = "run Linux 5.9 or newer with IPv6 and with the modules nf_tables, nft_tproxy and nft_reject_inet; " +
	"name these in /etc/modules-load.d where a user namespace may not load them"

var hooked atomic.Bool

// Main is to be called first thing, with os.Args[1:], by every program that uses [Probe]. Where the
// program was
// executed as the probe's child, it does the child's part and handled is true: the caller then
// exits with the code.
func Main(args []string) (code int, handled bool) {
	hooked.Store(true)
	if len(args) != 1 || args[0] != childArg {
		return 0, false
	}
	n, err := Make()
	if err == nil {
		err = n.Close()
	}
	if err != nil {
		fmt.Println(err)
		return 1, true
	}
	fmt.Print(childOK)
	return 0, true
}

// Probe makes a namespace like those of sandboxes, in a user namespace of its own. It returns a
// [kernel.UnsupportedError] where that fails, with the step and the kernel's answer.
func Probe(ctx context.Context) error {
	const feature = "a network of its own for each sandbox (nf_tables with tproxy, in a user namespace)"
	if !hooked.Load() {
		return fmt.Errorf("probe %s: this program did not call netns.Main: %w", feature, kernel.ErrNotHooked)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", childArg)
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if string(out) == childOK && err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("probe %s: %w", feature, ctx.Err())
	}
	if said := strings.TrimSpace(string(bytes.ToValidUTF8(out, nil))); said != "" {
		err = errors.New(said)
	}
	return &kernel.UnsupportedError{Feature: feature, Since: "5.9", Err: err}
}
