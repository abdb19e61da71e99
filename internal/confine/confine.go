// Package confine confines the daemon to its own directories and sockets with Landlock, a process
// of a hosted agent run ([Worker]) to its own, and the process that relays connections of sandboxes
// ([Gateway]) to sockets, with a system call filter too.
//
// A confined daemon opens, makes, renames and removes files only below its data and runtime
// directories, reads kernel information about itself, and executes nothing. Where Landlock has
// scopes it reaches no abstract socket and no process outside (Linux 6.12; signals need a fixed
// erratum), and where Landlock governs socket paths no other program's socket (7.1). The broker,
// which starts before confinement (package broker), does the rest. Open descriptors, such as those
// that sandboxes pass, are not affected.
//
// Landlock has no right for stat, or for changing mode, owner, times and attributes: file
// permissions alone govern those.
package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/landlock"
)

// Daemon is the input of the daemon's plan. The paths are absolute.
type Daemon struct {
	ABI     int  // version of the kernel's Landlock; a plan needs at least [kernel.LandlockRefer]
	Signals bool // the kernel lets our threads signal each other despite the signal scope ([landlock.ThreadsCanSignal])
	Data    string
	Runtime string
	Socket  string // path of the API's socket
}

// Rule restores rights on a file, or on a directory and everything below it.
type Rule struct {
	Path   string
	Access uint64
}

// Plan is the set of rights taken away, and the exceptions.
type Plan struct {
	Handled unix.LandlockRulesetAttr
	Rules   []Rule
}

const (
	read  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	write = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	// change is the rights of our own directories. The daemon makes no device, FIFO or link there, and
	// executes nothing.
	change = unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_DIR |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_REFER
	// sockets is the right to connect to sockets by path.
	sockets = unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
)

// Plan returns the daemon's plan. It is a pure function.
func (d Daemon) Plan() Plan {
	p := denyAll(d.ABI, d.Signals)
	// The launcher and the inits listen there. Other programs of the daemon's user listen elsewhere,
	// and some execute commands for their clients.
	p.allow(d.Data, read|write|change|sockets)
	p.allow(d.Runtime, read|write|change|sockets|unix.LANDLOCK_ACCESS_FS_MAKE_SOCK)
	if dir := filepath.Dir(d.Socket); dir != d.Runtime && !strings.HasPrefix(dir+"/", d.Data+"/") {
		p.allow(dir, unix.LANDLOCK_ACCESS_FS_REMOVE_FILE) // bound already; removed at the end
	}
	// fdinfo identifies the process of a pidfd. Pools are sized by the free memory.
	p.allow("/proc/self/fdinfo", read)
	p.allow("/proc/meminfo", unix.LANDLOCK_ACCESS_FS_READ_FILE)
	p.allow(os.DevNull, unix.LANDLOCK_ACCESS_FS_READ_FILE|unix.LANDLOCK_ACCESS_FS_WRITE_FILE)
	return p
}

// Worker is the input of the plan for a process of an agent run, which parses the answers of model
// servers and has a key. The paths are absolute and exist.
type Worker struct {
	ABI     int
	Signals bool
	Socket  string   // path of the daemon's socket
	Runs    string   // directory of all runs
	Files   []string // readable files: settings, and those of [Resolver]
	Dirs    []string // readable directories: inputs of runs, and the directory of a generated resolv.conf
}

// Plan returns the worker's plan. It is a pure function.
func (w Worker) Plan() Plan {
	p := denyAll(w.ABI, w.Signals)
	p.allow(filepath.Dir(w.Socket), sockets) // the directory, because the next daemon makes a new socket
	// Output may contain links. They stay below the directory of their run, where the daemon does not
	// follow them.
	p.allow(w.Runs, read|write|change|unix.LANDLOCK_ACCESS_FS_MAKE_SYM)
	for _, file := range w.Files {
		p.allow(file, unix.LANDLOCK_ACCESS_FS_READ_FILE)
	}
	for _, dir := range w.Dirs {
		p.allow(dir, read)
	}
	p.allow(os.DevNull, unix.LANDLOCK_ACCESS_FS_READ_FILE|unix.LANDLOCK_ACCESS_FS_WRITE_FILE)
	return p
}

// Resolver returns the files that Go reads to resolve host names. If a service generates
// resolv.conf in a directory of its own, that directory is returned too, because the service
// replaces the file.
func Resolver() (files, dirs []string, err error) {
	for _, name := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"} {
		file, err := filepath.EvalSymlinks(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("find the resolver's files: %w", err)
		}
		files = append(files, file)
		if dir := filepath.Dir(file); name == "/etc/resolv.conf" && isServiceDir(dir) {
			dirs = append(dirs, dir)
		}
	}
	return files, dirs, nil
}

// isServiceDir reports whether a directory can belong to one service. Top-level directories cannot:
// /etc has passwords, and /run and /root have files of others.
func isServiceDir(dir string) bool { return strings.Count(filepath.Clean(dir), "/") > 1 }

// denyAll returns the plan without exceptions.
func denyAll(abi int, signals bool) Plan {
	p := Plan{Handled: landlock.Everything(abi)}
	// Network access stays: registries and models may have any port, and the kernel does not count
	// MPTCP, which Go's listeners use, as TCP.
	p.Handled.Handled_access_net = 0
	if !signals {
		p.Handled.Scoped &^= unix.LANDLOCK_SCOPE_SIGNAL
	}
	return p
}

func (p *Plan) allow(path string, access uint64) {
	// The kernel refuses rights that its version does not handle. They were never taken away.
	if access &= p.Handled.Handled_access_fs; access != 0 {
		p.Rules = append(p.Rules, Rule{path, access})
	}
}

// Held keeps the files of the rules open. Without a reference the kernel forgets inodes of procfs,
// and a rule no longer matches the new one. Closing it ends the exceptions there.
type Held struct{ files []*os.File }

// Close releases the files.
func (h *Held) Close() error {
	var errs []error
	for _, f := range h.files {
		errs = append(errs, f.Close())
	}
	h.files = nil
	return errors.Join(errs...)
}

// Apply confines every thread of the process to the plan, irrevocably, and verifies it.
func (p Plan) Apply() (_ *Held, err error) {
	h := new(Held)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("confine this process: %w", err), h.Close())
		}
	}()
	rules, err := landlock.New(&p.Handled)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rules.Close()) }()
	for _, r := range p.Rules {
		fd, err := unix.Open(r.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s for Landlock: %w", r.Path, err)
		}
		h.files = append(h.files, os.NewFile(uintptr(fd), r.Path))
		if err := rules.Allow(fd, r.Access); err != nil {
			return nil, fmt.Errorf("allow %s in Landlock: %w", r.Path, err)
		}
	}
	if err := rules.RestrictProcess(); err != nil {
		return nil, err
	}
	if err := p.Verify(); err != nil {
		return nil, err
	}
	return h, nil
}

// Verify tries forbidden accesses in every thread: reading the host's root, and writing to one of
// its devices. If threads disagree, syscall.AllThreadsSyscall ends the process.
func (p Plan) Verify() error {
	for _, try := range []struct {
		path  string
		flags int
	}{{"/", unix.O_RDONLY | unix.O_DIRECTORY}, {"/dev/zero", unix.O_WRONLY}} {
		fd, err := unix.Open(try.path, try.flags|unix.O_CLOEXEC, 0)
		if err == nil {
			return errors.Join(fmt.Errorf("%s can be opened in spite of Landlock", try.path), unix.Close(fd))
		}
		if !errors.Is(err, unix.EACCES) {
			return fmt.Errorf("try to open %s: %w", try.path, err)
		}
		path, err := unix.BytePtrFromString(try.path)
		if err != nil {
			return err
		}
		at := unix.AT_FDCWD
		//nolint:gosec // the address is that of the path which openat(2) reads
		_, _, errno := syscall.AllThreadsSyscall6(unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(path)), uintptr(try.flags|unix.O_CLOEXEC), 0, 0, 0)
		goruntime.KeepAlive(path)
		if errno != unix.EACCES {
			return fmt.Errorf("try to open %s in every thread: %w", try.path, errno)
		}
	}
	return nil
}

// Probe fills in the fields that describe the kernel. It returns false, with ABI 0, if the kernel's
// Landlock cannot enforce the plan.
func (d *Daemon) Probe() (ok bool) {
	d.ABI, d.Signals, ok = probe()
	return ok
}

// Probe is like [Daemon.Probe].
func (w *Worker) Probe() (ok bool) {
	w.ABI, w.Signals, ok = probe()
	return ok
}

func probe() (abi int, signals, ok bool) {
	abi, err := kernel.LandlockABI()
	if err != nil || abi < kernel.LandlockRefer {
		return 0, false, false
	}
	return abi, landlock.ThreadsCanSignal(), true
}

// Missing lists actions that only a later kernel would deny a confined daemon.
func (d Daemon) Missing() (all []string) {
	if d.ABI == 0 {
		return nil // nothing is enforced
	}
	handled := d.Plan().Handled
	if handled.Scoped&unix.LANDLOCK_SCOPE_SIGNAL == 0 {
		all = append(all, "it can signal its user's other processes (Linux 6.15 keeps it from that)")
	}
	if handled.Scoped&unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET == 0 {
		all = append(all, "it can connect to abstract sockets (Linux 6.12)")
	}
	if handled.Handled_access_fs&unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX == 0 {
		all = append(all, "it can connect to sockets of its user's other programs (Linux 7.1)")
	}
	return all
}

// String returns a plan, one line per rule, for people and golden files.
func (p Plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "taken away: files %s; scopes %#x\n", rights(p.Handled.Handled_access_fs), p.Handled.Scoped)
	if p.Handled.Handled_access_net != 0 {
		fmt.Fprintf(&b, "taken away: network %#x\n", p.Handled.Handled_access_net)
	}
	for _, r := range p.Rules {
		fmt.Fprintf(&b, "%s: %s\n", r.Path, rights(r.Access))
	}
	return b.String()
}

var names = []string{
	"execute", "write", "read", "list", "remove directories", "remove files", "make character devices", "make directories", "make files",
	"make sockets", "make FIFOs", "make block devices", "make links", "move between directories", "truncate", "ioctl of devices", "connect to sockets",
}

func rights(access uint64) string {
	var all []string
	for i, name := range names {
		if access&(1<<i) != 0 {
			all = append(all, name)
		}
	}
	return strings.Join(slices.Clip(all), ", ")
}
