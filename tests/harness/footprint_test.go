package harness

import (
	"maps"
	"os"
	"os/exec"
	"testing"
)

// The kernel gives pids and the numbers of namespaces again. Who has one that was ours is not taken for ours; who is ours, or was in
// the same namespace when we looked, is told of, and so is what a process of ours has started since.
func TestNumbersThatAreUsedAgainAreNotOurs(t *testing.T) {
	child := exec.CommandContext(t.Context(), "sleep", "600")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = child.Process.Kill()
		_ = child.Wait() // it was killed
	})
	self, err := readProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	link := namespacesOf(self.pid)["net"]
	for name, tc := range map[string]struct {
		processes, others map[int]string
		left              bool
	}{
		"a parent's pid is another's":        {processes: map[int]string{self.pid: "0 (of ours)"}},
		"a namespace's number is another's":  {others: map[int]string{self.pid: "0 (of ours)", child.Process.Pid: "0 (of ours)"}},
		"a child of ours":                    {processes: map[int]string{self.pid: self.mark}, left: true},
		"another that was in it and is so":   {others: map[int]string{self.pid: self.mark}, left: true},
		"nobody who has anything to do with": {},
	} {
		f := newFootprint()
		maps.Copy(f.processes, tc.processes)
		f.namespaces[link] = namespace{"a process", tc.others}
		if left := f.left(); (len(left) > 0) != tc.left {
			t.Errorf("%s: left %v", name, left)
		}
	}
}
