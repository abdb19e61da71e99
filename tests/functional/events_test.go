package functional

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// TestEventsSurviveTheDaemon: what happened before the daemon was killed is replayed by the next
// one, ids increase, and what ended meanwhile is told.
func TestEventsSurviveTheDaemon(t *testing.T) {
	testenv.SameForAll(t)
	d := harness.Start(t, harness.Options{})
	list := func(args ...string) []api.Event {
		t.Helper()
		res := d.CLI(t, append([]string{"events", "--no-follow", "--json"}, args...)...)
		if res.Code != 0 {
			t.Fatalf("events: %+v", res)
		}
		var all []api.Event
		for line := range strings.Lines(res.Stdout) {
			var e api.Event
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%v: %q", err, line)
			}
			all = append(all, e)
		}
		return all
	}
	brief := func(all []api.Event) (out []string) {
		var last uint64
		for _, e := range all {
			if e.ID <= last {
				t.Errorf("id %d after %d", e.ID, last)
			}
			last = e.ID
			line := fmt.Sprintf("%s %s %s%s", e.Type, e.Action, e.Name, e.Program)
			if e.Code != nil {
				line += fmt.Sprintf(" %d", *e.Code)
			}
			out = append(out, line)
		}
		return out
	}
	s := d.Create(t, api.CreateSandbox{Name: "one"})
	s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "exit 3"}})
	if res := d.CLI(t, "rename", "one", "two"); res.Code != 0 || res.Stdout != "two\n" {
		t.Errorf("rename: %+v", res)
	}
	before := list()
	want := []string{"sandbox created one", "exec started sh", "exec ended sh 3", "sandbox renamed two"}
	if diff := cmp.Diff(want, brief(before)); diff != "" {
		t.Fatalf("events (-want +got):\n%s", diff)
	}
	d.Kill9(t)
	d.Launch(t)
	if got, err := d.Client(t).GetSandbox(t.Context(), "two"); err != nil || got.ID != s.ID {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
	if res := d.CLI(t, "stop", "-t", "0", "two"); res.Code != 0 {
		t.Errorf("stop: %+v", res)
	}
	after := list("--since", fmt.Sprint(before[3].ID))
	if diff := cmp.Diff([]string{"sandbox stopped two"}, brief(after)); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
	if after[0].Reason != "stopped" || after[0].State != api.StateStopped {
		t.Errorf("%+v", after[0])
	}
	if diff := cmp.Diff(append(want, "sandbox stopped two"), brief(list())); diff != "" {
		t.Errorf("all (-want +got):\n%s", diff)
	}
}

// TestEventsOfAMainProcess: a waiting client sees how a job ended, without asking again and again.
func TestEventsOfAMainProcess(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	got, done := make(chan api.Event, 16), make(chan error, 1)
	job := d.Create(t, api.CreateSandbox{Name: "events-job", Command: []string{"sh", "-c", "exit 7"}})
	go func() {
		c := d.Client(t)
		defer c.Close()
		done <- c.Events(t.Context(), client.EventOptions{Follow: true, Filters: []string{"sandbox=" + job.ID, "action=ended", "action=stopped"}}, func(e api.Event) error {
			got <- e
			return nil
		})
	}()
	seen := map[api.EventType]api.Event{}
	for len(seen) < 2 {
		select {
		case e := <-got:
			seen[e.Type] = e
		case err := <-done:
			t.Fatalf("the client ended: %v", err)
		}
	}
	for _, kind := range []api.EventType{api.EventExec, api.EventSandbox} {
		if e := seen[kind]; e.Code == nil || *e.Code != 7 {
			t.Errorf("%s: %+v", kind, e)
		}
	}
}
