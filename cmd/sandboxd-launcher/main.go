// Command sandboxd-launcher holds the power over the kernel that sandboxes need, inside a user
// namespace of its own. The daemon starts it; it is of no use by hand.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	goruntime "runtime"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/libct"
)

// The process's first thread is kept for main. At every start of a sandbox libcontainer moves a
// thread into the sandbox's mount namespace and leaves it locked, for Go to end it. Go cannot end
// the first thread: it would stay there for good, hold the mounts of a deleted sandbox, and make
// /proc/<launcher>/{root,mountinfo,ns} show them instead of the launcher's.
func init() {
	if len(os.Args) > 1 && os.Args[1] == "stage2" {
		goruntime.LockOSThread()
	}
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "sandboxd-launcher: started by sandboxd, never by hand")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "init": // by libcontainer, once for each sandbox
		libct.Init()
	case "apply":
		err = launcher.ApplyConfine(arg())
	case "apply-confined":
		err = launcher.ApplyMain(arg(), libct.LoadFilter)
	case "diff":
		err = launcher.DiffConfine(arg())
	case "diff-confined":
		err = launcher.DiffMain(arg(), libct.LoadFilter)
	case "network":
		err = launcher.MakerConfine()
	case "network-confined":
		err = launcher.MakerMain(libct.LoadFilter)
	case "stage1":
		err = launcher.Stage1()
	case "stage2":
		err = serve()
	default:
		err = fmt.Errorf("unknown argument %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd-launcher:", err)
		os.Exit(1)
	}
}

// arg is the job of a confined child.
func arg() string {
	if len(os.Args) > 2 {
		return os.Args[2]
	}
	return ""
}

func serve() error {
	// Libcontainer passes it to its child, which works sequentially.
	if err := os.Setenv("GOMAXPROCS", "1"); err != nil {
		return err
	}
	setup, listener, status, first, err := launcher.Stage2()
	if err != nil {
		// The daemon waits for this line.
		_, werr := fmt.Fprintln(status, err)
		return errors.Join(err, werr)
	}
	server, err := open(setup, first)
	if err == nil {
		err = confine()
	}
	if err != nil {
		_, werr := fmt.Fprintln(status, err)
		return errors.Join(err, werr)
	}
	if _, err := fmt.Fprintln(status, "ready"); err != nil {
		return fmt.Errorf("tell the daemon: %w", err)
	}
	if err := status.Close(); err != nil {
		return fmt.Errorf("tell the daemon: %w", err)
	}
	return server.Serve(context.Background(), listener)
}

func open(setup *launcher.Setup, first []*os.File) (*launcher.Server, error) {
	ranges, err := launcher.OpenRanges(setup, first)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	networks := launcher.OpenNetworks(log)
	engine, err := libct.Open(libct.Host{
		IDs: setup.IDs, Single: setup.Single, Cgroup: setup.Cgroup != "", Controllers: setup.Controllers, Missing: setup.Missing, Pids: setup.Pids,
		DiskReserve: setup.DiskReserve,
	}, ranges, networks)
	if err != nil {
		return nil, err
	}
	layers, err := launcher.OpenLayers(setup.IDs, setup.Single, engine.Freezer())
	if err != nil {
		return nil, err
	}
	// Restrictions of a sandbox of the default profile; its limits count as wished for, not asked for.
	var typical runtime.Spec
	typical.Profile.Name = "default"
	typical.Limits.Memory, typical.Limits.CPUs, typical.Limits.Pids = 1, 1, 1
	enforced, err := libct.Enforce(&typical, engine.Host())
	if err != nil {
		return nil, err
	}
	return &launcher.Server{
		Engine:   engine,
		Layers:   layers,
		Ranges:   ranges,
		Networks: networks,
		Info:     launcher.Info{Version: setup.Version, Enforced: enforced},
		Log:      log,
	}, nil
}
