package service

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/events"
	"github.com/sandboxd/sandboxd/runtime"
)

// The supervisor publishes the changes of sandboxes where it makes them. The rest of the service
// publishes the other changes after they have succeeded.

// publish records an event of the caller's tenant.
func (s *API) publish(e api.Event) { s.events.Publish(s.caller.Tenant, e) }

// publishImages records one event for each image.
func (s *API) publishImages(action api.EventAction, references ...string) {
	for _, ref := range references {
		s.publish(api.Event{Type: api.EventImage, Action: action, Object: ref})
	}
}

// publishBuild records the end of a build.
func (s *API) publishBuild(img *api.Image, err error) {
	if err != nil {
		s.publish(api.Event{Type: api.EventBuild, Action: api.ActionFailed, Reason: class.Clip(err.Error())})
		return
	}
	s.publish(api.Event{Type: api.EventBuild, Action: api.ActionBuilt, Object: img.Digest, Image: img.Reference})
}

// publishSnapshot records what happened to a snapshot.
func (s *API) publishSnapshot(action api.EventAction, snap *api.Snapshot) {
	s.publish(api.Event{Type: api.EventSnapshot, Action: action, Object: snap.ID, Name: snap.Name, Sandbox: snap.Sandbox, Labels: snap.Labels})
}

// publishPruned records the removal of snapshots, of which the names are known, or the IDs of those
// without one.
func publishPruned(to *events.Log, tenant string, out *api.SnapshotsRemoved) {
	for _, ref := range out.Removed {
		to.Publish(tenant, api.Event{Type: api.EventSnapshot, Action: api.ActionRemoved, Object: ref})
	}
}

// publishPorts records that the ports of a sandbox are reachable.
func (s *core) publishPorts(rec *runtime.Record) {
	for i := range rec.Ports {
		p := rec.Ports[i]
		at := p.Socket
		if at == "" {
			at = net.JoinHostPort(p.Address, strconv.Itoa(int(p.HostPort)))
		}
		s.events.Publish(rec.Tenant, api.Event{Type: api.EventPort, Action: api.ActionPublished, Object: at, Sandbox: rec.ID, Port: &p})
	}
}

// EventOptions select events of the caller's tenant.
type EventOptions struct {
	After        uint64 // ID; those after it
	Since, Until time.Time
	Tail         int // maximum number of kept events; negative means all
	Follow       bool
	// Filter has the wanted values of each key: type, action, object, name, sandbox, image or label
	// (as KEY or KEY=VALUE). An event has one value of each key.
	Filter map[string][]string
}

// Events calls begin and then emit for the events that opts select, in their order. Events of
// requests that were answered before are among them.
func (s *API) Events(ctx context.Context, opts EventOptions, begin func() error, emit func(api.Event) error) error {
	match, err := s.eventFilter(opts.Filter)
	if err != nil {
		return err
	}
	if err := begin(); err != nil {
		return err
	}
	err = s.events.Read(ctx, s.caller.Tenant, events.Query{
		After: opts.After, Since: opts.Since, Until: opts.Until, Tail: opts.Tail, Follow: opts.Follow, Match: match,
	}, emit)
	if errors.Is(err, events.ErrClosed) {
		return class.ErrStopping
	}
	return err
}

// eventKeys are the keys of an event's filter, with what they compare. An object of type sandbox is
// its own sandbox.
var eventKeys = map[string]func(e *api.Event, want string) bool{
	"type":    func(e *api.Event, want string) bool { return string(e.Type) == want },
	"action":  func(e *api.Event, want string) bool { return string(e.Action) == want },
	"object":  func(e *api.Event, want string) bool { return e.Object == want },
	"name":    func(e *api.Event, want string) bool { return e.Name == want },
	"sandbox": func(e *api.Event, want string) bool { return e.Sandbox == want || isSandbox(e, want) },
	"image": func(e *api.Event, want string) bool {
		return e.Image == want || e.Type == api.EventImage && e.Object == want
	},
	"label": func(e *api.Event, want string) bool {
		key, value, exact := strings.Cut(want, "=")
		got, has := e.Labels[key]
		return has && (!exact || got == value)
	},
}

func isSandbox(e *api.Event, want string) bool {
	return e.Type == api.EventSandbox && (e.Object == want || e.Name == want)
}

// eventFilter returns a function that reports whether an event is wanted; nil if all are. A name of
// an existing sandbox stands for its ID, too, so that events of its execs are found by it.
func (s *API) eventFilter(filter map[string][]string) (func(*api.Event) bool, error) {
	type test struct {
		fits  func(*api.Event, string) bool
		wants []string
	}
	var tests []test
	for key, wants := range filter {
		fits, ok := eventKeys[key]
		if !ok {
			return nil, class.Invalidf("filter %q: the key must be one of %s", class.Clip(key), strings.Join(api.EventFilterKeys(), ", "))
		}
		for _, want := range wants {
			if rec, err := s.lookup(want); key == "sandbox" && err == nil && rec.ID != want {
				wants = append(slices.Clip(wants), rec.ID)
			}
		}
		tests = append(tests, test{fits, wants})
	}
	if tests == nil {
		return nil, nil
	}
	return func(e *api.Event) bool {
		for _, t := range tests {
			found := false
			for _, want := range t.wants {
				found = found || t.fits(e, want)
			}
			if !found {
				return false
			}
		}
		return true
	}, nil
}

// RenameSandbox gives the sandbox with this id or name another name.
func (s *API) RenameSandbox(ctx context.Context, ref string, req api.RenameSandbox) (api.Sandbox, error) {
	if req.Name == "" {
		return api.Sandbox{}, class.Invalidf("name is empty: give the new one")
	}
	if err := validateName(req.Name); err != nil {
		return api.Sandbox{}, err
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err = s.supervisor.Rename(ctx, rec.ID, req.Name)
	return rec.Shown(), err
}
