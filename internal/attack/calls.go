package attack

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The names of system calls, from golang.org/x/sys/unix; TestCallsAreThoseOfTheKernel compares.
//
//go:embed calls_*.txt
var callNames embed.FS

const (
	maxCall     = 511             // beyond the last that any kernel has by now
	callTimeout = 5 * time.Second // of one that waits: it has been reached
)

// Answers that are no error's name.
const (
	Reached = "reached" // it succeeded, or did not come back
	Killed  = "killed"  // the filter ended the process
)

// Measured is what the kernel answers to each system call of one architecture, each made once with the arguments of [CallArgs].
type Measured struct {
	Arch    string         `json:"arch"`
	Answers map[int]string `json:"answers"` // an error's name, [Reached] or [Killed]
}

// CallName is the name of a system call on this architecture; empty where the number has none.
func CallName(number int) string { return callTable()[number] }

func callTable() map[int]string {
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
}

// CallArgs are the arguments that a call is measured with: ones that a filter lets through if it lets any through, and that
// make no sense to the kernel.
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
	case "personality":
		return [3]uint64{0xffffffff, 0, 0}
	case "fork", "vfork", "pause", "sync", "exit", "exit_group":
		return [3]uint64{}
	}
	return [3]uint64{none, none, none}
}

// measureCalls makes every call in a process of its own and prints a [Measured]. Those that wait wait beside each other.
func measureCalls() (code int) {
	m := Measured{Arch: goruntime.GOARCH, Answers: make(map[int]string)}
	var mu sync.Mutex // guards m.Answers
	var wg sync.WaitGroup
	places := make(chan struct{}, 4)
	for number := range maxCall + 1 {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
			defer cancel()
			out, err := exec.CommandContext(ctx, "/proc/self/exe", mainArg, "call", strconv.Itoa(number)).Output()
			mu.Lock()
			defer mu.Unlock()
			m.Answers[number] = answer(out, err)
		})
	}
	wg.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(&m); err != nil {
		return 1
	}
	return 0
}

func answer(out []byte, err error) string {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGSYS {
			return Killed
		}
	}
	if said := strings.TrimSpace(string(out)); said != "" && err == nil {
		return said
	}
	return Reached // it crashed or ended the program, hung, or has taken its output away
}

// makeCall makes one call and prints the answer.
func makeCall(arg string) (code int) {
	number, err := strconv.Atoi(arg)
	if err != nil {
		return 2
	}
	args := CallArgs(CallName(number))
	_, _, errno := unix.RawSyscall6(uintptr(number), uintptr(args[0]), uintptr(args[1]), uintptr(args[2]), 0, 0, 0)
	if errno != 0 {
		fmt.Println(unix.ErrnoName(errno))
		return 0
	}
	return 0 // in silence: a child that was forked would say it too
}
