package docker

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// step is a line that a client's script prints: the name of what it did, and its outcome.
type step struct {
	Step  string
	Value json.RawMessage
}

// expected is the outcome of a step, as a regular expression of the value's JSON.
type expected struct{ step, value string }

// steps runs a client and returns its steps.
func (f *face) steps(t *testing.T, argv ...string) []step {
	t.Helper()
	code, stdout, stderr := f.run(t, "", argv...)
	var steps []step
	for line := range strings.Lines(stdout) {
		var s step
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatalf("%q: %q: %v", argv, line, err)
		}
		steps = append(steps, s)
	}
	if code != 0 {
		t.Errorf("%q: exit code %d\n%s", argv, code, stderr)
	}
	return steps
}

// node runs a script of testdata/npm and returns its steps. What is set in env is added to the
// environment.
func (f *face) node(t *testing.T, script string, env ...string) []step {
	t.Helper()
	program := harness.Node(t)
	path, err := filepath.Abs(filepath.Join("testdata", "npm", script))
	if err != nil {
		t.Fatal(err)
	}
	argv := append([]string{"env", "NODE_PATH=" + harness.NodeModules(t, "docker"), "TMPDIR=" + t.TempDir()}, env...)
	return f.steps(t, append(argv, program, path)...)
}

// judge compares the steps of a client with the expected ones, in their order.
func judge(t *testing.T, steps []step, want []expected) {
	t.Helper()
	for i, w := range want {
		if i >= len(steps) {
			t.Fatalf("%d steps, and not %q", len(steps), w.step)
		}
		if s := steps[i]; s.Step != w.step || !regexp.MustCompile("^(?:"+w.value+")$").Match(s.Value) {
			t.Errorf("%s: %s, want %s: %s", s.Step, clip(string(s.Value)), w.step, w.value)
		}
	}
	if len(steps) > len(want) {
		t.Errorf("%d steps, want %d", len(steps), len(want))
	}
}

// dockerodeSteps are the steps of dockerode.js.
var dockerodeSteps = []expected{
	{"ping", `"OK"`},
	{"version", `"1\.51"`},
	{"info", `"linux"`},
	{"auth", `"Login Succeeded"`},
	{"pull", `"Status: (Downloaded newer image|Image is up to date) for .*`},
	{"pull of nothing", `\[404,".*pull access denied for .*`},
	{"inspect of an image", `true`},
	{"images", `\["tool:1"\]`},
	{"tag", `true`},
	{"untag", `\{"Untagged":"other:2"\}`},
	{"run", `\["out\\n","err\\n",3\]`},
	{"attach", `\["over\\nand out\\n","",0\]`},
	{"attach with much input", `\["c1887f0c970afa48194adf7f5c504696  -\\n","end\\n",0\]`},
	{"attach without an upgrade", `\["raw\\n","end\\n",4\]`},
	{"terminal", `true`},
	{"exit of a terminal", `6`},
	{"container without an image", `\[404,"No such image: nosuch:1"\]`},
	{"inspect before the start", `"created"`},
	{"put before the start", `\["before\.txt"\]`},
	{"start again", `\[304,"\(HTTP code 304\) container already started -"\]`},
	{"inspect", `\["/agent",true,true,"/work",\[\{"Name":"nofile","Hard":123,"Soft":123\}\]\]`},
	{"list", `\[\[\["/agent"\],"running"\]\]`},
	{"exec", `\["early\\n","b\\n",9\]`},
	{"exec with input", `\["1048576\\n","",0\]`},
	{"exec as a user", `"1000\\n"`},
	{"exec of nothing", `127`},
	{"execs at once", `"0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15"`},
	{"exec with a terminal", `true`},
	{"exec that is detached", `true`},
	{"stats", `\["/agent",(true|false),(true|false)\]`},
	{"stats as a stream", `"/agent"`},
	{"top", `\[true,true\]`},
	{"put", `\["a\.txt","sub/b\.txt"\]`},
	{"get", `\{"sub/b\.txt":"more"\}`},
	{"head", `4`},
	{"get nothing", `404`},
	{"changes", `true`},
	{"commit", `true`},
	{"run of what was committed", `\["text","",0\]`},
	{"exec when paused", `\[409,"container [0-9a-f]{64} is paused, unpause the container before exec"\]`},
	{"update", `0`},
	{"remove when it runs", `\[409,"cannot remove container \\"/agent\\": container is running: stop the container before removing or force remove"\]`},
	{"wait", `\{"StatusCode":5\}`},
	{"logs that are followed", `\["begun\\none\\nend\\n",""\]`},
	{"logs", `"\\u0001.*one\\n.*end\\n"`},
	{"stop again", `\[304,"\(HTTP code 304\) container already stopped -"\]`},
	{"exit code", `137`},
	{"export", `true`},
	{"events", `"create,start,die,start,die,start,die,destroy"`},
	{"removed", `\[404,"No such container: [0-9a-f]{64}"\]`},
	{"build", `true`},
	{"run of what was built", `\["built\\n","",0\]`},
	{"build that fails", `7`},
	{"save and load", `"Loaded image: built:1\\n"`},
	{"volumes", `\["data"\]`},
	{"name in a network", `\["kept\\n","",0\]`},
	{"members", `\["server"\]`},
	{"network in use", `403`},
	{"volume in use", `409`},
	{"refused", `\[403,"HostConfig\.Privileged: .*`},
	{"swarm", `503`},
	{"prune", `0`},
	{"disk usage", `true`},
	{"left", `0`},
}

// TestDockerode runs testdata/npm/dockerode.js, which calls dockerode as programs do.
func TestDockerode(t *testing.T) {
	testenv.SameForAll(t)
	f := serve(t)
	f.images(t)
	registry := harness.DebianRegistry(t, false)
	registry.Push(t, "tool:1", harness.Image(t, config(), harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	judge(t, f.node(t, "dockerode.js", "REGISTRY="+registry.Host), dockerodeSteps)
	if left := f.List(t); len(left) != 0 {
		t.Errorf("%d sandboxes are left", len(left))
	}
}

// testcontainersSteps are the steps of testcontainers.js.
var testcontainersSteps = []expected{
	{"wait: listening ports", `\[200,"hello\\n"\]`},
	{"wait: log", `\[200,"hello\\n"\]`},
	{"wait: log by expression", `\[200,"hello\\n"\]`},
	{"wait: http", `\[200,"hello\\n"\]`},
	{"wait: health check", `\[200,"hello\\n"\]`},
	{"wait: successful command", `\[200,"hello\\n"\]`},
	{"wait: all", `\[200,"hello\\n"\]`},
	{"wait: one shot", `64`},
	{"exit before the log", `"Log stream ended and message \\"never said\\" was not received"`},
	{"missing image", `".*pull access denied for .*`},
	{"pulled", `\["/worked","localhost","shop"\]`},
	{"copied before the start", `\[\[200,"before\\n"\],\[200,"of the host\\n"\],\[200,"of the host\\n"\]\]`},
	{"exec", `\[4,"b /work\\n123\\n","err\\n"\]`},
	{"exec as a user", `\[0,"1000\\ny /tmp\\n"\]`},
	{"copied after the start", `\[200,"later\\n"\]`},
	{"archive", `true`},
	{"logs", `true`},
	{"restart", `\[200,"later\\n"\]`},
	{"commit", `"sha256:ID"`},
	{"run of what was committed", `true`},
	{"build", `\[\[200,"of the host\\n"\],\[200,"argument\\n"\]\]`},
	{"network", `\[\[200,"rows\\n"\],true,2\]`}, // and bridge: it connects the container when it has been created
}

// TestTestcontainers runs testdata/npm/testcontainers.js, a suite of tests that wants its databases
// and servers in containers. Its reaper is off: that is a container with Docker's socket in it.
func TestTestcontainers(t *testing.T) {
	testenv.SameForAll(t)
	f := serve(t)
	f.images(t)
	registry := harness.DebianRegistry(t, false)
	registry.Push(t, "tool:1", harness.Image(t, config(), harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	judge(t, f.node(t, "testcontainers.js", "REGISTRY="+registry.Host, "TESTCONTAINERS_RYUK_DISABLED=true"), testcontainersSteps)
}
