package functional

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// wheel is a Python package file with one module, which says hello.
func wheel(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"greeter/__init__.py", "def greet(who):\n    return 'hello ' + who\n"},
		{"greeter-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n"},
		{"greeter-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"greeter-1.0.dist-info/RECORD", "greeter/__init__.py,,\ngreeter-1.0.dist-info/METADATA,,\ngreeter-1.0.dist-info/WHEEL,,\ngreeter-1.0.dist-info/RECORD,,\n"},
	} {
		e, err := w.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Write([]byte(f[1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A Dockerfile with stages compiles a C program and installs a Python package file: the image
// runs, has the configuration that the Dockerfile says as other tools read it, and is the same to
// the byte when everything is done once more.
func TestBuildOfAProgramAndAPackage(t *testing.T) {
	testenv.SameForAll(t)
	skopeo, umoci := testenv.RequirePeer(t, "skopeo"), testenv.RequirePeer(t, "umoci")
	d := start(t)
	d.ImportDebian(t, "local/tools:1", "gcc", "libc6-dev", "python3-pip", "coreutils", "dash")
	dir := t.TempDir()
	for name, body := range map[string]string{
		"Dockerfile": `# syntax=docker/dockerfile:1
ARG BASE=local/tools:1
FROM ${BASE} AS build
ARG GREETING=hello
WORKDIR /src
COPY *.c ./
RUN gcc -DGREETING="\"$GREETING\"" -o /usr/local/bin/app main.c && /usr/local/bin/app

FROM build AS unneeded
RUN exit 1

FROM ${BASE}
LABEL org.opencontainers.image.title="an app" version=1
ENV APP_HOME=/opt/app PATH=/usr/local/bin:$PATH
RUN --network=none echo "/opt/app" > /etc/app.conf
COPY --from=build --chown=user:staff --chmod=0755 /usr/local/bin/app /usr/local/bin/
COPY dist/ /tmp/dist/
RUN pip install --no-index --no-cache-dir --break-system-packages --root-user-action=ignore /tmp/dist/*.whl && rm -r /tmp/dist
COPY <<EOF $APP_HOME/main.py
import greeter
print(greeter.greet("$APP_HOME"))
EOF
WORKDIR $APP_HOME
USER user
EXPOSE 8080 9090/udp
VOLUME /data
STOPSIGNAL SIGINT
HEALTHCHECK --interval=30s --timeout=5s --retries=2 CMD ["app"]
ENTRYPOINT ["python3"]
CMD ["main.py"]
`,
		"main.c":                            "#include <stdio.h>\nint main(void) { puts(GREETING \" from C\"); return 0; }\n",
		"dist/greeter-1.0-py3-none-any.whl": wheel(t),
		".dockerignore":                     "**/*.secret\n",
		"dist/key.secret":                   "PLANTED",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	build := func(args ...string) string {
		t.Helper()
		args = append([]string{"build", "--build-arg", "SOURCE_DATE_EPOCH=1700000000", "--build-arg", "GREETING=good day"}, args...)
		got := d.CLI(t, append(args, dir)...)
		if got.Code != 0 {
			t.Fatalf("%q: %+v", args, got)
		}
		if strings.Contains(got.Stderr, "exit 1") {
			t.Errorf("a stage was built that nobody needs: %s", got.Stderr)
		}
		_, digest, _ := strings.Cut(strings.TrimSpace(got.Stdout), " ")
		return digest
	}
	first := build("-t", "local/app:1", "-t", "local/app:latest", "--label", "built=yes")
	if again := build("-t", "local/app:2", "--label", "built=yes"); again != first {
		t.Errorf("with what was kept the image is %s, without it was %s", again, first)
	}
	if anew := build("-t", "local/app:3", "--label", "built=yes", "--no-cache"); anew != first {
		t.Errorf("everything done anew gives %s, was %s", anew, first)
	}
	if got := d.CLI(t, "run", "--entrypoint=", "local/app:1", "--", "sh", "-c", "app; python3 main.py; id -un; cat /etc/app.conf; pwd; ls /tmp; ls -ln /usr/local/bin/app"); got.Code != 0 ||
		!strings.HasPrefix(got.Stdout, "good day from C\nhello /opt/app\nuser\n/opt/app\n/opt/app\n-rwxr-xr-x 1 1000 50 ") {
		t.Errorf("the image runs as %+v", got)
	}

	archive, layout := filepath.Join(t.TempDir(), "app.tar"), filepath.Join(t.TempDir(), "layout")
	if got := d.CLI(t, "export", "-o", archive, "local/app:1"); got.Code != 0 {
		t.Fatalf("export: %+v", got)
	}
	run := func(argv ...string) []byte {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v: %s", argv, err, out)
		}
		return out
	}
	var seen struct {
		Created string          `json:"created"`
		OS      string          `json:"os"`
		Config  json.RawMessage `json:"config"`
		RootFS  struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
		History []struct {
			Created    string `json:"created"`
			CreatedBy  string `json:"created_by"`
			EmptyLayer bool   `json:"empty_layer"`
		} `json:"history"`
	}
	if err := json.Unmarshal(run(skopeo, "inspect", "--config", "--raw", "oci-archive:"+archive), &seen); err != nil {
		t.Fatal(err)
	}
	// What docker build of the same file says: compared by hand with moby's dockerfile2llb.
	var got, want any
	if err := json.Unmarshal(seen.Config, &got); err != nil {
		t.Fatal(err)
	}
	err := json.Unmarshal([]byte(`{
		"User": "user", "ExposedPorts": {"8080/tcp": {}, "9090/udp": {}},
		"Env": ["PATH=/usr/local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "APP_HOME=/opt/app"],
		"Entrypoint": ["python3"], "Cmd": ["main.py"], "Volumes": {"/data": {}}, "WorkingDir": "/opt/app",
		"Labels": {"org.opencontainers.image.title": "an app", "version": "1", "built": "yes"}, "StopSignal": "SIGINT",
		"Healthcheck": {"Test": ["CMD", "app"], "Interval": 30000000000, "Timeout": 5000000000, "Retries": 2}
	}`), &want)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, sortedEnv()); diff != "" {
		t.Errorf("skopeo reads another configuration (-want +got)\n%s", diff)
	}
	layers := 0
	for _, h := range seen.History {
		if !h.EmptyLayer {
			layers++
		}
	}
	if seen.Created != "2023-11-14T22:13:20Z" || seen.OS != "linux" || layers != len(seen.RootFS.DiffIDs) || layers != 6 {
		t.Errorf("created %s for %s, %d layers in the history, %d diff ids", seen.Created, seen.OS, layers, len(seen.RootFS.DiffIDs))
	}
	run(skopeo, "copy", "--insecure-policy", "oci-archive:"+archive, "oci:"+layout+":1")
	var stat struct {
		History []struct {
			Layer *struct {
				Size int64 `json:"size"`
			} `json:"layer"`
		} `json:"history"`
	}
	if err := json.Unmarshal(run(umoci, "stat", "--json", "--image", layout+":1"), &stat); err != nil || len(stat.History) != len(seen.History) {
		t.Errorf("umoci reads a history of %d, skopeo one of %d (%v)", len(stat.History), len(seen.History), err)
	}
	// One of few files, to be unpacked by another tool.
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile.small"), []byte("FROM local/app:1 AS app\nFROM scratch\nCOPY --from=app --chmod=0750 /opt/app /srv/\nCOPY main.c /srv/\nCOPY dist /dist\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := d.CLI(t, "build", "-q", "-f", filepath.Join(dir, "Dockerfile.small"), "-t", "local/small:1", dir); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	if got := d.CLI(t, "export", "-o", archive, "local/small:1"); got.Code != 0 {
		t.Fatalf("export: %+v", got)
	}
	run(skopeo, "copy", "--insecure-policy", "oci-archive:"+archive, "oci:"+layout+":small")
	bundle := filepath.Join(t.TempDir(), "bundle")
	run(umoci, "unpack", "--rootless", "--image", layout+":small", bundle)
	text, err := os.ReadFile(filepath.Join(bundle, "rootfs/srv/main.py"))
	if fi, serr := os.Stat(filepath.Join(bundle, "rootfs/srv/main.py")); err != nil || serr != nil || fi.Mode().Perm() != 0o750 ||
		!strings.Contains(string(text), `greet("/opt/app")`) {
		t.Errorf("umoci unpacks %q (%v, %v)", text, err, serr)
	}
	// Files that .dockerignore leaves out were not sent.
	if sent, err := filepath.Glob(filepath.Join(bundle, "rootfs/dist/*")); err != nil || len(sent) != 1 || filepath.Ext(sent[0]) != ".whl" {
		t.Errorf("of dist %q is in the image (%v)", sent, err)
	}
	if v := verified(t, d); len(v.Problems) > 0 {
		t.Errorf("%+v", v.Problems)
	}
}

func sortedEnv() cmp.Option {
	return cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == `["Env"]` }, cmp.Transformer("sorted", func(v any) []string {
		var out []string
		if list, ok := v.([]any); ok {
			for _, e := range list {
				out = append(out, fmt.Sprint(e))
			}
		}
		slices.Sort(out)
		return out
	}))
}

// small starts a daemon that has an image of busybox under the name local/base:1.
func small(t *testing.T) *harness.Daemon {
	t.Helper()
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	ref := registry.Push(t, "base:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	d.MustPull(t, ref)
	if err := d.Call(t.Context(), http.MethodPost, "/v1/images/tag", api.TagImage{Source: ref, Target: "local/base:1"}, nil); err != nil {
		t.Fatal(err)
	}
	return d
}

func dockerfile(t *testing.T, text string, files ...harness.File) []byte {
	t.Helper()
	return harness.Tar(t, append([]harness.File{{Name: "Dockerfile", Body: text}}, files...)...)
}

// onlyStored waits until nothing else lies in the data directory for images.
func onlyStored(t *testing.T, d *harness.Daemon, want []string) {
	t.Helper()
	eventually(t, func() error {
		if got := stored(t, d); !slices.Equal(got, want) {
			return fmt.Errorf("stored are %q, were %q", got, want)
		}
		return nil
	})
}

// status says for each step that makes a layer whether it was done or kept.
func status(events []api.BuildEvent) string {
	var words []string
	for _, e := range events {
		if e.Layer != "" {
			words = append(words, string(e.Status))
		}
	}
	return strings.Join(words, " ")
}

// Steps are not done again as long as none of their inputs has changed, and prune gives back their
// disk space.
func TestBuildStepsAreKeptByContent(t *testing.T) {
	testenv.SameForAll(t)
	d := small(t)
	before := stored(t, d)
	text := "FROM local/base:1\nARG V=1\nCOPY a /a\nRUN cat /a > /b\nCOPY b /c\nRUN echo $V > /v\n"
	files := func(a, b string) []harness.File { return []harness.File{{Name: "a", Body: a}, {Name: "b", Body: b}} }
	opts := api.Build{Tags: []string{"local/x:1"}, Args: map[string]string{"SOURCE_DATE_EPOCH": "1"}}
	for _, c := range []struct{ name, a, b, v, want string }{
		{"first", "1", "1", "", "done done done done"},
		{"nothing changed", "1", "1", "", "cached cached cached cached"},
		{"later file", "1", "2", "", "cached cached done done"},
		// The first RUN has it too, is run again, and makes the same layer: what follows from that is as
		// it was.
		{"argument of all that runs after it", "1", "2", "2", "cached done cached done"},
		{"first file", "2", "2", "", "done done done done"},
		{"as before", "1", "1", "", "cached cached cached cached"},
	} {
		opts.Args["V"] = c.v
		if c.v == "" {
			delete(opts.Args, "V")
		}
		_, events := d.MustBuild(t, dockerfile(t, text, files(c.a, c.b)...), opts)
		if got := status(events); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	if v := verified(t, d); len(v.Problems) > 0 {
		t.Errorf("%+v", v.Problems)
	}
	d.Kill9(t)
	d.Launch(t)
	opts.NoCache = false
	if _, events := d.MustBuild(t, dockerfile(t, text, files("1", "1")...), opts); status(events) != "cached cached cached cached" {
		t.Errorf("after a restart: %s", status(events))
	}
	if out := prune(t, d, false); out.Steps == 0 || out.Bytes == 0 {
		t.Errorf("prune: %+v", out)
	}
	if got := d.CLI(t, "run", "local/x:1", "--", "cat", "/b", "/v"); got.Stdout != "11\n" {
		t.Errorf("the image after prune: %+v", got)
	}
	if _, err := remove(t, d, "local/x:1", false); err != nil {
		t.Fatal(err)
	}
	onlyStored(t, d, before)
}

// What fails says where, with the program's own words before it, and leaves neither sandboxes nor
// layers.
func TestFailedBuildsSayWhereAndLeaveNothing(t *testing.T) {
	testenv.SameForAll(t)
	d := small(t)
	before := stored(t, d)
	planted := filepath.Join(t.TempDir(), "planted")
	if err := os.WriteFile(planted, []byte("PLANTED"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, text string
		opts       api.Build
		code       api.Code
		says       []string
		files      []harness.File
	}{
		{name: "exit code", text: "FROM local/base:1\n\nRUN echo out; exit 7\n", code: api.CodeBuild, says: []string{"Dockerfile:3: RUN echo out; exit 7: exit code 7"}},
		{name: "signal", text: "FROM local/base:1\nRUN kill -9 $$\n", code: api.CodeBuild, says: []string{"Dockerfile:2", "SIGKILL"}},
		{name: "time of one program", text: "FROM local/base:1\nRUN sleep 1000\n", opts: api.Build{RunTimeout: 0.5}, code: api.CodeBuild, says: []string{"longer than 500ms"}},
		{name: "time of the build", text: "FROM local/base:1\nRUN sleep 1000\n", opts: api.Build{Timeout: 1, RunTimeout: 1000}, code: api.CodeBuild, says: []string{"longer than 1s"}},
		{name: "no such program", text: "FROM local/base:1\nRUN [\"/nope\"]\n", code: api.CodeProgramMissing, says: []string{"Dockerfile:2: RUN"}},
		{name: "no such user", text: "FROM local/base:1\nUSER alice\nRUN true\n", code: api.CodeInvalid, says: []string{"Dockerfile:3: RUN", "alice"}},
		{name: "no such image", text: "FROM localhost:1/nope:1\n", code: api.CodeRegistry, says: []string{"Dockerfile:1: FROM localhost:1/nope:1"}},
		{name: "the host's image", text: "FROM host\n", code: api.CodeInvalid, says: []string{"Dockerfile:1", "this host's own"}},
		{name: "nothing to run", text: "FROM scratch\nRUN true\n", code: api.CodeInvalid, says: []string{"Dockerfile:2: RUN: there is nothing"}},
		{name: "no files", text: "FROM scratch\nENV A=1\n", code: api.CodeInvalid, says: []string{"no files"}},
		{name: "not supported", text: "FROM local/base:1\nRUN --mount=type=ssh true\n", code: api.CodeInvalid, says: []string{"Dockerfile:2: RUN --mount=type=ssh"}},
		{name: "missing file", text: "FROM local/base:1\nRUN true\nCOPY nope /\n", code: api.CodeInvalid, says: []string{"Dockerfile:3", "nope"}},
		{name: "other platform", text: "FROM local/base:1\n", opts: api.Build{Platform: "linux/s390x"}, code: api.CodeInvalid, says: []string{"s390x"}},
		{name: "network", text: "FROM local/base:1\n", opts: api.Build{Network: api.Network{Mode: "host"}}, code: api.CodeInvalid, says: []string{"none"}},
		{name: "name", text: "FROM local/base:1\nCOPY Dockerfile /\n", opts: api.Build{Tags: []string{"UPPER"}}, code: api.CodeInvalid, says: []string{"UPPER"}},
		{name: "epoch", text: "FROM local/base:1\n", opts: api.Build{Args: map[string]string{"SOURCE_DATE_EPOCH": "soon"}}, code: api.CodeInvalid, says: []string{"SOURCE_DATE_EPOCH"}},
		{name: "other Dockerfile", text: "FROM local/base:1\n", opts: api.Build{Dockerfile: "nope/Dockerfile"}, code: api.CodeInvalid, says: []string{"nope/Dockerfile"}},
		{
			name: "link to the host", text: "FROM local/base:1\nCOPY link /\n", code: api.CodeInvalid, says: []string{"Dockerfile:2", "link"},
			files: []harness.File{{Name: "link", Type: '2', Link: planted}},
		},
		{name: "climbing name", text: "FROM local/base:1\n", code: api.CodeInvalid, says: []string{".."}, files: []harness.File{{Name: "../up", Body: "x"}}},
		{
			name: "hard link to the host", text: "FROM local/base:1\n", code: api.CodeInvalid, says: []string{"hard link"},
			files: []harness.File{{Name: "link", Type: '1', Link: planted}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			image, events, err := d.Build(t.Context(), dockerfile(t, c.text, c.files...), c.opts, nil)
			if err == nil {
				t.Fatalf("built %+v", image)
			}
			wantProblem(t, err, c.code, c.says...)
			if c.name == "exit code" && !slices.ContainsFunc(events, func(e api.BuildEvent) bool { return e.Output == "out\n" && e.Stream == "stdout" && e.Step == 2 }) {
				t.Errorf("what the program wrote is missing: %+v", events)
			}
			if c.name == "name" && len(events) > 0 {
				t.Errorf("something was done for a name that cannot be: %+v", events)
			}
			if err := noSandboxes(t, d); err != nil {
				t.Error(err)
			}
		})
	}
	prune(t, d, false) // the layers of these builds' good steps
	onlyStored(t, d, before)
	if text, err := os.ReadFile(planted); err != nil || string(text) != "PLANTED" {
		t.Errorf("the host's file is %q (%v)", text, err)
	}
}

// Nothing of a build goes on when its client has gone, or its daemon was killed.
func TestCutOffBuildsEnd(t *testing.T) {
	testenv.SameForAll(t)
	d := small(t)
	before := stored(t, d)
	context1, cancel := context.WithCancel(t.Context())
	defer cancel()
	data := dockerfile(t, "FROM local/base:1\nRUN echo begun; sleep 1000\n")
	_, _, err := d.Build(context1, data, api.Build{}, func(e api.BuildEvent) {
		if e.Stream != "" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	eventually(t, func() error {
		return noSandboxes(t, d)
	})
	_, _, err = d.Build(t.Context(), data, api.Build{}, func(e api.BuildEvent) {
		if e.Stream != "" {
			d.Kill9(t)
		}
	})
	if err == nil {
		t.Error("a build survived its daemon")
	}
	d.Launch(t)
	if err := noSandboxes(t, d); err != nil {
		t.Error(err)
	}
	onlyStored(t, d, before)
}

// noSandboxes asks for their number: those of builds are not listed.
func noSandboxes(t *testing.T, d *harness.Daemon) error {
	t.Helper()
	var info api.SystemInfo
	if err := d.Call(t.Context(), "GET", "/v1/system", nil, &info); err != nil {
		return err
	}
	if info.Sandboxes > 0 {
		return fmt.Errorf("%d sandboxes are left", info.Sandboxes)
	}
	return nil
}

// A rebuild whose steps are all cached is the same image, named or not, and leaves no other behind.
func TestCachedRebuildIsTheSameImage(t *testing.T) {
	testenv.SameForAll(t)
	d := small(t)
	c := d.Client(t)
	context := dockerfile(t, "FROM local/base:1 AS first\nCOPY a /a\nFROM first\nENV A=b\nRUN cat /a > /b\n", harness.File{Name: "a", Body: "1"})
	for _, opts := range []api.Build{{Tags: []string{"local/x:1"}}, {}, {Tags: []string{"local/x:1"}, Labels: map[string]string{"k": "v"}}} {
		first, _ := d.MustBuild(t, context, opts)
		before, err := c.Images(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now().Unix()
		for range 2 {
			again, events := d.MustBuild(t, context, opts)
			if again.Digest != first.Digest {
				t.Fatalf("%+v: %s after %s, with %s", opts, again.Digest, first.Digest, status(events))
			}
			// A configuration has the time in seconds: the second rebuild is in another one.
			eventually(t, func() error {
				if time.Now().Unix() == began {
					return errors.New("the clock stands still")
				}
				return nil
			})
		}
		after, err := c.Images(t.Context())
		if err != nil || len(after) != len(before) {
			t.Errorf("%+v: %d images, then %d: %v", opts, len(before), len(after), err)
		}
	}
}
