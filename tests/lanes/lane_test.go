package main

import (
	"path/filepath"
	"slices"
	"testing"
)

// The packages that begin exist: a name that is none orders nothing, in silence. Those that drive
// daemons are split off, and begin with the longest of theirs.
func TestLongestBegin(t *testing.T) {
	t.Chdir("../..")
	var all []*testPackage
	for _, dir := range append([]string{"api", "tests/docs"}, longest...) {
		if files, err := filepath.Glob(filepath.Join(dir, "*_test.go")); err != nil || len(files) == 0 {
			t.Errorf("%s has no tests", dir)
		}
		p, err := newPackage(module+"/"+dir, dir)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	drivers, others := split(slices.SortedStableFunc(slices.Values(all), byLength))
	if len(drivers)+len(others) != len(all) || drivers[0].Dir != "tests/functional" || others[0].Dir != "agent" {
		t.Errorf("%d drive daemons, from %s; %d do not, from %s", len(drivers), drivers[0].Dir, len(others), others[0].Dir)
	}
	if drivers[len(drivers)-1].Dir != "tests/docs" || others[len(others)-1].Dir != "api" {
		t.Errorf("%s and %s are last", drivers[len(drivers)-1].Dir, others[len(others)-1].Dir)
	}
}
