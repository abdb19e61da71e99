// Command neighbour is a hostile program in one sandbox and its victim in another: it plants what
// others must not reach, and tries to reach it. It prints "worked", or what stopped it.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	abstract = "@sandboxd-neighbour"
	queue    = 0x5b0d0001
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: neighbour plant | ATTACK [ARGUMENT]")
		os.Exit(2)
	}
	if os.Args[1] == "plant" {
		plant(append(os.Args[2:], "")[0])
	}
	if os.Args[1] == "euid" {
		fmt.Print(os.Geteuid())
		return
	}
	if f := network[os.Args[1]]; f != nil {
		fmt.Print(f(append(os.Args[2:], "")[0]))
		return
	}
	try := attacks[os.Args[1]]
	if try == nil {
		fmt.Fprintln(os.Stderr, "no attack is called", os.Args[1])
		os.Exit(2)
	}
	if err := try(append(os.Args[2:], "")[0]); err != nil {
		fmt.Print(err)
		return
	}
	fmt.Print("worked")
}

// plant holds the targets for a neighbour, until it is killed.
func plant(name string) {
	_, _, errno := unix.Syscall(unix.SYS_MSGGET, queue, unix.IPC_CREAT|0o666, 0)
	a, err := net.Listen("unix", abstract+name)
	if errno != 0 || err != nil {
		fmt.Println("plant:", errno, err)
		os.Exit(1)
	}
	fmt.Println("planted")
	for {
		if _, err := a.Accept(); err != nil {
			os.Exit(1)
		}
	}
}

var attacks = map[string]func(argument string) error{
	"reach-queue": func(string) error {
		if _, _, errno := unix.Syscall(unix.SYS_MSGGET, queue, 0, 0); errno != 0 {
			return errno
		}
		return nil
	},
	"reach-abstract-socket": func(name string) error { return dial("unix", abstract+name) },
	"see-host-name": func(name string) error {
		got, err := os.Hostname()
		if err == nil && got != name {
			err = fmt.Errorf("it is %q", got)
		}
		return err
	},
	"see-cgroup": func(string) error {
		data, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(data)) {
			if path := strings.SplitN(strings.TrimSpace(line), ":", 3)[2]; path != "/" {
				return nil
			}
		}
		return errors.New("it is the root of all")
	},
	"write-interface": func(string) error {
		f, err := os.OpenFile("/sys/class/net/lo/tx_queue_len", os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return f.Close()
	},
	"write-root": func(string) error { return os.Mkdir("/attacked", 0o700) },
	// A program of root's with the set-user-id bit, started by another user.
	"set-user-id": func(string) error {
		self, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			return err
		}
		const copied = "/srv-suid"
		if err := os.WriteFile(copied, self, 0o755); err != nil {
			return err
		}
		defer os.Remove(copied)
		if err := os.Chmod(copied, 0o4755|os.ModeSetuid); err != nil {
			return err
		}
		cmd := exec.Command(copied, "euid")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if string(out) != "0" {
			return fmt.Errorf("its euid is %s", out)
		}
		return nil
	},
	"many-descriptors": func(string) error {
		var open []int
		defer func() {
			for _, fd := range open {
				_ = unix.Close(fd)
			}
		}()
		var r unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
			return err
		}
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: r.Max, Max: r.Max})
		for range 2000 {
			fd, err := unix.Open("/proc", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			open = append(open, fd)
		}
		return nil
	},
	// It has no blocks.
	"huge-file": func(string) error {
		fd, err := unix.Open("/huge", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		defer os.Remove("/huge")
		defer unix.Close(fd)
		return unix.Ftruncate(fd, 17<<30)
	},
	"core-limit": func(string) error {
		var r unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_CORE, &r); err != nil {
			return err
		}
		if r.Max <= 1 {
			return errors.New("no core is written")
		}
		return nil
	},
	// As many processes as would be too many; each ends with this one.
	"many-processes": func(string) error {
		var pids []int
		defer func() {
			for _, pid := range pids {
				_ = unix.Kill(pid, unix.SIGKILL)
				_, _ = unix.Wait4(pid, nil, 0, nil)
			}
		}()
		for range 100 {
			pid, err := syscall.ForkExec("/proc/self/exe", []string{"neighbour", "plant-nothing"}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}})
			if err != nil {
				return err
			}
			pids = append(pids, pid)
		}
		return nil
	},
}

func dial(network, address string) error {
	c, err := net.Dial(network, address)
	if err != nil {
		return err
	}
	return c.Close()
}
