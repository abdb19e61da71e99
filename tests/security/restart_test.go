package security

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A sandbox that is started again stands on a tree which hostile code has prepared: mounts and
// devices made at the start must not lead out of it, whatever lies in their places now
// (CVE-2019-19921, CVE-2023-27561 and their like, whose image is the sandbox's own files here).
func TestStartOnAPreparedTree(t *testing.T) {
	d := start(t)
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "file"), []byte("host\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	// The attack must not fail for want of permission on the host.
	for path, mode := range map[string]os.FileMode{filepath.Dir(outside): 0o755, outside: 0o777, filepath.Join(outside, "file"): 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range map[string]string{
		// A mount point in use cannot be moved; its neighbours can.
		"moved mount points": "for d in proc sys dev; do mv /$d /moved-$d; rm -rf /$d; ln -s " + outside + " /$d; done 2>/dev/null; true",
		"links everywhere":   "for d in /*; do [ -L $d ] || rmdir $d && ln -s " + outside + " $d; done 2>/dev/null; rm -rf /etc /tmp /home /root /srv; ln -s " + outside + " /etc; ln -s " + outside + " /tmp; ln -s / /root; true",
		"closed root":        "chmod 0 /; true",
		"marks of overlayfs": "cd /srv; mkdir m; for a in opaque redirect metacopy origin whiteout; do setfattr -n user.overlay.$a -v y m; python3 -c \"import os; os.setxattr('m', 'user.overlay.$a', b'" + outside + "')\"; done 2>/dev/null; mknod w c 0 0 2>/dev/null; true",
	} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{})
			s.Sh(t, script)
			s.MustTurn(t, "stop", nil, api.StateStopped)
			if _, err := s.Turn(t.Context(), "start", nil); err != nil {
				t.Logf("it is refused, which is safe: %v", err)
			} else {
				for _, attack := range []string{"echo x >/etc/file", "echo x >/tmp/file", "echo x >/proc/file", "cat /etc/hostname /etc/file"} {
					_, _ = s.TryExec(t.Context(), api.ExecRequest{Cwd: "/", Argv: []string{"/bin/sh", "-c", attack}}) // it may have no shell left
				}
				got, err := s.TryExec(t.Context(), api.ExecRequest{Cwd: "/", Argv: []string{"/bin/sh", "-c", "ls " + outside}})
				if err == nil && got.Exit.Code == 0 {
					t.Errorf("the host's directory is seen: %+v", got)
				}
			}
			if data, err := os.ReadFile(filepath.Join(outside, "file")); err != nil || string(data) != "host\n" {
				t.Errorf("the host's file: %q, %v", data, err)
			}
			if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
				t.Errorf("the host's directory has %v, %v", entries, err)
			}
			s.Delete(t)
		})
	}
}

// A program that ignores every signal, forks without end and leaves its session and parents
// neither outlives a stop nor hides from it.
func TestNothingOutlivesAStop(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, `cat >/tmp/survive <<'X'
trap '' TERM HUP INT CONT
while :; do (setsid sh -c "trap '' TERM HUP; sleep 0.3" &) ; sleep 0.01; done
X
for i in 1 2 3; do nohup setsid sh /tmp/survive >/dev/null 2>&1 & done`)
	harness.Eventually(t, func() error { // the control
		if pids := s.Processes(t); len(pids) < 4 {
			return fmt.Errorf("only %v run", pids)
		}
		return nil
	})
	grace := 0.5
	s.MustTurn(t, "stop", api.StopSandbox{Grace: &grace}, api.StateStopped)
	if left := s.Processes(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	s.MustTurn(t, "start", nil, api.StateRunning)
	if got := s.Sh(t, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]urvive' || true"); got != "0\n" {
		t.Errorf("%s of them run in its next life", got)
	}
}
