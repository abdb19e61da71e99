package runtime

import "github.com/sandboxd/sandboxd/api"

// tell reports a change of a sandbox to [Options.Changed]. The caller fills in what the record does
// not have. A change is told in the section of mu that makes it, so that the order of the events is
// that of the changes. It needs mu.
func (s *Supervisor) tell(sb *sandbox, e api.Event) {
	if s.opts.Changed == nil || sb.rec.Ephemeral || e.Action == "" {
		return
	}
	rec := &sb.rec
	e.Type, e.Object, e.Name, e.Image, e.State, e.Labels = api.EventSandbox, rec.ID, rec.Name, rec.Image, rec.State, rec.Labels
	if e.Action == api.ActionStarted || e.Action == api.ActionStopped || e.Action == api.ActionCreated && rec.State == api.StateRunning {
		e.Networks = rec.Network.Join
	}
	switch e.Action { //nolint:exhaustive // the others have nothing of their own
	case api.ActionDeleted:
		e.State = ""
	case api.ActionCreated, api.ActionRolledBack:
		e.Snapshot = rec.Snapshot
	case api.ActionStarted:
		e.Idle = rec.Idle
	case api.ActionStopped:
		e.Reason, e.Idle = rec.Reason, rec.Idle
		if rec.Exit != nil {
			code := rec.Exit.Code
			e.Code = &code
		}
	}
	s.opts.Changed(rec.Tenant, e)
}
