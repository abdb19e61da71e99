package service

import (
	"context"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// agentHost returns the host of agent runs. A run uses the native face as the daemon's own tenant,
// so that other tenants have none: they find no run and start none.
func (s *API) agentHost() (*agents.Host, error) {
	if s.opts.Agents == nil || s.caller.Tenant != "" {
		return nil, class.ErrNoAgents
	}
	return s.opts.Agents, nil
}

// findRun returns the host of an agent run that the caller names.
func (s *API) findRun(id string) (*agents.Host, error) {
	if s.caller.Tenant != "" {
		return nil, fmt.Errorf("%w: %q", class.ErrNoRun, class.Clip(id))
	}
	return s.agentHost()
}

// StartAgentRun starts a run of the agent.
func (s *API) StartAgentRun(ctx context.Context, req api.StartAgentRun) (*api.AgentRun, error) {
	host, err := s.agentHost()
	if err != nil {
		return nil, err
	}
	return host.Start(ctx, req)
}

// AgentRuns lists the agent runs.
func (s *API) AgentRuns() (api.AgentRunList, error) {
	if s.caller.Tenant != "" {
		return api.AgentRunList{Runs: []api.AgentRun{}}, nil
	}
	host, err := s.agentHost()
	if err != nil {
		return api.AgentRunList{}, err
	}
	runs, err := host.List()
	return api.AgentRunList{Runs: runs}, err
}

// AgentRun returns the state of one agent run.
func (s *API) AgentRun(id string) (*api.AgentRun, error) {
	host, err := s.findRun(id)
	if err != nil {
		return nil, err
	}
	return host.Get(id)
}

// AgentEvents calls emit for the record of an agent run from this line on, until the run ends or
// ctx does.
func (s *API) AgentEvents(ctx context.Context, id string, from int, emit func(api.AgentRunEvent) error) error {
	host, err := s.findRun(id)
	if err != nil {
		return err
	}
	return host.Events(ctx, id, from, emit)
}

// ResumeAgentRun continues an agent run that has ended.
func (s *API) ResumeAgentRun(ctx context.Context, id string, req api.ResumeAgentRun) (*api.AgentRun, error) {
	host, err := s.findRun(id)
	if err != nil {
		return nil, err
	}
	return host.Resume(ctx, id, req)
}

// CancelAgentRun asks an agent run to end.
func (s *API) CancelAgentRun(id string, req api.CancelAgentRun) (*api.AgentRun, error) {
	host, err := s.findRun(id)
	if err != nil {
		return nil, err
	}
	return host.Cancel(id, req)
}

// RemoveAgentRun removes an agent run that has ended.
func (s *API) RemoveAgentRun(ctx context.Context, id string) error {
	host, err := s.findRun(id)
	if err != nil {
		return err
	}
	return host.Remove(ctx, id)
}
