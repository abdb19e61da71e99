package engine

import (
	"archive/tar"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// requireNetworks skips a test where this host gives sandboxes no network.
func requireNetworks(t testing.TB, f runtimetest.Fixture) runtime.Networker {
	t.Helper()
	for _, m := range describe(t, f).Enforced.Missing {
		if strings.HasPrefix(m, "network: ") {
			t.Skip(m)
		}
	}
	return f.Engine.(*launcher.Client)
}

// describe returns the launcher's description of itself and its host.
func describe(t testing.TB, f runtimetest.Fixture) runtime.Description {
	t.Helper()
	d, err := f.Engine.(*launcher.Client).Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func networked(t *testing.T, f runtimetest.Fixture, id string) *runtime.Spec {
	t.Helper()
	spec := f.NewSpec(t, id)
	spec.Network = true
	return spec
}

// gateway answers the sandbox's connections with the address that each was made to, and its
// questions with the question.
func gateway(t *testing.T, n runtime.Networker, id string) {
	t.Helper()
	sockets, err := n.NetworkSockets(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	var ends []io.Closer
	for _, f := range []*os.File{sockets.Stream, sockets.DNSTCP} {
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, l)
		work.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "this is "+c.LocalAddr().String())
				_ = c.Close()
			}
		})
	}
	c, err := net.FilePacketConn(sockets.DNS)
	if err != nil {
		t.Fatal(err)
	}
	ends = append(ends, c)
	work.Go(func() {
		buf, oob := make([]byte, 512), make([]byte, 256)
		for {
			size, control, _, from, err := c.(*net.UDPConn).ReadMsgUDP(buf, oob)
			if err != nil {
				return
			}
			_, _, _ = c.(*net.UDPConn).WriteMsgUDP(append([]byte("answer to "), buf[:size]...), oob[:control], from)
		}
	})
	if err := sockets.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, c := range ends {
			_ = c.Close()
		}
		work.Wait()
	})
}

// A sandbox with a network reaches the sockets that the engine hands out, and nothing else; one
// without reaches nothing.
func TestConnectionsEndAtTheNetworksSockets(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	spec := networked(t, f, "net1")
	client := begin(t, f, spec)
	gateway(t, n, "net1")
	alone := begin(t, f, f.NewSpec(t, "alone"))
	program := harness.Helper(t, "neighbour")
	put(t, client, program)
	put(t, alone, program)

	for _, tc := range []struct{ do, address, with, without string }{
		{"connect", "93.184.216.34:80", "this is 93.184.216.34:80", "ENETUNREACH"},
		{"connect", "[2606:2800:220:1::1]:443", "this is [2606:2800:220:1::1]:443", "ENETUNREACH"},
		{"connect", "10.0.0.1:22", "this is 10.0.0.1:22", "ENETUNREACH"}, // the policy's to refuse
		{"connect", netns.Nameserver.String() + ":53", "this is 192.0.2.53:53", "ENETUNREACH"},
		{"ask", netns.Nameserver.String() + ":53", "answer to question", "ENETUNREACH"},
		{"ask", "8.8.8.8:53", "answer to question", "ENETUNREACH"},
		{"ask", "93.184.216.34:443", "ECONNREFUSED", "ENETUNREACH"},
		{"connect", "127.0.0.1:80", "ECONNREFUSED", "ECONNREFUSED"},
		{"connect", "127.0.0.1:1", "ECONNREFUSED", "ECONNREFUSED"},
		{"connect", netns.Address4.String() + ":1", "ECONNREFUSED", "ENETUNREACH"},
		{"interfaces", "", "lo", "lo"},
		{"sys-read-only", "", "true", "true"},
	} {
		if got, _ := says(t, client, tc.do, tc.address); got != tc.with {
			t.Errorf("with a network: %s %s: %q, want %q", tc.do, tc.address, got, tc.with)
		}
		if got, _ := says(t, alone, tc.do, tc.address); got != tc.without {
			t.Errorf("without: %s %s: %q, want %q", tc.do, tc.address, got, tc.without)
		}
	}
	for name, want := range map[string]string{
		"/etc/resolv.conf": "nameserver 192.0.2.53\nsearch .\noptions edns0\n",
		"/etc/hosts":       "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n192.0.2.1\tnet1\n2001:db8::1\tnet1\n",
	} {
		if got := read(t, client, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
		if _, err := alone.Open(t.Context(), name); err == nil {
			t.Errorf("without a network there is %s", name)
		}
	}
	for id, want := range map[string]string{"net1": api.EnforcedGateway, "alone": api.EnforcedLoopback} {
		e, err := f.Engine.Update(t.Context(), id, &runtime.Change{Limits: &spec.Limits})
		if err != nil || e.Network != want {
			t.Errorf("%s: network is enforced by %q, %v, want %q", id, e.Network, err, want)
		}
	}
	for id, want := range map[string]error{"alone": runtime.ErrNoNetwork, "unknown": runtime.ErrNotFound} {
		if _, err := n.NetworkSockets(t.Context(), id); !errors.Is(err, want) {
			t.Errorf("sockets of %s: %v, want %v", id, err, want)
		}
		if _, err := n.NetworkSocket(t.Context(), id, "tcp"); !errors.Is(err, want) {
			t.Errorf("socket of %s: %v, want %v", id, err, want)
		}
	}
	if _, err := n.NetworkSocket(t.Context(), "net1", "unix"); err == nil {
		t.Error("a socket of no network was made")
	}
}

func read(t *testing.T, client *host.Client, name string) string {
	t.Helper()
	file, err := client.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	data, err := io.ReadAll(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// The files of a network cover what the image has in their place: a link is not followed, out of
// the root or anywhere else. They are in no diff, and one that the sandbox has changed is made anew
// with its next start.
func TestFilesOfANetworkCoverTheImages(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	requireNetworks(t, f)
	client := f.Engine.(*launcher.Client)
	for name, tc := range map[string]struct {
		files   []harness.File
		changed []string // by the mounts
		refused bool
	}{
		"files":    {files: []harness.File{{Name: "etc/resolv.conf", Body: "nameserver 8.8.8.8\n"}, {Name: "etc/hosts", Body: "1.2.3.4 x\n"}}},
		"none":     {changed: []string{"added directory /etc", "added file /etc/hosts", "added file /etc/resolv.conf"}},
		"dangling": {files: []harness.File{{Name: "etc/resolv.conf", Type: tar.TypeSymlink, Link: "../run/systemd/resolve/stub-resolv.conf"}, {Name: "etc/hosts"}}},
		"absolute": {files: []harness.File{{Name: "etc/resolv.conf", Type: tar.TypeSymlink, Link: "/layers/x"}, {Name: "etc/hosts", Type: tar.TypeSymlink, Link: "/init"}}},
		"out":      {files: []harness.File{{Name: "etc/resolv.conf"}, {Name: "etc/hosts", Type: tar.TypeSymlink, Link: "../../../../init"}}},
		"etc link": {
			files: []harness.File{{Name: "etc", Type: tar.TypeSymlink, Link: "/../../conf"}, {Name: "conf/hosts"}, {Name: "conf/resolv.conf"}},
		},
		"directory": {files: []harness.File{{Name: "etc/resolv.conf/", Type: tar.TypeDir, Mode: 0o755}, {Name: "etc/hosts"}}, refused: true},
		"etc file":  {files: []harness.File{{Name: "etc"}}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			var files []harness.File
			for _, d := range []string{"tmp/", "dev/", "proc/", "sys/"} {
				files = append(files, harness.File{Name: d, Type: tar.TypeDir, Mode: 0o755})
			}
			image := layerOf(t, client, harness.Tar(t, append(files, tc.files...)...))
			for _, readOnly := range []bool{false, true} {
				id := "covered" + strings.ReplaceAll(name, " ", "") + strconv.FormatBool(readOnly)
				spec := networked(t, f, id)
				spec.Rootfs.Layers = []string{image}
				spec.Profile.ReadOnlyRoot = readOnly
				sandbox, err := tryBegin(t, f, spec)
				if tc.refused {
					if !errors.Is(err, runtime.ErrRootfs) {
						t.Errorf("start: %v, want one that blames the image", err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if got := read(t, sandbox, "/etc/resolv.conf"); !strings.HasPrefix(got, "nameserver 192.0.2.53\n") {
					t.Errorf("resolv.conf is %q", got)
				}
				if got := read(t, sandbox, "/etc/hosts"); !strings.HasSuffix(got, "\t"+id+"\n") {
					t.Errorf("hosts is %q", got)
				}
				changes := changesOf(t, client, spec)
				if !slices.Equal(changes, tc.changed) {
					t.Errorf("read-only %t: changes are %q, want %q", readOnly, changes, tc.changed)
				}
				_, err = sandbox.Append(t.Context(), "/etc/hosts", 0o644, 0, 0)
				if (err != nil) != readOnly {
					t.Errorf("read-only %t: append to hosts: %v", readOnly, err)
				}
			}
		})
	}
}

// authority stands for a certificate in tests that look for its bytes only. No program verifies it.
var authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("AUTHORITY")})

// The authority of an inspected sandbox stands before the image's own, in each of its bundles.
// Links lead nowhere, and what is no file is not read.
func TestBundlesOfAnInspectedSandbox(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	requireNetworks(t, f)
	client := f.Engine.(*launcher.Client)
	const fedora, debian = "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", runtime.TrustFile
	for name, tc := range map[string]struct {
		files   []harness.File
		at      []string // other bundles than the first
		own     string   // certificates of the image
		refused bool
	}{
		"none":   {},
		"debian": {files: []harness.File{{Name: debian[1:], Body: "OWN\n"}}, own: "OWN\n"},
		"fedora": {
			files: []harness.File{{Name: fedora[1:], Body: "OWN\n"}, {Name: "etc/pki/tls/certs/ca-bundle.crt", Type: tar.TypeSymlink, Link: fedora}},
			at:    []string{fedora, "/etc/pki/tls/certs/ca-bundle.crt"}, own: "OWN\n",
		},
		"two":       {files: []harness.File{{Name: debian[1:], Body: "OWN\n"}, {Name: "etc/ssl/cert.pem", Body: "OTHER\n"}}, at: []string{"/etc/ssl/cert.pem"}, own: "OWN\n"},
		"dangling":  {files: []harness.File{{Name: debian[1:], Type: tar.TypeSymlink, Link: "../../../../../../init"}}},
		"directory": {files: []harness.File{{Name: debian[1:] + "/", Type: tar.TypeDir, Mode: 0o755}}, refused: true},
		"pipe":      {files: []harness.File{{Name: debian[1:], Type: tar.TypeFifo, Mode: 0o644}}, refused: true},
		"large":     {files: []harness.File{{Name: debian[1:], Body: strings.Repeat("x", 5<<20)}}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			var files []harness.File
			for _, d := range []string{"tmp/", "dev/", "proc/", "sys/"} {
				files = append(files, harness.File{Name: d, Type: tar.TypeDir, Mode: 0o755})
			}
			spec := networked(t, f, "trusts"+name)
			spec.Rootfs.Layers = []string{layerOf(t, client, harness.Tar(t, append(files, tc.files...)...))}
			spec.Trust = authority
			sandbox, err := tryBegin(t, f, spec)
			if tc.refused {
				if !errors.Is(err, runtime.ErrRootfs) {
					t.Errorf("start: %v, want one that blames the image", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range append(tc.at, debian) {
				if got, want := read(t, sandbox, at), string(authority)+"\n"+tc.own; got != want {
					t.Errorf("%s is %q, want %q", at, got, want)
				}
			}
		})
	}
}

// Java's stores of an image have the authority of an inspected sandbox, wherever Java is installed.
// Links lead nowhere, and what is no store is left as it is. Commits have no trace.
func TestJavaStoresOfAnInspectedSandbox(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	requireNetworks(t, f)
	client := f.Engine.(*launcher.Client)
	const debian, temurin = "/etc/ssl/certs/java/cacerts", "/opt/java/openjdk/lib/security/cacerts"
	// Two stores without entries, with different checksums.
	store := "\xfe\xed\xfe\xed\x00\x00\x00\x02\x00\x00\x00\x00" + strings.Repeat("x", sha1.Size)
	other := "\xfe\xed\xfe\xed\x00\x00\x00\x02\x00\x00\x00\x00" + "OTHER" + strings.Repeat("x", sha1.Size)
	large := store + strings.Repeat("x", 2<<20)
	for name, tc := range map[string]struct {
		files []harness.File
		have  []string          // stores that have it
		own   map[string]string // parts of them that only they have
		same  map[string]string // files that are as they were
	}{
		"debian": {
			files: []harness.File{
				{Name: debian[1:], Body: store},
				{Name: "usr/lib/jvm/java-17/lib/security/cacerts", Type: tar.TypeSymlink, Link: debian},
				{Name: "usr/lib/jvm/java-8/jre/lib/security/cacerts", Body: store},
			},
			have: []string{debian, "/usr/lib/jvm/java-17/lib/security/cacerts", "/usr/lib/jvm/java-8/jre/lib/security/cacerts"},
		},
		"temurin": {files: []harness.File{{Name: temurin[1:], Body: store}}, have: []string{temurin}},
		"openjdk": {files: []harness.File{{Name: "usr/local/openjdk-11/lib/security/cacerts", Body: store}}, have: []string{"/usr/local/openjdk-11/lib/security/cacerts"}},
		"other":   {files: []harness.File{{Name: temurin[1:], Body: "OWN"}}, same: map[string]string{temurin: "OWN"}},
		"one of 2": {
			files: []harness.File{{Name: debian[1:], Body: "OWN"}, {Name: temurin[1:], Body: store}}, have: []string{temurin}, same: map[string]string{debian: "OWN"},
		},
		"two":   {files: []harness.File{{Name: debian[1:], Body: store}, {Name: temurin[1:], Body: other}}, have: []string{debian, temurin}, own: map[string]string{temurin: "OTHER"}},
		"large": {files: []harness.File{{Name: temurin[1:], Body: large}}, same: map[string]string{temurin: large}},
		"out":   {files: []harness.File{{Name: debian[1:], Type: tar.TypeSymlink, Link: "../../../../../../init"}}},
		"pipe":  {files: []harness.File{{Name: debian[1:], Type: tar.TypeFifo, Mode: 0o644}}},
		"dir":   {files: []harness.File{{Name: debian[1:] + "/", Type: tar.TypeDir, Mode: 0o755}, {Name: "opt", Type: tar.TypeSymlink, Link: "opt"}}},
	} {
		t.Run(name, func(t *testing.T) {
			files := []harness.File{{Name: runtime.TrustFile[1:]}}
			for _, d := range []string{"tmp/", "dev/", "proc/", "sys/"} {
				files = append(files, harness.File{Name: d, Type: tar.TypeDir, Mode: 0o755})
			}
			spec := networked(t, f, "java"+strings.ReplaceAll(name, " ", ""))
			spec.Rootfs.Layers = []string{layerOf(t, client, harness.Tar(t, append(files, tc.files...)...))}
			spec.Trust = authority
			sandbox, err := tryBegin(t, f, spec)
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range tc.have {
				if got := read(t, sandbox, at); !strings.Contains(got, "AUTHORITY") || len(got) < len(store) || got[:11] != store[:11] || got[11] != 1 {
					t.Errorf("%s is %q", at, got)
				}
			}
			for _, at := range tc.have {
				if got := read(t, sandbox, at); tc.own != nil && strings.Contains(got, "OTHER") != (tc.own[at] != "") {
					t.Errorf("%s has the entries of another store: %q", at, got)
				}
			}
			for at, want := range tc.same {
				if got := read(t, sandbox, at); got != want {
					t.Errorf("%s has %d bytes, want the image's %d", at, len(got), len(want))
				}
			}
			for _, c := range changesOf(t, client, spec) {
				if strings.Contains(c, "cacerts") || strings.Contains(c, "ca-certificates") {
					t.Errorf("a change of the sandbox is %q", c)
				}
			}
		})
	}
}

func changesOf(t *testing.T, client *launcher.Client, spec *runtime.Spec) (changes []string) {
	t.Helper()
	_, err := client.ListDiff(t.Context(), runtime.DiffRequest{ID: spec.ID, Rootfs: spec.Rootfs}, func(c api.Change) error {
		changes = append(changes, fmt.Sprintf("%s %s %s", c.Kind, c.Type, c.Path))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return changes
}

// layerOf unpacks a layer for a test, and returns its chain id.
func layerOf(t *testing.T, client *launcher.Client, stream []byte) string {
	t.Helper()
	blob, err := os.CreateTemp(t.TempDir(), "layer")
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	if _, err := blob.WriteAt(stream, 0); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(stream)
	name := "sha256:" + hex.EncodeToString(sum[:])
	_, err = client.Apply(t.Context(), layer.ApplyRequest{Layers: []layer.Request{{
		ChainID: name, DiffID: name, MediaType: "application/vnd.oci.image.layer.v1.tar", Blob: blob,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		if err := client.RemoveLayer(ctx, name); err != nil {
			t.Error(err)
		}
	})
	return name
}

// A warm sandbox gets the hostname of the request that claims it, in its hosts too; what it has
// changed itself is gone after its next start.
func TestHostsFollowTheHostname(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	requireNetworks(t, f)
	spec := networked(t, f, "warm1")
	spec.Hostname = "sandbox"
	client := begin(t, f, spec)
	if _, err := f.Engine.Update(t.Context(), "warm1", &runtime.Change{Hostname: "claimed"}); err != nil {
		t.Fatal(err)
	}
	const want = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n192.0.2.1\tclaimed\n2001:db8::1\tclaimed\n"
	if got := read(t, client, "/etc/hosts"); got != want {
		t.Errorf("hosts is %q, want %q", got, want)
	}
	file, err := client.Append(t.Context(), "/etc/hosts", 0o644, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.Write([]byte("1.2.3.4\tmore\n")); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if got := read(t, client, "/etc/hosts"); got != want+"1.2.3.4\tmore\n" {
		t.Errorf("after a change hosts is %q", got)
	}
	if err := f.Engine.Kill(t.Context(), "warm1"); err != nil {
		t.Fatal(err)
	}
	spec.Hostname = "claimed"
	socket, control := listen(t)
	st, err := f.Engine.Start(t.Context(), spec, control)
	if err != nil {
		t.Fatal(err)
	}
	_ = st.Pidfd.Close()
	if got := read(t, host.NewClient(socket), "/etc/hosts"); got != want {
		t.Errorf("started again hosts is %q, want %q", got, want)
	}
}

// The way in: a socket of the namespace reaches a server of the sandbox.
func TestServerOfASandboxIsReachedByASocket(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	client := begin(t, f, networked(t, f, "server"))
	put(t, client, harness.Helper(t, "neighbour"))
	x, err := client.Exec(t.Context(), host.ExecRequest{Argv: []string{inside, "serve", "0.0.0.0:80"}, NoStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	ready, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		once := sync.OnceFunc(func() { close(ready) })
		_, _ = x.Stream(t.Context(), func(string, []byte) error { once(); return nil })
	}()
	t.Cleanup(func() { _ = x.Close(); <-ended })
	select {
	case <-ready:
	case <-ended:
		t.Fatal("the server has ended")
	}
	s, err := n.NetworkSocket(t.Context(), "server", "tcp")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := netns.Connect(t.Context(), s, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "from inside" {
		t.Errorf("the server says %q, %v", got, err)
	}
}

// A program with every capability in its sandbox, and no filter, has no power over the namespace,
// which belongs to the launcher. The control is a sandbox with a namespace of its own.
func TestSandboxHasNoPowerOverItsNetwork(t *testing.T) {
	testenv.RequireUserNS(t)
	o := options(t)
	o.Launcher = harness.Helper(t, "mutant-launcher")
	f := fixture(t, o)
	requireNetworks(t, f)
	off := []string{attack.Filter, attack.Capabilities, attack.ReadOnly}
	program := harness.Helper(t, "neighbour")
	with, control := networked(t, f, "power"), f.NewSpec(t, "control")
	without(&with.Profile, off)
	without(&control.Profile, off)
	sandbox, free := begin(t, f, with), begin(t, f, control)
	// A sandbox that shares the network of either has no power over it, also where the owner can
	// change it.
	var guests []*host.Client
	for id, owner := range map[string]*runtime.Spec{"guestofpower": with, "guestofcontrol": control} {
		spec := sharing(t, f, id, owner)
		without(&spec.Profile, off)
		guests = append(guests, begin(t, f, spec))
	}
	for _, client := range append(guests, sandbox, free) {
		put(t, client, program)
	}
	for _, tc := range []struct{ do, want, control string }{
		{"raw-socket", "EPERM", "done"},
		{"packet", "EPERM", "done"},
		{"netfilter", "EPERM", "done"},
		{"mount-sys", "EPERM", "done"},
		{"forwarding", "EACCES", "done"},
		{"low-port", "EACCES", "done"},
		{"new-mtu", "EPERM", "done"},
		{"link-down", "EPERM", "done"},
	} {
		for _, client := range append(guests, sandbox) {
			if got, _ := says(t, client, tc.do); got != tc.want {
				t.Errorf("%s: %s, want %s", tc.do, got, tc.want)
			}
		}
		if got, _ := says(t, free, tc.do); got != tc.control {
			t.Errorf("control: %s: %s, want %s", tc.do, got, tc.control)
		}
	}
}

// sharing is the spec of a sandbox that shares the network of another one.
func sharing(t *testing.T, f runtimetest.Fixture, id string, owner *runtime.Spec) *runtime.Spec {
	t.Helper()
	spec := f.NewSpec(t, id)
	spec.Join, spec.Network = owner.ID, owner.Network
	return spec
}

// Sandboxes that share a network are in one namespace, and nothing else is shared. The launcher
// holds no descriptor for the one that joins, also where its start fails.
func TestSharedNetworkIsOneNamespace(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	d := describe(t, f)
	program := harness.Helper(t, "neighbour")
	// The one without a network comes first: namespaces are made ahead, and removed, for the other.
	for _, owner := range []*runtime.Spec{f.NewSpec(t, "alone"), networked(t, f, "connected")} {
		t.Run(owner.ID, func(t *testing.T) {
			first := begin(t, f, owner)
			held := descriptorsOf(t, d.PID, owner.Network)
			spec := sharing(t, f, owner.ID+"guest", owner)
			st, client := beginOnly(t, f, spec)
			put(t, first, program)
			put(t, client, program)
			if a, _ := says(t, first, "namespaces", "net"); a == "" || a != said(t, client, "namespaces", "net") {
				t.Errorf("they are in %s and %s", a, said(t, client, "namespaces", "net"))
			}
			const others = "user mnt pid ipc cgroup" // of UTS each program has another one
			theirs := strings.Fields(said(t, first, "namespaces", others))
			for ns := range strings.FieldsSeq(said(t, client, "namespaces", others)) {
				if slices.Contains(theirs, ns) {
					t.Errorf("they share %s", ns)
				}
			}
			if got := said(t, client, "interfaces"); got != "lo" {
				t.Errorf("sysfs shows the interfaces %q", got)
			}
			if got := said(t, client, "sys-read-only"); got != "true" {
				t.Errorf("sysfs is read-only: %s", got)
			}
			want := "ENETUNREACH"
			if owner.Network {
				gateway(t, n, owner.ID)
				want = "this is 93.184.216.34:80"
				if got, want := read(t, client, "/etc/hosts"), "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"+
					"192.0.2.1\tconnectedguest\n2001:db8::1\tconnectedguest\n192.0.2.1\tconnected\n2001:db8::1\tconnected\n"; got != want {
					t.Errorf("/etc/hosts is %q, want %q", got, want)
				}
				if got, want := read(t, client, "/etc/resolv.conf"), read(t, first, "/etc/resolv.conf"); got != want {
					t.Errorf("/etc/resolv.conf is %q, want %q", got, want)
				}
			} else if _, err := client.Open(t.Context(), "/etc/resolv.conf"); err == nil {
				t.Error("without a way out there is a resolver")
			}
			if got := said(t, client, "connect", "93.184.216.34:80"); got != want {
				t.Errorf("outside it hears %q, want %q", got, want)
			}
			if s, err := n.NetworkSockets(t.Context(), spec.ID); !errors.Is(err, runtime.ErrNoNetwork) {
				t.Errorf("its sockets: %+v, %v", s, err)
			}
			if got := len(namespacesHeld(t, d.PID)); got != held.namespaces {
				t.Errorf("with it the launcher holds %d descriptors of namespaces, before %d", got, held.namespaces)
			}
			if err := st.Pidfd.Close(); err != nil {
				t.Error(err)
			}
			end(t, f.Engine, spec.ID)

			// No start leaves a descriptor, nor does a failed one: of a guest that expects another network of
			// its owner, and of one with a broken image. Three of the owner's start are closed after its
			// answer, and may be among those held: eight rounds would leave more.
			for i := range 8 {
				id := owner.ID + strconv.Itoa(i)
				st, _ := beginOnly(t, f, sharing(t, f, id, owner))
				if err := st.Pidfd.Close(); err != nil {
					t.Error(err)
				}
				end(t, f.Engine, id)
				wrong := sharing(t, f, id+"wrong", owner)
				wrong.Network = !owner.Network
				if _, err := tryBegin(t, f, wrong); err == nil {
					t.Error("one starts whose owner has another network than it says")
				}
				broken := sharing(t, f, id+"broken", owner)
				broken.Rootfs.Layers = []string{"sha256:" + strings.Repeat("0", 64)}
				if _, err := tryBegin(t, f, broken); err == nil {
					t.Error("one starts without its layer")
				}
			}
			harness.Eventually(t, func() error {
				if now := descriptorsOf(t, d.PID, owner.Network); now.namespaces != held.namespaces || now.all > held.all {
					return fmt.Errorf("afterwards the launcher holds %+v, before %+v", now, held)
				}
				return nil
			})
		})
	}
}

// The namespace lasts as long as the sandbox that joined it, which keeps its loopback when its
// owner ends.
func TestSharedNetworkOutlivesItsOwner(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	owner := networked(t, f, "owner")
	_, _ = beginOnly(t, f, owner)
	client := begin(t, f, sharing(t, f, "guest", owner))
	put(t, client, harness.Helper(t, "neighbour"))
	before := said(t, client, "namespaces", "net")
	if err := f.Engine.Kill(t.Context(), "owner"); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{"127.0.0.1:80": "ECONNREFUSED", "93.184.216.34:80": "EHOSTUNREACH"} {
		if got := said(t, client, "connect", address); got != want {
			t.Errorf("after its owner's end %s says %q, want %q", address, got, want)
		}
	}
	if got := said(t, client, "namespaces", "net"); got != before {
		t.Errorf("it is in %s, and was in %s", got, before)
	}
	// Started again, the owner has another one, which a later guest gets.
	if _, _, err := run(t, f.Engine.Start, owner); err != nil {
		t.Fatal(err)
	}
	gateway(t, n, "owner")
	later := begin(t, f, sharing(t, f, "later", owner))
	put(t, later, harness.Helper(t, "neighbour"))
	if got := said(t, later, "connect", "93.184.216.34:80"); got != "this is 93.184.216.34:80" {
		t.Errorf("the later guest hears %q", got)
	}
	if got := said(t, later, "namespaces", "net"); got == before {
		t.Error("the later guest is in the old namespace")
	}
	if got := said(t, client, "connect", "93.184.216.34:80"); got != "EHOSTUNREACH" {
		t.Errorf("the earlier guest hears %q", got)
	}
	end(t, f.Engine, "owner")
}

// said is the output of a program.
func said(t *testing.T, client *host.Client, args ...string) string {
	t.Helper()
	out, _ := says(t, client, args...)
	return out
}

// beginOnly is begin of a sandbox that the test deletes.
func beginOnly(t *testing.T, f runtimetest.Fixture, spec *runtime.Spec) (*runtime.Started, *host.Client) {
	t.Helper()
	socket, control := listen(t)
	defer control.Close()
	st, err := f.Engine.Create(t.Context(), spec, control)
	if err != nil {
		t.Fatalf("start sandbox %s: %v", spec.ID, err)
	}
	t.Cleanup(func() { _ = st.Pidfd.Close() })
	return st, host.NewClient(socket)
}

// held counts descriptors of the launcher.
type held struct{ namespaces, all int }

// descriptorsOf counts when the launcher has made its namespaces ahead, if it makes any.
func descriptorsOf(t testing.TB, pid int, ahead bool) held {
	t.Helper()
	if ahead {
		filled(t, pid, 1)
	}
	entries, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
	if err != nil {
		t.Fatal(err)
	}
	return held{len(namespacesHeld(t, pid)), len(entries)}
}

// namespacesOf returns the network namespaces that a process holds open, sorted.
func namespacesOf(t testing.TB, pid int) []string {
	t.Helper()
	return slices.Compact(namespacesHeld(t, pid))
}

// namespacesHeld returns the network namespaces that a process has descriptors of, sorted; one for
// each descriptor.
func namespacesHeld(t testing.TB, pid int) (all []string) {
	t.Helper()
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.HasPrefix(to, "net:[") {
			all = append(all, to)
		}
	}
	slices.Sort(all)
	return all
}

// filled waits until the launcher has made its namespaces ahead, beside those of n sandboxes.
func filled(t testing.TB, pid, n int) []string {
	t.Helper()
	var all []string
	harness.Eventually(t, func() error {
		if all = namespacesOf(t, pid); len(all) != n+4 {
			return fmt.Errorf("the launcher holds %d namespaces, not %d", len(all), n+4)
		}
		return nil
	})
	return all
}

// A network lasts as long as its sandbox runs, over the daemon's death, and is another one after a
// new start.
func TestNetworkLivesAndEndsWithItsSandbox(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	d := describe(t, f)
	if held := namespacesOf(t, d.PID); len(held) != 0 {
		t.Errorf("before the first use the launcher holds %v", held)
	}
	spec := networked(t, f, "life")
	_, pid, err := run(t, f.Engine.Create, spec)
	if err != nil {
		t.Fatal(err)
	}
	defer end(t, f.Engine, "life")
	held := filled(t, d.PID, 1)
	its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(held, its) {
		t.Errorf("the launcher holds %v, and the sandbox is in %s", held, its)
	}
	kept, err := n.NetworkSockets(t.Context(), "life")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()

	if err := f.Engine.Kill(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	if left := namespacesOf(t, d.PID); slices.Contains(left, its) || len(left) != 4 {
		t.Errorf("after its end the launcher holds %v, %s among them", left, its)
	}
	if _, err := n.NetworkSockets(t.Context(), "life"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("sockets of one that has ended: %v", err)
	}
	if _, _, err := run(t, f.Engine.Start, spec); err != nil {
		t.Fatal(err)
	}
	again, err := n.NetworkSockets(t.Context(), "life")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if a, b := cookie(t, kept.Stream), cookie(t, again.Stream); a == b {
		t.Error("started again it has the sockets of before")
	}
}

// cookie is the kernel's number of a socket.
func cookie(t *testing.T, f *os.File) uint64 {
	t.Helper()
	n, err := unix.GetsockoptUint64(int(f.Fd()), unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The next daemon gets the sockets of the sandboxes that it adopts, and a killed launcher leaves
// neither sandbox nor maker.
func TestNetworkOutlivesTheDaemonAndNotTheLauncher(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t) // for specs; its client cannot be closed before the test's end
	requireNetworks(t, f)
	o := options(t)
	first, _, err := launcher.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	applyLayer(t, first)
	st, _, err := run(t, first.Create, networked(t, f, "adopted"))
	if err != nil {
		t.Fatal(err)
	}
	before, err := first.NetworkSockets(t.Context(), "adopted")
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	next, started, err := launcher.Connect(t.Context(), o)
	if err != nil || started {
		t.Fatalf("a second daemon has started a launcher: %t, %v", started, err)
	}
	after, err := next.NetworkSockets(t.Context(), "adopted")
	if err != nil {
		t.Fatal(err)
	}
	defer after.Close()
	if cookie(t, before.Stream) != cookie(t, after.Stream) || cookie(t, before.DNS) != cookie(t, after.DNS) {
		t.Error("the second daemon gets other sockets")
	}
	d, err := next.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(makerOf(t, d.PID), 0)
	if err != nil {
		t.Fatal(err)
	}
	maker := os.NewFile(uintptr(fd), "pidfd")
	defer maker.Close()
	ends := []unix.PollFd{{Fd: int32(maker.Fd()), Events: unix.POLLIN}, {Fd: int32(st.Pidfd.Fd()), Events: unix.POLLIN}}
	if err := unix.Kill(d.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i := range ends {
		if got, err := unix.Poll(ends[i:i+1], int(testenv.HungAfter/time.Millisecond)); err != nil || got != 1 {
			t.Errorf("process %d has not ended with the launcher: %v", i, err)
		}
	}
	if err := next.Delete(t.Context(), "adopted"); err != nil { // by another launcher
		t.Error(err)
	}
	if err := next.RemoveLayer(t.Context(), chain); err != nil {
		t.Error(err)
	}
	if err := next.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

// Each of many sandboxes that start at once has a namespace of its own.
func TestManyNetworksAtOnce(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	n := requireNetworks(t, f)
	const many = 50
	var work sync.WaitGroup
	ids := make([]string, many)
	errs := make([]error, many)
	for i := range many {
		ids[i] = fmt.Sprintf("many%d", i)
		spec := networked(t, f, ids[i])
		socket, control := listen(t)
		_ = socket
		work.Go(func() {
			defer control.Close()
			st, err := f.Engine.Create(context.WithoutCancel(t.Context()), spec, control)
			if err == nil {
				err = st.Pidfd.Close()
			}
			errs[i] = err
		})
	}
	work.Wait()
	seen := map[uint64]bool{}
	for i, id := range ids {
		if errs[i] != nil {
			t.Error(errs[i])
			continue
		}
		s, err := n.NetworkSockets(t.Context(), id)
		if err != nil {
			t.Error(err)
			continue
		}
		seen[cookie(t, s.Stream)] = true
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(seen) != many {
		t.Errorf("%d sandboxes have %d networks", many, len(seen))
	}
	end(t, f.Engine, ids...)
}

// A maker that was taken over reaches nothing but the namespaces that it makes.
func TestMakerIsConfined(t *testing.T) {
	testenv.RequireUserNS(t)
	works := func(order string) []string {
		o := options(t)
		o.Launcher, o.Version = harness.Helper(t, "makerfoe"), order
		f := fixture(t, o)
		d := describe(t, f)
		said := strings.Join(d.Enforced.Missing, "; ")
		_, after, found := strings.Cut(said, "attacked, works:")
		list, _, whole := strings.Cut(after, " end")
		if !found || !whole {
			t.Fatalf("%s: the maker says %q", order, said)
		}
		// A launcher with such a maker gives no sandbox a network.
		if _, err := tryBegin(t, f, networked(t, f, "refused")); !errors.Is(err, runtime.ErrUnenforceable) || !strings.Contains(fmt.Sprint(err), "attacked") {
			t.Errorf("a sandbox with a network: %v", err)
		}
		return strings.Fields(list)
	}
	control := works("control")
	t.Logf("control: %v", control)
	if len(control) < 25 {
		t.Errorf("before the confinement only these work: %v", control)
	}
	if got := works("confined"); len(got) != 0 {
		t.Errorf("confined: these work: %v", got)
	}
	// Files are refused without the filter, and by the root alone. That leaves the maker's own /proc,
	// which Landlock takes.
	for order, proc := range map[string]bool{"no-filter": false, "root-alone": true} {
		if order == "no-filter" {
			testenv.RequireLandlock(t, kernel.LandlockRefer)
		}
		open := works(order)
		t.Logf("%s: %v", order, open)
		for _, name := range []string{"open-init", "open-sandboxes", "open-passwd", "open-launcher", "write-sysctl", "socket-packet", "socket-raw", "chroot"} {
			if slices.Contains(open, name) {
				t.Errorf("%s: %s works", order, name)
			}
		}
		if slices.Contains(open, "read-proc") != proc {
			t.Errorf("%s: read-proc works: %t", order, !proc)
		}
	}
}
