package guest

import (
	"fmt"
	"strconv"
	"strings"
)

// filterArg is the argument of an init that is to load a seccomp filter before anything else.
const filterArg = "filter="

// FilterArg tells init that descriptor fd is a SOCK_SEQPACKET socket of the launcher's, in which the program of its filter lies as one
// packet, or [LoadedAlready]. It answers with one byte when the filter holds every thread of it, and Landlock what it will start.
func FilterArg(fd int) string { return filterArg + strconv.Itoa(fd) }

// LoadedAlready is the packet that stands for a program where whoever executed init has loaded the filter.
const LoadedAlready = "."

// ParseFilterArg takes FilterArg from the arguments. Without it the descriptor is -1.
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

// Confinement is what the launcher tells init of Landlock.
type Confinement struct {
	ABI int // of the kernel, as the launcher's probe found it
	// Writable are the directories below which programs may write; nil: everywhere.
	Writable []string
}

// confineArg is the first argument of an init that is to confine its programs.
const confineArg = "landlock="

// InitArgs are the arguments of an init that confines its programs so; none where the ABI is 0.
func (c *Confinement) InitArgs() []string {
	if c.ABI == 0 {
		return nil
	}
	if c.Writable == nil {
		return []string{confineArg + strconv.Itoa(c.ABI), "/"}
	}
	return append([]string{confineArg + strconv.Itoa(c.ABI)}, c.Writable...)
}

// ParseInitArgs reads what InitArgs has written. Nil is none.
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
