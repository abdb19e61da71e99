package network

import (
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

var flowKinds = map[gateway.Kind]api.FlowKind{
	gateway.Connection: api.FlowConnection, gateway.Request: api.FlowRequest, gateway.Query: api.FlowQuery,
	egress.Restarted: api.FlowRestart,
}

// flow returns an event as the API shows it.
func flow(e *gateway.Event) api.Flow {
	f := api.Flow{
		Time: e.Time.UTC(), Kind: flowKinds[e.Kind], Protocol: e.Protocol, Name: e.Name, Port: e.Port, Method: e.Method, Path: e.Path,
		Status: e.Status, Allow: e.Allow, Rule: e.Rule, Secret: e.Secret, Reason: e.Reason, Out: e.Out, In: e.In,
		DurationMS: float64(e.Duration) / float64(time.Millisecond), Lost: e.Lost,
	}
	if f.Protocol == "https" || f.Protocol == "h2" { // of requests, it matters that they were read
		f.Protocol = "http"
	}
	if p := e.Process; p != nil {
		f.Process = (*api.FlowProcess)(p)
	}
	if e.Addr.IsValid() {
		f.Address = e.Addr.String()
	}
	return f
}
