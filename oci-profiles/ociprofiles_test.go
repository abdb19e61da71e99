package ociprofiles

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/seccomp"
)

var update = flag.Bool("update", false, "write the filters from package seccomp")

var able = seccomp.Abilities{Actions: []string{"errno", "allow"}}

// TestFilterIsThePlan keeps the embedded filters and the source that they are generated from together.
func TestFilterIsThePlan(t *testing.T) {
	for _, arch := range []string{seccomp.AMD64, seccomp.ARM64} {
		plan, err := seccomp.Plan(seccomp.Default(), arch, able)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.MarshalIndent(plan, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, '\n')
		file := filterFile(Default, arch)
		if *update {
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		// From the disk, not from what was embedded when the test was built.
		have, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(text), string(have)); diff != "" {
			t.Errorf("%s is not what package seccomp plans; run go generate (-plan +file):\n%s", file, diff)
		}
	}
}

func TestEveryProfileLoads(t *testing.T) {
	for _, name := range Names() {
		for _, arch := range []string{seccomp.AMD64, seccomp.ARM64} {
			p, err := load(name, arch, able)
			if err != nil {
				t.Fatal(err)
			}
			if p.Name != name || p.Seccomp == nil || len(p.Seccomp.Syscalls) == 0 {
				t.Errorf("%s for %s: %+v", name, arch, p)
			}
			for _, list := range [][]string{p.Capabilities, p.MaskedPaths, p.ReadonlyPaths} {
				if !slices.IsSorted(list) || len(slices.Compact(slices.Clone(list))) != len(list) {
					t.Errorf("%s: %v is not sorted and without doubles", name, list)
				}
			}
			for _, c := range p.Capabilities {
				if !strings.HasPrefix(c, "CAP_") {
					t.Errorf("%s: capability %q", name, c)
				}
			}
			for _, path := range slices.Concat(p.MaskedPaths, p.ReadonlyPaths) {
				if !strings.HasPrefix(path, "/proc/") && !strings.HasPrefix(path, "/sys/") {
					t.Errorf("%s: path %q", name, path)
				}
			}
		}
		limits, err := Limits(name)
		if err != nil {
			t.Fatal(err)
		}
		if limits.Memory <= 0 || limits.Pids <= 0 || limits.Nofile == 0 || limits.Swap == nil {
			t.Errorf("%s: limits %+v leave something open", name, limits)
		}
	}
}

// TestDefaultHoldsNoPowerOverTheKernel lists the capabilities by which a user namespace reaches the kernel code that
// most published escapes went through.
func TestDefaultHoldsNoPowerOverTheKernel(t *testing.T) {
	p, err := Load(Default, able)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{
		"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_MODULE", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_BOOT",
		"CAP_DAC_READ_SEARCH", "CAP_BPF", "CAP_PERFMON", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_SETFCAP", "CAP_SETPCAP",
	} {
		if slices.Contains(p.Capabilities, c) {
			t.Errorf("the default profile has %s", c)
		}
	}
	if v := seccomp.Lookup(p.Seccomp, "unshare"); v.Allowed() {
		t.Error("the default profile allows unshare")
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, name := range []string{"", "Default", "../default", "default.seccomp.amd64", "default\x00"} {
		if _, err := Load(name, able); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %v", name, err)
		}
		if _, err := Limits(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("limits of %q: %v", name, err)
		}
	}
	var unsupported *seccomp.UnsupportedError
	if _, err := Load(Default, seccomp.Abilities{}); !errors.As(err, &unsupported) {
		t.Errorf("a kernel without filters: %v", err)
	}
	if _, err := load(Default, "mips", able); err == nil {
		t.Error("loaded for an architecture without a filter")
	}
}
