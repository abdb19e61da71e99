package engine

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// landlock is the one layer that no attack of the corpus has for its first.
const landlock = "Landlock"

// everyCapability is what a profile would have that takes none away.
var everyCapability = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_BPF", "CAP_CHECKPOINT_RESTORE", "CAP_CHOWN",
	"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE",
	"CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST",
	"CAP_NET_RAW", "CAP_PERFMON", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYSLOG", "CAP_SYS_ADMIN", "CAP_SYS_BOOT",
	"CAP_SYS_CHROOT", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
	"CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
}

// without switches layers of a sandbox off. All of them are data that the launcher is given. What init does to itself is switched
// off by a filter that answers it success, and does nothing.
func without(p *runtime.Profile, layers []string) {
	off := func(layer string) bool { return slices.Contains(layers, layer) }
	if off(attack.Filter) {
		p.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Architectures: p.Seccomp.Architectures}
	}
	if off(landlock) {
		for _, call := range landlockCalls {
			answer(p, 0, call)
		}
	}
	if off(attack.Undumpable) {
		answer(p, 0, "prctl", specs.LinuxSeccompArg{Value: unix.PR_SET_DUMPABLE, Op: specs.OpEqualTo})
	}
	if off(attack.Capabilities) {
		p.Capabilities = everyCapability
	}
	if off(attack.Masked) {
		p.MaskedPaths = nil
	}
	if off(attack.ReadOnly) {
		p.ReadonlyPaths = nil
	}
}

var landlockCalls = []string{"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}

// answer makes a profile's filter answer a call: with an error, or with 0, which is success. Where args are given, only a call
// with these; it is let through with others.
func answer(p *runtime.Profile, errno uint, call string, args ...specs.LinuxSeccompArg) {
	filter := *p.Seccomp // the fixture's is shared
	filter.Syscalls = nil
	for _, rule := range p.Seccomp.Syscalls {
		rule.Names = slices.DeleteFunc(slices.Clone(rule.Names), func(name string) bool { return name == call })
		if len(rule.Names) > 0 {
			filter.Syscalls = append(filter.Syscalls, rule)
		}
	}
	filter.Syscalls = append(filter.Syscalls, specs.LinuxSyscall{Names: []string{call}, Action: specs.ActErrno, ErrnoRet: &errno, Args: args})
	if len(args) > 0 && filter.DefaultAction != specs.ActAllow {
		other := args[0]
		other.Op = specs.OpNotEqual
		filter.Syscalls = append(filter.Syscalls, specs.LinuxSyscall{Names: []string{call}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{other}})
	}
	p.Seccomp = &filter
}

// The attacks are worth something: of each layer that can be switched off, one of them at least works without it. Where others
// stand behind a layer, those are off too, and then the layer alone is seen to hold: what works without it does not with it.
func TestAttacksWorkWithoutTheLayer(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireLandlock(t, 2)
	f := newFixture(t)
	program := harness.Helper(t, "attacker")
	mounts := []string{"mount-shared", "umount-proc"} // not those that would hide the attacker
	for i, tc := range []struct {
		layer  string
		behind []string // that refuse the same
		by     []string // the attacks; those of the corpus that name the layer, if there are none
	}{
		{layer: attack.Filter},
		{layer: attack.Capabilities},
		{layer: attack.Masked},
		{layer: attack.ReadOnly, behind: []string{attack.Capabilities}},
		// A domain forbids every change of mounts.
		{layer: landlock, behind: []string{attack.Filter, attack.Capabilities}, by: mounts},
	} {
		t.Run(tc.layer, func(t *testing.T) {
			by := tc.by
			if by == nil {
				by = attacksOn(tc.layer)
			}
			id := "layer" + string(rune('a'+2*i))
			works := attacked(t, f, id, program, by, append([]string{tc.layer}, tc.behind...))
			t.Logf("without %s, and %v, work: %v", tc.layer, tc.behind, works)
			if len(works) == 0 {
				t.Errorf("without it and %v none of its %d attacks works: they do not see that it is there", tc.behind, len(by))
			}
			if still := attacked(t, f, id+"x", program, works, tc.behind); len(still) != 0 {
				t.Errorf("with it, but without %v, still work: %v", tc.behind, still)
			}
		})
	}
	// That init cannot be looked at has three reasons, of which Landlock and the capabilities that it has more than programs are
	// enough each. That it is not dumpable is not seen alone: who had all its capabilities may look at what is not dumpable.
	t.Run(attack.Undumpable, func(t *testing.T) {
		by := attacksOn(attack.Undumpable)
		works := attacked(t, f, "init", program, by, []string{attack.Undumpable, attack.Capabilities, landlock})
		if len(works) == 0 {
			t.Errorf("without any of the three none of %d attacks works", len(by))
		}
		for i, off := range [][]string{{attack.Undumpable, attack.Capabilities}, {attack.Undumpable, landlock}} {
			if still := attacked(t, f, "init"+string(rune('a'+i)), program, works, off); len(still) != 0 {
				t.Errorf("without %v still work: %v", off, still)
			}
		}
	})
}

// attacksOn are the names of the attacks that a layer is the first to stop.
func attacksOn(layer string) (names []string) {
	for _, a := range attack.Corpus() {
		if a.Layer == layer {
			names = append(names, a.Name)
		}
	}
	return names
}

// Where init cannot confine what it starts, it starts nothing: it ends, and the sandbox with it.
func TestInitThatCannotConfineStartsNothing(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireLandlock(t, 2)
	f := newFixture(t)
	for i, call := range append([]string{""}, landlockCalls...) {
		spec := f.NewSpec(t, "refuse"+string(rune('a'+i)))
		if call != "" {
			answer(&spec.Profile, uint(unix.EOPNOTSUPP), call)
		}
		client, pidfd := begin(t, f, spec)
		// Init's own program ends at once where it is started by anybody else.
		x, err := client.Exec(t.Context(), guest.ExecRequest{Argv: []string{"/dev/sandboxd-init"}, NoStdin: true})
		if err == nil {
			_ = x.Close() // always nil
		}
		if (err == nil) != (call == "") {
			t.Errorf("an exec where %q is refused: %v", call, err)
		}
		if call == "" {
			continue // the control
		}
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}, int(testenv.Patience(20*time.Second).Milliseconds())); n != 1 {
			t.Errorf("%s is refused, and init goes on: %v", call, err)
		}
	}
}

// begin starts a sandbox and returns what speaks to its init, and its pidfd.
func begin(t *testing.T, f runtimetest.Fixture, spec *runtime.Spec) (*guest.Client, *os.File) {
	t.Helper()
	socket := filepath.Join(shortDir(t), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	file, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	st, err := f.Engine.Create(t.Context(), spec, file)
	_, _ = l.Close(), file.Close() // the sandbox has its own
	if err != nil {
		t.Fatalf("start sandbox %s: %v", spec.ID, err)
	}
	t.Cleanup(func() {
		_ = st.Pidfd.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := f.Engine.Delete(ctx, spec.ID); err != nil {
			t.Error(err)
		}
	})
	return guest.NewClient(socket), st.Pidfd
}

// attacked says which attacks work in a sandbox without these layers.
func attacked(t *testing.T, f runtimetest.Fixture, id, program string, attacks, off []string) (works []string) {
	t.Helper()
	spec := f.NewSpec(t, id)
	without(&spec.Profile, off)
	client, _ := begin(t, f, spec)
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	const inside = "/tmp/attacker"
	pending, err := client.Create(t.Context(), inside, 0o755, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pending.File.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := pending.Commit(); err != nil {
		t.Fatal(err)
	}
	for _, name := range attacks {
		x, err := client.Exec(t.Context(), guest.ExecRequest{Argv: append([]string{inside}, attack.Try(name)...), NoStdin: true, Timeout: 20 * time.Second})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var said bytes.Buffer
		exit, err := x.Stream(t.Context(), func(stream string, p []byte) error {
			if stream == "stdout" {
				said.Write(p)
			}
			return nil
		})
		_ = x.Close() // always nil
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if exit.Signal == unix.SIGSYS {
			continue
		}
		got, err := attack.Decode(said.String())
		if err != nil {
			t.Fatalf("%s without %v: %v; it ended with %+v", name, off, err, exit)
		}
		if got.Worked {
			works = append(works, name)
		}
	}
	return works
}
