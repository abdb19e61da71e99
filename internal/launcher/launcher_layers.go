package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// partial is the prefix of a layer directory that is not complete; what an earlier launcher left is removed.
const partial = ".partial-"

// Layers keeps the extracted layers, in the launcher.
type Layers struct {
	ids    []idmap.Range
	single bool
	slots  chan struct{} // for extracting
	diffs  chan struct{} // for reading what sandboxes have changed

	freezer freezer

	mu      sync.Mutex
	serial  int
	working map[string]chan struct{} // chain ids being extracted; closed when done
}

// OpenLayers removes what an interrupted extraction left.
func OpenLayers(ids []idmap.Range, single bool) (*Layers, error) {
	entries, err := os.ReadDir(LayersDir)
	if err != nil {
		return nil, fmt.Errorf("read layers: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), partial) {
			if err := os.RemoveAll(filepath.Join(LayersDir, e.Name())); err != nil {
				return nil, fmt.Errorf("remove interrupted layer: %w", err)
			}
		}
	}
	return &Layers{
		ids: ids, single: single, slots: make(chan struct{}, 2), diffs: make(chan struct{}, 4), working: make(map[string]chan struct{}),
		freezer: freezer{frozen: make(map[string]int)},
	}, nil
}

func layerDir(chainID string) (string, error) {
	name, err := rootfs.LayerName(chainID)
	if err != nil {
		return "", err
	}
	return filepath.Join(LayersDir, name), nil
}

// Apply extracts req.Blob into the directory of its chain id, in a confined child. A directory that exists is complete
// and left alone.
func (l *Layers) Apply(ctx context.Context, req *layer.ApplyRequest) (_ layer.Result, err error) {
	final, err := layerDir(req.ChainID)
	if err != nil {
		return layer.Result{}, err
	}
	// One at a time for each chain id; the second finds the first one's directory.
	for {
		l.mu.Lock()
		other := l.working[req.ChainID]
		if other == nil {
			break
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return layer.Result{}, ctx.Err()
		}
	}
	done := make(chan struct{})
	l.working[req.ChainID] = done
	l.serial++
	tmp := filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.working, req.ChainID)
		l.mu.Unlock()
		close(done)
	}()
	if _, err := os.Lstat(final); err == nil {
		return layer.Result{}, nil
	}

	select {
	case l.slots <- struct{}{}:
		defer func() { <-l.slots }()
	case <-ctx.Done():
		return layer.Result{}, ctx.Err()
	}
	root := l.ids[0].Outside
	if err := os.Mkdir(tmp, 0o755); err != nil { //nolint:gosec // G301: it becomes the "/" of sandboxes
		return layer.Result{}, fmt.Errorf("make layer directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := os.Lchown(tmp, root, root); err != nil {
		return layer.Result{}, fmt.Errorf("make layer directory: %w", err)
	}
	result, err := l.applyIn(ctx, tmp, req)
	if err != nil {
		return layer.Result{}, err
	}
	// The child has synced the file system. The rename makes the layer visible, the sync of the directory makes that last.
	if err := os.Rename(tmp, final); err != nil {
		return layer.Result{}, fmt.Errorf("complete layer: %w", err)
	}
	dir, err := os.Open(LayersDir)
	if err != nil {
		return layer.Result{}, fmt.Errorf("sync layers: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return layer.Result{}, fmt.Errorf("sync layers: %w", err)
	}
	return result, nil
}

// Remove deletes an extracted layer; one that is not there is no error.
func (l *Layers) Remove(chainID string) error {
	dir, err := layerDir(chainID)
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.serial++
	tmp := filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	// Renamed first, so that a half-removed layer is never taken for a whole one.
	if err := os.Rename(dir, tmp); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	return nil
}

// applyJob is what the child needs to know; childReport is what it answers on its standard output.
type applyJob struct {
	Dir       string       `json:"dir"`
	Parents   []string     `json:"parents"`
	MediaType string       `json:"media_type"`
	DiffID    string       `json:"diff_id"`
	Limits    layer.Limits `json:"limits"`
	Single    bool         `json:"single"`
	Lower     []int        `json:"lower,omitempty"` // second stage: descriptors of the layers below, highest first
}

type childReport struct {
	Error  *wireError   `json:"error,omitempty"`
	Result layer.Result `json:"result"`
}

func (l *Layers) applyIn(ctx context.Context, dir string, req *layer.ApplyRequest) (layer.Result, error) {
	job := applyJob{Dir: dir, MediaType: req.MediaType, DiffID: req.DiffID, Limits: req.Limits, Single: l.single}
	for _, p := range req.Parents {
		d, err := layerDir(p)
		if err != nil {
			return layer.Result{}, err
		}
		job.Parents = append(job.Parents, d)
	}
	return l.child(ctx, "unpack layer", "apply", &job, req.Blob)
}

// child runs the two stages of a confined child. Its standard input is in; what it has to say comes on its standard output.
func (l *Layers) child(ctx context.Context, doing, stage string, job any, in *os.File, extra ...*os.File) (layer.Result, error) {
	arg, err := json.Marshal(job)
	if err != nil {
		return layer.Result{}, fmt.Errorf("encode job: %w", err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", stage, string(arg)) //nolint:gosec // G204: our own sealed binary
	cmd.Env = []string{}
	cmd.Dir = "/"
	if in != nil {
		cmd.Stdin = in // a nil of a type would not be none
	}
	cmd.ExtraFiles = extra // from descriptor 3 on
	var out, complaints limited
	cmd.Stdout, cmd.Stderr = &out, &complaints
	// The sandbox's own map: "chown 0" in the child is the sandbox's root on the host, and nothing above can be named.
	var maps []syscall.SysProcIDMap
	for _, r := range l.ids {
		maps = append(maps, syscall.SysProcIDMap{ContainerID: r.Inside, HostID: r.Outside, Size: r.Size})
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: !l.single,
		Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: l.single},
		Pdeathsig:  unix.SIGKILL,
	}
	runErr := cmd.Run()
	var report childReport
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		// It was killed or has panicked before it could report. What it said is the best there is.
		if ctx.Err() != nil {
			return layer.Result{}, ctx.Err()
		}
		return layer.Result{}, fmt.Errorf("%s: %w: %s", doing, errors.Join(runErr, err), bytes.TrimSpace(complaints.Bytes()))
	}
	if err := report.Error.toError(); err != nil {
		return layer.Result{}, err
	}
	if runErr != nil {
		return layer.Result{}, fmt.Errorf("%s: %w", doing, runErr)
	}
	return report.Result, nil
}

// limited is a buffer that takes 64 KiB and drops the rest: the child reads hostile input, so its words are bounded.
type limited struct{ bytes.Buffer }

func (b *limited) Write(p []byte) (int, error) {
	if room := 64<<10 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// The child's two stages. The first makes the layer's directory its whole world, which takes capabilities, and executes
// the second with what is left of them: dropping them in place would need every thread of the Go runtime to do it.
//
// Both report on standard output, the first only if it fails.

// ApplyConfine is the first stage. It returns only on error, which it has reported.
func ApplyConfine(arg string) error { return report(layer.Result{}, confineAndExec(arg)) }

// ApplyMain is the second stage: it extracts its standard input below "/". LoadFilter loads a seccomp filter for all
// threads (libct.LoadFilter).
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
	exe, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open own executable: %w", err)
	}
	// The layers below, read-only, each as a mount of its own that is attached nowhere: ".." ends at its root.
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
	return execConfined(exe, "apply-confined", &job, applyCapabilities)
}

// execConfined executes the second stage of a child with no capabilities but those to keep.
func execConfined(exe int, stage string, job any, keep []uintptr) error {
	if err := dropCapabilities(keep); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	next, err := json.Marshal(job)
	if err != nil {
		return fmt.Errorf("encode job: %w", err)
	}
	// There is no /proc to name the executable by any more.
	argv, err := syscall.SlicePtrFromStrings([]string{"sandboxd-launcher", stage, string(next)})
	if err != nil {
		return fmt.Errorf("execute second stage: %w", err)
	}
	envp := []*byte{nil}
	//nolint:gosec // the addresses are those of the arrays which execveat(2) reads
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(exe), uintptr(unsafe.Pointer(&[]byte{0}[0])),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envp[0])), unix.AT_EMPTY_PATH, 0)
	return fmt.Errorf("execute second stage: %w", errno)
}

// applyCapabilities are what owning files takes, in the sandbox's ids only.
var applyCapabilities = []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID}

// dropCapabilities takes all others out of the calling thread's bounding set: what it executes as uid 0 gets no more.
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
	opts := layer.Options{MediaType: job.MediaType, DiffID: job.DiffID, Limits: job.Limits, SingleID: job.Single}
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
		return layer.Result{}, err
	}
	result, err := layer.Apply(root, os.Stdin, opts)
	if err != nil {
		return layer.Result{}, err
	}
	dir, err := root.Open(".")
	if err != nil {
		return layer.Result{}, fmt.Errorf("sync layer: %w", err)
	}
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return layer.Result{}, fmt.Errorf("sync layer: %w", err)
	}
	return result, nil
}

// lock loads the filter, the last step of a child's confinement, and tries one thing that must not work any more.
func lock(loadFilter func(*specs.LinuxSeccomp) error, filter *specs.LinuxSeccomp) error {
	if err := loadFilter(filter); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); err == nil {
		return errors.Join(errors.New("confine layer child: a socket could be made"), unix.Close(fd))
	}
	return nil
}

// detached returns a copy of the mount at dir that is attached nowhere.
func detached(dir string, attr uint64, flags uint) (int, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|flags)
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

// rootOf turns a directory's descriptor, which it closes, into an os.Root. There is no /proc to name it by.
func rootOf(fd int) (*os.Root, error) {
	err := unix.Fchdir(fd)
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return nil, err
	}
	return os.OpenRoot(".")
}

// confine makes dir, with attr set on its mount, the whole world of the process.
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

// applyFilter is what unpacking takes: files below what is open, memory, threads of the Go runtime. No network, no
// execution, no mounts, no namespaces, no tracing; seccomp(2) is for LoadFilter's last step.
func applyFilter() *specs.LinuxSeccomp {
	return filter(reading + `
		mkdirat mknodat symlinkat linkat unlinkat renameat renameat2
		fchown fchownat fchmod fchmodat fchmodat2 utimensat ftruncate fallocate
		fsetxattr fremovexattr setxattr lsetxattr setxattrat getxattr lgetxattr getxattrat
		fsync fdatasync syncfs copy_file_range umask`)
}

// reading are the system calls that reading files and writing to what is open takes.
const reading = `
	read write pread64 pwrite64 readv writev lseek close fcntl fstat newfstatat statx dup dup3
	openat openat2 readlinkat getdents64 faccessat faccessat2 fgetxattr flistxattr fadvise64
	mmap munmap mprotect madvise mremap brk mincore
	clone futex sched_yield sched_getaffinity set_robust_list rseq exit exit_group restart_syscall
	rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack tgkill getpid gettid getuid geteuid getgid getegid
	nanosleep clock_nanosleep clock_gettime gettimeofday timer_create timer_settime timer_delete setitimer
	epoll_create1 epoll_ctl epoll_pwait eventfd2 pipe2 getrandom prlimit64 uname prctl seccomp`

// filter allows these system calls. The default is an error rather than death so that a missing name shows as one clear
// message.
func filter(names string) *specs.LinuxSeccomp {
	eperm := uint(unix.EPERM)
	enosys := uint(unix.ENOSYS)
	return &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: &eperm,
		Syscalls: []specs.LinuxSyscall{
			{Action: specs.ActAllow, Names: strings.Fields(names)},
			{Action: specs.ActErrno, ErrnoRet: &enosys, Names: []string{"clone3"}}, // the C library then uses clone
		},
	}
}
