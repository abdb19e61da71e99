package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// bootLimit only ends a boot that hangs. A quiet machine of two cores takes four seconds, eight
	// with systemd; one with twenty other programs has taken more than four minutes.
	bootLimit = 20 * time.Minute
	// pollEvery is how often the file behind the port vm.status is looked at.
	pollEvery = 100 * time.Millisecond
	// sessionNice is the nice value of a machine's session. A guest's clock goes on while the guest
	// waits for a processor, and its ticks, timers and polls then take several times the processor time
	// of the tests: a machine with more than its share is cheaper for all.
	sessionNice = "-5"
)

// machine is one start of QEMU.
type machine struct {
	root, vmlinuz string // files
	name, flavour string
	users         []string // that run the job, one after the other
	payload       string
	shell         bool
	quiet         bool          // the console is kept, not shown
	soak          bool          // set SANDBOXD_TEST_SOAK for the tests
	out           string        // directory: console.log, kernel.log, results/
	limit         time.Duration // for everything
}

type outcome struct {
	code       int
	boot, wall time.Duration
	cpu        time.Duration // of the host's processors
}

// run starts the machine and waits for its end. An error means that the machine died, or never
// lived: whatever the job may have done does not count.
func (m machine) run(ctx context.Context) (outcome, error) {
	if err := os.RemoveAll(m.out); err != nil {
		return outcome{}, err
	}
	if err := os.MkdirAll(m.out, 0o755); err != nil {
		return outcome{}, err
	}
	console, err := os.OpenFile(filepath.Join(m.out, "console.log"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return outcome{}, err
	}
	defer console.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !m.shell {
		limit := time.AfterFunc(m.limit, func() { cancel(fmt.Errorf("it had not ended after %s", m.limit)) })
		defer limit.Stop()
	}
	began := time.Now()
	// Others work on this machine too: where the kernel groups by session (sched(7)), a session of its
	// own gets its share of the processors, weighted by sessionNice. No accelerator is looked for, so
	// that every machine tests the same.
	cmd := exec.CommandContext(ctx, "nice", append([]string{"-n", "10", "qemu-system-x86_64"}, m.arguments()...)...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(os.Stdout, console), &said
	if m.quiet {
		cmd.Stdout = console
	}
	if m.shell {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr // QEMU makes the terminal raw
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: !m.shell}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return outcome{}, fmt.Errorf("start QEMU: %w", err)
	}
	if !m.shell { // else it would be our caller's session
		// Only root may, and not every kernel has it.
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", cmd.Process.Pid), []byte(sessionNice), 0)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	o, err := m.watch(began, ended, cancel)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return outcome{}, fmt.Errorf("the machine died: %w\n%s%s", err, &said, m.lastWords())
	}
	if err := unpack(filepath.Join(m.out, "result.tar"), filepath.Join(m.out, "results")); err != nil {
		return outcome{}, fmt.Errorf("results: %w", err)
	}
	o.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return o, os.Remove(filepath.Join(m.out, "result.tar"))
}

// watch follows the lines that the agent writes to vm.status, until QEMU has ended.
func (m machine) watch(began time.Time, ended <-chan error, cancel context.CancelCauseFunc) (o outcome, err error) {
	boot := time.AfterFunc(bootLimit, func() { cancel(fmt.Errorf("its agent had not answered after %s", bootLimit)) })
	defer boot.Stop()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for over := false; !over; {
		select {
		case <-tick.C:
		case err = <-ended:
			over = true
		}
		data, readErr := os.ReadFile(filepath.Join(m.out, "status"))
		if o.boot == 0 && readErr == nil && bytes.HasPrefix(data, []byte("up ")) {
			o.boot = time.Since(began)
			boot.Stop()
		}
		if !over {
			continue
		}
		o.wall = time.Since(began)
		for line := range strings.Lines(string(data)) {
			if _, scanErr := fmt.Sscanf(line, "exit %d", &o.code); scanErr == nil {
				return o, err
			}
		}
	}
	return o, errors.Join(err, errors.New("it ended without an exit code of the job"))
}

// lastWords is the end of the kernel's log.
func (m machine) lastWords() string {
	data, err := os.ReadFile(filepath.Join(m.out, "kernel.log"))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return "kernel.log ends with:\n  " + strings.Join(lines[max(0, len(lines)-20):], "\n  ")
}

// arguments are those of QEMU.
func (m machine) arguments() []string {
	file := func(name string) string { return strings.ReplaceAll(filepath.Join(m.out, name), ",", ",,") }
	root := strings.ReplaceAll(m.root, ",", ",,")
	start := "init=/usr/sbin/testbed-init"
	if m.flavour == "systemd" {
		start = "systemd.unit=multi-user.target systemd.show_status=0 systemd.log_level=warning"
	}
	if m.shell {
		start += " testbed.shell"
	}
	if m.soak {
		start += " testbed.soak"
	}
	start += " testbed.machine=" + m.name + " testbed.flavour=" + m.flavour + " testbed.users=" + strings.Join(m.users, ",")
	return []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "2G", "-smp", "2",
		// Without CMPXCHG16B, which software emulation gets wrong under load. One thread takes turns for
		// both processors: with a thread each, QEMU 10.0 can lose what wakes them, and both turn in its
		// loop for good with nothing of the guest executed.
		"-accel", "tcg,thread=single", "-cpu", "Nehalem,-cx16",
		"-kernel", m.vmlinuz,
		// panic=-1 and -no-reboot: a panic ends QEMU.
		"-append", "root=/dev/nvme0n1 rootfstype=ext4 rw console=ttyS0 quiet panic=-1 oops=panic mitigations=off no5lvl " +
			"rcupdate.rcu_expedited=1 audit=0 nowatchdog damon_stat.enabled=0 " + start,
		// The root is the only NVMe device, because their numbers are random; it needs no initrd. All
		// runs share the file.
		"-drive", "file=" + root + ",format=raw,if=none,id=root,snapshot=on,cache=unsafe", "-device", "nvme,drive=root,serial=root",
		"-drive", "file=" + strings.ReplaceAll(m.payload, ",", ",,") + ",format=raw,if=none,id=payload,readonly=on",
		"-device", "virtio-blk-pci,drive=payload,serial=payload",
		"-serial", "file:" + file("kernel.log"),
		"-device", "virtio-serial-pci",
		"-chardev", "stdio,id=console,signal=off", "-device", "virtconsole,chardev=console",
		"-chardev", "file,id=status,path=" + file("status"), "-device", "virtserialport,chardev=status,name=vm.status",
		"-chardev", "file,id=result,path=" + file("result.tar"), "-device", "virtserialport,chardev=result,name=vm.result",
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
	}
}
