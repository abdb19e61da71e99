package engine

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// landlock is the one layer that no attack of the corpus has for its first.
const landlock = "Landlock"

// everyCapability is the set of a profile that drops none.
var everyCapability = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_BPF", "CAP_CHECKPOINT_RESTORE", "CAP_CHOWN",
	"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE",
	"CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST",
	"CAP_NET_RAW", "CAP_PERFMON", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYSLOG", "CAP_SYS_ADMIN", "CAP_SYS_BOOT",
	"CAP_SYS_CHROOT", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
	"CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
}

// without switches layers of a sandbox off. All of them are data that the launcher is given. What
// init does to itself is switched off by a filter that answers it success, and does nothing.
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

// answer makes a profile's filter answer a call: with an error, or with 0, which is success. Where
// args are given, only a call with these; it is let through with others.
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

// The attacks are worth something: of each layer that can be switched off, one of them at least
// works without it. Where others stand behind a layer, those are off too, and then the layer alone
// is seen to hold: what works without it does not with it.
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
	// Three layers keep a program from reading init's memory. Landlock and init's additional
	// capabilities are each enough. That it is not dumpable cannot be seen alone: a program with all
	// of init's capabilities may read undumpable processes.
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

// changesMounts are attacks that, where they work, leave a sandbox's mounts as no other attack
// expects them.
func changesMounts(name string) bool {
	return strings.HasPrefix(name, "mount-") || strings.HasPrefix(name, "umount-") || slices.Contains([]string{"pivot-root", "write-cgroup"}, name)
}

// Every attack sees its layer. Where all layers are off that are data, and the launcher's own
// filter is not there, attacks work that work in a bare user namespace: in the sandbox nothing but
// its layers stops them. Attacks that name the namespaces do not work in such a namespace.
func TestEveryAttackSeesItsLayer(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireLandlock(t, 2)
	o := options(t)
	o.Launcher = harness.Helper(t, "mutant-launcher")
	f := fixture(t, o)
	program := harness.Helper(t, "attacker")
	off := []string{attack.Filter, attack.Capabilities, attack.Masked, attack.ReadOnly, attack.Undumpable, landlock}
	others := map[string][]string{} // attacks by the sandbox that they are tried in
	serial := 0
	var corpus []string
	for _, a := range attack.Corpus() {
		corpus = append(corpus, a.Name)
	}
	controls, err := attack.ControlsInUserNamespace(t.Context(), program, corpus...)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range attack.Corpus() {
		worked := controls[a.Name].Worked
		switch {
		case a.Layer == attack.Namespaces && worked:
			t.Errorf("%s works in a bare user namespace, which should stop it", a.Name)
		case !slices.Contains(off, a.Layer) || !worked:
		case changesMounts(a.Name):
			serial++
			id := mutant(string([]rune{'s', rune('a' + serial/26), rune('a' + serial%26)}))
			others[id] = []string{a.Name}
		default:
			others[mutant("all")] = append(others[mutant("all")], a.Name)
		}
	}
	tried := 0
	for id, names := range others {
		works := attacked(t, f, id, program, names, off)
		tried += len(names)
		for _, name := range names {
			if reason, behind := standsBehind[name]; slices.Contains(works, name) == behind {
				t.Errorf("%s: worked %v without layers, and behind them stands %q", name, behind, reason)
			}
		}
	}
	// And its layer alone stops it. An undumpable init does not: see TestAttacksWorkWithoutTheLayer. It
	// stays, for the filter that switches it off lets prctl through.
	for i, layer := range []string{attack.Filter, attack.Capabilities, attack.Masked, attack.ReadOnly} {
		others := slices.DeleteFunc(slices.Clone(off), func(l string) bool { return l == layer || l == attack.Undumpable })
		for _, name := range attacked(t, f, mutant("alone"+string(rune('a'+i))), program, attacksOn(layer), others) {
			t.Errorf("%s works where only %s is left", name, layer)
		}
	}
	t.Logf("%d attacks of %d", tried, len(attack.Corpus()))
	if tried < minSeen {
		t.Errorf("only %d attacks are worth something", tried)
	}
}

// minSeen is the number of attacks whose layers are data and which work in a bare user namespace,
// on any host.
const minSeen = 100

// standsBehind are attacks that something else stops too, which is no data of a profile, and the
// reason.
var standsBehind = func() map[string]string {
	all := map[string]string{
		"int80-abi":            "the list of architectures, which a filter without rules has too",
		"exec-file-capability": "nosuid and no_new_privs",
		"mount-sysfs":          "a sysfs that shows more than the one that is mounted (mount_too_revealing)",
	}
	for reason, names := range map[string][]string{
		"the host's device nodes are mounted read-only": {"touch-device", "touch-device-by-descriptor"},
		"max_*_namespaces are 0 in a sandbox": {
			"clone-cgroup", "clone-ipc", "clone-net", "clone-pid", "clone-user", "clone-user-high-bits", "clone3-time", "clone3-user",
			"unshare-cgroup", "unshare-ipc", "unshare-net", "unshare-pid", "unshare-time", "unshare-user",
		},
		"/tmp is no mount in a sandbox": {"fspick", "mount-setattr", "pivot-root"},
	} {
		for _, name := range names {
			all[name] = reason
		}
	}
	return all
}()

// attacksOn are the names of the attacks that a layer is the first to stop.
func attacksOn(layer string) (names []string) {
	for _, a := range attack.Corpus() {
		if a.Layer == layer {
			names = append(names, a.Name)
		}
	}
	return names
}

// If init cannot confine its programs, there is no sandbox, and the creation says why.
func TestInitThatCannotConfineStartsNothing(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireLandlock(t, 2)
	f := newFixture(t)
	control := f.NewSpec(t, "refuse")
	client := begin(t, f, control)
	// Init's own program ends at once if it is not started as a sandbox's init.
	x, err := client.Exec(t.Context(), host.ExecRequest{Argv: []string{"/dev/sandboxd-init"}, NoStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	_ = x.Close() // always nil
	for i, call := range landlockCalls {
		spec := f.NewSpec(t, "refuse"+string(rune('a'+i)))
		answer(&spec.Profile, uint(unix.EOPNOTSUPP), call)
		_, err := tryBegin(t, f, spec)
		if err == nil || !strings.Contains(err.Error(), "sandboxd-init:") || !strings.Contains(err.Error(), "Landlock") || !strings.Contains(err.Error(), unix.EOPNOTSUPP.Error()) {
			t.Errorf("a sandbox where %s is refused: %v", call, err)
		}
	}
	all, err := f.Engine.List(t.Context())
	if err != nil || len(all) != 1 || all[0].ID != control.ID {
		t.Errorf("afterwards there are %v, %v", all, err)
	}
	for _, st := range all {
		_ = st.Pidfd.Close()
	}
}

// listen makes a control socket as the daemon does.
func listen(t testing.TB) (path string, file *os.File) {
	t.Helper()
	path = filepath.Join(shortDir(t), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	file, err = l.File()
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() }) // often for the second time
	return path, file
}

// begin starts a sandbox and returns what speaks to its init.
func begin(t *testing.T, f runtimetest.Fixture, spec *runtime.Spec) *host.Client {
	t.Helper()
	client, err := tryBegin(t, f, spec)
	if err != nil {
		t.Fatalf("start sandbox %s: %v", spec.ID, err)
	}
	return client
}

// tryBegin is begin where the start may fail.
func tryBegin(t *testing.T, f runtimetest.Fixture, spec *runtime.Spec) (*host.Client, error) {
	t.Helper()
	socket, file := listen(t)
	st, err := f.Engine.Create(t.Context(), spec, file)
	_ = file.Close() // the sandbox has its own
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		_ = st.Pidfd.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		if err := f.Engine.Delete(ctx, spec.ID); err != nil {
			t.Error(err)
		}
	})
	return host.NewClient(socket), nil
}

// attacked returns the attacks that work in a sandbox without these layers.
func attacked(t *testing.T, f runtimetest.Fixture, id, program string, attacks, off []string) (works []string) {
	t.Helper()
	spec := f.NewSpec(t, id)
	without(&spec.Profile, off)
	client := begin(t, f, spec)
	put(t, client, program)
	err := attack.TryAll(attacks, func(group []string) (said string, killed bool, err error) {
		said, exit := says(t, client, attack.Try(group...)...)
		return said, exit.Signal == unix.SIGSYS, nil
	}, func(name string, r attack.Result) error {
		if r.Worked {
			works = append(works, name)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("without %v: %v", off, err)
	}
	return works
}

// inside is the path at which put places a program.
const inside = "/tmp/attacker"

// put puts a program into a sandbox.
func put(t *testing.T, client *host.Client, program string) {
	t.Helper()
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
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
}

// says runs a program, and returns its output and its exit.
func says(t *testing.T, client *host.Client, args ...string) (string, host.ExecExit) {
	t.Helper()
	x, err := client.Exec(t.Context(), host.ExecRequest{Argv: append([]string{inside}, args...), NoStdin: true, Timeout: 2 * time.Minute})
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	defer x.Close()
	var said bytes.Buffer
	exit, err := x.Stream(t.Context(), func(stream string, p []byte) error {
		if stream == "stdout" {
			said.Write(p)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return said.String(), exit
}
