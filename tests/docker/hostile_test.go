package docker

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Each request asks for power over the host, for something of the daemon's own, or makes no sense.
// All are refused in the form of Docker's errors, and leave no container.
func TestHostileRequests(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(f.roots, "link")); err != nil {
		t.Fatal(err)
	}
	create := "/v1.51/containers/create"
	type doc = map[string]any
	host := func(h doc) doc { return doc{"Image": image, "HostConfig": h} }
	n := 0
	for name, request := range map[string]doc{
		"privileged":             host(doc{"Privileged": true}),
		"host network":           host(doc{"NetworkMode": "host"}),
		"host network by name":   {"Image": image, "NetworkingConfig": doc{"EndpointsConfig": doc{"host": doc{}}}},
		"host pid":               host(doc{"PidMode": "host"}),
		"pid of another":         host(doc{"PidMode": "container:1"}),
		"host ipc":               host(doc{"IpcMode": "host"}),
		"host uts":               host(doc{"UTSMode": "host"}),
		"host user namespace":    host(doc{"UsernsMode": "host"}),
		"host cgroup namespace":  host(doc{"CgroupnsMode": "host"}),
		"cgroup parent":          host(doc{"CgroupParent": "/system.slice"}),
		"device":                 host(doc{"Devices": []doc{{"PathOnHost": "/dev/sda", "PathInContainer": "/dev/sda", "CgroupPermissions": "rwm"}}}),
		"gpu":                    host(doc{"DeviceRequests": []doc{{"Count": -1, "Capabilities": [][]string{{"gpu"}}}}}),
		"device rule":            host(doc{"DeviceCgroupRules": []string{"a *:* rwm"}}),
		"capability":             host(doc{"CapAdd": []string{"SYS_ADMIN"}}),
		"all capabilities":       host(doc{"CapAdd": []string{"ALL"}}),
		"no capability":          host(doc{"CapAdd": []string{"CAP_NOSUCH"}}),
		"no filter":              host(doc{"SecurityOpt": []string{"seccomp=unconfined"}}),
		"filter of one's own":    host(doc{"SecurityOpt": []string{`seccomp={"defaultAction":"SCMP_ACT_ALLOW"}`}}),
		"unmasked":               host(doc{"MaskedPaths": []string{}}),
		"writable proc":          host(doc{"ReadonlyPaths": []string{}}),
		"sysctl":                 host(doc{"Sysctls": doc{"kernel.core_pattern": "|/x"}}),
		"runtime":                host(doc{"Runtime": "evil"}),
		"bind of the root":       host(doc{"Binds": []string{"/:/host"}}),
		"bind of /etc":           host(doc{"Binds": []string{"/etc:/host:ro"}}),
		"bind that climbs":       host(doc{"Binds": []string{f.roots + "/../..:/host"}}),
		"bind through a link":    host(doc{"Binds": []string{f.roots + "/link:/host"}}),
		"bind of the data":       host(doc{"Binds": []string{f.DataDir + ":/host"}}),
		"bind of the socket":     host(doc{"Binds": []string{f.socket + ":/var/run/docker.sock"}}),
		"mount outside":          host(doc{"Mounts": []doc{{"Type": "bind", "Source": "/proc", "Target": "/x"}}}),
		"mount over proc":        host(doc{"Binds": []string{f.roots + "/shared:/proc"}}),
		"volume of a slash":      host(doc{"Binds": []string{"a/b:/data"}}),
		"volume of a dot":        host(doc{"Binds": []string{".:/data"}}),
		"volume with a line":     host(doc{"Binds": []string{"a\nb:/data"}}),
		"volume of many letters": host(doc{"Binds": []string{strings.Repeat("v", 129) + ":/data"}}),
		"volume without a place": host(doc{"Binds": []string{"vol:"}}),
		"volume at the root":     host(doc{"Binds": []string{"vol:/"}}),
		"volume over proc":       host(doc{"Binds": []string{"vol:/proc"}}),
		"volume over devices":    host(doc{"Volumes": doc{"/dev/x": doc{}}, "Binds": []string{"vol:/dev/shm"}}),
		"volume's mode":          host(doc{"Binds": []string{"vol:/data:shared"}}),
		"volume's source climbs": host(doc{"Mounts": []doc{{"Type": "volume", "Source": "../x", "Target": "/data"}}}),
		"volume of the host":     host(doc{"Mounts": []doc{{"Type": "volume", "Source": "/etc", "Target": "/data"}}}),
		"volume's driver":        host(doc{"Mounts": []doc{{"Type": "volume", "Source": "vol", "Target": "/data", "VolumeOptions": doc{"DriverConfig": doc{"Name": "nfs"}}}}}),
		"volume of a device":     host(doc{"Mounts": []doc{{"Type": "volume", "Source": "vol", "Target": "/data", "VolumeOptions": doc{"DriverConfig": doc{"Options": doc{"type": "none", "o": "bind", "device": "/"}}}}}}),
		"volume's part":          host(doc{"Mounts": []doc{{"Type": "volume", "Source": "vol", "Target": "/data", "VolumeOptions": doc{"Subpath": "../.."}}}}),
		"volume's reserved":      host(doc{"Mounts": []doc{{"Type": "volume", "Source": "vol", "Target": "/data", "VolumeOptions": doc{"Labels": doc{"sandboxd.keep": "true"}}}}}),
		"labels of no volume":    host(doc{"Mounts": []doc{{"Type": "volume", "Target": "/data", "VolumeOptions": doc{"Labels": doc{"a": "b"}}}}}),
		"volume in a volume":     host(doc{"Binds": []string{"vol:/data", "other:/data/sub"}}),
		"volume driver":          host(doc{"VolumeDriver": "nfs", "Binds": []string{"vol:/data"}}),
		"no path of a volume":    {"Image": image, "Volumes": doc{"data": doc{}}},
		"volume of two parts":    {"Image": image, "Volumes": doc{"/etc:/data": doc{}}},
		"volume that is /etc":    {"Image": image, "Volumes": doc{"/etc": doc{}}},
		"check's kind":           {"Image": image, "Healthcheck": doc{"Test": []string{"EVIL", "x"}}},
		"check of nothing":       {"Image": image, "Healthcheck": doc{"Test": []string{"CMD"}}},
		"check's zero byte":      {"Image": image, "Healthcheck": doc{"Test": []string{"CMD", "a\x00b"}}},
		"check without a pause":  {"Image": image, "Healthcheck": doc{"Test": []string{"CMD", "true"}, "Interval": 1}},
		"check of the past":      {"Image": image, "Healthcheck": doc{"Test": []string{"CMD", "true"}, "Interval": -1000000000}},
		"check's timeout":        {"Image": image, "Healthcheck": doc{"Test": []string{"CMD", "true"}, "Timeout": -1}},
		"check's retries":        {"Image": image, "Healthcheck": doc{"Test": []string{"CMD", "true"}, "Retries": -1}},
		"volumes of another":     host(doc{"VolumesFrom": []string{"x"}}),
		"volume that climbs":     host(doc{"Binds": []string{"../../etc:/data"}}),
		"pipe":                   host(doc{"Mounts": []doc{{"Type": "npipe", "Source": "x", "Target": "/x"}}}),
		"tmpfs over proc":        host(doc{"Tmpfs": doc{"/proc": ""}}),
		"score":                  host(doc{"OomScoreAdj": -1000}),
		"real time":              host(doc{"CpuRealtimeRuntime": 1000}),
		"negative memory":        host(doc{"Memory": -5}),
		"rates":                  host(doc{"BlkioDeviceReadBps": []doc{{"Path": "/dev/sda", "Rate": 1}}}),
		"group":                  host(doc{"GroupAdd": []string{"docker"}}),
		"DNS":                    host(doc{"Dns": []string{"10.0.0.1"}}),
		"gateway of the host":    host(doc{"ExtraHosts": []string{"host.docker.internal:host-gateway"}}),
		"line in hosts":          host(doc{"ExtraHosts": []string{"a\n127.0.0.1 b:10.0.0.1"}}),
		"ports of a number":      host(doc{"PortBindings": doc{"80/tcp": []doc{{"HostPort": "99999"}}}}),
		"port protocol":          host(doc{"PortBindings": doc{"80/sctp": []doc{{"HostPort": "80"}}}}),
		"restart policy":         host(doc{"RestartPolicy": doc{"Name": "forever"}}),
		"reserved label":         {"Image": image, "Labels": doc{"sandboxd.keep": "true"}},
		"reserved name":          {"Image": image, "Labels": doc{"sandboxd.docker.request": "{}"}},
		"no image":               {"Cmd": []string{"true"}},
		"image of the host":      {"Image": "host"},
		"image that climbs":      {"Image": "../../etc/passwd"},
		"image of a shell":       {"Image": "x;rm -rf /"},
		"image with a line":      {"Image": "tool:1\nevil"},
		"hostname":               {"Image": image, "Hostname": "a b;c"},
		"user":                   {"Image": image, "User": "root\nx:0"},
		"directory that climbs":  {"Image": image, "WorkingDir": "/a/../../b"},
		"environment":            {"Image": image, "Env": []string{"A\x00B=c"}},
		"argument":               {"Image": image, "Cmd": []string{"a\x00b"}},
		"container of a network": host(doc{"NetworkMode": "container:nosuch"}),
		"network's name":         host(doc{"NetworkMode": "../../x"}),
	} {
		n++
		status, answer := f.post(t, create, request)
		if status == http.StatusCreated { // the host's directories are opened when it starts
			var made struct{ ID string }
			if err := json.Unmarshal([]byte(answer), &made); err != nil {
				t.Fatal(err)
			}
			status, answer = f.do(t, "POST", "/containers/"+made.ID+"/start", "", nil)
			if s, a := f.do(t, "DELETE", "/containers/"+made.ID+"?force=1", "", nil); s != http.StatusNoContent {
				t.Errorf("%s: remove it: %d %s", name, s, a)
			}
		}
		if status < 400 || status >= 500 {
			t.Errorf("%s: %d %s", name, status, answer)
			continue
		}
		message(t, answer)
	}
	for name, r := range map[string]struct {
		method, path, typ, body string
		status                  int
	}{
		"no JSON":              {"POST", create, "application/json", "{", 400},
		"another type":         {"POST", create, "application/json", `{"Image":5}`, 400},
		"wrong content type":   {"POST", create, "text/plain", "{}", 400},
		"no config":            {"POST", create, "application/json", "{}", 400},
		"large body":           {"POST", create, "application/json", `{"Image":"` + strings.Repeat("x", 9<<20) + `"}`, 400},
		"name with a slash":    {"POST", create + "?name=a%2Fb", "application/json", `{"Image":"tool:1"}`, 400},
		"name that climbs":     {"POST", create + "?name=..", "application/json", `{"Image":"tool:1"}`, 400},
		"name with a line":     {"POST", create + "?name=a%0Ab", "application/json", `{"Image":"tool:1"}`, 400},
		"version too new":      {"GET", "/v1.99/info", "", "", 400},
		"version too old":      {"GET", "/v1.12/info", "", "", 400},
		"no route":             {"GET", "/nosuch", "", "", 404},
		"our own API":          {"GET", "/v1/sandboxes", "", "", 404},
		"climbing path":        {"GET", "/containers/..%2f..%2fv1%2fsystem/json", "", "", 404},
		"another method":       {"PUT", "/containers/create", "", "", 404},
		"filters":              {"GET", "/containers/json?filters=%7B", "", "", 400},
		"unknown filter":       {"GET", `/containers/json?filters={"x":["y"]}`, "", "", 400},
		"limit":                {"GET", "/containers/json?limit=x", "", "", 400},
		"no container":         {"GET", "/containers/nosuch/json", "", "", 404},
		"no exec":              {"GET", "/exec/" + strings.Repeat("0", 64) + "/json", "", "", 404},
		"start of no exec":     {"POST", "/exec/x/start", "application/json", "{}", 404},
		"condition":            {"POST", "/containers/x/wait?condition=never", "", "", 400},
		"tag":                  {"POST", "/images/tool:1/tag?repo=a&tag=b%20c", "", "", 400},
		"tag of a path":        {"POST", "/images/tool:1/tag?repo=../x", "", "", 400},
		"pull of a path":       {"POST", "/images/create?fromImage=..%2Fx", "", "", 400},
		"pull of a URL":        {"POST", "/images/create?fromSrc=http%3A%2F%2F127.0.0.1%2Fx", "", "", 400},
		"pull of no registry":  {"POST", "/images/create?fromImage=127.0.0.1:1/x", "", "", -1},
		"build of another's":   {"POST", "/build?remote=http%3A%2F%2F127.0.0.1%2Fx", "", "", 400},
		"build with BuildKit":  {"POST", "/build?version=2", "application/x-tar", "", 400},
		"build of no Docker":   {"POST", "/build?dockerfile=..%2F..%2Fetc%2Fpasswd", "application/x-tar", "x", 400},
		"commit of nothing":    {"POST", "/commit?container=nosuch", "", "", 404},
		"volume with a slash":  {"POST", "/volumes/create", "application/json", `{"Name":"a/b"}`, 400},
		"volume that climbs":   {"POST", "/volumes/create", "application/json", `{"Name":".."}`, 400},
		"volume's label":       {"POST", "/volumes/create", "application/json", `{"Name":"vol","Labels":{"sandboxd.keep":"true"}}`, 403},
		"volume's driver":      {"POST", "/volumes/create", "application/json", `{"Name":"vol","Driver":"nfs"}`, 403},
		"volume of the host":   {"POST", "/volumes/create", "application/json", `{"Name":"vol","DriverOpts":{"type":"none","o":"bind","device":"/"}}`, 403},
		"volume's size":        {"POST", "/volumes/create", "application/json", `{"Name":"vol","DriverOpts":{"size":"-1"}}`, 403},
		"cluster's volume":     {"POST", "/volumes/create", "application/json", `{"Name":"vol","ClusterVolumeSpec":{}}`, 503},
		"no volume":            {"GET", "/volumes/nosuch", "", "", 404},
		"path of a volume":     {"GET", "/volumes/..%2f..%2fsystem", "", "", 404},
		"removal of none":      {"DELETE", "/volumes/nosuch", "", "", 404},
		"removal of a path":    {"DELETE", "/volumes/..%2f..%2fsandboxes", "", "", 404},
		"removal of the image": {"DELETE", "/volumes/tool:1", "", "", 404},
		"filter of volumes":    {"GET", `/volumes?filters={"x":["y"]}`, "", "", 400},
		"filter of a prune":    {"POST", `/volumes/prune?filters={"until":["1h"]}`, "", "", 400},
		"filter of health":     {"GET", `/containers/json?filters={"health":["x"]}`, "", "", 400},
		"swarm":                {"POST", "/swarm/init", "application/json", "{}", 501},
		"plugin":               {"POST", "/plugins/pull?remote=evil", "", "", 501},
		"secrets without":      {"GET", "/secrets", "", "", 503},
		"podman's API":         {"GET", "/v4.3.1/libpod/_ping", "", "", 404},
		"BuildKit's session":   {"POST", "/session", "", "", 404},
		"BuildKit's transport": {"POST", "/grpc", "", "", 404},
	} {
		n++
		status, answer := f.do(t, r.method, r.path, r.typ, []byte(r.body))
		if status != r.status && r.status > 0 || status < 400 {
			t.Errorf("%s: %s %s: %d %s, want %d", name, r.method, r.path, status, clip(answer), r.status)
			continue
		}
		message(t, answer)
	}
	// Clients look for this error among the lines of progress.
	if status, answer := f.do(t, "POST", "/images/load", "application/x-tar", []byte("no tar")); status != http.StatusOK || !strings.Contains(answer, `"errorDetail":{"message":"import: `) {
		t.Errorf("no archive: %d %s", status, clip(answer))
	}
	t.Logf("%d requests", n)
	if list := f.List(t); len(list) != 0 {
		t.Errorf("%d sandboxes are left", len(list))
	}
	if all, err := f.Client(t).Volumes(t.Context(), nil); err != nil || len(all) != 0 {
		t.Errorf("volumes are left: %v, %v", all, err)
	}
}

// Archives that climb out of their directory write nothing outside of it.
func TestHostileArchives(t *testing.T) {
	f := start(t)
	f.images(t)
	docker := filepath.Join(f.bin, "docker")
	f.must(t, docker, "run", "-d", "--name", "box", image, "sleep", "1000")
	for name, files := range map[string][]harness.File{
		"up":         {{Name: "../evil", Body: "x"}},
		"far up":     {{Name: "a/../../../evil", Body: "x"}},
		"absolute":   {{Name: "/evil", Body: "x"}},
		"link":       {{Name: "l", Type: tar.TypeSymlink, Link: "/"}, {Name: "l/evil", Body: "x"}},
		"hard link":  {{Name: "h", Type: tar.TypeLink, Link: "../etc/passwd"}},
		"device":     {{Name: "d", Type: tar.TypeBlock}},
		"large ids":  nil,
		"no archive": nil,
	} {
		body := []byte("this is no archive, and longer than a header of one would have to be")
		if files != nil {
			body = harness.Tar(t, files...)
		}
		status, answer := f.do(t, "PUT", "/containers/box/archive?path=/tmp", "application/x-tar", body)
		if status < 400 || status >= 500 {
			t.Errorf("%s: %d %s", name, status, answer)
		}
		message(t, answer)
	}
	if out := f.must(t, docker, "exec", "box", "ls", "/"); strings.Contains(out, "evil") {
		t.Errorf("a file came out of its directory: %s", out)
	}
}

// What the face keeps with a container is its own: clients neither see nor set it.
func TestAnnotationsAreHidden(t *testing.T) {
	f := start(t)
	f.images(t)
	status, answer := f.post(t, "/containers/create?name=a", map[string]any{
		"Image": image, "Labels": map[string]string{"mine": "1"}, "HostConfig": map[string]any{"Annotations": map[string]string{"docker.request": `{"Image":"evil"}`}},
	})
	if status != http.StatusCreated {
		t.Fatal(status, answer)
	}
	sb := f.List(t)[0]
	if got := sb.Annotations["docker.request"]; !strings.Contains(got, `"Image":"tool:1"`) || len(sb.Annotations) != 1 {
		t.Errorf("annotations: %v", sb.Annotations)
	}
	status, answer = f.do(t, "GET", "/containers/a/json", "", nil)
	if status != http.StatusOK || strings.Contains(answer, "sandboxd.keep") || !strings.Contains(answer, `"mine":"1"`) || !strings.Contains(answer, `"Image":"tool:1"`) {
		t.Errorf("%d %s", status, answer)
	}
}

// A face that is killed is replaced. Containers go on, a client that waited connects again and gets
// the exit, and the log has every byte.
func TestKilledFace(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	docker := filepath.Join(f.bin, "docker")
	f.must(t, docker, "run", "-d", "-i", "--name", "box", image, "sh", "-c", "n=0; while read line; do n=$((n+1)); echo $n; done; exit 5")
	for range 50 {
		conn, err := net.Dial("unix", f.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /containers/box/attach?stream=1&stdout=1 HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n")
		head := make([]byte, 12)
		if _, err := conn.Read(head); err != nil || !strings.HasPrefix(string(head), "HTTP/1.1 101") {
			t.Fatalf("attach: %q, %v", head, err)
		}
	}
	pid := facePID(t, f)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, func() error {
		if now := facePID(t, f); now == pid || now == 0 {
			return fmt.Errorf("the face is %d", now)
		}
		return nil
	})
	f.http.CloseIdleConnections()
	f.await(t)
	if got := strings.TrimSpace(f.must(t, docker, "inspect", "--format", "{{.State.Status}}", "box")); got != "running" {
		t.Fatalf("the container is %s", got)
	}
	c := f.Client(t)
	if err := c.WriteStdin(t.Context(), "box", api.MainExec, strings.NewReader(strings.Repeat("x\n", 1000)), true); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(f.must(t, docker, "wait", "box")); got != "5" {
		t.Errorf("the exit is %s", got)
	}
	if lines := strings.Fields(f.must(t, docker, "logs", "box")); len(lines) != 1000 || lines[999] != "1000" {
		t.Errorf("the log has %d lines", len(lines))
	}
}

// facePID returns the process of the daemon's face, zero if there is none.
func facePID(t *testing.T, f *face) int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		line, _ := os.ReadFile(dir + "/cmdline") // it may have ended
		if args := strings.ReplaceAll(string(line), "\x00", " "); strings.Contains(args, " face docker ") && strings.Contains(args, f.socket) {
			var pid int
			if _, err := fmt.Sscan(filepath.Base(dir), &pid); err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	return 0
}

// The process that serves has the filter and no privileges. internal/confine tries what the
// confinement refuses.
func TestFaceIsConfined(t *testing.T) {
	f := start(t)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", facePID(t, f)))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"} {
		if os.Geteuid() != 0 && strings.HasPrefix(want, "CapBnd") {
			continue // dropped by one that may
		}
		if !strings.Contains(string(status), want) {
			t.Errorf("the face's status lacks %q", want)
		}
	}
}

// The program stays small: the face is linked into it.
func TestSize(t *testing.T) {
	testenv.SameForAll(t)
	fi, err := os.Stat(harness.Program(t, "sandboxd"))
	if err != nil {
		t.Fatal(err)
	}
	if fi.Size() > 30<<20 {
		t.Errorf("sandboxd has %d bytes, more than 30 MiB", fi.Size())
	}
}
