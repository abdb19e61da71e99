package exec

import (
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// publishStarted records the start of an exec.
func (r *Registry) publishStarted(x *program, rec *runtime.Record) {
	if !rec.Ephemeral {
		r.opts.Events.Publish(rec.Tenant, x.event(api.ActionStarted))
	}
}

// publishEnded records the end of an exec: how it ended, nil if that is unknown, or why it is
// unknown.
func (r *Registry) publishEnded(x *program, exit *api.Exit, why string) {
	e := x.event(api.ActionEnded)
	e.Reason = why
	if exit != nil {
		code := exit.Code
		e.Code = &code
		switch {
		case exit.Timeout:
			e.Reason = "timeout"
		case exit.OOM:
			e.Reason = "out of memory"
		case exit.Signal != "":
			e.Reason = exit.Signal
		}
	}
	var rec runtime.Record
	if x.lease != nil {
		rec = x.lease.Record
	} else if got, err := r.opts.Supervisor.Get(x.record.Sandbox); err == nil { // the last daemon's, of a sandbox that had ended
		rec = got
	} else {
		return
	}
	if !rec.Ephemeral {
		r.opts.Events.Publish(rec.Tenant, e)
	}
}

func (x *program) event(action api.EventAction) api.Event {
	e := api.Event{Type: api.EventExec, Action: action, Object: x.record.ID, Sandbox: x.record.Sandbox, Main: x.record.Main}
	if len(x.record.Argv) > 0 {
		e.Program = class.Clip(x.record.Argv[0])
	}
	return e
}
