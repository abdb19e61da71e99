// Package confine holds the daemon to its own directories and sockets, once it has started, and the processes of the agent runs that it
// hosts ([Worker]) to theirs.
//
// From then on, where the kernel has Landlock, the daemon opens, makes, renames and removes files below its data and its runtime directory
// only, reads what the kernel says about itself, and executes nothing. It reaches no abstract socket and no process outside where
// Landlock has scopes (6.12; of signals with an erratum mended), and no socket that has a path where it knows those (7.1). What else it
// needs of the host it has done by a process that it has started before (package broker), which knows a short list of
// things to do. What is open already stays open: descriptors that sandboxes pass are not affected.
//
// Landlock has no right to look at what a file is, or to change its mode, owner, times and attributes: file permissions alone keep
// those.
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

// Daemon is what the plan depends on. The paths are absolute.
type Daemon struct {
	ABI     int  // of the kernel's Landlock, at least [kernel.LandlockRefer] where there is a plan
	Signals bool // the kernel lets its threads signal each other although signals have a scope ([landlock.ThreadsCanSignal])
	Data    string
	Runtime string
	Socket  string // of the API
}

// Rule gives rights back to a file, or to a directory and all below it.
type Rule struct {
	Path   string
	Access uint64
}

// Plan is what is taken away, and what is given back.
type Plan struct {
	Handled unix.LandlockRulesetAttr
	Rules   []Rule
}

const (
	read  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	write = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	// change is what directories of our own take: no device and no FIFO is ever made there, by the daemon no link, and nothing executed.
	change = unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_DIR |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_REFER
	// sockets is to connect to those that listen at a path.
	sockets = unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
)

// Plan is a pure function.
func (d Daemon) Plan() Plan {
	p := nothing(d.ABI, d.Signals)
	// The launcher and the inits listen there. Other programs of the daemon's user listen elsewhere, and some start what they are told to.
	p.allow(d.Data, read|write|change|sockets)
	p.allow(d.Runtime, read|write|change|sockets|unix.LANDLOCK_ACCESS_FS_MAKE_SOCK)
	if dir := filepath.Dir(d.Socket); dir != d.Runtime && !strings.HasPrefix(dir+"/", d.Data+"/") {
		p.allow(dir, unix.LANDLOCK_ACCESS_FS_REMOVE_FILE) // it is bound already, and taken away in the end
	}
	// Of pidfds the kernel tells there which process they are; pools are made for what memory there is.
	p.allow("/proc/self/fdinfo", read)
	p.allow("/proc/meminfo", unix.LANDLOCK_ACCESS_FS_READ_FILE)
	p.allow(os.DevNull, unix.LANDLOCK_ACCESS_FS_READ_FILE|unix.LANDLOCK_ACCESS_FS_WRITE_FILE)
	return p
}

// Worker is what the plan for a process depends on that works on a run of the agent: it reads what models and their servers send, and
// has a key. The paths are absolute, and there.
type Worker struct {
	ABI     int
	Signals bool
	Socket  string   // of the daemon
	Runs    string   // the directory of all runs
	Files   []string // which it reads: settings, and those of [Resolver]
	Dirs    []string // below which it reads: what runs may be given as input, and where the resolver's configuration is replaced
}

// Plan is a pure function.
func (w Worker) Plan() Plan {
	p := nothing(w.ABI, w.Signals)
	p.allow(filepath.Dir(w.Socket), sockets) // the next daemon's is another one
	// Output has links, and they stay below the directory of their run, where nobody follows them.
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

// Resolver are the files that Go reads to find the address of a host, and the directory in which some service replaces the
// first of them, if that is a service's own.
func Resolver() (files, dirs []string, err error) {
	for _, name := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"} {
		file, err := filepath.EvalSymlinks(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("find how addresses are found: %w", err)
		}
		files = append(files, file)
		if dir := filepath.Dir(file); name == "/etc/resolv.conf" && ofAService(dir) {
			dirs = append(dirs, dir)
		}
	}
	return files, dirs, nil
}

// ofAService reports whether a directory may be one service's: those at the top, such as /etc, where passwords are, /run and
// /root, are not.
func ofAService(dir string) bool { return strings.Count(filepath.Clean(dir), "/") > 1 }

// nothing is the plan that everything is given back to which a process needs.
func nothing(abi int, signals bool) Plan {
	p := Plan{Handled: landlock.Everything(abi)}
	// Registries and models have any port; and what is MPTCP, as Go's listeners are, the kernel does not take for TCP.
	p.Handled.Handled_access_net = 0
	if !signals {
		p.Handled.Scoped &^= unix.LANDLOCK_SCOPE_SIGNAL
	}
	return p
}

func (p *Plan) allow(path string, access uint64) {
	// A right that this version does not handle nobody has lost.
	if access &= p.Handled.Handled_access_fs; access != 0 {
		p.Rules = append(p.Rules, Rule{path, access})
	}
}

// Held keeps what rules are about: for procfs that is no file that would be the same one after the kernel has forgotten it.
// Closing it ends what the rules allow there.
type Held struct{ files []*os.File }

// Close lets go.
func (h *Held) Close() error {
	var errs []error
	for _, f := range h.files {
		errs = append(errs, f.Close())
	}
	h.files = nil
	return errors.Join(errs...)
}

// Apply holds every thread of the process to the plan, for good, and verifies that it is held.
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

// Verify has every thread of the process try what the plan forbids: to read the host's root, and to write to one of its devices. A
// thread that can what the first can not ends the process (syscall.AllThreadsSyscall).
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

// Probe finds out what the plan for the daemon depends on. It is false where the kernel's Landlock cannot hold it: then ABI is 0.
func (d *Daemon) Probe() (ok bool) {
	d.ABI, d.Signals, ok = probe()
	return ok
}

// Probe is [Daemon.Probe] for a worker.
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

// Missing says what a confined daemon can still do that a later kernel would keep it from.
func (d Daemon) Missing() (all []string) {
	if d.ABI == 0 {
		return nil // everything is
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

// String prints a plan, one line for each rule, for people and golden files.
func (p Plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "taken away: files %s; scopes %#x\n", rights(p.Handled.Handled_access_fs), p.Handled.Scoped)
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
