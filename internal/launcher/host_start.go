package launcher

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/flock"
	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Options describe how to find or start the launcher of one data directory.
type Options struct {
	DataDir    string // absolute; must exist
	RuntimeDir string // absolute; holds launcher.sock and launcher.log; must exist, be ours and mode 0700
	Launcher   string // path of the binary sandboxd-launcher
	Init       string // path of the binary sandboxd-init
	IDs        idmap.Plan
	Cgroup     cgroup.Subtree // cgroup that the host delegates; zero means none
	Version    string
	// Mounts says which files of the host sandboxes may have.
	Mounts hostdir.Config
	// DiskReserve is [Setup.DiskReserve]. A launcher keeps the value of its start.
	DiskReserve int64
	// Start starts a launcher on behalf of a process that is confined, and returns when it is ready.
	// Default: [Start].
	Start func(ctx context.Context) error `json:"-"`
	// MountRange makes the mounts of a range on behalf of a process that is confined. Default:
	// [MountRange].
	MountRange func(ctx context.Context, number int) ([]*os.File, error) `json:"-"`
	// OpenMount makes a mount of the host's files on behalf of a process that is confined. Default:
	// [OpenMount].
	OpenMount func(ctx context.Context, req MountRequest) (*os.File, error) `json:"-"`
	// MountWorkspace makes the mount of a workspace likewise. Default: [MountWorkspace].
	MountWorkspace func(ctx context.Context, w WorkspaceMount) (*os.File, error) `json:"-"`
}

// startTimeout bounds the time from clone to "ready". It only ends a launcher that hangs: busy,
// emulated processors took 30 s.
const startTimeout = 2 * time.Minute

// Connect returns a client of the launcher that serves RuntimeDir's socket, or starts one, which
// started reports. The context bounds the start only. Until the client is closed, no other process
// can connect in RuntimeDir.
func Connect(ctx context.Context, o Options) (_ *Client, started bool, err error) {
	if o.Start == nil {
		o.Start = func(ctx context.Context) error { return Start(ctx, o) }
	}
	if o.MountRange == nil {
		o.MountRange = func(ctx context.Context, number int) ([]*os.File, error) { return MountRange(ctx, o, number) }
	}
	if o.OpenMount == nil {
		o.OpenMount = func(ctx context.Context, req MountRequest) (*os.File, error) { return OpenMount(ctx, o, req) }
	}
	if o.MountWorkspace == nil {
		o.MountWorkspace = func(ctx context.Context, w WorkspaceMount) (*os.File, error) { return MountWorkspace(ctx, o, w) }
	}
	lock, err := lockDir(ctx, o.RuntimeDir)
	if err != nil {
		return nil, false, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, lock.Close())
		}
	}()
	c := &Client{path: o.socket(), opts: o, lock: lock, ranges: make(chan struct{}, 1)}
	err = c.openSession(ctx)
	if errors.Is(err, runtime.ErrUnavailable) {
		err = c.openSession(ctx) // it was about to end: by now none listens, or another one answers
	}
	if err == nil {
		if err := checkOwner(o); err != nil {
			return nil, false, errors.Join(err, c.session.Close())
		}
		return c, false, nil
	}
	if !nobodyListens(err) {
		return nil, false, fmt.Errorf("connect to the launcher that runs: %w", err)
	}
	if err := c.opts.Start(ctx); err != nil {
		return nil, false, fmt.Errorf("start launcher: %w", err)
	}
	if err := c.openSession(ctx); err != nil {
		return nil, true, fmt.Errorf("connect to the launcher just started: %w", err)
	}
	return c, true, nil
}

// lockPatience is the wait of lockDir for a daemon that is about to end.
const lockPatience = 500 * time.Millisecond

// lockDir keeps two daemons with different data directories from sharing a runtime directory: they
// would share a launcher too, which serves one of them only.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "launcher.lock"), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	err = flock.Exclusive(ctx.Done(), lockPatience, f)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = errors.New("another sandboxd works there: stop it first, or choose another --runtime-dir")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// ownerFile, in the runtime directory, names the data directory of the launcher that serves the
// socket beside it.
const ownerFile = "launcher.data-dir"

// checkOwner refuses a launcher that works on another data directory: a daemon that was killed may
// have left it here.
func checkOwner(o Options) error {
	data, err := os.ReadFile(filepath.Join(o.RuntimeDir, ownerFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil // a user tidied the directory up: no reason to end the sandboxes
	}
	if err != nil {
		return fmt.Errorf("find out whose launcher runs: %w", err)
	}
	if owner := string(data); owner != o.DataDir {
		return fmt.Errorf("the launcher that runs in %s works on %s: choose another --runtime-dir, or end it: start its daemon with sandboxd serve --data-dir %s --runtime-dir %s, and shut that down",
			o.RuntimeDir, owner, owner, o.RuntimeDir)
	}
	return nil
}

// runtimeFile, in the data directory, names the runtime directory of its launcher. The launcher
// holds a lock on the file as long as it runs.
const runtimeFile = "launcher.runtime-dir"

// endPatience is the wait of a start for the end of the launcher before. A launcher stops listening
// when it begins to end.
const endPatience = 5 * time.Second

// lockDataDir keeps a second launcher off the data directory: it would take the sandboxes of the
// first for leftovers and end them. A running launcher answers in its own runtime directory only.
// The lock belongs to the open file, so the launcher that inherits the file keeps it when the
// daemon closes its own.
func lockDataDir(ctx context.Context, o Options) (*os.File, error) {
	path := filepath.Join(o.DataDir, runtimeFile)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory for a launcher: %w", err)
	}
	if err := flock.Exclusive(ctx.Done(), endPatience, f); err != nil {
		if data, readErr := os.ReadFile(path); readErr == nil && len(data) > 0 && errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("a launcher works there that was started with --runtime-dir %s: start the daemon with that; shutting it down ends both", data)
		}
		return nil, errors.Join(fmt.Errorf("lock %s for a launcher: %w", o.DataDir, err), f.Close())
	}
	// Not synced: after a crash of the host there is no launcher either.
	if err := os.WriteFile(path, []byte(o.RuntimeDir), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("note where the launcher answers: %w", err), f.Close())
	}
	return f, nil
}

// logLimit is the size from which on a new launcher begins a new log; one old log is kept. A
// running launcher's log has no bound.
const logLimit = 1 << 20

// openLog opens the log that launchers append to.
func openLog(path string) (*os.File, error) {
	if fi, err := os.Lstat(path); err == nil && fi.Size() > logLimit {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("put the old log aside: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

func (o Options) socket() string { return filepath.Join(o.RuntimeDir, "launcher.sock") }

// logged returns the launcher's log from an offset on, on one line: the beginning, which has the
// reason of a crash, and the end.
func logged(path string, from int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.NewSectionReader(f, from, 1<<20))
	if err != nil {
		return err.Error()
	}
	const most = 1000
	text := strings.ReplaceAll(strings.TrimSpace(string(data)), "\n", "; ")
	if len(text) > 2*most {
		text = text[:most] + " … " + text[len(text)-most:]
	}
	return text
}

// prepareDirs makes the launcher's directories and gives them to its root, which is another uid
// than a daemon that is root.
func prepareDirs(o Options) error {
	uid, gid := o.IDs.UID[0].Outside, o.IDs.GID[0].Outside
	for _, name := range []string{"layers", "sandboxes", "root"} {
		dir := filepath.Join(o.DataDir, name)
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("prepare data directory: %w", err)
		}
		if os.Geteuid() == 0 {
			if err := os.Lchown(dir, uid, gid); err != nil {
				return fmt.Errorf("give %s to the launcher: %w", dir, err)
			}
		}
		// Sandboxes reach their files through the launcher's own root. On the host no other user may list
		// these directories.
		mode := os.FileMode(0o711)
		if err := os.Chmod(dir, mode); err != nil {
			return fmt.Errorf("prepare data directory: %w", err)
		}
		if name != "root" {
			spread(dir)
		}
	}
	return nil
}

// spread marks the directories in this one as unrelated for ext4 (chattr +T), so that each gets its
// own part of the disk. Otherwise all layers and sandboxes share one part. There a new file looks
// past every recently deleted inode, which ext4 does not reuse for minutes: after a few snapshots
// of a thousand files that came and went, the next one took twenty times as long. The mark is a
// hint: without it only speed is lost.
func spread(dir string) {
	const top = 0x00020000 // FS_TOPDIR_FL
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close() // only read
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil || flags&top != 0 {
		return
	}
	_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags|top)) // a hint: see spread
}

// Start starts a launcher and returns when it is ready. The caller makes sure that no other process
// starts one in RuntimeDir.
func Start(ctx context.Context, o Options) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := o.IDs.Validate(); err != nil {
		return err
	}
	lock, err := lockDataDir(ctx, o)
	if err != nil {
		return err
	}
	defer lock.Close() // the launcher has it too
	if err := prepareDirs(o); err != nil {
		return err
	}
	listener, err := listen(o.socket())
	if err != nil {
		return err
	}
	defer listener.Close()
	logFile, err := openLog(filepath.Join(o.RuntimeDir, "launcher.log"))
	if err != nil {
		return err
	}
	defer logFile.Close()
	logStart, err := logFile.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("find the end of the log: %w", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close() // only read
	// Not synced: after a crash of the host there is no launcher either.
	if err := os.WriteFile(filepath.Join(o.RuntimeDir, ownerFile), []byte(o.DataDir), 0o600); err != nil {
		return fmt.Errorf("note whose launcher it is: %w", err)
	}
	syncR, syncW, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make sync pipe: %w", err)
	}
	defer syncR.Close()
	defer syncW.Close()
	statusR, statusW, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make status pipe: %w", err)
	}
	defer statusR.Close()
	defer statusW.Close()

	cmd := exec.Command(o.Launcher, "stage1") //nolint:noctx,gosec // it outlives every context of the daemon; our own binary
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stderr = logFile
	first, sharedIDs := firstRange(ctx, o)
	defer closeAll(first)
	cmd.ExtraFiles = passed(listener, syncR, statusW, lock, null, first)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, // it survives the daemon and its terminal
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
			unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		// Stage 1 is executed before it has an id, which would cost it all capabilities. These two let it
		// become uid 0 of its namespace, and leave the host's root behind if the daemon is root.
		AmbientCaps: []uintptr{unix.CAP_SETUID, unix.CAP_SETGID},
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("clone %s into new namespaces: %w", o.Launcher, err)
	}
	pid := cmd.Process.Pid
	// The launcher outlives the daemon, but not a failed start. Either way it must be reaped.
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the status pipe has the reason
		close(exited)
	}()
	defer func() {
		if err != nil {
			_ = cmd.Process.Kill()
			<-exited
		}
	}()
	_ = syncR.Close()
	_ = statusW.Close()

	if err := idmap.Apply(ctx, pid, o.IDs); err != nil {
		return err
	}
	if o.Cgroup.Path != "" {
		// A leaf of its own: the launcher must be able to write to the common ancestor of its own and a
		// sandbox's cgroup, or it could not move a process.
		if err := o.Cgroup.EnterLauncher(pid, o.IDs.UID[0].Outside, o.IDs.GID[0].Outside); err != nil {
			return err
		}
	}
	ranges := 0
	if first != nil {
		ranges = o.IDs.Ranges()
	}
	pids, _, err := kernel.Sysctl("kernel/pid_max")
	if err != nil {
		return fmt.Errorf("read the host's number of processes: %w", err)
	}
	setup, err := json.Marshal(Setup{
		Ranges: ranges, SharedIDs: sharedIDs, Pids: pids,
		DataDir: o.DataDir, InitPath: o.Init, Cgroup: o.Cgroup.Path, Cgroup2: o.Cgroup.Mount, IDs: o.IDs.SandboxMap(),
		Single: !o.IDs.Subordinate(), Controllers: o.Cgroup.Controllers, Missing: missing(o), Version: o.Version,
		DiskReserve: o.DiskReserve,
	})
	if err != nil {
		return fmt.Errorf("encode setup: %w", err)
	}
	if _, err := syncW.Write(setup); err != nil {
		return fmt.Errorf("send setup: %w", err)
	}
	_ = syncW.Close()

	// "ready", or the reason of the failure. End of file without a line means that it died: then its
	// log has the reason.
	done := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(io.LimitReader(statusR, 64<<10)).ReadString('\n')
		done <- strings.TrimSpace(line)
	}()
	select {
	case line := <-done:
		if line == "ready" {
			return nil
		}
		if line == "" {
			select {
			case <-exited: // it ends: the pipe's last writer is gone
			case <-ctx.Done():
				return fmt.Errorf("closed its pipe without being ready: %w", ctx.Err())
			}
			return fmt.Errorf("ended before it was ready: %s; %s has: %q", cmd.ProcessState, logFile.Name(), logged(logFile.Name(), logStart))
		}
		return errors.New(line)
	case <-ctx.Done():
		_ = cmd.Process.Kill() // ends the reader above: the pipe's last writer is gone
		<-done
		return fmt.Errorf("not ready in time: %w", ctx.Err())
	}
}

// missing lists the defaults' restrictions that this host cannot enforce, with the remedy.
func missing(o Options) []string {
	var out []string
	if !o.IDs.Subordinate() {
		out = append(out, "subordinate ids: "+o.IDs.Reason+"; sandboxes run under the daemon's own uid. "+
			"Install uidmap and run: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "+strconv.Itoa(os.Getuid()))
	} else if o.IDs.Reason != "" {
		out = append(out, "subordinate ids: "+o.IDs.Reason)
	}
	if o.Cgroup.Reason != "" {
		out = append(out, "cgroup: "+o.Cgroup.Reason)
	}
	if o.Cgroup.Rest != "" {
		out = append(out, "limits of io and cpuset: "+o.Cgroup.Rest)
	}
	return out
}

// listen makes the launcher's socket at path and removes its stale predecessor: the caller has
// found that no launcher answers there, and holds the data directory's lock.
func listen(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("open socket's directory: %w", err)
	}
	defer dir.Close() // only read
	f, err := unixmsg.Listen(dir, filepath.Base(path), 128)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return f, nil
}

// nobodyListens reports whether a dial failed because no launcher runs. Other errors (no descriptor
// left, a full backlog, an ended context) prove nothing. A second launcher beside a running one
// would work in the same directories, and take away the socket by which the first one's sandboxes
// can be reached.
func nobodyListens(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
}

// dial connects to a SOCK_SEQPACKET socket, whatever the length of its path.
func dial(ctx context.Context, path string) (*net.UnixConn, error) {
	var conn net.Conn
	err := unixmsg.WithShortName(path, func(name string) (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, "unixpacket", name)
		return err
	})
	if err != nil {
		if sys, ok := errors.AsType[*os.SyscallError](err); ok {
			err = sys // without the short name, which means nothing to a reader
		}
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return conn.(*net.UnixConn), nil
}
