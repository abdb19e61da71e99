package guest

import (
	"slices"
	"testing"
)

func TestFilterArg(t *testing.T) {
	fd, rest, err := ParseFilterArg([]string{FilterArg(5), "landlock=7", "/"})
	if err != nil || fd != 5 || !slices.Equal(rest, []string{"landlock=7", "/"}) {
		t.Errorf("%d, %q, %v", fd, rest, err)
	}
	if fd, rest, err := ParseFilterArg([]string{"landlock=7", "/"}); err != nil || fd != -1 || len(rest) != 2 {
		t.Errorf("without one: %d, %q, %v", fd, rest, err)
	}
	for _, bad := range []string{"filter=", "filter=x", "filter=2", "filter=-1"} {
		if fd, _, err := ParseFilterArg([]string{bad}); err == nil {
			t.Errorf("%s is descriptor %d", bad, fd)
		}
	}
}

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
