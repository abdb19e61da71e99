// Package servicetest has what tests of the service and of its faces share: a real init and
// stand-ins for the processes around a daemon. It does not import the service, so that its tests
// can use it.
package servicetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// ListenStale listens on a socket of dir that stays when the listener is closed, like that of a
// sandbox whose init has died.
func ListenStale(dir, name string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: unixmsg.ShortName(d, name)})
	if err == nil {
		l.SetUnlinkOnClose(false)
	}
	return l, err
}

// The init of a test's sandbox is the product's own, in namespaces of its own but on the host's
// files: this binary starts again, mounts what init needs, and becomes it.
const envInit = "SANDBOXD_DAEMON_TEST_INIT"

// Patience bounds a wait for something that must happen.
var Patience = testenv.HungAfter

// Main runs the tests of a package whose sandboxes have [RealInit].
func Main(m *testing.M) {
	if path := os.Getenv(envInit); path != "" {
		fmt.Fprintln(os.Stderr, "test init:", becomeInit(path))
		os.Exit(1)
	}
	code := m.Run()
	if built := initPath.dir; built != "" {
		_ = os.RemoveAll(built) // a temporary directory
	}
	os.Exit(code)
}

func becomeInit(path string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
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
	if err := guesttest.PassProc(); err != nil {
		return err
	}
	return unix.Exec(path, []string{"sandboxd-init"}, nil)
}

// initPath builds cmd/sandboxd-init once, without cgo, which it cannot have, unless SANDBOXD_BIN
// has it.
var initPath struct {
	once sync.Once
	dir  string
	err  error
}

func buildInit(tb testing.TB) string {
	tb.Helper()
	if bin := os.Getenv("SANDBOXD_BIN"); bin != "" {
		return filepath.Join(bin, "sandboxd-init")
	}
	initPath.once.Do(func() {
		if initPath.dir, initPath.err = os.MkdirTemp("", "sandboxd-init"); initPath.err != nil { //nolint:usetesting // outlives the test: all share it
			return
		}
		cmd := exec.Command("go", "build", "-o", filepath.Join(initPath.dir, "sandboxd-init"), "github.com/sandboxd/sandboxd/cmd/sandboxd-init")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			initPath.err = fmt.Errorf("%w: %s", err, out)
		}
		// Found and executed from inside, also by a user without rights on a private temporary directory.
		initPath.err = errors.Join(initPath.err, os.Chmod(initPath.dir, 0o755))
	})
	if initPath.err != nil {
		tb.Fatal(initPath.err)
	}
	return filepath.Join(initPath.dir, "sandboxd-init")
}

// RealInit runs sandboxd-init for each sandbox.
func RealInit(tb testing.TB) runtimetest.Init {
	tb.Helper()
	if os.Getuid() != 0 {
		testenv.RequireUserNS(tb) // for the namespaces of the init
	}
	path := buildInit(tb)
	return func(_ *runtime.Spec, control *os.File, stop <-chan struct{}) {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{envInit + "=" + path}
		cmd.Stderr = os.Stderr
		cmd.ExtraFiles = []*os.File{control}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
			Pdeathsig:  unix.SIGKILL,
		}
		if os.Getuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		// Pdeathsig counts from the thread that forked.
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		err := cmd.Start()
		_ = control.Close() // init has its own
		if err != nil {
			tb.Errorf("start init: %v", err)
			<-stop
			return
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait() // it is killed
			close(ended)
		}()
		select {
		case <-stop:
			_ = cmd.Process.Kill() // it may have ended
		case <-ended:
		}
		<-ended
	}
}

// Dial connects to the socket at path, however long that is.
func Dial(ctx context.Context, path string) (conn net.Conn, err error) {
	err = unixmsg.WithShortName(path, func(name string) error {
		conn, err = new(net.Dialer).DialContext(ctx, "unix", name)
		return err
	})
	return conn, err
}
