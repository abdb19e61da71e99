package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/memfd"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Setup configures a new launcher. Its paths are the host's; after stage 2 none of them exists for
// the launcher any more.
type Setup struct {
	DataDir  string        `json:"data_dir"`         // holds layers/, sandboxes/ and root/, an empty directory to mount on
	InitPath string        `json:"init_path"`        // the init's binary
	Cgroup   string        `json:"cgroup,omitempty"` // the delegated directory for sandboxes; empty where there is none
	Cgroup2  string        `json:"cgroup2"`          // mount point of cgroup v2; empty if there is none
	IDs      []idmap.Range `json:"ids"`              // the map of every sandbox, in the launcher's ids
	Single   bool          `json:"single,omitempty"` // no subordinate ids
	// Ranges is the number of ranges of ids, of which each sandbox has one, or 0 if all share IDs for
	// the reason SharedIDs.
	Ranges    int    `json:"ranges,omitempty"`
	SharedIDs string `json:"shared_ids,omitempty"`
	// Pids is the host's number of pids (kernel.pid_max, proc_sys_kernel(5)), which a PID namespace
	// hides since Linux 6.14.
	Pids int `json:"pids"`
	// DiskReserve is the number of free bytes of the disk that sandboxes may use by half; zero means
	// that they may use all.
	DiskReserve int64 `json:"disk_reserve,omitempty"`
	// Controllers are those of Cgroup's children. Missing lists the defaults' restrictions that the
	// host cannot enforce, with the remedies.
	Controllers []string `json:"controllers,omitempty"`
	Missing     []string `json:"missing,omitempty"`
	Version     string   `json:"version"`
}

// Descriptors that the daemon passes to stage 1, and stage 1 to stage 2. All of them are open from
// the first moment of stage 1, which replaces /dev/null by its own directories and files. A number
// that is free could become the Go runtime's, which opens its poller when a timer first needs it,
// and which ends the process when its poller is replaced or closed.
const (
	fdListener = 3 + iota
	fdSync     // stage 1 only: the daemon writes the Setup once the id maps are in place
	fdStatus   // "ready", or the reason of a failure
	fdLock     // locked: its holder is the data directory's only launcher
	fdLayers   // from here on: opened by stage 1 as the daemon's uid, in the launcher's own mount namespace
	fdSandboxes
	fdRoot
	fdInit
	fdSetup // a copy of the Setup for stage 2: every process can read a command line
	fdCgroup
	fdRangeLayers // the mounts of the first range; /dev/null without ranges
	fdRangeSandboxes
	fdEnd // one more than the last
)

// passed returns the files for the descriptors of stage 1, from 3 on. Null is /dev/null; first are
// the mounts of the first range, if there are any.
func passed(listener, sync, status, lock, null *os.File, first []*os.File) []*os.File {
	files := []*os.File{listener, sync, status, lock}
	for len(files) < fdEnd-fdListener {
		files = append(files, null)
	}
	copy(files[fdRangeLayers-fdListener:], first)
	return files
}

// The launcher's own root, as stage 2 builds it.
const (
	LayersDir    = "/layers"    // one directory per chain id (hex), each an overlay layer
	SandboxesDir = "/sandboxes" // one directory per sandbox: upper and work directories of its overlays
	HostDir      = "/host"      // the host's /usr and the like, read-only
	RootfsDir    = "/rootfs"    // every sandbox mounts its root here, each in its own mount namespace
	StateDir     = "/run/libct" // libcontainer's state
	InitFile     = "/init"      // a copy of the init's binary
	// CgroupDir is the delegated subtree, or, without one, the host's cgroup v2 to look at.
	CgroupDir = "/sys/fs/cgroup"
)

// Stage1 waits for the id maps, opens the files that need the daemon's uid, becomes uid 0 of the
// launcher's user namespace and executes stage 2. It returns only on error, after reporting it to
// the daemon, or with nil if the daemon vanished first.
func Stage1() error {
	err := stage1()
	if err != nil {
		_, werr := unix.Write(fdStatus, []byte(strings.ReplaceAll(err.Error(), "\n", "; ")+"\n"))
		err = errors.Join(err, werr)
	}
	return err
}

func stage1() error {
	// Groups, ids and keyrings belong to a thread's credentials (unix.Setgroups is about one thread,
	// unlike Setresuid). The thread that executes stage 2 hands them on: it must be the one that
	// dropped them.
	goruntime.LockOSThread()
	sync := os.NewFile(fdSync, "sync")
	data, err := io.ReadAll(io.LimitReader(sync, 1<<20))
	if err != nil {
		return fmt.Errorf("read setup: %w", err)
	}
	if err := sync.Close(); err != nil {
		return fmt.Errorf("read setup: %w", err)
	}
	if len(data) == 0 {
		return nil // the daemon died or gave up before the maps were written
	}
	var setup Setup
	if err := json.Unmarshal(data, &setup); err != nil {
		return fmt.Errorf("decode setup: %w", err)
	}

	// Still the daemon's uid: its directories may lie below ones that no other user may enter.
	open := func(path string, flags, want int) error {
		fd, err := unix.Open(path, flags, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		if err := unix.Dup3(fd, want, 0); err != nil {
			return fmt.Errorf("dup %s: %w", path, err)
		}
		return unix.Close(fd)
	}
	dir := unix.O_PATH | unix.O_DIRECTORY
	if err := errors.Join(
		open(filepath.Join(setup.DataDir, "layers"), dir, fdLayers),
		open(filepath.Join(setup.DataDir, "sandboxes"), dir, fdSandboxes),
		open(filepath.Join(setup.DataDir, "root"), dir, fdRoot),
		open(setup.InitPath, unix.O_RDONLY, fdInit),
	); err != nil {
		return err
	}
	cgroup := setup.Cgroup
	if cgroup == "" {
		cgroup = setup.Cgroup2
	}
	if cgroup != "" {
		if err := open(cgroup, dir, fdCgroup); err != nil {
			return err
		}
	}

	setupFile, err := unix.MemfdCreate("setup", 0)
	if err != nil {
		return fmt.Errorf("hand on setup: %w", err)
	}
	if _, err := unix.Pwrite(setupFile, data, 0); err != nil {
		return fmt.Errorf("hand on setup: %w", err)
	}
	if err := unix.Dup3(setupFile, fdSetup, 0); err != nil {
		return fmt.Errorf("hand on setup: %w", err)
	}
	_ = unix.Close(setupFile)

	// Supplementary groups are the daemon's: no sandbox may have them. With a single-id map the kernel
	// refuses (setgroups is denied there), which doctor reports.
	if !setup.Single {
		if err := unix.Setgroups(nil); err != nil {
			return fmt.Errorf("drop supplementary groups: %w", err)
		}
	}
	if err := unix.Setresgid(0, 0, 0); err != nil {
		return fmt.Errorf("become gid 0 of the launcher's namespace: %w", err)
	}
	if err := unix.Setresuid(0, 0, 0); err != nil {
		return fmt.Errorf("become uid 0 of the launcher's namespace: %w", err)
	}

	// An empty session keyring for the launcher and all sandboxes: the daemon's is its user's.
	if _, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0); err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("leave the user's session keyring: %w", err)
	}

	// CVE-2019-5736: the executable of a sandbox's first moments must not be a writable file.
	// libcontainer makes such a copy for every start unless the running executable is one already;
	// here it is made once.
	exe, err := sealedSelf()
	if err != nil {
		return err
	}
	err = unix.Exec("/proc/self/fd/"+strconv.Itoa(int(exe.Fd())), []string{"sandboxd-launcher", "stage2"}, nil)
	goruntime.KeepAlive(exe)
	return fmt.Errorf("execute stage 2: %w", err)
}

func sealedSelf() (*os.File, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("open own executable: %w", err)
	}
	defer self.Close()
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("sandboxd-launcher", flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 every memfd is executable
		fd, err = unix.MemfdCreate("sandboxd-launcher", flags)
	}
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	exe := os.NewFile(uintptr(fd), "sandboxd-launcher")
	if _, err := io.Copy(exe, self); err != nil {
		return nil, fmt.Errorf("copy own executable: %w", err)
	}
	if err := unix.Fchmod(fd, 0o555); err != nil {
		return nil, fmt.Errorf("chmod memfd: %w", err)
	}
	if err := memfd.Seal(exe); err != nil {
		return nil, fmt.Errorf("seal memfd: %w", err)
	}
	return exe, nil
}

// Stage2 builds the launcher's root and pivots into it. It returns the listening socket and the
// pipe for "ready", and the mounts of the first range.
func Stage2() (setup *Setup, listener, status *os.File, first []*os.File, err error) {
	status = os.NewFile(fdStatus, "status")
	unix.CloseOnExec(fdStatus)
	unix.CloseOnExec(fdListener)
	unix.CloseOnExec(fdLock) // never closed, and never passed to a sandbox
	setupFile := os.NewFile(fdSetup, "setup")
	defer setupFile.Close()
	if err := json.NewDecoder(setupFile).Decode(&setup); err != nil {
		return nil, nil, status, nil, fmt.Errorf("decode setup: %w", err)
	}
	if err := buildRoot(setup); err != nil {
		return nil, nil, status, nil, fmt.Errorf("build the launcher's root: %w", err)
	}
	for _, fd := range []int{fdLayers, fdSandboxes, fdRoot, fdCgroup} {
		_ = unix.Close(fd) // O_PATH descriptors of directories, or /dev/null: nothing to lose
	}
	for _, fd := range []uintptr{fdRangeLayers, fdRangeSandboxes} {
		unix.CloseOnExec(int(fd))
		first = append(first, os.NewFile(fd, "range"))
	}
	return setup, os.NewFile(fdListener, "listener"), status, first, nil
}

// buildRoot works with descriptors and the mount API of Linux 5.2, so that no path of the host is
// resolved again.
func buildRoot(setup *Setup) error {
	// Nothing mounted here may propagate to the host, and nothing of the host's later mounts may
	// appear here.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root, err := newMount("tmpfs", unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID, [2]string{"mode", "0755"}, [2]string{"size", "256m"})
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if err := unix.MoveMount(root, "", fdRoot, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach tmpfs: %w", err)
	}
	for _, d := range []string{LayersDir, SandboxesDir, HostDir, RootfsDir, RangeDir, WorkspaceDir, HiddenDir, rangeAt, "/proc", "/sys", "/dev", "/tmp", "/run", StateDir} {
		if err := unix.Mkdirat(root, d[1:], 0o755); err != nil {
			return fmt.Errorf("make %s: %w", d, err)
		}
	}

	const restricted = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID
	if err := bind(fdLayers, "", root, LayersDir, restricted); err != nil {
		return err
	}
	if err := bind(fdSandboxes, "", root, SandboxesDir, restricted); err != nil {
		return err
	}
	for _, d := range rootfs.HostDirs {
		fi, err := os.Lstat(d)
		if err != nil || !fi.IsDir() { // absent, or a symlink into /usr: the host image has that link too
			continue
		}
		if err := unix.Mkdirat(root, filepath.Join(HostDir, d)[1:], 0o755); err != nil {
			return fmt.Errorf("make %s%s: %w", HostDir, d, err)
		}
		if err := bind(unix.AT_FDCWD, d, root, filepath.Join(HostDir, d), restricted|unix.MOUNT_ATTR_RDONLY); err != nil {
			return err
		}
	}

	// proc and sysfs of the launcher's own PID and network namespace. A sandbox may mount its own only
	// if its parent has complete ones: on a host that masks parts of them (as some container platforms
	// do) this fails.
	for _, fs := range []string{"proc", "sysfs"} {
		m, err := newMount(fs, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
		if err != nil {
			return err
		}
		err = unix.MoveMount(m, "", root, strings.TrimSuffix(fs, "fs"), unix.MOVE_MOUNT_F_EMPTY_PATH)
		_ = unix.Close(m)
		if err != nil {
			return fmt.Errorf("attach %s: %w", fs, err)
		}
	}
	// Devices cannot be made in a user namespace, so the host's harmless ones are bound. Read-only,
	// which does not concern writing to a device: else a sandbox, whose mounts are copies of these,
	// could change the times of the host's files.
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		fd, err := unix.Openat(root, "dev/"+name, unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return fmt.Errorf("make /dev/%s: %w", name, err)
		}
		_ = unix.Close(fd)
		if err := bind(unix.AT_FDCWD, "/dev/"+name, root, "/dev/"+name, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC); err != nil {
			return err
		}
	}
	if err := copyInit(root); err != nil {
		return err
	}
	if setup.Cgroup != "" || setup.Cgroup2 != "" {
		attr := uint64(restricted | unix.MOUNT_ATTR_NOEXEC)
		if setup.Cgroup == "" {
			// Read-only: libcontainer would make a cgroup beside it wherever it can, and pass controllers on
			// to it.
			attr |= unix.MOUNT_ATTR_RDONLY
		}
		if err := bind(fdCgroup, "", root, CgroupDir, attr); err != nil {
			return err
		}
	}

	// pivot_root(2), "pivot_root(".", ".")": the old root ends up mounted over the new one and is
	// detached at once.
	if err := unix.Fchdir(root); err != nil {
		return fmt.Errorf("enter new root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter new root: %w", err)
	}
	// Verify: the old root must be gone.
	if _, err := os.Lstat(setup.DataDir); err == nil {
		return fmt.Errorf("%s is still reachable after pivot_root", setup.DataDir)
	}
	return nil
}

// newMount makes a detached mount of a file system.
func newMount(fs string, attr int, options ...[2]string) (int, error) {
	ctx, err := unix.Fsopen(fs, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open file system %s: %w", fs, err)
	}
	defer unix.Close(ctx)
	for _, o := range options {
		if err := unix.FsconfigSetString(ctx, o[0], o[1]); err != nil {
			return -1, fmt.Errorf("configure %s: %s=%s: %w", fs, o[0], o[1], err)
		}
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return -1, fmt.Errorf("create %s: %w", fs, err)
	}
	m, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", fs, err)
	}
	return m, nil
}

// bind attaches a copy of the mount at (dirfd, path) to target below root, with attr set on it. The
// copy is recursive: in a user namespace the kernel refuses a copy that would uncover what another
// mount hides.
func bind(dirfd int, path string, root int, target string, attr uint64) error {
	name := path
	if name == "" {
		name = "descriptor for " + target
	}
	flags := unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_RECURSIVE
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	tree, err := unix.OpenTree(dirfd, path, uint(flags))
	if err != nil {
		return fmt.Errorf("copy mount of %s: %w", name, err)
	}
	defer unix.Close(tree)
	if attr != 0 {
		err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: attr})
		if err != nil {
			return fmt.Errorf("restrict mount of %s: %w", name, err)
		}
	}
	if err := unix.MoveMount(tree, "", root, target[1:], unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach %s at %s: %w", name, target, err)
	}
	return nil
}

// copyInit copies the init's binary into the launcher's tmpfs: a sandbox never sees the file on the
// host. Programs can read the copy: it is the released one, and an unreadable file would make every
// process that begins as it, as those with limits of their own do, one that init cannot look at.
func copyInit(root int) error {
	src := os.NewFile(fdInit, "init")
	defer src.Close() // not left to its finalizer, which would close a reused number
	fd, err := unix.Openat(root, InitFile[1:], unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o555)
	if err != nil {
		return fmt.Errorf("make %s: %w", InitFile, err)
	}
	dst := os.NewFile(uintptr(fd), InitFile)
	if _, err := io.Copy(dst, src); err != nil {
		return errors.Join(fmt.Errorf("copy init: %w", err), dst.Close())
	}
	if err := dst.Close(); err != nil {
		return fmt.Errorf("copy init: %w", err)
	}
	return nil
}
