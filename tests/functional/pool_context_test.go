package functional

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// furnished waits until an interpreter waits in each of the pool's sandboxes.
func furnished(t *testing.T, d *harness.Daemon) {
	t.Helper()
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == p.Size && p.Context != nil && p.Context.Ready == p.Size })
}

// The interpreter that waited in a parked sandbox is, to its code, one that was started for the
// context. In a sandbox that is claimed with other properties, or used before, another is started.
func TestParkedInterpreterIsLikeANewOne(t *testing.T) {
	testenv.SameForAll(t)
	testenv.RequirePeer(t, "python3")
	d := startWith(t, harness.Options{Args: []string{"--pool", "host=2,context=python+decimal+platform"}})
	cold := start(t)
	req := api.CreateContext{Preload: []string{"decimal", "platform"}}
	furnished(t, d)
	s, twin := d.Create(t, api.CreateSandbox{}), cold.Create(t, api.CreateSandbox{})
	c := newContext(t, d, s, req)
	if p := d.System(t).Pools[0]; p.Hits != 1 || p.Context.Hits != 1 {
		t.Fatalf("no interpreter waited: %+v, %+v", p, p.Context)
	}
	const look = `import os, platform, resource, signal, socket, sys, threading
print(os.uname().nodename, platform.node(), socket.gethostname(), open("/proc/sys/kernel/hostname").read())
print(os.getuid(), os.getgid(), os.getgroups(), os.getcwd(), sorted(os.environ.items()), sys.path, sys.argv)
print([(r, resource.getrlimit(getattr(resource, r))) for r in dir(resource) if r.startswith("RLIMIT")])
print([signal.getsignal(s) for s in signal.valid_signals()].count(signal.SIG_DFL), signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sorted(os.listdir("/proc/self/fd")), threading.active_count(), os.getpid() == os.getsid(0), os.umask(0o22))
print([l for l in open("/proc/self/status") if l.split(":")[0] in ("Umask", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Threads", "Cpus_allowed")])
print([open("/proc/self/" + f).read() for f in ("cgroup", "oom_score_adj")])
print([os.readlink("/proc/self/ns/" + n) == os.readlink("/proc/1/ns/" + n) for n in sorted(os.listdir("/proc/self/ns"))])
print(sorted(m for m in sys.modules))`
	got := strings.ReplaceAll(inContext(t, d, c, look), s.Name, "NAME")
	want := strings.ReplaceAll(inContext(t, cold, newContext(t, cold, twin, req), look), twin.Name, "NAME")
	if got != want {
		t.Errorf("code sees\n%s\nand in a new sandbox\n%s", got, want)
	}
	if text := inContext(t, d, c, "print(__import__('platform').node())"); text != s.Name+"\n" {
		t.Errorf("the sandbox %s calls itself %q", s.Name, text)
	}
	s.Delete(t)

	for name, other := range map[string]api.CreateSandbox{
		"environment": {Env: []string{"COLOUR=green"}},
		"limits":      {Limits: api.Limits{CPUs: 0.5}},
		"name":        {Name: "mine"},
	} {
		furnished(t, d)
		s, err := d.TryCreate(t.Context(), other)
		if name == "limits" && err != nil {
			continue // this host enforces none
		}
		if err != nil {
			t.Fatal(err)
		}
		c := newContext(t, d, s, req)
		if text := inContext(t, d, c, "import os\nprint(os.environ.get('COLOUR'), os.uname().nodename)"); text != fmt.Sprintf("%s %s\n", map[bool]string{true: "green", false: "None"}[name == "environment"], s.Name) {
			t.Errorf("%s: %q", name, text)
		}
		s.Delete(t)
	}
	furnished(t, d)
	used := d.Create(t, api.CreateSandbox{})
	if text := used.Sh(t, "echo used"); text != "used\n" {
		t.Error(text)
	}
	newContext(t, d, used, req)
	if p := d.System(t).Pools[0]; p.Context.Hits != 1 {
		t.Errorf("%+v, %+v", p, p.Context)
	}
}

// A daemon that is killed leaves no interpreter that waits, neither in a parked sandbox nor in a
// claimed one, which goes on.
func TestKilledDaemonLeavesNoParkedInterpreter(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	d := startWith(t, harness.Options{Args: []string{"--pool", "host=2,context=python"}})
	furnished(t, d)
	claimed, used := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	c := newContext(t, d, used, api.CreateContext{})
	inContext(t, d, c, "x = 7")
	furnished(t, d)
	d.Kill9(t)
	d.Launch(t)
	harness.Eventually(t, func() error {
		list := new(api.ProcessList)
		if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+claimed.ID+"/processes", nil, list); err != nil {
			return err
		}
		if slices.ContainsFunc(list.Processes, func(p api.Process) bool { return strings.Contains(p.Name, "python") }) {
			return fmt.Errorf("an interpreter is left: %+v", list.Processes)
		}
		return nil
	})
	if got := inContext(t, d, newContext(t, d, claimed, api.CreateContext{}), "print(1)"); got != "1\n" {
		t.Error(got)
	}
	if got := inContext(t, d, c, "print(x)"); got != "7\n" { // it was a context like any
		t.Error(got)
	}
	furnished(t, d)
	if n := len(d.List(t)); n != 2 {
		t.Errorf("%d sandboxes are listed", n)
	}
}
