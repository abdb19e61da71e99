package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The smoke tests that `make quick` names exist: a pattern that matches nothing passes in silence.
func TestSmokeTestsExist(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?m)^SMOKE := (\S+)$`).FindSubmatch(makefile)
	if list == nil {
		t.Fatal("the Makefile has no SMOKE")
	}
	sources, err := filepath.Glob("../functional/*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var tests strings.Builder
	for _, name := range sources {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		tests.Write(text)
	}
	for name := range strings.SplitSeq(string(list[1]), "|") {
		if !strings.Contains(tests.String(), "\nfunc "+name+"(t *testing.T)") {
			t.Errorf("there is no test %s in tests/functional", name)
		}
	}
}
