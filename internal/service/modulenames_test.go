package service

import (
	"strings"
	"testing"
)

func TestModuleNames(t *testing.T) {
	longest := strings.Repeat("m", 64)
	for name, want := range map[string]bool{
		"json": true, "_a.B9": true, longest: true, strings.Repeat(longest+".", 7) + longest: true, "a.b.c.d.e.f.g.h": true,
		"": false, ".": false, "a.": false, ".a": false, "a..b": false, "9a": false, "a-b": false, "a b": false, "a\n": false, "é": false,
		longest + "m": false, "a.b.c.d.e.f.g.h.i": false, "a." + longest + "m": false,
	} {
		if got := isModule(name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}
