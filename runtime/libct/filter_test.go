package libct

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer/configs"
	libcontainerseccomp "github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/seccomp"
)

// envFilter makes the test binary load a filter for good and report which of its threads can still
// make a forbidden call.
const envFilter = "SANDBOXD_TEST_FILTER"

func TestMain(m *testing.M) {
	switch os.Getenv(envFilter) {
	case "":
	case "profile":
		held()
		os.Exit(0)
	default:
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

// held loads the default profile's filter as libcontainer does, and waits for the end of its
// standard input.
func held() {
	_, config, err := defaultFilter()
	if err == nil {
		goruntime.LockOSThread()
		if err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err == nil {
			_, err = libcontainerseccomp.InitSeccomp(config)
		}
	}
	fmt.Println(unix.Gettid(), err)
	var end [1]byte
	_, _ = unix.Read(0, end[:]) // on this thread
}

func defaultFilter() (*specs.LinuxSeccomp, *configs.Seccomp, error) {
	filter, err := seccomp.Plan(seccomp.Default(), goruntime.GOARCH, seccomp.Abilities{Actions: []string{"allow", "errno", "kill_process", "kill_thread"}})
	if err != nil {
		return nil, nil, err
	}
	config, err := specconv.SetupSeccomp(filter)
	if err == nil {
		config.Flags = nil
	}
	return filter, config, err
}

// A sandbox's init loads the instructions that libcontainer would have loaded, except its prologue:
// that answers ENOSYS for calls newer than all it knows, as our filters do anyway.
func TestCompiledFilterIsWhatLibcontainerLoads(t *testing.T) {
	_, config, err := defaultFilter()
	if err != nil {
		t.Fatal(err)
	}
	ours, err := compile(config)
	if err != nil {
		t.Fatal(err)
	}
	testenv.RequireRoot(t) // only a process with CAP_SYS_ADMIN on the host may read another one's filter
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{envFilter + "=profile"}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = stdin.Close(), cmd.Wait() }()
	var tid int
	var said string
	if _, err := fmt.Fscan(stdout, &tid, &said); err != nil || said != "<nil>" {
		t.Fatal(err, said)
	}
	goruntime.LockOSThread() // a tracer is a thread
	defer goruntime.UnlockOSThread()
	if err := unix.PtraceAttach(tid); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.PtraceDetach(tid) }()
	if _, err := unix.Wait4(tid, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	theirs := make([]byte, 4096*8)
	n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(tid), 0, uintptr(unsafe.Pointer(&theirs[0])), 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	theirs = theirs[:n*8]
	if len(ours) < 8*100 || !bytes.HasSuffix(theirs, ours) {
		t.Errorf("libcontainer loads %d instructions, which do not end with our %d", len(theirs)/8, len(ours)/8)
	}
}

func TestFiltersAreCompiledOnceAndNeverMistaken(t *testing.T) {
	var f filters
	ask := func(name string) []byte {
		t.Helper()
		enosys := uint(unix.ENOSYS)
		filter := &specs.LinuxSeccomp{
			DefaultAction: specs.ActErrno, DefaultErrnoRet: &enosys, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchAARCH64},
			Syscalls: []specs.LinuxSyscall{{Names: []string{name}, Action: specs.ActAllow}},
		}
		config, err := specconv.SetupSeccomp(filter)
		if err != nil {
			t.Fatal(err)
		}
		config.Flags = nil
		p, err := f.program(filter, config)
		if err != nil || len(p) == 0 {
			t.Fatal(p, err)
		}
		return p
	}
	first := ask("read")
	if again := ask("read"); &again[0] != &first[0] {
		t.Error("an equal filter was compiled again")
	}
	if bytes.Equal(ask("write"), first) {
		t.Error("another filter got the same program")
	}
	for i, name := range []string{
		"open", "close", "stat", "fstat", "lstat", "poll", "lseek", "mmap", "mprotect", "munmap", "brk", "ioctl", "pread64",
		"pwrite64", "readv", "writev", "access", "pipe", "select", "mremap",
	} {
		if ask(name); len(f.known) > maxFilters {
			t.Fatalf("after %d, %d are kept", i, len(f.known))
		}
	}
	// A filter to which libcontainer adds instructions of its own is loaded by libcontainer.
	if p, err := f.program(nil, &configs.Seccomp{DefaultAction: configs.Errno, Architectures: []string{goruntime.GOARCH}}); p != nil || err != nil {
		t.Errorf("%d bytes, %v for a filter that answers EPERM", len(p), err)
	}
}

// An init that ends, or hangs up, before it has said that it is confined has not been created.
func TestCreationWaitsForTheInitsWord(t *testing.T) {
	for name, c := range map[string]struct {
		does func(fd int) error
		ok   bool
	}{
		"it says so": {func(fd int) error {
			_, err := unix.Read(fd, make([]byte, 1<<16))
			_, werr := unix.Write(fd, []byte{1})
			return errors.Join(err, werr)
		}, true},
		"it ends":              {func(int) error { return nil }, false},
		"it reads and it ends": {func(fd int) error { _, err := unix.Read(fd, make([]byte, 1<<16)); return err }, false},
	} {
		filter, config, err := defaultFilter()
		if err != nil {
			t.Fatal(err)
		}
		e := new(Engine)
		container := &configs.Config{Seccomp: config}
		ch, err := e.handFilter(filter, container)
		if err != nil || ch == nil || container.Seccomp != nil {
			t.Fatal(ch, err)
		}
		fd, err := unix.FcntlInt(ch.init.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(c.does(fd), unix.Close(fd)); err != nil {
			t.Fatal(err)
		}
		if err := ch.wait(t.Context()); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		ch.close()
	}
}

// The child that unpacks layers is a Go program of many threads: a filter on one of them would hold
// none of the others.
func TestLoadFilterHoldsEveryThread(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{envFilter + "=1"}
	out, err := cmd.CombinedOutput()
	want := "load: <nil>\n" + strings.Repeat("thread: permission denied\n", 8)
	if err != nil || string(out) != want {
		t.Errorf("%v\n%swant\n%s", err, out, want)
	}
}
