package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Host holds the properties of this host that decide how to get a delegated cgroup with its
// controllers.
type Host struct {
	UID     int
	User    string // a name, or the uid where there is none
	Systemd bool   // it manages the host
	// Asks means that a daemon in the place of the calling process asks systemd for a scope.
	Asks bool
	// AtTop means that a daemon which is given no scope makes its place at the top of the hierarchy:
	// root's, where nothing that it is in was given to it.
	AtTop bool
	// InManager means that the calling process runs below the user's own systemd; Lingers, that the
	// user lingers. Otherwise that systemd and all below it end with the user's last session.
	InManager, Lingers bool
	// Container means that this is a container of Docker, Podman or the like, or a cgroup namespace of
	// its own.
	Container bool
	// ReadOnly means that cgroup v2 is mounted read-only.
	ReadOnly bool
	// Top are the controllers of the whole hierarchy, as far as it is mounted; nil without cgroup v2.
	Top []string
	// V1 are the controllers that a cgroup v1 hierarchy holds, Disabled those that the kernel's
	// command line switches off.
	V1, Disabled []string
	// Manager are the controllers that the user's own systemd was given; nil where there is none.
	Manager []string
}

// Survey examines the host from the place of the calling process.
func Survey() (Host, error) {
	at, err := find("self")
	if err != nil {
		return Host{}, err
	}
	return survey(at), nil
}

func survey(at place) Host {
	h := Host{UID: os.Geteuid(), ReadOnly: at.readOnly}
	h.User = strconv.Itoa(h.UID)
	if u, err := user.LookupId(h.User); err == nil {
		h.User = u.Username
	}
	part := at.mount != "" && !isTop(at.mount)
	h.Container = part
	for _, mark := range []string{"/.dockerenv", "/run/.containerenv", "/run/systemd/container"} {
		h.Container = h.Container || exists(mark)
	}
	// sd_booted(3). A process at the root of a cgroup namespace is above all that a systemd could
	// manage here.
	h.Systemd = exists("/run/systemd/system") && (!part || at.own != at.mount)
	h.Asks = h.Systemd && at.wantsScope()
	h.AtTop = h.UID == 0 && at.own != "" && !h.Container && isTop(at.mount) && !at.delegated()
	h.InManager, h.Lingers = at.manager() != "", exists(filepath.Join("/var/lib/systemd/linger", h.User))
	if at.mount != "" {
		h.Top = append([]string{}, words(at.mount, "cgroup.controllers")...)
		manager := fmt.Sprintf("user.slice/user-%d.slice/user@%d.service", h.UID, h.UID)
		if dir := filepath.Join(at.mount, manager); exists(dir) {
			h.Manager = append([]string{}, words(dir, "cgroup.controllers")...)
		}
	}
	// A kernel without it has no v1 either.
	if data, err := os.ReadFile("/proc/cgroups"); err == nil {
		h.V1, h.Disabled = parseCgroups(string(data))
	}
	return h
}

// parseCgroups reads /proc/cgroups, which calls io by its old name.
func parseCgroups(text string) (v1, disabled []string) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 4 || strings.HasPrefix(line, "#") {
			continue
		}
		name := f[0]
		if name == "blkio" {
			name = "io"
		}
		switch {
		case f[3] == "0":
			disabled = append(disabled, name)
		case f[1] != "0":
			v1 = append(v1, name)
		}
	}
	return v1, disabled
}

// option is the kernel's build option behind a controller.
func option(controller string) string {
	switch controller {
	case "cpu":
		return "CONFIG_CFS_BANDWIDTH"
	case "cpuset":
		return "CONFIG_CPUSETS"
	case "io":
		return "CONFIG_BLK_CGROUP"
	case "memory":
		return "CONFIG_MEMCG"
	default:
		return "CONFIG_CGROUP_" + strings.ToUpper(controller)
	}
}

// The file that makes systemd hand all controllers to users, and its text.
const (
	dropIn     = "/etc/systemd/system/user@.service.d/delegate.conf"
	dropInText = `[Service]\nDelegate=cpu cpuset io memory pids\n`
)

// Remedy returns the steps to get the missing controllers on this host, in order. Lacking lists the
// controllers; none means that the cgroup itself is missing.
func (h Host) Remedy(lacking []string) string {
	inOne := len(lacking) > 0 // in a cgroup that is delegated, with less than is wanted
	if !inOne {
		lacking = wanted
	}
	// A controller that the whole hierarchy lacks can be delegated to no user.
	absent := without(lacking, h.Top)
	if h.Container && (!h.Systemd || len(absent) > 0) {
		return h.inContainer(absent)
	}
	steps := h.boot(absent)
	if h.ReadOnly {
		steps = append(steps, h.sudo("mount -o remount,rw /sys/fs/cgroup"))
	}
	if lacking = without(lacking, absent); len(lacking) > 0 {
		steps = append(steps, h.delegation(lacking, inOne))
	}
	return strings.Join(steps, "; ")
}

// Linger is the command by which sandboxes outlive their user's last session.
func (h Host) Linger() string { return h.sudo("loginctl enable-linger " + h.User) }

func (h Host) sudo(command string) string {
	if h.UID == 0 {
		return command
	}
	return "sudo " + command
}

func (h Host) inContainer(absent []string) string {
	switch {
	case (h.Top == nil || h.ReadOnly) && len(h.V1) == 0:
		return "start the container with a cgroup namespace of its own that is writable: " +
			"docker run --cgroupns=private --security-opt writable-cgroups=true (Docker 28 or newer; older: --privileged), " +
			"podman run --cgroupns=private --security-opt unmask=/sys/fs/cgroup"
	case slices.ContainsFunc(absent, func(c string) bool { return slices.Contains(h.V1, c) }):
		return "boot the container's host with systemd.unified_cgroup_hierarchy=1 (without systemd: cgroup_no_v1=all) on the kernel's command line, " +
			"so that cgroup v2 has the controllers"
	case len(absent) > 0:
		return "let the container's cgroup have " + strings.Join(absent, ", ") +
			": on its host they must be enabled in cgroup.subtree_control of the cgroup above"
	case h.UID != 0:
		return fmt.Sprintf("let the container's root run: cd /sys/fs/cgroup && chown %s . cgroup.procs cgroup.subtree_control cgroup.threads", h.User)
	default:
		return "start the container with a cgroup namespace of its own: docker run --cgroupns=private, podman run --cgroupns=private"
	}
}

// boot returns the changes to the boot of the host, or to its kernel, after which the hierarchy has
// the controllers.
func (h Host) boot(absent []string) (steps []string) {
	var v1, off, unbuilt []string
	for _, c := range absent {
		switch {
		case slices.Contains(h.Disabled, c):
			off = append(off, c)
		case slices.Contains(h.V1, c):
			v1 = append(v1, c)
		case h.Top != nil:
			unbuilt = append(unbuilt, option(c))
		}
	}
	switch {
	case h.Systemd && (len(v1) > 0 || h.Top == nil):
		steps = append(steps, "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line, so that cgroup v2 has the controllers")
	case len(v1) > 0:
		steps = append(steps, "boot with cgroup_no_v1=all on the kernel's command line, so that cgroup v2 has the controllers")
	}
	if h.Top == nil && !h.Systemd {
		steps = append(steps, "mount cgroup v2: "+h.sudo("mount -t cgroup2 cgroup2 /sys/fs/cgroup"))
	}
	if len(off) > 0 {
		steps = append(steps, fmt.Sprintf("boot without cgroup_disable=%s on the kernel's command line, or with cgroup_enable=%[1]s where the kernel does without by itself",
			strings.Join(off, ",")))
	}
	if len(unbuilt) > 0 {
		steps = append(steps, "run a kernel that is built with "+strings.Join(unbuilt, ", "))
	}
	return steps
}

// delegation returns the steps to get a cgroup with controllers that the host has, or them into the
// one that there is.
func (h Host) delegation(lacking []string, inOne bool) string {
	const delegate = `-p "Delegate=cpu cpuset io memory pids" sandboxd serve`
	switch {
	case h.Systemd && h.UID == 0:
		return "start the daemon in a scope of its own: systemd-run --scope " + delegate
	case h.Systemd && h.Manager == nil:
		return fmt.Sprintf("let systemd run for %s, who then gets a cgroup from it: %s", h.User, h.Linger())
	case h.Systemd && len(without(lacking, h.Manager)) > 0:
		return fmt.Sprintf("let systemd hand %s to users: sudo mkdir -p %s && printf '%s' | sudo tee %s && sudo systemctl daemon-reload; then log out of all sessions and in again (or boot)",
			strings.Join(without(lacking, h.Manager), ", "), filepath.Dir(dropIn), dropInText, dropIn)
	case h.Systemd:
		return "start the daemon in a scope of its own: systemd-run --user --scope " + delegate
	case h.UID == 0 || inOne:
		return fmt.Sprintf("enable them for the daemon's cgroup: as root, write \"+%s\" to cgroup.subtree_control of each cgroup above it, from the top down",
			strings.Join(lacking, " +"))
	}
	dir := "/sys/fs/cgroup/" + h.User
	return fmt.Sprintf("let root give %s a cgroup: mkdir %s, echo \"+%s\" >%s/cgroup.subtree_control, chown %s %s %s/cgroup.procs %s/cgroup.subtree_control %s/cgroup.threads, "+
		"and start the daemon from a shell that root has put into %s/cgroup.procs",
		h.User, dir, strings.Join(lacking, " +"), filepath.Dir(dir), h.User, dir, dir, dir, dir, dir)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, os.ErrNotExist)
}
