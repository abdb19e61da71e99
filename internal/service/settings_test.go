package service_test

import (
	"math"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// Settings that are not possible are refused before anything is made.
func TestImpossibleSettings(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	tmpfs := func(m ...api.Scratch) api.Settings { return api.Settings{Tmpfs: m} }
	limit := func(name string, soft, hard uint64) api.Settings {
		return api.Settings{Rlimits: map[string]api.Rlimit{name: {Soft: soft, Hard: hard}}}
	}
	for name, set := range map[string]api.Settings{
		"a hostname with a space":    {Hostname: "a b"},
		"a hostname with a newline":  {Hostname: "a\nb"},
		"a long hostname":            {Hostname: strings.Repeat("a", 60) + ".bcdef"},
		"a hostname with a hyphen":   {Hostname: "-a"},
		"an empty label":             {Hostname: "a..b"},
		"the root":                   tmpfs(api.Scratch{Path: "/"}),
		"a relative path":            tmpfs(api.Scratch{Path: "tmp"}),
		"a path that goes up":        tmpfs(api.Scratch{Path: "/tmp/../etc"}),
		"a path that is not plain":   tmpfs(api.Scratch{Path: "/tmp/"}),
		"over /proc":                 tmpfs(api.Scratch{Path: "/proc"}),
		"below /proc":                tmpfs(api.Scratch{Path: "/proc/sys/kernel"}),
		"over init's directory":      tmpfs(api.Scratch{Path: "/dev"}),
		"over /sys":                  tmpfs(api.Scratch{Path: "/sys/fs"}),
		"over /etc":                  tmpfs(api.Scratch{Path: "/etc"}),
		"one in another":             tmpfs(api.Scratch{Path: "/a"}, api.Scratch{Path: "/a/b"}),
		"one twice":                  tmpfs(api.Scratch{Path: "/a"}, api.Scratch{Path: "/a"}),
		"too many":                   tmpfs(make([]api.Scratch, 17)...),
		"a negative size":            tmpfs(api.Scratch{Path: "/a", Size: -1}),
		"a size beyond all":          tmpfs(api.Scratch{Path: "/a", Size: math.MaxInt64}),
		"a setuid mode":              tmpfs(api.Scratch{Path: "/a", Mode: 0o4755}),
		"an owner that is not there": tmpfs(api.Scratch{Path: "/a", UID: 65536}),
		"a small shm":                {ShmSize: 1},
		"a negative shm":             {ShmSize: -4096},
		"a limit of nothing":         limit("rtprio", 1, 1),
		"soft above hard":            limit("nofile", 5, 4),
		"no descriptors":             limit("nofile", 0, 0),
		"more memory than is locked": limit("memlock", 1, math.MaxUint64),
		"larger files":               limit("fsize", 1, 1<<40),
		"a host with a newline":      {Hosts: []api.HostAddress{{Name: "a\n127.0.0.1 b", Address: "10.0.0.2"}}},
		"a host without a name":      {Hosts: []api.HostAddress{{Address: "10.0.0.2"}}},
		"a host that is no address":  {Hosts: []api.HostAddress{{Name: "a", Address: "10.0.0.2 b"}}},
		"an address with a zone":     {Hosts: []api.HostAddress{{Name: "a", Address: "fe80::1%e\nb"}}},
		"too many hosts":             {Hosts: make([]api.HostAddress, 257)},
		"no signal":                  {StopSignal: "SIGNOPE"},
		"no capability to drop":      {CapDrop: []string{"ROOT"}},
		"no capability to add":       {CapAdd: []string{"ROOT"}},
		"more than the profile":      {CapAdd: []string{"SYS_ADMIN"}},
		"no policy":                  {Restart: "sometimes"},
		"a policy without a number":  {Restart: "on-failure:"},
		"a policy with a number":     {Restart: "always:3"},
		"a policy of nothing":        {Restart: "always"}, // there is no command
	} {
		rep := r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Settings: set})
		if p := daemontest.Problem(t, rep, api.CodeInvalid); p.Detail == "" || strings.Contains(p.Detail, "\n") {
			t.Errorf("%s: %+v", name, p)
		}
	}
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 0 {
		t.Errorf("%+v", list)
	}
}

// A limit of descriptors for programs raises the sandbox's, never lowers it, and does not exceed
// one that is given.
func TestNofileOfPrograms(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	for _, tt := range []struct{ limit, hard, want uint64 }{{0, 64, 64}, {4096, 64, 4096}, {4096, 4096, 4096}} {
		sb := r.Create(api.CreateSandbox{Limits: api.Limits{Nofile: tt.limit}, Settings: api.Settings{Rlimits: map[string]api.Rlimit{"nofile": {Soft: 1, Hard: tt.hard}}}})
		if sb.Limits.Nofile != tt.want { // the bench's profile has no limit
			t.Errorf("%+v: %d", tt, sb.Limits.Nofile)
		}
	}
	rep := r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Limits: api.Limits{Nofile: 64}, Settings: api.Settings{Rlimits: map[string]api.Rlimit{"nofile": {Soft: 1, Hard: 65}}}})
	daemontest.Problem(t, rep, api.CodeInvalid)
}

// The record has the settings, with what they leave to sandboxd, and so has the next daemon.
func TestSettingsAreKept(t *testing.T) {
	b := daemontest.New(t, nil)
	r := b.Start()
	set := api.Settings{
		Hostname: "web.example.com", ReadOnly: true, Tmpfs: []api.Scratch{{Path: "/tmp", NoExec: true}}, ShmSize: 1 << 20,
		Rlimits: map[string]api.Rlimit{"core": {Hard: math.MaxUint64}}, Hosts: []api.HostAddress{{Name: "db", Address: "10.0.0.2"}},
		CapDrop: []string{"ALL"}, StopSignal: "QUIT",
	}
	r.Create(api.CreateSandbox{Name: "one", Settings: set})
	set.Tmpfs[0].Size, set.Tmpfs[0].Mode = 64<<20, 0o1777
	r.Cancel()
	r.Wait()
	r = b.Start()
	sb := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/one", nil), http.StatusOK)
	if diff := cmp.Diff(set, sb.Settings); diff != "" {
		t.Error(diff)
	}
}

// ENTRYPOINT and CMD mean what they mean to Docker.
func TestEntrypoint(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	const app = "example.org/app:1" // ENTRYPOINT sh -c, CMD "echo $FROM; exit 5"
	for name, tt := range map[string]struct {
		ask        api.CreateSandbox
		command    []string
		entry, cmd []string
	}{
		"nothing":              {api.CreateSandbox{Image: app}, nil, []string{"sh", "-c"}, []string{"echo $FROM; exit 5"}},
		"its command":          {api.CreateSandbox{Image: app, ImageCommand: true}, []string{"sh", "-c", "echo $FROM; exit 5"}, []string{"sh", "-c"}, []string{"echo $FROM; exit 5"}},
		"arguments":            {api.CreateSandbox{Image: app, ImageCommand: true, Command: []string{"true"}}, []string{"sh", "-c", "true"}, []string{"sh", "-c"}, []string{"echo $FROM; exit 5"}},
		"a command":            {api.CreateSandbox{Image: app, Command: []string{"true"}}, []string{"true"}, []string{"sh", "-c"}, []string{"echo $FROM; exit 5"}},
		"another":              {api.CreateSandbox{Image: app, ImageCommand: true, Entrypoint: []string{"true"}}, []string{"true"}, []string{"true"}, nil},
		"another and more":     {api.CreateSandbox{Image: app, ImageCommand: true, Entrypoint: []string{"echo"}, Command: []string{"a"}}, []string{"echo", "a"}, []string{"echo"}, nil},
		"none":                 {api.CreateSandbox{Image: app, ImageCommand: true, Entrypoint: []string{""}, Command: []string{"true"}}, []string{"true"}, nil, nil},
		"another for a client": {api.CreateSandbox{Image: app, Entrypoint: []string{"echo"}}, nil, []string{"echo"}, nil},
	} {
		sb := r.Create(tt.ask)
		if diff := cmp.Diff(tt.command, sb.Command) + cmp.Diff(tt.entry, sb.Entrypoint) + cmp.Diff(tt.cmd, sb.Cmd); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	for name, ask := range map[string]api.CreateSandbox{
		"nothing left":         {Image: app, ImageCommand: true, Entrypoint: []string{""}},
		"an empty program":     {Image: app, ImageCommand: true, Entrypoint: []string{"", "x"}},
		"a program with a NUL": {Image: app, Entrypoint: []string{"a\x00"}},
	} {
		if rep := r.Do("POST", "/v1/sandboxes", ask); rep.Status == http.StatusCreated {
			t.Errorf("%s: %s", name, rep.Body)
		}
	}
}
