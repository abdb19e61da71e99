package registry

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// The first address that answers is the one; one that does not answer keeps the next for a moment
// only, and nothing is left open.
func TestDialFirst(t *testing.T) { synctest.Test(t, testDialFirst) }

func testDialFirst(t *testing.T) {
	silent, dead, alive := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	refused := errors.New("refused")
	dial := func(ctx context.Context, ip netip.Addr) (net.Conn, error) {
		switch ip {
		case alive:
			here, there := net.Pipe()
			_ = there.Close()
			return here, nil
		case dead:
			return nil, refused
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for _, addresses := range [][]netip.Addr{{alive}, {alive, silent}, {dead, alive}, {silent, dead, alive}, {dead, dead, silent, alive}} {
		conn, err := dialFirst(t.Context(), addresses, dial)
		if err != nil {
			t.Errorf("%v: %v", addresses, err)
			continue
		}
		_ = conn.Close()
	}
	for _, addresses := range [][]netip.Addr{nil, {}} {
		if _, err := dialFirst(t.Context(), addresses, dial); !errors.Is(err, errNoAddress) {
			t.Errorf("%v: %v", addresses, err)
		}
	}
	if _, err := dialFirst(t.Context(), []netip.Addr{dead, dead}, dial); !errors.Is(err, refused) {
		t.Errorf("refused by all: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := dialFirst(ctx, []netip.Addr{silent}, dial); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

// Addresses from an external lookup are checked too.
func TestLookedUpAddressesAreChecked(t *testing.T) {
	tr := newTransport("registry.example", nowhere, nil)
	defer tr.close()
	asked := ""
	tr.lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
		asked = host
		return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::ffff:127.0.0.1")}, nil
	}
	if _, err := tr.dial(t.Context(), "tcp", "storage.example:443"); !errors.Is(err, errThisMachine) {
		t.Errorf("a name of this machine's address: %v", err)
	}
	if asked != "storage.example" {
		t.Errorf("asked for %q", asked)
	}
	gone := errors.New("no such host")
	tr.lookup = func(context.Context, string) ([]netip.Addr, error) { return nil, gone }
	if _, err := tr.dial(t.Context(), "tcp", "storage.example:443"); !errors.Is(err, gone) {
		t.Errorf("no such host: %v", err)
	}
}
