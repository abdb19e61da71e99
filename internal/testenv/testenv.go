// Package testenv is what a test may ask of the machine that it runs on.
//
// Every Require function probes; where the need is not met the test is skipped with what was found. A need that is
// listed in SANDBOXD_TEST_REQUIRE (comma-separated: userns, subids, cgroup, landlock, systemd, reflink, root, user, peer, or all, which is all but reflink, root and user) fails
// the test instead, so that the places that should have everything cannot skip in silence.
//
// The probes are those of the product, internal/kernel and internal/idmap: a test runs exactly where the product would work.
// But for cgroups: a test asks for one that is delegated where it runs, and a daemon may be given one elsewhere, by systemd or
// at the top of the hierarchy.
package testenv

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
)

// need names a need as SANDBOXD_TEST_REQUIRE spells it.
type need string

const (
	needUserNS   need = "userns"
	needSubIDs   need = "subids"
	needCgroup   need = "cgroup"
	needLandlock need = "landlock"
	needSystemd  need = "systemd"
	needReflink  need = "reflink"
	needRoot     need = "root"
	needUser     need = "user"
	needPeer     need = "peer"
)

// unmet skips the test, or fails it where the need is required on this machine.
func unmet(t testing.TB, n need, found string) {
	t.Helper()
	if required(os.Getenv("SANDBOXD_TEST_REQUIRE"), n) {
		t.Fatalf("needs %s, which SANDBOXD_TEST_REQUIRE demands of this machine: %s", n, found)
	}
	t.Skipf("needs %s: %s", n, found)
}

func required(list string, n need) bool {
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		if item == string(n) || item == "all" && n != needRoot && n != needUser && n != needReflink {
			return true
		}
	}
	return false
}

// RequireRoot asks for effective uid 0.
func RequireRoot(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		unmet(t, needRoot, fmt.Sprintf("effective uid is %d; `make test-root` runs it", uid))
	}
}

// RequireOrdinaryUser asks not to be root.
func RequireOrdinaryUser(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		unmet(t, needUser, "effective uid is 0; `make test-rootless` runs it")
	}
}

// RequirePeer asks for a program that a test runs beside the product, to talk to it or to compare with it, and returns where
// it is.
func RequirePeer(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		unmet(t, needPeer, fmt.Sprintf("no %s in PATH; `make deps` installs it", name))
	}
	return path
}

// CanReflink says that a machine should meet [RequireReflink], were root asked: its kernel has XFS, or the module, and loop devices. It
// asks for no program, so that one which is not installed is a failure where the need is listed.
func CanReflink() bool {
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return false
	}
	if data, err := os.ReadFile("/proc/filesystems"); err == nil && slices.Contains(strings.Fields(string(data)), "xfs") {
		return true
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return false
	}
	for _, list := range []string{"modules.dep", "modules.builtin"} {
		data, err := os.ReadFile(filepath.Join("/lib/modules", unix.ByteSliceToString(name.Release[:]), list))
		if err == nil && strings.Contains(string(data), "/xfs.ko") {
			return true
		}
	}
	return false
}

// RequireReflink asks for a file system in which files can share what they have (XFS, on a loop device that only root can have), and
// returns an empty directory that everybody may pass through, with half a gigabyte.
func RequireReflink(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		unmet(t, needReflink, "only root can mount one")
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		t.Setenv("PATH", os.Getenv("PATH")+":"+dir)
	}
	mkfs, err := exec.LookPath("mkfs.xfs")
	if err != nil {
		unmet(t, needReflink, "no mkfs.xfs in PATH; the package is called xfsprogs")
	}
	dir, err := os.MkdirTemp("", "xfs") //nolint:usetesting // a socket's path has 108 bytes, and a test's name is long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	disk, at := filepath.Join(dir, "disk"), filepath.Join(dir, "at")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{os.Truncate(disk, 512<<20), os.Chmod(dir, 0o711), os.Mkdir(at, 0o711)} { //nolint:gosec // to be passed through
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, argv := range [][]string{{mkfs, "-q", "-m", "reflink=1", disk}, {"mount", "-o", "loop", disk, at}} {
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil { //nolint:gosec // of ours
			unmet(t, needReflink, fmt.Sprintf("%q: %v: %s", argv, err, out))
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", at, err)
		}
	})
	if err := os.Chmod(at, 0o711); err != nil { //nolint:gosec // as above
		t.Fatal(err)
	}
	return at
}

// RequireUserNS asks for user, mount, PID and network namespaces that this user may make.
func RequireUserNS(t testing.TB) {
	t.Helper()
	if err := userNamespaces(); err != nil {
		unmet(t, needUserNS, err.Error()+"; `sandboxd doctor` says what to change")
	}
}

// userNamespaces tries once for all tests of a process.
var userNamespaces = sync.OnceValue(kernel.UserNamespaces)

// RequireSubIDs asks for as many subordinate user and group ids as a sandbox wants, and for what maps them. Root needs
// neither files nor programs: it maps what it likes.
func RequireSubIDs(t testing.TB) {
	t.Helper()
	plan, err := idmap.Detect()
	switch {
	case err != nil:
		unmet(t, needSubIDs, err.Error())
	case plan.Size() < idmap.SandboxIDs:
		unmet(t, needSubIDs, fmt.Sprintf("%s; sandboxes have %d ids of %d; `sandboxd doctor` says how to get more", plan.Reason, plan.Size(), idmap.SandboxIDs))
	}
}

// RequireCgroup asks for a cgroup v2 directory that is delegated to this user, and for the controllers in it. Natively most
// machines lack them; `make testbed` runs a test in one that has them.
func RequireCgroup(t testing.TB, controllers ...string) {
	t.Helper()
	c, err := kernel.ProbeCgroup()
	switch {
	case err != nil:
		unmet(t, needCgroup, err.Error()+"; `make testbed` has it")
		return
	case !c.Delegated:
		unmet(t, needCgroup, fmt.Sprintf("%s is not delegated to this user: %s; `make testbed` has one that is", c.Path, c.Why))
		return
	}
	for _, name := range controllers {
		if !slices.Contains(c.Controllers, name) {
			unmet(t, needCgroup, fmt.Sprintf("cgroup v2 at %s has the controllers %q, not %s; `make testbed` has it", c.Dir, c.Controllers, name))
			return
		}
	}
}

// RequireLandlock asks for a version of Landlock, or a later one.
func RequireLandlock(t testing.TB, abi int) {
	t.Helper()
	have, err := kernel.LandlockABI()
	switch {
	case err != nil:
		unmet(t, needLandlock, err.Error())
	case have < abi:
		unmet(t, needLandlock, fmt.Sprintf("the kernel has version %d of Landlock, not %d; `make testbed KERNEL=newest` has the latest", have, abi))
	}
}

// RequireSystemd asks for a host that systemd manages, and reports whether it does.
func RequireSystemd(t testing.TB) bool {
	t.Helper()
	// What sd_booted(3) looks at.
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		unmet(t, needSystemd, "this machine was not started by systemd; `make testbed FLAVOUR=systemd` has one that was")
		return false
	}
	return true
}

// RequireSystemdUser asks for a service manager of this user's own that can be spoken to over D-Bus, and returns the
// address of its bus.
func RequireSystemdUser(t testing.TB) (bus string) {
	t.Helper()
	socket := filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "bus")
	const get = "; `make testbed FLAVOUR=systemd WHO=dev` has one"
	if !RequireSystemd(t) {
		return ""
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "unix", socket)
	if err != nil {
		unmet(t, needSystemd, "the user's bus: "+err.Error()+get)
		return ""
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	return "unix:path=" + socket
}

// Patience stretches a limit of time that is there to end a test that hangs, where everything takes longer: SANDBOXD_TEST_SLOW
// is how many times longer. It is not for limits that a test is about.
func Patience(d time.Duration) time.Duration {
	if n, err := strconv.Atoi(os.Getenv("SANDBOXD_TEST_SLOW")); err == nil && n > 1 {
		return time.Duration(n) * d
	}
	return d
}
