package host

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/inside"

	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A test's init is this binary again, process 1 of its own user, PID and mount namespace: init
// changes its process in ways that cannot be undone.
const (
	envInit   = "SANDBOXD_GUEST_TEST_INIT"
	envHelper = "SANDBOXD_GUEST_TEST_HELPER"
)

// Constants of package inside that these tests judge by.
const (
	initKillAll        = time.Second      // killAll
	initRequestTimeout = 10 * time.Second // requestTimeout
	initDepth          = 200              // maxDepth
	initTrailer        = 1 << 20          // maxTrailer
)

func init() {
	if os.Getenv(envInit) != "" {
		goruntime.LockOSThread() // as cmd/sandboxd-init
	}
}

func TestMain(m *testing.M) {
	if inside.IsShim(os.Args) {
		inside.RunShim(os.Args)
	}
	if os.Getenv(envInit) != "" {
		fmt.Fprintln(os.Stderr, "test init:", testInit())
		os.Exit(1)
	}
	if name := os.Getenv(envHelper); name != "" {
		helpers[name]()
		os.Exit(0)
	}
	unix.Umask(0o022) // so that new files have the expected modes, and others may pass through directories
	os.Exit(m.Run())
}

// testInit becomes the init of a sandbox that shares the host's files.
func testInit() error {
	os.Clearenv()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666"); err != nil {
		return fmt.Errorf("mount devpts: %w", err)
	}
	if err := unix.Mount("/dev/pts/ptmx", "/dev/ptmx", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind ptmx: %w", err)
	}
	// inside.Run needs AllThreadsSyscall, which a test binary with cgo lacks; the race detector needs
	// cgo. The tests of cmd/sandboxd-init cover the rest.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	return inside.Serve(3, -1, nil)
}

// A sandbox is a running init.
type sandbox struct {
	*Client
	cmd *exec.Cmd
}

func startInit(tb testing.TB) *sandbox {
	tb.Helper()
	return startInitWith(tb, ids())
}

// startInitWith starts one with so many ids.
func startInitWith(tb testing.TB, ids int) *sandbox {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "guest.sock")
	l, err := guesttest.Listen(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	testenv.RequireUserNS(tb)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{envInit + "=1"}
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{l}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: ids}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: ids}},
		GidMappingsEnableSetgroups: ids > 1,
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	s := &sandbox{Client: NewClient(path), cmd: cmd}
	if err := s.Ping(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return s
}

// ids is how many ids the test's sandboxes have: an ordinary user can map but his own.
func ids() int {
	if os.Getuid() == 0 {
		return 65536
	}
	return 1
}

var testEnv = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "LC_ALL=C"}

// run runs a command to its end.
func (s *sandbox) run(tb testing.TB, r ExecRequest) (stdout, stderr string, exit ExecExit, err error) {
	tb.Helper()
	if r.Env == nil {
		r.Env = testEnv
	}
	e, err := s.Exec(tb.Context(), r)
	if err != nil {
		return "", "", ExecExit{}, err
	}
	defer func() { _ = e.Close() }()
	var out, errs strings.Builder
	exit, err = e.Stream(tb.Context(), func(stream string, p []byte) error {
		if stream == "stdout" {
			out.Write(p)
		} else {
			errs.Write(p)
		}
		return nil
	})
	return out.String(), errs.String(), exit, err
}

// sh runs a shell script that must succeed.
func (s *sandbox) sh(tb testing.TB, script string) string {
	tb.Helper()
	out, errs, exit, err := s.run(tb, ExecRequest{Argv: []string{"sh", "-c", script}})
	if err != nil || exit.Code != 0 {
		tb.Fatalf("sh -c %q: %+v, %v\n%s%s", script, exit, err, out, errs)
	}
	return out
}

// helper is a request that runs one of helpers in the sandbox.
func helper(tb testing.TB, name string) ExecRequest {
	tb.Helper()
	self, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	return ExecRequest{Argv: []string{self}, Env: append([]string{envHelper + "=" + name}, testEnv...)}
}

// helpers run in the sandbox, each in a process of its own.
var helpers = map[string]func(){
	// The first thread ends and the others go on.
	"headless": func() {
		fmt.Println("up")
		var try func()
		try = func() {
			goruntime.LockOSThread()
			if unix.Gettid() == unix.Getpid() {
				_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
			}
			go try()
			select {}
		}
		go try()
		select {}
	},
	// Prints its descriptors and attributes.
	"self": func() {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			fmt.Println(err)
			return
		}
		for _, fd := range fds {
			name, err := os.Readlink("/proc/self/fd/" + fd.Name())
			if err != nil || strings.HasPrefix(name, "anon_inode:") {
				continue // the directory that is being read, and the Go runtime's own
			}
			if strings.HasPrefix(name, "/sys/fs/cgroup/") {
				continue // the Go runtime's own as well
			}
			fmt.Println("fd", fd.Name())
		}
		fmt.Println("sid", must(unix.Getsid(0)) == unix.Getpid())
		fmt.Println("umask", unix.Umask(0))
		fmt.Println("ignored", ignored())
	},
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// ignored returns the mask of ignored signals, without those of this process's own Go runtime.
func ignored() string {
	for line := range strings.Lines(string(must(os.ReadFile("/proc/self/status")))) {
		if v, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

func asError(tb testing.TB, err error) *guest.Error {
	tb.Helper()
	var e *guest.Error
	if !errors.As(err, &e) {
		tb.Fatalf("error %v (%T), want *Error", err, err)
	}
	return e
}
