package share

import (
	"fmt"
	"strings"
	"testing"
)

// greedy takes places, one at a time, until one is refused.
func greedy(q *Quota, o Owner) (taken int, err error) {
	for {
		if err := q.Take(o, 1); err != nil {
			return taken, err
		}
		taken++
	}
}

// A greedy sandbox leaves places to others of its tenant, and a greedy tenant to other tenants.
func TestQuotasLeaveToOthers(t *testing.T) {
	q := &Quota{What: "places", Sandbox: 10, Tenant: 24, All: 60}
	for _, tc := range []struct {
		o     Owner
		taken int
		err   string
	}{
		{Owner{"a", "1"}, 10, "at most 10 are possible"},
		{Owner{"a", "2"}, 7, "the sandboxes of the tenant have 17 places at a time, and this one 7"}, // of 14
		{Owner{"a", "3"}, 4, "and this one 4"},                                                       // of 7
		{Owner{"b", "4"}, 10, "at most 10"},
		{Owner{"c", "5"}, 10, "at most 10"},
	} {
		n, err := greedy(q, tc.o)
		if n != tc.taken || !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%+v took %d, want %d: %v", tc.o, n, tc.taken, err)
		}
	}
	// 41 of 60 are held. However many sandboxes a tenant has, another finds something.
	for i := range 100 {
		_, _ = greedy(q, Owner{"d", fmt.Sprint("d", i)})
	}
	if n, err := greedy(q, Owner{"e", "6"}); n == 0 {
		t.Errorf("a tenant finds nothing: %v", err)
	}
	if q.held > q.All {
		t.Errorf("%d of %d are held", q.held, q.All)
	}
	q.Give(Owner{"a", "1"}, 10)
	if err := q.Take(Owner{"a", "1"}, 3); err != nil {
		t.Errorf("after places were given back: %v", err)
	}
	if err := q.Take(Owner{"a", "7"}, 11); err == nil {
		t.Error("took 11 at once")
	}
}

func TestQuotasForget(t *testing.T) {
	q := &Quota{What: "places", Sandbox: 2, Tenant: 4, All: 8}
	for _, o := range []Owner{{"", "a"}, {"b", "b"}} {
		if err := q.Take(o, 2); err != nil {
			t.Fatal(err)
		}
		q.Give(o, 2)
	}
	if q.held != 0 || len(q.tenants)+len(q.sandboxes) > 0 {
		t.Errorf("left: %+v", q)
	}
}
