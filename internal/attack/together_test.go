package attack

import (
	"slices"
	"strings"
	"testing"
)

// An attack that worked is the last one of its process. One that may leave anything has a process
// of its own, and one that SIGSYS ended is not tried again.
func TestAttacksShareUnchangedProcesses(t *testing.T) {
	attacks := []string{"mount-tmpfs", "mount-proc", "keyctl", "add-key", "x32-abi", "bpf", "egress-public"}
	var runs []string
	var worked, killed []string
	err := TryAll(attacks, func(group []string) (said string, byFilter bool, err error) {
		runs = append(runs, strings.Join(group, " "))
		switch group[0] {
		case "mount-tmpfs":
			return `{"attack":"mount-tmpfs"}` + "\n" + `{"attack":"mount-proc","worked":true}` + "\n", false, nil
		case "keyctl":
			return `{"attack":"keyctl"}` + "\n", true, nil
		}
		return `{"attack":"` + group[0] + `"}` + "\n", false, nil
	}, func(name string, r Result) error {
		if r.Worked {
			worked = append(worked, name)
		}
		if r.Errno == Killed {
			killed = append(killed, name)
		}
		return nil
	})
	want := []string{"mount-tmpfs mount-proc keyctl add-key", "keyctl add-key", "x32-abi", "bpf", "egress-public"}
	if err != nil || !slices.Equal(runs, want) || !slices.Equal(worked, []string{"mount-proc"}) || !slices.Equal(killed, []string{"add-key"}) {
		t.Errorf("runs %q, worked %q, killed %q, %v", runs, worked, killed, err)
	}
	for _, said := range []string{"", "no result", `{"attack":"bpf"}` + "\n", `{"attack":"keyctl"}` + "\n" + `{"attack":"bpf"}` + "\n"} {
		err := TryAll([]string{"keyctl"}, func([]string) (string, bool, error) { return said, false, nil }, func(string, Result) error { return nil })
		if err == nil {
			t.Errorf("%q is taken for the result of another attack", said)
		}
	}
}

// Only attacks of the corpus are named as ones that leave nothing behind.
func TestLeftoversAreOfAttacks(t *testing.T) {
	for name := range leftovers() {
		if findAll([]string{name}) == nil {
			t.Errorf("%s is no attack", name)
		}
	}
}
