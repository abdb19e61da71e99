package gateway

import (
	"io"
	"net/http"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const withServices = `
version: 1
rules:
- {name: models, allow: host.sandboxd.internal, ports: 11434}
services:
- {name: packages, port: 8080, to: "127.0.0.7:3141"}
- {name: local, port: 9000, to: "unix:/run/local.sock"}
`

func TestServicesOfTheHost(t *testing.T) {
	w := newWorld(t, withServices)
	// The host's resolver would lead astray.
	w.host("host.sandboxd.internal", "10.0.0.1")
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeA); code != dnsmessage.RCodeSuccess || !cmp.Equal(addrs, []netip.Addr{policy.HostAddress}, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("%v, %v", code, addrs)
	}
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeAAAA); code != dnsmessage.RCodeSuccess || len(addrs) != 0 {
		t.Errorf("%v, %v", code, addrs)
	}
	for port, at := range map[string]string{"11434": "127.0.0.1:11434", "8080": "127.0.0.7:3141"} {
		w.http(at, func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, r.Host) })
		if _, body := fetch(t, w.client(), "GET", "http://host.sandboxd.internal:"+port+"/", http.NoBody); body != "host.sandboxd.internal:"+port {
			t.Errorf("port %s: %q", port, body)
		}
	}
	if asked := w.asked; len(asked) != 0 {
		t.Errorf("the host's resolver was asked %v", asked)
	}
	dialled := len(w.dialled)
	for _, port := range []string{"22", "3141", "9000"} {
		if read, reset := w.reset(policy.HostAddress.String() + ":" + port); len(read) > 0 || !reset {
			t.Errorf("port %s: %q, reset %t", port, read, reset)
		}
	}
	for _, at := range []string{"127.0.0.1:11434", "127.0.0.7:3141", "10.0.0.1:11434"} {
		if _, reset := w.reset(at); !reset {
			t.Errorf("%s is reached by its address", at)
		}
	}
	if len(w.dialled) != dialled {
		t.Errorf("refused, and dialled: %v", w.dialled[dialled:])
	}
}

func TestNoServicesWithoutARule(t *testing.T) {
	w := newWorld(t, "version: 1\nrules:\n- {allow: \"*\", ports: any}\n- {allow: [0.0.0.0/0, 192.0.2.0/24], ports: any}\n")
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeA); code != dnsmessage.RCodeNameError || len(addrs) != 0 {
		t.Errorf("%v, %v", code, addrs)
	}
	if _, reset := w.reset(policy.HostAddress.String() + ":11434"); !reset || len(w.dialled) != 0 {
		t.Errorf("reset %t, dialled %v", reset, w.dialled)
	}
}

// A record names the host where rules allow its address: a policy is learnt from it.
func TestAllowedAddressesAreRecordedByName(t *testing.T) {
	w := newWorld(t, "version: 1\npresets: [public]\n")
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "hello") })
	if _, body := fetch(t, w.client(), "GET", "http://web.test/", http.NoBody); body != "hello" {
		t.Fatalf("%q", body)
	}
	var named bool
	for _, e := range w.all() {
		named = named || e.Kind == Connection && e.Name == "web.test" && e.Allow
	}
	if !named {
		t.Error("the connection has no name")
	}
}
