package doctor

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
)

// judge derives the checks from the facts, in the order in which to repair them.
func judge(f facts) []api.Check {
	checks := []api.Check{
		f.judgeKernel(),
		f.judgeUserNamespaces(),
		f.judgeAppArmor(),
		f.judgeSysctls(),
		f.judgeIDs(),
		f.judgeOwnIDs(),
		f.judgeDataDir(),
		f.judgeDisk(),
		f.judgeXattrs(),
		f.judgeOverlay(),
		f.judgeProc(),
		f.judgeHostImage(),
		f.judgeSeccomp(),
		f.judgeCgroup(),
		f.judgeCgroupRest(),
		f.judgeCgroupKill(),
		f.judgeLogout(),
		f.judgeLandlock(),
		f.judgePtrace(),
		f.judgeCores(),
		f.judgeIPC(),
		judgeUncounted(),
		f.judgeSocket(),
	}
	for i := range checks {
		if checks[i].OK {
			checks[i].Means, checks[i].Remedy = "", ""
		}
	}
	return checks
}

// sudo returns a command in the form for this user.
func (f facts) sudo(command string) string {
	if f.uid == 0 {
		return command
	}
	return "sudo " + command
}

func (f facts) judgeKernel() api.Check {
	return api.Check{
		Name: "kernel", Fatal: true, OK: f.calls == nil,
		Found:  join(fmt.Sprintf("Linux %s, %s", f.release, f.arch), f.calls),
		Means:  "the daemon cannot follow processes and paths safely, and does not start",
		Remedy: "run Linux 5.11 or newer; in a container, let its seccomp filter pass the call named above",
	}
}

func (f facts) judgeUserNamespaces() api.Check {
	c := api.Check{
		Name: "user namespaces", Fatal: true, OK: f.userNamespaces == nil,
		Found: join("a user namespace with mount, network, PID, IPC and UTS namespaces below it", f.userNamespaces),
		Means: "no sandbox can start: everything that holds it begins with a user namespace",
	}
	switch {
	case f.maxUserNamespaces.set(0):
		c.Remedy = f.sudo("sysctl -w user.max_user_namespaces=15000")
	case f.unprivilegedUserNSClone.set(0) && f.uid != 0:
		c.Remedy = f.sudo("sysctl -w kernel.unprivileged_userns_clone=1")
	case f.apparmorRestrictsUserNS.set(1) && f.uid != 0:
		c.Remedy = f.sudo("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0") +
			", or an AppArmor profile with \"userns,\" for sandboxd and sandboxd-launcher"
	default:
		c.Remedy = "if this is a container, start it with a seccomp profile that allows unshare, mount and clone with CLONE_NEWUSER"
	}
	return c
}

// apparmorProfile prints a profile that confines nothing and lets the two programs create user
// namespaces. It names their paths: by name alone, any program of that name could.
func (f facts) apparmorProfile() string {
	return "printf 'abi <abi/4.0>,\\nprofile sandboxd " + f.program + "{,-launcher} flags=(unconfined) {\\n  userns,\\n}\\n'"
}

func (f facts) judgeAppArmor() api.Check {
	restricts := f.apparmorRestrictsUserNS.set(1) && f.uid != 0
	c := api.Check{
		Name: "AppArmor", OK: !restricts || f.userNamespaces == nil,
		Found: "no restriction of user namespaces",
		Means: "an ordinary user's programs get user namespaces without any power (Ubuntu since 23.10), so no sandbox can start",
		Remedy: f.apparmorProfile() + " | " + f.sudo("tee /etc/apparmor.d/sandboxd") + " && " + f.sudo("apparmor_parser -r /etc/apparmor.d/sandboxd") +
			"; or for all programs: " + f.sudo("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
	}
	switch {
	case restricts && c.OK:
		c.Found = "user namespaces are restricted, and a profile lets this program make them"
	case restricts:
		c.Found = "kernel.apparmor_restrict_unprivileged_userns is 1, and no profile lets this program make them"
	}
	return c
}

// ceilingsOfKernel lists kernel limits on resources that each sandbox uses, with the least value
// that a host should allow. The kernel's defaults are far higher, except for inotify, where it is
// the default.
var ceilingsOfKernel = []struct {
	name string // below /proc/sys
	min  int
	of   string
}{
	{"user/max_user_namespaces", 1000, "sandboxes"},
	{"user/max_mnt_namespaces", 1000, "sandboxes"},
	{"user/max_pid_namespaces", 1000, "sandboxes"},
	{"user/max_net_namespaces", 1000, "sandboxes"},
	{"user/max_ipc_namespaces", 1000, "sandboxes"},
	{"user/max_uts_namespaces", 4000, "sandboxes with the programs that run in them"},
	{"user/max_cgroup_namespaces", 1000, "sandboxes"},
	{"fs/inotify/max_user_instances", 128, "instances of inotify (half of them for sandboxes)"},
	{"kernel/pid_max", 32768, "processes"},
}

func (f facts) judgeSysctls() api.Check {
	c := api.Check{Name: "sysctls", OK: true, Found: "room for a thousand sandboxes and more"}
	var found, means, set []string
	for _, ceiling := range ceilingsOfKernel {
		s := f.counted[ceiling.name]
		if !s.found || s.value >= ceiling.min {
			continue
		}
		name := strings.ReplaceAll(ceiling.name, "/", ".")
		found = append(found, fmt.Sprintf("%s is %d", name, s.value))
		means = append(means, fmt.Sprintf("no more than %d %s at once", s.value, ceiling.of))
		set = append(set, fmt.Sprintf("%s=%d", name, ceiling.min))
	}
	if len(found) > 0 {
		c.OK, c.Found, c.Means = false, strings.Join(found, ", "), strings.Join(means, "; ")
		c.Remedy = f.sudo("sysctl -w "+strings.Join(set, " ")) + ", and the same lines in /etc/sysctl.d to keep it"
	}
	return c
}

// Free space for an image of a distribution with a compiler.
const (
	minFreeBytes = 2 << 30
	minFreeFiles = 100_000
)

func (f facts) judgeDisk() api.Check {
	c := api.Check{
		Name: "disk", OK: f.dataErr == nil && f.diskErr == nil && f.freeBytes >= minFreeBytes && f.freeFiles >= minFreeFiles,
		Found: fmt.Sprintf("%.1f GiB are free for the data directory", float64(f.freeBytes)/(1<<30)),
		Means: "an image of the usual size cannot be unpacked, and what programs write soon meets a full disk",
		Remedy: "remove what is not needed (sandboxd images, sandboxd rmi), or choose a data directory on another disk with --data-dir, " +
			"best one that nothing else needs",
	}
	switch {
	case f.dataErr != nil:
		c.Found = "not looked at: the data directory cannot be used"
	case f.diskErr != nil:
		c.Found = f.diskErr.Error()
	case f.freeFiles < minFreeFiles:
		c.Found += fmt.Sprintf(", and %d files can be made", f.freeFiles)
	}
	c.Found += "; limits of sandboxes and volumes hold by counting"
	return c
}

func (f facts) judgeHostImage() api.Check {
	c := api.Check{
		Name: "host image", OK: f.coversErr == nil && len(f.covers) == 0,
		Found: "nothing is mounted below the directories that it shows",
		Means: "sandboxes of the host image, the default where no image is named, do not start (\"invalid argument\"): the kernel does not let " +
			"a user namespace show a directory without what its owner has mounted over parts of it. Others start",
	}
	if f.coversErr != nil {
		c.Found, c.Remedy = f.coversErr.Error(), "mount procfs on /proc"
	}
	if len(f.covers) > 0 {
		c.Found = "mounted below what it shows: " + strings.Join(f.covers, ", ")
		c.Remedy = f.sudo("umount "+strings.Join(f.covers, " ")) + ", then restart the daemon; or name an image"
	}
	return c
}

func (f facts) judgeSocket() api.Check {
	return api.Check{
		Name: "socket", OK: f.socketErr == nil,
		Found:  join(f.socket+" can be listened on, by this user alone", f.socketErr),
		Means:  "the daemon cannot listen, or another user could take its place",
		Remedy: "make the directory your own (chmod 700), or choose another with --runtime-dir or --socket; in a shell without a session set XDG_RUNTIME_DIR",
	}
}

func (f facts) judgeIDs() api.Check {
	c := api.Check{Name: "subordinate ids", Means: "processes of a sandbox run under your own uid: if one breaks out, your files are its files. " +
		"Images whose files have several owners cannot be unpacked faithfully"}
	if f.idsErr != nil {
		c.Found, c.Remedy = f.idsErr.Error(), "make the file readable, or remove it"
		return c
	}
	p := idmap.NewPlan(f.ids)
	c.OK = p.Subordinate() && p.Size() == idmap.SandboxIDs
	if p.Subordinate() {
		c.Found = fmt.Sprintf("%d ids; root of a sandbox is uid %d of the host", p.Size(), p.HostID(0))
		c.Means = "files of images that belong to higher ids cannot be unpacked"
	} else {
		c.Found = p.Reason
	}
	start := f.freeSubs
	if start == 0 {
		start = 100000
	}
	// Add a full range even if some IDs exist: entries may have gaps between them.
	ids := fmt.Sprintf("%d-%d", start, start+idmap.SandboxIDs-1)
	add := f.sudo(fmt.Sprintf("usermod --add-subuids %s --add-subgids %s %s", ids, ids, f.user)) + ", then restart the daemon"
	switch {
	case f.uid == 0 && !p.Subordinate():
		c.Remedy = "start the container that this is with a range of ids"
	case f.uid == 0:
		c.Remedy = "give \"sandboxd\" 65537 ids or more in /etc/subuid and /etc/subgid, or remove its entries"
	case f.ids.HelperErr == nil:
		c.Remedy = add
	case errors.Is(f.ids.HelperErr, idmap.ErrNotInstalled):
		c.Remedy = f.sudo("apt-get install uidmap") + " (other distributions: shadow-utils, shadow-uidmap)"
		if len(f.ids.SubUID) == 0 || len(f.ids.SubGID) == 0 {
			c.Remedy += "; " + add
		}
	default:
		c.Remedy = "give newuidmap and newgidmap their power back (" + f.sudo("apt-get install --reinstall uidmap") +
			"), and start the daemon without no_new_privs (systemd: NoNewPrivileges=no)"
	}
	return c
}

// judgeOwnIDs judges whether each sandbox has host ids to itself.
func (f facts) judgeOwnIDs() api.Check {
	p := idmap.NewPlan(f.ids)
	c := api.Check{
		Name: "own ids", OK: f.idsErr == nil && f.dataErr == nil && f.mounts == nil && p.Ranges() > 0,
		Found: fmt.Sprintf("each sandbox has %d host ids to itself, and %d can run at once", idmap.SandboxIDs, p.Ranges()),
		Means: "the kernel counts all sandboxes of the daemon as the same users: what it counts by user (epoll watches, pages of pipes, " +
			"descriptors under way) one sandbox can use up for the others",
		Remedy: "run the daemon as root, or one daemon and user for each tenant; serve --require=ids refuses to start without",
	}
	switch {
	case f.idsErr != nil:
		c.Found, c.Remedy = f.idsErr.Error(), "make the file readable, or remove it"
	case f.uid != 0:
		c.Found = "all sandboxes share their ids: an ordinary user can map no mounts of a disk"
	case p.Ranges() == 0:
		c.Found = fmt.Sprintf("all sandboxes share %d ids", p.Size())
		c.Remedy = fmt.Sprintf("give \"sandboxd\" %d ids or more in /etc/subuid and /etc/subgid, or remove its entries; in a container, start that with more ids",
			2*idmap.SandboxIDs+1)
	case f.dataErr != nil:
		c.Found, c.Remedy = "not tried: the data directory cannot be used", "see \"data directory\""
	case f.mounts != nil:
		c.Found = "all sandboxes share their ids: " + f.mounts.Error()
		c.Remedy = "run Linux 5.19 or newer, with CAP_SYS_ADMIN over the host, and choose a data directory on ext4, xfs or btrfs with --data-dir"
	}
	return c
}

func (f facts) judgeDataDir() api.Check {
	c := api.Check{
		Name: "data directory", Fatal: true, OK: f.dataErr == nil,
		Means:  "images and sandboxes have no place",
		Remedy: "choose another with --data-dir, or make this one yours",
	}
	switch {
	case f.dataErr != nil:
		c.Found = f.dataErr.Error()
	case f.nearest == filepath.Clean(f.dataDir):
		c.Found = fmt.Sprintf("%s, on %s", f.dataDir, f.filesystem)
	default:
		c.Found = fmt.Sprintf("%s will be made in %s, on %s", f.dataDir, f.nearest, f.filesystem)
	}
	return c
}

func (f facts) judgeXattrs() api.Check {
	c := api.Check{
		Name: "user attributes", Fatal: true, OK: f.dataErr == nil && f.xattrs == nil,
		Found:  join("files in the data directory carry user.* attributes", f.xattrs),
		Means:  "an overlay cannot keep its marks: no sandbox has a root file system",
		Remedy: "choose a data directory on ext4, xfs or btrfs with --data-dir",
	}
	if f.dataErr != nil {
		c.Found = "not tried: the data directory cannot be used"
	}
	return c
}

func (f facts) judgeOverlay() api.Check {
	c := api.Check{
		Name: "overlay", Fatal: true, OK: f.dataErr == nil && f.overlay == nil,
		Found:  join("an overlay with userxattr works in a user namespace", f.overlay),
		Means:  "no sandbox has a root file system",
		Remedy: "run Linux 5.11 or newer (" + f.sudo("modprobe overlay") + " where it is a module), and choose a data directory on ext4, xfs or btrfs with --data-dir",
	}
	if f.dataErr != nil {
		c.Found = "not tried: the data directory cannot be used"
	}
	return c
}

func (f facts) judgeProc() api.Check {
	return api.Check{
		Name: "fresh /proc", Fatal: true, OK: f.proc == nil,
		Found:  join("a new procfs can be mounted in a user namespace", f.proc),
		Means:  "a sandbox cannot have a /proc of its own, so none starts",
		Remedy: "if this is a container, start it with its /proc unmasked (podman: --security-opt unmask=ALL; Docker: --security-opt systempaths=unconfined)",
	}
}

func (f facts) judgeSeccomp() api.Check {
	return api.Check{
		Name: "system call filter", Fatal: true, OK: f.seccomp == nil,
		Found:  join("seccomp with "+strings.Join(f.seccompActions, ", "), f.seccomp),
		Means:  "the whole kernel would be open to every sandbox, so none starts",
		Remedy: "run a kernel built with CONFIG_SECCOMP_FILTER, on amd64 or arm64",
	}
}

// usual are the controllers of the limits that every sandbox has by default; rest are those of the
// other limits.
var (
	usual = []string{"cpu", "memory", "pids"}
	rest  = []string{"cpuset", "io"}
)

// given returns the controllers that a daemon would have, and a description.
func (f facts) given() (controllers []string, found string) {
	switch {
	case f.cgroupErr != nil:
		return nil, f.cgroupErr.Error()
	case f.host.Asks && f.scopeErr == nil:
		return f.scope.Controllers, "systemd gives the daemon a scope with the controllers: " + orNone(f.scope.Controllers)
	case f.host.AtTop && !f.host.ReadOnly:
		return f.host.Top, "a place at the top of the hierarchy, with the controllers: " + orNone(f.host.Top)
	case f.cgroup.Delegated:
		return f.cgroup.Controllers, fmt.Sprintf("%s with the controllers: %s", f.cgroup.Dir, orNone(f.cgroup.Controllers))
	case f.host.Asks:
		return nil, fmt.Sprintf("not delegated: %s; systemd was asked for a scope: %v", f.cgroup.Why, f.scopeErr)
	default:
		return nil, "not delegated: " + f.cgroup.Why
	}
}

func (f facts) judgeCgroup() api.Check {
	have, found := f.given()
	missing := lacking(usual, have)
	c := api.Check{
		Name: "cgroup limits", OK: len(missing) == 0, Found: found,
		Means: "no ceiling on " + ceilings(missing) + ": one sandbox can take the whole machine. " +
			"A creation that asks for such a limit is refused; processes are limited by rlimit",
	}
	if len(have) == 0 {
		missing = nil // the cgroup itself is missing
	}
	c.Remedy = f.host.Remedy(missing)
	return c
}

func (f facts) judgeCgroupRest() api.Check {
	have, found := f.given()
	missing := lacking(rest, have)
	c := api.Check{
		Name: "io and cpuset limits", OK: len(missing) == 0, Found: found,
		Means:  "a creation that asks for a limit of " + strings.Join(missing, " or ") + " is refused",
		Remedy: "see \"cgroup limits\"",
	}
	if len(lacking(usual, have)) == 0 {
		c.Remedy = f.host.Remedy(missing)
	}
	return c
}

// ceilings names the resources that the controllers would limit.
func ceilings(controllers []string) string {
	words := map[string]string{"cpu": "CPU time", "memory": "memory", "pids": "processes"}
	var out []string
	for _, c := range controllers {
		out = append(out, words[c])
	}
	return strings.Join(out, " and ")
}

func (f facts) judgeCgroupKill() api.Check {
	c := api.Check{
		Name: "cgroup.kill", OK: f.cgroupErr == nil && (f.cgroup.Kill || f.scope.Kill),
		Found:  "a group's processes can be ended at once",
		Means:  "the launcher ends a sandbox by its PID namespace alone, and usage is not counted by group",
		Remedy: "see \"cgroup limits\"; cgroup.kill needs Linux 5.14",
	}
	if !c.OK {
		c.Found = "no group of our own to end"
		if f.cgroup.Delegated || f.host.Asks && f.scopeErr == nil {
			c.Found = "groups have no cgroup.kill"
		}
	}
	return c
}

func (f facts) judgeLogout() api.Check {
	below := f.host.InManager || f.host.Asks && f.scopeErr == nil && f.uid != 0
	c := api.Check{
		Name: "logout", OK: !below || f.host.Lingers, Found: "nothing ends with its user's sessions",
		Means:  "systemd ends the daemon and all sandboxes when " + f.user + "'s last session ends",
		Remedy: f.host.Linger(),
	}
	if below && f.host.Lingers {
		c.Found = f.user + " lingers: systemd runs for them without a session too"
	}
	if !c.OK {
		c.Found = "the daemon runs below " + f.user + "'s systemd, and " + f.user + " does not linger"
	}
	return c
}

// landlockScopes is the first version of Landlock with scopes for signals and abstract sockets.
const landlockScopes = 6

func (f facts) judgeLandlock() api.Check {
	c := api.Check{
		Name: "Landlock", OK: f.landlockErr == nil && f.landlock >= kernel.LandlockRefer,
		Found: join(fmt.Sprintf("ABI %d", f.landlock), f.landlockErr),
		Means: "sandboxes and what unpacks layers have one fence less, and are held by their mounts, capabilities and system call " +
			"filter; programs that would restrict their own file access (inside a sandbox or out) cannot",
		Remedy: kernel.LandlockRemedy,
	}
	if c.OK && f.landlock < landlockScopes {
		c.Found += "; without scopes for signals and abstract sockets (Linux 6.12), which namespaces keep apart all the same"
	}
	if f.landlockErr == nil && !c.OK {
		c.Means = "this version forbids links between directories, so it is not used: sandboxes and what unpacks layers are held by " +
			"their mounts, capabilities and system call filter"
	}
	return c
}

func (f facts) judgePtrace() api.Check {
	c := api.Check{
		Name: "ptrace", OK: !f.ptraceScope.found || f.ptraceScope.value < 2,
		Found:  "no restriction by Yama",
		Means:  "debuggers and strace do not work inside sandboxes",
		Remedy: f.sudo("sysctl -w kernel.yama.ptrace_scope=1"),
	}
	if f.ptraceScope.found {
		c.Found = fmt.Sprintf("Yama's ptrace_scope is %d", f.ptraceScope.value)
	}
	if f.ptraceScope.set(3) {
		c.Remedy = "set kernel.yama.ptrace_scope below 2 in /etc/sysctl.d and boot again: 3 cannot be taken back"
	}
	return c
}

func (f facts) judgeCores() api.Check {
	handler := kernel.CoreHandlerOf(f.corePattern)
	c := api.Check{
		Name: "cores", OK: f.corePatternErr == nil && (handler == kernel.CoreFile || handler == kernel.CorePipe && f.coreLimit > 0),
		Found: "a crash in a sandbox starts nothing",
		Means: "each crash of a program in a sandbox starts a program of the host as root, or is handed to a service of it, under a name that the program chooses; " +
			"enforced.cores is \"host\", and sandboxd serve --require=nocorepipe refuses to start",
		Remedy: f.sudo(kernel.CoreRemedy) + ", and the same line in /etc/sysctl.d to keep it",
	}
	switch {
	case f.corePatternErr != nil:
		c.Found = f.corePatternErr.Error()
	case handler == kernel.CoreSocket:
		c.Found = "kernel.core_pattern is a socket, which every crash is handed to: " + f.corePattern
	case handler == kernel.CorePipe && !c.OK:
		c.Found = "kernel.core_pattern starts a program: " + f.corePattern + "; and a limit of cores of 1 byte, which keeps the kernel from it, is above this user's own of 0"
		c.Remedy = "start the daemon with a hard limit of cores above 0 (systemd: LimitCORE=infinity; a shell: ulimit -Hc unlimited); or " + c.Remedy
	case handler == kernel.CorePipe:
		c.Found += ": a limit of 1 byte keeps the kernel from " + f.corePattern
	}
	return c
}

func (f facts) judgeIPC() api.Check {
	return api.Check{
		Name: "System V IPC", OK: f.ipcErr == nil,
		Found:  join("a sandbox has ceilings of its own", f.ipcErr),
		Means:  "shared memory, queues and semaphores of a sandbox, which outlive their programs, have the kernel's ceilings, which are a whole host's",
		Remedy: kernel.IPCRemedy,
	}
}

// judgeUncounted only says what holds on every host: there is no remedy, and nothing to probe.
func judgeUncounted() api.Check {
	return api.Check{
		Name: "uncounted memory", OK: true,
		Found: "locks on files and timestamps of TCP are memory that no kernel counts for a sandbox; they end with its programs: SECURITY.md",
	}
}

// join returns good if err is nil, otherwise the kernel's answer.
func join(good string, err error) string {
	if err == nil {
		return good
	}
	if u, ok := errors.AsType[*kernel.UnsupportedError](err); ok {
		return "refused: " + u.Error()
	}
	return err.Error()
}

func lacking(of, have []string) []string {
	var out []string
	for _, w := range of {
		if !slices.Contains(have, w) {
			out = append(out, w)
		}
	}
	return out
}

func orNone(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}
