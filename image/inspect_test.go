package image

import (
	"encoding/json"
	"testing"
	"time"
)

func TestMomentsCanBeSent(t *testing.T) {
	zone := time.FixedZone("", 3600)
	for _, at := range []time.Time{time.Date(0, 1, 1, 0, 0, 0, 0, zone), time.Date(9999, 12, 31, 23, 59, 0, 0, time.FixedZone("", -3600)), time.Date(2026, 1, 1, 0, 0, 0, 0, zone)} {
		if _, err := json.Marshal(moment(at)); err != nil || moment(at).IsZero() != (at.Year() != 2026) {
			t.Errorf("%v: %v, %v", at, moment(at), err)
		}
	}
}
