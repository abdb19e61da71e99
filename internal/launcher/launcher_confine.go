package launcher

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/kernel"
)

// Two stages of a confined child. The first pivots into its directory, which takes capabilities,
// and executes the second with fewer. Dropping them in place would take every thread of the Go
// runtime.

// ApplyConfine is the first stage. It returns only on error, after reporting it.
func ApplyConfine(arg string) error { return report(layer.Result{}, confineAndExec(arg)) }

// ApplyMain is the second stage: it extracts its standard input below "/". LoadFilter loads a
// seccomp filter for all threads (libct.LoadFilter).
func ApplyMain(arg string, loadFilter func(*specs.LinuxSeccomp) error) error {
	return report(apply(arg, loadFilter))
}

func report(result layer.Result, err error) error {
	if err := json.NewEncoder(os.Stdout).Encode(childReport{Error: toWire(err), Result: result}); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

func confineAndExec(arg string) error {
	// Capabilities belong to a thread, and the one that executes hands on its own.
	goruntime.LockOSThread()
	var job applyJob
	if err := json.Unmarshal([]byte(arg), &job); err != nil {
		return fmt.Errorf("decode job: %w", err)
	}
	exe, err := begin(applyGate + 1)
	if err != nil {
		return err
	}
	// The layers below, read-only, each as a mount of its own that is attached nowhere: ".." ends at
	// its root.
	for _, parent := range slices.Backward(job.Parents) {
		fd, err := detached(parent, unix.MOUNT_ATTR_RDONLY, 0)
		if err != nil {
			return err
		}
		job.Lower = append(job.Lower, fd)
	}
	if err := confine(job.Dir, 0); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	if job.Landlock, err = restrict(applyCapabilities, landlockTarget, exe, nil, job.Lower); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	return execute(exe, "apply-confined", &job)
}

// begin opens the executable of the second stage. From descriptor first on, that stage gets only
// descriptors opened from now on: others that the launcher has leaked end here.
func begin(first uint) (exe int, err error) {
	if err := unix.CloseRange(first, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return -1, fmt.Errorf("close descriptors: %w", err)
	}
	exe, err = unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open own executable: %w", err)
	}
	return exe, nil
}

// restrict takes all capabilities except keep from the calling thread, and so from all threads of
// the program that it executes. Where the kernel has Landlock, it also takes all access to files
// except: target below "/" and the directories also, reading of the directories lower, and
// execution of exe.
func restrict(keep []uintptr, target uint64, exe int, also, lower []int) (held bool, err error) {
	if err := dropCapabilities(keep); err != nil {
		return false, err
	}
	// Landlock requires it of a thread without CAP_SYS_ADMIN, which has just left the bounding set.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return false, fmt.Errorf("set no_new_privs: %w", err)
	}
	// A kernel without Landlock is reported by the doctor; on one with it the restriction is not
	// optional.
	abi, err := kernel.LandlockABI()
	if err != nil || abi < kernel.LandlockRefer {
		return false, nil //nolint:nilerr // as said
	}
	return true, planLandlock(abi, target).apply(exe, also, lower)
}

// childEnv is the environment of both stages. Without TZ, Go opens /etc/localtime when it first
// formats a local time or decodes one with an offset, and waits for it where the sandbox has made
// that a FIFO.
var childEnv = []string{"TZ=UTC"}

// execute executes a child's second stage.
func execute(exe int, stage string, job any) error {
	next, err := json.Marshal(job)
	if err != nil {
		return fmt.Errorf("encode job: %w", err)
	}
	// There is no /proc to name the executable by any more.
	argv, err := syscall.SlicePtrFromStrings([]string{"sandboxd-launcher", stage, string(next)})
	if err != nil {
		return fmt.Errorf("execute second stage: %w", err)
	}
	envp, err := syscall.SlicePtrFromStrings(childEnv)
	if err != nil {
		return fmt.Errorf("execute second stage: %w", err)
	}
	//nolint:gosec // the addresses are those of the arrays which execveat(2) reads
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(exe), uintptr(unsafe.Pointer(&[]byte{0}[0])),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envp[0])), unix.AT_EMPTY_PATH, 0)
	return fmt.Errorf("execute second stage: %w", errno)
}

// applyCapabilities are the capabilities for owning files, in the sandbox's ids only.
var applyCapabilities = []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID}

// dropCapabilities takes all others out of the calling thread's bounding set, which also limits the
// programs that it executes as uid 0.
func dropCapabilities(keep []uintptr) error {
	for c := range uintptr(64) {
		if slices.Contains(keep, c) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // there are no more
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// checkCapabilities verifies that this process has no others than those that were to be kept.
func checkCapabilities(keep []uintptr) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	var allowed uint32
	for _, c := range keep {
		allowed |= 1 << c
	}
	if data[0].Permitted&^allowed != 0 || data[1].Permitted != 0 {
		return fmt.Errorf("capabilities %08x%08x are left", data[1].Permitted, data[0].Permitted)
	}
	return nil
}

func apply(arg string, loadFilter func(*specs.LinuxSeccomp) error) (layer.Result, error) {
	var job applyJob
	if err := json.Unmarshal([]byte(arg), &job); err != nil {
		return layer.Result{}, fmt.Errorf("decode job: %w", err)
	}
	if err := checkCapabilities(applyCapabilities); err != nil {
		return layer.Result{}, fmt.Errorf("confine layer child: %w", err)
	}
	opts := layer.Options{MediaType: job.MediaType, DiffID: job.DiffID, Limits: job.Limits, SingleID: job.Single, Lower: []*os.Root{}, FromDiff: job.FromDiff, Plain: job.Plain}
	for _, fd := range job.Lower {
		r, err := rootOf(fd)
		if err != nil {
			return layer.Result{}, fmt.Errorf("open layer below: %w", err)
		}
		opts.Lower = append(opts.Lower, r)
	}
	if err := unix.Chdir("/"); err != nil {
		return layer.Result{}, fmt.Errorf("enter layer directory: %w", err)
	}
	root, err := os.OpenRoot("/")
	if err != nil {
		return layer.Result{}, fmt.Errorf("open layer directory: %w", err)
	}
	if err := lock(loadFilter, applyFilter()); err != nil {
		return layer.Result{}, fmt.Errorf("confine layer child: %w", err)
	}
	if job.Landlock {
		if err := verifyLandlock(); err != nil {
			return layer.Result{}, fmt.Errorf("confine layer child: %w", err)
		}
	}
	opts.LowerReady = func() error {
		for {
			var word [1]byte
			n, err := unix.Read(applyGate, word[:])
			switch {
			case errors.Is(err, unix.EINTR):
			case err == nil && n == 1:
				return nil
			default:
				return fmt.Errorf("wait for the layers below: %w", cmp.Or(err, io.EOF))
			}
		}
	}
	return layer.Apply(root, os.Stdin, opts)
}

// applyGate is the descriptor of the pipe on which a byte comes when the layers below are complete.
const applyGate = 3

// lock loads the filter, the last step of a child's confinement, and tries one thing that must not
// work any more.
func lock(loadFilter func(*specs.LinuxSeccomp) error, filter *specs.LinuxSeccomp) error {
	if err := loadFilter(filter); err != nil {
		return err
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); err == nil {
		return errors.Join(errors.New("a socket could be made"), unix.Close(fd))
	}
	return nil
}

// verifyLandlock tries one thing in the layer's directory that nothing but Landlock refuses. A
// child that only reads has nothing of the kind: its mounts refuse all that changes anything.
func verifyLandlock() error {
	const name = "sandboxd-socket"
	err := unix.Mknodat(unix.AT_FDCWD, name, unix.S_IFSOCK|0o600, 0)
	if err == nil {
		return errors.Join(errors.New("a socket could be made in the layer in spite of Landlock"), unix.Unlink(name))
	}
	if !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("try Landlock: %w", err)
	}
	return nil
}

// detached returns a copy of the mount at dir that is attached nowhere. A link there is not
// followed.
func detached(dir string, attr uint64, flags uint) (int, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.AT_SYMLINK_NOFOLLOW|flags)
	if err != nil {
		return -1, fmt.Errorf("copy mount of %s: %w", filepath.Base(dir), err)
	}
	if attr != 0 {
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|flags&unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: attr}); err != nil {
			return -1, errors.Join(fmt.Errorf("restrict mount of %s: %w", filepath.Base(dir), err), unix.Close(tree))
		}
	}
	return tree, nil
}

// rootOf turns a directory's descriptor, which it closes, into an os.Root. There is no /proc
// through which to name it.
func rootOf(fd int) (*os.Root, error) {
	err := unix.Fchdir(fd)
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return nil, err
	}
	return os.OpenRoot(".")
}

// confine makes dir the root of the process, with attr set on its mount. Nothing else is reachable.
func confine(dir string, attr uint64) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	tree, err := detached(dir, attr, unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, RootfsDir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	if err := unix.Fchdir(tree); err != nil {
		return fmt.Errorf("enter: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	unix.Umask(0)
	return nil
}

// applyFilter allows the system calls of unpacking: files below open directories, memory, threads
// of the Go runtime. No network, no execution, no process, no mounts, no namespaces, no tracing, no
// limits or signals of others, no device.
func applyFilter() *specs.LinuxSeccomp {
	f := filter(reading + `
		mkdirat symlinkat linkat unlinkat renameat renameat2
		fchown fchownat fchmod fchmodat fchmodat2 utimensat ftruncate fallocate
		fsetxattr fremovexattr setxattr lsetxattr setxattrat getxattr lgetxattr getxattrat
		copy_file_range umask`)
	// FIFOs and whiteouts: no device but 0:0, for whatever privilege.
	f.Syscalls = append(f.Syscalls, allow("mknodat", specs.LinuxSeccompArg{Index: 3, Value: 0, Op: specs.OpEqualTo}))
	return f
}

// reading lists the system calls for reading files and writing to open ones; seccomp(2) is for
// LoadFilter's last step.
const reading = `
	read write pread64 pwrite64 readv writev lseek close fcntl fstat newfstatat statx dup dup3
	openat openat2 readlinkat getdents64 faccessat faccessat2 fgetxattr flistxattr fadvise64
	mmap munmap mprotect madvise mremap brk mincore
	futex sched_yield sched_getaffinity set_robust_list rseq exit exit_group restart_syscall
	rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack tgkill getpid gettid getuid geteuid getgid getegid
	nanosleep clock_nanosleep clock_gettime gettimeofday timer_create timer_settime timer_delete setitimer
	epoll_create1 epoll_ctl epoll_pwait eventfd2 pipe2 getrandom uname seccomp`

// filter allows these system calls, and the few that threads of the Go runtime take besides. The
// default is an error rather than death so that a missing name shows as one clear message.
func filter(names string) *specs.LinuxSeccomp {
	eperm := uint(unix.EPERM)
	enosys := uint(unix.ENOSYS)
	const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	return &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: &eperm,
		Syscalls: []specs.LinuxSyscall{
			{Action: specs.ActAllow, Names: strings.Fields(names)},
			// Threads of this process, in the namespaces that it has.
			allow("clone", specs.LinuxSeccompArg{Index: 0, Value: namespaces | unix.CLONE_THREAD, ValueTwo: unix.CLONE_THREAD, Op: specs.OpMaskedEqual}),
			{Action: specs.ActErrno, ErrnoRet: &enosys, Names: []string{"clone3"}}, // the C library then uses clone
			// The Go runtime names its memory, and asks for its own limits.
			allow("prctl", specs.LinuxSeccompArg{Index: 0, Value: unix.PR_SET_VMA, Op: specs.OpEqualTo}),
			allow("prlimit64", specs.LinuxSeccompArg{Index: 0, Value: 0, Op: specs.OpEqualTo}),
		},
	}
}

func allow(name string, arg specs.LinuxSeccompArg) specs.LinuxSyscall {
	return specs.LinuxSyscall{Action: specs.ActAllow, Names: []string{name}, Args: []specs.LinuxSeccompArg{arg}}
}
