package libct

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

var update = flag.Bool("update", false, "write the golden files anew")

func testSpec() *runtime.Spec {
	eperm := uint(1)
	return &runtime.Spec{
		ID: "abc123", Hostname: "box", Rootfs: rootfs.Source{Layers: []string{"sha256:" + strings.Repeat("0", 64)}},
		Profile: runtime.Profile{
			Name: "default", Capabilities: []string{"CAP_CHOWN", "CAP_SETUID"},
			MaskedPaths: []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
			Seccomp: &specs.LinuxSeccomp{
				DefaultAction: specs.ActErrno, DefaultErrnoRet: &eperm, Architectures: []specs.Arch{specs.ArchX86_64},
				Syscalls: []specs.LinuxSyscall{{Action: specs.ActAllow, Names: []string{"read", "write"}}},
			},
		},
		Limits:   api.Limits{Memory: 1 << 30, CPUs: 0.5, Pids: 100, Nofile: 4096, IO: api.IOLimits{WriteBPS: 1 << 20}},
		IODevice: cgroup.Device{Number: "259:0", Name: "nvme0n1", Writeback: true},
	}
}

func testHost() *Host {
	return &Host{
		IDs:      []idmap.Range{{Inside: 0, Outside: 1, Size: 65536}},
		Landlock: 7, Cgroup: true, Controllers: []string{"cpu", "cpuset", "io", "memory", "pids"}, Nofile: 1 << 20, Nproc: 1 << 15,
		Core:   unix.RLIM_INFINITY,
		given:  []ceiling{{Name: "user/max_inotify_instances", Most: 128}, {Name: "user/max_inotify_watches", Most: 65536}},
		limits: []configs.Rlimit{{Type: unix.RLIMIT_SIGPENDING, Hard: 15000}, {Type: unix.RLIMIT_MSGQUEUE, Hard: 819200}},
		Files: []string{
			"cpu.max", "cpu.weight", "cpuset.cpus", "io.max", "memory.high", "memory.max", "memory.oom.group", "memory.swap.max", "pids.max",
		},
	}
}

// libcontainer's configuration is all that holds a sandbox: a review must show every change of it.
func TestPlanIsTheGoldenOne(t *testing.T) {
	for name, change := range map[string]func(*Host, *runtime.Profile){
		"delegated": func(*Host, *runtime.Profile) {},
		"network":   func(h *Host, _ *runtime.Profile) { h.Own = true },
		"shared":    func(h *Host, _ *runtime.Profile) { h.Own = true },
		"loopback":  func(h *Host, _ *runtime.Profile) { h.Own = true },
		"bare":      func(h *Host, _ *runtime.Profile) { h.Cgroup, h.Controllers, h.Files = false, nil, nil },
		"single": func(h *Host, _ *runtime.Profile) {
			h.Single, h.IDs = true, []idmap.Range{{Size: 1}}
		},
		"mounts": func(h *Host, _ *runtime.Profile) { h.Cgroup, h.Controllers, h.Files = false, nil, nil },
		"hardened": func(_ *Host, p *runtime.Profile) {
			p.Name, p.Capabilities, p.NonRoot, p.User, p.ReadOnlyRoot = "hardened", []string{}, true, "65534:65534", true
			p.Mounts = []api.Scratch{{Path: "/tmp", Size: 1 << 20, Mode: 0o1777}, {Path: "/work", Size: 1 << 20, Mode: 0o755, UID: 65534, GID: 65534}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			host, spec := testHost(), testSpec()
			change(host, &spec.Profile)
			spec.Network = name == "network" || name == "shared"
			if name == "shared" || name == "loopback" {
				spec.Join = "def456"
			}
			if name == "mounts" { // of an ordinary user's daemon
				spec.Mounts, spec.MountIDs = []api.Mount{mountOf(1000, 1000), mountOf(1000, 1000)}, api.MountsUser
				spec.Mounts[1].Target, spec.Mounts[1].ReadOnly = "/ro", true
			}
			enforced, err := Enforce(spec, host)
			if err != nil {
				t.Fatal(err)
			}
			if host.IDs, err = idsOf(spec, host); err != nil {
				t.Fatal(err)
			}
			config, err := Plan(spec, host, &enforced)
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(struct {
				Enforced api.Enforced
				Cgroup   []cgroup.Setting
				Root     *rootPlan
				Init     []string
				Config   any
			}{
				enforced, settings(&spec.Limits, &spec.IODevice, host), planRoot(spec, host, config, nil),
				confinement(spec, &enforced).InitArgs(), config,
			}, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", "plan-"+name+".json")
			if *update {
				if err := os.WriteFile(golden, append(got, '\n'), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), string(got)+"\n"); d != "" {
				t.Errorf("plan differs from %s (-want +got):\n%s", golden, d)
			}
		})
	}
}

// Init is spared by as much as it needs where a limit of its sandbox can be met, and by nothing
// where only the host's memory can run out.
func TestScoreOfInit(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Host, *runtime.Spec)
		want   int
	}{
		"a limit of its own": {func(_ *Host, s *runtime.Spec) { s.Limits.Memory = 1 << 30 }, 968},
		"a large one":        {func(_ *Host, s *runtime.Spec) { s.Limits.Memory = 1 << 40 }, 999},
		"a small one":        {func(_ *Host, s *runtime.Spec) { s.Limits.Memory = 64 << 20 }, 500},
		"the smallest":       {func(_ *Host, s *runtime.Spec) { s.Limits.Memory = 1 << 20 }, 0},
		"a raised launcher":  {func(h *Host, s *runtime.Spec) { h.Score, s.Limits.Memory = 700, 1<<20 }, 700},
		"no cgroup":          {func(h *Host, _ *runtime.Spec) { h.Cgroup = false }, 1000},
		"no limit":           {func(_ *Host, s *runtime.Spec) { s.Limits.Memory = 0 }, 1000},
	} {
		host, spec := testHost(), testSpec()
		c.change(host, spec)
		enforced, err := Enforce(spec, host)
		if err != nil {
			t.Fatal(name, err)
		}
		config, err := Plan(spec, host, &enforced)
		if err != nil {
			t.Fatal(name, err)
		}
		if got := *config.OomScoreAdj; got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// Where there is only root, a profile that runs nothing as root cannot be applied.
func TestProfileWithoutRootNeedsIDs(t *testing.T) {
	spec, host := testSpec(), testHost()
	spec.Profile.NonRoot, spec.Profile.User = true, "65534:65534"
	if e, err := Enforce(spec, host); err != nil || !e.NonRoot {
		t.Errorf("with subordinate ids: %+v, %v", e, err)
	}
	host.Single, host.IDs = true, []idmap.Range{{Size: 1}}
	if _, err := Enforce(spec, host); !errors.Is(err, runtime.ErrUnenforceable) {
		t.Errorf("without: %v", err)
	}
}

func TestExplicitLimitThatCannotBeHeldIsRefused(t *testing.T) {
	swap := int64(0)
	for name, tc := range map[string]struct {
		explicit    api.Limits
		controllers []string
		device      *cgroup.Device
		refused     bool
	}{
		"memory without controller":    {explicit: api.Limits{Memory: 1 << 20}, controllers: []string{"cpu"}, refused: true},
		"memory with controller":       {explicit: api.Limits{Memory: 1 << 20}, controllers: []string{"memory"}},
		"swap without controller":      {explicit: api.Limits{Swap: &swap}, refused: true},
		"cpus without controller":      {explicit: api.Limits{CPUs: 1}, controllers: []string{"memory"}, refused: true},
		"pids fall back to an rlimit":  {explicit: api.Limits{Pids: 10}},
		"oom_group without controller": {explicit: api.Limits{OOMGroup: true}, controllers: []string{"cpu"}, refused: true},
		"memory_high with controller":  {explicit: api.Limits{MemoryHigh: 1 << 20}, controllers: []string{"memory"}},
		"cpu_weight without":           {explicit: api.Limits{CPUWeight: 10}, controllers: []string{"cpuset"}, refused: true},
		"cpuset without":               {explicit: api.Limits{CPUSet: "0"}, controllers: []string{"cpu"}, refused: true},
		"cpuset with controller":       {explicit: api.Limits{CPUSet: "0"}, controllers: []string{"cpuset"}},
		"io without controller":        {explicit: api.Limits{IO: api.IOLimits{ReadBPS: 1 << 20}}, refused: true},
		"io with controller":           {explicit: api.Limits{IO: api.IOLimits{ReadBPS: 1 << 20}}, controllers: []string{"io"}},
		"io without a device": {
			explicit: api.Limits{IO: api.IOLimits{ReadBPS: 1 << 20}}, controllers: []string{"io"}, device: &cgroup.Device{Reason: "tmpfs"}, refused: true,
		},
		"io weight that nobody weighs": {explicit: api.Limits{IO: api.IOLimits{Weight: 10}}, controllers: []string{"io"}, refused: true},
		"io weight with bfq": {
			explicit: api.Limits{IO: api.IOLimits{Weight: 10}}, controllers: []string{"io"}, device: &cgroup.Device{Weight: "io.bfq.weight"},
		},
		"io writes through the page cache": {explicit: api.Limits{IO: api.IOLimits{WriteBPS: 1 << 20}}, controllers: []string{"io", "memory"}},
		"io writes without memory":         {explicit: api.Limits{IO: api.IOLimits{WriteBPS: 1 << 20}}, controllers: []string{"io"}, refused: true},
		"io writes that are held direct only": {
			explicit: api.Limits{IO: api.IOLimits{WriteIOPS: 5}}, controllers: []string{"io", "memory"},
			device: &cgroup.Device{Number: "8:0", Reason: "ext3"}, refused: true,
		},
		"io reads that are held": {
			explicit: api.Limits{IO: api.IOLimits{ReadIOPS: 5}}, controllers: []string{"io", "memory"}, device: &cgroup.Device{Number: "8:0", Reason: "ext3"},
		},
		"nofile above the hard limit": {explicit: api.Limits{Nofile: 1<<20 + 1}, refused: true},
		"nofile below the hard limit": {explicit: api.Limits{Nofile: 100}},
		"pids above the hard limit":   {explicit: api.Limits{Pids: 1<<15 + 1}, refused: true},
		"pids at the hard limit":      {explicit: api.Limits{Pids: 1 << 15}},
		"pids of a cgroup":            {explicit: api.Limits{Pids: 1<<15 + 1}, controllers: []string{"pids"}},
	} {
		t.Run(name, func(t *testing.T) {
			spec, host := testSpec(), testHost()
			host.Controllers = tc.controllers
			host.Files = append(host.Files, "io.bfq.weight")
			if tc.device != nil {
				spec.IODevice = *tc.device
			}
			spec.Limits, spec.Explicit = tc.explicit, tc.explicit
			_, err := Enforce(spec, host)
			if got := errors.Is(err, runtime.ErrUnenforceable); got != tc.refused {
				t.Errorf("refused: %v (%v), want %v", got, err, tc.refused)
			}
		})
	}
}

// Without a cgroup that counts processes, a profile's default is cut to the launcher's own limit: a
// process cannot give more.
func TestProcessesWithinTheLaunchersOwn(t *testing.T) {
	for nproc, want := range map[uint64]uint64{50: 50, 100: 100, unix.RLIM_INFINITY: 100} {
		spec, host := testSpec(), testHost()
		host.Cgroup, host.Nproc, spec.Limits = false, nproc, api.Limits{Pids: 100}
		enforced, err := Enforce(spec, host)
		if err != nil {
			t.Fatal(err)
		}
		config, err := Plan(spec, host, &enforced)
		if err != nil {
			t.Fatal(err)
		}
		limit := configs.Rlimit{Type: unix.RLIMIT_NPROC, Hard: want, Soft: want}
		if !slices.Contains(config.Rlimits, limit) {
			t.Errorf("with %d: %+v, want %+v among them", nproc, config.Rlimits, limit)
		}
	}
}

// explicitly returns the limits with one of them set, by its JSON path.
func explicitly(t *testing.T, path string) api.Limits {
	t.Helper()
	text, ok := map[string]string{"oom_group": "true", "cpuset": `"0"`}[path]
	if !ok {
		text = "10"
	}
	for _, name := range slices.Backward(strings.Split(path, ".")) {
		text = fmt.Sprintf("{%q:%s}", name, text)
	}
	var l api.Limits
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		t.Fatal(err)
	}
	return l
}

// The launcher counts on every host, and says so.
func TestDiskLimitIsCounted(t *testing.T) {
	for _, limits := range []api.Limits{{}, {Disk: 1 << 30}, {Inodes: 1000}} {
		spec, want := testSpec(), "accounting"
		spec.Limits, spec.Explicit = limits, limits
		if limits == (api.Limits{}) {
			want = "none"
		}
		if got, err := Enforce(spec, testHost()); err != nil || got.Disk != want {
			t.Errorf("%+v: %q, %v", limits, got.Disk, err)
		}
	}
}

// An explicit limit is refused or written to a file: without the file that holds it, it must not be
// accepted.
func TestExplicitLimitHasItsFile(t *testing.T) {
	for _, row := range api.LimitTable() {
		if row.Rlimit != "" || row.Controller == "" { // also held without a file
			continue
		}
		file, explicit := row.File, explicitly(t, row.Name)
		if file == "" { // the scheduler's
			file = "io.bfq.weight"
		}
		if !row.IsSet(&explicit) {
			t.Errorf("%s: not set by its path", row.Name)
		}
		spec, host := testSpec(), testHost()
		host.Files = append(host.Files, "io.bfq.weight")
		spec.IODevice.Weight = "io.bfq.weight"
		spec.Limits, spec.Explicit = explicit, explicit
		written := func() bool {
			return slices.ContainsFunc(cgroup.Changes(settings(&api.Limits{}, &spec.IODevice, host), settings(&explicit, &spec.IODevice, host)),
				func(c cgroup.Change) bool { return c.File == file })
		}
		if _, err := Enforce(spec, host); err != nil || !written() {
			t.Errorf("%s: %v, and it is written to %s: %v", row.Name, err, file, written())
		}
		host.Files = slices.DeleteFunc(host.Files, func(f string) bool { return f == file })
		if _, err := Enforce(spec, host); !errors.Is(err, runtime.ErrUnenforceable) || written() {
			t.Errorf("%s without %s: %v", row.Name, file, err)
		}
	}
}

// A limit that is reported as enforced is written to a file; defaults that the host does not fulfil
// are reported as missing.
func TestEnforcedIsWhatHolds(t *testing.T) {
	spec, host := testSpec(), testHost()
	if e, err := Enforce(spec, host); err != nil || e.CPU != "cgroup" || e.IO != "cgroup" || len(e.Missing) > 0 ||
		!slices.Equal(e.Uncounted, []string{api.UncountedLocks, api.UncountedTimestamps}) {
		t.Fatalf("%+v, %v", e, err)
	}
	host.Files = slices.DeleteFunc(host.Files, func(f string) bool { return f == "cpu.max" })
	host.Controllers = slices.DeleteFunc(host.Controllers, func(c string) bool { return c == "memory" })
	e, err := Enforce(spec, host)
	if missing := strings.Join(e.Missing, "; "); err != nil || e.CPU != "none" || e.IO != "direct" ||
		!strings.Contains(missing, "CONFIG_CFS_BANDWIDTH") || !strings.Contains(missing, "whose pages") {
		t.Errorf("without cpu.max and memory: %+v, %v", e, err)
	}
}

// A host without Landlock, or with a version that forbids links, reports that, and so does each of
// its sandboxes.
func TestMissingLandlockIsSaid(t *testing.T) {
	for abi, err := range map[int]error{0: errors.ErrUnsupported, 1: nil, 2: nil, 7: nil} {
		spec, host := testSpec(), testHost()
		host.Landlock = 0
		host.landlock(abi, err)
		e, err := Enforce(spec, host)
		said := strings.Contains(strings.Join(e.Missing, "; "), "Landlock")
		if want := abi >= 2; err != nil || said == want || (e.Landlock != 0) != want {
			t.Errorf("ABI %d: %+v, %v", abi, e, err)
		}
	}
}

func TestNoFilterNoSandbox(t *testing.T) {
	for name, filter := range map[string]*specs.LinuxSeccomp{"nil": nil, "empty": {}} {
		spec, host := testSpec(), testHost()
		spec.Profile.Seccomp = filter
		if _, err := Plan(spec, host, &api.Enforced{}); err == nil {
			t.Errorf("%s: a sandbox without a seccomp filter was planned", name)
		}
	}
}

// The settings of no limits are those of a new cgroup, so that only differences are written.
func TestSettingsOfNoLimitsAreTheKernels(t *testing.T) {
	host := testHost()
	host.Files = append(host.Files, "io.bfq.weight")
	device := cgroup.Device{Number: "8:0", Weight: "io.bfq.weight"}
	fresh := settings(&api.Limits{}, &device, host)
	want := []cgroup.Setting{
		{File: "cpuset.cpus", Value: ""},
		{File: "cpu.max", Value: "max 100000"},
		{File: "cpu.weight", Value: "100"},
		{File: "pids.max", Value: "max"},
		{File: "io.max", Value: "8:0 rbps=max wbps=max riops=max wiops=max"},
		{File: "io.bfq.weight", Value: "100"},
		{File: "memory.oom.group", Value: "0"},
		{File: "memory.swap.max", Value: "max"},
		{File: "memory.high", Value: "max"},
		{File: "memory.max", Value: "max"},
	}
	if d := cmp.Diff(want, fresh); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	// A limit on memory is one on swap too, or it would be none.
	got := cgroup.Changes(fresh, settings(&api.Limits{Memory: 1 << 20, IO: api.IOLimits{Weight: 10000}}, &device, host))
	if d := cmp.Diff([]cgroup.Change{
		{File: "io.bfq.weight", From: "100", To: "1000"}, {File: "memory.swap.max", From: "max", To: "0"}, {File: "memory.max", From: "max", To: "1048576"},
	}, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
