package cmdtest

import (
	"encoding/json"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// HostedRun is a run of the agent that the fake hosts.
type HostedRun struct {
	api.AgentRun
	Record []json.RawMessage
	// Follow is called after the recorded lines of a run in progress were sent, and ends the run.
	Follow func() []json.RawMessage
}

func (f *Daemon) agentRoutes(mux *http.ServeMux) {
	with := func(h func(http.ResponseWriter, *http.Request, *HostedRun)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for _, run := range f.Runs {
				if run.ID == r.PathValue("run") {
					h(w, r, run)
					return
				}
			}
			refuse(w, api.CodeNotFound, "", "no such agent run: %q", r.PathValue("run"))
		}
	}
	mux.HandleFunc("GET /v1/agent/runs", func(w http.ResponseWriter, _ *http.Request) {
		list := api.AgentRunList{Runs: []api.AgentRun{}}
		for _, run := range f.Runs {
			list.Runs = append(list.Runs, run.AgentRun)
		}
		answerJSON(w, 200, list)
	})
	mux.HandleFunc("GET /v1/agent/runs/{run}", with(func(w http.ResponseWriter, _ *http.Request, run *HostedRun) { answerJSON(w, 200, run.AgentRun) }))
	mux.HandleFunc("POST /v1/agent/runs/{run}/cancel", with(func(w http.ResponseWriter, _ *http.Request, run *HostedRun) { answerJSON(w, 200, run.AgentRun) }))
	mux.HandleFunc("DELETE /v1/agent/runs/{run}", with(func(w http.ResponseWriter, _ *http.Request, _ *HostedRun) { w.WriteHeader(http.StatusNoContent) }))
	mux.HandleFunc("GET /v1/agent/runs/{run}/events", with(func(w http.ResponseWriter, r *http.Request, run *HostedRun) {
		w.Header().Set("Content-Type", api.TypeNDJSON)
		enc := json.NewEncoder(w)
		send := func(lines []json.RawMessage) {
			for i, line := range lines {
				_ = enc.Encode(api.AgentRunEvent{N: i + 1, Event: line})
			}
			_ = http.NewResponseController(w).Flush()
		}
		send(run.Record)
		if run.State == api.AgentRunning {
			if run.Follow == nil {
				<-r.Context().Done()
				return
			}
			send(run.Follow())
			run.State, run.ExitReason = api.AgentEnded, "submitted"
		}
		_ = enc.Encode(api.AgentRunEvent{Run: &run.AgentRun})
	}))
}
