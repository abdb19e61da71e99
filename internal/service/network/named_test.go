package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func unused() error { return nil }

func namesOf(all []Named) (names string) {
	for _, rec := range all {
		names += rec.Name + " "
	}
	return strings.TrimSpace(names)
}

// Records of networks are there in the next daemon, and go when they are removed. Those of another
// tenant are others.
func TestNamedNetworks(t *testing.T) {
	n := open(t, nil)
	for _, rec := range []Named{{Name: "Back"}, {Name: "back", Labels: map[string]string{"a": "1"}, Internal: true}, {Tenant: "1002", Name: "back"}, {Tenant: "1002", Name: "a"}} {
		if got, err := n.CreateNamed(rec, unused); err != nil || got.CreatedAt.IsZero() {
			t.Fatalf("%+v, %v", got, err)
		}
		if _, err := n.CreateNamed(rec, unused); !errors.Is(err, class.ErrNamedExists) {
			t.Errorf("twice: %v", err)
		}
	}
	if _, err := n.RemoveNamed("1002", "Back", unused); !errors.Is(err, class.ErrNoNamed) {
		t.Errorf("another tenant's: %v", err)
	}
	inUse := errors.New("in use")
	if _, err := n.RemoveNamed("1002", "a", func() error { return inUse }); !errors.Is(err, inUse) {
		t.Errorf("in use: %v", err)
	}
	if _, err := n.CreateNamed(Named{Name: "late", Internal: true}, func() error { return inUse }); !errors.Is(err, inUse) {
		t.Errorf("internal, and in use: %v", err)
	}
	if _, err := n.CreateNamed(Named{Name: "late"}, func() error { return inUse }); err != nil {
		t.Errorf("in use: %v", err)
	}
	if got, err := n.RemoveNamed("1002", "back", unused); err != nil || got.Name != "back" || got.Tenant != "1002" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(n.opts.NamedDir, "new-1"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := openNamed(n.opts.NamedDir)
	if err != nil {
		t.Fatal(err)
	}
	next := &Networks{named: again}
	for _, of := range []*Networks{n, next} {
		own := of.Named("")
		if got := namesOf(own) + "; " + namesOf(of.Named("1002")); got != "Back back late; a" || own[1].Labels["a"] != "1" || !own[1].Internal {
			t.Errorf("%s: %+v", got, own)
		}
	}
	files, err := os.ReadDir(n.opts.NamedDir)
	if err != nil || len(files) != 4 {
		t.Errorf("%v, %v", files, err)
	}
	if err := os.Rename(filepath.Join(n.opts.NamedDir, files[0].Name()), filepath.Join(n.opts.NamedDir, "0.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := openNamed(n.opts.NamedDir); err == nil || !strings.Contains(err.Error(), "not the file of network") {
		t.Errorf("a record of another name: %v", err)
	}
}

func TestNamedNetworksAreBounded(t *testing.T) {
	n := open(t, nil)
	for i := range maxNamed {
		n.named.all[namedKey{"", fmt.Sprint("n", i)}] = Named{}
	}
	if _, err := n.CreateNamed(Named{Name: "more"}, unused); !errors.Is(err, class.ErrManyNamed) {
		t.Errorf("beyond the bound: %v", err)
	}
	if _, err := n.CreateNamed(Named{Tenant: "1002", Name: "more"}, unused); err != nil {
		t.Errorf("another tenant: %v", err)
	}
}

// Nothing leads out of networks that are all internal. One that is not, or has no record, is
// enough.
func TestInternalNetworks(t *testing.T) {
	n := open(t, nil)
	for _, rec := range []Named{{Name: "in", Internal: true}, {Name: "in2", Internal: true}, {Name: "out"}, {Tenant: "1002", Name: "in"}} {
		if _, err := n.CreateNamed(rec, unused); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		tenant string
		join   []string
		out    bool
	}{
		{"", nil, true},
		{"", []string{"in"}, false},
		{"", []string{"in", "in2"}, false},
		{"", []string{"in", "out"}, true},
		{"", []string{"unmade", "in"}, true},
		{"1002", []string{"in"}, true},
	} {
		got := n.outside(tc.tenant, api.Network{Mode: api.NetworkEgress, Policy: onePublic, Join: tc.join})
		if (got.Mode == api.NetworkEgress && got.Policy == onePublic) != tc.out || (got.Mode == api.NetworkNone && got.Policy == "") == tc.out {
			t.Errorf("%q in %q: %+v", tc.tenant, tc.join, got)
		}
	}
}

func TestCheckAliases(t *testing.T) {
	many := strings.Split(strings.Repeat("a ", maxAliases), " ")
	for name, tt := range map[string]struct {
		aliases map[string][]string
		err     string
	}{
		"none":            {nil, ""},
		"some":            {map[string][]string{"back": {"db", "My_DB", "x-1"}}, ""},
		"another network": {map[string][]string{"front": {"db"}}, "not in network"},
		"a dot":           {map[string][]string{"back": {"db.example.com"}}, "an alias has"},
		"digits":          {map[string][]string{"back": {"127"}}, "an alias has"},
		"empty":           {map[string][]string{"back": {""}}, "an alias has"},
		"too many":        {map[string][]string{"back": many}, "at most 16"},
	} {
		_, err := open(t, nil).Check("", api.Network{Join: []string{"back"}, Aliases: tt.aliases})
		if tt.err == "" && err != nil || tt.err != "" && (!errors.Is(err, class.ErrInvalid) || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
	}
	if _, err := open(t, nil).Check("", api.Network{Mode: api.NetworkSandbox, Sandbox: "x", Aliases: map[string][]string{"back": {"db"}}}); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("aliases in a shared network: %v", err)
	}
}
