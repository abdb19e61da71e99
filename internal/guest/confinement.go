package guest

import (
	"fmt"
	"strconv"
	"strings"
)

// filterArg is the prefix of init's argument for its seccomp filter.
const filterArg = "filter="

// FilterArg returns the argument by which init learns its filter socket: descriptor fd, a
// SOCK_SEQPACKET socket of the launcher's with one packet, the program or [LoadedAlready]. Init
// answers with one byte when the filter holds all of its threads, and Landlock everything that it
// will start.
func FilterArg(fd int) string { return filterArg + strconv.Itoa(fd) }

// LoadedAlready is the packet instead of a program if the launcher has loaded the filter before
// executing init.
const LoadedAlready = "."

// ParseFilterArg removes FilterArg from the arguments. Without it, fd is -1.
func ParseFilterArg(args []string) (fd int, rest []string, err error) {
	if len(args) == 0 || !strings.HasPrefix(args[0], filterArg) {
		return -1, args, nil
	}
	fd, err = strconv.Atoi(strings.TrimPrefix(args[0], filterArg))
	if err != nil || fd < 3 {
		return -1, nil, fmt.Errorf("argument %q: not a descriptor", args[0])
	}
	return fd, args[1:], nil
}

// ProcFD is the descriptor on which init inherits a procfs of its PID namespace. It is mounted
// nowhere, and writable, as the one at /proc is not.
const ProcFD = 4

// Confinement tells init how to apply Landlock to programs.
type Confinement struct {
	ABI int // version of the kernel's Landlock, as the launcher's probe found it
	// Directories below which programs may write; nil: everywhere.
	Writable []string
}

// confineArg is the prefix of init's first argument for Landlock.
const confineArg = "landlock="

// InitArgs returns the arguments of an init with this confinement; none if the ABI is 0.
func (c *Confinement) InitArgs() []string {
	if c.ABI == 0 {
		return nil
	}
	if c.Writable == nil {
		return []string{confineArg + strconv.Itoa(c.ABI), "/"}
	}
	return append([]string{confineArg + strconv.Itoa(c.ABI)}, c.Writable...)
}

// ParseInitArgs parses the arguments that InitArgs returns. The result is nil if there are none.
func ParseInitArgs(args []string) (*Confinement, error) {
	if len(args) == 0 {
		return nil, nil //nolint:nilnil // there is nothing to confine by, and that is no error
	}
	abi, ok := strings.CutPrefix(args[0], confineArg)
	n, err := strconv.Atoi(abi)
	if !ok || err != nil || n < 1 {
		return nil, fmt.Errorf("argument %q: not Landlock's version", args[0])
	}
	for _, dir := range args[1:] {
		if dir == "" || dir[0] != '/' {
			return nil, fmt.Errorf("argument %q: not a directory", dir)
		}
	}
	if len(args) == 2 && args[1] == "/" {
		return &Confinement{ABI: n}, nil
	}
	return &Confinement{ABI: n, Writable: args[1:]}, nil
}
