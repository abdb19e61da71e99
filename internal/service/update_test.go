package service_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestUpdateOverTheSocket(t *testing.T) {
	b := daemontest.New(t, nil)
	r := b.Start()
	one := r.Create(api.CreateSandbox{Name: "one", Labels: map[string]string{"a": "1", "b": "2"}, Limits: api.Limits{CPUs: 0.5}})
	began := time.Now()
	got := daemontest.Decode[api.Sandbox](t, r.Do("PATCH", "/v1/sandboxes/one", json.RawMessage(
		`{"limits":{"cpus":0,"pids":0,"memory":67108864,"oom_group":true,"cpuset":"0-1"},"labels":{"a":null,"c":"3"},"timeout":7200,"idle_timeout":60}`)), 200)
	if got.Limits != (api.Limits{Memory: 64 << 20, OOMGroup: true, CPUSet: "0-1", Pids: 512}) {
		t.Errorf("limits: %+v; 0 cpus are no ceiling, 0 pids the profile's", got.Limits)
	}
	if _, there := got.Labels["a"]; there || got.Labels["b"] != "2" || got.Labels["c"] != "3" {
		t.Errorf("labels: %v", got.Labels)
	}
	if left := got.Deadline.Sub(began); left < 7199*time.Second || left > 7300*time.Second || got.IdleTimeout != 60 {
		t.Errorf("deadline in %s, idle timeout %v", left, got.IdleTimeout)
	}
	// Nothing named, nothing changed.
	if again := daemontest.Decode[api.Sandbox](t, r.Do("PATCH", "/v1/sandboxes/"+one.ID, json.RawMessage(`{}`)), 200); again.Limits != got.Limits || !again.Deadline.Equal(got.Deadline) {
		t.Errorf("%+v after an empty change of %+v", again, got)
	}
	daemontest.Problem(t, r.Do("PATCH", "/v1/sandboxes/nobody", json.RawMessage(`{}`)), api.CodeNotFound)
	b.Engine.UpdateError = func(*runtime.Change) error { return fmt.Errorf("apply limits: %w", runtime.ErrInUse) }
	if p := daemontest.Problem(t, r.Do("PATCH", "/v1/sandboxes/one", json.RawMessage(`{"limits":{"memory":16777216}}`)), api.CodeConflict); !strings.Contains(p.Hint, "nothing was changed") {
		t.Errorf("%+v", p)
	}
}

// One of the io limits is changed and the others stay.
func TestUpdateOfOneIOLimitKeepsTheOthers(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	r.Create(api.CreateSandbox{Name: "one", Limits: api.Limits{IO: api.IOLimits{Weight: 7, ReadBPS: 1 << 20, WriteBPS: 2 << 20, WriteIOPS: 9}}})
	for _, test := range []struct {
		change string
		want   api.IOLimits
	}{
		{`{"read_iops":5}`, api.IOLimits{Weight: 7, ReadBPS: 1 << 20, WriteBPS: 2 << 20, ReadIOPS: 5, WriteIOPS: 9}},
		{`{"write_bps":0,"weight":8}`, api.IOLimits{Weight: 8, ReadBPS: 1 << 20, ReadIOPS: 5, WriteIOPS: 9}},
		{`{}`, api.IOLimits{Weight: 8, ReadBPS: 1 << 20, ReadIOPS: 5, WriteIOPS: 9}},
		{`{"weight":0,"read_bps":0,"read_iops":0,"write_iops":0}`, api.IOLimits{}},
	} {
		got := daemontest.Decode[api.Sandbox](t, r.Do("PATCH", "/v1/sandboxes/one", json.RawMessage(`{"limits":{"io":`+test.change+`}}`)), 200)
		if got.Limits.IO != test.want {
			t.Errorf("%s makes %+v, want %+v", test.change, got.Limits.IO, test.want)
		}
	}
}

func TestBadUpdatesAreRefused(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	r.Create(api.CreateSandbox{Name: "one", Labels: map[string]string{"there": "1"}})
	var many []string
	for i := range service.MaxLabels {
		many = append(many, fmt.Sprintf(`"k%d":"v"`, i))
	}
	for body, says := range map[string]string{
		`{"limits":{"nofile":100}}`:                    "nofile",
		`{"limits":{"memory":1}}`:                      "memory",
		`{"limits":{"swap":-1}}`:                       "swap",
		`{"limits":{"disk":1}}`:                        "disk",
		`{"name":"two"}`:                               "name",
		`{"timeout":-2}`:                               "timeout",
		`{"idle_timeout":1e12}`:                        "idle_timeout",
		`{"labels":{"=":"v"}}`:                         "label",
		`{"labels":{` + strings.Join(many, ",") + `}}`: "labels", // with the one there is
	} {
		if p := daemontest.Problem(t, r.Do("PATCH", "/v1/sandboxes/one", json.RawMessage(body)), api.CodeInvalid); !strings.Contains(p.Detail, says) {
			t.Errorf("%s: %q does not say %q", body, p.Detail, says)
		}
	}
}

// Both ways in check the new limits alike.
func TestBadLimitsAreRefused(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	r.Create(api.CreateSandbox{Name: "one"})
	for limits, says := range map[string]string{
		`{"memory_high":1}`: "memory_high", `{"cpu_weight":-1}`: "cpu_weight", `{"cpu_weight":10001}`: "cpu_weight",
		`{"cpuset":"0-"}`: "cpuset", `{"cpuset":"1-0"}`: "cpuset", `{"cpuset":"` + strings.Repeat("1,", 600) + `1"}`: "cpuset",
		`{"cpuset":"0\n1"}`: "cpuset", `{"cpuset":"9999"}`: "cpuset",
		`{"io":{"weight":10001}}`: "io.weight", `{"io":{"read_bps":1}}`: "read_bps", `{"io":{"write_iops":-1}}`: "write_iops",
		`{"io":{"read_iops":4294967296}}`: "read_iops", `{"io":{"write_bps":-5}}`: "write_bps", `{"io":{"speed":5}}`: "speed",
	} {
		for _, rep := range []daemontest.Reply{
			r.Do("POST", "/v1/sandboxes", json.RawMessage(`{"limits":`+limits+`}`)), r.Do("PATCH", "/v1/sandboxes/one", json.RawMessage(`{"limits":`+limits+`}`)),
		} {
			if p := daemontest.Problem(t, rep, api.CodeInvalid); !strings.Contains(p.Detail, says) {
				t.Errorf("%s: %q does not say %q", limits, p.Detail, says)
			}
		}
	}
}

func TestStatsOverTheSocket(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	one := r.Create(api.CreateSandbox{Name: "one"})
	for _, ref := range []string{"one", one.ID} {
		if st := daemontest.Decode[api.Stats](t, r.Do("GET", "/v1/sandboxes/"+ref+"/stats", nil), 200); st.WallMS <= 0 || st.Memory != nil {
			t.Errorf("%+v", st)
		}
	}
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/nobody/stats", nil), api.CodeNotFound)
}
