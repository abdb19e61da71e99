// Command applier is sandboxd-launcher with one difference: the children that unpack layers, and
// that read a sandbox's changes, attack their confinement instead. Their error reports the attacks
// that worked. Package security has it unpack "layers" whose media type names the layers of
// defence to leave out, and read a sandbox whose id does, without its "/" and "-":
//
//	attack/confined      attack from where the product would begin to read the layer
//	attack/control       attack from before the confinement: everything should work
//	attack/no-filter     as confined, but without the seccomp filter
//	attack/no-landlock   as confined, on a kernel that says it has no Landlock
//	.../no-landlock.tar  unpack as the product does, on such a kernel
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime/libct"
)

// leaked is a descriptor that the first stage has and must not hand on.
const leaked = 100

func main() {
	var err error
	switch os.Args[1] {
	case "apply":
		err = first(os.Args[2], launcher.ApplyConfine)
	case "apply-confined":
		err = second(os.Args[2], launcher.ApplyMain)
	case "diff":
		err = first(os.Args[2], launcher.DiffConfine)
	case "diff-confined":
		err = second(os.Args[2], launcher.DiffMain)
	case "stage1":
		err = launcher.Stage1()
	case "stage2":
		err = serve()
	default:
		err = fmt.Errorf("unknown argument %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "applier:", err)
		os.Exit(1)
	}
}

func serve() error {
	setup, listener, status, mounts, err := launcher.Stage2()
	if err != nil {
		_, werr := fmt.Fprintln(status, err)
		return errors.Join(err, werr)
	}
	ranges, err := launcher.OpenRanges(setup, mounts)
	if err != nil {
		return err
	}
	engine, err := libct.Open(libct.Host{IDs: setup.IDs, Single: setup.Single, Missing: setup.Missing, Pids: setup.Pids}, ranges, nil)
	if err != nil {
		return err
	}
	layers, err := launcher.OpenLayers(setup.IDs, setup.Single, launcher.NewFreezer())
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(status, "ready"); err != nil {
		return err
	}
	if err := status.Close(); err != nil {
		return err
	}
	s := &launcher.Server{Engine: engine, Layers: layers, Ranges: ranges, Info: launcher.Info{Version: setup.Version}, Log: slog.New(slog.DiscardHandler)}
	return s.Serve(context.Background(), listener)
}

// orderIn is the order in the job that both stages get.
func orderIn(arg string) (string, error) {
	var job struct {
		MediaType string `json:"media_type"`
		Overlays  []struct {
			Upper string `json:"upper"`
		} `json:"overlays"`
	}
	err := json.Unmarshal([]byte(arg), &job)
	if err == nil && len(job.Overlays) > 0 {
		switch id := filepath.Base(filepath.Dir(job.Overlays[0].Upper)); id {
		case "attackconfined":
			return "attack/confined", nil
		case "attackcontrol":
			return "attack/control", nil
		case "attacknofilter":
			return "attack/no-filter", nil
		case "attacknolandlock":
			return "attack/no-landlock", nil
		}
	}
	return job.MediaType, err
}

// slip puts the directory of another sandbox in the place of the standard input of a child that
// reads a sandbox's.
func slip() error {
	dir, err := unix.Open(filepath.Join(launcher.SandboxesDir, "outside"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return unix.Dup3(dir, outside, 0)
}

func first(arg string, confine func(string) error) error {
	order, err := orderIn(arg)
	if err != nil {
		return err
	}
	if os.Args[1] == "diff" {
		if err := slip(); err != nil {
			return err
		}
	}
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	if err := unix.Dup3(root, leaked, 0); err != nil {
		return err
	}
	if order == "attack/control" {
		// In the form of the child's report.
		return json.NewEncoder(os.Stdout).Encode(map[string]any{"error": map[string]string{"message": attack()}})
	}
	if strings.Contains(order, "no-landlock") {
		enosys := uint(unix.ENOSYS)
		if err := libct.LoadFilter(&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{
			Action: specs.ActErrno, ErrnoRet: &enosys,
			Names: []string{"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"},
		}}}); err != nil {
			return err
		}
	}
	return confine(arg)
}

func second(arg string, run func(string, func(*specs.LinuxSeccomp) error) error) error {
	order, err := orderIn(arg)
	if err != nil {
		return err
	}
	return run(arg, func(filter *specs.LinuxSeccomp) error {
		if order != "attack/no-filter" {
			if err := libct.LoadFilter(filter); err != nil {
				return err
			}
		}
		if strings.HasPrefix(order, "attack/") {
			return errors.New(attack())
		}
		return nil
	})
}
