package attack

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// envTerminal makes this binary a program of a terminal that tries the control of an attack on terminals.
const envTerminal = "ATTACK_TEST_TERMINAL"

func TestMain(m *testing.M) {
	if code, handled := Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	if os.Getenv(envTerminal) != "" {
		worked, found, err := Control(context.Background(), "/proc/self/exe", "vhangup")
		fmt.Fprintln(os.Stderr, worked, found, err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A control that works does so to itself. As root one hung up the terminal of whoever ran `sandboxd doctor --attack`, and ended it.
func TestControlsLeaveTheTerminalAlone(t *testing.T) {
	testenv.RequireUserNS(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close() // nothing is written
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close() // nothing is written
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), envTerminal+"=yes")
	cmd.Stdin, cmd.Stderr = slave, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Run(); err != nil {
		t.Fatalf("who tried the control ended with it: %v %s", err, &said)
	}
	if worked := strings.HasPrefix(said.String(), "true"); worked != (os.Geteuid() == 0) {
		t.Errorf("as uid %d the control said: %s", os.Geteuid(), &said)
	}
}

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
