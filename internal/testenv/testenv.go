// Package testenv declares the needs of a test: properties of the machine, a uid, a peer program,
// or the patience of a soak run.
//
// Every Require function probes. Where the need is not met, the test is skipped with the finding.
// A need listed in SANDBOXD_TEST_REQUIRE fails the test instead, so that a machine which should
// have everything cannot skip in silence. The list is comma-separated: userns, subids, ownids,
// cgroup, landlock, systemd, reflink, root, user, account, resource, bed, peer, or all. That means
// all but ownids, reflink, root, user, account, resource and bed.
//
// The probes are those of the product, internal/kernel and internal/idmap: a test runs exactly
// where the product would work. Cgroups are the exception. A test needs one delegated where it
// runs; a daemon may be given one elsewhere, by systemd or at the top of the hierarchy.
package testenv

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
)

// need is the name of a need in SANDBOXD_TEST_REQUIRE.
type need string

const (
	needUserNS   need = "userns"
	needSubIDs   need = "subids"
	needOwnIDs   need = "ownids"
	needCgroup   need = "cgroup"
	needLandlock need = "landlock"
	needSystemd  need = "systemd"
	needReflink  need = "reflink"
	needRoot     need = "root"
	needUser     need = "user"
	needAccount  need = "account"
	needResource need = "resource"
	needBed      need = "bed"
	needPeer     need = "peer"
)

// notInAll are the needs that all leaves out: root and user exclude each other, and machines
// without the others are usual.
var notInAll = []need{needRoot, needUser, needAccount, needReflink, needOwnIDs, needResource, needBed}

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
		if item == string(n) || item == "all" && !slices.Contains(notInAll, n) {
			return true
		}
	}
	return false
}

// RequireRoot needs effective uid 0.
func RequireRoot(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		unmet(t, needRoot, fmt.Sprintf("effective uid is %d; `make test-root` runs it", uid))
	}
}

// RequireOrdinaryUser needs an effective uid other than 0.
func RequireOrdinaryUser(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		unmet(t, needUser, "effective uid is 0; `make test-rootless` runs it")
	}
}

// Account is the ordinary user, with subordinate ids, that the lanes make when root runs them.
const Account = "sandboxd-test"

// accountOfBed is the ordinary user of the test bed.
const accountOfBed = "dev"

// RequireAccount needs an ordinary user with subordinate ids beside the one that runs the test, and
// returns its credentials: a test of root starts programs as that user.
func RequireAccount(t testing.TB) *syscall.Credential {
	t.Helper()
	for _, name := range []string{Account, accountOfBed} {
		u, err := user.Lookup(name)
		if _, unknown := errors.AsType[user.UnknownUserError](err); unknown {
			continue
		}
		if err != nil {
			t.Fatalf("look up user %s: %v", name, err)
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatalf("look up user %s: %v", name, err)
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
	unmet(t, needAccount, fmt.Sprintf("there is no user %s or %s; `make test` makes one", Account, accountOfBed))
	return nil
}

// RequirePeer needs a program that a test runs beside the product, to talk to it or to compare with
// it, and returns its path.
func RequirePeer(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		unmet(t, needPeer, fmt.Sprintf("no %s in PATH; `make deps` installs it", name))
	}
	return path
}

// CanReflink reports whether root should meet [RequireReflink] here: the kernel has XFS, or the
// module, and loop devices. Programs are not looked for, so that a missing one fails where the
// need is listed.
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

// RequireReflink needs a file system whose files can share extents: XFS on a loop device, which
// takes root. It returns an empty directory there, mode 0711, with half a gigabyte.
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
	if err := os.Chmod(at, 0o711); err != nil { //nolint:gosec // only to be passed through
		t.Fatal(err)
	}
	return at
}

// RequireUserNS needs permission to make user, mount, PID and network namespaces.
func RequireUserNS(t testing.TB) {
	t.Helper()
	if err := userNamespaces(); err != nil {
		unmet(t, needUserNS, err.Error()+"; `sandboxd doctor` says what to change")
	}
}

// userNamespaces probes once for all tests of a process.
var userNamespaces = sync.OnceValue(kernel.UserNamespaces)

// RequireSubIDs needs as many subordinate user and group ids as a sandbox takes, and the programs
// that map them. Root needs neither files nor programs: it may map any id.
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

// RequireOwnIDs needs root, a range of ids for each of several sandboxes, and mounts with mapped
// ids in temporary directories.
func RequireOwnIDs(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		unmet(t, needOwnIDs, fmt.Sprintf("effective uid is %d; `make test-root` runs it", uid))
		return
	}
	plan, err := idmap.Detect()
	if err == nil && plan.Ranges() < 8 {
		err = fmt.Errorf("there are %d ranges", plan.Ranges())
	}
	if err == nil {
		err = idmap.ProbeMounts(t.TempDir())
	}
	if err != nil {
		unmet(t, needOwnIDs, err.Error())
	}
}

// RequireCgroup needs a cgroup v2 directory delegated to this user, and the controllers in it. Most
// machines lack them natively; `make testbed` runs a test in one that has them.
func RequireCgroup(t testing.TB, controllers ...string) {
	t.Helper()
	if found := LacksCgroup(controllers...); found != "" {
		unmet(t, needCgroup, found)
	}
}

// LacksCgroup returns the finding by which [RequireCgroup] skips a test; empty if the need is met.
// tests/lanes asks it before the tests run.
func LacksCgroup(controllers ...string) (found string) {
	c, err := kernel.ProbeCgroup()
	switch {
	case err != nil:
		return err.Error() + "; `make testbed` has it"
	case !c.Delegated:
		return fmt.Sprintf("%s is not delegated to this user: %s; `make testbed` has one that is", c.Path, c.Why)
	}
	for _, name := range controllers {
		if !slices.Contains(c.Controllers, name) {
			return fmt.Sprintf("cgroup v2 at %s has the controllers %q, not %s; `make testbed` has it", c.Dir, c.Controllers, name)
		}
	}
	return ""
}

// RequireResource needs a root with CAP_SYS_RESOURCE, which raises limits. A container's root lacks
// it.
func RequireResource(t testing.TB) {
	t.Helper()
	RequireRoot(t)
	if found := LacksResource(); found != "" {
		unmet(t, needResource, found)
	}
}

// LacksResource returns the finding by which [RequireResource] skips a test of root; empty if the
// need is met. It reads the bounding set, so that an ordinary user learns what root has.
func LacksResource() (found string) {
	if in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil || in == 0 {
		return "root has no CAP_SYS_RESOURCE here; `make testbed WHO=root` has one that has"
	}
	return ""
}

// RequireBed needs a machine of the test bed, because the test changes settings of the whole
// machine.
func RequireBed(t testing.TB) {
	t.Helper()
	if found := LacksBed(); found != "" {
		unmet(t, needBed, found)
	}
}

// LacksBed returns the finding by which [RequireBed] skips a test; empty in a machine of the bed.
func LacksBed() (found string) {
	if cmdline, err := os.ReadFile("/proc/cmdline"); err != nil || !strings.Contains(string(cmdline), "testbed.") {
		return "this is no machine of the test bed; `make testbed` makes one"
	}
	return ""
}

// RequireLandlock needs a version of Landlock, or a later one.
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

// RequireSystemd needs a host that systemd manages, and reports whether it is one.
func RequireSystemd(t testing.TB) bool {
	t.Helper()
	// sd_booted(3) looks at this directory too.
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		unmet(t, needSystemd, "this machine was not started by systemd; `make testbed FLAVOUR=systemd` has one that was")
		return false
	}
	return true
}

// RequireSystemdUser needs a service manager of this user's own that answers on D-Bus, and returns
// the address of its bus.
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

// HungAfter bounds every wait of a test for an event that must come. It only ends a test that
// hangs: no promise is judged by it, so it is the same everywhere, and long enough for a machine
// that is emulated, overloaded or suspended for minutes. It is shorter than the longest grace of a
// stop, ten minutes, so that a stop which sits its grace out counts as hung.
const HungAfter = 9 * time.Minute

// soakVariable is the environment variable that `make soak` sets.
const soakVariable = "SANDBOXD_TEST_SOAK"

// soakNeed begins the reason of every skip by [Soak]. tests/lanes tells such skips by it.
const soakNeed = "needs soak"

// Soak skips the test unless this is a soak run: it judges rates or delays by the clock, which a
// busy machine fails, or repeats random choices for many minutes. The reason is printed with the
// skip.
func Soak(t testing.TB, reason string) {
	t.Helper()
	if !Soaking() {
		t.Skipf("%s: %s; `make soak` runs it", soakNeed, reason)
	}
}

// Soaking reports whether this is a soak run. Tests that repeat a random choice take more rounds
// then, and those that log a delay judge it.
func Soaking() bool { return os.Getenv(soakVariable) != "" }

// SkippedForSoak reports whether a skip's reason is that of [Soak].
func SkippedForSoak(reason string) bool { return strings.Contains(reason, soakNeed+": ") }

// SecondVariable is the environment variable of a lane beside which an ordinary user's runs the
// same tests.
const SecondVariable = "SANDBOXD_TEST_SECOND"

// SameForAll skips a test whose outcome does not depend on the user, where an ordinary user's lane
// runs it at the same time. It is for tests of what stands above sandboxes: clients and their
// protocols, agents' runs, names of images, contexts and policies of code, health checks, the
// command line.
func SameForAll(t testing.TB) {
	t.Helper()
	if os.Getenv(SecondVariable) != "" {
		t.Skip("it is the same for every user, and the ordinary user's lane runs it")
	}
}

// Rounds returns the number of repetitions of a random choice: few in the gate, many in a soak run.
func Rounds(gate, soak int) int {
	if Soaking() {
		return soak
	}
	return gate
}

// Heed lets programs that the test starts from here on take a signal that this process ignores, as
// under nohup(1): they would inherit that.
func Heed(sig os.Signal) {
	if signal.Ignored(sig) {
		signal.Notify(make(chan os.Signal, 1), sig)
	}
}
