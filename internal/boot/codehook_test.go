package boot

import (
	"strings"
	"testing"
)

func TestCodeHookAddresses(t *testing.T) {
	for _, c := range []struct {
		address string
		tenants bool
		want    string // part of the mistake; empty: there is none
	}{
		{"", true, ""},
		{"unix:/run/judge.sock", true, ""},
		{"http://127.0.0.1:80/x", false, ""},
		{"http://[::1]:80", false, ""},
		{"http://127.0.0.1:80", true, "a tenant could listen"},
		{"unix:judge.sock", false, "absolute path"},
		{"unix:/" + strings.Repeat("x", maxSocketPath), false, "absolute path"},
		{"http://127.0.0.1", false, "with a port"},
		{"http://localhost:80", false, "of the loopback"},
		{"http://192.0.2.1:80", false, "of the loopback"},
		{"https://127.0.0.1:80", false, "want unix:PATH"},
		{"/usr/bin/judge", false, "want unix:PATH"},
	} {
		err := CheckCodeHook(c.address, c.tenants)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q, tenants %v: %v, want %q", c.address, c.tenants, err, c.want)
		}
	}
	// Policies of networks name services, and must not reach the hook's socket.
	o := Options{CodeHook: "unix:/run/judge.sock", Services: map[string]string{"models": "/run/models.sock"}}
	if all := o.brokered(); all[hookSocket] != "/run/judge.sock" || len(all) != 2 || len(o.Services) != 1 {
		t.Errorf("sockets of the broker: %v, of policies: %v", all, o.Services)
	}
}
