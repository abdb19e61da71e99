package runtime

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// Clients see the limits that hold, and a record keeps the others.
func TestShownLimits(t *testing.T) {
	limits := api.Limits{Memory: 512 << 20, CPUs: 2, Pids: 100, Nofile: 1000, IO: api.IOLimits{ReadBPS: 1 << 20}}
	for name, tt := range map[string]struct {
		enforced api.Enforced
		want     api.Limits
	}{
		"not yet known": {api.Enforced{}, limits},
		"all":           {api.Enforced{Memory: "cgroup", CPU: "cgroup", CPUSet: "cgroup", Pids: "cgroup", IO: "direct"}, limits},
		"no cgroup":     {api.Enforced{Memory: "none", CPU: "none", CPUSet: "none", Pids: "rlimit", IO: "none"}, api.Limits{Pids: 100, Nofile: 1000}},
		"memory only":   {api.Enforced{Memory: "cgroup", CPU: "none", CPUSet: "none", Pids: "rlimit", IO: "none"}, api.Limits{Memory: 512 << 20, Pids: 100, Nofile: 1000}},
		"asked for":     {api.Enforced{Memory: "none", CPU: "none", CPUSet: "none", Pids: "rlimit", IO: "none"}, api.Limits{CPUs: 2, Pids: 100, Nofile: 1000}},
	} {
		rec := &Record{Sandbox: api.Sandbox{Limits: limits, Enforced: tt.enforced}}
		if name == "asked for" {
			rec.Explicit = api.Limits{CPUs: 2, Memory: 1} // the second was changed since
		}
		if got := rec.Shown().Limits; got != tt.want || rec.Limits != limits {
			t.Errorf("%s: shown %+v, kept %+v", name, got, rec.Limits)
		}
	}
}
