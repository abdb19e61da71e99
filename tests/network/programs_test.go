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
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

var (
	//go:embed testdata/clients.py
	pythonClients string
	//go:embed testdata/clients.mjs
	nodeClients string
	//go:embed testdata/clients.sh
	shellClients string
)

// programs are scripts of clients as they are installed on this machine, with the least number of
// answers that each gets if all programs are there.
var programs = map[string]struct {
	peers   []string
	command string
	script  string
	answers int
}{
	"python": {[]string{"python3"}, "exec /usr/bin/python3 -", pythonClients, 25},
	"node":   {[]string{"node"}, "exec node --input-type=module -", nodeClients, 18},
	"shell":  {[]string{"curl", "openssl", "git", "perl", "ruby", "npm", "pip3", "java", "apt-get"}, "exec sh -s", shellClients, 43},
}

// Programs that people use in sandboxes get what a policy allows, and clear errors for the rest.
func TestPrograms(t *testing.T) {
	files := packages(t)
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, files)
		s := trusting(t, d, "default", allowed, ca)
		for name, p := range programs {
			t.Run(name, func(t *testing.T) {
				for _, peer := range p.peers {
					testenv.RequirePeer(t, peer)
				}
				got := s.Exec(t, api.ExecRequest{
					Argv: []string{"sh", "-c", p.command}, Stdin: []byte(p.script), Timeout: testenv.HungAfter.Seconds(),
					Env: []string{
						"HOME=/tmp", "GOPATH=/tmp/gopath", "GOCACHE=/tmp/gocache", "GOPROXY=https://site.test/go", "GOSUMDB=off", "GOFLAGS=-mod=mod", "GOTOOLCHAIN=local",
						"SSL_CERT_FILE=/tmp/ca.pem", "NODE_EXTRA_CA_CERTS=/tmp/ca.pem", "GIT_SSL_CAINFO=/tmp/ca.pem", "CURL_CA_BUNDLE=/tmp/ca.pem",
						"REQUESTS_CA_BUNDLE=/tmp/ca.pem", "PIP_CERT=/tmp/ca.pem", "GIT_TERMINAL_PROMPT=0", "LC_ALL=C",
					},
				})
				answers := 0
				for line := range strings.Lines(got.Stdout) {
					switch {
					case strings.HasPrefix(line, "ok "):
						answers++
					case strings.HasPrefix(line, "absent "):
						t.Logf("not on this machine: %s", strings.TrimPrefix(line, "absent "))
					default:
						t.Error(line)
					}
				}
				if answers < p.answers || got.Exit.Code != 0 {
					t.Errorf("%d answers of %d, %+v; stderr: %s", answers, p.answers, got.Exit, got.Stderr)
				}
			})
		}
	})
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
	deb := []byte("!<arch>\n")
	file("debian/demo_1.0_all.deb", deb)
	file("debian/Packages", fmt.Appendf(nil, "Package: demo\nVersion: 1.0\nArchitecture: all\nFilename: ./demo_1.0_all.deb\nSize: %d\nSHA256: %x\nDescription: a test\n\n", len(deb), sha256.Sum256(deb)))
	repository(t, filepath.Join(dir, "git", "demo.git"))
	files := http.FileServer(http.Dir(dir))
	out, err := exec.Command(testenv.RequirePeer(t, "git"), "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	return map[string]http.Handler{
		"/simple/": files, "/go/": files, "/debian/": files, "/npm/demo-1.0.0.tgz": files,
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
