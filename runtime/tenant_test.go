package runtime_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// wantLookup checks that the tenant finds exactly this sandbox, or none if id is empty.
func wantLookup(t *testing.T, s *runtime.Supervisor, tenant, ref, id string) {
	t.Helper()
	got, err := s.Lookup(tenant, ref)
	switch {
	case id == "" && !errors.Is(err, runtime.ErrNotFound):
		t.Errorf("tenant %q finds %q: %s, %v", tenant, ref, got.ID, err)
	case id != "" && (err != nil || got.ID != id || got.Tenant != tenant):
		t.Errorf("tenant %q looks up %q: %s of tenant %q, %v, want %s", tenant, ref, got.ID, got.Tenant, err, id)
	}
}

func TestTenantsAreSeparate(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	ids := map[string]string{}
	for _, tenant := range []string{"", "a", "b"} {
		req := request("db")
		req.Tenant = tenant
		ids[tenant] = create(t, s, req).ID
		if _, err := s.Create(t.Context(), req); !errors.Is(err, runtime.ErrExists) {
			t.Errorf("tenant %q uses a name twice: %v", tenant, err)
		}
	}
	check := func() {
		t.Helper()
		for tenant, id := range ids {
			wantLookup(t, s, tenant, "db", id)
			for of, other := range ids {
				if of == tenant {
					wantLookup(t, s, tenant, other, id)
				} else {
					wantLookup(t, s, tenant, other, "")
				}
			}
			wantLookup(t, s, tenant, "", "")
			if list := s.List(runtime.Filter{Tenant: tenant}); len(list) != 1 || list[0].ID != id {
				t.Errorf("tenant %q lists %v, want %s alone", tenant, list, id)
			}
			if rec, err := s.Get(id); err != nil || rec.Tenant != tenant {
				t.Errorf("get %s of tenant %q: %+v, %v", id, tenant, rec, err)
			}
		}
		wantLookup(t, s, "c", "db", "")
		if n := len(s.List(runtime.Filter{AllTenants: true})); n != len(ids) {
			t.Errorf("%d sandboxes of all tenants, want %d", n, len(ids))
		}
	}
	check()

	// An id works for every tenant: the caller has resolved it with Lookup.
	lease, err := s.Begin(ids["a"])
	if err != nil {
		t.Fatal(err)
	}
	lease.End()

	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	check()

	if err := s.Delete(t.Context(), ids["a"]); err != nil {
		t.Fatal(err)
	}
	delete(ids, "a")
	wantLookup(t, s, "a", "db", "")
	check()
}

// The id of another tenant's sandbox is free as a name: a conflict would tell that it exists.
func TestNameHidesNoIDOfAnotherTenant(t *testing.T) {
	s := newBench(t).open(t)
	req := request("one")
	req.Tenant = "a"
	id := create(t, s, req).ID

	alias := request(id)
	for _, tenant := range []string{"", "a"} {
		alias.Tenant = tenant
		if _, err := s.Create(t.Context(), alias); !errors.Is(err, runtime.ErrExists) {
			t.Errorf("tenant %q uses the id of a sandbox as a name: %v", tenant, err)
		}
	}
	alias.Tenant = "b"
	other := create(t, s, alias).ID
	wantLookup(t, s, "a", id, id)
	wantLookup(t, s, "b", id, other)
	if err := s.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantLookup(t, s, "b", id, other)
	wantLookup(t, s, "a", id, "")
}

func TestRecordWithoutTenantIsTheDaemonsOwn(t *testing.T) {
	b := newBench(t)
	rec := runtime.Record{Sandbox: api.Sandbox{ID: "abc", Name: "old", State: api.StateStopped}}
	if err := runtime.PutRecord(b.dir, &rec); err != nil {
		t.Fatal(err)
	}
	s := b.open(t)
	wantLookup(t, s, "", "old", "abc")
	wantLookup(t, s, "a", "old", "")
}

func TestClaimDoesNotCrossTenants(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	parked := park(t, b, s, 1)[0]
	req := fitting("db")
	req.Tenant = "a"
	if rec := create(t, s, req); rec.ID == parked {
		t.Error("a warm sandbox of the daemon's own tenant went to another")
	}
	poolState(t, s, 1, 0, 0)

	if err := s.Park(t.Context(), "of a", req); err != nil {
		t.Fatal(err)
	}
	ids := b.engine.IDs()
	if rec := create(t, s, fitting("own")); rec.ID != parked {
		t.Error("a warm sandbox of its own tenant was not claimed")
	}
	if rec := create(t, s, fitting("own2")); slices.Contains(ids, rec.ID) {
		t.Error("a warm sandbox of another tenant was claimed")
	}
	req.Name = "db2"
	if rec := create(t, s, req); !slices.Contains(ids, rec.ID) {
		t.Error("a warm sandbox of the tenant was not claimed")
	}
	if st := s.PoolState("of a"); st != (runtime.PoolState{Hits: 1}) {
		t.Errorf("pool of the tenant: %+v", st)
	}
}

// A tenant has a part of the number of sandboxes, and errors do not tell it of others.
func TestTenantsShareTheNumberOfSandboxes(t *testing.T) {
	b := newBench(t)
	b.options.MaxSandboxes = 2*runtime.TenantParts + 1
	s := b.open(t)
	try := func(tenant string) error {
		req := request("")
		req.Tenant = tenant
		_, err := s.Create(t.Context(), req)
		return err
	}
	for range 2 {
		if err := try("a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := try("a"); !errors.Is(err, runtime.ErrTooMany) || !strings.Contains(err.Error(), "you have 2") {
		t.Errorf("a third one of a: %v", err)
	}
	for _, tenant := range []string{"b", "b", "c", "", "", "", ""} {
		if err := try(tenant); err != nil {
			t.Errorf("one of %q: %v", tenant, err)
		}
	}
	if err := try("c"); !errors.Is(err, runtime.ErrTooMany) || strings.ContainsAny(err.Error(), "0123456789") {
		t.Errorf("one of c, where there is no room: %v", err)
	}
	if ids := s.IDs("a"); len(ids) != 2 {
		t.Errorf("ids of a: %v", ids)
	}
}
