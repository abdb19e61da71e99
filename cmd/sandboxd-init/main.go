// Sandboxd-init is process 1 of every sandbox. It serves the daemon's requests on the socket that
// it inherits as descriptor 3; see package guest. Descriptor 4 is a procfs. Its arguments name the
// descriptor of its filter and the Landlock restrictions of programs. It is of no use by itself. A
// process with limits of its own executes it first, see inside.RunShim.
package main

import (
	"os"
	goruntime "runtime"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/inside"
)

// The first thread must be main's: see inside.Run.
func init() { goruntime.LockOSThread() }

// run returns only if it cannot start.
func run() error {
	filter, args, err := guest.ParseFilterArg(os.Args[1:])
	if err != nil {
		return err
	}
	confine, err := guest.ParseInitArgs(args)
	if err != nil {
		return err
	}
	return inside.Run(3, guest.ProcFD, filter, confine)
}

func main() {
	if inside.IsShim(os.Args) {
		inside.RunShim(os.Args)
	}
	_, _ = os.Stderr.WriteString("sandboxd-init: " + run().Error() + "\n")
	os.Exit(1)
}
