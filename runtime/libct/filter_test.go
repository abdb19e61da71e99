package libct

import (
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// envFilter makes the test binary load a filter for good and say which of its threads can still do what it forbids.
const envFilter = "SANDBOXD_TEST_FILTER"

func TestMain(m *testing.M) {
	if os.Getenv(envFilter) != "" {
		filtered()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func filtered() {
	const threads = 8
	load, ready, done := make(chan struct{}), sync.WaitGroup{}, sync.WaitGroup{}
	errs := make([]error, threads)
	for i := range threads {
		ready.Add(1)
		done.Go(func() {
			goruntime.LockOSThread() // a thread of its own, from before the filter
			ready.Done()
			<-load
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			if err == nil {
				_ = unix.Close(fd)
			}
			nnp, _ := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
			if nnp != 1 {
				err = fmt.Errorf("no_new_privs is %d", nnp)
			}
			errs[i] = err
		})
	}
	ready.Wait()
	eacces := uint(unix.EACCES)
	err := LoadFilter(&specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow,
		Syscalls:      []specs.LinuxSyscall{{Action: specs.ActErrno, ErrnoRet: &eacces, Names: []string{"socket"}}},
	})
	close(load)
	done.Wait()
	fmt.Println("load:", err)
	for _, err := range errs {
		fmt.Println("thread:", err)
	}
}

// What unpacks a layer is a Go program of many threads: a filter on one of them would hold nobody.
func TestLoadFilterHoldsEveryThread(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{envFilter + "=1"}
	out, err := cmd.CombinedOutput()
	want := "load: <nil>\n" + strings.Repeat("thread: permission denied\n", 8)
	if err != nil || string(out) != want {
		t.Errorf("%v\n%swant\n%s", err, out, want)
	}
}
