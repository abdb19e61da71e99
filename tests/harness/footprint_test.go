package harness

import (
	"maps"
	"os"
	"os/exec"
	"testing"
)

// The kernel gives pids and namespace numbers again. A process with a number that was ours is not
// taken for ours. One that is ours, or was in the same namespace at the time of the look, is
// reported, and so are its later children.
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
