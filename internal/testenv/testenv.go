// Package testenv is what a test may ask of the machine that it runs on.
//
// Every Require function probes; where the need is not met the test is skipped with what was found. A need that is
// listed in SANDBOXD_TEST_REQUIRE (comma-separated: userns, subids, cgroup, root, user, peer, or all) fails the test
// instead, so that the places that should have everything cannot skip in silence.
package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// need names a need as SANDBOXD_TEST_REQUIRE spells it.
type need string

const (
	needUserNS need = "userns"
	needSubIDs need = "subids"
	needCgroup need = "cgroup"
	needRoot   need = "root"
	needUser   need = "user"
	needPeer   need = "peer"
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
		if item == string(n) || item == "all" && n != needRoot && n != needUser {
			return true
		}
	}
	return false
}

// RequireRoot asks for effective uid 0 in the initial user namespace.
func RequireRoot(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		unmet(t, needRoot, fmt.Sprintf("effective uid is %d", uid))
	}
}

// RequireOrdinaryUser asks not to be root.
func RequireOrdinaryUser(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		unmet(t, needUser, "effective uid is 0")
	}
}

// RequireProgram asks for a program in PATH and returns where it is.
func RequireProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		unmet(t, needPeer, fmt.Sprintf("no %s in PATH; `make deps` installs it", name))
	}
	return path
}

// probeUserNS makes a user namespace, once for the process.
var probeUserNS = sync.OnceValue(func() error {
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	return cmd.Run()
})

// RequireUserNS asks for user, mount, PID and network namespaces that this user may make.
func RequireUserNS(t testing.TB) {
	t.Helper()
	if err := probeUserNS(); err != nil {
		unmet(t, needUserNS, "making a user namespace: "+err.Error())
	}
}

// RequireSubIDs asks for 65536 subordinate user and group ids, and for newuidmap and newgidmap that can map them. Root
// needs neither: it maps what it likes.
func RequireSubIDs(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	for _, name := range []string{"newuidmap", "newgidmap"} {
		if _, err := exec.LookPath(name); err != nil {
			unmet(t, needSubIDs, "no "+name+" in PATH (Debian package uidmap)")
		}
	}
	for _, file := range []string{"/etc/subuid", "/etc/subgid"} {
		if n := subordinate(file); n < 65536 {
			unmet(t, needSubIDs, fmt.Sprintf("%s gives this user %d ids, 65536 are needed", file, n))
		}
	}
}

// subordinate counts the ids of the largest range that file gives the current user.
func subordinate(file string) int {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	names := []string{fmt.Sprint(os.Getuid())}
	if u, err := user.Current(); err == nil {
		names = append(names, u.Username)
	}
	largest := 0
	for line := range strings.Lines(string(data)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		var start, count int
		if _, err := fmt.Sscanf(rest, "%d:%d", &start, &count); err == nil && slices.Contains(names, name) {
			largest = max(largest, count)
		}
	}
	return largest
}

// RequireCgroup asks for a cgroup v2 directory that this user may write and whose children get the given controllers.
// Without a controller it asks only for a writable cgroup v2 directory.
func RequireCgroup(t testing.TB, controllers ...string) {
	t.Helper()
	dir, err := ownCgroup()
	if err != nil {
		unmet(t, needCgroup, err.Error())
	}
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		unmet(t, needCgroup, err.Error())
	}
	have := strings.Fields(string(data))
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			unmet(t, needCgroup, fmt.Sprintf("cgroup v2 at %s has the controllers %q, not %s", dir, have, c))
		}
	}
	if err := unix.Access(dir, unix.W_OK); err != nil {
		unmet(t, needCgroup, fmt.Sprintf("%s is not delegated to this user: %v", dir, err))
	}
}

// ownCgroup is the directory of this process in the cgroup v2 hierarchy, which a hybrid host mounts at unified/.
func ownCgroup() (string, error) {
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(mount, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		data, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			return "", err
		}
		for line := range strings.Lines(string(data)) {
			if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
				return filepath.Join(mount, path), nil
			}
		}
	}
	return "", fmt.Errorf("no cgroup v2 hierarchy is mounted")
}
