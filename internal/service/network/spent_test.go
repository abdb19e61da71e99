package network

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// What a life has used is there for the next daemon, and for no other life.
func TestSpentIsKept(t *testing.T) {
	dir := t.TempDir()
	l := newFlowLog(dir, "box")
	used := gateway.Spent{BytesOut: 7, Known: []string{"a.test"}, Rules: []gateway.RuleSpent{{Rule: "hub", Connections: 3}}}
	if err := l.keepSpent(&used); err != nil { // the last of a life that has ended
		t.Fatal(err)
	}
	if _, err := os.Stat(l.spent()); err == nil {
		t.Error("kept without a life")
	}
	l.begin(2)
	for _, s := range []*gateway.Spent{&used, nil} {
		if err := l.keepSpent(s); err != nil {
			t.Fatal(err)
		}
	}
	next := newFlowLog(dir, "box")
	for life, want := range map[int]gateway.Spent{1: {}, 2: used, 3: {}} {
		if got, err := next.readSpent(life); err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("life %d: %+v, %v", life, got, err)
		}
	}
	if err := os.WriteFile(l.spent(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := next.readSpent(2); err == nil {
		t.Error("a broken file is taken for nothing used")
	}
	if err := l.remove(); err != nil {
		t.Fatal(err)
	}
	if all, err := os.ReadDir(dir); err != nil || len(all) > 0 {
		t.Errorf("%v is left, %v", all, err)
	}
	if err := l.keepSpent(&used); err != nil {
		t.Fatal(err)
	}
	if all, _ := os.ReadDir(dir); len(all) > 0 {
		t.Errorf("%v of a deleted sandbox", all)
	}
}
