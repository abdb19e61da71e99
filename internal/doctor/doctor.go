// Package doctor examines a host: the restrictions that it can apply to sandboxes, the missing ones
// with their cost, and the remedies.
//
// [Run] collects facts with the probes of internal/kernel and internal/idmap, which leave no trace.
// A pure function judges the facts. A program that calls Run calls kernel.Main first.
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

// Run examines the host for the calling user and a daemon with the given data directory, which need
// not exist.
func Run(ctx context.Context, dataDir string) []api.Check { return judge(gather(ctx, dataDir)) }

// Ready reports whether a sandbox can start: every fatal check is OK.
func Ready(checks []api.Check) bool {
	for _, c := range checks {
		if c.Fatal && !c.OK {
			return false
		}
	}
	return true
}

// sysctl is a number below /proc/sys, which some kernels lack.
type sysctl struct {
	value int
	found bool
}

// set reports whether the sysctl exists and has the value.
func (s sysctl) set(value int) bool { return s.found && s.value == value }

// facts holds all observations.
type facts struct {
	release, arch string
	program       string // path of sandboxd, in a form that an AppArmor profile can have
	calls         error
	uid           int
	user          string // name, or uid if there is none

	userNamespaces          error
	maxUserNamespaces       sysctl
	unprivilegedUserNSClone sysctl // patch of Debian and Arch
	apparmorRestrictsUserNS sysctl // patch of Ubuntu

	ids      idmap.Inputs
	idsErr   error
	freeSubs int // possible start of a new entry in /etc/subuid; 0 if unknown

	dataDir    string
	nearest    string // dataDir or its nearest existing parent
	dataErr    error
	filesystem string
	xattrs     error
	overlay    error
	mounts     error // of mounts with mapped ids, for root
	proc       error

	seccompActions []string
	seccomp        error

	cgroup    kernel.Cgroup
	cgroupErr error
	host      cgroup.Host
	scope     systemd.Scope // scope from systemd, if the daemon would ask for one
	scopeErr  error

	landlock    int
	landlockErr error
	ptraceScope sysctl

	corePattern    string // kernel.core_pattern
	corePatternErr error
	coreLimit      uint64 // this process's hard RLIMIT_CORE, which a daemon would have
	ipcErr         error  // root of an IPC namespace cannot set its ceilings

	freeBytes, freeFiles uint64 // free for this user, on the data directory's disk
	diskErr              error
	counted              map[string]sysctl // kernel ceilings on resources of sandboxes, by the names of [ceilingsOfKernel]
	covers               []string          // mounts below directories that the host image shows
	coversErr            error
	socket               string // default path of a daemon's socket
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
		if f.uid == 0 {
			f.mounts = idmap.ProbeMounts(f.nearest)
		}
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
	f.corePattern, f.corePatternErr = kernel.CorePattern()
	var limit unix.Rlimit
	if f.corePatternErr == nil {
		f.corePatternErr = unix.Getrlimit(unix.RLIMIT_CORE, &limit)
	}
	f.coreLimit = limit.Max
	f.ipcErr = kernel.IPCCeilings(ctx)
	if f.dataErr == nil {
		var st unix.Statfs_t
		f.diskErr = unix.Statfs(f.nearest, &st)
		f.freeBytes, f.freeFiles = st.Bavail*uint64(max(0, st.Bsize)), st.Ffree
		if st.Files == 0 {
			f.freeFiles = math.MaxUint64 // btrfs and others create inodes on demand
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

// mountedBelow returns the mounts strictly below the directories, from /proc/<pid>/mountinfo as
// described in proc(5). It shows no mounts below directories that are links.
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

// usableSocket returns the reason why no daemon of this user can listen at path. A running daemon
// is no such reason: its successor handles it.
func usableSocket(path string) error {
	const longest = 107 // sockaddr_un has 108 bytes, and the last is 0
	if len(path) > longest {
		return fmt.Errorf("%s has %d bytes, and a socket's path %d at most", path, len(path), longest)
	}
	dir, err := nearest(filepath.Dir(path))
	if err != nil {
		return err
	}
	if dir != filepath.Dir(path) {
		return nil // the daemon creates it with mode 0700
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

// plainPath matches paths that need no quoting in a shell or an AppArmor profile.
var plainPath = regexp.MustCompile(`^/[A-Za-z0-9/._+-]+/sandboxd$`)

// ownPath returns the path of this program, or else the usual path of a manual installation.
func ownPath() string {
	if path, err := os.Executable(); err == nil && plainPath.MatchString(path) {
		return path
	}
	return "/usr/local/bin/sandboxd"
}

// readSysctl treats an unreadable sysctl as missing: probes decide, sysctls only explain.
func readSysctl(name string) sysctl {
	v, found, err := kernel.Sysctl(name)
	return sysctl{value: v, found: found && err == nil}
}

// nearest returns dir or its nearest existing parent, and an error if that is not writable.
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
