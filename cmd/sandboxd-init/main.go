// Sandboxd-init is process 1 of every sandbox. It serves the daemon's requests on the socket that it inherits as descriptor 3; see
// package guest. Its arguments say which descriptor its filter comes from, and what Landlock holds programs to; it is of no use by itself. A process that is to have limits of its own becomes it for a moment, too.
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
	return inside.Run(3, filter, confine)
}

func main() {
	if inside.IsShim(os.Args) {
		inside.RunShim(os.Args)
	}
	_, _ = os.Stderr.WriteString("sandboxd-init: " + run().Error() + "\n")
	os.Exit(1)
}
