package pool

import "testing"

func TestMeminfo(t *testing.T) {
	data := []byte("MemTotal:        3809036 kB\nMemFree:          282012 kB\nMemAvailable:    2282012 kB\n")
	if got := meminfo(data, "MemAvailable:"); got != 2282012 {
		t.Errorf("available: %d", got)
	}
	if got := meminfo(data, "SwapTotal:"); got != 0 {
		t.Errorf("missing: %d", got)
	}
}
