package networks

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A side is one of those that are compared.
type side struct {
	name    string
	network api.Network // of creations
	// run runs the load program inside.
	run func(args ...string) ([]byte, error)
	// relay is the process that passes bytes on; 0: the kernel alone.
	relay int
}

func (s *side) load(b *testing.B, args ...string) []byte {
	b.Helper()
	out, err := s.run(args...)
	if err != nil {
		b.Fatalf("%s: load %q: %v", s.name, args, err)
	}
	return out
}

// sides are ours and the peers that run here. One that does not is named in the output.
func sides(b *testing.B, dir string) []*side {
	b.Helper()
	all := []*side{ours(b), veth(b, dir)}
	for _, start := range []func(*testing.B, string) (*side, error){slirp4netns, pasta} {
		s, err := start(b, dir)
		if err == nil {
			err = s.answers()
		}
		if err != nil {
			fmt.Printf("peer %s does not run here: %v\n", s.name, err)
			continue
		}
		all = append(all, s)
	}
	for _, s := range all {
		s.load(b, "requests", "-n", "20") // caches
	}
	return all
}

// answers waits until the network of a peer is set up.
func (s *side) answers() error {
	var err error
	for range 20 {
		if _, err = s.run("requests", "-n", "1"); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

func ours(b *testing.B) *side {
	b.Helper()
	d := daemon(b)
	run := inSandbox(b, d.Create(b, api.CreateSandbox{Network: withNetwork, Timeout: 86400, IdleTimeout: 86400}))
	return &side{name: "sandboxd", relay: gateway(b), run: func(args ...string) ([]byte, error) { return run(args...), nil }}
}

// veth is a namespace that the world forwards packets of.
func veth(b *testing.B, dir string) *side {
	b.Helper()
	return &side{name: "veth", run: within(filepath.Join(dir, "veth"), filepath.Join(dir, "load"))}
}

// stuck ends a run of the load program in a network that loses packets.
const stuck = 30 * time.Second

// within returns a function that runs a program in a network namespace.
func within(ns, program string) func(args ...string) ([]byte, error) {
	return func(args ...string) ([]byte, error) {
		ctx, cancel := context.WithTimeout(context.Background(), stuck)
		defer cancel()
		cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + ns, program}, args...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
		}
		return out, err
	}
}

func slirp4netns(b *testing.B, dir string) (*side, error) {
	b.Helper()
	return peer(b, dir, "slirp4netns", func(holder string) []string { return []string{"--configure", "--mtu=1500", holder, "tap0"} })
}

func pasta(b *testing.B, dir string) (*side, error) {
	b.Helper()
	return peer(b, dir, "pasta", func(holder string) []string {
		return []string{"--foreground", "--quiet", "--config-net", "--mtu", "1500", "--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none", holder}
	})
}

// peer starts a program that gives a namespace of an ordinary user a network.
func peer(b *testing.B, dir, name string, args func(holder string) []string) (*side, error) {
	b.Helper()
	s := &side{name: name}
	if _, err := exec.LookPath(name); err != nil {
		return s, err
	}
	as := &syscall.SysProcAttr{Credential: ordinary(b), Pdeathsig: syscall.SIGKILL}
	holder := exec.Command("unshare", "--user", "--map-root-user", "--net", "sleep", "infinity")
	holder.SysProcAttr = as
	if err := start(b, holder); err != nil {
		return s, err
	}
	pid := strconv.Itoa(holder.Process.Pid)
	harness.Eventually(b, func() error { // unshare has made its namespace
		command, err := os.ReadFile("/proc/" + pid + "/comm")
		if err == nil && string(command) != "sleep\n" {
			err = fmt.Errorf("process %s is %q", pid, command)
		}
		return err
	})
	cmd := exec.Command(name, args(pid)...)
	cmd.SysProcAttr = as
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := start(b, cmd); err != nil {
		return s, err
	}
	s.relay = cmd.Process.Pid
	s.run = within("/proc/"+pid+"/ns/net", filepath.Join(dir, "load"))
	return s, nil
}

// start starts a process that is ended with the benchmark.
func start(b *testing.B, cmd *exec.Cmd) error {
	b.Helper()
	if err := cmd.Start(); err != nil {
		return err
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	return nil
}

// ordinary returns the user that sandboxes and peers run as.
func ordinary(b *testing.B) *syscall.Credential {
	b.Helper()
	u, err := user.Lookup(os.Getenv("SANDBOXD_BENCH_USER"))
	if err != nil {
		b.Fatal(err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		b.Fatal(err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

// processes calls f with the ids of all processes here: those of the benchmark.
func processes(b *testing.B, f func(pid int)) {
	b.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		b.Fatal(err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			f(pid)
		}
	}
}

// gateway returns the process of the gateway.
func gateway(b *testing.B) (found int) {
	b.Helper()
	processes(b, func(pid int) {
		command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && slices.Equal(strings.Split(string(command), "\x00")[1:], []string{"gateway", ""}) {
			found = pid
		}
	})
	if found == 0 {
		b.Fatal("no process of a gateway")
	}
	return found
}

// spent returns the processor time of the server, of what relays, and of the kernel's threads for
// interrupts. Softirqs in other contexts count for the process that they interrupt, unless the
// kernel has CONFIG_IRQ_TIME_ACCOUNTING.
func (s *side) spent(b *testing.B, dir string) time.Duration {
	b.Helper()
	server, err := strconv.Atoi(os.Getenv("SANDBOXD_BENCH_SERVER"))
	if err != nil {
		b.Fatal(err)
	}
	stats := []string{fmt.Sprintf("/proc/%d/stat", server)}
	if s.relay != 0 {
		stats = append(stats, fmt.Sprintf("/proc/%d/stat", s.relay))
	}
	threads, err := filepath.Glob(filepath.Join(dir, "proc", "[0-9]*", "comm"))
	if err != nil {
		b.Fatal(err)
	}
	if kernelThreads == nil {
		for _, comm := range threads {
			if name, err := os.ReadFile(comm); err == nil && bytes.HasPrefix(name, []byte("ksoftirqd/")) {
				kernelThreads = append(kernelThreads, filepath.Join(filepath.Dir(comm), "stat"))
			}
		}
	}
	var sum time.Duration
	for _, stat := range append(stats, kernelThreads...) {
		sum += processorTime(b, stat)
	}
	return sum
}

var kernelThreads []string

// processorTime reads the user and system time of a process.
func processorTime(b *testing.B, stat string) time.Duration {
	b.Helper()
	data, err := os.ReadFile(stat)
	if err != nil {
		b.Fatal(err)
	}
	_, after, _ := strings.Cut(string(data), ") ") // the name may have spaces
	f := strings.Fields(after)
	user, err1 := strconv.ParseInt(f[11], 10, 64)
	system, err2 := strconv.ParseInt(f[12], 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		b.Fatal(err)
	}
	return time.Duration(user+system) * (time.Second / 100) // USER_HZ
}

// processMemory adds up the proportional set sizes of all processes here but this one, in bytes.
func processMemory(b *testing.B) (sum int64) {
	b.Helper()
	processes(b, func(pid int) {
		if pid != os.Getpid() {
			sum += fields(b, fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss:")
		}
	})
	return sum
}

// kernelMemory returns the bytes of the kernel's own objects, of the whole machine.
func kernelMemory(b *testing.B) int64 {
	b.Helper()
	return fields(b, "/proc/meminfo", "Slab:", "Percpu:", "KernelStack:", "PageTables:")
}

// fields adds up lines of a file, in bytes. A process that has ended has none.
func fields(b *testing.B, file string, names ...string) (sum int64) {
	b.Helper()
	data, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ESRCH):
		return 0
	case err != nil:
		b.Fatal(err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 2 || !slices.Contains(names, f[0]) {
			continue
		}
		kilobytes, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		sum += kilobytes << 10
	}
	return sum
}
