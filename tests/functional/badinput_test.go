package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Each bad request gets one clear error: the code, the name of the thing, and nothing left behind.
func TestBadRequestsAreAnsweredClearly(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "one"})
	deleted := d.Create(t, api.CreateSandbox{})
	deleted.Delete(t)
	s.Sh(t, "echo x >/tmp/not-executable; printf '#!/no/such/interpreter\\n' >/tmp/script; chmod +x /tmp/script")
	var detached api.Exec
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/exec", api.ExecRequest{Argv: []string{"sleep", "600"}, Detach: true}, &detached); err != nil {
		t.Fatal(err)
	}
	execs := "/v1/sandboxes/" + s.ID + "/execs/" + detached.ID
	before := d.Snapshot(t)

	sandboxes, exec, code, contexts := "/v1/sandboxes", "/v1/sandboxes/"+s.ID+"/exec", "/v1/sandboxes/"+s.ID+"/code", "/v1/sandboxes/"+s.ID+"/contexts"
	huge := []byte(`{"image":"` + strings.Repeat("a", 33<<20) + `"}`)
	for _, test := range []struct {
		name         string
		method, path string
		body         any
		code         api.Code
		says         string
	}{
		{"unknown route", "GET", "/v1/nothing", nil, api.CodeNotFound, ""},
		{"unknown field", "POST", sandboxes, []byte(`{"image":"host","privileged":true}`), api.CodeInvalid, "privileged"},
		{"field of the wrong type", "POST", sandboxes, []byte(`{"env":"A=b"}`), api.CodeInvalid, "env"},
		{"not JSON", "POST", sandboxes, []byte(`image: host`), api.CodeInvalid, ""},
		{"two documents", "POST", sandboxes, []byte(`{} {}`), api.CodeInvalid, ""},
		{"no body", "POST", exec, nil, api.CodeInvalid, ""},
		{"huge body", "POST", sandboxes, huge, api.CodeTooLarge, ""},
		{"deep body", "POST", sandboxes, []byte(`{"labels":` + strings.Repeat(`{"a":`, 20000) + strings.Repeat("}", 20001)), api.CodeInvalid, ""},
		{"unknown image", "POST", sandboxes, api.CreateSandbox{Image: "127.0.0.1:1/never:pulled"}, api.CodeNotFound, "never"},
		{"malformed reference", "POST", sandboxes, api.CreateSandbox{Image: "UPPER/../case"}, api.CodeInvalid, "UPPER"},
		{"name in use", "POST", sandboxes, api.CreateSandbox{Name: "one"}, api.CodeExists, "one"},
		{"name as a path", "POST", sandboxes, api.CreateSandbox{Name: "../../etc"}, api.CodeInvalid, "name"},
		{"unknown profile", "POST", sandboxes, api.CreateSandbox{Profile: "nonesuch"}, api.CodeInvalid, "nonesuch"},
		{"unknown network mode", "POST", sandboxes, api.CreateSandbox{Network: api.Network{Mode: "host"}}, api.CodeInvalid, "host"},
		{"negative memory", "POST", sandboxes, api.CreateSandbox{Limits: api.Limits{Memory: -1}}, api.CodeInvalid, "memory"},
		{"negative pids", "POST", sandboxes, api.CreateSandbox{Limits: api.Limits{Pids: -1}}, api.CodeInvalid, "pids"},
		{"weight out of range", "POST", sandboxes, api.CreateSandbox{Limits: api.Limits{CPUWeight: 10001}}, api.CodeInvalid, "cpu_weight"},
		{"cores that are no list", "POST", sandboxes, api.CreateSandbox{Limits: api.Limits{CPUSet: "0;1"}}, api.CodeInvalid, "0;1"},
		{"negative io", "POST", sandboxes, api.CreateSandbox{Limits: api.Limits{IO: api.IOLimits{WriteBPS: -1}}}, api.CodeInvalid, "write_bps"},
		{"change of nofile", "PATCH", "/v1/sandboxes/" + s.ID, []byte(`{"limits":{"nofile":10}}`), api.CodeInvalid, "nofile"},
		{"change of the image", "PATCH", "/v1/sandboxes/" + s.ID, []byte(`{"image":"other"}`), api.CodeInvalid, "image"},
		{"change of a label without a key", "PATCH", "/v1/sandboxes/" + s.ID, []byte(`{"labels":{"":"v"}}`), api.CodeInvalid, "label"},
		{"change of what never was", "PATCH", "/v1/sandboxes/nonesuch", []byte(`{}`), api.CodeNotFound, "nonesuch"},
		{"stop with a negative grace", "POST", "/v1/sandboxes/" + s.ID + "/stop", []byte(`{"grace":-1}`), api.CodeInvalid, "grace"},
		{"stop with an endless grace", "POST", "/v1/sandboxes/" + s.ID + "/stop", []byte(`{"grace":1e9}`), api.CodeInvalid, "grace"},
		{"stop of what never was", "POST", "/v1/sandboxes/nonesuch/stop", nil, api.CodeNotFound, "nonesuch"},
		{"snapshot of what never was", "POST", "/v1/sandboxes/nonesuch/snapshots", nil, api.CodeNotFound, "nonesuch"},
		{"snapshot with a path for a name", "POST", "/v1/sandboxes/" + s.ID + "/snapshots", api.TakeSnapshot{Name: "../x"}, api.CodeInvalid, "name"},
		{"snapshot with an unknown field", "POST", "/v1/sandboxes/" + s.ID + "/snapshots", []byte(`{"live":true}`), api.CodeInvalid, "live"},
		{"snapshots of what never was", "GET", "/v1/sandboxes/nonesuch/snapshots", nil, api.CodeNotFound, "nonesuch"},
		{"snapshots with a parameter", "GET", "/v1/snapshots?all=1", nil, api.CodeInvalid, "all"},
		{"snapshot that never was", "GET", "/v1/snapshots/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"removal of a snapshot that never was", "DELETE", "/v1/snapshots/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"export of a snapshot that never was", "GET", "/v1/snapshots/nonesuch/export", nil, api.CodeNotFound, "nonesuch"},
		{"import of what is no snapshot", "POST", "/v1/snapshots/import", []byte("no tar"), api.CodeImage, "tar"},
		{"network with a path for a name", "POST", "/v1/networks", api.CreateNetwork{Name: "../x"}, api.CodeInvalid, "../x"},
		{"network without a name", "POST", "/v1/networks", api.CreateNetwork{}, api.CodeInvalid, "up to 63 letters"},
		{"network with an unknown field", "POST", "/v1/networks", []byte(`{"name":"x","driver":"overlay"}`), api.CodeInvalid, "driver"},
		{"network with a label that is none", "POST", "/v1/networks", api.CreateNetwork{Name: "x", Labels: map[string]string{"a=b": "c"}}, api.CodeInvalid, "a=b"},
		{"network that never was", "GET", "/v1/networks/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"removal of a network that never was", "DELETE", "/v1/networks/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"connection to a network that never was", "POST", "/v1/networks/nonesuch/connect", api.ConnectNetwork{Sandbox: "one"}, api.CodeNotFound, "nonesuch"},
		{"disconnection from a network that it is not in", "POST", "/v1/networks/nonesuch/disconnect", api.DisconnectNetwork{Sandbox: "one"}, api.CodeNotFound, "nonesuch"},
		{"networks of a label that is none", "GET", "/v1/networks?label=x", nil, api.CodeInvalid, "key=value"},
		{"alias in a network that it is not in", "POST", sandboxes, api.CreateSandbox{Network: api.Network{Join: []string{"a"}, Aliases: map[string][]string{"b": {"x"}}}}, api.CodeInvalid, "not in network"},
		{"alias with a dot", "POST", sandboxes, api.CreateSandbox{Network: api.Network{Join: []string{"a"}, Aliases: map[string][]string{"a": {"x.y"}}}}, api.CodeInvalid, "x.y"},
		{"volume with a path for a name", "POST", "/v1/volumes", api.CreateVolume{Name: "../x"}, api.CodeInvalid, "../x"},
		{"volume of less than nothing", "POST", "/v1/volumes", api.CreateVolume{Size: -1}, api.CodeInvalid, "negative"},
		{"volume with an unknown field", "POST", "/v1/volumes", []byte(`{"driver":"nfs"}`), api.CodeInvalid, "driver"},
		{"volume that never was", "GET", "/v1/volumes/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"removal of a volume that never was", "DELETE", "/v1/volumes/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"export of a volume that never was", "GET", "/v1/volumes/nonesuch/export", nil, api.CodeNotFound, "nonesuch"},
		{"import of a size that is none", "POST", "/v1/volumes/import?size=1g", []byte("x"), api.CodeInvalid, "1g"},
		{"import of what is no archive", "POST", "/v1/volumes/import", []byte("no tar"), api.CodeInvalid, "entry 1"},
		{"volumes of a label that is none", "GET", "/v1/volumes?label=x", nil, api.CodeInvalid, "key=value"},
		{"dangling volumes, perhaps", "GET", "/v1/volumes?dangling=maybe", nil, api.CodeInvalid, "maybe"},
		{"volume for a path", "POST", sandboxes, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{{Type: api.MountVolume, Source: "/etc", Target: "/x"}}}}, api.CodeInvalid, "bind"},
		{"volume over /proc", "POST", sandboxes, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{{Type: api.MountVolume, Target: "/proc/x"}}}}, api.CodeInvalid, "/proc"},
		{"volume that says it is anonymous", "POST", sandboxes, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{{Type: api.MountVolume, Source: "x", Target: "/x", Anonymous: true}}}}, api.CodeInvalid, "anonymous"},
		{"import of nothing", "POST", "/v1/snapshots/import", []byte(nil), api.CodeImage, "empty"},
		{"fork of what never was", "POST", "/v1/sandboxes/nonesuch/fork", nil, api.CodeNotFound, "nonesuch"},
		{"forks that are too many", "POST", "/v1/sandboxes/" + s.ID + "/fork", api.ForkSandbox{Count: 101}, api.CodeInvalid, "count"},
		{"forks with too few names", "POST", "/v1/sandboxes/" + s.ID + "/fork", api.ForkSandbox{Count: 2, Names: []string{"a"}}, api.CodeInvalid, "names"},
		{"rollback without a snapshot", "POST", "/v1/sandboxes/" + s.ID + "/rollback", []byte(`{}`), api.CodeInvalid, "snapshot"},
		{"rollback to what never was", "POST", "/v1/sandboxes/" + s.ID + "/rollback", api.RollbackSandbox{Snapshot: "nonesuch"}, api.CodeNotFound, "nonesuch"},
		{"sandbox of a snapshot that never was", "POST", sandboxes, api.CreateSandbox{Snapshot: "nonesuch"}, api.CodeNotFound, "nonesuch"},
		{"sandbox of a snapshot and an image", "POST", sandboxes, api.CreateSandbox{Snapshot: "nonesuch", Image: "host"}, api.CodeInvalid, "image"},
		{"start of what never was", "POST", "/v1/sandboxes/nonesuch/start", nil, api.CodeNotFound, "nonesuch"},
		{"start of what runs", "POST", "/v1/sandboxes/" + s.ID + "/start", nil, api.CodeConflict, "running"},
		{"start with a negative timeout", "POST", "/v1/sandboxes/" + s.ID + "/start", []byte(`{"timeout":-2}`), api.CodeInvalid, "timeout"},
		{"main process that is not there", "POST", sandboxes, api.CreateSandbox{Command: []string{"no-such-program"}}, api.CodeProgramMissing, "no-such-program"},
		{"main process without a name", "POST", sandboxes, api.CreateSandbox{Command: []string{""}}, api.CodeInvalid, "command"},
		{"terminal of no main process", "POST", sandboxes, api.CreateSandbox{TTY: true}, api.CodeInvalid, "command"},
		{"run of a main process", "POST", "/v1/run", api.RunRequest{Sandbox: api.CreateSandbox{Command: []string{"true"}}, Exec: api.ExecRequest{Argv: []string{"true"}}}, api.CodeInvalid, "command"},
		{"log of no main process", "GET", "/v1/sandboxes/" + s.ID + "/logs", nil, api.CodeConflict, "command"},
		{"log with a negative tail", "GET", "/v1/sandboxes/" + s.ID + "/logs?tail=-1", nil, api.CodeInvalid, "tail"},
		{"log since nobody knows", "GET", "/v1/sandboxes/" + s.ID + "/logs?since=noon", nil, api.CodeInvalid, "since"},
		{"log of what never was", "GET", "/v1/sandboxes/nonesuch/logs", nil, api.CodeNotFound, "nonesuch"},
		{"wait for what never was", "GET", "/v1/sandboxes/nonesuch/wait", nil, api.CodeNotFound, "nonesuch"},
		{"wait with a parameter", "GET", "/v1/sandboxes/" + s.ID + "/wait?for=ever", nil, api.CodeInvalid, "for"},
		{"stats of what never was", "GET", "/v1/sandboxes/nonesuch/stats", nil, api.CodeNotFound, "nonesuch"},
		{"negative timeout", "POST", sandboxes, api.CreateSandbox{Timeout: -2}, api.CodeInvalid, "timeout"},
		{"environment without a name", "POST", sandboxes, api.CreateSandbox{Env: []string{"=NONAME"}}, api.CodeInvalid, "env[0]"}, // not its value, which may be a secret,
		{"environment with NUL", "POST", sandboxes, api.CreateSandbox{Env: []string{"A=b\x00c"}}, api.CodeInvalid, "env"},
		{"relative directory", "POST", sandboxes, api.CreateSandbox{Cwd: "tmp"}, api.CodeInvalid, "cwd"},
		{"user with a colon too many", "POST", sandboxes, api.CreateSandbox{User: "1:2:3"}, api.CodeInvalid, "1:2:3"},
		{"unknown user", "POST", exec, api.ExecRequest{Argv: []string{"true"}, User: "nobody-of-this-name"}, api.CodeInvalid, "nobody-of-this-name"},
		{"missing program", "POST", exec, api.ExecRequest{Argv: []string{"no-such-program"}}, api.CodeProgramMissing, "no-such-program"},
		{"missing program by path", "POST", exec, api.ExecRequest{Argv: []string{"/no/such/program"}}, api.CodeProgramMissing, "/no/such/program"},
		{"missing interpreter", "POST", exec, api.ExecRequest{Argv: []string{"/tmp/script"}}, api.CodeProgramMissing, "/tmp/script"},
		{"not executable", "POST", exec, api.ExecRequest{Argv: []string{"/tmp/not-executable"}}, api.CodeProgramDenied, "/tmp/not-executable"},
		{"a directory", "POST", exec, api.ExecRequest{Argv: []string{"/tmp"}}, api.CodeProgramDenied, "/tmp"},
		{"no program", "POST", exec, api.ExecRequest{}, api.CodeInvalid, "argv"},
		{"empty program", "POST", exec, api.ExecRequest{Argv: []string{""}}, api.CodeInvalid, "argv"},
		{"argument with NUL", "POST", exec, api.ExecRequest{Argv: []string{"echo", "a\x00b"}}, api.CodeInvalid, "argv"},
		{"missing directory", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Cwd: "/no/such/dir"}, api.CodeInvalid, "/no/such/dir"},
		{"unknown limit of an exec", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Rlimits: map[string]uint64{"niceness": 1}}, api.CodeInvalid, "niceness"},
		{"limit of an exec above the sandbox's", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Rlimits: map[string]uint64{"nofile": 1 << 40}}, api.CodeInvalid, "nofile"},
		{"limit of an exec that is negative", "POST", exec, []byte(`{"argv":["true"],"rlimits":{"nofile":-1}}`), api.CodeInvalid, "rlimits"},
		{"open stdin without detach", "POST", exec, api.ExecRequest{Argv: []string{"true"}, StdinOpen: true}, api.CodeInvalid, "stdin_open"},
		{"detach with an output limit out of range", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Detach: true, OutputLimit: 1 << 30}, api.CodeInvalid, "output_limit"},
		{"detach of a missing program", "POST", exec, api.ExecRequest{Argv: []string{"no-such-program"}, Detach: true}, api.CodeProgramMissing, "no-such-program"},
		{"detach in a run", "POST", "/v1/run", api.RunRequest{Exec: api.ExecRequest{Argv: []string{"true"}, Detach: true}}, api.CodeInvalid, "detach"},
		{"directory below a file", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Cwd: "/etc/passwd/x", CwdCreate: true}, api.CodeInvalid, "/etc/passwd/x"},
		{"execs of what never was", "GET", "/v1/sandboxes/nonesuch/execs", nil, api.CodeNotFound, "nonesuch"},
		{"exec that never was", "GET", exec + "s/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"delete of an exec that never was", "DELETE", exec + "s/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"attach to what never was", "GET", exec + "s/nonesuch/attach", nil, api.CodeNotFound, "nonesuch"},
		{"attach from nowhere", "GET", execs + "/attach?from=yesterday", nil, api.CodeInvalid, "yesterday"},
		{"attach from before the beginning", "GET", execs + "/attach?from=-1", nil, api.CodeInvalid, "-1"},
		{"attach from the future", "GET", execs + "/attach?from=999999", nil, api.CodeInvalid, "999999"},
		{"attach with an unknown parameter", "GET", execs + "/attach?since=1", nil, api.CodeInvalid, "since"},
		{"signal that is none", "POST", execs + "/signal", api.ExecSignal{Signal: "SIGNONE"}, api.CodeInvalid, "SIGNONE"},
		{"signal to all and one", "POST", execs + "/signal", api.ExecSignal{Signal: "TERM", All: true, Main: true}, api.CodeInvalid, "main"},
		{"exec with large annotations", "POST", exec, api.ExecRequest{Argv: []string{"true"}, Annotations: map[string]string{"a": strings.Repeat("b", 5000)}}, api.CodeInvalid, "annotations"},
		{"stop by no signal", "POST", "/v1/sandboxes/" + s.ID + "/stop", api.StopSandbox{Signal: "NONE"}, api.CodeInvalid, "signal"},
		{"update to no restart policy", "PATCH", "/v1/sandboxes/" + s.ID, api.UpdateSandbox{Restart: new("sometimes")}, api.CodeInvalid, "restart"},
		{"update to restarts of nothing", "PATCH", "/v1/sandboxes/" + s.ID, api.UpdateSandbox{Restart: new("always")}, api.CodeInvalid, "main process"},
		{"mount of a volume that is to be made on the host", "POST", sandboxes, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{{Type: "volume", Source: "v", Target: "/v", Create: true}}}}, api.CodeInvalid, "create"},
		{"signal without a name", "POST", execs + "/signal", []byte(`{}`), api.CodeInvalid, "signal"},
		{"signal with an unknown field", "POST", execs + "/signal", []byte(`{"signal":"TERM","pid":1}`), api.CodeInvalid, "pid"},
		{"resize of what has no terminal", "POST", execs + "/resize", api.TerminalSize{Rows: 1, Cols: 1}, api.CodeInvalid, "terminal"},
		{"resize to nothing", "POST", execs + "/resize", api.TerminalSize{}, api.CodeInvalid, "rows"},
		{"stdin that is not open", "POST", execs + "/stdin", []byte("x"), api.CodeConflict, "stdin"},
		{"stdin with an odd close", "POST", execs + "/stdin?close=maybe", []byte("x"), api.CodeInvalid, "maybe"},
		{"processes of what never was", "GET", "/v1/sandboxes/nonesuch/processes", nil, api.CodeNotFound, "nonesuch"},
		{"path with NUL", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp%2Fa%00b", []byte("x"), api.CodeInvalid, "path"},
		{"relative path", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=..%2Fx", []byte("x"), api.CodeInvalid, "path"},
		{"no path", "GET", "/v1/sandboxes/" + s.ID + "/files", nil, api.CodeInvalid, "path"},
		{"missing file", "GET", "/v1/sandboxes/" + s.ID + "/files?path=%2Fno%2Fsuch", nil, api.CodeNotFound, "/no/such"},
		{"append, not true or false", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp%2Fx&append=1", []byte("x"), api.CodeInvalid, "append"},
		{"mode of words", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp%2Fx&mode=rw", []byte("x"), api.CodeInvalid, "mode"},
		{"append to a directory", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp&append=true", []byte("x"), api.CodeInvalid, "/tmp"},
		{"append to a device", "PUT", "/v1/sandboxes/" + s.ID + "/files?path=%2Fdev%2Fnull&append=true", []byte("x"), api.CodeInvalid, "/dev/null"},
		{"remove of nothing", "DELETE", "/v1/sandboxes/" + s.ID + "/files", nil, api.CodeInvalid, "path"},
		{"remove of the root", "DELETE", "/v1/sandboxes/" + s.ID + "/files?path=%2F&recursive=true", nil, api.CodeConflict, "root"},
		{"remove of a full directory", "DELETE", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp", nil, api.CodeConflict, "recursive"},
		{"remove with an unknown parameter", "DELETE", "/v1/sandboxes/" + s.ID + "/files?path=%2Ftmp&force=true", nil, api.CodeInvalid, "force"},
		{"stat of a relative path", "GET", "/v1/sandboxes/" + s.ID + "/stat?path=x", nil, api.CodeInvalid, "absolute"},
		{"stat of a missing file", "GET", "/v1/sandboxes/" + s.ID + "/stat?path=%2Fno%2Fsuch", nil, api.CodeNotFound, "/no/such"},
		{"list of a file", "GET", "/v1/sandboxes/" + s.ID + "/list?path=%2Fetc%2Fpasswd", nil, api.CodeInvalid, "not a directory"},
		{"list of depth 0", "GET", "/v1/sandboxes/" + s.ID + "/list?path=%2F&depth=0", nil, api.CodeInvalid, "depth"},
		{"list of depth 201", "GET", "/v1/sandboxes/" + s.ID + "/list?path=%2F&depth=201", nil, api.CodeInvalid, "depth"},
		{"list of too many", "GET", "/v1/sandboxes/" + s.ID + "/list?path=%2F&limit=10001", nil, api.CodeInvalid, "limit"},
		{"mkdir without a path", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{}, api.CodeInvalid, "path"},
		{"mkdir with two paths", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp/a", PathBytes: []byte("/tmp/b")}, api.CodeInvalid, "path_bytes"},
		{"mkdir with NUL", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp/a\x00b"}, api.CodeInvalid, "NUL"},
		{"mkdir with a bad mode", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp/a", Mode: "1777"}, api.CodeInvalid, "1777"},
		{"mkdir for nobody", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp/a", User: "nobody-of-this-name"}, api.CodeInvalid, "nobody-of-this-name"},
		{"mkdir of what there is", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp"}, api.CodeExists, "/tmp"},
		{"mkdir of a long name", "POST", "/v1/sandboxes/" + s.ID + "/mkdir", api.MakeDirectory{Path: "/tmp/" + strings.Repeat("x", 256)}, api.CodeInvalid, "too long"},
		{"move to nowhere", "POST", "/v1/sandboxes/" + s.ID + "/move", api.MoveFile{From: "/tmp/script"}, api.CodeInvalid, "to"},
		{"move of nothing", "POST", "/v1/sandboxes/" + s.ID + "/move", api.MoveFile{From: "/no/such", To: "/tmp/x"}, api.CodeNotFound, "/no"},
		{"move across file systems", "POST", "/v1/sandboxes/" + s.ID + "/move", api.MoveFile{From: "/tmp/script", To: "/dev/shm/script"}, api.CodeConflict, "one file system"},
		{"move with dots", "POST", "/v1/sandboxes/" + s.ID + "/move", api.MoveFile{From: "/tmp/../script", To: "/tmp/x"}, api.CodeInvalid, ".."},
		{"watch of nothing", "GET", "/v1/sandboxes/" + s.ID + "/watch?path=%2Fno%2Fsuch", nil, api.CodeNotFound, "/no/such"},
		{"watch of proc", "GET", "/v1/sandboxes/" + s.ID + "/watch?path=%2Fproc&recursive=true", nil, api.CodeInvalid, "/proc"},
		{"watch, neither true nor false", "GET", "/v1/sandboxes/" + s.ID + "/watch?path=%2Ftmp&recursive=yes", nil, api.CodeInvalid, "recursive"},
		{"code of no language", "POST", code, api.CodeRequest{Code: "x", Language: "cobol"}, api.CodeInvalid, "cobol"},
		{"code of nothing", "POST", code, api.CodeRequest{}, api.CodeInvalid, "empty"},
		{"too much code", "POST", code, api.CodeRequest{Code: strings.Repeat("#", 1<<20+1)}, api.CodeTooLarge, "1048577"},
		{"code with a library that is an option", "POST", code, api.CodeRequest{Code: "1", Libraries: []string{"--index-url=x"}}, api.CodeInvalid, "--index-url"},
		{"code with libraries without a manager", "POST", code, api.CodeRequest{Code: "1", Language: "java", Libraries: []string{"x"}}, api.CodeInvalid, "java"},
		{"code with too many libraries", "POST", code, api.CodeRequest{Code: "1", Libraries: make([]string, 65)}, api.CodeInvalid, "64"},
		{"code with a library directory for nothing", "POST", code, api.CodeRequest{Code: "1", LibraryDir: "/lib"}, api.CodeInvalid, "library_dir"},
		{"code with a library directory that is not there", "POST", code, api.CodeRequest{Code: "1", Libraries: []string{"x"}, LibraryDir: "/no/such"}, api.CodeNotFound, "/no/such"},
		{"code in a directory that is not there", "POST", code, api.CodeRequest{Code: "1", Cwd: "/no/such"}, api.CodeInvalid, "/no/such"},
		{"code in a relative directory", "POST", code, api.CodeRequest{Code: "1", Cwd: "x"}, api.CodeInvalid, "cwd"},
		{"code with a timeout that is none", "POST", code, api.CodeRequest{Code: "1", Timeout: -1}, api.CodeInvalid, "timeout"},
		{"code of an unknown user", "POST", code, api.CodeRequest{Code: "1", User: "nobody-here"}, api.CodeInvalid, "nobody-here"},
		{"code with an unknown field", "POST", code, []byte(`{"code":"1","lang":"python"}`), api.CodeInvalid, "lang"},
		{"code in a sandbox that is not there", "POST", "/v1/sandboxes/nonesuch/code", api.CodeRequest{Code: "1"}, api.CodeNotFound, "nonesuch"},
		{"context in an unknown language", "POST", contexts, api.CreateContext{Language: "cobol"}, api.CodeInvalid, "cobol"},
		{"context in a relative directory", "POST", contexts, api.CreateContext{Cwd: "x"}, api.CodeInvalid, "cwd"},
		{"context in a directory that is not there", "POST", contexts, api.CreateContext{Cwd: "/no/such"}, api.CodeInvalid, "/no/such"},
		{"context of an unknown user", "POST", contexts, api.CreateContext{User: "nobody-here"}, api.CodeInvalid, "nobody-here"},
		{"context with little memory", "POST", contexts, api.CreateContext{Memory: 1 << 20}, api.CodeInvalid, "memory"},
		{"context with negative memory", "POST", contexts, api.CreateContext{Memory: -1}, api.CodeInvalid, "memory"},
		{"context with a bad idle time", "POST", contexts, api.CreateContext{IdleTimeout: -1}, api.CodeInvalid, "idle_timeout"},
		{"context with a bad variable", "POST", contexts, api.CreateContext{Env: []string{"=x"}}, api.CodeInvalid, "env"},
		{"context with a large environment", "POST", contexts, api.CreateContext{Env: []string{"A=" + strings.Repeat("x", 70000)}}, api.CodeInvalid, "65536"},
		{"context with an unknown field", "POST", contexts, []byte(`{"lang":"python"}`), api.CodeInvalid, "lang"},
		{"context without an interpreter", "POST", contexts, api.CreateContext{Env: []string{"PATH=/nowhere"}}, api.CodeNoLanguage, "python3"},
		{"context that is not there", "GET", contexts + "/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"removal of a context that is not there", "DELETE", contexts + "/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"interrupt of a context that is not there", "POST", contexts + "/nonesuch/interrupt", nil, api.CodeNotFound, "nonesuch"},
		{"restart of a context that is not there", "POST", contexts + "/nonesuch/restart", nil, api.CodeNotFound, "nonesuch"},
		{"contexts of a sandbox that is not there", "GET", "/v1/sandboxes/nonesuch/contexts", nil, api.CodeNotFound, "nonesuch"},
		{"code in a context that is not there", "POST", code, api.CodeRequest{Code: "1", Context: "nonesuch"}, api.CodeNotFound, "nonesuch"},
		{"code in a context and a language", "POST", code, api.CodeRequest{Code: "1", Context: "nonesuch", Language: "python"}, api.CodeInvalid, "language"},
		{"code in a context with stdin", "POST", code, api.CodeRequest{Code: "1", Context: "nonesuch", Stdin: []byte("x")}, api.CodeInvalid, "stdin"},
		{"sandbox that never was", "GET", "/v1/sandboxes/nonesuch", nil, api.CodeNotFound, "nonesuch"},
		{"sandbox as a path", "GET", "/v1/sandboxes/..%2F..%2Fetc", nil, api.CodeNotFound, ""},
		{"sandbox that is gone", "POST", "/v1/sandboxes/" + deleted.ID + "/exec", api.ExecRequest{Argv: []string{"true"}}, api.CodeNotFound, deleted.ID},
		{"deleted twice", "DELETE", "/v1/sandboxes/" + deleted.ID, nil, api.CodeNotFound, deleted.ID},
		{"agent run of nothing", "POST", "/v1/agent/runs", []byte("{}"), api.CodeInvalid, "--query"},
		{"agent run with an unknown field", "POST", "/v1/agent/runs", []byte(`{"query":"q","api_key":"k"}`), api.CodeInvalid, "api_key"},
		{"agent runs with an unknown parameter", "GET", "/v1/agent/runs?all=1", nil, api.CodeInvalid, "all"},
		{"agent run that is not there", "GET", "/v1/agent/runs/20260116_143000", nil, api.CodeNotFound, "20260116_143000"},
		{"agent run that is a path", "GET", "/v1/agent/runs/..%2f..%2fetc", nil, api.CodeNotFound, "etc"},
		{"removal of an agent run that is not there", "DELETE", "/v1/agent/runs/20260116_143000", nil, api.CodeNotFound, "20260116_143000"},
		{"cancel of an agent run that is not there", "POST", "/v1/agent/runs/20260116_143000/cancel", nil, api.CodeNotFound, "20260116_143000"},
		{"resume of an agent run that is not there", "POST", "/v1/agent/runs/20260116_143000/resume", nil, api.CodeNotFound, "20260116_143000"},
		{"events of an agent run from nowhere", "GET", "/v1/agent/runs/20260116_143000/events?from=x", nil, api.CodeInvalid, "from"},
		{"health check of no kind", "POST", sandboxes, []byte(`{"health_check":{"test":["RUN","x"]}}`), api.CodeInvalid, "health_check.test"},
		{"health check without a test", "POST", sandboxes, []byte(`{"health_check":{"retries":2}}`), api.CodeInvalid, "health_check"},
		{"health check at all times", "POST", sandboxes, []byte(`{"health_check":{"test":["CMD","true"],"interval":0.01}}`), api.CodeInvalid, "health_check.interval"},
		{"build of nothing", "POST", "/v1/builds", nil, api.CodeInvalid, "Dockerfile"},
		{"build of what is no tar", "POST", "/v1/builds", bytes.Repeat([]byte("x"), 5000), api.CodeInvalid, "context"},
		{"build with an unknown option", "POST", "/v1/builds?options=%7B%22privileged%22%3Atrue%7D", []byte(""), api.CodeInvalid, "privileged"},
		{"build with options that are none", "POST", "/v1/builds?options=x", []byte(""), api.CodeInvalid, "options"},
		{"build with an unknown parameter", "POST", "/v1/builds?t=x", []byte(""), api.CodeInvalid, "unknown parameter"},
		{"build with limits out of range", "POST", "/v1/builds?options=%7B%22limits%22%3A%7B%22pids%22%3A-1%7D%7D", []byte(""), api.CodeInvalid, "pids"},
		{"check of no registry", "POST", "/v1/registries/check", api.CheckRegistry{}, api.CodeInvalid, "registry"},
		{"check of what is no registry", "POST", "/v1/registries/check", api.CheckRegistry{Registry: "a/b"}, api.CodeInvalid, "a/b"},
		{"check of a registry that is away", "POST", "/v1/registries/check", api.CheckRegistry{Registry: "127.0.0.1:1"}, api.CodeRegistry, "127.0.0.1:1"},
		{"pull of nothing", "POST", "/v1/images/pull", api.PullImage{}, api.CodeInvalid, "reference"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
			defer cancel()
			wantProblem(t, d.Call(ctx, test.method, test.path, test.body, nil), test.code, test.says)
		})
	}
	if list := d.List(t); len(list) != 1 {
		t.Errorf("%d sandboxes are left of 1", len(list))
	}
	d.NothingLeaked(t, before)
}

// A path with dots that stays absolute is a name inside the sandbox, where there is nothing to
// climb out to.
func TestDotsInAPathStayInTheSandbox(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	name := fmt.Sprintf("planted-%d", os.Getpid())
	if err := s.Put(t.Context(), "/tmp/../../../../../tmp/"+name, []byte("x")); err != nil {
		wantProblem(t, err, api.CodeInvalid) // refusing it will do as well
		return
	}
	if _, err := os.Stat("/tmp/" + name); err == nil {
		t.Error("the file is on the host")
	}
	if got := s.Sh(t, "cat /tmp/"+name); got != "x" {
		t.Errorf("in the sandbox it says %q", got)
	}
}

// An exec whose sandbox dies under it ends with an answer.
func TestExecAfterItsSandboxDied(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	done := make(chan error, 1)
	go func() {
		_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sleep", "600"}})
		done <- err
	}()
	eventually(t, func() error { return shErr(t, s, "grep -q '[s]leep' /proc/[0-9]*/cmdline") }) // and not the shell that looks
	kill9(t, s.PID)                                                                              // as the kernel's out-of-memory killer might
	select {
	case err := <-done:
		wantProblem(t, err, api.CodeGone, s.ID+"|"+s.Name)
	case <-time.After(testenv.HungAfter):
		t.Error("the exec still waits for a sandbox that has died")
	}
	s.WaitState(t, api.StateStopped)
	_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}})
	wantProblem(t, err, api.CodeConflict, s.ID+"|"+s.Name)
}

// Exit codes of the command line: the program's own, and 125 to 127 for our own errors.
func TestCommandLineExitCodes(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	for _, test := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"the program's own", []string{"run", "host", "--", "sh", "-c", "exit 42"}, 42, ""},
		{"program missing", []string{"run", "host", "--", "no-such-program"}, 127, "no-such-program"},
		{"program not executable", []string{"run", "host", "--", "/etc/passwd"}, 126, "/etc/passwd"},
		{"unknown image", []string{"run", "127.0.0.1:1/no/such:image", "--", "true"}, 125, "127.0.0.1:1"},
		{"unknown flag", []string{"run", "--privileged", "host"}, 125, "privileged"},
		{"sandbox gone", []string{"exec", "nonesuch", "--", "true"}, 125, "nonesuch"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := d.CLI(t, test.args...)
			if got.Code != test.code || !strings.Contains(got.Stderr, test.says) {
				t.Errorf("%q ended with %+v, want code %d and a word of %q", test.args, got, test.code, test.says)
			}
			if test.code >= 125 && strings.Count(strings.TrimSpace(got.Stderr), "\n") > 4 {
				t.Errorf("the error is not one clear one: %q", got.Stderr)
			}
		})
	}
	if list := d.List(t); len(list) != 0 {
		t.Errorf("%d sandboxes are left", len(list))
	}
}

// Registries that lie, and layers that attack. Each pull fails with one error, nothing of the
// image is kept, and nothing is written outside of the layer's directory.
func TestBadImagesAreRefused(t *testing.T) {
	d := startWith(t, harness.Options{})
	outside := t.TempDir()
	if err := os.Chmod(outside, 0o777); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(outside, "target")
	if err := os.WriteFile(target, []byte("untouched"), 0o666); err != nil {
		t.Fatal(err)
	}
	d.Warm(t)
	before := d.Snapshot(t)
	up := strings.Repeat("../", 20)
	allowed := map[string]bool{}

	image := func(t *testing.T, files ...harness.File) v1.Image {
		t.Helper()
		return harness.Image(t, v1.Config{}, harness.Layer(t, "gzip", harness.Tar(t, append([]harness.File{{Name: "ok", Body: "x"}}, files...)...)))
	}
	for _, test := range []struct {
		name   string
		files  []harness.File
		tamper func(http.Handler) http.Handler
		code   api.Code
		says   string
		tamed  bool // may succeed: the applier may put a directory in the link's place, as other tools do
	}{
		{name: "dot dot", files: []harness.File{{Name: up + strings.TrimPrefix(outside, "/") + "/planted", Body: "x"}}, code: api.CodeImage, says: ".."},
		{name: "absolute link target, written through", tamed: true, code: api.CodeImage, files: []harness.File{
			{Name: "link", Type: tar.TypeSymlink, Link: outside}, {Name: "link/planted", Body: "x"},
		}},
		{name: "climbing link, written through", tamed: true, code: api.CodeImage, files: []harness.File{
			{Name: "link", Type: tar.TypeSymlink, Link: up + outside}, {Name: "link/planted", Body: "x"},
		}},
		{name: "link to a link", tamed: true, code: api.CodeImage, files: []harness.File{
			{Name: "a", Type: tar.TypeSymlink, Link: "b"}, {Name: "b", Type: tar.TypeSymlink, Link: outside}, {Name: "a/planted", Body: "x"},
		}},
		{name: "hard link to a file outside", code: api.CodeImage, files: []harness.File{
			{Name: "h", Type: tar.TypeLink, Link: up + target}, {Name: "h", Body: "overwritten"},
		}},
		{name: "hard link through a link", code: api.CodeImage, files: []harness.File{
			{Name: "link", Type: tar.TypeSymlink, Link: outside}, {Name: "h", Type: tar.TypeLink, Link: "link/target"},
		}},
		{name: "whiteout that climbs", code: api.CodeImage, files: []harness.File{{Name: up + outside + "/.wh.target"}}},
		{name: "whiteout of dot dot", code: api.CodeImage, files: []harness.File{{Name: "dir/.wh..."}, {Name: ".wh..."}, {Name: ".wh.."}}},
		{name: "whiteout without a name", code: api.CodeImage, files: []harness.File{{Name: ".wh."}}},
		{name: "whiteout through a link", tamed: true, code: api.CodeImage, files: []harness.File{
			{Name: "link", Type: tar.TypeSymlink, Link: outside}, {Name: "link/.wh.target"},
		}},
		{name: "wrong digest", tamper: onBlob(func(b []byte) []byte { b[len(b)/2] ^= 1; return b }), code: api.CodeImage, says: "sha256:"},
		{name: "truncated layer", tamper: onBlob(func(b []byte) []byte { return b[:len(b)/2] }), code: api.CodeImage, says: "sha256:"},
		{name: "longer than it says", tamper: onBlob(func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) }), code: api.CodeImage, says: "sha256:"},
		{name: "server error", tamper: answer(http.StatusInternalServerError, "boom"), code: api.CodeRegistry},
		{name: "not found", tamper: answer(http.StatusNotFound, "{}"), code: api.CodeRegistry},
		{name: "unauthorised", tamper: answer(http.StatusUnauthorized, "{}"), code: api.CodeRegistry},
		{name: "a web page", tamper: answer(http.StatusOK, "<html>welcome</html>"), code: api.CodeImage},
	} {
		t.Run(test.name, func(t *testing.T) {
			lie := &switched{}
			registry := harness.LyingRegistry(t, lie.wrap(test.tamper))
			reference := registry.Push(t, "evil/image:1", image(t, test.files...))
			lie.on.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
			defer cancel()
			pulled, err := d.Pull(ctx, reference, false)
			switch {
			case err != nil:
				wantProblem(t, err, test.code, test.says)
			case test.tamed:
				allowed[pulled.Reference] = true
			default:
				t.Errorf("pulled %+v", pulled)
			}
			if data, err := os.ReadFile(target); err != nil || string(data) != "untouched" {
				t.Errorf("the file outside is now %q (%v)", data, err)
			}
			if _, err := os.Lstat(filepath.Join(outside, "planted")); err == nil {
				t.Error("a file was planted outside")
			}
		})
	}
	var list api.ImageList
	if err := d.Call(t.Context(), "GET", "/v1/images", nil, &list); err != nil {
		t.Fatal(err)
	}
	for _, i := range list.Images {
		if strings.Contains(i.Reference, "evil") && !allowed[i.Reference] {
			t.Errorf("a refused image is listed: %+v", i)
		}
	}
	d.NothingLeaked(t, before, "data/layers") // those of the images that were tamed
}

// Odd but legal: applied, and harmless.
func TestOddImagesAreTamed(t *testing.T) {
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	outside := t.TempDir()
	for _, test := range []struct {
		name   string
		files  []harness.File
		script string
		want   string
	}{
		{"absolute name", []harness.File{{Name: "/absolute", Body: "x"}}, "cat /absolute", "x"},
		{"a file twice", []harness.File{{Name: "twice", Body: "first"}, {Name: "twice", Body: "second"}}, "cat /twice", "second"},
		{"dot prefix", []harness.File{{Name: "./dir/", Type: tar.TypeDir}, {Name: "./dir/./f", Body: "x"}}, "cat /dir/f", "x"},
		{"symlink out of the root", []harness.File{{Name: "out", Type: tar.TypeSymlink, Link: outside}}, "ls /out 2>/dev/null || echo dangling", "dangling\n"},
		{"setuid file", []harness.File{{Name: "suid", Body: "x", Mode: 0o4755}}, "grep -q ' / .*nosuid' /proc/self/mountinfo && echo nosuid", "nosuid\n"},
		{"device node", []harness.File{{Name: "null", Type: tar.TypeChar}}, "cat /null 2>/dev/null && echo opened || echo refused", "refused\n"},
		{"/dev as a link", []harness.File{{Name: "dev", Type: tar.TypeSymlink, Link: outside}}, "test -c /dev/null && ls -d /dev/sandboxd-init", "/dev/sandboxd-init\n"},
		{"/proc as a link", []harness.File{{Name: "proc", Type: tar.TypeSymlink, Link: "tmp"}}, "cat /proc/1/comm", "sandboxd-init\n"},
		{"/sys as a file", []harness.File{{Name: "sys", Body: "x"}}, "echo started", "started\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			reference := registry.Push(t, "odd/image:"+strings.Map(func(r rune) rune {
				if r == ' ' || r == '/' {
					return '-'
				}
				return r
			}, "t-"+test.name), harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
				harness.Layer(t, "gzip", harness.Tar(t, append(harness.Busybox(t), test.files...)...))))
			if _, err := d.Pull(t.Context(), reference, false); err != nil {
				wantProblem(t, err, api.CodeImage) // to refuse it is a choice, to be fooled is not
				return
			}
			s, err := d.TryCreate(t.Context(), api.CreateSandbox{Image: reference})
			if err != nil {
				wantProblem(t, err, api.CodeImage)
				return
			}
			if got := s.Sh(t, test.script); got != test.want {
				t.Errorf("%s says %q, want %q", test.script, got, test.want)
			}
			s.Delete(t)
			if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
				t.Errorf("outside there are now %v (%v)", entries, err)
			}
		})
	}
}

// An entry that claims a terabyte is refused by its header, before a byte of it is written.
func TestLayerThatLiesAboutItsSizeIsRefused(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	layer := harness.Tar(t, harness.File{Name: "huge", Body: "x"})
	// The size field in base 256, and the checksum made right again: tar(5).
	copy(layer[124:136], append([]byte{0x80, 0, 0, 0}, binary.BigEndian.AppendUint64(nil, 1<<40)...))
	copy(layer[148:156], "        ")
	sum := 0
	for _, b := range layer[:512] {
		sum += int(b)
	}
	copy(layer[148:156], fmt.Sprintf("%06o\x00 ", sum))
	before := d.Snapshot(t)
	reference := registry.Push(t, "size/lie:1", harness.Image(t, v1.Config{}, harness.Layer(t, "gzip", layer)))
	_, err := d.Pull(t.Context(), reference, false)
	wantProblem(t, err, api.CodeImage)
	d.NothingLeaked(t, before)
}

func TestUnreachableRegistry(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	_, err := d.Pull(t.Context(), "127.0.0.1:1/some/image:1", false)
	wantProblem(t, err, api.CodeRegistry, "127.0.0.1:1")
	if got := d.CLI(t, "pull", "127.0.0.1:1/some/image:1"); got.Code == 0 || !strings.Contains(got.Stderr, "127.0.0.1:1") {
		t.Errorf("sandboxd pull: %+v", got)
	}
}

func TestNoImageForThisPlatform(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	other := &v1.Platform{OS: "linux", Architecture: "s390x"}
	reference := registry.Push(t, "other/platform:1", harness.OnlyFor(t, other))
	_, err := d.Pull(t.Context(), reference, false)
	wantProblem(t, err, api.CodeImage, "linux/"+goruntime.GOARCH)
}

// onBlob changes the bytes of every layer blob that is downloaded.
func onBlob(change func([]byte) []byte) func(http.Handler) http.Handler {
	return func(honest http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
				honest.ServeHTTP(w, r)
				return
			}
			rec := &recorder{header: http.Header{}}
			honest.ServeHTTP(rec, r)
			body := rec.body.Bytes()
			if bytes.HasPrefix(body, []byte("\x1f\x8b")) { // a layer, not a config
				body = change(bytes.Clone(body))
			}
			w.Header().Set("Content-Type", rec.header.Get("Content-Type"))
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(max(rec.status, http.StatusOK))
			_, _ = w.Write(body) // the client may have gone
		})
	}
}

// answer answers everything with the same.
func answer(status int, body string) func(http.Handler) http.Handler {
	return func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body) // the client may have gone
		})
	}
}

// recorder keeps an answer so that it can be changed.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return r.body.Write(p) }
