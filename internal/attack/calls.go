package attack

import (
	"bufio"
	"cmp"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The names of system calls, from golang.org/x/sys/unix; TestCallsAreThoseOfTheKernel compares.
//
//go:embed calls_*.txt
var callNames embed.FS

const (
	maxCall     = 511             // beyond the last that any kernel has by now
	callTimeout = 5 * time.Second // of one that waits: it has been reached
	callSteps   = 10              // in which that time goes by
	comeTimeout = time.Minute     // for the caller to come to it
)

// Answers that are no error's name.
const (
	Reached = "reached"  // it succeeded, or did not come back
	Killed  = "killed"   // the filter ended the process
	NotMade = "not made" // it is one that is never made
)

// notMade are calls that no argument keeps from their effect: this one waits until all written
// data of the host is on its disks, which may take minutes, and a process that waits for that
// cannot be killed.
func notMade(name string) bool { return name == "sync" }

// Measured holds the kernel's answers to the system calls of one architecture, each but one made
// once with the arguments of [CallArgs].
type Measured struct {
	Arch    string         `json:"arch"`
	Answers map[int]string `json:"answers"` // an error's name, [Reached], [Killed] or [NotMade]
}

// CallName is the name of a system call on this architecture; empty where the number has none.
func CallName(number int) string { return callTable()[number] }

var callTable = sync.OnceValue(func() map[int]string {
	table := make(map[int]string)
	text, err := callNames.Open("calls_" + goruntime.GOARCH + ".txt")
	if err != nil {
		return table // no names are known for the architecture
	}
	defer text.Close() // only read
	for lines := bufio.NewScanner(text); lines.Scan(); {
		number, name, _ := strings.Cut(lines.Text(), " ")
		if n, err := strconv.Atoi(number); err == nil {
			table[n] = name
		}
	}
	return table
})

// CallArgs are the arguments that a call is measured with: ones that a filter lets through if it
// lets any through, and that make no sense to the kernel.
func CallArgs(name string) [3]uint64 {
	const none = ^uint64(0)
	switch name {
	case "clone":
		return [3]uint64{uint64(unix.SIGCHLD), 0, 0}
	case "socket", "socketpair":
		return [3]uint64{unix.AF_UNIX, none, 0}
	case "setsockopt":
		return [3]uint64{none, unix.SOL_SOCKET, 2}
	case "ioctl":
		return [3]uint64{none, unix.TCGETS, 0}
	case "futex":
		return [3]uint64{none, 1, 0} // FUTEX_WAKE; ENOSYS for one that is none
	case "seccomp":
		return [3]uint64{2, none, none} // SECCOMP_GET_ACTION_AVAIL
	case "prlimit64":
		return [3]uint64{none, none, 0}
	case "setrlimit":
		return [3]uint64{unix.RLIMIT_NOFILE, none, none}
	case "memfd_create", "shmget":
		return [3]uint64{0, 0, 0}
	case "personality":
		return [3]uint64{0xffffffff, 0, 0}
	case "fork", "vfork", "pause", "exit", "exit_group":
		return [3]uint64{}
	}
	return [3]uint64{none, none, none}
}

// measureCalls makes every call in a process of its own and prints a [Measured].
func measureCalls() (code int) {
	m, err := measureEach(callTable())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := json.NewEncoder(os.Stdout).Encode(m); err != nil {
		return 1
	}
	return 0
}

// measureEach makes every call in a child of this process: one that executed a program would cost
// more than all the rest of it.
func measureEach(names map[int]string) (*Measured, error) {
	// Children write to memory that they share with us: no call can take it from us.
	memory, err := unix.Mmap(-1, 0, (maxCall+1)*int(unsafe.Sizeof(callState(0))), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map memory for answers: %w", err)
	}
	states := unsafe.Slice((*callState)(unsafe.Pointer(&memory[0])), maxCall+1)
	m, err := measure(func(number int) (string, error) {
		args := CallArgs(names[number])
		return called(comeTimeout, &states[number], func() (int, error) {
			return callInChild(uintptr(number), uintptr(args[0]), uintptr(args[1]), uintptr(args[2]), &states[number])
		})
	})
	return m, errors.Join(err, unix.Munmap(memory))
}

// callState is how far a child has come: zero, then callBegun, then callBegun+1 and the error.
type callState uint32

const callBegun callState = 1

// crashes are the signals that Go's runtime handles, which it could not do in a child.
var crashes = [...]uintptr{
	uintptr(unix.SIGILL), uintptr(unix.SIGTRAP), uintptr(unix.SIGBUS), uintptr(unix.SIGFPE), uintptr(unix.SIGSEGV), uintptr(unix.SIGSYS),
}

// callInChild makes a call in a child that has but one thread and its own process group. The child
// must neither grow its stack nor be preempted: both need threads that it lacks.
//
//go:norace
func callInChild(trap, a, b, c uintptr, state *callState) (pid int, err error) {
	var byDefault [4]uintptr // struct sigaction of the kernel
	child, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if child != 0 {
		return int(child), nil
	}
	_, _, _ = unix.RawSyscall(unix.SYS_SETPGID, 0, 0, 0)
	for i := range crashes {
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, crashes[i], uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
	}
	*state = callBegun
	_, _, errno = unix.RawSyscall6(trap, a, b, c, 0, 0, 0)
	*state = callBegun + 1 + callState(errno) // a child of this one, which a fork makes, says 0
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
}

// measure has every call made. Those that wait wait beside each other.
func measure(call func(number int) (string, error)) (*Measured, error) {
	m := Measured{Arch: goruntime.GOARCH, Answers: make(map[int]string)}
	var mu sync.Mutex // guards m.Answers and failed
	var failed []error
	var wg sync.WaitGroup
	places := make(chan struct{}, 4)
	for number := range maxCall + 1 {
		if notMade(CallName(number)) {
			mu.Lock()
			m.Answers[number] = NotMade
			mu.Unlock()
			continue
		}
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			said, err := call(number)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, fmt.Errorf("call %d: %w", number, err))
			}
			m.Answers[number] = said
		})
	}
	wg.Wait()
	return &m, errors.Join(failed...)
}

// called returns the answer to the call of a child. The time of one that waits counts from the
// call: on a busy machine a child may take as long to come to it, which says nothing about the
// call. Nor does it that the machine, or we, stand still for a while: of the steps in which the
// time goes by, that is one.
func called(come time.Duration, state *callState, start func() (pid int, err error)) (string, error) {
	pid, err := start()
	if err != nil {
		return "", err
	}
	begun := func() bool { return atomic.LoadUint32((*uint32)(state)) >= uint32(callBegun) }
	ended := make(chan error, 1)
	go func() { ended <- awaitEnd(pid) }()
	err = within(ended, come, begun)
	// Children of its own end with it.
	end := func() { _, _ = unix.Kill(-pid, unix.SIGKILL), unix.Kill(pid, unix.SIGKILL) }
	end()
	if errors.Is(err, errLate) {
		err = <-ended
	}
	var status unix.WaitStatus
	_, waitErr := again(func() (int, error) { return unix.Wait4(pid, &status, 0, nil) })
	if err := errors.Join(err, waitErr); err != nil {
		return "", err
	}
	if !begun() {
		return "", fmt.Errorf("the child has not come to it: it ended with %#x", int(status))
	}
	return answer(callState(atomic.LoadUint32((*uint32)(state))), status), nil
}

var errLate = errors.New("it has not ended")

// within waits for the end of a child, as long as [called] says.
func within(ended <-chan error, come time.Duration, begun func() bool) error {
	step := time.NewTicker(callTimeout / callSteps)
	defer step.Stop()
	late := time.NewTimer(come)
	defer late.Stop()
	for left := callSteps; left > 0; {
		select {
		case err := <-ended:
			return err
		case <-step.C:
			if begun() {
				left--
			}
		case <-late.C:
			if !begun() {
				return errLate
			}
		}
	}
	return errLate
}

// awaitEnd waits for the end of a child, whose id stays its own until it is reaped.
func awaitEnd(pid int) error {
	_, err := again(func() (any, error) { return nil, unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) })
	return err
}

func answer(state callState, status unix.WaitStatus) string {
	if status.Signaled() && status.Signal() == unix.SIGSYS {
		return Killed
	}
	if state > callBegun+1 {
		return cmp.Or(unix.ErrnoName(unix.Errno(state-callBegun-1)), Reached)
	}
	return Reached // it succeeded, crashed or ended the child, or hung
}
