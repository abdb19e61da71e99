package runtime_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// sized is a request with these limits.
func sized(tenant, name string, memory, pids int64) runtime.Request {
	req := request(name)
	req.Tenant, req.Limits = tenant, api.Limits{Memory: memory, Pids: pids}
	return req
}

const mib = 1 << 20

// Sandboxes whose limits exceed the room together are refused before anything is made; ended ones
// take no room.
func TestLimitsKeepToTheRoom(t *testing.T) {
	b := newBench(t)
	b.options.Room = runtime.Room{Memory: 1000 * mib, Pids: 300}
	s := b.open(t)
	one := create(t, s, sized("", "one", 400*mib, 34))
	create(t, s, sized("", "two", 400*mib, 34))
	refuse := func(what string, err error, words string) {
		t.Helper()
		if !errors.Is(err, runtime.ErrNoRoom) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", what, err)
		}
	}
	made := len(b.engine.IDs())
	_, err := s.Create(t.Context(), sized("", "three", 201*mib, 1))
	refuse("too much memory", err, "limits.memory needs 210763776, and 838860800 of 1048576000 are taken")
	_, err = s.Create(t.Context(), sized("", "three", mib, 185))
	refuse("too many processes", err, "limits.pids needs 201, and 100 of 300 are taken") // 16 more for each init
	if len(b.engine.IDs()) != made || s.Count() != 2 {
		t.Errorf("%d sandboxes of the engine, %d of the supervisor", len(b.engine.IDs()), s.Count())
	}
	_, err = s.Update(t.Context(), one.ID, func(rec *runtime.Record) (api.Limits, error) {
		rec.Limits.Memory = 601 * mib
		return api.Limits{Memory: 601 * mib}, nil
	})
	refuse("update", err, "limits.memory needs")
	if _, err = s.Update(t.Context(), one.ID, func(rec *runtime.Record) (api.Limits, error) {
		rec.Limits.Memory = 600 * mib
		return api.Limits{Memory: 600 * mib}, nil
	}); err != nil {
		t.Error(err)
	}
	if _, err := s.Stop(t.Context(), one.ID, 0); err != nil {
		t.Fatal(err)
	}
	three := create(t, s, sized("", "three", 500*mib, 1))
	_, err = s.Start(t.Context(), one.ID, runtime.StartRequest{})
	refuse("start", err, "limits.memory needs")
	if err := s.Delete(t.Context(), three.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(t.Context(), one.ID, runtime.StartRequest{}); err != nil {
		t.Error(err)
	}
}

// A tenant has a part of the room, and errors do not tell it of others. Overcommit widens it for
// all.
func TestTenantsShareTheRoom(t *testing.T) {
	b := newBench(t)
	b.options.Room = runtime.Room{Memory: 500 * mib, Overcommit: 2}
	s := b.open(t)
	create(t, s, sized("a", "one", 200*mib, 1))
	_, err := s.Create(t.Context(), sized("a", "two", 51*mib, 1))
	if !errors.Is(err, runtime.ErrNoRoom) || !strings.Contains(err.Error(), "your others have 209715200 of 262144000") {
		t.Errorf("beyond the part of a tenant: %v", err)
	}
	create(t, s, sized("a", "two", 50*mib, 1))
	create(t, s, sized("", "most", 700*mib, 1))
	_, err = s.Create(t.Context(), sized("b", "one", 60*mib, 1))
	if !errors.Is(err, runtime.ErrNoRoom) || !strings.Contains(err.Error(), "limits.memory needs 62914560, which are not free on this host") {
		t.Errorf("where others have the rest: %v", err)
	}
	create(t, s, sized("b", "one", 50*mib, 1))
}

// Warm sandboxes leave their limits' room to others, and are admitted when they are claimed.
func TestWarmSandboxesLeaveRoom(t *testing.T) {
	b := newBench(t)
	b.options.Room = runtime.Room{Memory: 500 * mib, Pids: 120}
	s := b.open(t)
	req := request("")
	req.Name, req.Defaults = "", api.Limits{Memory: 300 * mib, Pids: 20}
	if err := s.Park(t.Context(), "pool", req); err != nil {
		t.Fatal(err)
	}
	other := sized("", "other", 201*mib, 1)
	other.Profile.Name = "hardened" // so that it claims none
	create(t, s, other)
	if err := s.Park(t.Context(), "pool", req); !errors.Is(err, runtime.ErrPoolFull) {
		t.Errorf("one that could not be claimed now: %v", err)
	}
	if _, err := s.Create(t.Context(), req); !errors.Is(err, runtime.ErrNoRoom) || s.PoolState("pool").Ready != 1 {
		t.Errorf("a claim beside the other: %v, %+v", err, s.PoolState("pool"))
	}
	if err := s.Delete(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	most := sized("", "most", mib, 89) // with 16 for its init and 16 of the warm one: 121
	most.Profile.Name = "hardened"
	if _, err := s.Create(t.Context(), most); !errors.Is(err, runtime.ErrNoRoom) {
		t.Errorf("the processes of a warm init are not counted: %v", err)
	}
	if rec, err := s.Create(t.Context(), req); err != nil || s.PoolState("pool").Hits != 1 {
		t.Errorf("claim: %+v, %v", rec, err)
	}
}
