package functional

import (
	"archive/tar"
	"errors"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Docker's flags mean inside what they mean to Docker.
func TestSettingsFromInside(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Name: "settings", Settings: api.Settings{
		Hostname: "web.example.com", ReadOnly: true, Tmpfs: []api.Scratch{{Path: "/tmp", Size: 1 << 20, NoExec: true}, {Path: "/run/app", Mode: 0o755}}, ShmSize: 1 << 20,
		Rlimits: map[string]api.Rlimit{"nofile": {Soft: 64, Hard: 128}, "core": {}}, Hosts: []api.HostAddress{{Name: "db", Address: "10.0.0.2"}},
		CapDrop: []string{"ALL"}, CapAdd: []string{"chown"},
	}})
	for script, want := range map[string]string{
		"hostname":                                                   "web.example.com",
		"ulimit -Sn; ulimit -Hn; ulimit -c":                          "64\n128\n0",
		"grep db /etc/hosts":                                         "10.0.0.2\tdb",
		"grep CapBnd /proc/self/status":                              "CapBnd:\t0000000000000001",
		"touch /x 2>/dev/null || echo refused":                       "refused",
		"touch /etc/hosts 2>/dev/null || echo refused":               "refused",
		"cp /usr/bin/true /tmp/t; /tmp/t 2>&1 || echo $?":            "sh: 1: /tmp/t: Permission denied\n126",
		"cp /usr/bin/true /run/app/t; /run/app/t; echo $?":           "0",
		"stat -c %a /tmp /run/app":                                   "1777\n755",
		"stat -f -c '%b %s' /tmp /dev/shm":                           "256 4096\n256 4096",
		"for i in 1 2 3; do touch /dev/shm/$i; done; ls -A /dev/shm": "1\n2\n3",
	} {
		if got := strings.TrimSpace(s.Sh(t, script)); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	// A later life has them too.
	s.MustTurn(t, "stop", nil, api.StateStopped)
	s.MustTurn(t, "start", nil, api.StateRunning)
	if got := s.Sh(t, "hostname; touch /x 2>/dev/null || echo refused; grep -c db /etc/hosts"); got != "web.example.com\nrefused\n1\n" {
		t.Errorf("started again: %q", got)
	}
	// And so have its forks; what the file systems in memory held is gone.
	var forks api.SandboxForked
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{}, &forks); err != nil {
		t.Fatal(err)
	}
	fork := d.Sandbox(forks.Sandboxes[0])
	defer fork.Delete(t)
	if got := fork.Sh(t, "hostname; ls -A /tmp; ulimit -Sn"); got != "web.example.com\n64\n" {
		t.Errorf("a fork: %q", got)
	}
	// A sandbox without such settings has the image's own file.
	if got := d.Create(t, api.CreateSandbox{}).Sh(t, "cat /etc/hosts 2>/dev/null | grep -c db; grep -c /etc/hosts /proc/mounts; true"); got != "0\n0\n" {
		t.Errorf("another one: %q", got)
	}
}

// Run passes its arguments to the image's ENTRYPOINT in the place of its CMD, attached or not.
func TestRunOfEntrypoint(t *testing.T) {
	testenv.SameForAll(t)
	registry := harness.LyingRegistry(t, nil)
	image := harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Entrypoint: []string{"echo", "entry"}, Cmd: []string{"cmd"}, StopSignal: "SIGINT"},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)))
	plain := harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)))
	with, without := registry.Push(t, "test/entry:1", image), registry.Push(t, "test/plain:1", plain)
	d := shared(t)
	d.MustPull(t, with)
	d.MustPull(t, without)
	for _, tt := range []struct {
		args, out string
		code      int
	}{
		{"run " + with, "entry cmd\n", 0},
		{"run " + with + " a b", "entry a b\n", 0},
		{"run " + with + " -- a b", "entry a b\n", 0},
		{"run --rm -i " + with + " a", "entry a\n", 0},
		{"run --entrypoint printf " + with + " %s x", "x", 0},
		{"run --entrypoint= " + with + " echo x", "x\n", 0},
		{"run --entrypoint id " + with, "uid=0(root) gid=0(root) groups=0(root)\n", 0},
		{"run " + without + " echo x", "x\n", 0},
		{"run " + without + " -- echo x", "x\n", 0},
		{"run " + without, "", 125},
	} {
		if got := d.CLI(t, strings.Fields(tt.args)...); got.Stdout != tt.out || got.Code != tt.code {
			t.Errorf("%s: %+v", tt.args, got)
		}
	}
	id := strings.TrimSpace(d.CLI(t, "run", "-d", with, "detached").Stdout)
	if got := d.CLI(t, "logs", "-f", id); got.Stdout != "entry detached\n" {
		t.Errorf("%+v", got)
	}
	d.CLI(t, "rm", id)
	// The image's STOPSIGNAL ends the program, and another one that the request names.
	for signal, want := range map[string]string{"": "INT", "SIGUSR1": "USR1"} {
		s := d.Create(t, api.CreateSandbox{Image: with, Settings: api.Settings{StopSignal: signal}, Command: []string{"sh", "-c", `for s in TERM INT USR1; do trap "echo got $s; exit 9" $s; done; echo ready; while :; do sleep 0.01; done`}})
		ready := errors.New("it has printed something")
		if err := d.Client(t).Logs(t.Context(), s.ID, client.LogOptions{Follow: true}, func(api.LogEntry) error { return ready }); !errors.Is(err, ready) {
			t.Fatalf("stop signal %q: the log ended: %v", signal, err)
		}
		s.MustTurn(t, "stop", nil, api.StateStopped)
		if got := d.CLI(t, "logs", s.ID).Stdout; got != "ready\ngot "+want+"\n" {
			t.Errorf("stop signal %q: %q", signal, got)
		}
	}
}

// A link of an image where a request mounts leads nowhere: the sandbox is not made.
func TestTmpfsOnLinks(t *testing.T) {
	registry := harness.LyingRegistry(t, nil)
	files := harness.Busybox(t)
	targets := map[string]string{"proc": "/proc", "sys": "../sys", "dev": "/dev", "up": "../../../..", "root": "/", "etc": "/etc", "nowhere": "/not/there", "tmp": "tmp"}
	for name, to := range targets {
		files = append(files, harness.File{Name: "to-" + name, Type: tar.TypeSymlink, Link: to})
	}
	reference := registry.Push(t, "test/links:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, files...))))
	d := shared(t)
	d.MustPull(t, reference)
	for name := range targets {
		for _, below := range []string{"", "/below"} {
			s, err := d.TryCreate(t.Context(), api.CreateSandbox{
				Image: reference, Settings: api.Settings{Tmpfs: []api.Scratch{{Path: "/to-" + name + below}}, Hosts: []api.HostAddress{{Name: "db", Address: "10.0.0.2"}}},
			})
			if err == nil || !strings.Contains(err.Error(), "has a link there") {
				t.Errorf("%s%s: %v", name, below, err)
			}
			if err == nil {
				s.Delete(t)
			}
		}
	}
	s := d.Create(t, api.CreateSandbox{Image: reference, Settings: api.Settings{Tmpfs: []api.Scratch{{Path: "/tmp"}, {Path: "/new/dir"}}}})
	if got := s.Sh(t, "grep -c -E '^tmpfs /(tmp|new/dir) ' /proc/mounts"); got != "2\n" {
		t.Errorf("%q", got)
	}
}
