package exec

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
)

func TestExitOf(t *testing.T) {
	for name, tc := range map[string]struct {
		in   host.ExecExit
		oom  bool
		want api.Exit
	}{
		"success":      {host.ExecExit{}, false, api.Exit{}},
		"code":         {host.ExecExit{Code: 3}, false, api.Exit{Code: 3}},
		"signal":       {host.ExecExit{Signal: 9}, true, api.Exit{Code: 137, Signal: "SIGKILL", OOM: true}},
		"timeout":      {host.ExecExit{Signal: 9, Timeout: true}, false, api.Exit{Code: 137, Signal: "SIGKILL", Timeout: true}},
		"odd signal":   {host.ExecExit{Signal: 40}, false, api.Exit{Code: 168, Signal: "SIG40"}},
		"code and oom": {host.ExecExit{Code: 1}, true, api.Exit{Code: 1, OOM: true}},
	} {
		if diff := cmp.Diff(tc.want, exitOf(tc.in, tc.oom)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
