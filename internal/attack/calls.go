package attack

import (
	"bufio"
	"bytes"
	"cmp"
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
	m, err := measure(func(number int) (string, error) {
		return called(comeTimeout, "/proc/self/exe", mainArg, "call", strconv.Itoa(number))
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := json.NewEncoder(os.Stdout).Encode(m); err != nil {
		return 1
	}
	return 0
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

// called is the answer to the call of a program that prints an empty line when it has come to the
// call. The time of one that waits counts from then: on a busy machine the start of the program
// may take as long, which says nothing about the call. Nor does it that the machine, or we, stand
// still for a while: of the steps in which the time goes by, that is one.
func called(come time.Duration, argv ...string) (string, error) {
	ctx, cancel := context.WithCancel(context.Background())
	begun := make(chan struct{})
	var clock sync.WaitGroup
	defer clock.Wait()
	defer cancel()
	clock.Go(func() {
		defer cancel()
		late := time.NewTimer(come)
		defer late.Stop()
		select {
		case <-begun:
		case <-late.C:
			return
		case <-ctx.Done():
			return
		}
		step := time.NewTicker(callTimeout / callSteps)
		defer step.Stop()
		for range callSteps {
			select {
			case <-step.C:
			case <-ctx.Done():
				return
			}
		}
	})
	out := announced{begun: func() { close(begun) }}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout = &out
	err := run(cmd)
	if out.text.Len() == 0 {
		return "", fmt.Errorf("who was to make it has not come to it: %w", cmp.Or(err, errors.New("it said nothing")))
	}
	return answer(out.text.Bytes(), err), nil
}

// announced collects the output of a program. Begun is called with the first of it.
type announced struct {
	text  bytes.Buffer // not embedded: io.Copy would call its ReadFrom
	begun func()
}

func (a *announced) Write(p []byte) (int, error) {
	if a.text.Len() == 0 {
		a.begun()
	}
	return a.text.Write(p)
}

// run runs a program until it ends or its context does. Children that it leaves behind end with
// it: one that a bare fork makes of a Go program may hang on a lock whose holder it lacks, and
// would keep the output open for ever.
func run(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	end := func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Cancel = end
	cmd.WaitDelay = callTimeout / 5 // the output is then closed, whoever has it
	err := cmd.Run()
	if cmd.Process != nil {
		_ = end() // mostly it has ended
	}
	return err
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

// makeCall makes one call and prints the answer, after an empty line.
func makeCall(arg string) (code int) {
	number, err := strconv.Atoi(arg)
	if err != nil {
		return 2
	}
	args := CallArgs(CallName(number))
	fmt.Println() // see called
	_, _, errno := unix.RawSyscall6(uintptr(number), uintptr(args[0]), uintptr(args[1]), uintptr(args[2]), 0, 0, 0)
	if errno != 0 {
		fmt.Println(unix.ErrnoName(errno))
		return 0
	}
	return 0 // in silence: a child that was forked would say it too
}
