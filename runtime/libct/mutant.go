//go:build mutant

package libct

import (
	"slices"
	"strings"

	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
)

// This file is in no released program. The test of the tests
// (engine.TestAttacksWorkWithoutTheLayer) builds a launcher with it that leaves out, of a sandbox
// whose id says so, one layer or several.

// mutants are the layers that can be left out. An id is "mut", the names with "0" behind each, and
// a unique rest.
var mutants = map[string]func(c *configs.Config){
	"nouser": func(c *configs.Config) {
		without(c, configs.NEWUSER)
		c.UIDMappings, c.GIDMappings = nil, nil
	},
	"nopid": func(c *configs.Config) { without(c, configs.NEWPID) },
	// The kernel refuses to mount a file system of a namespace that is another user namespace's.
	"noipc": func(c *configs.Config) {
		without(c, configs.NEWIPC)
		unmounted(c, "/dev/mqueue")
	},
	"nonet": func(c *configs.Config) {
		without(c, configs.NEWNET)
		unmounted(c, "/sys")
		c.Networks = nil
	},
	"nocgroup": func(c *configs.Config) { without(c, configs.NEWCGROUP) },
	"nouts": func(c *configs.Config) {
		without(c, configs.NEWUTS)
		c.Hostname = ""
	},
	"nomount":      func(c *configs.Config) { without(c, configs.NEWNS) },
	"noprivileges": func(c *configs.Config) { c.NoNewPrivileges = false },
	"nosuid":       func(*configs.Config) {}, // see mutantFlags
	"nolimits":     func(c *configs.Config) { c.Rlimits = nil },
	"noreadonlysys": func(c *configs.Config) {
		for _, m := range c.Mounts {
			if m.Destination == "/sys" {
				m.Flags &^= unix.MS_RDONLY
			}
		}
	},
	"nofreshproc": func(c *configs.Config) {
		for _, m := range c.Mounts {
			if m.Destination == "/proc" {
				*m = configs.Mount{Device: "bind", Source: "/proc", Destination: "/proc", Flags: unix.MS_BIND | unix.MS_REC}
			}
		}
	},
	"moredevices": func(c *configs.Config) {
		c.Devices = append(c.Devices, &devices.Device{Path: "/dev/kmsg", FileMode: 0o666, Rule: devices.Rule{
			Type: devices.CharDevice, Major: 1, Minor: 11, Permissions: "rwm", Allow: true,
		}})
	},
	// The sandbox's root is the launcher's, which is the daemon's user.
	"noidmap": func(c *configs.Config) {
		for _, all := range []*[]configs.IDMap{&c.UIDMappings, &c.GIDMappings} {
			next := (*all)[0] // for the files that it has
			next.ContainerID++
			next.Size--
			*all = []configs.IDMap{{ContainerID: 0, HostID: 0, Size: 1}, next}
		}
	},
}

func without(c *configs.Config, kind configs.NamespaceType) {
	c.Namespaces = slices.DeleteFunc(c.Namespaces, func(n configs.Namespace) bool { return n.Type == kind })
}

func unmounted(c *configs.Config, at string) {
	c.Mounts = slices.DeleteFunc(c.Mounts, func(m *configs.Mount) bool { return m.Destination == at })
}

// left are the names in an id.
func left(id string) []string {
	rest, ok := strings.CutPrefix(id, "mut")
	if !ok {
		return nil
	}
	names := strings.Split(rest, "0")
	return names[:len(names)-1]
}

func mutate(id string, c *configs.Config) {
	for _, name := range left(id) {
		change := mutants[name]
		if change == nil {
			panic("no layer is called " + name)
		}
		change(c)
	}
}

// mutantFlags are the mount flags that a mutant leaves out; upper is a directory of the sandbox's,
// by which its id is known.
func mutantFlags(upper string) uintptr {
	id, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(upper, launcher.RangeDir), launcher.SandboxesDir+"/"), "/")
	if slices.Contains(left(id), "nosuid") {
		return unix.MS_NOSUID
	}
	return 0
}
