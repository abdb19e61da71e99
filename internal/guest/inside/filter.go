package inside

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unsafe"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// maxFilter is the kernel's limit of instructions (BPF_MAXINSNS).
const maxFilter = 4096

// loadFilter receives the program and loads it on every thread. The launcher has set no_new_privs.
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
	if n == len(guest.LoadedAlready) {
		// One of them is the launcher's own. If the kernel does not count, or the launcher has none, only
		// the launcher knows.
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
	// Ask the kernel instead of trusting the call, and count: init has the launcher's filter in any
	// case.
	if after, known, err := filtersHeld(); err != nil || known && after != before+1 {
		return errors.Join(errNoFilter, err)
	}
	return nil
}

var errNoFilter = errors.New("it does not hold")

// filtersHeld returns the number of filters of the calling thread. The kernel counts them since
// Linux 5.9.
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

// countFilters parses /proc/<pid>/status.
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

// reportConfined tells the launcher that all confinement of programs is in place.
func reportConfined(fd int) error {
	_, err := unix.Write(fd, []byte{1})
	return errors.Join(err, unix.Close(fd))
}
