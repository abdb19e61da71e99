package inside

import "testing"

func TestCountFilters(t *testing.T) {
	for _, tt := range []struct {
		status string
		n      int
		known  bool
	}{
		{"Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\nSpeculation_Store_Bypass:\tvulnerable\n", 3, true},
		{"Name:\tx\nSeccomp:\t2\nSpeculation_Store_Bypass:\tvulnerable\n", 0, false},
	} {
		if n, known, err := countFilters(tt.status); n != tt.n || known != tt.known || err != nil {
			t.Errorf("%q: %d, %v, %v", tt.status, n, known, err)
		}
	}
	if _, _, err := countFilters("Name:\tx\nSeccomp_filters:\tmany\n"); err == nil {
		t.Error("what is no number is one")
	}
}
