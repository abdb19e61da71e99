package openapi

import (
	"encoding/json"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Values that several examples share.
var (
	at       = time.Date(2026, 3, 14, 15, 9, 26, 0, time.UTC)
	later    = at.Add(1500 * time.Millisecond)
	anHour   = at.Add(time.Hour)
	digest   = "sha256:0f2c1ad5b0a3a6f0c4b9d8e7f6a5b4c3d2e1f00112233445566778899aabbccdd"[:71]
	enforced = api.Enforced{
		Namespaces: []string{"cgroup", "ipc", "mount", "network", "pid", "user", "uts"}, IDs: api.IDsOwn, Profile: "default", Seccomp: "default",
		NoNewPrivs: true, Caps: 8, Landlock: 6, Cores: api.CoresNone, Memory: "cgroup", CPU: "cgroup", CPUSet: "cgroup", Pids: "cgroup", IO: "none", Network: "none",
	}
	running = api.Sandbox{
		ID: "c4f1b7a09d2e", Name: "work", Image: toolImage, ImageDigest: digest, State: api.StateRunning, PID: 41312, Profile: "default",
		Limits: api.Limits{Memory: 512 << 20, Pids: 256, Nofile: 65536}, Enforced: enforced, Cwd: "/", User: "0", CreatedAt: at, Deadline: anHour,
		IdleTimeout: 600, Command: []string{"sh"}, TTY: true, StdinOpen: true,
	}
	stored = api.Image{Reference: toolImage, Digest: digest, Platform: "linux/amd64", Size: 1048576, Layers: 1, PulledAt: at}
	base   = api.Snapshot{
		ID: "5d0c2f7e1a64", Name: "base", Sandbox: running.ID, SandboxName: "work", Image: toolImage, ImageDigest: digest, Layers: 1,
		CreatedAt: at, Size: 10240, Entries: 3, Consistent: true,
	}
	cache = api.Volume{
		Name: "cache", Labels: map[string]string{"app": "shop"}, CreatedAt: at, Size: 1 << 30, Inodes: 131072, Sandboxes: []api.SandboxRef{},
	}
	back = api.NamedNetwork{
		Name: "back", Labels: map[string]string{"app": "shop"}, CreatedAt: at, Sandboxes: []api.NetworkMember{
			{ID: running.ID, Name: "work", State: api.StateRunning, Address: "198.18.37.4", Aliases: []string{"db"}},
		},
	}
	github = api.Secret{
		Name: "github", Kind: api.SecretBearer, Host: "api.github.com", Port: 443, Methods: []string{"GET"}, Paths: []string{"/repos/*"}, Variable: "GITHUB_TOKEN",
		CreatedAt: at, ChangedAt: at,
	}
	usage    = api.Usage{WallMS: 1.9, CPUMS: 1.2, MemoryPeak: 4 << 20}
	detached = api.Exec{
		ID: "9b1e6c", Sandbox: running.ID, Argv: []string{"make", "-C", "/src"}, User: "0", Cwd: "/", Detached: true, PID: 7, State: api.ExecRunning,
		StartedAt: at,
	}
	variables = api.Context{
		ID: "k3v9ap", Sandbox: running.ID, Language: "python", Cwd: "/", State: api.ContextIdle, CreatedAt: at, UsedAt: at, ExecutionCount: 2, Exec: "9b1e6c",
	}
	entry     = api.FileEntry{Path: "/tmp/notes.txt", Type: api.TypeFile, Size: 3, Mode: "0644", MTime: at, UID: 0, GID: 0, User: "root", Group: "root"}
	hostedRun = api.AgentRun{
		ID: "run-1", Dir: "/home/ann/.local/share/sandboxd/agent/run-1", State: api.AgentRunning, Model: "openai/gpt-x", Query: "How many primes are below 10^6?",
		SandboxID: running.ID, StartedAt: at, UpdatedAt: at,
	}
)

// toolImage is the image that examples use; their test serves it from a registry of its own.
const toolImage = "localhost:5000/tool:1"

func inState(state api.SandboxState, reason string) api.Sandbox {
	sb := running
	sb.State, sb.Reason = state, reason
	if state == api.StateStopped {
		sb.PID, sb.EndedAt = 0, later
		sb.Exit = &api.SandboxExit{Exit: api.Exit{Code: 143, Signal: "SIGTERM"}, StartedAt: at, EndedAt: later, Usage: &usage}
	}
	return sb
}

func endedRun() *api.AgentRun {
	r := hostedRun
	r.State, r.ExitReason, r.Turns, r.ToolCalls, r.Tokens, r.Time, r.UpdatedAt = api.AgentEnded, "submitted", 2, 3, 4096, 12.5, later
	return &r
}

func profile(name string) api.Profile {
	return api.Profile{
		Name: name, Description: "for programs that need no root", Capabilities: []string{}, NonRoot: true, User: "65534:65534", Cwd: "/work", ReadOnlyRoot: true,
		Mounts:      []api.Scratch{{Path: "/work", Size: 64 << 20, Mode: 0o1777}},
		MaskedPaths: []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
		Limits: api.Limits{Memory: 512 << 20, Pids: 256, Nofile: 65536}, Syscalls: 180,
	}
}

func withFilter(p api.Profile) api.Profile {
	p.Seccomp = json.RawMessage(`{"defaultAction":"SCMP_ACT_ERRNO"}`)
	return p
}

// countedCache is the volume with its usage.
func countedCache() api.Volume {
	v := cache
	v.Usage = &api.VolumeUsage{Bytes: 10240, Inodes: 3}
	return v
}

// emptyBack is the network before a sandbox is in it.
func emptyBack() api.NamedNetwork {
	n := back
	n.Sandboxes = []api.NetworkMember{}
	return n
}

// preparedExec is an exec before its start.
func preparedExec() api.Exec {
	x := detached
	x.State, x.PID = api.ExecPrepared, 0
	return x
}
