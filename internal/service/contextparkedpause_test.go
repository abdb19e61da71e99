package service

import (
	"errors"
	"testing"
	"time"
)

// A pause doubles with each failure, and is of one image.
func TestParkedPauses(t *testing.T) {
	now, failed := time.Unix(1000, 0), errors.New("failed")
	var f *parkedFailure
	if err := f.pauses(now, "a"); err != nil {
		t.Errorf("before a failure: %v", err)
	}
	for _, want := range []time.Duration{10, 20, 40, 80, 160, 320, 600, 600} {
		f = f.next(now, "a", failed)
		last := now.Add(want*time.Second - 1)
		if f.pauses(now, "a") == nil || f.pauses(last, "a") == nil || f.pauses(last.Add(1), "a") != nil || f.pauses(now, "b") != nil {
			t.Errorf("no pause of %d s: %+v", want, f)
		}
		now = now.Add(time.Hour)
	}
	if f = f.next(now, "b", failed); f.pause != parkedPause {
		t.Errorf("the pause of another image: %s", f.pause)
	}
}
