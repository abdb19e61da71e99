package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

func agentPath(parts ...string) []string { return append([]string{"v1", "agent", "runs"}, parts...) }

// StartAgentRun starts a hosted run of the agent. It returns when the run has its sandbox; the run
// does not depend on the caller.
func (c *Client) StartAgentRun(ctx context.Context, req api.StartAgentRun) (*api.AgentRun, error) {
	return fetch[api.AgentRun](ctx, c, request{method: http.MethodPost, path: agentPath(), json: req})
}

// ResumeAgentRun continues a run that is stopped or ended.
func (c *Client) ResumeAgentRun(ctx context.Context, id string, req api.ResumeAgentRun) (*api.AgentRun, error) {
	return fetch[api.AgentRun](ctx, c, request{method: http.MethodPost, path: agentPath(id, "resume"), json: req})
}

// CancelAgentRun asks a run to end; [Client.AgentRunEvents] reports its end. For an ended run it
// does nothing.
func (c *Client) CancelAgentRun(ctx context.Context, id string, req api.CancelAgentRun) (*api.AgentRun, error) {
	return fetch[api.AgentRun](ctx, c, request{method: http.MethodPost, path: agentPath(id, "cancel"), json: req})
}

// GetAgentRun returns one run.
func (c *Client) GetAgentRun(ctx context.Context, id string) (*api.AgentRun, error) {
	return fetch[api.AgentRun](ctx, c, request{method: http.MethodGet, path: agentPath(id)})
}

// AgentRuns returns the runs that the daemon hosts, oldest first.
func (c *Client) AgentRuns(ctx context.Context) ([]api.AgentRun, error) {
	var out api.AgentRunList
	err := c.call(ctx, request{method: http.MethodGet, path: agentPath()}, maxAnswer, &out)
	return out.Runs, err
}

// DeleteAgentRun deletes a run that no process works on: its directory, its sandbox, and the
// snapshots of its turns.
func (c *Client) DeleteAgentRun(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: agentPath(id)}, maxAnswer, nil)
}

// AgentRunEvents calls on for each line of a run's record as it is written, starting at line number
// from (the first is 1). It returns the run once no process works on it. If on returns an error or
// ctx ends, the run goes on, and AgentRunEvents may be called again.
func (c *Client) AgentRunEvents(ctx context.Context, id string, from int, on func(api.AgentRunEvent) error) (*api.AgentRun, error) {
	var run *api.AgentRun
	err := c.lines(ctx, request{
		method: http.MethodGet, path: agentPath(id, "events"), query: url.Values{"from": {strconv.Itoa(from)}},
	}, func(line []byte) error {
		var e api.AgentRunEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode an event: %w", err)
		}
		if e.Run != nil {
			run = e.Run
			return errEnd
		}
		return on(e)
	})
	if err == nil && run == nil {
		err = errors.New("the daemon ended the stream without the state of the run")
	}
	return run, err
}
