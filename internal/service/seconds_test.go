package service

import (
	"math"
	"strings"
	"testing"
)

// Messages write numbers as people do.
func TestSecondsAreWrittenOut(t *testing.T) {
	for s, want := range map[float64]string{
		3.6e+08: "timeout 360000000: must be", -1: "timeout -1: must be", 1e-7: "timeout 0.0000001: shorter", math.NaN(): "timeout NaN: must be",
	} {
		if _, err := seconds("timeout", s); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "e+") {
			t.Errorf("%v: %v", s, err)
		}
	}
}
