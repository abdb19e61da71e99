package docker

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// line is a command line of Docker's. In args a single-quoted part is one argument.
type line struct {
	args, stdin string
	code        int
	out, err    string // regular expressions; "" matches anything
	late        bool   // the output is awaited: a volume without a name goes soon after its container
}

// lines are run in their order, and build on each other.
var lines = []line{
	{args: "version --format {{.Server.APIVersion}}", out: `^1\.51\n$`},
	{args: "info --format {{.OSType}}", out: `^linux\n$`},
	{args: "images --format {{.Repository}}:{{.Tag}}", out: `(?m)^tool:1$`},
	{args: "image inspect --format {{.Os}} tool:1", out: `^linux\n$`},
	{args: "image inspect nosuch", code: 1, err: `No such image`},
	{args: "history tool:1", out: `IMAGE`},
	{args: "tag tool:1 other:2"},
	{args: "images -q other:2", out: `^[0-9a-f]{12}\n$`},
	{args: "rmi other:2", out: `Untagged: other:2`},
	{args: "rmi nosuch:1", code: 1, err: `No such image`},
	{args: "run --rm tool:1 echo hi", out: `^hi\n$`},
	{args: "run --rm tool:1 sh -c 'echo out; echo err >&2; exit 7'", code: 7, out: `^out\n$`, err: `^err\n$`},
	{args: "run --rm -i tool:1 cat", stdin: "over\nand out\n", out: `^over\nand out\n$`},
	{args: "run --rm -i tool:1 wc -c", stdin: strings.Repeat("0123456789abcdef", 1<<16), out: `^1048576\n$`},
	{args: "run --rm tool:1 nosuch", code: 127, err: `executable file not found`},
	{args: "run --rm tool:1 /etc/passwd", code: 126, err: `permission denied`},
	{args: "run --rm -w /new/dir tool:1 pwd", out: `^/new/dir\n$`},
	{args: "run --rm -e A=b tool:1 sh -c 'echo $A'", out: `^b\n$`},
	{args: "run --rm -u 1000:1000 tool:1 id -u", out: `^1000\n$`},
	{args: "run --rm -h box tool:1 cat /proc/sys/kernel/hostname", out: `^box\n$`},
	{args: "run --rm --entrypoint echo tool:1 as entry", out: `^as entry\n$`},
	{args: "run --rm --read-only tool:1 touch /x", code: 1, err: `Read-only`},
	{args: "run --rm --read-only --tmpfs /tmp:size=1m tool:1 touch /tmp/x"},
	{args: "run --rm --add-host db:10.1.2.3 tool:1 grep db /etc/hosts", out: `10\.1\.2\.3`},
	{args: "run --rm --ulimit nofile=123:123 tool:1 sh -c 'ulimit -n'", out: `^123\n$`},
	{args: "run --rm --init tool:1 echo with init", out: `with init`},
	{args: "run --rm --network none tool:1 echo alone", out: `alone`},
	{args: "run --rm -t tool:1 sh -c 'test -t 1 && echo a terminal'", out: `^a terminal\r\n$`},
	{args: "run --rm --cap-drop ALL tool:1 grep CapBnd /proc/self/status", out: `0000000000000000`},
	{args: "run --rm -v $ROOTS/shared:/mnt tool:1 cat /mnt/hello", out: `^from the host\n$`},
	{args: "run --rm -v $ROOTS/shared:/mnt:ro tool:1 touch /mnt/x", code: 1, err: `Read-only`},
	{args: "run --rm --mount type=bind,source=$ROOTS/shared,target=/mnt tool:1 cat /mnt/hello", out: `from the host`},
	{args: "run --rm --privileged tool:1 true", code: 125, err: `HostConfig.Privileged: no container has power over the host`},
	{args: "run --rm --network host tool:1 true", code: 125, err: `HostConfig.NetworkMode`},
	{args: "run --rm --pid host tool:1 true", code: 125, err: `HostConfig.PidMode`},
	{args: "run --rm --device /dev/kvm tool:1 true", code: 125, err: `HostConfig.Devices: devices of the host are not passed in`},
	{args: "run --rm -v ../up:/data tool:1 true", code: 125, err: `invalid characters for a local volume name|must be absolute|mount`},
	{args: "run --rm -v /etc:/host tool:1 true", code: 125, err: `mount`},
	{args: "run -d --name web --label app=shop tool:1 sleep 1000", out: `^[0-9a-f]{64}\n$`},
	{args: "run -d --name web tool:1 true", code: 125, err: `The container name "/web" is already in use`},
	{args: "ps --format {{.Names}}", out: `(?m)^web$`},
	{args: "ps -q --filter label=app=shop", out: `^[0-9a-f]{12}\n$`},
	{args: "ps -q --filter label=app=other", out: `^$`},
	{args: "ps -aq --filter name=^/web$ --no-trunc", out: `^[0-9a-f]{64}\n$`},
	{args: "ps -aq --filter ancestor=tool:1 --filter status=running", out: `^[0-9a-f]{12}\n$`},
	{args: "inspect --format {{.State.Status}} web", out: `^running\n$`},
	{args: "inspect --format '{{index .Config.Labels \"app\"}}' web", out: `^shop\n$`},
	{args: "exec web echo inside", out: `^inside\n$`},
	{args: "exec web sh -c 'exit 9'", code: 9},
	{args: "exec -i web cat", stdin: "to exec", out: `^to exec$`},
	{args: "exec -e X=y -w /tmp -u 1000 web sh -c 'echo $X $PWD; id -u'", out: `^y /tmp\n1000\n$`},
	{args: "exec web nosuch", code: -1, out: `|executable file not found`}, // 126 or 127, as the client has it
	{args: "exec -d web touch /tmp/detached"},
	{args: "exec -t web sh -c 'test -t 0 && echo tty'", out: `^tty\r\n$`},
	{args: "exec nosuch true", code: 1, err: `No such container: nosuch`},
	{args: "exec --privileged web true", code: 1, err: `Privileged`},
	{args: "cp $HOME/file web:/root/copied"},
	{args: "exec web cat /root/copied", out: `^a file\n$`},
	{args: "cp web:/root/copied $HOME/back"},
	{args: "cp web:/nosuch $HOME/back2", code: 1, err: `Could not find the file|No such container:path`},
	{args: "cp $HOME/dir web:/root/"},
	{args: "exec web cat /root/dir/inner", out: `^inner\n$`},
	{args: "diff web", out: `(?m)^A /root/copied$`},
	{args: "top web", out: `sleep 1000`},
	{args: "stats --no-stream --format {{.Name}} web", out: `^web\n$`},
	{args: "pause web"},
	{args: "exec web true", code: 1, err: `is paused`},
	{args: "unpause web"},
	{args: "rename web shop"},
	{args: "rm shop", code: 1, err: `container is running`},
	{args: "stop shop", out: `^shop\n$`},
	{args: "stop shop", out: `^shop\n$`},
	{args: "inspect --format {{.State.Status}} shop", out: `^exited\n$`},
	{args: "cp shop:/root/copied -", out: `a file`},
	{args: "wait shop", out: `^143\n$`},
	{args: "start shop", out: `^shop\n$`},
	{args: "exec shop cat /root/copied", out: `^a file\n$`},
	{args: "restart shop", out: `^shop\n$`},
	{args: "kill -s TERM shop", out: `^shop\n$`},
	{args: "wait shop", out: `^143\n$`},
	{args: "kill shop", code: 1, err: `is not running`},
	{args: "commit shop kept:1", out: `^sha256:[0-9a-f]{64}\n$`},
	{args: "run --rm kept:1 cat /root/copied", out: `^a file\n$`},
	{args: "rm shop", out: `^shop\n$`},
	{args: "rm shop", code: 1, err: `No such container: shop`},
	{args: "create --name made tool:1 sh -c 'cat /root/before; echo late >&2'", out: `^[0-9a-f]{64}\n$`},
	{args: "inspect --format {{.State.Status}} made", out: `^created\n$`},
	{args: "cp $HOME/file made:/root/before"},
	{args: "inspect --format {{.State.Status}} made", out: `^created\n$`},
	{args: "start -a made", out: `^a file\n$`, err: `^late\n$`},
	{args: "logs made", out: `^a file\n$`, err: `^late\n$`},
	{args: "logs -t made", out: `^\d{4}-\d\d-\d\dT\S+Z a file\n$`},
	{args: "logs -f --tail 1 made", out: `^$|a file`},
	{args: "export made", out: `root/before`},
	{args: "container prune -f", out: `[0-9a-f]{64}`},
	{args: "ps -aq", out: `^$`},
	{args: "build -t built:1 $HOME/context", out: `Successfully tagged built:1`},
	{args: "run --rm built:1", out: `^built\n$`},
	{args: "build -t failing:1 -f $HOME/context/Failing $HOME/context", code: 3, err: `(?s)exit|exited`},
	{args: "save -o $HOME/saved.tar built:1 tool:1"},
	{args: "rmi built:1", out: `Untagged: built:1`},
	{args: "load -i $HOME/saved.tar", out: `Loaded image: built:1`},
	{args: "run --rm built:1", out: `^built\n$`},
	{args: "pull $REGISTRY/tool:1", out: `Digest: sha256:`},
	{args: "run --rm $REGISTRY/tool:1 echo pulled", out: `^pulled\n$`},
	{args: "tag tool:1 $REGISTRY/pushed:1"},
	{args: "push $REGISTRY/pushed:1", out: `digest: sha256:`},
	{args: "pull $REGISTRY/nosuch:1", code: 1, err: `(?i)not exist|does not have it`},
	{args: "network ls --format {{.Name}}", out: `(?s)bridge.*none`},
	{args: "network inspect bridge", out: `"Driver": "bridge"`},
	{args: "network inspect nosuch", code: 1, err: `not found|No such network`},
	{args: "volume ls -q", out: `^$`},
	{args: "system df", out: `Images`},
	{args: "node ls", code: 1, err: `not a swarm manager`},
	{args: "plugin ls -q", out: `^$`},
	{args: "search x", code: 1, err: `registries are not searched`},
	{args: "events --since 1h --until 0s --filter event=start --format {{.Action}}", out: `(?m)^start$|^$`},
	{args: "image prune -f", out: `Total reclaimed space`},
}

// volumeLines are lines about volumes.
var volumeLines = []line{
	{args: "volume ls -q", out: `^$`},
	{args: "volume create --label app=shop vol", out: `^vol\n$`},
	{args: "volume create vol", out: `^vol\n$`},
	{args: "volume create --driver nfs w", code: 1, err: `Driver "nfs": volumes are directories of the daemon's`},
	{args: "volume create -o type=tmpfs w", code: 1, err: `DriverOpts "type": size alone can be set`},
	{args: "volume create -o size=10m sized", out: `^sized\n$`},
	{args: "volume create -o size=20m sized", code: 1, err: `its size is`},
	{args: "volume inspect --format '{{.Options.size}} {{.Driver}} {{.Scope}} [{{.Mountpoint}}]' sized", out: `^10485760 local local \[\]\n$`},
	{args: "volume inspect --format '{{index .Labels \"app\"}}' vol", out: `^shop\n$`},
	{args: "volume inspect nosuch", code: 1, err: `(?i)no such volume`},
	{args: "volume rm sized", out: `^sized\n$`},
	{args: "volume rm nosuch", code: 1, err: `(?i)no such volume`},
	{args: "volume rm -f nosuch"},
	{args: "run --rm -v vol:/data tool:1 sh -c 'echo kept > /data/f'"},
	{args: "run --rm -v vol:/data:ro tool:1 cat /data/f", out: `^kept\n$`},
	{args: "run --rm -v vol:/data:ro tool:1 touch /data/x", code: 1, err: `Read-only`},
	{args: "run --rm --mount type=volume,source=vol,target=/data,readonly tool:1 cat /data/f", out: `^kept\n$`},
	{args: "run --rm --mount type=volume,source=vol,target=/data,volume-driver=nfs tool:1 true", code: 125, err: `DriverConfig "nfs": volumes are directories of the daemon's`},
	{args: "run --rm --mount type=volume,source=vol,target=/data,volume-opt=a=b tool:1 true", code: 125, err: `DriverConfig: options`},
	{args: "run --rm --volume-driver nfs -v vol:/data tool:1 true", code: 125, err: `HostConfig.VolumeDriver "nfs"`},
	{args: "run --rm -v other:/data -v vol:/data tool:1 true", code: 125, err: `(?i)duplicate mount point|lie in one another`},
	{args: "run --rm --mount type=volume,source=labelled,target=/data,volume-label=app=other tool:1 true"},
	{args: "run --rm -v copied:/bin:nocopy tool:1 true", code: 127, err: `executable file not found`},
	{args: "run --rm -v copied:/bin tool:1 true"},
	{args: "volume ls -q", out: `^copied\nlabelled\nvol\n$`},
	{args: "volume ls -q --filter label=app=other", out: `^labelled\n$`},
	{args: "volume ls -q --filter name=^la", out: `^labelled\n$`},
	{args: "volume ls -q --filter driver=nfs", out: `^$`},
	{args: "run -d --name holder -v vol:/data -v /anon tool:1 sleep 1000", out: `^[0-9a-f]{64}\n$`},
	{args: "inspect --format '{{range .Mounts}}{{.Type}} {{.Destination}} {{.Driver}} {{.RW}} [{{.Source}}];{{end}}' holder", out: `^volume /data local true \[\];volume /anon local true \[\];\n$`},
	{args: "inspect --format '{{(index .Mounts 0).Name}}' holder", out: `^vol\n$`},
	{args: "ps -q --filter volume=vol", out: `^[0-9a-f]{12}\n$`},
	{args: "ps -q --filter volume=labelled", out: `^$`},
	{args: "volume ls -q --filter dangling=true", out: `^copied\nlabelled\n$`},
	{args: "volume ls -q --filter dangling=false", out: `^[0-9a-f]{64}\nvol\n$`},
	{args: "volume ls -q --filter label=com.docker.volume.anonymous", out: `^[0-9a-f]{64}\n$`},
	{args: "volume rm vol", code: 1, err: `volume is in use`},
	{args: "volume rm -f vol", code: 1, err: `volume is in use`},
	{args: "system df -v", out: `(?m)^vol +1 `},
	{args: "run --rm --volumes-from holder tool:1 true", code: 125, err: `HostConfig.VolumesFrom: name the volumes`},
	{args: "exec holder sh -c 'echo anon > /anon/f; cat /data/f'", out: `^kept\n$`},
	{args: "restart -t 0 holder"},
	{args: "exec holder cat /anon/f", out: `^anon\n$`},
	{args: "rm -f -v holder", out: `^holder\n$`},
	{args: "volume ls -q --filter label=com.docker.volume.anonymous", out: `^$`},
	{args: "run --rm -v /anon tool:1 touch /anon/f"},
	{args: "volume ls -q", out: `^copied\nlabelled\nvol\n$`, late: true},
	{args: "volume create", out: `^[0-9a-f]{64}\n$`},
	{args: "volume prune -f --filter label=com.docker.volume.anonymous", out: `(?s)^Deleted Volumes:\n[0-9a-f]{64}\n\nTotal`},
	{args: "volume rm labelled copied vol", out: `^labelled\ncopied\nvol\n$`},
	{args: "events --since 1h --until 0s --filter type=volume --filter event=create --filter volume=nosuch", out: `^$`},
	{args: "volume ls -q", out: `^$`},
}

// split splits a command line at blanks outside of quotes.
func split(t *testing.T, text string, expand func(string) string) []string {
	t.Helper()
	var argv []string
	for i, part := range strings.Split(text, "'") {
		if i%2 == 1 {
			argv = append(argv, strings.ReplaceAll(part, `\"`, `"`))
			continue
		}
		for word := range strings.FieldsSeq(part) {
			argv = append(argv, os.Expand(word, expand))
		}
	}
	return argv
}

func TestCommandLines(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	registry := harness.DebianRegistry(t, false)
	registry.Push(t, "tool:1", harness.Image(t, config(), harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	for name, text := range map[string]string{
		f.roots + "/shared/hello": "from the host\n", f.home + "/file": "a file\n", f.home + "/dir/inner": "inner\n",
		f.home + "/context/Dockerfile": "FROM tool:1\nCOPY word /word\nRUN cat /word > /copy\nCMD [\"cat\", \"/copy\"]\n", f.home + "/context/word": "built\n",
		f.home + "/context/Failing": "FROM tool:1\nRUN exit 3\n",
	} {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	expand := func(name string) string {
		return map[string]string{"HOME": f.home, "ROOTS": f.roots, "REGISTRY": registry.Host}[name]
	}
	for which, docker := range f.clients(t) {
		f.runLines(t, which, docker, lines, expand)
		if back, err := os.ReadFile(f.home + "/back"); err != nil || string(back) != "a file\n" {
			t.Errorf("%s: the file that came back: %q, %v", which, back, err)
		}
		_, _, _ = f.run(t, "", "sh", "-c", docker+" rm -f $("+docker+" ps -aq); "+docker+" rmi kept:1 built:1") // for the next one
	}
}

// runLines runs command lines with one of the clients.
func (f *face) runLines(t *testing.T, which, docker string, all []line, expand func(string) string) {
	t.Helper()
	for _, l := range all {
		argv := append([]string{docker}, split(t, l.args, expand)...)
		if l.late {
			harness.Eventually(t, func() error {
				if _, stdout, _ := f.run(t, l.stdin, argv...); !regexp.MustCompile(l.out).MatchString(stdout) {
					return fmt.Errorf("docker %s: %q", l.args, clip(stdout))
				}
				return nil
			})
		}
		code, stdout, stderr := f.run(t, l.stdin, argv...)
		for _, check := range []struct{ what, want, got string }{{"stdout", l.out, stdout}, {"stderr", l.err, stderr}} {
			if !regexp.MustCompile(check.want).MatchString(check.got) {
				t.Errorf("%s: docker %s: %s is %q, want %q", which, l.args, check.what, clip(check.got), check.want)
			}
		}
		if l.code >= 0 && code != l.code {
			t.Errorf("%s: docker %s: exit code %d, want %d\n%s%s", which, l.args, code, l.code, clip(stdout), clip(stderr))
		}
	}
	t.Logf("%s: %d lines", which, len(all))
}

func TestVolumeLines(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	for which, docker := range f.clients(t) {
		before := len(f.events(t, `{"volume":["labelled"]}`))
		f.runLines(t, which, docker, volumeLines, os.Getenv)
		if got := f.events(t, `{"volume":["labelled"]}`)[before:]; !slices.Equal(got, []string{"volume create labelled", "volume destroy labelled"}) {
			t.Errorf("%s: events: %q", which, got)
		}
	}
	if got := f.events(t, `{"volume":["labelled"],"type":["container"]}`); len(got) != 0 {
		t.Errorf("events of containers are about a volume: %q", got)
	}
}

// events returns the events so far: type, action and object of each.
func (f *face) events(t *testing.T, filters string) []string {
	t.Helper()
	now := time.Now()
	status, answer := f.do(t, "GET", fmt.Sprintf("/events?since=1&until=%d.%09d&filters=%s", now.Unix(), now.Nanosecond(), url.QueryEscape(filters)), "", nil)
	if status != http.StatusOK {
		t.Fatalf("events: %d %s", status, answer)
	}
	var out []string
	for line := range strings.Lines(answer) {
		var e struct {
			Type, Action string
			Actor        struct{ ID string }
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		out = append(out, e.Type+" "+e.Action+" "+e.Actor.ID)
	}
	return out
}

func clip(s string) string {
	if len(s) > 2000 {
		return s[:2000] + "..."
	}
	return s
}
