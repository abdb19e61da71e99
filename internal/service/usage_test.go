package service_test

import (
	"net/http"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// Counters of all are those of sandboxes that have processes; one that is named must have some.
func TestStatsOfAllSandboxes(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	for _, name := range []string{"runs", "paused", "ended"} {
		r.Create(api.CreateSandbox{Name: name})
	}
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/paused/pause", nil), http.StatusOK)
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/ended/stop", map[string]int{"grace": 0}), http.StatusOK)
	names := func(query string) (names string) {
		t.Helper()
		for _, st := range daemontest.Decode[api.StatsList](t, r.Do("GET", "/v1/stats"+query, nil), http.StatusOK).Sandboxes {
			if st.WallMS <= 0 || st.ID == "" {
				t.Errorf("%+v", st)
			}
			names += st.Name + " "
		}
		return names
	}
	if got := names(""); got != "runs paused " {
		t.Errorf("all: %q", got)
	}
	if got := names("?sandbox=paused&sandbox=runs"); got != "paused runs " {
		t.Errorf("two: %q", got)
	}
	daemontest.Problem(t, r.Do("GET", "/v1/stats?sandbox=ended", nil), api.CodeConflict)
	daemontest.Problem(t, r.Do("GET", "/v1/stats?sandbox=nowhere", nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("GET", "/v1/stats?all=1", nil), api.CodeInvalid)

	u := daemontest.Decode[api.DiskUsage](t, r.Do("GET", "/v1/system/df", nil), http.StatusOK)
	if u.Images.Bytes != 300 || u.Sandboxes.Count != 3 || u.Sandboxes.Active != 2 || len(u.Files) != 3 {
		t.Errorf("disk: %+v", u)
	}
	for _, f := range u.Files {
		if f.Unknown == "" || f.Bytes != 0 {
			t.Errorf("the engine in memory has no files: %+v", f)
		}
	}
}
