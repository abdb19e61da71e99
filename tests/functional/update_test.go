package functional

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Lifetime, idle timeout and labels can be changed on any host. That changed limits bite,
// tests/limits shows where there are cgroups; a limit that this host cannot hold is refused, and
// then nothing else is changed either.
func TestRunningSandboxIsChanged(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "work", Labels: map[string]string{"old": "1"}})
	if got := d.CLI(t, "update", "work", "--lifetime", "2h", "--idle-timeout", "30m", "--label", "new=2", "--label", "old-"); got.Code != 0 || got.Stdout != s.ID+"\n" {
		t.Fatalf("update: %+v", got)
	}
	now, err := s.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if left := time.Until(now.Deadline); left < 110*time.Minute || left > 2*time.Hour || now.IdleTimeout != 1800 || now.Labels["new"] != "2" || len(now.Labels) != 1 {
		t.Errorf("after the update: ends in %s, %+v", left, now)
	}
	if now.Enforced.Memory == "none" {
		got := d.CLI(t, "update", "work", "--memory", "64m", "--lifetime", "5h", "--label", "third=3")
		if got.Code != 1 {
			t.Errorf("a limit that nothing holds: %+v", got)
		}
		if after, err := s.Inspect(t.Context()); err != nil || !after.Deadline.Equal(now.Deadline) || len(after.Labels) != 1 || after.Limits.Memory != now.Limits.Memory {
			t.Errorf("after a refused update: %+v, %v", after, err)
		}
	}

	out := d.CLI(t, "stats", "work", "--json")
	var st api.Stats
	if err := json.Unmarshal([]byte(out.Stdout), &st); err != nil || out.Code != 0 || st.WallMS <= 0 {
		t.Errorf("stats: %v in %+v", err, out)
	}

	// The changed deadline counts for the next daemon as for this one, and for the launcher without
	// either.
	if got := d.CLI(t, "update", "work", "--lifetime", "2s"); got.Code != 0 {
		t.Fatalf("update: %+v", got)
	}
	pid := s.PID
	d.Kill9(t)
	eventually(t, func() error { return gone(pid) })
	d.Launch(t)
	// Its launcher may still be taking down an ended sandbox.
	eventually(t, func() error {
		if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateStopped || now.Labels["new"] != "2" {
			return fmt.Errorf("after the deadline: %+v, %w", now, err)
		}
		return nil
	})
	if got := d.CLI(t, "update", "work", "--lifetime", "1h"); got.Code != 1 {
		t.Errorf("a sandbox that has ended was changed: %+v", fmt.Sprint(got))
	}
}
