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

func TestInitArgs(t *testing.T) {
	for _, c := range []Confinement{{ABI: 2}, {ABI: 7, Writable: []string{"/tmp", "/var/tmp"}}} {
		got, err := ParseInitArgs(c.InitArgs())
		if err != nil || got.ABI != c.ABI || len(got.Writable) != len(c.Writable) {
			t.Errorf("%+v became %+v, %v", c, got, err)
		}
	}
	// An empty list of writable directories is not nil.
	c := Confinement{ABI: 7, Writable: []string{}}
	if got, err := ParseInitArgs(c.InitArgs()); err != nil || got.Writable == nil {
		t.Errorf("%+v became %+v, %v", c, got, err)
	}
	if c, err := ParseInitArgs((&Confinement{}).InitArgs()); c != nil || err != nil {
		t.Errorf("none became %+v, %v", c, err)
	}
	for _, bad := range [][]string{{""}, {"landlock"}, {"landlock="}, {"landlock=0"}, {"landlock=x"}, {"/tmp"}, {"landlock=7", "tmp"}, {"landlock=7", ""}} {
		if c, err := ParseInitArgs(bad); err == nil {
			t.Errorf("%q was taken: %+v", bad, c)
		}
	}
}
