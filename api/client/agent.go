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

// StartAgentRun has the daemon begin a run of the agent. When it returns, the run has its sandbox, and goes on whatever the caller does.
func (c *Client) StartAgentRun(ctx context.Context, req api.StartAgentRun) (*api.AgentRun, error) {
	return c.agentRun(ctx, request{method: http.MethodPost, path: agentPath(), json: req})
}

// ResumeAgentRun has the daemon go on with a run that has stopped or ended.
func (c *Client) ResumeAgentRun(ctx context.Context, id string, req api.ResumeAgentRun) (*api.AgentRun, error) {
	return c.agentRun(ctx, request{method: http.MethodPost, path: agentPath(id, "resume"), json: req})
}

// CancelAgentRun asks a run to end; [Client.AgentRunEvents] says when it has. One that has ended is no error.
func (c *Client) CancelAgentRun(ctx context.Context, id string, req api.CancelAgentRun) (*api.AgentRun, error) {
	return c.agentRun(ctx, request{method: http.MethodPost, path: agentPath(id, "cancel"), json: req})
}

// GetAgentRun returns one run.
func (c *Client) GetAgentRun(ctx context.Context, id string) (*api.AgentRun, error) {
	return c.agentRun(ctx, request{method: http.MethodGet, path: agentPath(id)})
}

func (c *Client) agentRun(ctx context.Context, r request) (*api.AgentRun, error) {
	out := new(api.AgentRun)
	if err := c.call(ctx, r, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// AgentRuns lists the runs that the daemon hosts, oldest first.
func (c *Client) AgentRuns(ctx context.Context) ([]api.AgentRun, error) {
	var out api.AgentRunList
	err := c.call(ctx, request{method: http.MethodGet, path: agentPath()}, maxAnswer, &out)
	return out.Runs, err
}

// DeleteAgentRun removes a run that nobody works on: its directory, the sandbox that it has left, and the snapshots of its turns.
func (c *Client) DeleteAgentRun(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: agentPath(id)}, maxAnswer, nil)
}

// AgentRunEvents calls on for each line of a run's record from number from (1 is the first) on, as it is written, and returns how the run
// stands when nobody works on it any more. When on returns an error or ctx ends, the run goes on, and AgentRunEvents may be called
// again.
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
		err = errors.New("the daemon ended the stream without saying how the run stands")
	}
	return run, err
}
