package ociprofiles

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/seccomp"
)

var update = flag.Bool("update", false, "write the filters from package seccomp")

var able = seccomp.Abilities{Actions: []string{"errno", "allow"}}

// TestFilterIsThePlan keeps the embedded filters and the source that they are generated from
// together.
func TestFilterIsThePlan(t *testing.T) {
	for _, filter := range seccomp.Embedded() {
		for _, arch := range []string{seccomp.AMD64, seccomp.ARM64} {
			comparePlan(t, filter, arch)
		}
	}
}

func comparePlan(t *testing.T, filter seccomp.Filter, arch string) {
	t.Helper()
	plan, err := seccomp.Plan(filter, arch, able)
	if err != nil {
		t.Fatal(err)
	}
	{
		text, err := json.MarshalIndent(plan, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, '\n')
		file := filterFile(filter.Name, arch)
		if *update {
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		// From the disk, not the files embedded when the test was built.
		have, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(text), string(have)); diff != "" {
			t.Errorf("%s is not what package seccomp plans; run go generate (-plan +file):\n%s", file, diff)
		}
	}
}

var arches = []string{seccomp.AMD64, seccomp.ARM64}

// all are the embedded profiles, for each architecture.
func all(t *testing.T) map[string]*Set {
	t.Helper()
	sets := make(map[string]*Set)
	for _, arch := range arches {
		s, err := open("", arch, able)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{Build, Default, Hardened}, s.Names()); diff != "" {
			t.Error(diff)
		}
		sets[arch] = s
	}
	return sets
}

func TestEveryProfileLoads(t *testing.T) {
	for arch, s := range all(t) {
		for _, name := range s.Names() {
			p, err := s.Get(name)
			if err != nil {
				t.Fatal(err)
			}
			if p.Name != name || p.Seccomp == nil || len(p.Seccomp.Syscalls) == 0 || p.Source != "" {
				t.Errorf("%s for %s: %+v", name, arch, p)
			}
			shown, err := p.API()
			if err != nil || shown.Syscalls < 100 || len(shown.Seccomp) == 0 {
				t.Errorf("%s for %s: %d calls, %v", name, arch, shown.Syscalls, err)
			}
		}
	}
}

// TestNoProfileHoldsPowerOverTheKernel lists the capabilities by which a user namespace reaches the
// kernel code that most published escapes went through.
func TestNoProfileHoldsPowerOverTheKernel(t *testing.T) {
	for _, s := range all(t) {
		for _, p := range s.byName {
			for _, c := range []string{
				"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_MODULE", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_BOOT",
				"CAP_DAC_READ_SEARCH", "CAP_BPF", "CAP_PERFMON", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_SETFCAP", "CAP_SETPCAP",
			} {
				if slices.Contains(p.Capabilities, c) {
					t.Errorf("profile %s has %s", p.Name, c)
				}
			}
			if v := seccomp.Lookup(p.Seccomp, "unshare"); v.Allowed() {
				t.Errorf("profile %s allows unshare", p.Name)
			}
		}
	}
}

func TestHardenedIsWhatItPromises(t *testing.T) {
	for arch, s := range all(t) {
		p, err := s.Get(Hardened)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Capabilities) > 0 || !p.NonRoot || p.User != "65534:65534" || !p.ReadOnlyRoot {
			t.Errorf("%s: %+v", arch, p.Profile)
		}
		if n := len(seccomp.Reachable(p.Seccomp)); n > 180 {
			t.Errorf("%s: %d system calls", arch, n)
		}
		var writable []string
		for _, m := range p.Mounts {
			writable = append(writable, m.Path)
		}
		if diff := cmp.Diff([]string{"/tmp", "/var/tmp", "/run", "/work"}, writable); diff != "" {
			t.Error(diff)
		}
	}
}

func TestUnknownNames(t *testing.T) {
	s := all(t)[seccomp.AMD64]
	for _, name := range []string{"", "Default", "../default", "default.seccomp.amd64", "default\x00"} {
		if _, err := s.Get(name); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), Hardened) {
			t.Errorf("%q: %v", name, err)
		}
	}
	var unsupported *seccomp.UnsupportedError
	if _, err := Open("", seccomp.Abilities{}); !errors.As(err, &unsupported) {
		t.Errorf("a kernel without filters: %v", err)
	}
	if _, err := open("", "mips", able); err == nil {
		t.Error("loaded for an architecture without a filter")
	}
}

// own writes a profile into a directory: the default's documents, changed.
func own(t *testing.T, name string, change func(dir string, doc map[string]any)) string {
	t.Helper()
	text, err := files.ReadFile("default.json")
	if err != nil {
		t.Fatal(err)
	}
	doc := make(map[string]any)
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	doc["name"], doc["seccomp"] = name, Hardened
	dir := t.TempDir()
	change(dir, doc)
	if text, err = json.Marshal(doc); err != nil {
		t.Fatal(err)
	}
	write(t, dir, name+".json", text)
	return dir
}

func write(t *testing.T, dir, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func embedded(t *testing.T, name string) []byte {
	t.Helper()
	text, err := files.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestOwnProfiles(t *testing.T) {
	dir := own(t, "mine", func(string, map[string]any) {})
	s, err := open(dir, seccomp.AMD64, able)
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Get("mine")
	if err != nil {
		t.Fatal(err)
	}
	hardened, err := s.Get(Hardened)
	if err != nil || p.Seccomp != hardened.Seccomp || p.Source != filepath.Join(dir, "mine.json") || len(p.Capabilities) == 0 {
		t.Errorf("%+v, %v", p, err)
	}

	// With a filter of its own.
	dir = own(t, "mine", func(dir string, doc map[string]any) {
		delete(doc, "seccomp")
		write(t, dir, "mine.seccomp.amd64.json", embedded(t, "default.seccomp.amd64.json"))
	})
	if s, err = open(dir, seccomp.AMD64, able); err != nil {
		t.Fatal(err)
	}
	if p, err = s.Get("mine"); err != nil || len(seccomp.Reachable(p.Seccomp)) < 200 {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err = open(dir, seccomp.ARM64, able); err == nil || !strings.Contains(err.Error(), "mine.seccomp.arm64.json") {
		t.Errorf("without a filter for the architecture: %v", err)
	}
}

// Every field of a profile has an effect, or is an error that names its place.
func TestBadProfilesAreRefused(t *testing.T) {
	type doc = map[string]any
	at := func(d doc, keys ...string) doc {
		for _, k := range keys {
			d = d[k].(doc)
		}
		return d
	}
	mount := func(destination string, options ...any) any {
		return []any{doc{"destination": destination, "type": "tmpfs", "options": options}}
	}
	for name, tc := range map[string]struct {
		change func(dir string, d doc)
		want   string
	}{
		"an unknown field":       {func(_ string, d doc) { d["hooks"] = doc{} }, "hooks"},
		"an unknown process":     {func(_ string, d doc) { at(d, "process")["args"] = []string{"sh"} }, "args"},
		"another's name":         {func(_ string, d doc) { d["name"] = "other" }, "name"},
		"no description":         {func(_ string, d doc) { delete(d, "description") }, "description"},
		"a power":                {func(_ string, d doc) { at(d, "process", "capabilities")["bounding"] = []string{"CAP_SYS_ADMIN"} }, "CAP_SYS_ADMIN"},
		"init's memory":          {func(_ string, d doc) { at(d, "process", "capabilities")["bounding"] = []string{"CAP_SYS_PTRACE"} }, "CAP_SYS_PTRACE"},
		"a misspelt capability":  {func(_ string, d doc) { at(d, "process", "capabilities")["bounding"] = []string{"CHOWN"} }, "CHOWN"},
		"a capability twice":     {func(_ string, d doc) { at(d, "process", "capabilities")["bounding"] = []string{"CAP_KILL", "CAP_KILL"} }, "twice"},
		"ambient capabilities":   {func(_ string, d doc) { at(d, "process", "capabilities")["ambient"] = []string{"CAP_KILL"} }, "ambient"},
		"root as a user":         {func(_ string, d doc) { at(d, "process")["user"] = doc{"uid": 0, "gid": 5} }, "process.user"},
		"a user with powers":     {func(_ string, d doc) { at(d, "process")["user"] = doc{"uid": 5, "gid": 5} }, "process.user"},
		"a relative directory":   {func(_ string, d doc) { at(d, "process")["cwd"] = "work" }, "process.cwd"},
		"a variable without =":   {func(_ string, d doc) { at(d, "process")["env"] = []string{"HOME"} }, "process.env"},
		"a mask less":            {func(_ string, d doc) { at(d, "linux")["maskedPaths"] = []string{"/proc/kcore"} }, "/proc/keys"},
		"a writable /proc":       {func(_ string, d doc) { at(d, "linux")["readonlyPaths"] = []string{"/proc/sys"} }, "/proc is missing"},
		"a masked /proc":         {func(_ string, d doc) { at(d, "linux")["maskedPaths"] = []string{"/proc"} }, "/proc"},
		"a mask elsewhere":       {func(_ string, d doc) { at(d, "linux")["maskedPaths"] = []string{"/etc/passwd"} }, "/etc/passwd"},
		"a mask that climbs":     {func(_ string, d doc) { at(d, "linux")["maskedPaths"] = []string{"/proc/../etc"} }, "/proc/../etc"},
		"an unmasked namespace":  {func(_ string, d doc) { at(d, "linux")["namespaces"] = []any{} }, "namespaces"},
		"no limit":               {func(_ string, d doc) { delete(at(d, "limits"), "pids") }, "limits"},
		"a negative limit":       {func(_ string, d doc) { at(d, "limits")["cpus"] = -1 }, "limits"},
		"a bind mount":           {func(_ string, d doc) { d["mounts"] = []any{doc{"destination": "/x", "type": "bind", "source": "/"}} }, "bind"},
		"a mount over /proc":     {func(_ string, d doc) { d["mounts"] = mount("/proc/sys", "nosuid", "nodev", "size=1") }, "/proc"},
		"a mount over /":         {func(_ string, d doc) { d["mounts"] = mount("/", "nosuid", "nodev", "size=1") }, "destination"},
		"a mount that climbs":    {func(_ string, d doc) { d["mounts"] = mount("/a/../../b", "nosuid", "nodev", "size=1") }, "destination"},
		"a mount with setuid":    {func(_ string, d doc) { d["mounts"] = mount("/x", "nodev", "size=1") }, "nosuid"},
		"a mount with devices":   {func(_ string, d doc) { d["mounts"] = mount("/x", "nosuid", "size=1") }, "nodev"},
		"a mount without a size": {func(_ string, d doc) { d["mounts"] = mount("/x", "nosuid", "nodev") }, "size"},
		"a mount with dev":       {func(_ string, d doc) { d["mounts"] = mount("/x", "nosuid", "nodev", "size=1", "dev") }, "dev"},
		"a mount, mode 4755":     {func(_ string, d doc) { d["mounts"] = mount("/x", "nosuid", "nodev", "size=1", "mode=4755") }, "mode"},
		"an option in an option": {func(_ string, d doc) { d["mounts"] = mount("/x", "nosuid", "nodev", "size=1,exec") }, "size=1,exec"},
		"mounts in one another": {func(_ string, d doc) {
			d["mounts"] = append(mount("/x", "nosuid", "nodev", "size=1").([]any), mount("/x/y", "nosuid", "nodev", "size=1").([]any)...)
		}, "one another"},
		"a filter of nobody":      {func(_ string, d doc) { d["seccomp"] = "nobody" }, "nobody"},
		"a borrowed filter":       {func(_ string, d doc) { d["seccomp"] = Build }, Build},
		"no filter":               {func(_ string, d doc) { delete(d, "seccomp") }, "mine.seccomp.amd64.json"},
		"a filter beside another": {func(dir string, _ doc) { write(t, dir, "mine.seccomp.amd64.json", []byte("{}")) }, "not used"},
		"a filter without a profile": {func(dir string, _ doc) {
			write(t, dir, "yours.seccomp.amd64.json", embedded(t, "default.seccomp.amd64.json"))
		}, "yours"},
		"an empty filter": {func(dir string, d doc) {
			delete(d, "seccomp")
			write(t, dir, "mine.seccomp.amd64.json", []byte("{}"))
		}, "architectures"},
		"a filter that allows everything": {func(dir string, d doc) {
			delete(d, "seccomp")
			write(t, dir, "mine.seccomp.amd64.json", []byte(`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"]}`))
		}, "SCMP_ACT_ALLOW"},
		"a filter with more": {func(dir string, d doc) {
			delete(d, "seccomp")
			write(t, dir, "mine.seccomp.amd64.json", append(embedded(t, "default.seccomp.amd64.json"), "{}"...))
		}, "follows"},
		"a filter with mount": {func(dir string, d doc) {
			delete(d, "seccomp")
			text := strings.Replace(string(embedded(t, "default.seccomp.amd64.json")), `"chdir"`, `"chdir", "mount"`, 1)
			write(t, dir, "mine.seccomp.amd64.json", []byte(text))
		}, "mount is allowed"},
		"an embedded name":   {func(dir string, _ doc) { write(t, dir, "default.json", embedded(t, "default.json")) }, "embedded"},
		"a name in capitals": {func(dir string, _ doc) { write(t, dir, "Mine.json", embedded(t, "default.json")) }, "lower-case"},
		"a link": {func(dir string, _ doc) {
			if err := os.Symlink("/dev/null", filepath.Join(dir, "link.json")); err != nil {
				t.Fatal(err)
			}
		}, "link"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(own(t, "mine", tc.change), seccomp.AMD64, able)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v; want something about %q", err, tc.want)
			}
		})
	}
	if _, err := open(filepath.Join(t.TempDir(), "nowhere"), seccomp.AMD64, able); err == nil {
		t.Error("a directory that is not there was read")
	}
}
