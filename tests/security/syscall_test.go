package security

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/seccomp"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// profiles are those that attacks are tried under, as far as the host can apply them.
func profiles(t *testing.T, d *harness.Daemon) []string {
	t.Helper()
	if d.System(t).Enforced.IDs == "single" {
		return []string{"default"}
	}
	return []string{"default", "hardened"}
}

// The active filter is the planned one: every system call but sync is made from inside, and
// answers as planned. Those that reach the kernel are counted; SECURITY.md states the numbers.
func TestReachableSystemCalls(t *testing.T) {
	testenv.RequireUserNS(t)
	program := harness.Helper(t, "attacker")
	d := harness.Start(t, harness.Options{})
	for _, profile := range profiles(t, d) {
		t.Run(profile, func(t *testing.T) {
			t.Parallel() // some calls wait, until they are given up
			var shown api.Profile
			if err := d.Call(t.Context(), "GET", "/v1/profiles/"+profile, nil, &shown); err != nil {
				t.Fatal(err)
			}
			plan := new(specs.LinuxSeccomp)
			if err := json.Unmarshal(shown.Seccomp, plan); err != nil {
				t.Fatal(err)
			}
			s := d.Create(t, api.CreateSandbox{Profile: profile})
			limit := testenv.HungAfter.Seconds()
			result := s.Exec(t, api.ExecRequest{Argv: append([]string{plant(t, s, program)}, attack.Calls()...), Timeout: limit})
			var measured attack.Measured
			if err := json.Unmarshal([]byte(result.Stdout), &measured); err != nil {
				t.Fatalf("%v; exit %+v, stderr %s", err, result.Exit, result.Stderr)
			}
			judged := measured.Judge(plan)
			for _, wrong := range judged.Wrong {
				t.Error(wrong)
			}
			reached, unclear := len(judged.Reached), judged.Unclear
			t.Logf("%s on %s: %d system calls reach the kernel, %d are planned; that they do cannot be told of %v",
				profile, measured.Arch, reached, shown.Syscalls, unclear)
			if reached+len(unclear) > shown.Syscalls || reached < shown.Syscalls-20 {
				t.Errorf("%d reach the kernel and %d may; %d are planned", reached, len(unclear), shown.Syscalls)
			}
			if profile == "hardened" && reached+len(unclear) > 180 {
				t.Errorf("%d reach the kernel and %d may", reached, len(unclear))
			}
			// What SECURITY.md claims: no profile opens a call that Docker's default keeps closed.
			if more := attack.Beyond(judged.Open(), attack.DockerCalls(measured.Arch)); measured.Arch == seccomp.AMD64 && len(more) > 0 {
				t.Errorf("Docker's default filter refuses %v", more)
			}
		})
	}
}

// plant puts a program into the sandbox.
func plant(t *testing.T, s *harness.Sandbox, program string) string {
	t.Helper()
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	const path = "/tmp/attacker"
	if err := s.Put(t.Context(), path, data); err != nil {
		t.Fatalf("put the attacker: %v", err)
	}
	s.Sh(t, strings.Join([]string{"chmod", "755", path}, " "))
	return path
}
