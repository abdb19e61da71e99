// Command makerfoe is sandboxd-launcher with one difference: the child that makes network
// namespaces attacks its confinement, and says which attacks worked as the reason for there being
// no networks. The launcher's version orders it:
//
//	confined    attack from where the product would begin to make namespaces
//	control     attack from before the confinement: everything should work
//	no-filter   as confined, but without the seccomp filter
//	root-alone  as no-filter, on a kernel that says it has no Landlock
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime/libct"
)

// orderFile is in the launcher's root. The first stage hands it on as its standard input.
const orderFile = "/run/order"

func main() {
	var err error
	switch os.Args[1] {
	case "init":
		libct.Init()
	case "apply":
		err = launcher.ApplyConfine(os.Args[2])
	case "apply-confined":
		err = launcher.ApplyMain(os.Args[2], libct.LoadFilter)
	case "network":
		err = first()
	case "network-confined":
		err = launcher.MakerMain(second)
	case "stage1":
		err = launcher.Stage1()
	case "stage2":
		err = serve()
	default:
		err = fmt.Errorf("unknown argument %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "makerfoe:", err)
		os.Exit(1)
	}
}

func serve() error {
	setup, listener, status, mounts, err := launcher.Stage2()
	if err != nil {
		_, werr := fmt.Fprintln(status, err)
		return errors.Join(err, werr)
	}
	if err := os.WriteFile(orderFile, []byte(setup.Version), 0o644); err != nil {
		return err
	}
	ranges, err := launcher.OpenRanges(setup, mounts)
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	networks := launcher.OpenNetworks(log)
	engine, err := libct.Open(libct.Host{IDs: setup.IDs, Single: setup.Single, Missing: setup.Missing, Pids: setup.Pids}, ranges, networks)
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
	s := &launcher.Server{Engine: engine, Layers: layers, Ranges: ranges, Networks: networks, Info: launcher.Info{Version: setup.Version}, Log: log}
	return s.Serve(context.Background(), listener)
}

func first() error {
	order, err := os.ReadFile(orderFile)
	if err != nil {
		return err
	}
	if string(order) == "control" {
		return errors.New(attack()) // the launcher quotes it
	}
	fd, err := unix.Open(orderFile, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	if err := unix.Dup3(fd, 0, 0); err != nil {
		return err
	}
	if string(order) == "root-alone" {
		enosys := uint(unix.ENOSYS)
		if err := libct.LoadFilter(&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{
			Action: specs.ActErrno, ErrnoRet: &enosys,
			Names: []string{"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"},
		}}}); err != nil {
			return err
		}
	}
	return launcher.MakerConfine()
}

func second(filter *specs.LinuxSeccomp) error {
	order := make([]byte, 64)
	n, err := os.Stdin.Read(order)
	if err != nil {
		return err
	}
	if string(order[:n]) == "confined" {
		if err := libct.LoadFilter(filter); err != nil {
			return err
		}
	}
	return errors.New(attack())
}

// attack tries everything and names what worked.
func attack() string {
	worked := []string{"attacked, works:"}
	for _, a := range attacks {
		if err := a.try(); err == nil || errors.Is(err, a.reached) {
			worked = append(worked, a.name)
		}
	}
	return strings.Join(append(worked, "end"), " ")
}

// attacks are tried in this order. Where reached is set, that error says that the call got as far
// as an honest one with such arguments would: nothing forbade it.
var attacks = []struct {
	name    string
	reached error
	try     func() error
}{
	{name: "open-init", try: func() error { return open(launcher.InitFile, unix.O_RDONLY) }},
	{name: "open-sandboxes", try: func() error { return open(launcher.SandboxesDir, unix.O_RDONLY) }},
	{name: "open-passwd", try: func() error { return open("/../etc/passwd", unix.O_RDONLY|unix.O_CREAT) }},
	{name: "open-launcher", try: func() error { return open("/proc/1/root/run/libct", unix.O_RDONLY) }},
	{name: "read-proc", try: func() error { return open("/proc/self/status", unix.O_RDONLY) }},
	{name: "write-sysctl", try: func() error { return open("/proc/sys/kernel/domainname", unix.O_WRONLY) }},
	{name: "execve", reached: unix.EFAULT, try: func() error { return raw(unix.SYS_EXECVE, 0, 0, 0) }},
	{name: "execveat", reached: unix.EFAULT, try: func() error { return raw(unix.SYS_EXECVEAT, 0, 0, 0) }},
	{name: "fork", try: fork},
	{name: "memfd", try: func() error { _, err := unix.MemfdCreate("x", 0); return err }},
	{name: "unshare-mount", try: func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
	{name: "unshare-user", reached: unix.EINVAL, try: func() error { return unix.Unshare(unix.CLONE_NEWUSER) }},
	{name: "setns", reached: unix.EBADF, try: func() error { return unix.Setns(-1, unix.CLONE_NEWNET) }},
	{name: "ptrace", reached: unix.ESRCH, try: func() error { return raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 999_999, 0) }},
	{name: "process-vm-readv", reached: unix.ESRCH, try: func() error { return raw(unix.SYS_PROCESS_VM_READV, 999_999, 0, 0) }},
	{name: "kill", reached: unix.ESRCH, try: func() error { return unix.Kill(999_999, 0) }},
	{name: "pidfd-open", try: func() error { _, err := unix.PidfdOpen(1, 0); return err }},
	{name: "mount", reached: unix.ENODEV, try: func() error { return unix.Mount("x", "/", "nosuchfs", 0, "") }},
	{name: "fsopen", try: func() error { _, err := unix.Fsopen("tmpfs", 0); return err }},
	{name: "open-tree", try: func() error { _, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE); return err }},
	{name: "pivot-root", reached: unix.ENOENT, try: func() error { return unix.PivotRoot("/nosuchdir", "/nosuchdir") }},
	{name: "chroot", try: func() error { return unix.Chroot("/") }},
	{name: "host-name", try: func() error { return unix.Sethostname([]byte("attacker")) }},
	{name: "capset", reached: unix.EFAULT, try: func() error { return raw(unix.SYS_CAPSET, 0, 0, 0) }},
	{name: "setresuid", try: func() error { none := ^uintptr(0); return raw(unix.SYS_SETRESUID, none, none, none) }},
	{name: "socket-unix", try: func() error { return socket(unix.AF_UNIX, unix.SOCK_STREAM, 0) }},
	{name: "socket-packet", try: func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0) }},
	{name: "socket-raw", try: func() error { return socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_UDP) }},
	{name: "socket-uevent", try: func() error { return socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT) }},
	{name: "connect", reached: unix.EBADF, try: func() error { return unix.Connect(-1, &unix.SockaddrInet4{Port: 1}) }},
	{name: "accept", reached: unix.EBADF, try: func() error { _, _, err := unix.Accept(-1); return err }},
	{name: "keyring", reached: unix.ENOKEY, try: func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); return err }},
}

func open(name string, flags int) error {
	fd, err := unix.Open(name, flags|unix.O_CLOEXEC, 0o600)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

func socket(family, kind, protocol int) error {
	fd, err := unix.Socket(family, kind, protocol)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

// fork makes a process that ends at once.
func fork() error {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // nothing else is safe in this child
		}
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	return err
}

func raw(call, a, b, c uintptr) error {
	if _, _, errno := unix.RawSyscall(call, a, b, c); errno != 0 {
		return errno
	}
	return nil
}
