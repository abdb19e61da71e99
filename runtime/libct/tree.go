package libct

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// How the processes of a sandbox are asked to end.
//
// The launcher sees them in its own /proc and tells them from others by their PID namespace:
// nothing inside can make another one. The init is not asked for anything, which may have been
// taken over, and gets no signal but the last.
//
//   - Every process gets SIGTERM, or the signal that the image or the request names instead, once:
//     a program must not be disturbed while it tidies up.
//   - A program that ignores it gets SIGHUP too. Interactive shells ignore it (bash, dash), so
//     that a terminal's user does not end them by accident, and end on SIGHUP, which tells them
//     that the terminal is gone. Others never get it: for many it means to reload the
//     configuration, and it ends a program that is tidying up and does not expect it. The
//     disposition before the signal counts: a program that tidies up may ignore it meanwhile. And
//     it is read twice, because readline sets a handler for a moment to see which one was there.
//   - Then SIGCONT, or a stopped process would not notice.
//   - A process with a terminal that got SIGHUP gets it again, several times a second: readline
//     (8.2, with bash) checks for signals and then waits for input, and notices one in between with
//     the next key, which will not come.
//   - A pid may be another process's by the time it is used. So a pidfd is opened first: /proc's
//     data of the number, read afterwards, is about the pidfd's process, or that one has ended and
//     the signal reaches none.
//   - Processes that cannot be seen or do not end within the grace are killed with the init, by the
//     kernel.

// tree is the processes of one sandbox, but its init. The open namespace keeps its number from
// being another one's.
type tree struct {
	ns   *os.File
	init int
	dev  uint64
	ino  uint64
	main int // pid in the sandbox of the only process to care for; 0: all
	own  int // that one's pid here, once it has been seen
}

func (in *instance) tree() (_ *tree, err error) {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", in.pid))
	if err != nil {
		return nil, fmt.Errorf("open its PID namespace: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ns.Close())
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at its PID namespace: %w", err)
	}
	if in.hasEnded() { // the pid may have been another's
		return nil, errors.New("it has ended")
	}
	return &tree{ns: ns, init: in.pid, dev: st.Dev, ino: st.Ino}, nil
}

func (t *tree) close() { _ = t.ns.Close() } // a name, never read

// each calls f for every living process but the init. F owns the pidfd. Processes that begin
// meanwhile may be missed.
func (t *tree) each(f func(pid, pidfd int)) error {
	proc, err := os.Open("/proc")
	if err != nil {
		return fmt.Errorf("read processes: %w", err)
	}
	names, err := proc.Readdirnames(-1)
	if err := errors.Join(err, proc.Close()); err != nil {
		return fmt.Errorf("read processes: %w", err)
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == t.init {
			continue
		}
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it has ended
		}
		var st unix.Stat_t
		if unix.Stat("/proc/"+name+"/ns/pid", &st) != nil || st.Dev != t.dev || st.Ino != t.ino || ended(pidfd) {
			_ = unix.Close(pidfd)
			continue
		}
		if t.main != 0 && innermost(pid) != t.main {
			_ = unix.Close(pidfd)
			continue
		}
		t.own = pid
		f(pid, pidfd)
	}
	return nil
}

// innermost returns a process's pid in its own PID namespace; 0 if it has ended.
func innermost(pid int) int {
	fields := strings.Fields(statusOf(pid, "NSpid"))
	if len(fields) == 0 {
		return 0
	}
	n, err := strconv.Atoi(fields[len(fields)-1])
	if err != nil {
		return 0
	}
	return n
}

// statusOf returns a field of a process's status; empty if it has ended.
func statusOf(pid int, field string) string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(status), "\n"+field+":\t")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// ended reports whether no thread of the process is left.
func ended(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0) //nolint:gosec // descriptors fit
	return err == nil && n > 0
}

// lookAgain is the time after which terminate checks again whether a process ignores the signal.
const lookAgain = 2 * time.Millisecond

// terminate asks every process by a signal to end. It returns pidfds of those at terminals that
// were hung up, which are the caller's, also on error.
func (t *tree) terminate(ctx context.Context, asks unix.Signal) (interactive []int, err error) {
	deaf := map[int]bool{}
	err = t.each(func(pid, pidfd int) {
		deaf[pid] = ignores(pid, asks)
		_ = unix.Close(pidfd)
	})
	if err != nil || len(deaf) == 0 {
		return nil, err
	}
	select {
	case <-time.After(lookAgain):
	case <-ctx.Done():
	}
	err = t.each(func(pid, pidfd int) {
		signals := []unix.Signal{asks, unix.SIGCONT}
		hangUp := deaf[pid] || ignores(pid, asks)
		if hangUp {
			signals = []unix.Signal{asks, unix.SIGHUP, unix.SIGCONT}
		}
		for _, sig := range signals {
			_ = unix.PidfdSendSignal(pidfd, sig, nil, 0) // it may have ended
		}
		if hangUp && len(interactive) < maxInteractive && hasTerminal(pid) {
			interactive = append(interactive, pidfd)
		} else {
			_ = unix.Close(pidfd)
		}
	})
	return interactive, err
}

const (
	// hangUpEvery is the interval of SIGHUPs to processes at terminals.
	hangUpEvery = 200 * time.Millisecond
	// maxInteractive bounds how many are more than once: each has a descriptor meanwhile.
	maxInteractive = 64
)

// keepHangingUp hangs up until ctx ends.
func keepHangingUp(ctx context.Context, pidfds []int) {
	tick := time.NewTicker(hangUpEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, fd := range pidfds {
				_ = unix.PidfdSendSignal(fd, unix.SIGHUP, nil, 0) // it may have ended
			}
		case <-ctx.Done():
			return
		}
	}
}

// hasTerminal reports whether a process has a controlling terminal.
func hasTerminal(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// After the name, which may hold anything: state, ppid, pgrp, session, tty_nr (proc_pid_stat(5)).
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(fields) > 4 && string(fields[4]) != "0"
}

// ignores reads the signal's disposition, which all threads share.
func ignores(pid int, sig unix.Signal) bool {
	set, err := strconv.ParseUint(statusOf(pid, "SigIgn"), 16, 64)
	return err == nil && set>>(sig-1)&1 == 1
}

// wait returns when no process but the init is left, or with ctx's error.
func (t *tree) wait(ctx context.Context) error {
	for {
		var left []unix.PollFd // some of them
		err := t.each(func(_, pidfd int) {
			if len(left) == 64 {
				_ = unix.Close(pidfd)
				return
			}
			left = append(left, unix.PollFd{Fd: int32(pidfd), Events: unix.POLLIN}) //nolint:gosec // descriptors fit
		})
		if err != nil || len(left) == 0 {
			return err
		}
		for i := range left {
			if err == nil {
				err = waitEnded(ctx, left[i:i+1])
			}
			_ = unix.Close(int(left[i].Fd))
		}
		if err != nil {
			return err
		}
	}
}

// waitEnded polls briefly, so that the end of the context is noticed.
func waitEnded(ctx context.Context, pidfd []unix.PollFd) error {
	for ctx.Err() == nil {
		n, err := unix.Poll(pidfd, int((20 * time.Millisecond).Milliseconds()))
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for processes: %w", err)
		}
	}
	return ctx.Err()
}

// Stop implements runtime.Engine.
func (e *Engine) Stop(ctx context.Context, id string, ask runtime.Ask) error {
	in, err := e.find(ctx, id)
	if err != nil {
		return err
	}
	if ask.Grace > 0 && !in.hasEnded() {
		e.ask(ctx, in, ask)
	}
	return e.kill(context.WithoutCancel(ctx), in, id)
}

// ask has every process of a sandbox end by itself, or its main process, and waits for it as long
// as the grace and ctx last. Whatever does not work out is left to the kill that follows.
func (e *Engine) ask(ctx context.Context, in *instance, by runtime.Ask) {
	ctx, cancel := context.WithTimeout(ctx, by.Grace)
	defer cancel()
	t, err := in.tree()
	if err != nil {
		return
	}
	defer t.close()
	t.main = by.Main
	e.mu.Lock()
	asks := unix.Signal(cmp.Or(by.Signal, in.spec.StopSignal, int(unix.SIGTERM)))
	e.mu.Unlock()
	interactive, err := t.terminate(ctx, asks)
	var hangingUp sync.WaitGroup
	if len(interactive) > 0 {
		hangingUp.Go(func() { keepHangingUp(ctx, interactive) })
	}
	if err == nil && e.resume(in) == nil && t.wait(ctx) == nil { // paused processes notice no signal
		t.settle(ctx)
	}
	cancel()
	hangingUp.Wait()
	for _, pidfd := range interactive {
		_ = unix.Close(pidfd)
	}
}

const (
	// settleTime bounds, beside the grace, the time for init to report how its children ended. It
	// takes a millisecond, and seconds on a host that stands still.
	settleTime = 10 * time.Second
	// settleLook is how often that is looked at, and slowLook how often after as many looks as
	// settleLooks: one that never is idle takes its own time, and looking takes ours.
	settleLook  = time.Millisecond
	settleLooks = 100
	slowLook    = 20 * time.Millisecond
)

// settle waits until init is idle: it reports how a process ended after it has reaped it, and a
// report that is missing when it is killed is lost. Two checks in a row must find it idle: its
// threads are checked one after the other, and work that one hands to another in between is seen by
// neither check.
func (t *tree) settle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	tick := time.NewTicker(settleLook)
	defer tick.Stop()
	idle := 0
	for look := 0; ; look++ {
		if idle++; !t.idle() {
			idle = 0
		}
		if idle == 2 {
			return
		}
		if look == settleLooks {
			tick.Reset(slowLook)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// idle reports whether init has none of the children, dead ones included, and that all its threads
// sleep. One that has ended is idle.
func (t *tree) idle() bool {
	dir := fmt.Sprintf("/proc/%d/task", t.init)
	threads, err := os.ReadDir(dir)
	if err != nil {
		return true
	}
	for _, th := range threads {
		children, err := os.ReadFile(filepath.Join(dir, th.Name(), "children")) // fails where the kernel has no such file
		waits := len(children) > 0
		if t.main != 0 {
			waits = slices.Contains(strings.Fields(string(children)), strconv.Itoa(t.own))
		}
		if err == nil && waits {
			return false
		}
		stat, err := os.ReadFile(filepath.Join(dir, th.Name(), "stat"))
		if err != nil {
			continue // that thread has ended
		}
		if _, state, ok := bytes.Cut(stat, []byte(") ")); ok && !bytes.HasPrefix(state, []byte("S")) {
			return false
		}
	}
	return true
}
