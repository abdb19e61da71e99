package gateway

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/gateway/ca"
)

// A program runs one of the host's programs as if in a sandbox: it trusts the sandbox's authority
// and no other, and has the placeholder in the place of the secret.
type program struct {
	t      *testing.T
	dir    string // of its own; its home too
	trust  string // the file of the authority
	server string // host and port
	port   string
}

// run runs a program and returns its output. It skips the test if the host does not have it.
func (p *program) run(args ...string) string {
	p.t.Helper()
	path, err := exec.LookPath(args[0])
	if err == nil && args[0] == "python3" { // which may be a script that asks the home for the program
		var out []byte
		out, err = exec.CommandContext(p.t.Context(), path, "-c", "import sys; print(sys.executable)").Output()
		path = strings.TrimSpace(string(out))
	}
	if err != nil {
		p.t.Skipf("%s: %v", args[0], err)
	}
	c := exec.CommandContext(p.t.Context(), path, args[1:]...)
	c.Dir = p.dir
	c.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + p.dir, "LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_CONFIG_NOSYSTEM=1", "GIT_SSL_CAINFO=" + p.trust,
		"CURL_CA_BUNDLE=" + p.trust, "SSL_CERT_FILE=" + p.trust, "REQUESTS_CA_BUNDLE=" + p.trust, "PIP_CERT=" + p.trust, "NODE_EXTRA_CA_CERTS=" + p.trust,
		"PYTHONPATH=" + p.dir, "NODE_OPTIONS=--require=" + p.file("lookup.cjs", nodeLookup),
	}
	p.file("sitecustomize.py", pythonLookup)
	out, err := c.CombinedOutput()
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", args, err, out)
	}
	return string(out)
}

// The names of the tests lead to the loopback.
const (
	pythonLookup = "import socket\nold = socket.getaddrinfo\ndef lookup(host, *a, **k):\n    return old('127.0.0.1' if str(host).endswith('.test') else host, *a, **k)\nsocket.getaddrinfo = lookup\n"
	nodeLookup   = `const dns = require('dns'); const old = dns.lookup;
dns.lookup = (host, options, done) => { if (typeof options === 'function') { done = options; options = {} } return old(host.endsWith('.test') ? '127.0.0.1' : host, options, done) }`
)

func (p *program) file(name, content string) string {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// listenAs makes a listener whose connections go to its own port of an address.
func (w *world) listenAs(addr string) netip.AddrPort {
	w.t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		w.t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	dst := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
	w.mu.Lock()
	w.dsts[port] = dst
	w.mu.Unlock()
	go w.n.Serve(context.Background(), l) //nolint:errcheck // Network.Close waits for it
	return dst
}

// only answers requests that have the secret, and asks for it otherwise.
func only(want string, h http.Handler) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Authorization"); got != want {
			rw.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			http.Error(rw, "unauthorized", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(rw, r)
	}
}

func archive(name, content string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	t := tar.NewWriter(z)
	_ = t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}) // into memory
	_, _ = io.WriteString(t, content)
	_ = t.Close()
	_ = z.Close()
	return b.Bytes()
}

func wheel() []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range map[string]string{
		"demo.py": "x = 'demo'\n", "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
		"demo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "demo-1.0.dist-info/RECORD": "",
	} {
		f, _ := z.Create(name) // into memory
		_, _ = io.WriteString(f, content)
	}
	_ = z.Close()
	return b.Bytes()
}

// Programs as they are installed work through inspection, with a placeholder for their secret.
func TestPrograms(t *testing.T) {
	bearer := "Bearer " + token
	basicAuth := basic("me", token)
	files := func(all map[string][]byte) http.HandlerFunc {
		return func(rw http.ResponseWriter, r *http.Request) {
			b, ok := all[r.URL.Path]
			if !ok {
				http.NotFound(rw, r)
				return
			}
			http.ServeContent(rw, r, r.URL.Path, time.Time{}, bytes.NewReader(b))
		}
	}
	hello := files(map[string][]byte{"/hello.txt": []byte("hello from the server")})
	for name, tc := range map[string]struct {
		credential Credential
		server     func(p *program) http.Handler
		run        func(p *program) string
		want       string
		protocol   string // of the events
	}{
		"curl, HTTP/2": {Bearer(token), func(*program) http.Handler { return only(bearer, hello) }, func(p *program) string {
			return p.run("curl", "-sS", "--http2", "--resolve", p.server+":127.0.0.1", "-H", "Authorization: Bearer "+placeholder, "https://"+p.server+"/hello.txt")
		}, "hello from the server", "h2"},
		"curl, HTTP/1.1": {Bearer(token), func(*program) http.Handler { return only(bearer, hello) }, func(p *program) string {
			return p.run("curl", "-sS", "--http1.1", "--resolve", p.server+":127.0.0.1", "-H", "Authorization: Bearer "+placeholder, "https://"+p.server+"/hello.txt")
		}, "hello from the server", "https"},
		"curl, upload": {Basic("", token), func(*program) http.Handler {
			return only(basicAuth, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				n, _ := io.Copy(io.Discard, r.Body)
				fmt.Fprintf(rw, "%d bytes", n)
			}))
		}, func(p *program) string {
			file := p.file("upload", strings.Repeat("x", 3_000_000))
			return p.run("curl", "-sS", "--resolve", p.server+":127.0.0.1", "-u", "me:"+placeholder, "-T", file, "https://"+p.server+"/up")
		}, "3000000 bytes", "h2"},
		"python, urllib": {Bearer(token), func(*program) http.Handler { return only(bearer, hello) }, func(p *program) string {
			return p.run("python3", "-c", fmt.Sprintf("import urllib.request as u; print(u.urlopen(u.Request('https://%s/hello.txt', headers={'Authorization': 'Bearer %s'})).read())", p.server, placeholder))
		}, "hello from the server", "https"},
		"node, fetch": {Bearer(token), func(*program) http.Handler { return only(bearer, hello) }, func(p *program) string {
			return p.run("node", "-e", fmt.Sprintf("fetch('https://%s/hello.txt', {headers: {authorization: 'Bearer %s'}}).then(r => r.text()).then(console.log)", p.server, placeholder))
		}, "hello from the server", "https"},
		"git clone": {Basic("", token), func(p *program) http.Handler {
			repo := filepath.Join(p.dir, "served", "demo.git")
			p.run("git", "init", "-q", "--bare", repo)
			p.run("git", "init", "-q", "work")
			p.file("work/README", "cloned over HTTPS\n")
			p.run("git", "-C", "work", "add", ".")
			p.run("git", "-C", "work", "-c", "user.name=a", "-c", "user.email=a@b.test", "commit", "-q", "-m", "first")
			p.run("git", "-C", "work", "push", "-q", repo, "HEAD:refs/heads/main")
			p.run("git", "-C", repo, "symbolic-ref", "HEAD", "refs/heads/main")
			p.run("git", "-C", repo, "config", "http.receivepack", "true")
			backend := strings.TrimSpace(p.run("git", "--exec-path")) + "/git-http-backend"
			return only(basicAuth, &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + filepath.Dir(repo), "GIT_HTTP_EXPORT_ALL=1"}, Logger: nil})
		}, func(p *program) string {
			resolve := "http.curloptResolve=" + p.server + ":127.0.0.1"
			p.run("git", "-c", resolve, "clone", "-q", "https://me:"+placeholder+"@"+p.server+"/demo.git", "clone")
			p.file("clone/MORE", "pushed")
			p.run("git", "-C", "clone", "add", ".")
			p.run("git", "-C", "clone", "-c", "user.name=a", "-c", "user.email=a@b.test", "commit", "-q", "-m", "second")
			p.run("git", "-C", "clone", "-c", resolve, "push", "-q", "origin", "HEAD:refs/heads/more")
			return p.run("cat", "clone/README") + p.run("git", "-C", "served/demo.git", "show", "more:MORE")
		}, "cloned over HTTPS\npushed", "h2"},
		"pip download": {Basic("", token), func(*program) http.Handler {
			return only(basicAuth, files(map[string][]byte{
				"/simple/demo/":                    []byte(`<!DOCTYPE html><html><body><a href="/files/demo-1.0-py3-none-any.whl">demo-1.0-py3-none-any.whl</a></body></html>`),
				"/files/demo-1.0-py3-none-any.whl": wheel(),
			}))
		}, func(p *program) string {
			return p.run("python3", "-m", "pip", "download", "--no-cache-dir", "--disable-pip-version-check", "--no-deps", "--index-url", "https://me:"+placeholder+"@"+p.server+"/simple/", "demo")
		}, "Successfully downloaded demo", "https"},
		"npm install": {Bearer(token), func(p *program) http.Handler {
			pack := archive("package/package.json", `{"name":"demo","version":"1.0.0"}`)
			sum := sha512.Sum512(pack)
			return only(bearer, files(map[string][]byte{
				"/demo": fmt.Appendf(nil, `{"name":"demo","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"demo","version":"1.0.0","dist":{"tarball":"https://%s/demo/-/demo-1.0.0.tgz","integrity":"sha512-%s"}}}}`,
					p.server, base64.StdEncoding.EncodeToString(sum[:])),
				"/demo/-/demo-1.0.0.tgz": pack,
			}))
		}, func(p *program) string {
			p.file(".npmrc", fmt.Sprintf("registry=https://%s/\n//%s/:_authToken=%s\nupdate-notifier=false\naudit=false\nfund=false\ncafile=%s\n", p.server, p.server, placeholder, p.trust))
			p.file("package.json", "{}")
			p.run("npm", "install", "--no-progress", "demo")
			return p.run("cat", "node_modules/demo/package.json")
		}, `{"name":"demo","version":"1.0.0"}`, "https"},
	} {
		t.Run(name, func(t *testing.T) {
			p := &program{t: t, dir: t.TempDir()}
			w := newInspected(t, func(o *Options, _ *limits) {
				authority, err := ca.New(time.Now(), time.Hour) // programs have their own clock
				if err != nil {
					t.Fatal(err)
				}
				o.CA, o.Policy = authority, parse(t, `{version: 1, rules: [{allow: a.in.test, ports: any, inspect: true}]}`)
			})
			p.trust = p.file("ca.pem", string(w.n.opts.CA.Certificate()))
			dst := w.listenAs("93.184.215.30")
			p.port = fmt.Sprint(dst.Port())
			p.server = "a.in.test:" + p.port
			// The port is known only now.
			w.n.SetSecrets([]Secret{bind(t, Binding{Host: "a.in.test", Port: dst.Port()}, tc.credential)})
			w.secure(dst.String(), "a.in.test", tc.server(p).ServeHTTP, "h2", "http/1.1")
			w.resolve("a.in.test", dnsmessage.TypeA)
			if got := tc.run(p); !strings.Contains(got, tc.want) {
				t.Errorf("%s", got)
			}
			put := 0
			for _, e := range w.all() {
				if !e.Allow || e.Kind == Request && e.Protocol != tc.protocol {
					t.Errorf("%+v", e)
				}
				if e.Secret == "key" && e.Status == 200 {
					put++
				}
			}
			if put == 0 {
				t.Error("no request had the secret")
			}
			err := filepath.WalkDir(p.dir, func(path string, d os.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() {
					return err
				}
				if b, err := os.ReadFile(path); err != nil || bytes.Contains(b, []byte(token)) {
					t.Errorf("%s holds the secret, or %v", path, err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
