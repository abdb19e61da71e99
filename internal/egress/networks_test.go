package egress

import (
	"errors"
	"fmt"
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
