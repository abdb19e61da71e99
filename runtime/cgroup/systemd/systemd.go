// Package systemd asks systemd, over D-Bus, for a delegated cgroup: a transient scope around a
// process that runs already.
//
// An ordinary user's request goes to the user's own manager (systemd --user), root's to the
// system's. Only the daemon and the doctor link it: what starts with every sandbox has nothing to
// ask.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"

	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

const (
	// patience bounds everything that one request asks of systemd. A manager on a busy host answers
	// late, and without a scope sandboxes have no limits.
	patience = time.Minute
	// The number of attempts, and the pause between them: a scope whose last process has just ended
	// exists for a moment longer.
	rounds, pause = 20, 100 * time.Millisecond
	// stopLimit is how long the processes of a scope may take to end when systemd ends it, at a logout
	// or a power-off.
	stopLimit = 10 * time.Second
)

// Enter moves the calling process into the scope of that name: a new one, or that of its
// predecessor, in which the launcher still runs. Systemd delegates the scope's cgroup. The caller
// verifies the result.
func Enter(ctx context.Context, name string) error {
	return enter(ctx, name, os.Getpid())
}

// Scope is what systemd gives.
type Scope struct {
	Controllers []string // that groups below it can have
	Kill        bool     // groups can be ended as a whole (cgroup.kill, Linux 5.14)
}

// Probe asks for a scope around a process of its own, looks at it, and ends the process, which ends
// the scope.
func Probe(ctx context.Context) (s Scope, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return s, fmt.Errorf("probe systemd: %w", err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // by our signal
	}()
	pid := cmd.Process.Pid
	name := "probe-" + strconv.Itoa(pid)
	if err := enter(ctx, name, pid); err != nil {
		return s, err
	}
	dir, controllers, err := cgroup.Look(pid)
	if err != nil {
		return s, err
	}
	if filepath.Base(dir) != unitName(name) {
		return s, fmt.Errorf("%s was started, and the process is in %s", unitName(name), dir)
	}
	_, err = os.Stat(filepath.Join(dir, "cgroup.kill"))
	return Scope{Controllers: controllers, Kill: err == nil}, nil
}

func unitName(name string) string { return "sandboxd-" + name + ".scope" }

func enter(ctx context.Context, name string, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	unit := unitName(name)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for round := 1; ; round++ {
		err := start(ctx, conn, unit, pid)
		if busErr, ok := errors.AsType[godbus.Error](err); !ok || busErr.Name != "org.freedesktop.systemd1.UnitExists" {
			return err
		}
		// Its root hands controllers on and so can hold no process; the leaf of the daemon before us can.
		err = conn.AttachProcessesToUnit(ctx, unit, "/"+cgroup.Leaf, []uint32{uint32(pid)}) //nolint:gosec // G115: a pid
		if err == nil {
			return nil
		}
		err = fmt.Errorf("join %s: %w", unit, err)
		if round == rounds {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// start asks for the scope and waits until it is there.
func start(ctx context.Context, conn *dbus.Conn, unit string, pid int) error {
	property := func(name string, value any) dbus.Property {
		return dbus.Property{Name: name, Value: godbus.MakeVariant(value)}
	}
	done := make(chan string, 1)
	_, err := conn.StartTransientUnitContext(ctx, unit, "fail", []dbus.Property{
		dbus.PropDescription("sandboxd and its sandboxes"),
		dbus.PropPids(uint32(pid)), //nolint:gosec // G115: a pid
		property("DelegateControllers", cgroup.Wanted()),
		// Sandboxes have limits of their own; the default, made for one service, is soon reached by
		// hundreds of them.
		property("TasksMax", uint64(math.MaxUint64)),
		property("TimeoutStopUSec", uint64(stopLimit.Microseconds())), //nolint:gosec // G115: a constant
		property("CollectMode", "inactive-or-failed"),                 // or a scope that failed would keep its name
	}, done)
	if err != nil {
		return fmt.Errorf("start %s: %w", unit, err)
	}
	select {
	case result := <-done:
		if result != "done" {
			return fmt.Errorf("start %s: systemd's job ended with %q", unit, result)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("start %s: %w", unit, ctx.Err())
	}
}

// connect speaks to the manager itself, as systemctl does, and not to a bus: it needs no session,
// and ignores the environment's session (after sudo and su it is another user's).
func connect(ctx context.Context) (*dbus.Conn, error) {
	path := "/run/systemd/private"
	if uid := os.Geteuid(); uid != 0 {
		path = fmt.Sprintf("/run/user/%d/systemd/private", uid)
	}
	conn, err := dbus.NewConnection(func() (*godbus.Conn, error) {
		conn, err := godbus.Dial("unix:path="+path, godbus.WithContext(ctx))
		if err != nil {
			return nil, err
		}
		// By number: no name has to be looked up.
		if err := conn.Auth([]godbus.Auth{godbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		return conn, nil
	})
	if err != nil {
		return nil, fmt.Errorf("connect to systemd: %w", err)
	}
	return conn, nil
}
