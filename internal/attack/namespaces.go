package attack

import (
	"golang.org/x/sys/unix"
)

func namespaces() []Attack {
	var all []Attack
	for _, ns := range []struct {
		name string
		flag int
	}{
		{"user", unix.CLONE_NEWUSER},
		{"mount", unix.CLONE_NEWNS},
		{"net", unix.CLONE_NEWNET},
		{"pid", unix.CLONE_NEWPID},
		{"ipc", unix.CLONE_NEWIPC},
		{"uts", unix.CLONE_NEWUTS},
		{"cgroup", unix.CLONE_NEWCGROUP},
	} {
		all = append(all, Attack{"clone-" + ns.name, Filter, func() error { return clone(uintptr(ns.flag)) }})
		// A Go program has threads, and with them a user namespace cannot be left.
		if ns.name == "user" {
			all = append(all, Attack{"unshare-user", Filter, func() error { return inChild(unix.SYS_UNSHARE, uintptr(ns.flag)) }})
			continue
		}
		all = append(all, Attack{"unshare-" + ns.name, Filter, func() error { return unix.Unshare(ns.flag) }})
	}
	all = append(
		all,
		Attack{"unshare-time", Filter, func() error { return unix.Unshare(unix.CLONE_NEWTIME) }},
		Attack{"clone-user-high-bits", Filter, func() error { return clone(unix.CLONE_NEWUSER | 1<<32) }},
		Attack{"clone3-user", Filter, clone3},
	)
	for _, ns := range []string{"uts", "ipc", "net", "cgroup"} {
		all = append(all, Attack{"setns-init-" + ns, Filter, func() error { return setns("/proc/1/ns/" + ns) }})
	}
	return append(all, Attack{"setns-pidfd-init", Filter, func() error {
		fd, err := unix.PidfdOpen(1, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWUTS|unix.CLONE_NEWIPC)
	}})
}
