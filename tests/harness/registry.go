package harness

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A Registry serves images on loopback.
type Registry struct {
	Host string // host:port
	CA   string // file with the certificate that a client must trust, for HTTPS

	transport http.RoundTripper
	auth      authn.Authenticator
}

// DebianRegistry starts Debian's docker-registry, the real thing, with TLS or without.
func DebianRegistry(t testing.TB, withTLS bool) *Registry {
	t.Helper()
	return debianRegistry(t, withTLS, "")
}

// The password of a [GuardedRegistry], and as docker-registry wants to have it: bcrypt.
const (
	RegistryUser     = "tester"
	RegistryPassword = "s3cret word"

	registryHash = "$2b$04$ZZVrME2j3.jxA5Dta.FK1OAokL3SWvca5vjmPXMz0.y7hOKSX5mC6"
)

// GuardedRegistry is DebianRegistry with TLS and a password.
func GuardedRegistry(t testing.TB) *Registry {
	t.Helper()
	file := filepath.Join(t.TempDir(), "htpasswd")
	if err := os.WriteFile(file, fmt.Appendf(nil, "%s:%s\n", RegistryUser, registryHash), 0o600); err != nil {
		t.Fatal(err)
	}
	r := debianRegistry(t, true, fmt.Sprintf("auth: {htpasswd: {realm: tests, path: %s}}\n", file))
	r.auth = &authn.Basic{Username: RegistryUser, Password: RegistryPassword}
	return r
}

// AuthFile is what podman login, or docker login, would write for this registry.
func (r *Registry) AuthFile(user, password string) string {
	return fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.Host, base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
}

func debianRegistry(t testing.TB, withTLS bool, more string) *Registry {
	t.Helper()
	program := testenv.RequirePeer(t, "docker-registry")
	dir := t.TempDir()
	r := &Registry{transport: http.DefaultTransport, auth: authn.Anonymous}
	scheme := "http"
	if withTLS {
		certificate, key := selfSigned(t, dir)
		more = fmt.Sprintf("  tls: {certificate: %s, key: %s}\n", certificate, key) + more // below "http"
		scheme, r.CA = "https", certificate
		r.transport = trusting(t, certificate)
	}
	// It takes no listener, and does not report its port. So another process may be quicker to take a
	// free one.
	for range 20 {
		r.Host = freeAddress(t)
		if r.serve(t, program, dir, scheme, more) {
			return r
		}
	}
	t.Fatal("docker-registry finds no port that is free")
	return nil
}

// serve starts docker-registry and waits until it answers. If another process has taken its port
// meanwhile, serve returns false.
func (r *Registry) serve(t testing.TB, program, dir, scheme, more string) bool {
	t.Helper()
	const mark = "X-Registry-Of"
	who := rand.Text()
	config := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s}}\n"+
		"http:\n  addr: %s\n  headers: {%s: [%s]}\n", filepath.Join(dir, "storage"), r.Host, mark, who) + more
	file := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var output logBuffer
	cmd := exec.Command(program, "serve", file)
	cmd.Stdout, cmd.Stderr = &output, &output
	// It ends with the test binary, whatever ends that.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start docker-registry: %v", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // it is killed, or says why
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	client := &http.Client{Transport: r.transport, Timeout: 5 * time.Second}
	lives := true
	Eventually(t, func() error {
		select {
		case <-ended:
			lives = false
			return nil
		default:
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, scheme+"://"+r.Host+"/v2/", nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return fmt.Errorf("docker-registry: %w: %s", err, &output)
		}
		defer response.Body.Close()
		if got := response.Header.Get(mark); got != who {
			return fmt.Errorf("who answers at %s is %q, not %q", r.Host, got, who)
		}
		return nil
	})
	if !lives && !strings.Contains(output.String(), "address already in use") {
		t.Fatalf("docker-registry has ended: %s", &output)
	}
	return lives
}

// LyingRegistry serves images from memory and lets tamper change any answer.
func LyingRegistry(t testing.TB, tamper func(http.Handler) http.Handler) *Registry {
	t.Helper()
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if tamper != nil {
		handler = tamper(handler)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &Registry{Host: strings.TrimPrefix(server.URL, "http://"), transport: http.DefaultTransport, auth: authn.Anonymous}
}

// Push uploads an image or an index and returns its reference for a pull.
func (r *Registry) Push(t testing.TB, repository string, what any) string {
	t.Helper()
	full := r.Name(repository)
	ref, err := name.ParseReference(full, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	options := []remote.Option{remote.WithTransport(r.transport), remote.WithContext(t.Context()), remote.WithAuth(r.auth)}
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(ref, what, options...)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, what, options...)
	default:
		t.Fatalf("cannot push a %T", what)
	}
	if err != nil {
		t.Fatalf("push %s: %v", full, err)
	}
	return full
}

// freeAddress finds a port on loopback that has no listener just now.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// selfSigned writes a certificate for loopback and its key.
func selfSigned(t testing.TB, dir string) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "registry of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	certificate, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{
		certificate: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certificate, key
}

func trusting(t testing.TB, certificate string) http.RoundTripper {
	t.Helper()
	data, err := os.ReadFile(certificate)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		t.Fatal("no certificate in " + certificate)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	return transport
}

// pullBody and Pulled are the wire types, under the names that read well here.
type (
	pullBody = api.PullImage
	// Pulled is an image that was pulled.
	Pulled = api.Image
)

// readPull reads progress lines to the last, which has the image or the problem.
func readPull(r io.Reader) (*Pulled, error) {
	dec := json.NewDecoder(r)
	for {
		var e api.PullEvent
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			return nil, errors.New("the pull ended without a last line")
		} else if err != nil {
			return nil, fmt.Errorf("read pull progress: %w", err)
		}
		switch {
		case e.Error != nil:
			return nil, e.Error
		case e.Image != nil:
			return e.Image, nil
		}
	}
}

// MustPull pulls an image that can be pulled.
func (d *Daemon) MustPull(t testing.TB, reference string) *Pulled {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	image, err := d.Pull(ctx, reference, false)
	if err != nil {
		t.Fatalf("pull %s: %v", reference, err)
	}
	return image
}
