package docker

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// mobySteps are the steps of mobyclient.
var mobySteps = []expected{
	{"negotiated", `\["1\.51","1\.51","linux"\]`},
	{"info", `"linux"`},
	{"version", `"1\.51"`},
	{"pull", `true`},
	{"missing image", `"Error response from daemon: No such image: nosuch:1"`},
	{"refused", `"Error response from daemon: HostConfig\.Privileged: .*`},
	{"attach", `\["over\\nand out\\n","end\\n",7\]`},
	{"logs", `\["over\\nand out\\n","end\\n"\]`},
	{"events", `\["create","start","die","destroy"\]`},
	{"attach with much input", `\["4194304\\n","",0\]`},
	{"terminal", `"33 77"`},
	{"exec", `\["y /tmp\\n","1000\\n",9,false\]`},
	{"exec with input", `\["1048576\\n","",0,false\]`},
	{"exec with a terminal", `"12 34"`},
	{"exit of a terminal", `3`},
	{"copied in", `\["earlylater1000 1000 640\\n","",0,false\]`},
	{"copied out", `\["after","later",5,"-rw-r-----"\]`},
	{"stat", `true`},
	{"stat of nothing", `true`},
	{"diff", `true`},
	{"top", `true`},
	{"stats", `"/files"`},
	{"commit", `true`},
	{"list", `\[\["/files"\],"running",true\]`},
	{"inspect", `\["exited","/files","tool:1"\]`},
	{"run of what was committed", `\["later","",0\]`},
	{"build", `true`},
	{"run of what was built", `\["copied\\n\\n","",0\]`},
	{"push", `true`},
	{"load", `true`},
	{"inspect of an image", `\[true,"linux"\]`},
	{"images", `1`},
	{"disk usage", `true`},
	{"network and volume", `\["rows\\nrows\\n","",0\]`},
	{"ports", `\[1,"127\.0\.0\.1",true\]`},
	{"members", `1`},
	{"network in use", `true`},
	{"volume in use", `true`},
	{"volumes", `0`},
	{"left", `0`},
}

// TestMobyClient runs mobyclient, which calls the client that Docker's own programs are made with.
func TestMobyClient(t *testing.T) {
	testenv.SameForAll(t)
	f := serve(t)
	f.images(t)
	registry := harness.DebianRegistry(t, false)
	registry.Push(t, "tool:1", harness.Image(t, config(), harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	judge(t, f.steps(t, "env", "REGISTRY="+registry.Host, harness.Helper(t, "mobyclient")), mobySteps)
}
