package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// The process gets the named networks that a sandbox joins later, and so does the next one.
func TestSetNetworks(t *testing.T) {
	ends := make(chan struct{})
	g, s := performFor(t, Config{Events: func(gateway.Event) {}}, func(p *player) {
		p.say(greeting)
		for range 2 {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
		}
		<-ends
	}, honest)
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	s.next()
	if err := g.SetNetworks(t.Context(), "b", nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("of no network: %v", err)
	}
	for _, names := range [][]string{strings.Split("a b c d e f g h i", " "), {""}, {strings.Repeat("a", maxLabel+1)}, {"a\n"}} {
		if err := g.SetNetworks(t.Context(), "a", names); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", names, err)
		}
	}
	if err := g.SetNetworks(t.Context(), "a", []string{"shop_default"}); err != nil {
		t.Fatal(err)
	}
	if r := s.next(); r.SetNetworks == nil || r.SetNetworks.ID != "a" || strings.Join(r.SetNetworks.Networks, " ") != "shop_default" {
		t.Errorf("the process got %+v", r)
	}
	close(ends)
	if r := s.next(); r.Add == nil || strings.Join(r.Add.Networks, " ") != "shop_default" {
		t.Errorf("the next process got %+v", r)
	}
}

// Peers are named to the process in bounded requests. Where a process ends meanwhile, the next one
// is asked, which has nothing to reset.
func TestResetPeers(t *testing.T) {
	g, s := performFor(t, Config{Events: func(gateway.Event) {}}, func(p *player) {
		p.say(greeting)
		for range 3 {
			r, err := p.hear()
			if err != nil {
				return
			}
			p.got <- r
			if r.ResetPeers == nil || len(r.ResetPeers.Peers) > 1 { // else it ends without an answer
				p.say(fmt.Sprintf(`{"answer":{"number":%d}}`, r.Number))
			}
		}
	}, honest)
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	s.next()
	if err := g.ResetPeers(t.Context(), "b", []netip.Addr{web.Addr}); !errors.Is(err, ErrNotFound) {
		t.Errorf("of no network: %v", err)
	}
	if err := g.ResetPeers(t.Context(), "a", []netip.Addr{netip.MustParseAddr("127.0.0.1")}); !errors.Is(err, ErrInvalid) {
		t.Errorf("of no peer: %v", err)
	}
	if err := g.ResetPeers(t.Context(), "a", nil); err != nil {
		t.Errorf("of none: %v", err)
	}
	if err := g.ResetPeers(t.Context(), "a", slices.Repeat([]netip.Addr{web.Addr}, maxReset+1)); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{maxReset, 1} {
		if r := s.next(); r.ResetPeers == nil || r.ResetPeers.ID != "a" || len(r.ResetPeers.Peers) != want {
			t.Errorf("request %d is %+v", i, r)
		}
	}
	if r := s.next(); r.Add == nil || r.Add.ID != "a" {
		t.Errorf("the next process got %+v", r)
	}
	if r := s.next(); r.ResetPeers == nil || len(r.ResetPeers.Peers) != 1 {
		t.Errorf("the next process got %+v", r)
	}
}
