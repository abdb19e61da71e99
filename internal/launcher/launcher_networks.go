package launcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
)

// readyNetworks is the number of namespaces that are made ahead, once the first one was wanted:
// making one takes longer than the rest of a network's part in a creation. Each takes 250 KB.
const readyNetworks = 4

// Networks makes the network namespaces of sandboxes, by the maker. Its methods may be called from
// several goroutines.
//
// A maker that ends is not replaced: its successor would be a child of a launcher that has its
// filter, would inherit it, and could load no rules. There are no new networks then until the
// launcher is started anew; sandboxes that have one keep it.
type Networks struct {
	log    *slog.Logger
	ready  chan *Network
	turn   chan struct{} // semaphore of one that serializes the exchanges with the maker
	probed chan struct{} // closed when the maker has said whether it can make any
	conn   *net.UnixConn

	mu      sync.Mutex
	filling bool
	failed  error // why there are no networks; nil while there are
}

// OpenNetworks starts the maker and does not wait for it. The launcher's filter is not loaded yet,
// and the calling thread is one that lives as long as the process: the maker ends with it.
func OpenNetworks(log *slog.Logger) *Networks {
	n := &Networks{log: log, ready: make(chan *Network, readyNetworks), turn: make(chan struct{}, 1), probed: make(chan struct{})}
	if err := n.start(); err != nil {
		n.fail(fmt.Errorf("start the maker of network namespaces: %w", err))
		close(n.probed)
	}
	return n
}

func (n *Networks) start() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "maker")
	defer theirs.Close() // the child has its own
	if n.conn, err = makerConn(pair[0]); err != nil {
		return err
	}
	var complaints limited
	cmd := exec.Command("/proc/self/exe", "network") //nolint:noctx // it lives as long as the launcher
	cmd.Env, cmd.Dir, cmd.ExtraFiles, cmd.Stderr = childEnv, "/", []*os.File{theirs}, &complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, n.conn.Close())
	}
	go func() {
		files, err := n.receive()
		closeAll(files)
		if err == nil && len(files) > 0 {
			err = errors.New("it begins with descriptors")
		}
		if err != nil {
			_ = cmd.Process.Kill() // it has said all that it will
			_ = cmd.Wait()
			n.fail(fmt.Errorf("%w %s: %s", err, clip(complaints.String()), netns.Remedy))
			close(n.probed)
			return
		}
		close(n.probed)
		_ = cmd.Wait() // the state says more
		n.fail(fmt.Errorf("the maker of network namespaces has ended (%s %s): sandboxd shutdown ends this launcher, and the next one has another",
			cmd.ProcessState, clip(complaints.String())))
	}()
	return nil
}

// fail notes that there are no networks any more. The first reason stays.
func (n *Networks) fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failed == nil {
		n.failed = err
	}
}

// Missing returns why sandboxes have no networks, or nil. It waits until that is known: some
// milliseconds from the start of the launcher. A nil Networks has none.
func (n *Networks) Missing(ctx context.Context) error {
	if n == nil {
		return fmt.Errorf("network: %w: this launcher makes none", runtime.ErrUnenforceable)
	}
	select {
	case <-n.probed:
	case <-ctx.Done():
		return fmt.Errorf("wait for the maker of network namespaces: %w", context.Cause(ctx))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failed == nil {
		return nil
	}
	return fmt.Errorf("network: %w: %w", runtime.ErrUnenforceable, n.failed)
}

// Take returns a namespace that no other sandbox has had. The caller closes it.
func (n *Networks) Take(ctx context.Context) (*Network, error) {
	if err := n.Missing(ctx); err != nil {
		return nil, err
	}
	defer n.refill()
	select {
	case w := <-n.ready:
		return w, nil
	default:
	}
	select {
	case w := <-n.ready: // made meanwhile
		return w, nil
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
		return n.make()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for a network namespace: %w", context.Cause(ctx))
	}
}

// refill makes namespaces ahead in the background, unless that is under way.
func (n *Networks) refill() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.filling {
		return
	}
	n.filling = true
	go func() {
		for n.fillOne() {
		}
	}()
}

// fillOne makes one namespace ahead. It reports false when no more are wanted.
func (n *Networks) fillOne() bool {
	n.mu.Lock()
	if len(n.ready) == cap(n.ready) || n.failed != nil {
		n.filling = false
		n.mu.Unlock()
		return false
	}
	n.mu.Unlock()
	n.turn <- struct{}{}
	w, err := n.make()
	<-n.turn
	if err != nil {
		n.log.Warn("no network namespace made ahead", "err", err)
		n.mu.Lock()
		n.filling = false // the next Take tries again
		n.mu.Unlock()
		return false
	}
	n.ready <- w // there is room: no other goroutine sends
	return true
}

// make asks the maker for a namespace. The caller has the turn. A maker whose answer cannot be
// understood is not asked again.
func (n *Networks) make() (_ *Network, err error) {
	if err := send(n.conn, makerRequest{}); err != nil {
		return nil, fmt.Errorf("ask for a network namespace: %w", err)
	}
	files, err := n.receive()
	if err == nil {
		defer closeAll(files)
		err = checkMade(files)
	}
	var refused *makerError
	switch {
	case errors.As(err, &refused):
		return nil, fmt.Errorf("make network namespace: %w", err)
	case err != nil:
		n.fail(fmt.Errorf("the maker of network namespaces is not understood: %w", err))
		_ = n.conn.Close() // it ends
		return nil, fmt.Errorf("make network namespace: %w", err)
	}
	return hold(files)
}

// checkMade verifies the descriptors of an answer.
func checkMade(files []*os.File) error {
	if len(files) != 4 && len(files) != 5 {
		return fmt.Errorf("%d descriptors, not 4 or 5", len(files))
	}
	return namespaceOf(files).Verify()
}

// namespaceOf returns the namespace of descriptors in the order of [Network].
func namespaceOf(files []*os.File) *netns.Namespace {
	n := &netns.Namespace{NS: files[0], Stream: files[1], DNS: files[2], DNSTCP: files[3]}
	if len(files) > 4 {
		n.Diag = files[4]
	}
	return n
}

// receive reads an answer of the maker.
func (n *Networks) receive() ([]*os.File, error) {
	if err := n.conn.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
		return nil, err
	}
	var a makerAnswer
	files, err := receive(n.conn, &a)
	if err == nil && a.Error != "" {
		closeAll(files)
		return nil, &makerError{clip(a.Error)}
	}
	return files, err
}

// makerError is the maker's reason for having made no namespace.
type makerError struct{ message string }

func (e *makerError) Error() string { return e.message }

// maxSaid bounds the quoted part of the maker's errors, in bytes.
const maxSaid = 1000

// clip makes text of the maker fit for an error: one printable line.
func clip(text string) string {
	text = strings.ToValidUTF8(text[:min(len(text), maxSaid)], "?")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ';'
		}
		return r
	}, strings.TrimSpace(text))
}

// Network is the network namespace of one sandbox. Its descriptors are raw, as those of the
// descriptor store are: the runtime's poller would wake the launcher for every connection.
type Network struct {
	mu  sync.Mutex
	fds []int // namespace, stream, DNS, DNSTCP, and Diag where the kernel has it; nil when closed
}

// hold copies the descriptors.
func hold(files []*os.File) (*Network, error) {
	n := new(Network)
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			n.Close()
			return nil, fmt.Errorf("keep network namespace: %w", err)
		}
		n.fds = append(n.fds, fd)
	}
	return n, nil
}

// Close lets the namespace go. A second call does no harm.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	closeRaw(n.fds)
	n.fds = nil
}

// NS returns the number of the namespace's descriptor, which stays open until Close.
func (n *Network) NS() int { return n.fds[0] }

// Namespace returns copies of the descriptors, or ErrNotFound after Close.
func (n *Network) Namespace() (*netns.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fds == nil {
		return nil, fmt.Errorf("it has ended: %w", runtime.ErrNotFound)
	}
	var files []*os.File
	for _, fd := range n.fds {
		c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("copy network descriptor: %w", err)
		}
		files = append(files, os.NewFile(uintptr(c), "network"))
	}
	return namespaceOf(files), nil
}
