package launcher

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A sandbox with mounts gets the range that its mounts were made for. One whose mounts do not come
// gives it back.
func TestRangeIsHeldForMounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Ranges{count: 3, mounted: make([]bool, 3)}
		wants := func(id string, opened bool, number int) {
			t.Helper()
			_, err := r.TakeFor(id, opened)
			if w, ok := errors.AsType[*wantsMountsError](err); !ok || w.number != number || !errors.Is(err, errWantsMounts) {
				t.Fatalf("%s: %v, want mounts for range %d", id, err, number)
			}
		}
		wants("one", false, 1)
		other, err := r.Take()
		if err != nil || other.number != 2 {
			t.Fatalf("another sandbox has range %+v, %v", other, err)
		}
		lease, err := r.TakeFor("one", true)
		if err != nil || lease.number != 1 {
			t.Fatalf("range %+v, %v", lease, err)
		}
		wants("two", false, 3)
		wants("two", false, 3) // asked again: the client has not got the answer
		if _, err := r.Take(); err == nil {
			t.Error("a range that is held is given to another sandbox")
		}
		synctest.Wait()
		time.Sleep(holdTime + 1) // of the bubble
		synctest.Wait()
		if n := len(r.held); n != 0 {
			t.Errorf("%d are held", n)
		}
		wants("two", true, 3) // mounts that came too late are not used
		lease.Release()
		other.Release()
		if lease, err := r.TakeFor("two", true); err != nil || lease.number != 3 {
			t.Errorf("range %+v, %v", lease, err)
		}
	})
}

// Sandboxes that share their ids need no range, and mounts all the same.
func TestMountsOfSharedIDs(t *testing.T) {
	r := &Ranges{}
	if _, err := r.TakeFor("one", false); !errors.Is(err, errWantsMounts) {
		t.Errorf("no mounts: %v", err)
	}
	for range 2 { // also where it is not remembered
		if lease, err := r.TakeFor("one", true); err != nil || lease.number != 0 {
			t.Errorf("%+v, %v", lease, err)
		}
	}
}
