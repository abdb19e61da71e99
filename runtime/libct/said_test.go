package libct

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// Programs report in many ways that they cannot have another process, and libcontainer hands on no
// errno but its own.
func TestWantOfProcessesIsKnown(t *testing.T) {
	for _, tc := range []struct {
		err       error
		complaint string
		want      bool
		text      string
	}{
		{fmt.Errorf("unable to start init: %w", &os.PathError{Op: "fork/exec", Path: "/proc/self/exe", Err: unix.EAGAIN}), "", true, "fork/exec"},
		{errors.New("runc init error(s): nsexec-0[9]: unable to spawn stage-1: Resource temporarily unavailable"), "", true, "stage-1"},
		{errors.New("exec /dev/sandboxd-init: resource temporarily unavailable"), "", true, "sandboxd-init"},
		{io.EOF, ": runtime/cgo: pthread_create failed: Resource temporarily unavailable;SIGABRT: abort;goroutine 1", true, "unavailable"},
		{io.EOF, ": runtime: failed to create new OS thread (have 2 already; errno=11);goroutine 1", true, "errno=11)"},
		{io.EOF, ": prepare rootfs: no space left on device;and more", false, "device;and more"},
	} {
		err := notStarted(tc.err, tc.complaint)
		if errors.Is(err, runtime.ErrProcesses) != tc.want || !strings.Contains(err.Error(), tc.text) || tc.want && strings.Contains(err.Error(), "goroutine") {
			t.Errorf("%v%s: %v", tc.err, tc.complaint, err)
		}
		if !errors.Is(err, tc.err) {
			t.Errorf("%v is not in %v", tc.err, err)
		}
	}
}

// People read an init's complaint: it has no control characters and a bounded length.
func TestComplaintsAreTamed(t *testing.T) {
	for data, want := range map[string]string{
		"":                              "",
		"\x00\x00\x00":                  "",
		"sandboxd-init: no\n\x00\x00":   ": sandboxd-init: no",
		"one\ntwo\n":                    ": one;two",
		"\x1b[2Jgone\r\x07":             ": ?[2Jgone??",
		"bad \xff\xfe bytes":            ": bad ? bytes",
		"right\u202eto left \u200b.":    ": right?to left ?.",
		strings.Repeat("a", 4096):       ": " + strings.Repeat("a", complaintSize),
		strings.Repeat("a", 999) + "é…": ": " + strings.Repeat("a", 999) + "?",
	} {
		if got := complaint([]byte(data)); got != want {
			t.Errorf("%.40q is told as %.80q, want %.80q", data, got, want)
		}
	}
}
