package egress

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// Names are asked for as they are, without search domains. Where Landlock refuses the file that has
// taken the place of resolv.conf, nothing is asked and the process is replaced once.
func TestResolver(t *testing.T) {
	var asked, replaced []string
	refused := make(map[string]bool)
	r := newResolver(func(file string) { replaced = append(replaced, file) })
	r.readable = map[string]bool{"/etc/resolv.conf": true}
	r.open = func(name string) error {
		if refused[name] {
			return os.ErrPermission
		}
		return os.ErrNotExist
	}
	r.ask = func(_ context.Context, network, host string) ([]netip.Addr, error) {
		asked = append(asked, network+" "+host)
		return nil, nil
	}
	name, err := policy.ParseName("example.com")
	if err != nil {
		t.Fatal(err)
	}
	refused["/etc/hosts"] = true // which never was readable
	if _, err := r.lookup(t.Context(), "ip4", name); err != nil || len(asked) != 1 || asked[0] != "ip4 example.com." {
		t.Errorf("asked %q: %v", asked, err)
	}
	refused["/etc/resolv.conf"] = true
	for range 2 {
		if _, err := r.lookup(t.Context(), "ip4", name); !errors.Is(err, errReplaced) {
			t.Errorf("with another resolv.conf: %v", err)
		}
	}
	if len(asked) != 1 || len(replaced) != 1 || replaced[0] != "/etc/resolv.conf" {
		t.Errorf("asked %q, replaced %q", asked, replaced)
	}
}
