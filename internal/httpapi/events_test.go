package httpapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// eventsOf returns the answer to a request for events.
func eventsOf(r *daemontest.Running, query string) []api.Event {
	r.T.Helper()
	return daemontest.Events[api.Event](r.T, r.Do("GET", "/v1/events"+query, nil))
}

// brief returns events in words: type, action, object, and what else is fixed in tests. Names
// replace ids.
func brief(list []api.Event, names map[string]string) (out []string) {
	name := func(id string) string {
		if n, ok := names[id]; ok {
			return n
		}
		return id
	}
	for _, e := range list {
		line := fmt.Sprintf("%s %s", e.Type, e.Action)
		if e.Type != api.EventExec { // whose ids are random
			line += " " + name(e.Object)
		}
		for _, more := range []string{e.Name, name(e.Sandbox), e.Program, e.From, e.Reason} {
			if more != "" {
				line += " " + more
			}
		}
		if e.Code != nil {
			line += " " + strconv.Itoa(*e.Code)
		}
		out = append(out, line)
	}
	return out
}

func TestEvents(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.RuntimeDir = shortDir(t)
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Name: "one", Labels: map[string]string{"team": "a"}})
	r.Exec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "exit 3"}})
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/rename", api.RenameSandbox{Name: "two"}), 200)
	r.Until(r.Detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "kill -TERM $$"}, Detach: true}), daemontest.Exited)
	daemontest.Decode[api.Sandbox](t, r.Do("PATCH", "/v1/sandboxes/two", api.UpdateSandbox{Labels: map[string]*string{"team": new("b")}}), 200)
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/two/stop", api.StopSandbox{Grace: new(0.0)}), 200)
	if rep := r.Do("DELETE", "/v1/sandboxes/two", nil); rep.Status != http.StatusNoContent {
		t.Errorf("delete: %d", rep.Status)
	}
	names := map[string]string{sb.ID: "SB"}
	want := []string{
		"sandbox created SB one",
		"exec started SB sh",
		"exec ended SB sh 3",
		"sandbox renamed SB two one",
		"exec started SB sh",
		"exec ended SB sh SIGTERM 143",
		"sandbox updated SB two",
		"sandbox stopped SB two stopped",
		"sandbox deleted SB two",
	}
	all := eventsOf(r, "")
	if d := cmp.Diff(want, brief(all, names)); d != "" {
		t.Fatalf("events (-want +got):\n%s", d)
	}
	for _, tc := range []struct {
		query string
		want  []string
	}{
		{"?tail=2", want[7:]},
		{"?since=" + strconv.FormatUint(all[5].ID, 10), want[6:]},
		{"?since=" + all[6].Time.Format(time.RFC3339Nano), want[6:]},
		{"?until=2001-01-01T00:00:00Z", nil},
		{"?filter=type=exec&filter=action=ended", []string{want[2], want[5]}},
		{"?filter=action=created&filter=action=deleted", []string{want[0], want[8]}},
		{"?filter=label=team=a", []string{want[0], want[3]}},
		{"?filter=label=team&filter=name=one", want[:1]},
		{"?filter=sandbox=" + sb.ID + "&tail=1", want[8:]},
		{"?filter=image=host&filter=action=created", want[:1]},
		{"?filter=object=none", nil},
	} {
		if d := cmp.Diff(tc.want, brief(eventsOf(r, tc.query), names)); d != "" {
			t.Errorf("%s (-want +got):\n%s", tc.query, d)
		}
	}
	for _, bad := range []string{"?since=yesterday", "?until=5", "?filter=x", "?filter=color=red", "?tail=-1", "?follow=1", "?nonsense=1"} {
		daemontest.Problem(t, r.Do("GET", "/v1/events"+bad, nil), api.CodeInvalid)
	}

	// A client that was cut off goes on with the next daemon where it was.
	r.D.Shutdown(api.Shutdown{})
	r.Wait()
	r = b.Start()
	other := r.Create(api.CreateSandbox{Name: "later"})
	got := brief(eventsOf(r, "?since="+strconv.FormatUint(all[7].ID, 10)), map[string]string{sb.ID: "SB", other.ID: "LATER"})
	if d := cmp.Diff([]string{want[8], "sandbox created LATER later"}, got); d != "" {
		t.Errorf("after a restart (-want +got):\n%s", d)
	}
}

// TestEventsOfImagesAndSecrets: what the service does beside sandboxes. No value of a secret is
// in the record.
func TestEventsOfImagesAndSecrets(t *testing.T) {
	b := daemontest.New(t, nil)
	r := b.Start()
	b.Images.PullImage = func(image.PullOptions) (*image.Image, error) {
		return &image.Image{Image: api.Image{Reference: "example.org/app:1"}}, nil
	}
	const value = "s3cret-value-of-a-test"
	for _, call := range []struct {
		method, path string
		body         any
	}{
		{"PUT", "/v1/secrets/token", api.SetSecret{Kind: api.SecretBearer, Host: "api.example.org", Value: value}},
		{"DELETE", "/v1/secrets/token", nil},
		{"DELETE", "/v1/secrets/token", nil}, // there is none
		{"POST", "/v1/images/pull", api.PullImage{Reference: "example.org/app:1"}},
	} {
		r.Do(call.method, call.path, call.body)
	}
	got := brief(eventsOf(r, ""), nil)
	want := []string{"secret set token", "secret removed token", "image pulled example.org/app:1"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	files, err := filepath.Glob(filepath.Join(r.Options.DataDir, "events", "*", "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	if data, err := os.ReadFile(files[0]); err != nil || strings.Contains(string(data), value) {
		t.Errorf("the record has the value, or cannot be read: %v", err)
	}
	if fi, err := os.Stat(files[0]); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

// TestFollowEvents: the shipped client sees events as they come, until the daemon stops.
func TestFollowEvents(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Options.RuntimeDir = shortDir(t)
	r := b.Start()
	c := client.New(r.D.Socket())
	defer c.Close()
	first := r.Create(api.CreateSandbox{Name: "first"})
	got, done := make(chan api.Event), make(chan error, 1)
	go func() {
		done <- c.Events(t.Context(), client.EventOptions{Follow: true, Filters: []string{"type=sandbox"}}, func(e api.Event) error {
			got <- e
			return nil
		})
	}()
	if e := <-got; e.Object != first.ID { // from here on it follows
		t.Errorf("%+v", e)
	}
	second := r.Create(api.CreateSandbox{Name: "second"})
	if e := <-got; e.Object != second.ID || e.Action != api.ActionCreated || e.State != api.StateRunning || e.Image != api.HostImage {
		t.Errorf("%+v", e)
	}
	r.D.Shutdown(api.Shutdown{})
	for open := true; open; {
		select {
		case <-got: // the sandboxes' ends, perhaps
		case err := <-done:
			if !errors.Is(err, &api.Problem{Code: api.CodeUnavailable}) {
				t.Errorf("at the end: %v", err)
			}
			open = false
		}
	}
	r.Wait()
}

// TestFollowerThatLeaves: a client that goes away leaves nothing behind; [daemontest.New] counts
// goroutines.
func TestFollowerThatLeaves(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	r.Create(api.CreateSandbox{})
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", "http://sandboxd/v1/events?follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	var e api.Event
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Action != api.ActionCreated {
		t.Errorf("%+v, %v", e, err)
	}
	cancel()
	_ = resp.Body.Close()
}

// TestTenantsSeeTheirEventsOnly: a tenant can neither see nor push out another one's events.
func TestTenantsSeeTheirEventsOnly(t *testing.T) {
	testenv.RequireRoot(t)
	b := daemontest.New(t, nil)
	b.Options.Socket = filepath.Join(openDir(t), "api.sock")
	b.Options.Tenants = httpapi.Tenants{UIDs: []uint32{40001, 40002}}
	r := b.Start()
	all := map[string]*daemontest.Running{"operator": r, "one": as(r, 40001, 40001), "two": as(r, 40002, 40001)}
	ids := map[string]string{}
	for name, of := range all {
		ids[of.Create(api.CreateSandbox{Name: "box"}).ID] = name
	}
	for name, of := range all {
		if d := cmp.Diff([]string{"sandbox created " + name + " box"}, brief(eventsOf(of, ""), ids)); d != "" {
			t.Errorf("events of %s (-want +got):\n%s", name, d)
		}
		for id := range ids {
			if got := eventsOf(of, "?filter=sandbox="+id); len(got) > 0 && ids[id] != name {
				t.Errorf("%s sees %+v", name, got)
			}
		}
	}
}
