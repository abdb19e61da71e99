// Package doctor examines a host: what will hold a sandbox there, what will not, what that costs, and what to do.
//
// [Run] collects facts with the probes of internal/kernel and internal/idmap, which leave nothing behind. What the facts
// mean is decided by a pure function. A program that calls Run calls kernel.Main first.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/dirs"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
	"github.com/sandboxd/sandboxd/runtime/cgroup/systemd"
	"github.com/sandboxd/sandboxd/seccomp"
)

// Run examines the host for the calling user and a daemon that keeps its data in dataDir, which need not exist yet.
func Run(ctx context.Context, dataDir string) []api.Check { return judge(gather(ctx, dataDir)) }

// Ready reports whether a sandbox can start: every check that is fatal is OK.
func Ready(checks []api.Check) bool {
	for _, c := range checks {
		if c.Fatal && !c.OK {
			return false
		}
	}
	return true
}

// sysctl is a number below /proc/sys that not every kernel has.
type sysctl struct {
	value int
	found bool
}

// set reports whether the switch is there and has the value.
func (s sysctl) set(value int) bool { return s.found && s.value == value }

// facts is everything that was seen.
type facts struct {
	release, arch string
	program       string // the path of sandboxd, as a profile of AppArmor can have it
	calls         error
	uid           int
	user          string // a name, or the uid where there is none

	userNamespaces          error
	maxUserNamespaces       sysctl
	unprivilegedUserNSClone sysctl // Debian's and Arch's patch
	apparmorRestrictsUserNS sysctl // Ubuntu's

	ids      idmap.Inputs
	idsErr   error
	freeSubs int // where a new entry of /etc/subuid could start; 0: unknown

	dataDir    string
	nearest    string // dataDir or the first directory above that exists
	dataErr    error
	filesystem string
	xattrs     error
	overlay    error
	proc       error

	seccompActions []string
	seccomp        error

	cgroup    kernel.Cgroup
	cgroupErr error
	host      cgroup.Host
	scope     systemd.Scope // what systemd gives, where the daemon would ask for it
	scopeErr  error

	landlock    int
	landlockErr error
	ptraceScope sysctl

	freeBytes, freeFiles uint64 // of the disk that the data directory is on, for this user
	diskErr              error
	counted              map[string]sysctl // ceilings of the kernel that sandboxes use up, by the names of [ceilingsOfKernel]
	covers               []string          // what is mounted below directories that the host image shows
	coversErr            error
	socket               string // where a daemon listens unless told otherwise
	socketErr            error
}

func gather(ctx context.Context, dataDir string) facts {
	f := facts{arch: goruntime.GOARCH, uid: os.Geteuid(), dataDir: dataDir, program: ownPath()}
	var err error
	if f.release, err = kernel.Release(); err != nil {
		f.release = err.Error()
	}
	f.calls = kernel.Calls()
	f.user = strconv.Itoa(f.uid)
	if u, err := user.LookupId(f.user); err == nil {
		f.user = u.Username
	}

	f.userNamespaces = kernel.UserNamespaces()
	f.maxUserNamespaces = readSysctl("user/max_user_namespaces")
	f.unprivilegedUserNSClone = readSysctl("kernel/unprivileged_userns_clone")
	f.apparmorRestrictsUserNS = readSysctl("kernel/apparmor_restrict_unprivileged_userns")

	f.ids, f.idsErr = idmap.Gather()
	if f.freeSubs, err = idmap.NextFree(); err != nil {
		f.freeSubs = 0
	}

	f.nearest, f.dataErr = nearest(dataDir)
	if f.dataErr == nil {
		if f.filesystem, err = kernel.Filesystem(f.nearest); err != nil {
			f.filesystem = err.Error()
		}
		f.xattrs = kernel.UserXattrs(f.nearest)
		f.overlay = kernel.Overlay(ctx, f.nearest)
	}
	f.proc = kernel.Proc(ctx)

	if f.seccompActions, f.seccomp = kernel.SeccompActions(); f.seccomp == nil {
		_, f.seccomp = seccomp.Plan(seccomp.Default(), f.arch, seccomp.Abilities{Actions: f.seccompActions})
	}
	f.cgroup, f.cgroupErr = kernel.ProbeCgroup()
	if f.host, err = cgroup.Survey(); err != nil {
		f.cgroupErr = errors.Join(f.cgroupErr, err)
	}
	if f.host.Asks {
		f.scope, f.scopeErr = systemd.Probe(ctx)
	}
	f.landlock, f.landlockErr = kernel.LandlockABI()
	f.ptraceScope = readSysctl("kernel/yama/ptrace_scope")
	if f.dataErr == nil {
		var st unix.Statfs_t
		f.diskErr = unix.Statfs(f.nearest, &st)
		f.freeBytes, f.freeFiles = st.Bavail*uint64(max(0, st.Bsize)), st.Ffree
		if st.Files == 0 {
			f.freeFiles = math.MaxUint64 // btrfs and others make them as they are needed
		}
	}
	f.counted = make(map[string]sysctl)
	for _, c := range ceilingsOfKernel {
		f.counted[c.name] = readSysctl(c.name)
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	f.covers, f.coversErr = mountedBelow(string(mountinfo), rootfs.HostDirs), err
	if d, err := dirs.Default(); err != nil {
		f.socketErr = err
	} else {
		f.socket = d.Socket()
		f.socketErr = usableSocket(f.socket)
	}
	return f
}

// mountedBelow finds mounts strictly below the directories in the form of proc(5), /proc/<pid>/mountinfo. Directories that are links
// have nothing below them there.
func mountedBelow(mountinfo string, dirs []string) []string {
	var found []string
	for line := range strings.Lines(mountinfo) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		for _, dir := range dirs {
			if strings.HasPrefix(fields[4], dir+"/") && !slices.Contains(found, fields[4]) {
				found = append(found, fields[4])
			}
		}
	}
	return found
}

// usableSocket says why no daemon of this user can listen there. That one listens already is for who starts the next.
func usableSocket(path string) error {
	const longest = 107 // of sockaddr_un's 108 bytes, the last is 0
	if len(path) > longest {
		return fmt.Errorf("%s has %d bytes, and a socket's path %d at most", path, len(path), longest)
	}
	dir, err := nearest(filepath.Dir(path))
	if err != nil {
		return err
	}
	if dir != filepath.Dir(path) {
		return nil // it will be made, private
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return fmt.Errorf("%s belongs to uid %d and has mode %04o: others could put a socket of theirs there", dir, st.Uid, st.Mode&0o7777)
	}
	return nil
}

// plainPath is one that neither a shell nor AppArmor reads as anything else.
var plainPath = regexp.MustCompile(`^/[A-Za-z0-9/._+-]+/sandboxd$`)

// ownPath is where this program lies, or where one that is installed by hand usually does.
func ownPath() string {
	if path, err := os.Executable(); err == nil && plainPath.MatchString(path) {
		return path
	}
	return "/usr/local/bin/sandboxd"
}

// readSysctl takes a switch that cannot be read for one that is not there: the probes decide, switches only explain.
func readSysctl(name string) sysctl {
	v, found, err := kernel.Sysctl(name)
	return sysctl{value: v, found: found && err == nil}
}

// nearest is dir or the first directory above it that exists, and an error where it cannot be written.
func nearest(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for {
		info, err := os.Stat(dir)
		switch {
		case err == nil && !info.IsDir():
			return dir, &fs.PathError{Op: "use", Path: dir, Err: unix.ENOTDIR}
		case err == nil:
			if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
				return dir, &fs.PathError{Op: "write to", Path: dir, Err: err}
			}
			return dir, nil
		case !errors.Is(err, fs.ErrNotExist) || dir == "/":
			return dir, err
		}
		dir = filepath.Dir(dir)
	}
}
