package harness

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
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

// A mark of what was added sees processes that are new, and those that have become another program.
func TestMarkOfWhatWasAdded(t *testing.T) {
	testenv.RequireUserNS(t)
	begin := func(cmd *exec.Cmd) (pid int) {
		t.Helper()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		})
		return cmd.Process.Pid
	}
	child := exec.CommandContext(t.Context(), "sh", "-c", "read line; exec unshare --user sleep 600")
	more, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pid := begin(child)
	f := newFootprint()
	look := func(added bool) {
		t.Helper()
		if err := f.mark([]int{os.Getpid()}, added); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, func() error {
		look(false)
		if !strings.HasSuffix(f.processes[pid], " sh") {
			return fmt.Errorf("the child is %q", f.processes[pid])
		}
		return nil
	})
	if _, err := more.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	Eventually(t, func() error {
		look(true)
		if !strings.HasSuffix(f.processes[pid], " sleep") {
			return fmt.Errorf("the child is %q", f.processes[pid])
		}
		return nil
	})
	own := namespacesOf(pid)["user"]
	if _, ok := f.namespaces[own]; !ok {
		t.Errorf("its namespace %s is not among %v", own, f.namespaces)
	}
	ns := f.namespaces[own]
	ns.others[1] = "a process that was seen in it"
	second := begin(exec.CommandContext(t.Context(), "nsenter", fmt.Sprintf("--user=/proc/%d/ns/user", pid), "--preserve-credentials", "sleep", "600"))
	Eventually(t, func() error {
		look(true)
		if !strings.HasSuffix(f.processes[second], " sleep") {
			return fmt.Errorf("the second child is %q", f.processes[second])
		}
		return nil
	})
	if len(f.namespaces[own].others) != 1 {
		t.Errorf("what was seen in the namespace is forgotten: %+v", f.namespaces[own])
	}
}
