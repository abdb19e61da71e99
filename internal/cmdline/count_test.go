package cmdline

import "testing"

func TestCountReadsThousands(t *testing.T) {
	for text, want := range map[string]int64{"5000": 5000, "100k": 100_000, "2m": 2_000_000, "0": 0} {
		var c Count
		if err := c.Set(text); err != nil || c.N != want {
			t.Errorf("%q: %d, %v", text, c.N, err)
		}
	}
	for _, text := range []string{"", "many", "-1", "-5k"} {
		if err := new(Count).Set(text); err == nil {
			t.Errorf("%q is a count", text)
		}
	}
}
