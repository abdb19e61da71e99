package attack

import (
	"os"
	"unsafe"

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
		layer := Filter
		if ns.name == "uts" {
			layer = Capabilities // init makes one for each exec, by the same filter
		}
		all = append(all, Attack{"clone-" + ns.name, layer, func() error { return clone(uintptr(ns.flag)) }})
		// A Go program has threads, and with them a user namespace cannot be left.
		if ns.name == "user" {
			all = append(all, Attack{"unshare-user", Filter, func() error { return inChild(unix.SYS_UNSHARE, uintptr(ns.flag), 0) }})
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
	for name, flag := range map[string]int{"mount": unix.CLONE_NEWNS, "pid": unix.CLONE_NEWPID} {
		file := map[string]string{"mount": "mnt", "pid": "pid"}[name]
		all = append(all, Attack{"setns-init-" + name, Filter, func() error { return setnsInChild("/proc/1/ns/"+file, flag) }})
	}
	all = sorted(all)
	return append(
		all,
		Attack{"setns-pidfd-init", Filter, func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Setns(fd, unix.CLONE_NEWUTS|unix.CLONE_NEWIPC)
		}},
		// Time namespaces come by clone3 alone, whose flags a filter does not see (clone(2)).
		Attack{"clone3-time", Filter, func() error {
			return clone3With(&cloneArgs{flags: unix.CLONE_NEWTIME, exitSignal: uint64(unix.SIGCHLD)})
		}},
		// A pid of one's choice: that of a process that another is about to signal (clone(2), set_tid).
		Attack{"clone3-chosen-pid", Filter, func() error {
			return clone3With(&cloneArgs{exitSignal: uint64(unix.SIGCHLD), setTID: uint64(uintptr(unsafe.Pointer(&chosenPID))), setTIDSize: 1})
		}},
		// A child in another cgroup, without its limits (CLONE_INTO_CGROUP). A directory that is no cgroup
		// is answered EBADF.
		Attack{"clone3-into-cgroup", Filter, cloneIntoCgroup},
		// The number of a namespace is enough to open it, without any privilege (nsfs handles, Linux 6.18).
		Attack{"open-namespace-by-handle", Filter, func() error {
			return openHandle(unix.FD_NSFS_ROOT, func() (int, error) { return unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0) })
		}},
		// So it is with a process (pidfs handles, Linux 6.14).
		Attack{"open-process-by-handle", Filter, func() error {
			return openHandle(unix.FD_PIDFS_ROOT, func() (int, error) { return unix.PidfdOpen(os.Getpid(), 0) })
		}},
		// From one's own mount namespace to the next one of the host (NS_MNT_GET_NEXT, Linux 6.12).
		Attack{"next-mount-namespace", Namespaces, nextMountNamespace},
	)
}

// chosenPID is not on a stack, which may move before the kernel reads it.
var chosenPID int32 = 31337
