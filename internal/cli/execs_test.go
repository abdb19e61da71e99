package cli

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// execRoutes are one detached exec, "x1", that has written and ended.
func (f *fakeDaemon) execRoutes(mux *http.ServeMux) {
	x := api.Exec{ID: "x1", Sandbox: "sb1", Argv: []string{"sh", "-c", "it's\x1b[2J"}, PID: 7, State: api.ExecExited, Detached: true, Exit: &api.Exit{Code: 9}}
	find := func(h func(http.ResponseWriter, *http.Request)) http.HandlerFunc {
		return f.with(func(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
			if id := r.PathValue("exec"); id != "" && id != x.ID && id != api.MainExec {
				refuse(w, api.CodeNotFound, "", "no such exec: %q", id)
				return
			}
			h(w, r)
		})
	}
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs", find(func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.ExecList{Execs: []api.Exec{x}})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs/{exec}", find(func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, 200, x) }))
	mux.HandleFunc("POST /v1/sandboxes/{id}/execs/{exec}/signal", find(func(w http.ResponseWriter, r *http.Request) {
		var req api.ExecSignal
		_ = json.NewDecoder(r.Body).Decode(&req)
		f.updates = append(f.updates, req.Signal+map[bool]string{true: " all"}[req.All])
		w.WriteHeader(http.StatusNoContent)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs/{exec}/attach", find(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		_ = e.Encode(api.ExecEvent{Exec: x.ID, PID: 7, Offset: 5, Dropped: 5})
		_ = e.Encode(api.ExecEvent{Stream: "stdout", Text: "out\n", Offset: 5})
		_ = e.Encode(api.ExecEvent{Exit: x.Exit, Usage: &api.Usage{}})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/logs", find(func(w http.ResponseWriter, r *http.Request) {
		f.updates = append(f.updates, r.URL.RawQuery)
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		_ = e.Encode(api.LogEntry{Time: time.Unix(1, 0).UTC(), Stream: "stdout", Text: "one\ntw", Dropped: 7})
		_ = e.Encode(api.LogEntry{Time: time.Unix(2, 0).UTC(), Stream: "stderr", Data: []byte("\xff\n")})
		_ = e.Encode(api.LogEntry{Time: time.Unix(3, 0).UTC(), Stream: "stdout", Text: "o\nthree\n"})
		if r.URL.Query().Get("follow") != "" {
			_ = e.Encode(api.LogEntry{Error: &api.Problem{Code: api.CodeUnavailable, Detail: "the daemon is stopping"}})
		}
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/wait", f.with(func(w http.ResponseWriter, _ *http.Request, s api.Sandbox) {
		if s.State = api.StateStopped; s.Name != "idle" {
			s.Exit = &api.SandboxExit{Exit: api.Exit{Code: 137, Signal: "SIGKILL"}}
		}
		answerJSON(w, 200, s)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/processes", find(func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.ProcessList{Processes: []api.Process{
			{PID: 7, PPID: 1, State: "S", Name: "sh", Argv: []string{"sh", "-c", "a b"}, CPUMS: 1234, RSS: 2 << 20, Exec: "x1"},
			{PID: 8, PPID: 7, State: "Z", Name: "gone\x1b"},
		}})
	}))
}

func TestExecCommands(t *testing.T) {
	for name, tc := range map[string]struct {
		args           string
		stdout, stderr string // parts of it
		code           int
		asked          string // the signal that was asked for
	}{
		"detach":               {"exec -d sb1 -- echo", "x1\n", "", 0, ""},
		"detach, json":         {"exec -d --json sb1 -- echo", `"id": "x1"`, "", 0, ""},
		"detach in nothing":    {"exec -d nope -- echo", "", "nope", 125, ""},
		"limit without number": {"exec --rlimit nofile sb1 -- echo", "", "nofile", 125, ""},
		"execs":                {"execs sb1", `exited (9)`, "", 0, ""},
		"execs, quoted":        {"execs sb1", `sh -c 'it'\''s\x1b[2J'`, "", 0, ""},
		"execs, quiet":         {"execs -q sb1", "x1\n", "", 0, ""},
		"execs, json":          {"execs --json sb1", `"id": "x1"`, "", 0, ""},
		"execs of nothing":     {"execs nope", "", "nope", 1, ""},
		"execs without":        {"execs", "", "accepts 1 arg", 2, ""},
		"attach, json":         {"attach --json sb1 x1", `"text":"out\n"`, "", 9, ""},
		"attach to main":       {"attach --json sb1", `"text":"out\n"`, "", 9, ""},
		"attach, both":         {"attach --json -i sb1 x1", "", "--json", 125, ""},
		"attach to nothing":    {"attach sb1 x2", "", "x2", 125, ""},
		"logs":                 {"logs sb1", "one\ntwo\nthree\n", "7 bytes", 0, ""},
		"logs, stderr":         {"logs sb1", "", "\xff\n", 0, ""},
		"logs, with times":     {"logs --timestamps sb1", "1970-01-01T00:00:01Z one\n1970-01-01T00:00:01Z two\n1970-01-01T00:00:03Z three\n", "1970-01-01T00:00:02Z \xff\n", 0, ""},
		"logs, some":           {"logs --tail 3 --since 2020-01-02T03:04:05Z sb1", "three\n", "7 bytes", 0, "since=2020-01-02T03%3A04%3A05Z&tail=3"},
		"logs, json":           {"logs --json sb1", `"text":"one\ntw","dropped":7}`, "", 0, ""},
		"logs, cut off":        {"logs -f sb1", "three\n", "stopping", 1, "follow=true"},
		"logs, bad tail":       {"logs --tail -1 sb1", "", "--tail", 2, ""},
		"logs, bad since":      {"logs --since yesterday sb1", "", "--since", 2, ""},
		"logs of nothing":      {"logs nope", "", "nope", 1, ""},
		"wait":                 {"wait sb1", "137\n", "", 0, ""},
		"wait, json":           {"wait --json sb1", `"signal": "SIGKILL"`, "", 0, ""},
		"wait for nothing":     {"wait nope", "", "nope", 1, ""},
		"kill":                 {"kill sb1 x1", "", "", 0, "SIGKILL all"},
		"kill with a signal":   {"kill -s HUP sb1 x1", "", "", 0, "HUP"},
		"signal to all":        {"kill -s HUP --all sb1 x1", "", "", 0, "HUP all"},
		"all without a signal": {"kill --all sb1 x1", "", "--signal", 2, ""},
		"top":                  {"top sb1", "1.23s", "", 0, ""},
		"top, hostile":         {"top sb1", `[gone\x1b]`, "", 0, ""},
		"top, json":            {"top --json sb1", `"pid": 7`, "", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			oneSandbox(f)
			got := finish(t, command(t, f.start(t), strings.Fields(tc.args)...))
			if got.code != tc.code || !strings.Contains(got.stdout, tc.stdout) || !strings.Contains(got.stderr, tc.stderr) || (tc.stderr == "") != (got.stderr == "") {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.code, tc.code, got.stdout, got.stderr)
			}
			if asked := strings.Join(f.updates, ";"); asked != tc.asked {
				t.Errorf("asked for %q", asked)
			}
		})
	}
}
