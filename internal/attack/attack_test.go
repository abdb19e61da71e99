package attack

import (
	"encoding/json"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCorpusIsWellFormed(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9-]+$`)
	seen := make(map[string]bool)
	for _, a := range Corpus() {
		if !name.MatchString(a.Name) || seen[a.Name] || a.Layer == "" || a.try == nil {
			t.Errorf("%q: no name, there twice, or incomplete", a.Name)
		}
		seen[a.Name] = true
	}
}

func TestMainLeavesOtherArgumentsAlone(t *testing.T) {
	for _, args := range [][]string{nil, {"run"}, {"attack"}, {"run", "attack", "try"}} {
		if _, handled := Main(args); handled {
			t.Errorf("%q was taken", args)
		}
	}
	if code, handled := Main([]string{"attack", "try", "nothing"}); !handled || code != 2 {
		t.Errorf("an attack that is not there: %d, %v", code, handled)
	}
}

func TestResultsAreDecoded(t *testing.T) {
	text, err := json.Marshal(Result{Attack: "x", Worked: true})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := Decode(string(text) + "\n"); err != nil || !r.Worked || r.Attack != "x" {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []string{"", "worked", `{"attack":"x","detail":"control cannot mount /proc: no"}`} {
		if _, err := Decode(bad); err == nil {
			t.Errorf("%q was taken for a result", bad)
		}
	}
}

// The numbers are the kernel's, as golang.org/x/sys/unix has them.
func TestCallsAreThoseOfTheKernel(t *testing.T) {
	if n := len(callTable()); n < 300 {
		t.Fatalf("%d names", n)
	}
	for number, want := range map[int]string{
		unix.SYS_READ: "read", unix.SYS_OPENAT: "openat", unix.SYS_MOUNT: "mount", unix.SYS_CLONE3: "clone3", unix.SYS_RSEQ: "rseq",
		unix.SYS_SOCKET: "socket", unix.SYS_NEWFSTATAT: "newfstatat", unix.SYS_IO_URING_SETUP: "io_uring_setup", unix.SYS_MSEAL: "mseal",
		maxCall: "",
	} {
		if got := CallName(number); got != want {
			t.Errorf("%d is %q, want %q", number, got, want)
		}
	}
}
