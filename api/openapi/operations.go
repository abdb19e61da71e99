package openapi

import (
	"encoding/json"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// Health is the answer to GET /healthz.
type Health struct {
	Status string `json:"status"` // "ok"
}

// Operations is the whole API, in the order of the reference.
var Operations = []Operation{
	{
		ID: "health", Method: "GET", Path: "/healthz", Tag: "System", Summary: "Report that the daemon lives",
		Detail:  "For supervisors. The only route that is open to every uid that can reach the socket.",
		Answers: []Answer{ok(Health{Status: "ok"})},
	},
	{
		ID: "getSystem", Method: "GET", Path: "/v1/system", Tag: "System", Summary: "Describe the daemon",
		Answers: []Answer{ok(api.SystemInfo{
			Version: "1.0.0", UID: 1000, Rootless: true, DataDir: "/home/ann/.local/share/sandboxd", Socket: "/run/user/1000/sandboxd/api.sock",
			Launcher: 41300, Sandboxes: 1, Enforced: enforced, Confined: 6, Goroutines: 21, HeapLive: 4 << 20,
			Pools: []api.Pool{{Image: "host", Profile: "default", Size: 4, Ready: 4, Hits: 12, Misses: 1}},
		})},
	},
	{
		ID: "checks", Method: "GET", Path: "/v1/system/checks", Tag: "System", Summary: "Examine the host",
		Detail: "The checks of `sandboxd doctor`.",
		Answers: []Answer{ok(api.CheckList{Checks: []api.Check{{
			Name: "ptrace", Found: "kernel.yama.ptrace_scope is 2", Means: "programs cannot trace their own children", Remedy: "sudo sysctl -w kernel.yama.ptrace_scope=1",
		}}})},
	},
	{
		ID: "diskUsage", Method: "GET", Path: "/v1/system/df", Tag: "System", Summary: "Measure disk space",
		Detail: "Bytes on disk of your images, build cache, snapshots, sandboxes, logs and volumes. The daemon reads the names and sizes of all files of your sandboxes and volumes for it.",
		Answers: []Answer{ok(api.DiskUsage{
			Images: api.DiskShare{Count: 2, Active: 1, Bytes: 148 << 20, Reclaimable: 20 << 20}, Sandboxes: api.DiskShare{Count: 1, Active: 1, Bytes: 5 << 20},
			Logs:    api.DiskShare{Count: 1, Active: 1, Bytes: 12 << 10},
			Files:   []api.SandboxFiles{{ID: running.ID, Name: running.Name, State: running.State, Bytes: 5 << 20, Files: 31, Log: 12 << 10}},
			Volumes: api.DiskShare{Count: 1, Bytes: 10240, Reclaimable: 10240}, VolumeFiles: []api.VolumeFiles{{Name: "cache", Bytes: 10240, Inodes: 3}},
		})},
	},
	{
		ID: "shutdown", Method: "POST", Path: "/v1/system/shutdown", Tag: "System", Summary: "Stop the daemon",
		Detail: "Deletes every sandbox, unless `keep_sandboxes` or `stop_sandboxes` is set. Answers first, then ends.",
		Body:   optionalBody(api.Shutdown{KeepSandboxes: false}), Answers: []Answer{{Status: http.StatusAccepted}},
	},
	{
		ID: "events", Method: "GET", Path: "/v1/events", Tag: "System", Summary: "Read what has happened",
		Detail: "One line for each change of your sandboxes, execs, published ports, images, builds, snapshots, secrets and volumes, in order. " +
			"About the last 8 MiB are kept, across restarts of the daemon. With `follow` the answer goes on with new events; " +
			"a client that is too slow gets a line with `lost`, and goes on. To continue after an interruption, pass the last `id` as `since`. " +
			"A last line with `error` says that the daemon stops.",
		Query: []Parameter{
			{Name: "since", Type: "string", Detail: "Id of an event, which all others follow, or RFC 3339 time of the first."},
			{Name: "until", Type: "string", Detail: "RFC 3339 time before which an event was; with `follow` the answer ends then."},
			{Name: "filter", Type: "string", Repeated: true, Example: "type=sandbox", Detail: "`KEY=VALUE` with the key `type`, `action`, `object`, `name`, `sandbox` (id or name), `image` or `label` (`KEY` or `KEY=VALUE`). " +
				"An event must have one of the values of each key."},
			{Name: "tail", Type: "string", Default: "all", Detail: "Number of kept events, the last ones, or `all`.", Example: "10"},
			toggle("follow", "Go on with new events."),
		},
		Answers: []Answer{lines(
			api.Event{ID: 1, Time: at, Type: api.EventSandbox, Action: api.ActionCreated, Object: running.ID, Name: "work", Image: toolImage, State: api.StateRunning, Labels: map[string]string{"team": "docs"}},
			api.Event{ID: 2, Time: at, Type: api.EventExec, Action: api.ActionEnded, Object: "cgv5jtoqz3ha", Sandbox: running.ID, Program: "sh", Code: new(0)},
		)},
	},
	{
		ID: "listProfiles", Method: "GET", Path: "/v1/profiles", Tag: "Profiles", Summary: "List the security profiles",
		Detail: "Without their filters.", Answers: []Answer{ok(api.ProfileList{Profiles: []api.Profile{profile("hardened")}})},
	},
	{
		ID: "profile", Method: "GET", Path: "/v1/profiles/{profile}", Tag: "Profiles", Summary: "Read a security profile",
		Detail: "With its filter, in the form of the OCI runtime specification.", Answers: []Answer{ok(withFilter(profile("hardened")))},
	},

	{
		ID: "createSandbox", Method: "POST", Path: "/v1/sandboxes", Tag: "Sandboxes", Summary: "Create a sandbox",
		Detail: "The answer comes when the sandbox runs and its main process, if any, has started. `enforced` says what really holds it. " +
			"A limit that was asked for and cannot be enforced is `unenforceable`, and leaves no sandbox.\n\n" +
			"At most 1,000 sandboxes exist at a time. Every sandbox has a deadline (`timeout`) and an idle timeout.\n\n" +
			"With `tie=true` the answer is 200 with one line, the sandbox, and does not end. When the client closes the connection or is gone, the sandbox is deleted. " +
			"A daemon that stops or is killed ends the answer and deletes nothing: the sandbox goes on until its timeouts. A program that is left as its main process ([WebSockets](websocket.md)) unties it.",
		Query: []Parameter{toggle("tie", "Delete the sandbox when the connection of this request ends.")},
		Body: jsonBody(api.CreateSandbox{
			Image: toolImage, Name: "work", Command: []string{"sh"}, TTY: true, StdinOpen: true, Labels: map[string]string{"team": "docs"}, Timeout: 3600,
		}),
		Answers: []Answer{created(running), lines(running)},
	},
	{
		ID: "listSandboxes", Method: "GET", Path: "/v1/sandboxes", Tag: "Sandboxes", Summary: "List sandboxes", Detail: "Oldest first.",
		Query: []Parameter{
			{Name: "label", Type: "string", Repeated: true, Detail: "`KEY=VALUE` that a sandbox must have.", Example: "team=docs"},
			{Name: "state", Type: "string", Enum: []string{"creating", "running", "paused", "stopped", "lost"}, Detail: "State that a sandbox must be in.", Example: "running"},
			{Name: "limit", Type: "integer", Detail: "Maximum number of sandboxes.", Example: "10"},
		},
		Answers: []Answer{ok(api.SandboxList{Sandboxes: []api.Sandbox{running}})},
	},
	{
		ID: "pruneSandboxes", Method: "POST", Path: "/v1/sandboxes/prune", Tag: "Sandboxes", Summary: "Delete ended sandboxes",
		Detail:  "Takes those that ended at least `older_than` seconds ago and have all of `labels`. The label `sandboxd.keep` protects a sandbox.",
		Body:    optionalBody(api.PruneSandboxes{OlderThan: new(3600.0)}),
		Answers: []Answer{ok(api.SandboxesRemoved{Removed: []api.SandboxRef{{ID: running.ID, Name: "work"}}, Recent: 2})},
	},
	{
		ID: "sandbox", Method: "GET", Path: "/v1/sandboxes/{id}", Tag: "Sandboxes", Summary: "Read a sandbox", Answers: []Answer{ok(running)},
	},
	{
		ID: "updateSandbox", Method: "PATCH", Path: "/v1/sandboxes/{id}", Tag: "Sandboxes", Summary: "Change limits, timeouts and labels",
		Detail: "Applies all changes or, with an error, none. A limit of 0 (or `\"\"`) is the profile's default again; for `swap`, 0 means none. " +
			"`timeout` counts from now. A label of `null` is removed.\n\n" +
			"Memory in use is reclaimed, never freed by killing; if that is not enough the answer is `conflict`. " +
			"`nofile`, and `pids` without a cgroup, cannot change while processes run. Repeating the request is safe.",
		Body: jsonBody(api.UpdateSandbox{Timeout: 7200, Labels: map[string]*string{"team": nil, "done": new("no")}}), Answers: []Answer{ok(running)},
	},
	{
		ID: "deleteSandbox", Method: "DELETE", Path: "/v1/sandboxes/{id}", Tag: "Sandboxes", Summary: "Delete a sandbox",
		Detail: "Kills what runs in it. Answers when its processes, cgroup and directories are gone.", Answers: []Answer{noContent},
	},
	{
		ID: "renameSandbox", Method: "POST", Path: "/v1/sandboxes/{id}/rename", Tag: "Sandboxes", Summary: "Give a sandbox another name",
		Detail: "The hostname of a running sandbox stays until it is started again. A sandbox that others reach by its name in a network must be stopped first.",
		Body:   jsonBody(api.RenameSandbox{Name: "work"}), Answers: []Answer{ok(running)},
	},
	{
		ID: "startSandbox", Method: "POST", Path: "/v1/sandboxes/{id}/start", Tag: "Sandboxes", Summary: "Run a stopped or lost sandbox again",
		Detail: "Files, id, name, labels, environment and limits stay. The deadline starts anew. Only the main process is started, and with `idle` nothing. " +
			"If the start fails the sandbox stays as it was.",
		Body: optionalBody(api.StartSandbox{Timeout: 3600}), Answers: []Answer{ok(running)},
	},
	{
		ID: "stopSandbox", Method: "POST", Path: "/v1/sandboxes/{id}/stop", Tag: "Sandboxes", Summary: "End what runs in a sandbox and keep its files",
		Detail: "Sends SIGTERM, or `signal`, to every process, and SIGHUP to those that ignore it. Processes that are left after `grace` seconds are killed. " +
			"With `main` the main process alone is asked, and the rest is killed when it has ended. " +
			"`grace` is at most 600; 0 kills at once. The stop continues if the client leaves.",
		Body: optionalBody(api.StopSandbox{Grace: new(1.0)}), Answers: []Answer{ok(inState(api.StateStopped, "stopped"))},
	},
	{
		ID: "pauseSandbox", Method: "POST", Path: "/v1/sandboxes/{id}/pause", Tag: "Sandboxes", Summary: "Freeze every process",
		Detail: "Execs and file requests answer `conflict` until the sandbox is resumed. The deadline still counts; the idle timeout does not. " +
			"Without cgroup v2, processes get SIGSTOP, which a program can undo.",
		Answers: []Answer{ok(inState(api.StatePaused, ""))},
	},
	{
		ID: "resumeSandbox", Method: "POST", Path: "/v1/sandboxes/{id}/resume", Tag: "Sandboxes", Summary: "Thaw a paused sandbox", Answers: []Answer{ok(running)},
	},
	{
		ID: "waitSandbox", Method: "GET", Path: "/v1/sandboxes/{id}/wait", Tag: "Sandboxes", Summary: "Wait until a sandbox has ended",
		Detail: "`exit` says how its main process ended. A sandbox that is deleted first answers `gone`.", Answers: []Answer{ok(inState(api.StateStopped, "stopped"))},
	},
	{
		ID: "logs", Method: "GET", Path: "/v1/sandboxes/{id}/logs", Tag: "Sandboxes", Summary: "Read the output of the main process",
		Detail: "A line of the answer is a piece of output, not a line of text. With `follow` the answer ends with the main process. " +
			"A last line with `error` says that the daemon stops. A sandbox without a main process answers `conflict`.",
		Query: []Parameter{
			toggle("follow", "Go on until the main process ends."),
			{Name: "tail", Type: "string", Default: "all", Detail: "Number of lines from the end, or `all`.", Example: "10"},
			{Name: "since", Type: "string", Detail: "RFC 3339 time of the first piece."},
			{Name: "stdout", Type: "boolean", Default: "true", Detail: "Include stdout."},
			{Name: "stderr", Type: "boolean", Default: "true", Detail: "Include stderr."},
		},
		Answers: []Answer{lines(api.LogEntry{Time: at, Stream: "stdout", Text: "ready\n"})},
	},
	{
		ID: "stats", Method: "GET", Path: "/v1/sandboxes/{id}/stats", Tag: "Sandboxes", Summary: "Read what the kernel counts of a sandbox",
		Detail: "A figure that the kernel does not give is absent.",
		Answers: []Answer{ok(api.Stats{
			At: at, WallMS: 1500, Memory: &api.MemoryStats{Current: new(int64(4 << 20)), Peak: new(int64(6 << 20))}, CPU: &api.CPUStats{UsageMS: new(12.5)},
			Pids: &api.PidsStats{Current: new(int64(3))},
		})},
	},
	{
		ID: "allStats", Method: "GET", Path: "/v1/stats", Tag: "Sandboxes", Summary: "Read what the kernel counts of all sandboxes",
		Detail: "Of those that run or are paused. A named sandbox that does not answers an error. A figure that the kernel does not give is absent.",
		Query:  []Parameter{{Name: "sandbox", Type: "string", Repeated: true, Detail: "Id or name; only of these."}},
		Answers: []Answer{ok(api.StatsList{Sandboxes: []api.SandboxStats{{ID: running.ID, Name: running.Name, Stats: api.Stats{
			At: at, WallMS: 1500, Memory: &api.MemoryStats{Current: new(int64(4 << 20)), Limit: new(int64(512 << 20))}, CPU: &api.CPUStats{UsageMS: new(12.5)},
			Pids: &api.PidsStats{Current: new(int64(3))},
		}}}})},
	},
	{
		ID: "flows", Method: "GET", Path: "/v1/sandboxes/{id}/flows", Tag: "Sandboxes", Summary: "Read the record of a sandbox's network",
		Detail: "Each connection, request and DNS question, and each refusal, at its end. About the last 2 MiB are kept, until the sandbox is deleted. " +
			"With `follow` the answer ends with the sandbox. A last line with `error` says that the daemon stops. A sandbox without a network answers `conflict`.",
		Query: []Parameter{
			toggle("follow", "Go on until the sandbox ends."),
			{Name: "tail", Type: "string", Default: "all", Detail: "Number of flows from the end, or `all`.", Example: "10"},
		},
		Answers: []Answer{lines(api.Flow{
			Time: at, Kind: api.FlowConnection, Protocol: "tls", Name: "pypi.org", Address: "151.101.0.223", Port: 443, Allow: true, Rule: "pypi",
			Out: 1800, In: 41000, DurationMS: 120.5,
		})},
	},
	{
		ID: "connectPort", Method: "POST", Path: "/v1/sandboxes/{id}/ports/{port}", Tag: "Sandboxes", Summary: "Connect to a port of a sandbox",
		Detail: "With `Connection: Upgrade` and `Upgrade: tcp` the connection becomes one to a server that listens on the sandbox's loopback. Each direction ends for itself.\n\n" +
			"A request of any method to `/v1/sandboxes/{id}/ports/{port}/PATH` is passed to an HTTP server there as one to `/PATH`, a WebSocket too. " +
			"Its pages get an origin of their own, so that they cannot use this API.",
		Answers: []Answer{{Status: 101, Detail: "The connection is one to the port."}},
	},
	{
		ID: "processes", Method: "GET", Path: "/v1/sandboxes/{id}/processes", Tag: "Sandboxes", Summary: "List the processes of a sandbox",
		Detail: "At most 4,096, as its init sees them, by pid.",
		Answers: []Answer{ok(api.ProcessList{Processes: []api.Process{{
			PID: 2, PPID: 1, State: "S", StartedAt: at, CPUMS: 1.5, RSS: 1 << 20, Name: "sh", Argv: []string{"sh"}, Exec: "3f9a11",
		}}})},
	},
	{
		ID: "diff", Method: "GET", Path: "/v1/sandboxes/{id}/diff", Tag: "Sandboxes", Summary: "List what a sandbox has changed",
		Detail: "Compares with the image, in the order of a layer. What was in a deleted directory is not listed. Ends with `more` after about 2 MiB. " +
			"`skipped` lists at most 50 files that a commit would leave out, and `skipped_more` counts the others.",
		Answers: []Answer{ok(api.SandboxDiff{Changes: []api.Change{{Path: "/tmp/notes.txt", Kind: api.Added, Type: "file", Size: 3}}})},
	},
	{
		ID: "changes", Method: "GET", Path: "/v1/sandboxes/{id}/changes", Tag: "Sandboxes", Summary: "Get what a sandbox has changed in its workspace",
		Detail: "A tar in the form of a layer: `.wh.NAME` stands for the deletion of `NAME`, and `.wh..wh..opq` in a directory for the deletion of everything that " +
			"the archive does not have there. Left out: sockets, and names that begin with `.wh.`. A sandbox without a workspace is `invalid_request`.",
		Answers: []Answer{{Status: 200, Type: api.TypeTar}},
	},
	{
		ID: "commit", Method: "POST", Path: "/v1/sandboxes/{id}/commit", Tag: "Sandboxes", Summary: "Make an image of a sandbox",
		Detail: "The image is that of the sandbox and one layer. `config` adds to `env` and `labels` and replaces the rest; an `entrypoint` without a `cmd` " +
			"removes the old `cmd`.\n\nA sandbox in a cgroup is frozen meanwhile, for at most 15 minutes. Without a cgroup, a file that shrinks meanwhile is a `conflict`. " +
			"Left out, and listed in `skipped`: sockets, extended attributes other than `user.*`, names that begin with `.wh.`. " +
			"A sandbox of the `host` image cannot be committed.",
		Body: jsonBody(api.CommitSandbox{Reference: "localhost:5000/mine:1", Config: api.ImageConfig{Cmd: []string{"sh"}}, Comment: "with notes"}),
		Answers: []Answer{created(api.SandboxCommitted{Image: api.Image{
			Reference: "localhost:5000/mine:1", Digest: digest, Platform: "linux/amd64", Size: 1048576, Layers: 2, PulledAt: at,
		}})},
	},
	{
		ID: "fork", Method: "POST", Path: "/v1/sandboxes/{id}/fork", Tag: "Snapshots", Summary: "Make new sandboxes with the files of one",
		Detail:  "All of them or, with an error, none. Files are copied once, processes are not. Each fork starts its own main process and has its own deadline. At most 100 at a time.",
		Body:    optionalBody(api.ForkSandbox{Count: 2, Names: []string{"try-1", "try-2"}}),
		Answers: []Answer{created(api.SandboxForked{Sandboxes: []api.Sandbox{running}, Consistent: true})},
	},
	{
		ID: "rollback", Method: "POST", Path: "/v1/sandboxes/{id}/rollback", Tag: "Snapshots", Summary: "Replace the files of a sandbox with a snapshot's",
		Detail: "Kills what runs in the sandbox and removes what it has written since. The snapshot must be of the same image. " +
			"Id, name, labels and limits stay. A sandbox that ran runs again, with a new deadline.",
		Body: jsonBody(api.RollbackSandbox{Snapshot: "base"}), Answers: []Answer{ok(running)},
	},
	{
		ID: "takeSnapshot", Method: "POST", Path: "/v1/sandboxes/{id}/snapshots", Tag: "Snapshots", Summary: "Take a snapshot",
		Detail: "A snapshot holds what the sandbox has written, not its processes, and keeps its image. It is on disk when the answer comes. " +
			"`consistent` says that nothing ran in the sandbox meanwhile, which takes a cgroup or an ended sandbox. " +
			"A sandbox has at most 54 layers, its image's included.",
		Body: optionalBody(api.TakeSnapshot{Name: "base", Comment: "before the upgrade"}), Answers: []Answer{created(base)},
	},
	{
		ID: "sandboxSnapshots", Method: "GET", Path: "/v1/sandboxes/{id}/snapshots", Tag: "Snapshots", Summary: "List the snapshots of a sandbox",
		Answers: []Answer{ok(api.SnapshotList{Snapshots: []api.Snapshot{base}})},
	},
	{
		ID: "listSnapshots", Method: "GET", Path: "/v1/snapshots", Tag: "Snapshots", Summary: "List all snapshots", Detail: "Oldest first.",
		Answers: []Answer{ok(api.SnapshotList{Snapshots: []api.Snapshot{base}})},
	},
	{
		ID: "importSnapshot", Method: "POST", Path: "/v1/snapshots/import", Tag: "Snapshots", Summary: "Import an exported snapshot",
		Detail: "The image must be stored already. A snapshot of the `host` image goes only where the host's programs are in the same state.",
		Query:  []Parameter{{Name: "name", Type: "string", Detail: "Name of the snapshot here.", Example: "copy"}},
		Body:   tarBody("what GET /v1/snapshots/{snapshot}/export answers"), Answers: []Answer{created(base)},
	},
	{
		ID: "pruneSnapshots", Method: "POST", Path: "/v1/snapshots/prune", Tag: "Snapshots", Summary: "Delete unused snapshots",
		Detail: "Takes snapshots that no sandbox uses. One of `older_than` and `labels` is needed.",
		Body:   jsonBody(api.PruneSnapshots{OlderThan: new(604800.0)}), Answers: []Answer{ok(api.SnapshotsRemoved{Removed: []string{"base"}, Bytes: 10240})},
	},
	{
		ID: "snapshot", Method: "GET", Path: "/v1/snapshots/{snapshot}", Tag: "Snapshots", Summary: "Read a snapshot", Answers: []Answer{ok(base)},
	},
	{
		ID: "exportSnapshot", Method: "GET", Path: "/v1/snapshots/{snapshot}/export", Tag: "Snapshots", Summary: "Export a snapshot as one file",
		Detail: "A tar of `snapshot.json` and the snapshot's layers, `layer-1.tar` and so on. The image is not in it.", Answers: []Answer{{Status: 200, Type: api.TypeTar}},
	},
	{
		ID: "deleteSnapshot", Method: "DELETE", Path: "/v1/snapshots/{snapshot}", Tag: "Snapshots", Summary: "Delete a snapshot",
		Detail: "Sandboxes made of it keep its files until the last of them is deleted.", Answers: []Answer{ok(api.SnapshotRemoved{Bytes: 10240})},
	},

	{
		ID: "exec", Method: "POST", Path: "/v1/sandboxes/{id}/exec", Tag: "Execs", Summary: "Run a program",
		Detail: "`Accept` selects the answer: one JSON document when the program has ended (the default), with `application/x-ndjson` one line an event, " +
			"or with `application/vnd.sandboxd.stream` [frames](frames.md), which cost the least. With `detach` the answer is 201 with the exec's record as soon as the program has started.\n\n" +
			"A program that exits 3 is a result, not an error. When the timeout ends or the client leaves, everything that the exec started is killed. " +
			"A buffered answer keeps `output_limit` bytes of each stream (1 MiB, at most 16 MiB) and drops the rest.\n\n" +
			"At most 32 detached execs run in a sandbox, its main process included, and the 32 that ended last are kept for an hour. " +
			"Every sandbox may have one detached exec; further ones share a pool of 512 with all sandboxes. " +
			"Output limits and stdin of detached execs come to at most 1 GiB. " +
			"A program whose output no client reads runs on; output without end is read at a share of a processor.",
		Body: jsonBody(api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; exit 3"}, Timeout: 10}),
		Answers: []Answer{
			ok(api.ExecResult{Exit: api.Exit{Code: 3}, Usage: usage, Stdout: "hi\n"}),
			lines(api.ExecEvent{PID: 7, Exec: "9b1e6c"}, api.ExecEvent{Stream: "stdout", Text: "hi\n"}, api.ExecEvent{Exit: &api.Exit{Code: 3}, Usage: &usage}),
			{Status: 200, Type: api.TypeStream},
			{Status: 201, Type: api.TypeJSON, Value: detached, Detail: "A detached exec has started."},
		},
	},
	{
		ID: "execPipes", Method: "POST", Path: "/v1/sandboxes/{id}/exec/pipes", Tag: "Execs", Summary: "Run a program and get the ends of its pipes",
		Detail: "With `Connection: Upgrade` and `Upgrade: sandboxd-pipes` the answer is 101 and [frames](frames.md#pipes); descriptors come with the first. " +
			"Output goes from the program to the client, and not through the daemon. " +
			"`client` and `daemon` are the pids at both ends of the connection: if the daemon sees others, as behind a proxy, it answers `invalid_argument` and starts nothing. " +
			"The request has no `tty` and no `detach`; with `stdin_open` stdin's end comes too.",
		Query: []Parameter{
			{Name: "client", Type: "integer", Required: true, Detail: "Process that made the connection."},
			{Name: "daemon", Type: "integer", Required: true, Detail: "Process that listens, as the client's kernel says (`SO_PEERCRED`)."},
		},
		Body:    jsonBody(api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; exit 3"}, Timeout: 10}),
		Answers: []Answer{{Status: 101, Detail: "Frames, and descriptors."}},
	},
	{
		ID: "interactiveExec", Method: "GET", Path: "/v1/sandboxes/{id}/exec", Tag: "Execs", Summary: "Run a program interactively, over a WebSocket",
		Detail: "See [WebSockets](websocket.md). Without a handshake the answer is `invalid_argument`.", Socket: true,
	},
	{
		ID: "listExecs", Method: "GET", Path: "/v1/sandboxes/{id}/execs", Tag: "Execs", Summary: "List execs",
		Detail: "Those that run, and detached ones that ended within the hour. Oldest first.", Answers: []Answer{ok(api.ExecList{Execs: []api.Exec{detached}})},
	},
	{
		ID: "prepareExec", Method: "POST", Path: "/v1/sandboxes/{id}/execs", Tag: "Execs", Summary: "Describe a program that is started later",
		Detail: "The answer is the record of an exec that is `prepared`. Clients can attach to it (`from=next`) before `start` runs it as a detached exec. " +
			"The 64 latest of a sandbox are kept, within 64 MiB of all, and lost when the daemon ends.",
		Body: jsonBody(api.ExecRequest{Argv: []string{"make", "test"}}), Answers: []Answer{created(preparedExec())},
	},
	{
		ID: "startExec", Method: "POST", Path: "/v1/sandboxes/{id}/execs/{exec}/start", Tag: "Execs", Summary: "Start the program of a prepared exec",
		Detail: "The optional body is the size of its terminal. A program that cannot be started is an error, which the record keeps as `lost`.",
		Body:   optionalBody(api.TerminalSize{Rows: 40, Cols: 120}), Answers: []Answer{ok(detached)},
	},
	{
		ID: "execRecord", Method: "GET", Path: "/v1/sandboxes/{id}/execs/{exec}", Tag: "Execs", Summary: "Read the record of an exec", Answers: []Answer{ok(detached)},
	},
	{
		ID: "attach", Method: "GET", Path: "/v1/sandboxes/{id}/execs/{exec}/attach", Tag: "Execs", Summary: "Read the output of a detached exec",
		Detail: "JSON lines, or a [WebSocket](websocket.md). The first event has `exec`, `pid` and the `offset` of the first byte; `dropped` counts bytes that are no longer kept. " +
			"The last event has `exit` and `usage`, or `error`. A client that leaves changes nothing. " +
			"To continue, use `from` = `offset` + length of the last output.",
		Query: []Parameter{
			{Name: "from", Type: "string", Default: "start", Detail: "`start`, `end` or an offset in the output. `next`, over a WebSocket, waits for the start of a prepared exec, or of the next main process.", Example: "start"},
			toggle("hold", "Drop no output before this client has taken it: a program that is faster waits."),
		}, Socket: true,
		Answers: []Answer{lines(api.ExecEvent{PID: 7, Exec: "9b1e6c"}, api.ExecEvent{Stream: "stdout", Text: "hi\n"}, api.ExecEvent{Exit: &api.Exit{}, Usage: &usage, Offset: 3})},
	},
	{
		ID: "signalExec", Method: "POST", Path: "/v1/sandboxes/{id}/execs/{exec}/signal", Tag: "Execs", Summary: "Send a signal",
		Body: jsonBody(api.ExecSignal{Signal: "SIGWINCH", All: true}), Answers: []Answer{noContent},
	},
	{
		ID: "resizeExec", Method: "POST", Path: "/v1/sandboxes/{id}/execs/{exec}/resize", Tag: "Execs", Summary: "Resize a terminal",
		Body: jsonBody(api.TerminalSize{Rows: 40, Cols: 120}), Answers: []Answer{noContent},
	},
	{
		ID: "stdin", Method: "POST", Path: "/v1/sandboxes/{id}/execs/{exec}/stdin", Tag: "Execs", Summary: "Write to a program's stdin",
		Detail: "The body is passed on as it arrives. The exec needs `stdin_open` or a terminal.",
		Query:  []Parameter{toggle("close", "Close stdin after the body.")}, Body: bytesBody("echo hi\n"), Answers: []Answer{noContent},
	},
	{
		ID: "deleteExec", Method: "DELETE", Path: "/v1/sandboxes/{id}/execs/{exec}", Tag: "Execs", Summary: "Kill an exec and forget it",
		Detail: "Kills everything that it started, if it runs.", Answers: []Answer{noContent},
	},
	{
		ID: "run", Method: "POST", Path: "/v1/run", Tag: "Execs", Summary: "Create a sandbox, run a program and delete the sandbox",
		Detail: "Answers as an exec does, buffered or streaming. The sandbox takes no `command`.",
		Body:   jsonBody(api.RunRequest{Sandbox: api.CreateSandbox{Image: "host"}, Exec: api.ExecRequest{Argv: []string{"id", "-u"}, Timeout: 10}}),
		Answers: []Answer{
			ok(api.ExecResult{Usage: usage, Stdout: "0\n"}),
			lines(api.ExecEvent{PID: 2, Exec: "9b1e6c"}, api.ExecEvent{Stream: "stdout", Text: "0\n"}, api.ExecEvent{Exit: &api.Exit{}, Usage: &usage}),
		},
	},

	{
		ID: "code", Method: "POST", Path: "/v1/sandboxes/{id}/code", Tag: "Code runs", Summary: "Run source code",
		Detail: "The source is put into a private directory of the sandbox and run by the language's interpreter or compiler there; what was put there is removed afterwards. " +
			"`Accept` selects the answer, as of an exec: one JSON document, or with `application/x-ndjson` one line an event.\n\n" +
			"An exception or a failed compilation is a result, with `error` where its text is clear. " +
			"A language that the sandbox does not have is `language_not_found`; a library that cannot be installed is `install_failed`, with the package manager's output. " +
			"When the timeout ends or the client leaves, everything that the run started is killed.\n\n" +
			"Code has at most 1 MiB, and there are at most 64 libraries. Names of libraries are checked by the rules of their ecosystem, and reach the package manager as arguments. " +
			"With `library_dir` they come from a directory of the sandbox and from nowhere else.\n\n" +
			"The daemon's code policy and that of the request judge the code before it runs, and the operator's hook if there is one. Code that they refuse is `code_refused`, with `findings`. " +
			"Findings that refuse nothing are part of the result. With `check` nothing runs.",
		Body: jsonBody(api.CodeRequest{Code: "print(6 * 7)", Language: "python", Timeout: 10, Policy: "{version: 1, presets: [production]}"}),
		Answers: []Answer{
			ok(api.CodeResult{Results: []api.CodeValue{}, Logs: api.CodeLogs{Stdout: "42\n"}, Usage: usage}),
			lines(
				api.CodeEvent{Type: api.CodeStarted, Time: at}, api.CodeEvent{Type: api.CodeStdout, Time: at, Text: "42\n"},
				api.CodeEvent{Type: api.CodeEnded, Time: at, Exit: &api.Exit{}, Usage: &usage},
			),
		},
	},
	{
		ID: "createContext", Method: "POST", Path: "/v1/sandboxes/{id}/contexts", Tag: "Code runs", Summary: "Create a context",
		Detail: "Starts an interpreter that keeps variables between runs of code, and answers when it is ready. Code runs in it with `context` in [Run source code](#code). " +
			"A sandbox has at most 24 contexts, which are detached execs. They go on while the daemon restarts.\n\n" +
			"Memory is at least 64 MiB. A context that waits does not keep its sandbox from being idle.\n\n" +
			"The daemon's code policy and the operator's hook judge the modules of `preload`, as the code `import A, B`. Modules that they refuse are `code_refused`.",
		Body:    jsonBody(api.CreateContext{Language: "python"}),
		Answers: []Answer{{Status: 201, Type: api.TypeJSON, Value: variables}},
	},
	{
		ID: "listContexts", Method: "GET", Path: "/v1/sandboxes/{id}/contexts", Tag: "Code runs", Summary: "List contexts",
		Answers: []Answer{ok(api.ContextList{Contexts: []api.Context{variables}})},
	},
	{
		ID: "context", Method: "GET", Path: "/v1/sandboxes/{id}/contexts/{context}", Tag: "Code runs", Summary: "Get a context",
		Answers: []Answer{ok(variables)},
	},
	{
		ID: "interruptContext", Method: "POST", Path: "/v1/sandboxes/{id}/contexts/{context}/interrupt", Tag: "Code runs", Summary: "Interrupt the run of a context",
		Detail: "Sends SIGINT to the context's process group; to bash's and R's again every 3 s while the run goes on. A run that does not end within 5 s is killed, and the context restarted; the run's `error` is then `ContextRestarted`. " +
			"Without a run nothing happens. The answer does not wait for the end.",
		Answers: []Answer{ok(variables)},
	},
	{
		ID: "restartContext", Method: "POST", Path: "/v1/sandboxes/{id}/contexts/{context}/restart", Tag: "Code runs", Summary: "Restart a context",
		Detail:  "Kills the context's processes and starts its interpreter anew, without variables. A run under way ends with the `error` `ContextRestarted`.",
		Answers: []Answer{ok(variables)},
	},
	{
		ID: "deleteContext", Method: "DELETE", Path: "/v1/sandboxes/{id}/contexts/{context}", Tag: "Code runs", Summary: "Delete a context",
		Detail:  "Kills the context's processes. A run under way fails.",
		Answers: []Answer{{Status: 204}},
	},
	{
		ID: "languages", Method: "GET", Path: "/v1/languages", Tag: "Code runs", Summary: "List the languages of code runs",
		Detail: "Whether a sandbox has a language depends on its image; `image` names the directory of the project's `images/` whose Dockerfile has it.",
		Answers: []Answer{ok(api.LanguageList{Languages: []api.Language{
			{Name: "python", Aliases: []string{"python3", "py"}, FileName: "main.py", Libraries: "pip", Image: "python"},
		}})},
	},
	{
		ID: "readFile", Method: "GET", Path: "/v1/sandboxes/{id}/files", Tag: "Files", Summary: "Read a file",
		Detail:  "Of a sandbox that runs or has ended. Regular files only; nothing waits for a FIFO or a device. Knows HEAD, `Range` and `If-Range`. `X-File-Mode` is the mode, in octal.",
		Query:   []Parameter{path("/tmp/notes.txt")},
		Answers: []Answer{{Status: 200, Type: api.TypeBytes}, {Status: 206, Type: api.TypeBytes, Detail: "The range that was asked for."}},
	},
	{
		ID: "writeFile", Method: "PUT", Path: "/v1/sandboxes/{id}/files", Tag: "Files", Summary: "Write a file",
		Detail: "The file appears whole or not at all, and missing parents are made. With `append=true` the body is written to its end, part by part; " +
			"what was written before an error stays.",
		Query: []Parameter{
			path("/tmp/notes.txt"),
			{Name: "mode", Type: "string", Default: "0644", Detail: "Octal permissions of a new file.", Example: "0644"},
			{Name: "user", Type: "string", Detail: "Owner; the sandbox's user unless given."},
			toggle("append", "Write to the end of the file."),
		},
		Body: bytesBody("hi\n"), Answers: []Answer{noContent},
	},
	{
		ID: "deleteFile", Method: "DELETE", Path: "/v1/sandboxes/{id}/files", Tag: "Files", Summary: "Remove a file or directory",
		Detail:  "Follows neither links nor mount points. Stops at the first error, or after ten minutes.",
		Query:   []Parameter{path("/tmp/old"), {Name: "recursive", Type: "boolean", Default: "false", Detail: "Remove a whole tree.", Example: "true"}},
		Answers: []Answer{noContent},
	},
	{
		ID: "stat", Method: "GET", Path: "/v1/sandboxes/{id}/stat", Tag: "Files", Summary: "Describe a file",
		Query: []Parameter{path("/tmp/notes.txt"), toggle("follow", "Follow a link in the last place.")}, Answers: []Answer{ok(entry)},
	},
	{
		ID: "list", Method: "GET", Path: "/v1/sandboxes/{id}/list", Tag: "Files", Summary: "List a directory",
		Detail: "The buffered answer is sorted and has at most 10,000 entries and about 3 MiB of names. With `Accept: application/x-ndjson` there are at most a million, " +
			"a directory before its contents, and the last line has `done`. `more` says that something is missing.",
		Query: []Parameter{
			path("/tmp"),
			{Name: "depth", Type: "integer", Default: "1", Detail: "Number of levels, at most 200.", Example: "2"},
			{Name: "limit", Type: "integer", Detail: "Maximum number of entries.", Example: "100"},
		},
		Answers: []Answer{ok(api.FileList{Entries: []api.FileEntry{entry}}), lines(api.ListEvent{Entry: &entry}, api.ListEvent{Done: true})},
	},
	{
		ID: "mkdir", Method: "POST", Path: "/v1/sandboxes/{id}/mkdir", Tag: "Files", Summary: "Make a directory",
		Body: jsonBody(api.MakeDirectory{Path: "/tmp/a/b", Parents: true, Mode: "0755"}), Answers: []Answer{noContent},
	},
	{
		ID: "move", Method: "POST", Path: "/v1/sandboxes/{id}/move", Tag: "Files", Summary: "Rename a file or directory",
		Detail: "Within one file system. A directory of the image cannot be moved; that is a `conflict`, as is a move across file systems.",
		Body:   jsonBody(api.MoveFile{From: "/tmp/a", To: "/tmp/old"}), Answers: []Answer{noContent},
	},
	{
		ID: "watch", Method: "GET", Path: "/v1/sandboxes/{id}/watch", Tag: "Files", Summary: "Watch a file or directory",
		Detail: "The first line has the kind `ready`. `overflow` says that changes at or below `path` were missed. Writes through a mapping are not reported, " +
			"and a change may be reported twice. The answer ends when the path is deleted, with `error` when the sandbox ends, or when the client leaves. " +
			"A sandbox has at most 16 watches on 8,192 directories. Watching does not keep a sandbox from idling.",
		Query:   []Parameter{path("/tmp"), toggle("recursive", "Watch the directories below, too.")},
		Answers: []Answer{lines(api.FileChange{Kind: api.WatchReady, Path: "/tmp"}, api.FileChange{Kind: api.FileCreated, Path: "/tmp/x"})},
	},
	{
		ID: "readArchive", Method: "GET", Path: "/v1/sandboxes/{id}/archive", Tag: "Files", Summary: "Read a tree as a tar",
		Query: []Parameter{path("/tmp")}, Answers: []Answer{{Status: 200, Type: api.TypeTar}},
	},
	{
		ID: "writeArchive", Method: "PUT", Path: "/v1/sandboxes/{id}/archive", Tag: "Files", Summary: "Extract a tar below a directory",
		Query: []Parameter{
			path("/tmp"),
			{Name: "user", Type: "string", Detail: "Owner; the sandbox's user unless given."},
			toggle("owners", "Entries keep the owners that the tar states, where the sandbox has several ids."),
		},
		Body: tarBody("a tar"), Answers: []Answer{noContent},
	},

	{
		ID: "listImages", Method: "GET", Path: "/v1/images", Tag: "Images", Summary: "List stored images",
		Answers: []Answer{ok(api.ImageList{Images: []api.Image{stored}})},
	},
	{
		ID: "pull", Method: "POST", Path: "/v1/images/pull", Tag: "Images", Summary: "Pull an image from a registry",
		Detail: "One line an event; the last has `image` or `error`. `status` is `downloading`, `applying`, `exists` or `done`. " +
			"Credentials are those of the daemon's user ([registries](configuration.md#registries)).",
		Body: jsonBody(api.PullImage{Reference: toolImage}),
		Answers: []Answer{lines(
			api.PullEvent{Layer: digest, Status: "downloading", Bytes: 524288, Total: 1048576}, api.PullEvent{Layer: digest, Status: "done"},
			api.PullEvent{Status: "done", Image: &stored})},
	},
	{
		ID: "push", Method: "POST", Path: "/v1/images/push", Tag: "Images", Summary: "Push a stored image to the registry of its name",
		Detail: "Answers as a pull does; `status` is `uploading`, `exists` or `done`. Blobs go first, then the manifest.",
		Body:   jsonBody(api.PushImage{Reference: "localhost:5000/mine:2"}), Answers: []Answer{lines(api.PullEvent{Status: "done", Image: &stored})},
	},
	{
		ID: "checkRegistry", Method: "POST", Path: "/v1/registries/check", Tag: "Images", Summary: "Ask a registry whether it takes credentials",
		Detail:  "Nothing is kept. Without `auth` the credentials are those of a pull. A registry that cannot be asked is a `registry_error`.",
		Body:    jsonBody(api.CheckRegistry{Registry: "localhost:5000", Auth: &api.RegistryAuth{Username: "me", Password: "secret"}}),
		Answers: []Answer{ok(api.RegistryChecked{Accepted: true})},
	},
	{
		ID: "deleteImage", Method: "DELETE", Path: "/v1/images", Tag: "Images", Summary: "Remove a name, and with the last one the image",
		Detail: "An image that a sandbox uses is a `conflict`; `force=true` takes its name all the same.",
		Query: []Parameter{
			{Name: "reference", Type: "string", Required: true, Detail: "Name of the image.", Example: "localhost:5000/mine:2"}, toggle("force", "Take the name of an image in use."),
		},
		Answers: []Answer{ok(api.ImagesRemoved{Removed: []string{"localhost:5000/mine:2"}, Bytes: 4096})},
	},
	{
		ID: "pruneImages", Method: "POST", Path: "/v1/images/prune", Tag: "Images", Summary: "Remove unused images",
		Detail: "Takes images without a name that no sandbox uses, and the cache of builds; with `all`, every image that no sandbox uses.",
		Body:   optionalBody(api.PruneImages{All: false}), Answers: []Answer{ok(api.ImagesRemoved{Removed: []string{}, Steps: 2, Bytes: 4096})},
	},
	{
		ID: "tag", Method: "POST", Path: "/v1/images/tag", Tag: "Images", Summary: "Give an image another name",
		Body: jsonBody(api.TagImage{Source: "localhost:5000/mine:1", Target: "localhost:5000/mine:2"}), Answers: []Answer{ok(stored)},
	},
	{
		ID: "inspectImage", Method: "GET", Path: "/v1/images/inspect", Tag: "Images", Summary: "Read what is known of an image",
		Query: []Parameter{{Name: "reference", Type: "string", Required: true, Detail: "Name of the image.", Example: toolImage}},
		Answers: []Answer{ok(api.ImageDetail{
			Image: stored, Names: []string{toolImage}, UsedBy: []string{"work"}, Config: api.ImageConfig{Cmd: []string{"sh"}},
			Parts:   []api.ImageLayer{{Digest: digest, DiffID: digest, ChainID: digest, MediaType: "application/vnd.oci.image.layer.v1.tar+gzip", Size: 1048576}},
			History: []api.ImageHistory{{CreatedBy: "COPY . /"}},
		})},
	},
	{
		ID: "verify", Method: "GET", Path: "/v1/images/verify", Tag: "Images", Summary: "Read everything that is stored and report damage",
		Detail: "Every blob must have its digest and size, and every layer its diff id. Every entry of a layer must have its type, permissions, size, target and bytes on disk. " +
			"Owners, times and attributes are not compared. `unseen` counts entries that only the sandboxes' ids may read.",
		Answers: []Answer{ok(api.ImagesVerified{Blobs: 3, Bytes: 1049600, Layers: 1, Entries: 24, Snapshots: 1, Problems: []api.ImageProblem{}})},
	},
	{
		ID: "importImages", Method: "POST", Path: "/v1/images/import", Tag: "Images", Summary: "Import an archive",
		Detail: "The body is an OCI layout, what `docker save` writes or, with `rootfs=true`, a root file system; plain, gzip or zstd. " +
			"It is imported whole or not at all. With `progress=true` the answer is that of a pull.",
		Query: []Parameter{
			{Name: "reference", Type: "string", Detail: "Name of the image; otherwise the archive's own names.", Example: "localhost:5000/imported:1"},
			{Name: "platform", Type: "string", Detail: "Platform of an image for several, such as `linux/amd64`."},
			toggle("rootfs", "The body is a root file system."),
			{Name: "config", Type: "object", JSON: api.ImageConfig{}, Detail: "Configuration of an image made of a root file system."},
			toggle("progress", "Answer with one line an event."),
		},
		Body: tarBody("an archive"), Answers: []Answer{ok(api.ImagesImported{Images: []api.Image{stored}}), lines(api.PullEvent{Status: "done", Images: []api.Image{stored}})},
	},
	{
		ID: "exportImage", Method: "GET", Path: "/v1/images/export", Tag: "Images", Summary: "Export an image as an archive",
		Query: []Parameter{
			{Name: "reference", Type: "string", Required: true, Detail: "Name of the image.", Example: toolImage},
			{Name: "format", Type: "string", Enum: []string{"oci", "docker"}, Default: "oci", Detail: "OCI layout, or what `docker load` reads."},
		},
		Answers: []Answer{{Status: 200, Type: api.TypeTar}},
	},
	{
		ID: "build", Method: "POST", Path: "/v1/builds", Tag: "Images", Summary: "Build an image of a Dockerfile",
		Detail: "The body is the context; plain, gzip or zstd. One line an event; the last has `image` or `error`. [Builds](builds.md) lists what is understood and what is bounded. " +
			"Secrets for `RUN --mount=type=secret` come in the header `" + api.HeaderBuildSecrets + "`: the base64 encoding of a JSON object that has the base64 encoding of each secret by its id.",
		Query: []Parameter{{Name: "options", Type: "object", JSON: api.Build{}, Detail: "What to build, as JSON.", Example: `{"tags":["localhost:5000/built:1"]}`}},
		Body:  tarBody("a context"),
		Answers: []Answer{lines(
			api.BuildEvent{Step: 1, Steps: 2, Stage: "0", Line: 1, Text: "FROM " + toolImage, Status: api.BuildDone},
			api.BuildEvent{Stream: "stdout", Output: "hi\n"}, api.BuildEvent{Image: &stored})},
	},

	{
		ID: "listNetworks", Method: "GET", Path: "/v1/networks", Tag: "Networks", Summary: "List named networks",
		Detail: "Those of the caller that were made, or that a sandbox names in `network.join`, by name, with the sandboxes in them and their addresses.",
		Query: []Parameter{
			{Name: "label", Type: "string", Repeated: true, Detail: "`KEY=VALUE` that a network must have.", Example: "app=shop"},
		},
		Answers: []Answer{ok(api.NetworkList{Networks: []api.NamedNetwork{back}})},
	},
	{
		ID: "createNetwork", Method: "POST", Path: "/v1/networks", Tag: "Networks", Summary: "Make a named network",
		Detail: "It stays while no sandbox is in it. One that was made before is `exists`. A sandbox that names a network which does not exist makes it for as long as it names it. A caller has at most 256.",
		Body:   jsonBody(api.CreateNetwork{Name: "back", Labels: map[string]string{"app": "shop"}}), Answers: []Answer{created(emptyBack())},
	},
	{
		ID: "pruneNetworks", Method: "POST", Path: "/v1/networks/prune", Tag: "Networks", Summary: "Delete unused networks",
		Detail: "Takes named networks that no sandbox is in.",
		Body:   optionalBody(api.PruneNetworks{}), Answers: []Answer{ok(api.NetworksRemoved{Removed: []string{"back"}})},
	},
	{
		ID: "network", Method: "GET", Path: "/v1/networks/{network}", Tag: "Networks", Summary: "Read a named network",
		Answers: []Answer{ok(back)},
	},
	{
		ID: "deleteNetwork", Method: "DELETE", Path: "/v1/networks/{network}", Tag: "Networks", Summary: "Delete a named network",
		Detail: "One that a sandbox is in, running or not, is a `conflict` that names the sandboxes.", Answers: []Answer{noContent},
	},
	{
		ID: "connectNetwork", Method: "POST", Path: "/v1/networks/{network}/connect", Tag: "Networks", Summary: "Put a sandbox into a named network",
		Detail: "The sandbox does not run, or has a network: one that runs without is a `conflict`. In a network that it is in, its aliases are replaced.",
		Body:   jsonBody(api.ConnectNetwork{Sandbox: "work", Aliases: []string{"db"}}), Answers: []Answer{noContent},
	},
	{
		ID: "disconnectNetwork", Method: "POST", Path: "/v1/networks/{network}/disconnect", Tag: "Networks", Summary: "Take a sandbox out of a named network",
		Detail: "Of a sandbox that runs, the connections from and to those with which it shares no other network are reset before the answer. " +
			"Where the gateway cannot be asked, nothing is changed. A sandbox that was started in a network can join one again while it runs.",
		Body: jsonBody(api.DisconnectNetwork{Sandbox: "work"}), Answers: []Answer{noContent},
	},

	{
		ID: "listVolumes", Method: "GET", Path: "/v1/volumes", Tag: "Volumes", Summary: "List volumes",
		Detail: "Those of the caller, by name, with the sandboxes that have them.",
		Query: []Parameter{
			{Name: "label", Type: "string", Repeated: true, Detail: "`KEY=VALUE` that a volume must have.", Example: "app=shop"},
			{Name: "dangling", Type: "boolean", Detail: "Only volumes that no sandbox has (`true`), or that one has (`false`).", Example: "true"},
		},
		Answers: []Answer{ok(api.VolumeList{Volumes: []api.Volume{cache}})},
	},
	{
		ID: "createVolume", Method: "POST", Path: "/v1/volumes", Tag: "Volumes", Summary: "Make a volume",
		Detail: "A volume of the name that is like the one that is asked for is the answer, with the status 200. " +
			"A sandbox that names a volume which does not exist makes it, too. A caller has at most 1024.",
		Body: optionalBody(api.CreateVolume{Name: "cache", Labels: map[string]string{"app": "shop"}, Size: 1 << 30}), Answers: []Answer{created(cache), ok(cache)},
	},
	{
		ID: "importVolume", Method: "POST", Path: "/v1/volumes/import", Tag: "Volumes", Summary: "Fill a volume from a tar",
		Detail: "The volume is made, or has no files and no running sandbox. All of the archive is unpacked, or nothing. Links are kept as they are and never followed; " +
			"devices, sockets and extended attributes other than `user.*` are left out and listed in `skipped`.",
		Query: []Parameter{
			{Name: "name", Type: "string", Detail: "Name of the volume; made up if there is none.", Example: "copy"},
			{Name: "size", Type: "integer", Detail: "As in createVolume.", Example: "1073741824"},
			{Name: "inodes", Type: "integer", Detail: "As in createVolume.", Example: "20000"},
			{Name: "label", Type: "string", Repeated: true, Detail: "`KEY=VALUE`.", Example: "app=shop"},
		},
		Body: tarBody("the files, plain or compressed with gzip or zstd"), Answers: []Answer{created(api.VolumeImported{Volume: cache, Files: 3, Bytes: 4096})},
	},
	{
		ID: "pruneVolumes", Method: "POST", Path: "/v1/volumes/prune", Tag: "Volumes", Summary: "Delete unused volumes",
		Detail: "Takes anonymous volumes that no sandbox has; with `all` also those with a name of their own.",
		Body:   optionalBody(api.PruneVolumes{All: true}), Answers: []Answer{ok(api.VolumesRemoved{Removed: []string{"cache"}, Bytes: 10240})},
	},
	{
		ID: "volume", Method: "GET", Path: "/v1/volumes/{volume}", Tag: "Volumes", Summary: "Read a volume", Detail: "Its files are counted for the answer.",
		Answers: []Answer{ok(countedCache())},
	},
	{
		ID: "exportVolume", Method: "GET", Path: "/v1/volumes/{volume}/export", Tag: "Volumes", Summary: "Export the files of a volume",
		Detail: "A tar, with owners as sandboxes see them. Sandboxes may write meanwhile; a file that changes while it is read ends the answer with an error. " +
			"Holes of files are sent as zeros, up to 1 TiB in all.",
		Answers: []Answer{{Status: 200, Type: api.TypeTar}},
	},
	{
		ID: "deleteVolume", Method: "DELETE", Path: "/v1/volumes/{volume}", Tag: "Volumes", Summary: "Delete a volume",
		Detail: "One that a sandbox has, running or not, is a `conflict` that names the sandboxes.", Answers: []Answer{noContent},
	},

	{
		ID: "listSecrets", Method: "GET", Path: "/v1/secrets", Tag: "Secrets", Summary: "List secrets",
		Detail:  "Those of the caller, by name, without their values; the operator's include those of the daemon's file (`--secrets`).",
		Answers: []Answer{ok(api.SecretList{Secrets: []api.Secret{github}})},
	},
	{
		ID: "setSecret", Method: "PUT", Path: "/v1/secrets/{secret}", Tag: "Secrets", Summary: "Store a secret",
		Detail: "In the place of one that has its name. No answer ever has the value; it is kept sealed. Sandboxes get a secret by `network.secrets`: " +
			"they have a placeholder, and the gateway puts the value into requests of the host, methods and paths. " +
			"Running sandboxes that have the secret use the new one at once, and keep their placeholder and variable. " +
			"A tenant has at most 256; all secrets of one sandbox come to at most about 24 KiB.",
		Body: jsonBody(api.SetSecret{
			Kind: api.SecretBearer, Value: "ghp_0123456789", Host: "api.github.com", Methods: []string{"GET"}, Paths: []string{"/repos/*"}, Variable: "GITHUB_TOKEN",
		}),
		Answers: []Answer{ok(github)},
	},
	{
		ID: "deleteSecret", Method: "DELETE", Path: "/v1/secrets/{secret}", Tag: "Secrets", Summary: "Remove a secret",
		Detail: "Running sandboxes that have it are left with a placeholder that stands for nothing.", Answers: []Answer{noContent},
	},

	{
		ID: "startAgentRun", Method: "POST", Path: "/v1/agent/runs", Tag: "Agent runs", Summary: "Start an agent run that the daemon hosts",
		Detail: "Fields are the flags of `sandboxd agent run`; defaults come from the daemon's environment and its user's settings. " +
			"`input_dir` and `model.replay` must lie below a directory of `serve --agent-inputs`. The model's key is stored nowhere. " +
			"At most `serve --agent-runs` runs (8) go on at a time.",
		Body: jsonBody(api.StartAgentRun{
			Query: "How many primes are below 10^6?", Model: api.AgentModel{Name: "openai/gpt-x", Key: "sk-example"}, Budget: api.AgentBudget{Turns: 30}, Policy: "careful",
		}),
		Answers: []Answer{created(hostedRun)},
	},
	{
		ID: "agentRuns", Method: "GET", Path: "/v1/agent/runs", Tag: "Agent runs", Summary: "List agent runs", Detail: "Oldest first.",
		Answers: []Answer{ok(api.AgentRunList{Runs: []api.AgentRun{hostedRun}})},
	},
	{
		ID: "agentRun", Method: "GET", Path: "/v1/agent/runs/{run}", Tag: "Agent runs", Summary: "Read how a run stands", Answers: []Answer{ok(hostedRun)},
	},
	{
		ID: "deleteAgentRun", Method: "DELETE", Path: "/v1/agent/runs/{run}", Tag: "Agent runs", Summary: "Delete a run",
		Detail: "With its directory, its sandbox and the snapshots of its turns. A run that goes on is a `conflict`.", Answers: []Answer{noContent},
	},
	{
		ID: "agentEvents", Method: "GET", Path: "/v1/agent/runs/{run}/events", Tag: "Agent runs", Summary: "Follow the record of a run",
		Detail:  "A line has `event`, a line of `record.jsonl` ([agent](agent.md#the-record)), or `omitted`, the size of one above 3 MiB. The last line has `run`.",
		Query:   []Parameter{{Name: "from", Type: "integer", Default: "1", Detail: "Number of the first line.", Example: "1"}},
		Answers: []Answer{lines(api.AgentRunEvent{N: 1, Event: json.RawMessage(`{"type":"start"}`)}, api.AgentRunEvent{Run: endedRun()})},
	},
	{
		ID: "resumeAgentRun", Method: "POST", Path: "/v1/agent/runs/{run}/resume", Tag: "Agent runs", Summary: "Continue a stopped or ended run",
		Detail: "Fields that are left out are those of the record. The model's key must be given again.",
		Body:   optionalBody(api.ResumeAgentRun{Model: api.AgentModel{Key: "sk-example"}, Message: "Check the last digit."}), Answers: []Answer{ok(hostedRun)},
	},
	{
		ID: "cancelAgentRun", Method: "POST", Path: "/v1/agent/runs/{run}/cancel", Tag: "Agent runs", Summary: "Interrupt a run",
		Detail: "The run collects its output and ends; the answer does not wait for that. `keep` leaves the sandbox, stopped, for a resume.",
		Body:   optionalBody(api.CancelAgentRun{Keep: true}), Answers: []Answer{{Status: http.StatusAccepted, Type: api.TypeJSON, Value: hostedRun}},
	},
}
