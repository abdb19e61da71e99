package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

// Variables and labels are parsed as by run.
func TestCommitRequest(t *testing.T) {
	lookup := func(name string) (string, bool) { return "here", name == "SET" }
	opts := commitOptions{labels: []string{"a=b=c", "flag"}}
	opts.request.Config.Env = []string{"A=b", "SET", "UNSET"}
	got, err := opts.complete("team/app:1", lookup)
	want := api.CommitSandbox{Reference: "team/app:1", Config: api.ImageConfig{
		Env: []string{"A=b", "SET=here"}, Labels: map[string]string{"a": "b=c", "flag": ""},
	}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v, (-want +got):\n%s", err, diff)
	}
	for _, bad := range []commitOptions{{labels: []string{"=x"}}, {request: api.CommitSandbox{Config: api.ImageConfig{Env: []string{"=x"}}}}} {
		if _, err := bad.complete("a", lookup); err == nil || !strings.Contains(err.Error(), "=x") {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
