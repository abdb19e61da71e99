package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Theory of operation. The parent (a probe below) executes its own program again as
//
//	/proc/self/exe kernel-probe NAME ARGUMENT
//
// in new namespaces, as root of a single-id user namespace. The child ([Main]) tries the thing and
// says "ok" on its standard output; anything else is a failure, and the text is the reason. The
// child's mounts end with it.

// childArg is the first argument of a program that is a probe's child.
const childArg = "kernel-probe"

const childOK = "ok\n"

var hooked atomic.Bool

// Main is to be called first thing by every program that probes. Where the program was executed as
// the child of a probe, it does the child's part and handled is true: the caller then exits with
// the code, and does nothing else.
func Main(args []string) (code int, handled bool) {
	hooked.Store(true)
	if len(args) != 3 || args[0] != childArg {
		return 0, false
	}
	var err error
	switch {
	case os.Getpid() != 1:
		// It was typed at a shell. As root, on the host, the mounts would stay.
		err = errors.New("probes run in a PID namespace of their own")
	case args[1] == "overlay":
		err = overlayChild(args[2])
	case args[1] == "proc":
		err = procChild()
	case args[1] == "ipc":
		err = ipcChild()
	default:
		err = fmt.Errorf("no probe is called %q", args[1])
	}
	return ReportChild(err), true
}

// ReportChild ends the child's part of a probe: it prints the error, or that there is none, for
// [RunChild], and returns the exit code.
func ReportChild(err error) (code int) {
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Print(childOK)
	return 0
}

// Overlay tries to mount an overlay with userxattr in a user namespace, with everything on the
// file system of dir, and to delete a file of its lower part.
func Overlay(ctx context.Context, dir string) (err error) {
	tmp, err := os.MkdirTemp(dir, ".sandboxd-probe-")
	if err != nil {
		return fmt.Errorf("probe overlay: %w", err)
	}
	defer func() {
		// Overlay makes work/work with mode 0, so that an ordinary user cannot look whether it is empty.
		chmod := os.Chmod(filepath.Join(tmp, "work", "work"), 0o700) //nolint:gosec // G302: it is a directory
		if chmod != nil && !errors.Is(chmod, fs.ErrNotExist) {
			err = errors.Join(err, chmod)
		}
		err = errors.Join(err, os.RemoveAll(tmp))
	}()
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(tmp, d), 0o700); err != nil {
			return fmt.Errorf("probe overlay: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, "lower", "file"), nil, 0o600); err != nil {
		return fmt.Errorf("probe overlay: %w", err)
	}
	return runChild(ctx, "overlay", tmp, "overlay in a user namespace", "5.11")
}

func overlayChild(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	// Relative names: commas and colons in dir would need quoting.
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	if err := unix.Mount("overlay", "merged", "overlay", flags, "userxattr,lowerdir=lower,upperdir=upper,workdir=work"); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := os.Remove("merged/file"); err != nil {
		return fmt.Errorf("delete a file of the lower part: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat("upper/file", &st); err != nil {
		return fmt.Errorf("look for the whiteout: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		return fmt.Errorf("the whiteout has mode %#o and device %d", st.Mode, st.Rdev)
	}
	return nil
}

// Proc tries to mount a fresh procfs in new user, PID and mount namespaces. The kernel refuses it
// where parts of the visible /proc are covered, as they are in most containers.
func Proc(ctx context.Context) error {
	return runChild(ctx, "proc", "-", "a fresh /proc in a user namespace", "3.8")
}

func procChild() error {
	return unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// IPCCeilings tries whether the root of an IPC namespace can set the ceilings of System V IPC in
// it.
func IPCCeilings(ctx context.Context) error {
	return runChild(ctx, "ipc", "-", "ceilings of System V IPC in a user namespace", "6.9")
}

func ipcChild() error {
	if err := procChild(); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := IPCIsOurs(); err != nil {
		return fmt.Errorf("write to kernel.shmmni: %w", err)
	}
	return nil
}

func runChild(ctx context.Context, name, arg, feature, since string) error {
	if !hooked.Load() {
		return fmt.Errorf("probe %s: %w", feature, ErrNotHooked)
	}
	// The mounts that the new namespace copies become slaves, because its user namespace is another:
	// mounts of the child do not come back to us.
	return RunChild(ctx, feature, since, syscall.CLONE_NEWNS|syscall.CLONE_NEWPID|syscall.CLONE_NEWIPC, childArg, name, arg)
}

// RunChild executes the running program again, with args, as root of a new user namespace and in
// other new ones, for a program that calls [ReportChild] there. It returns an [UnsupportedError]
// with the child's words where that fails.
func RunChild(ctx context.Context, feature, since string, namespaces uintptr, args ...string) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...) //nolint:gosec // G204: our own program
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | namespaces,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if string(out) == childOK && err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("probe %s: %w", feature, ctx.Err())
	}
	if said := strings.TrimSpace(string(bytes.ToValidUTF8(out, nil))); said != "" {
		err = errors.New(said)
	}
	return &UnsupportedError{Feature: feature, Since: since, Err: err}
}
