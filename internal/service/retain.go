package service

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// retainEvery is the interval of retention rounds.
	retainEvery = time.Minute
	// endedGrace is the minimum time that an ended sandbox is kept, whatever the limit of their
	// number, and the minimum uptime of a daemon that removes any: clients need the time to read the
	// exit code.
	endedGrace = time.Hour
)

// retention holds the limits for unused objects.
type retention struct {
	age      time.Duration // of sandboxes that have ended; 0: for ever
	limit    int           // of sandboxes that have ended, how many; 0: any number
	snapshot time.Duration // of snapshots that no sandbox stands on; 0: for ever
}

// grace returns the minimum time for clients to read an object that is removed for its age.
func grace(age time.Duration) time.Duration {
	if age > 0 {
		return min(endedGrace, age) // a shorter age is deliberate
	}
	return endedGrace
}

// overdue returns the expired records of sandboxes of any state, oldest end first. Up is the start
// of the daemon. Of too many, those of the tenant with most are expired first.
func (r retention) overdue(now, up time.Time, all []runtime.Record) []runtime.Record {
	grace := grace(r.age)
	var ended []runtime.Record
	for _, rec := range all {
		if prunable(&rec) {
			ended = append(ended, rec)
		}
	}
	slices.SortStableFunc(ended, func(a, b runtime.Record) int { return a.EndedAt.Compare(b.EndedAt) })
	over := r.excess(ended)
	var out []runtime.Record
	for _, rec := range ended {
		readable := rec.EndedAt
		if up.After(readable) {
			readable = up
		}
		if now.Sub(readable) >= grace && (over[rec.ID] || r.age > 0 && now.Sub(rec.EndedAt) >= r.age) {
			out = append(out, rec)
		}
	}
	return out
}

// excess returns the ids of the sandboxes beyond the number to keep. It takes the oldest of the
// tenant with most, so that a tenant with many evicts no other one's.
func (r retention) excess(ended []runtime.Record) map[string]bool {
	over := make(map[string]bool)
	if r.limit <= 0 {
		return over
	}
	of := make(map[string][]string)
	for _, rec := range ended {
		of[rec.Tenant] = append(of[rec.Tenant], rec.ID)
	}
	for range len(ended) - r.limit {
		most := slices.MaxFunc(slices.Sorted(maps.Keys(of)), func(a, b string) int { return cmp.Compare(len(of[a]), len(of[b])) })
		over[of[most][0]] = true
		of[most] = of[most][1:]
	}
	return over
}

// prunable reports whether a sandbox has ended and is not labelled to be kept.
func prunable(rec *runtime.Record) bool {
	return (rec.State == api.StateStopped || rec.State == api.StateLost) && !rec.Ephemeral && !api.Kept(rec.Labels)
}

// SetRetention replaces the retention of the options, from the next round on.
func (s *Service) SetRetention(r RetentionLimits) { s.core.retention.Store(&r) }

// SetDefaults replaces the defaults of the options, for sandboxes that are created or started from
// now on.
func (s *Service) SetDefaults(d runtime.Defaults) { s.core.supervisor.SetDefaults(d) }

// retain removes expired sandboxes and snapshots until ctx ends.
func (s *core) retain(ctx context.Context, look time.Duration) {
	every(ctx, look, func(now, up time.Time) {
		s.collectVolumes(ctx) // what a removal that failed has left
		kept := s.retention.Load()
		if r := (retention{kept.EndedAge, kept.EndedLimit, kept.SnapshotAge}); r != (retention{}) {
			s.removeOverdue(ctx, r, now, up)
		}
	})
}

// retainRuns removes expired agent runs until ctx ends.
func (s *core) retainRuns(ctx context.Context, look time.Duration) {
	if s.opts.Agents == nil {
		return
	}
	every(ctx, look, func(now, up time.Time) {
		kept := s.retention.Load()
		r := agents.Retention{Age: kept.AgentAge, Limit: kept.AgentLimit, Grace: grace(kept.AgentAge)}
		if r.Age == 0 && r.Limit == 0 {
			return
		}
		removed, err := s.opts.Agents.Retain(ctx, r, now, up)
		for _, id := range removed {
			s.log.Info("an agent run that nobody works on was removed", "id", id, "agent_age", r.Age, "agent_limit", r.Limit)
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("agent runs that nobody works on could not be removed, trying again", "error", err)
		}
	})
}

// every calls round at each interval until ctx ends, with the time and the start of the grace
// period.
func every(ctx context.Context, look time.Duration, round func(now, up time.Time)) {
	up := time.Now()
	last := up
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			now := time.Now()
			up = upSince(up, now, now.Round(0).Sub(last.Round(0)), now.Sub(last))
			last = now
			round(now, up)
		}
	}
}

// upSince returns the start of the grace period: up, unless the clock has advanced more than the
// time that has passed. That happens when the host was suspended or its clock was set; no client
// could read meanwhile, and times of a wrong clock mean nothing.
func upSince(up, now time.Time, shown, passed time.Duration) time.Time {
	if shown-passed > retainEvery {
		return now
	}
	return up
}

// removeOverdue is one round of retain.
func (s *core) removeOverdue(ctx context.Context, r retention, now, up time.Time) {
	removed, err := s.removeEnded(ctx, r.overdue(now, up, s.supervisor.List(runtime.Filter{AllTenants: true})), grace(r.age))
	for _, sb := range removed {
		s.log.Info("a sandbox that has ended was removed", "id", sb.ID, "name", sb.Name, "ended_age", r.age, "ended_limit", r.limit)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("sandboxes that have ended could not be removed, trying again", "error", err)
	}
	if r.snapshot == 0 || now.Sub(up) < grace(r.snapshot) {
		return
	}
	tenants, err := s.own.Tenants()
	for _, tenant := range tenants {
		out, perr := s.opts.Images(tenant).PruneSnapshots(ctx, now.Add(-r.snapshot), nil)
		publishPruned(s.events, tenant, &out)
		if len(out.Removed) > 0 {
			s.log.Info("snapshots were removed for their age", "snapshot_age", r.snapshot, "tenant", tenant, "snapshots", out.Removed, "bytes", out.Bytes)
		}
		err = errors.Join(err, perr)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("snapshots could not be removed, trying again", "error", err)
	}
}

// removeEnded deletes sandboxes one by one, except those started or deleted meanwhile, and those
// whose files were used within the time unread.
func (s *core) removeEnded(ctx context.Context, recs []runtime.Record, unread time.Duration) (removed []api.SandboxRef, err error) {
	var errs []error
	for _, rec := range recs {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			break
		}
		err := s.supervisor.DeleteEnded(ctx, &rec, unread)
		switch {
		case errors.Is(err, runtime.ErrNotEnded), errors.Is(err, runtime.ErrNotFound):
			continue
		case err != nil:
			errs = append(errs, err)
			continue
		}
		s.forgetSandbox(ctx, rec.ID)
		removed = append(removed, api.SandboxRef{ID: rec.ID, Name: rec.Name})
	}
	if removed != nil {
		s.collectSnapshots(ctx)
	}
	return removed, errors.Join(errs...)
}

// PruneSandboxes removes sandboxes that have ended.
func (s *API) PruneSandboxes(ctx context.Context, req api.PruneSandboxes) (api.SandboxesRemoved, error) {
	out := api.SandboxesRemoved{Removed: []api.SandboxRef{}}
	before, err := pruneBefore(req.OlderThan, api.DefaultOlderThan, req.Labels)
	if err != nil {
		return out, err
	}
	var chosen []runtime.Record
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant, Labels: req.Labels}) {
		switch {
		case !prunable(&rec):
		case rec.EndedAt.After(before):
			out.Recent++
		default:
			chosen = append(chosen, rec)
		}
	}
	removed, err := s.removeEnded(ctx, chosen, 0)
	out.Removed = append(out.Removed, removed...)
	s.log.Info("sandboxes that have ended were pruned", "removed", len(removed))
	return out, err
}

// PruneSnapshots removes snapshots that no sandbox stands on.
func (s *API) PruneSnapshots(ctx context.Context, req api.PruneSnapshots) (api.SnapshotsRemoved, error) {
	if req.OlderThan == nil && len(req.Labels) == 0 {
		return api.SnapshotsRemoved{}, class.Invalidf("older_than, labels: neither is given, and a snapshot is nothing to be removed without being meant; older_than 0 takes all")
	}
	before, err := pruneBefore(req.OlderThan, 0, req.Labels)
	if err != nil {
		return api.SnapshotsRemoved{}, err
	}
	out, err := s.images.PruneSnapshots(ctx, before, req.Labels)
	publishPruned(s.events, s.caller.Tenant, &out)
	return out, err
}

// pruneBefore is the time that a request's older_than means; its labels are looked at too.
func pruneBefore(olderThan *float64, otherwise float64, labels map[string]string) (time.Time, error) {
	seconds := otherwise
	if olderThan != nil {
		seconds = *olderThan
	}
	most := math.Floor(time.Duration(math.MaxInt64).Seconds())
	if !(seconds >= 0 && seconds <= most) { // NaN too
		return time.Time{}, class.Invalidf("older_than %v: must be 0 to %.0f seconds", seconds, most)
	}
	if seconds == 0 {
		return time.Unix(1<<40, 0), validateLabels(labels) // all, also ends in the future after the clock was set back
	}
	return time.Now().Add(-time.Duration(seconds * float64(time.Second))), validateLabels(labels)
}
