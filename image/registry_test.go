package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// dockerRegistry starts Debian's docker-registry and returns its address.
func dockerRegistry(t *testing.T, https bool) string {
	t.Helper()
	bin := testenv.RequirePeer(t, "docker-registry")
	dir := t.TempDir()
	// It finds a free port itself and logs it at the level info.
	config := fmt.Sprintf("version: 0.1\nlog: {level: info, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp:\n  addr: 127.0.0.1:0\n  secret: test\n",
		filepath.Join(dir, "data"))
	if https {
		cert, key := selfSigned(t, dir)
		config += fmt.Sprintf("  tls: {certificate: %s, key: %s}\n", cert, key)
	}
	file := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "serve", file)
	output, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = cmd.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	lines := bufio.NewScanner(io.TeeReader(output, &said))
	read := make(chan struct{})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-read
		if err := cmd.Wait(); err == nil {
			t.Error("docker-registry had ended before it was killed")
		}
	})
	for lines.Scan() {
		if found := listening.FindSubmatch(lines.Bytes()); found != nil {
			go func() {
				defer close(read)
				_, _ = io.Copy(io.Discard, output) // or its output would block it
			}()
			return string(found[1])
		}
	}
	close(read)
	t.Fatalf("docker-registry has ended: %v\n%s", lines.Err(), said.Bytes())
	return ""
}

// listening matches docker-registry's message that it accepts connections.
var listening = regexp.MustCompile(`listening on (127\.0\.0\.1:[0-9]+)`)

func selfSigned(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "127.0.0.1"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &priv.PublicKey, priv)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// layerTar returns a layer's content: files by name, whiteouts included.
func layerTar(t *testing.T, files ...string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(files); i += 2 {
		hdr := &tar.Header{Typeflag: tar.TypeReg, Name: files[i], Size: int64(len(files[i+1])), Mode: 0o644}
		if err := w.WriteHeader(hdr); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func asLayer(t *testing.T, content []byte, how compression.Compression) v1.Layer {
	t.Helper()
	if how == compression.None {
		return static.NewLayer(content, types.OCIUncompressedLayer)
	}
	media := map[compression.Compression]types.MediaType{compression.GZip: types.OCILayer, compression.ZStd: types.OCILayerZStd}[how]
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil },
		tarball.WithCompression(how), tarball.WithMediaType(media))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// testImage has the layers and an ordinary configuration.
func testImage(t *testing.T, arch string, layers ...v1.Layer) v1.Image {
	t.Helper()
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, l := range layers {
		media, err := l.MediaType()
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: l, MediaType: media}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", arch
	c.Config = v1.Config{Env: []string{"A=b"}, Cmd: []string{"cmd"}, Entrypoint: []string{"entry"}, WorkingDir: "/work", User: "1000:1000"}
	if img, err = mutate.ConfigFile(img, c); err != nil {
		t.Fatal(err)
	}
	return img
}

func push(t *testing.T, ref string, what any) {
	t.Helper()
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	opts := []remote.Option{remote.WithTransport(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}), remote.WithContext(t.Context())}
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(parsed, what, opts...)
	case v1.ImageIndex:
		err = remote.WriteIndex(parsed, what, opts...)
	default:
		err = fmt.Errorf("cannot push a %T", what)
	}
	if err != nil {
		t.Fatalf("push %s: %v", ref, err)
	}
}

// faulty is go-containerregistry's registry in this process, with answers that can be replaced.
type faulty struct {
	host string

	mu       sync.Mutex
	override map[string]http.HandlerFunc // by the end of the path
	gets     map[string]int              // successful or not, by path
	login    string                      // user:password that every request needs; empty: none
}

// guard lets only requests with this login through.
func (f *faulty) guard(user, password string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.login = user + ":" + password
}

func newFaulty(t *testing.T) *faulty {
	t.Helper()
	f := &faulty{override: make(map[string]http.HandlerFunc), gets: make(map[string]int)}
	good := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		handler := good
		if user, password, _ := r.BasicAuth(); f.login != "" && f.login != user+":"+password {
			f.mu.Unlock()
			w.Header().Set("Www-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodGet {
			f.gets[r.URL.Path]++
			for suffix, h := range f.override {
				if strings.HasSuffix(r.URL.Path, suffix) {
					handler = h
				}
			}
		}
		f.mu.Unlock()
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	f.host = strings.TrimPrefix(srv.URL, "http://")
	return f
}

func (f *faulty) replace(suffix string, h http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.override[suffix] = h
}

// answer sends a fixed body.
func answer(contentType string, body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		_, _ = w.Write(body)
	}
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

// cut promises the whole body and closes the connection in the middle.
func cut(body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		_, _ = w.Write(body[:len(body)/2])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
}
