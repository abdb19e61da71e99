package attack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// ids returns the ids of this process, one line.
func ids() string {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err.Error()
	}
	var said []string
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(line, ":"); name == "Uid" || name == "Gid" || name == "CapEff" || name == "CapPrm" {
			said = append(said, strings.ToLower(name)+" "+strings.Join(strings.Fields(value), ","))
		}
	}
	return strings.Join(said, " ")
}

// ownProgram is a copy of this program, at a place where programs can be written.
func ownProgram(name string) (path string, err error) {
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", err
	}
	defer from.Close() // only read
	path = "/tmp/" + name
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(to, from)
	return path, errors.Join(err, to.Close())
}

// execSetID starts a program that belongs to another id and has a bit to become that.
func execSetID(mode uint32) error {
	const other = 7
	path, err := ownProgram("attacker-setid")
	if err != nil {
		return err
	}
	defer os.Remove(path) // in a directory of its own
	if err := unix.Chown(path, other, other); err != nil {
		return err
	}
	if err := unix.Chmod(path, mode); err != nil {
		return err
	}
	said, err := exec.CommandContext(context.Background(), path, IDs()...).Output()
	if err != nil {
		return err
	}
	// Real, effective, saved, of files.
	want := fmt.Sprintf("uid %d,%d,", os.Getuid(), other)
	if mode&unix.S_ISGID != 0 {
		want = fmt.Sprintf("gid %d,%d,", os.Getgid(), other)
	}
	if !strings.Contains(string(said), want) {
		return fmt.Errorf("the bit has no effect: %s", strings.TrimSpace(string(said)))
	}
	return nil
}

// execCapable starts a program with a capability of its file, where being root gives none.
func execCapable() error {
	path, err := ownProgram("attacker-capable")
	if err != nil {
		return err
	}
	defer os.Remove(path) // in a directory of its own
	// VFS_CAP_REVISION_2, effective; CAP_NET_BIND_SERVICE is permitted.
	attr := [20]byte{1, 0, 0, 2, 0, 1 << (unix.CAP_NET_BIND_SERVICE - 8)}
	if err := unix.Setxattr(path, "security.capability", attr[:], 0); err != nil {
		return err
	}
	goruntime.LockOSThread() // never unlocked: the thread ends with its dropped privileges
	const noRoot = 1
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, noRoot, 0, 0, 0); err != nil {
		return err
	}
	said, err := exec.CommandContext(context.Background(), path, IDs()...).Output()
	if err != nil {
		return err
	}
	if !strings.Contains(string(said), "capeff 0000000000000400") {
		return fmt.Errorf("the attribute has no effect: %s", strings.TrimSpace(string(said)))
	}
	return nil
}
