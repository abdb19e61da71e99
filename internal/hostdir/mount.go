package hostdir

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// Argument is the first argument of this program when it is the child that copies a mount.
const Argument = "copy-mount"

// flags hold on every mount of the host's files. What a program writes there belongs to a user of
// the host.
const flags = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

func attributes(readOnly bool) uint64 {
	if readOnly {
		return flags | unix.MOUNT_ATTR_RDONLY
	}
	return flags
}

// Mapped returns a mount of a source with the map of ids that the function returns for the source's
// owner. The caller is root of the host. Mounts below the source are not in it.
func (c *Config) Mapped(source string, readOnly bool, ids func(uid, gid int) (u, g []idmap.Range, err error)) (*os.File, error) {
	f, err := c.Open(source)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only a handle
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %s: %w", source, err)
	}
	uid, gid, err := ids(int(st.Uid), int(st.Gid))
	if err != nil {
		return nil, err
	}
	ns, err := idmap.Namespace(uid, gid)
	if err != nil {
		return nil, err
	}
	defer ns.Close() // only a handle
	m, err := idmap.CloneMount(f, ns, attributes(readOnly))
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM):
		return nil, refuse("mount %s: its file system cannot map ids (ext4, xfs, btrfs and tmpfs can): %v", source, err)
	case err != nil:
		return nil, err
	}
	return m, nil
}

// job is what the child gets.
type job struct {
	Config   Config `json:"config"`
	Source   string `json:"source"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// verdict is the child's answer. It comes with the mount, if there is no error.
type verdict struct {
	Error   string `json:"error,omitempty"`
	Refused bool   `json:"refused,omitempty"`
}

// fdAnswer is the child's socket.
const fdAnswer = 3

// Plain returns a mount of a source of the calling user's, with the ids of the host. It works
// without privileges.
func (c *Config) Plain(ctx context.Context, source string, readOnly bool) (*os.File, error) {
	text, err := json.Marshal(&job{*c, source, readOnly})
	if err != nil {
		return nil, fmt.Errorf("encode job: %w", err)
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "copy-mount")
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Argument)
	cmd.Stdin = bytes.NewReader(text)
	cmd.Stderr = os.Stderr // panics
	cmd.Env = []string{}   // ours may have secrets
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs} // fdAnswer
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Setsid:      true, Pdeathsig: syscall.SIGKILL,
	}
	err = cmd.Run()
	_ = theirs.Close() // the child has had a copy
	if err != nil {
		return nil, fmt.Errorf("copy the mount of %s in a child: %w", source, err)
	}
	return answered(ours, source)
}

// answered reads the child's answer, which is there.
func answered(from *os.File, source string) (*os.File, error) {
	buf, oob := make([]byte, 16<<10), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(int(from.Fd()), buf, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("copy the mount of %s: no answer: %w", source, err)
	}
	var v verdict
	if err := json.Unmarshal(buf[:n], &v); err != nil {
		return nil, fmt.Errorf("copy the mount of %s: decode the answer: %w", source, err)
	}
	if v.Refused {
		return nil, &Refusal{v.Error}
	}
	if v.Error != "" {
		return nil, fmt.Errorf("copy the mount of %s: %s", source, v.Error)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err == nil && len(messages) == 1 {
		var fds []int
		if fds, err = unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			return os.NewFile(uintptr(fds[0]), source), nil
		}
	}
	return nil, errors.Join(fmt.Errorf("copy the mount of %s: the answer has no mount", source), err)
}

// Main copies a mount if the arguments ask for it. Every program that calls [Config.Plain] calls it
// first.
func Main(args []string) (code int, handled bool) {
	if len(args) != 1 || args[0] != Argument {
		return 0, false
	}
	m, err := copyMount()
	var v verdict
	var rights []byte
	if err != nil {
		refused, ok := errors.AsType[*Refusal](err)
		v = verdict{Error: err.Error(), Refused: ok}
		if ok {
			v.Error = refused.Reason
		}
	} else {
		rights = unix.UnixRights(int(m.Fd()))
	}
	text, err := json.Marshal(&v)
	if err == nil {
		err = unix.Sendmsg(fdAnswer, text, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	if err != nil {
		return 1, true
	}
	return 0, true
}

func copyMount() (*os.File, error) {
	var j job
	if err := json.NewDecoder(os.Stdin).Decode(&j); err != nil {
		return nil, fmt.Errorf("decode job: %w", err)
	}
	f, err := j.Config.Open(j.Source)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only a handle
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at it: %w", err)
	}
	if st.Uid != 0 { // the caller's, in this user namespace
		return nil, refuse("mount %s: it does not belong to the daemon's user, whose files alone an ordinary user's daemon can give to a sandbox", j.Source)
	}
	fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if errors.Is(err, unix.EINVAL) {
		// The kernel does not let go of the mounts that cover something from a more powerful namespace.
		return nil, refuse("mount %s: other file systems are mounted below it; name directories without", j.Source)
	}
	if err != nil {
		return nil, fmt.Errorf("copy mount: %w", err)
	}
	m := os.NewFile(uintptr(fd), j.Source)
	attr := unix.MountAttr{Attr_set: attributes(j.ReadOnly), Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, errors.Join(fmt.Errorf("restrict mount: %w", err), m.Close())
	}
	return m, nil
}
