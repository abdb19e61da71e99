package docker

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// onDaemon returns a face whose daemon is routes. Other requests are a test's failure.
func onDaemon(t *testing.T, routes map[string]http.HandlerFunc) http.Handler {
	t.Helper()
	mux := http.NewServeMux()
	for pattern, handle := range routes {
		mux.HandleFunc(pattern, handle)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("the daemon was asked for %s %s", r.Method, r.URL)
		w.WriteHeader(http.StatusNotImplemented)
	})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}}
	server.Start()
	t.Cleanup(server.Close)
	c := client.New(socket)
	t.Cleanup(c.Close)
	return New(Options{Client: c, Network: api.Network{Mode: api.NetworkFull}}).Handler()
}

func answer(v any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", api.TypeJSON)
		_ = json.NewEncoder(w).Encode(v)
	}
}

// A container that cannot leave its last network keeps its way out.
func TestDisconnectThatFails(t *testing.T) {
	for _, tc := range []struct {
		code api.Code
		want []api.Network // modes in turn
	}{
		{api.CodeConflict, []api.Network{{Mode: api.NetworkNone}, {Mode: api.NetworkEgress, Policy: "p"}}},
		{api.CodeNotFound, []api.Network{{Mode: api.NetworkNone}}}, // it has left
	} {
		var set []api.Network
		sb := api.Sandbox{
			ID: "abcdefghjkmn", Name: "web", State: api.StateRunning,
			Network:  api.Network{Mode: api.NetworkEgress, Policy: "p", Join: []string{"net"}},
			Settings: api.Settings{Annotations: map[string]string{annotationRequest: `{"HostConfig":{"NetworkMode":"net"}}`}},
		}
		f := onDaemon(t, map[string]http.HandlerFunc{
			"GET /v1/networks":      answer(api.NetworkList{Networks: []api.NamedNetwork{{Name: "net"}}}),
			"GET /v1/sandboxes/web": answer(sb),
			"PATCH /v1/sandboxes/abcdefghjkmn": func(w http.ResponseWriter, r *http.Request) {
				var in api.UpdateSandbox
				if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in.Network == nil {
					t.Errorf("update: %+v, %v", in, err)
					return
				}
				set = append(set, *in.Network)
				answer(sb)(w, r)
			},
			"POST /v1/networks/net/disconnect": func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/problem+json")
				w.WriteHeader(tc.code.Status())
				_ = json.NewEncoder(w).Encode(api.Problem{Code: tc.code, Status: tc.code.Status(), Detail: "not now"})
			},
		})
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/networks/net/disconnect", strings.NewReader(`{"Container":"web"}`))
		r.Header.Set("Content-Type", "application/json")
		f.ServeHTTP(w, r)
		if w.Code != tc.code.Status() || !strings.Contains(w.Body.String(), "not now") {
			t.Errorf("%s: %d %s", tc.code, w.Code, w.Body)
		}
		if diff := cmp.Diff(tc.want, set); diff != "" {
			t.Errorf("%s: (-want +got):\n%s", tc.code, diff)
		}
	}
}

// An end without a code has that of its own container's end, and costs requests only if the client
// wants it.
func TestExitCodesOfEvents(t *testing.T) {
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0).UTC() }
	now := time.Now().Add(time.Hour) // after the client has asked
	stopped := func(id string, at time.Time) api.Event {
		return api.Event{Time: at, Type: api.EventSandbox, Action: api.ActionStopped, Object: id, Name: id, State: api.StateStopped}
	}
	events := []api.Event{
		stopped("ended", at(10)), // it ended with 1, and was started again
		stopped("ended", at(30)), // with 7
		stopped("runs", at(40)),
		stopped("runs", now),
		stopped("other", at(50)),
	}
	var asked []string
	sandbox := func(id string, sb api.Sandbox) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, id)
			answer(sb)(w, r)
		}
	}
	ended := sandbox("ended", api.Sandbox{ID: "ended", State: api.StateStopped, StartedAt: at(20), Exit: &api.SandboxExit{Exit: api.Exit{Code: 7}}})
	f := onDaemon(t, map[string]http.HandlerFunc{
		"GET /v1/events": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.TypeNDJSON)
			for i := range events {
				_ = json.NewEncoder(w).Encode(events[i])
			}
		},
		"GET /v1/sandboxes/ended":      ended,
		"GET /v1/sandboxes/ended/wait": ended,
		"GET /v1/sandboxes/runs":       sandbox("runs", api.Sandbox{ID: "runs", State: api.StateRunning, StartedAt: at(45)}),
	})
	w := httptest.NewRecorder()
	filters := url.QueryEscape(`{"container":["ended","runs"],"event":["die"]}`)
	f.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/events?since=1&until=100&filters="+filters, http.NoBody))
	var got []string
	for lines := json.NewDecoder(w.Body); lines.More(); {
		var e struct {
			Action string
			Actor  struct{ Attributes map[string]string }
		}
		if err := lines.Decode(&e); err != nil {
			t.Fatal(err)
		}
		code, known := e.Actor.Attributes["exitCode"]
		got = append(got, fmt.Sprintf("%s %s %q %v", e.Action, e.Actor.Attributes["name"], code, known))
	}
	want := []string{`die ended "" false`, `die ended "7" true`, `die runs "" false`, `die runs "137" true`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := []string{"ended", "ended", "ended", "runs", "runs"}; !slices.Equal(asked, want) {
		t.Errorf("the daemon was asked for %v", asked)
	}
	asked = nil
	for _, filters := range []string{`{"event":["start"]}`, `{"type":["image"]}`, `{"container":["none"]}`} {
		f.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/events?since=1&until=100&filters="+url.QueryEscape(filters), http.NoBody))
	}
	if len(asked) != 0 {
		t.Errorf("events that no client wants: the daemon was asked for %v", asked)
	}
}
