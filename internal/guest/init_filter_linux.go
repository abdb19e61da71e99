package guest

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
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

// maxFilter is how many instructions the kernel takes (BPF_MAXINSNS).
const maxFilter = 4096

// loadFilter takes the program and loads it on every thread. No_new_privs the launcher has set.
func loadFilter(fd int) error {
	program := make([]unix.SockFilter, maxFilter+1)
	const size = int(unsafe.Sizeof(unix.SockFilter{}))
	//nolint:gosec // the same memory as bytes, to be read into
	n, err := unix.Read(fd, unsafe.Slice((*byte)(unsafe.Pointer(&program[0])), len(program)*size))
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	before, known, err := filtersHeld()
	if err != nil {
		return err
	}
	if n == len(LoadedAlready) {
		// One of them is the launcher's own: where the kernel does not count, or the launcher has none, that is for who loaded it to know.
		if known && before == 0 {
			return errNoFilter
		}
		return nil
	}
	if n == 0 || n%size != 0 || n/size > maxFilter {
		return fmt.Errorf("%d bytes are no program", n)
	}
	prog := unix.SockFprog{Len: uint16(n / size), Filter: &program[0]} //nolint:gosec // G115: at most maxFilter
	//nolint:gosec // the address is that of the structure which seccomp(2) reads
	tid, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	switch {
	case errno != 0:
		return errno
	case tid != 0:
		return fmt.Errorf("thread %d has another", tid)
	}
	// Asked, not believed; and counted, for init has the launcher's filter in any case.
	if after, known, err := filtersHeld(); err != nil || known && after != before+1 {
		return errors.Join(errNoFilter, err)
	}
	return nil
}

var errNoFilter = errors.New("it does not hold")

// filtersHeld is how many filters hold the calling thread. The kernel counts them from Linux 5.9 on.
func filtersHeld() (n int, known bool, err error) {
	fd, err := unix.Open("/proc/thread-self/status", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false, fmt.Errorf("count filters: %w", err)
	}
	var status [4096]byte
	size, err := unix.Read(fd, status[:])
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return 0, false, fmt.Errorf("count filters: %w", err)
	}
	return countFilters(string(status[:size]))
}

// countFilters is pure.
func countFilters(status string) (n int, known bool, err error) {
	_, count, known := strings.Cut(status, "\nSeccomp_filters:\t")
	if !known {
		return 0, false, nil
	}
	count, _, _ = strings.Cut(count, "\n")
	if n, err = strconv.Atoi(count); err != nil {
		return 0, false, fmt.Errorf("count filters: %w", err)
	}
	return n, true, nil
}

// reportConfined tells the launcher that everything that holds programs holds.
func reportConfined(fd int) error {
	_, err := unix.Write(fd, []byte{1})
	return errors.Join(err, unix.Close(fd))
}
