package libct

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"runtime/debug"
	"strings"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // the C constructor that makes the namespaces before Go runs
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// fdPlan is the descriptor on which Init finds its overlays. The sandbox's init inherits the number
// with its procfs, not the file.
const fdPlan = guest.ProcFD

// fdRange is the descriptor of the mounts of the sandbox's range of ids, for a sandbox that has
// one. The number is treated like fdPlan.
const fdRange = 6

// Init is the second life of the launcher's binary, as "sandboxd-launcher init": it runs in the new
// namespaces of a sandbox, mounts its rootfs, and hands over to libcontainer, which executes the
// sandbox's init. It does not return.
func Init() {
	// It lives for some milliseconds, in which a collection would cost more than the memory it frees.
	// The program that it executes has a runtime of its own.
	debug.SetGCPercent(-1)
	goruntime.LockOSThread() // capabilities belong to a thread; libcontainer goes on in this one
	if err := errors.Join(prepareRootfs(), keepInheritable()); err != nil {
		// Standard error is the file whose content Create adds to its own error.
		if errors.Is(err, runtime.ErrRootfs) {
			_, _ = fmt.Fprint(os.Stderr, blamesImage)
		}
		_, _ = fmt.Fprintf(os.Stderr, "prepare rootfs: %v\n", err)
		os.Exit(1) //nolint:forbidigo // this is a main function
	}
	libcontainer.Init()
}

// blamesImage stands before the complaint of Init where the image is to blame for it.
const blamesImage = "image: "

// rootPlan is what Create tells Init.
type rootPlan struct {
	Overlays []launcher.Overlay `json:"overlays"`
	// Own has the mounts of the sandbox's range of ids attached first, from fdRange.
	Own bool `json:"own,omitempty"`
	// ReadOnly makes the root, and every overlay of it, read-only; Dirs are made before that, as mount
	// points.
	ReadOnly bool     `json:"read_only,omitempty"`
	Dirs     []string `json:"dirs,omitempty"`
	// Sysfs is the descriptor of the sysfs of a sandbox that enters a network namespace; zero without.
	// Files are put over names in /etc.
	Sysfs int           `json:"sysfs,omitempty"`
	Files []networkFile `json:"files,omitempty"`
	// Trust is the file over the bundles of certificates; empty for none.
	Trust string `json:"trust,omitempty"`
	// Tmpfs are the places of file systems that a request names: no link may lead there.
	Tmpfs []string `json:"tmpfs,omitempty"`
	// Mounts are of the host's files.
	Mounts    []hostMount    `json:"mounts,omitempty"`
	Workspace *workspacePlan `json:"workspace,omitempty"`
	Volumes   []volumePlan   `json:"volumes,omitempty"`
	// Ceilings are of the sandbox's user and IPC namespaces.
	Ceilings []ceiling `json:"ceilings"`
}

func prepareRootfs() error {
	plan, err := takePlan()
	if err != nil {
		return err
	}
	overlays, layers := plan.Overlays, launcher.LayersDir
	if plan.Own {
		// In the sandbox's own mount namespace, until it leaves the launcher's root.
		if err := unix.MoveMount(fdRange, "", unix.AT_FDCWD, launcher.RangeDir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach the mounts of its ids: %w", err)
		}
		if err := plug(fdRange); err != nil {
			return err
		}
		layers = launcher.RangeDir + launcher.LayersDir
	}
	// Relative lower directories keep the option string below mount(2)'s page for some sixty layers.
	if err := unix.Chdir(layers); err != nil {
		return fmt.Errorf("enter %s: %w", layers, err)
	}
	for i := range overlays {
		if err := mount(&overlays[i]); err != nil {
			return err
		}
		if overlays[i].Target == "" {
			if err := checkTargets(); err != nil {
				return err
			}
		}
	}
	if err := checkPlaces(plan.Tmpfs); err != nil {
		return err
	}
	if err := mountWorkspace(plan.Workspace); err != nil {
		return err
	}
	if plan.Sysfs != 0 || len(plan.Files) > 0 {
		if err := attachNetwork(plan); err != nil {
			return err
		}
	}
	if err := attachHostMounts(plan.Mounts); err != nil {
		return err
	}
	if err := mountVolumes(plan.Volumes); err != nil {
		return err
	}
	if err := unix.Chdir(launcher.RootfsDir); err != nil {
		return fmt.Errorf("enter %s: %w", launcher.RootfsDir, err)
	}
	if plan.ReadOnly {
		if err := makeReadOnly(plan); err != nil {
			return err
		}
	}
	proc, err := ownProc()
	if err != nil {
		return err
	}
	if err := hold(proc, plan.Ceilings); err != nil {
		return err
	}
	return replace(guest.ProcFD, proc)
}

// takePlan reads the plan and leaves /dev/null in its place: libcontainer passes the number on to
// the sandbox's init, and a file open there must tell nothing of the host (CVE-2024-21626). No
// os.File: its finalizer would close the number behind our back, for another file to take.
func takePlan() (*rootPlan, error) {
	var data []byte
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Pread(fdPlan, buf, int64(len(data)))
		if err != nil {
			return nil, fmt.Errorf("read plan: %w", err)
		}
		if n == 0 {
			break
		}
		data = append(data, buf[:n]...)
	}
	plan := new(rootPlan)
	if err := json.Unmarshal(data, plan); err != nil {
		return nil, fmt.Errorf("decode plan: %w", err)
	}
	return plan, plug(fdPlan)
}

// plug puts /dev/null in the place of a descriptor.
func plug(fd int) error {
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	return replace(fd, null)
}

// replace moves a file to the descriptor fd, which the sandbox's init inherits.
func replace(fd, file int) error {
	if err := unix.Dup3(file, fd, 0); err != nil {
		return fmt.Errorf("replace descriptor: %w", err)
	}
	return unix.Close(file)
}

func mount(o *launcher.Overlay) error {
	// userxattr: in a user namespace overlayfs keeps its marks in user.overlay.*; the applier lets no
	// image set those.
	options := "userxattr,lowerdir=" + strings.Join(o.Lower, ":") + ",upperdir=" + o.Upper + ",workdir=" + o.Work
	if len(options) >= os.Getpagesize() {
		return fmt.Errorf("%d layers are too many for one mount", len(o.Lower))
	}
	target := filepath.Join(launcher.RootfsDir, o.Target)
	if err := unix.Mount("overlay", target, "overlay", (unix.MS_NOSUID|unix.MS_NODEV)&^mutantFlags(o.Upper), options); err != nil {
		return fmt.Errorf("mount overlay at %s: %w", filepath.Join("/", o.Target), err)
	}
	return nil
}

// makeReadOnly makes what libcontainer could not make any more, and then the overlays read-only.
// Not libcontainer's Readonlyfs: that knows nothing of the overlays below the root, and takes
// nosuid and nodev off it (setReadonly in its rootfs_linux.go).
func makeReadOnly(plan *rootPlan) error {
	root, err := os.OpenRoot(launcher.RootfsDir)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer root.Close() // only read
	for _, dir := range plan.Dirs {
		// Relative links of the image are followed within the root, others are refused. Libcontainer then
		// mounts in there.
		if err := root.MkdirAll(strings.TrimPrefix(dir, "/"), 0o755); err != nil {
			return fmt.Errorf("make %s for the profile's mount: %w: %w", dir, err, runtime.ErrRootfs)
		}
	}
	for _, o := range plan.Overlays {
		target := filepath.Join(launcher.RootfsDir, o.Target)
		const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
		if err := unix.Mount("", target, "", flags, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", filepath.Join("/", o.Target), err)
		}
	}
	return nil
}

// checkTargets refuses an image in which a place that we mount on is not a plain directory: a link
// there has led many a runtime out of the root (CVE-2019-19921, CVE-2023-27561, CVE-2026-41579,
// CVE-2026-47766). libcontainer looks too.
func checkTargets() error {
	for _, d := range []string{"proc", "sys", "dev", "usr"} {
		fi, err := os.Lstat(filepath.Join(launcher.RootfsDir, d))
		if errors.Is(err, os.ErrNotExist) {
			continue // libcontainer makes it
		}
		if err != nil {
			return fmt.Errorf("check /%s: %w", d, err)
		}
		if !fi.IsDir() {
			return fmt.Errorf("/%s of the image is not a directory: %w", d, runtime.ErrRootfs)
		}
	}
	return nil
}

// checkPlaces refuses places below links of the image: the file system would hide the target of
// the link, such as /dev with our init. Missing directories are made later.
func checkPlaces(places []string) error {
	if len(places) == 0 {
		return nil
	}
	root, err := unix.Open(launcher.RootfsDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(root)
	for _, p := range places {
		fd, err := unix.Openat2(root, strings.TrimPrefix(p, "/"), &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
		})
		switch {
		case errors.Is(err, unix.ELOOP):
			return fmt.Errorf("tmpfs at %s: the image has a link there; name the directory that it leads to: %w", p, runtime.ErrRootfs)
		case errors.Is(err, unix.ENOTDIR):
			return fmt.Errorf("tmpfs at %s: the image has a file there: %w", p, runtime.ErrRootfs)
		case err == nil:
			err = unix.Close(fd)
		case errors.Is(err, unix.ENOENT):
			err = nil
		}
		if err != nil {
			return fmt.Errorf("tmpfs at %s: %w", p, err)
		}
	}
	return nil
}

// keepInheritable makes every capability inheritable while the bounding set still holds them all.
// The kernel refuses to raise the inheritable set above the bounding set later, but keeps its
// present content. So the init gets the few capabilities that nothing else in the sandbox can get
// (see [initCapabilities]).
func keepInheritable() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	for i := range data {
		data[i].Inheritable = data[i].Permitted
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("make capabilities inheritable: %w", err)
	}
	return nil
}

// LoadFilter sets no_new_privs and loads a filter on every thread of the calling process, for good.
// The filter must allow seccomp(2), with which a process can only restrict itself further.
func LoadFilter(filter *specs.LinuxSeccomp) error {
	if !seccomp.Enabled {
		return errors.New("this launcher was built without seccomp")
	}
	c, err := specconv.SetupSeccomp(filter)
	if err != nil {
		return fmt.Errorf("convert seccomp filter: %w", err)
	}
	c.Flags = nil
	// Both calls are about the calling thread alone.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	if _, err := unix.PrctlRetInt(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if _, err := seccomp.InitSeccomp(c); err != nil {
		return fmt.Errorf("load seccomp filter: %w", err)
	}
	return syncFilters()
}

// syncFilters gives every thread no_new_privs and the filters of the calling one. libcontainer
// loads without SECCOMP_FILTER_FLAG_TSYNC, because its child is about to execute another program. A
// filter that allows everything carries the flag here; the kernel then synchronises the whole chain
// (seccomp(2)), and names the thread on which it failed.
func syncFilters() error {
	allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	prog := unix.SockFprog{Len: 1, Filter: &allow}
	//nolint:gosec // the address is that of the structure which seccomp(2) reads
	tid, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	goruntime.KeepAlive(&prog)
	switch {
	case errno != 0:
		return fmt.Errorf("load seccomp filter on every thread: %w", errno)
	case tid != 0:
		return fmt.Errorf("load seccomp filter on every thread: thread %d has another", tid)
	}
	return nil
}
