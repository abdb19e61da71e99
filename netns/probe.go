package netns

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

// Theory of operation: like the probes of internal/kernel. [Probe] executes its own program again
// in new user and network namespaces; the child makes one namespace and says "ok".

// childArg is the only argument of a program that is the probe's child.
const childArg = "netns-probe"

// Remedy is the advice for hosts where [Probe] fails although user namespaces can be made.
const Remedy = "run Linux 5.9 or newer with IPv6 and with the modules nf_tables, nft_tproxy and nft_reject_inet; " +
	"name these in /etc/modules-load.d where a user namespace may not load them"

var hooked atomic.Bool

// Main is to be called first thing, with os.Args[1:], by every program that uses [Probe]. Where the
// program was executed as the probe's child, it does the child's part and handled is true: the
// caller then exits with the code.
func Main(args []string) (code int, handled bool) {
	hooked.Store(true)
	if len(args) != 1 || args[0] != childArg {
		return 0, false
	}
	n, err := Make()
	if err == nil {
		err = n.Close()
	}
	return kernel.ReportChild(err), true
}

// Probe makes a namespace like those of sandboxes, in a user namespace of its own. It returns a
// [kernel.UnsupportedError] where that fails, with the step and the kernel's answer.
func Probe(ctx context.Context) error {
	const feature = "a network of its own for each sandbox (nf_tables with tproxy, in a user namespace)"
	if !hooked.Load() {
		return fmt.Errorf("probe %s: this program did not call netns.Main: %w", feature, kernel.ErrNotHooked)
	}
	return kernel.RunChild(ctx, feature, "5.9", syscall.CLONE_NEWNET, childArg)
}
