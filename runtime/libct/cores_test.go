package libct

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/seccomp"
)

// A crash is reported to start nothing only where the limit of 1 byte can be had, has an effect and
// stays.
func TestCoresAreJudged(t *testing.T) {
	ours, err := seccomp.Plan(seccomp.Default(), seccomp.AMD64, seccomp.Abilities{Actions: []string{"allow", "errno"}})
	if err != nil {
		t.Fatal(err)
	}
	open := *ours
	open.Syscalls = append([]specs.LinuxSyscall{{Names: []string{"prlimit64"}, Action: specs.ActAllow}}, ours.Syscalls...)
	for name, tc := range map[string]struct {
		pattern string
		limit   uint64
		filter  *specs.LinuxSeccomp
		want    string
		missing string
	}{
		"a file":                      {"core", 0, ours, api.CoresNone, ""},
		"a program":                   {"|/usr/lib/systemd/systemd-coredump %P", unix.RLIM_INFINITY, ours, api.CoresNone, ""},
		"a program, and the typical":  {"|/h", 1, nil, api.CoresNone, ""},
		"a program, no limit":         {"|/h", 0, ours, api.CoresHost, "LimitCORE"},
		"a program, an open filter":   {"|/h", 1, &open, api.CoresHost, "prlimit64"},
		"a service":                   {"@/run/cores", unix.RLIM_INFINITY, ours, api.CoresHost, "core_pattern=core"},
		"a service that is asked":     {"@@/run/cores", unix.RLIM_INFINITY, ours, api.CoresHost, "core_pattern=core"},
		"a file, and an open filter ": {"/var/cores/%p", unix.RLIM_INFINITY, &open, api.CoresNone, ""},
	} {
		host := Host{Core: tc.limit, CorePattern: tc.pattern}
		got, missing := host.cores(tc.filter)
		if got != tc.want || !strings.Contains(missing, tc.missing) || (missing == "") != (tc.want == api.CoresNone) {
			t.Errorf("%s: %q, %q", name, got, missing)
		}
		if limit := coreLimit(&host); limit.Hard != min(1, tc.limit) || limit.Soft != limit.Hard {
			t.Errorf("%s: %+v", name, limit)
		}
	}
}

// An update knows no filter; what the creation found stays, with its reason, once.
func TestUpdateKeepsTheReasonOfCores(t *testing.T) {
	for name, created := range map[string]api.Enforced{
		"the filter's": {Cores: api.CoresHost, Missing: []string{"io limit: a", coresReason + "b"}},
		"none":         {Cores: api.CoresNone, Missing: []string{"io limit: a"}},
	} {
		for _, found := range []string{"", coresReason + "c"} {
			updated := api.Enforced{Cores: api.CoresHost, Missing: []string{"swap limit: d"}}
			want := []string{"swap limit: d"}
			if found != "" {
				updated.Missing = append(updated.Missing, found)
			}
			if created.Cores == api.CoresHost {
				want = append(want, coresReason+"b")
			}
			keepCores(&updated, &created)
			if updated.Cores != created.Cores || !slices.Equal(updated.Missing, want) {
				t.Errorf("%s, %q: %+v", name, found, updated)
			}
		}
	}
}
