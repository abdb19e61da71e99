// Command sandboxd is the daemon and the command line that drives it.
package main

import (
	"context"
	"os"

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/broker"
	"github.com/sandboxd/sandboxd/internal/cli"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/internal/kernel"
)

// version is set by the linker (see Makefile).
var version = "unknown"

func main() {
	// The program executes itself for five other purposes: as the child of a kernel probe, as the
	// broker of a confined daemon, as the gateway of sandboxes' connections, as the child that copies
	// a mount of the host, and, copied into a sandbox, as an attack on it.
	for _, other := range []func(args []string) (code int, handled bool){kernel.Main, broker.Main, egress.Main, hostdir.Main, attack.Main} {
		if code, ok := other(os.Args[1:]); ok {
			os.Exit(code)
		}
	}
	os.Exit(cli.Main(context.Background(), os.Args[1:], version))
}
