package network

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

var (
	//go:embed testdata/clients.py
	pythonClients string
	//go:embed testdata/libraries.py
	pythonLibraries string
	//go:embed testdata/clients.mjs
	nodeClients string
	//go:embed testdata/clients.sh
	shellClients string
	//go:embed testdata/Clients.java
	javaClients string
	//go:embed packages.txt
	cargoPackages string
)

// A program is a script of clients as they are installed on this machine. `make deps` installs
// them, and lanes fail where one is missing.
type program struct {
	peers   []string                               // in PATH
	modules string                                 // of Python
	put     func(t *testing.T, s *harness.Sandbox) // what it needs beside the script; nil for nothing
	command string
	script  string
	answers int // that it gets
}

var programs = map[string]program{
	"python":    {peers: []string{"python3"}, command: "exec /usr/bin/python3 -", script: pythonClients, answers: 25},
	"libraries": {modules: "aiohttp, grpc, h2, httpx, requests", command: "exec /usr/bin/python3 -", script: pythonLibraries, answers: 45},
	"node":      {peers: []string{"node"}, command: "exec node --input-type=module -", script: nodeClients, answers: 21},
	"java":      {peers: []string{"java", "javac"}, put: putJava, command: "exec java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -cp /tmp/java Clients", answers: 29},
	"shell": {
		peers: []string{"curl", "wget", "openssl", "git", "perl", "ruby", "npm", "pip3", "apt-get"}, put: putCargo,
		command: "exec sh -s", script: shellClients, answers: 46,
	},
}

// trustingVariables are variables that name a certificate for programs. A sandbox has them of
// itself if its policy inspects requests.
var trustingVariables = []string{
	"CA", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "npm_config_cafile",
	"CARGO_HTTP_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
}

// modes are policies of programs. Only root's sandboxes have requests that are not read:
// [TestClients] has them for all users.
func modes(t *testing.T, d *harness.Daemon) map[string]string {
	t.Helper()
	all := map[string]string{"inspected": allowedInspected}
	if d.System(t).UID == 0 {
		all["relayed"] = allowed
	}
	return all
}

// Programs that people use in sandboxes get what a policy allows, and clear errors for the rest,
// whether or not the gateway reads their requests.
func TestPrograms(t *testing.T) {
	files := packages(t)
	with(t, alike(), func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, files)
		for mode, policy := range modes(t, d) {
			t.Run(mode, func(t *testing.T) {
				s := trusting(t, d, "default", policy, ca)
				env := []string{
					"HOME=/tmp", "GOPATH=/tmp/gopath", "GOCACHE=/tmp/gocache", "GOPROXY=https://site.test/go", "GOSUMDB=off", "GOFLAGS=-mod=mod", "GOTOOLCHAIN=local",
					"GIT_TERMINAL_PROMPT=0", "LC_ALL=C",
				}
				if mode == "relayed" {
					for _, name := range trustingVariables {
						env = append(env, name+"="+op.CA)
					}
				}
				for name, p := range programs {
					t.Run(name, func(t *testing.T) { p.run(t, s, env) })
				}
			})
		}
	})
}

// run runs it in a sandbox, and looks at its answers.
func (p *program) run(t *testing.T, s *harness.Sandbox, env []string) {
	t.Helper()
	for _, peer := range p.peers {
		testenv.RequirePeer(t, peer)
	}
	if p.modules != "" && exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", "import "+p.modules).Run() != nil {
		testenv.RequirePeer(t, "Python with "+p.modules) // no program's name, so this says what is missing
	}
	if p.put != nil {
		p.put(t, s)
	}
	got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", p.command}, Stdin: []byte(p.script), Timeout: testenv.HungAfter.Seconds(), Env: env})
	answers := 0
	for line := range strings.Lines(got.Stdout) {
		if strings.HasPrefix(line, "ok ") {
			answers++
		} else {
			t.Error(line)
		}
	}
	if answers != p.answers || got.Exit.Code != 0 {
		t.Errorf("%d answers of %d, %+v; stderr: %s", answers, p.answers, got.Exit, got.Stderr)
	}
}

// classes are Clients.java, compiled once.
var classes = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "nettests-java")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	source := filepath.Join(dir, "Clients.java")
	if err := os.WriteFile(source, []byte(javaClients), 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("javac", "-d", filepath.Join(dir, "java"), source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile: %w: %s", err, out)
	}
	return exec.Command("tar", "--create", "--directory", dir, "java").Output()
})

func putJava(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	archive, err := classes()
	if err == nil {
		err = s.PutArchive(t.Context(), "/tmp", archive)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// cargo are the files of cargo and its libraries, one archive for each package. They are not
// installed as packages: those depend on the compiler's, which are fifty times as large and not
// used. The tests run one after another.
var cargo [][]byte

// putCargo puts cargo and its libraries into a sandbox.
func putCargo(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	if cargo == nil {
		for name := range strings.FieldsSeq(cargoPackages) {
			archive, err := exec.CommandContext(t.Context(), "dpkg-deb", "--fsys-tarfile", harness.Deb(t, name)).Output()
			if err != nil {
				t.Fatalf("unpack %s: %v", name, err)
			}
			cargo = append(cargo, archive)
		}
	}
	s.Sh(t, "mkdir -p /tmp/cargo")
	for _, archive := range cargo {
		if err := s.PutArchive(t.Context(), "/tmp/cargo", archive); err != nil {
			t.Fatalf("put cargo: %v", err)
		}
	}
}

// packages are the handlers of a repository and of package registries.
func packages(t *testing.T) map[string]http.Handler {
	t.Helper()
	dir := t.TempDir()
	file := func(name string, data []byte) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	wheel := zipped(t, map[string]string{
		"demo.py": "version = '1.0'\n", "demo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
		"demo-1.0.dist-info/RECORD":   "demo.py,,\ndemo-1.0.dist-info/WHEEL,,\ndemo-1.0.dist-info/METADATA,,\ndemo-1.0.dist-info/RECORD,,\n",
	})
	file("simple/demo/index.html", []byte(`<a href="demo-1.0-py3-none-any.whl">demo-1.0-py3-none-any.whl</a>`))
	file("simple/demo/demo-1.0-py3-none-any.whl", wheel)
	file("npm/demo-1.0.0.tgz", tarball(t, map[string]string{"package/package.json": `{"name":"demo","version":"1.0.0","main":"x.js"}`, "package/x.js": "module.exports = '1.0.0'"}))
	const module = "example.test/demo@v1.0.0"
	file("go/example.test/demo/@v/list", []byte("v1.0.0\n"))
	file("go/example.test/demo/@v/v1.0.0.info", []byte(`{"Version":"v1.0.0"}`))
	file("go/example.test/demo/@v/v1.0.0.mod", []byte("module example.test/demo\n"))
	file("go/example.test/demo/@v/v1.0.0.zip", zipped(t, map[string]string{module + "/go.mod": "module example.test/demo\n", module + "/demo.go": "package demo\n"}))
	crate := tarball(t, map[string]string{"demo-1.0.0/Cargo.toml": "[package]\nname = \"demo\"\nversion = \"1.0.0\"\n", "demo-1.0.0/src/lib.rs": ""})
	file("cargo/demo-1.0.0.crate", crate)
	file("cargo/index/config.json", []byte(`{"dl":"https://site.test/cargo/{crate}-{version}.crate"}`))
	file("cargo/index/de/mo/demo", fmt.Appendf(nil, `{"name":"demo","vers":"1.0.0","deps":[],"cksum":"%x","features":{},"yanked":false}`+"\n", sha256.Sum256(crate)))
	deb := []byte("!<arch>\n")
	file("debian/pool/demo_1.0_all.deb", deb)
	file("debian/dists/stable/main/binary-amd64/Packages", fmt.Appendf(nil, "Package: demo\nVersion: 1.0\nArchitecture: all\nFilename: pool/demo_1.0_all.deb\nSize: %d\nSHA256: %x\nDescription: a test\n\n", len(deb), sha256.Sum256(deb)))
	repository(t, filepath.Join(dir, "git", "demo.git"))
	files := http.FileServer(http.Dir(dir))
	out, err := exec.Command(testenv.RequirePeer(t, "git"), "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	return map[string]http.Handler{
		"/simple/": files, "/go/": files, "/debian/": files, "/cargo/": files, "/npm/demo-1.0.0.tgz": files,
		"/npm/demo": http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(rw, `{"name":"demo","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"demo","version":"1.0.0","main":"x.js",`+
				`"dist":{"tarball":"https://site.test/npm/demo-1.0.0.tgz"}}}}`)
		}),
		"/git/": &cgi.Handler{
			Path: filepath.Join(strings.TrimSpace(string(out)), "git-http-backend"), Root: "/git",
			Env: []string{"GIT_PROJECT_ROOT=" + filepath.Join(dir, "git"), "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
		},
	}
}

// repository makes a bare repository with two commits.
func repository(t *testing.T, bare string) {
	t.Helper()
	work := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", work, "-c", "user.name=x", "-c", "user.email=x@site.test", "-c", "commit.gpgSign=false"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
	}
	git("init", "-q", "-b", "main")
	for _, message := range []string{"zeroth", "first"} {
		if err := os.WriteFile(filepath.Join(work, "file"), bytes.Repeat([]byte(message+"\n"), 10000), 0o644); err != nil {
			t.Fatal(err)
		}
		git("add", "file")
		git("commit", "-q", "-m", message)
	}
	git("clone", "-q", "--bare", work, bare)
}

func zipped(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	for name, text := range files {
		w, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func tarball(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := gzip.NewWriter(&buf)
	tw := tar.NewWriter(z)
	for name, text := range files {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}
