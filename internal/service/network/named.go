package network

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/publicsuffix"

	"github.com/sandboxd/sandboxd/internal/records"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	// maxNamed is the number of networks of one tenant that have a record.
	maxNamed = 256
	// maxName is the length of a network's name, which is a label in DNS where it can be one.
	maxName = 63
)

// Named is the record of a network that was made by itself. Without one, a network exists while a
// sandbox names it.
type Named struct {
	Tenant    string            `json:"tenant,omitempty"`
	Name      string            `json:"name"` // unique within the tenant
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at"`
	// Internal networks are no way out: see [Networks.outside].
	Internal bool `json:"internal,omitempty"`
}

type namedKey struct{ tenant, name string }

// namedStore holds the records, which are files in dir.
type namedStore struct {
	dir string

	mu  sync.Mutex // guards all, and serializes changes
	all map[namedKey]Named
}

func openNamed(dir string) (*namedStore, error) {
	s := &namedStore{dir: dir, all: make(map[namedKey]Named)}
	err := records.Read(dir, func(file string, rec Named) error {
		k := namedKey{rec.Tenant, rec.Name}
		if k.file() != file {
			return fmt.Errorf("it is not the file of network %q", rec.Name)
		}
		s.all[k] = rec
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open networks: %w", err)
	}
	return s, nil
}

// file is the name of a record's file. Names of tenants and networks may differ in case only, and
// be long.
func (k namedKey) file() string {
	sum := sha256.Sum256([]byte(k.tenant + "\x00" + k.name))
	return hex.EncodeToString(sum[:16])
}

// CreateNamed makes a network of a tenant. InUse returns an error if a sandbox names an internal
// network already: it is called when sandboxes that start see the record.
func (n *Networks) CreateNamed(rec Named, inUse func() error) (Named, error) {
	s := n.named
	k := namedKey{rec.Tenant, rec.Name}
	if err := CheckName(rec.Name); err != nil {
		return rec, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.all[k]; ok {
		return rec, fmt.Errorf("network %s: %w", rec.Name, class.ErrNamedExists)
	}
	number := 0
	for other := range s.all {
		if other.tenant == rec.Tenant {
			number++
		}
	}
	if number >= maxNamed {
		return rec, fmt.Errorf("network %s: there are %d, which is the most: %w", rec.Name, number, class.ErrManyNamed)
	}
	rec.CreatedAt, rec.Labels = time.Now().UTC(), maps.Clone(rec.Labels)
	s.all[k] = rec
	var err error
	if rec.Internal {
		s.mu.Unlock()
		err = inUse()
		s.mu.Lock()
	}
	if err == nil {
		err = records.Write(s.dir, k.file(), &rec)
	}
	if err != nil {
		delete(s.all, k)
		return rec, fmt.Errorf("create network %s: %w", rec.Name, err)
	}
	return rec, nil
}

// RemoveNamed removes a network of a tenant, unless inUse returns an error.
func (n *Networks) RemoveNamed(tenant, name string, inUse func() error) (Named, error) {
	s := n.named
	k := namedKey{tenant, name}
	if err := inUse(); err != nil {
		return Named{}, fmt.Errorf("remove network %s: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, ok := s.all[k]
	if !ok {
		return Named{}, fmt.Errorf("network %s: %w", name, class.ErrNoNamed)
	}
	if err := os.Remove(records.Path(s.dir, k.file())); err != nil && !errors.Is(err, os.ErrNotExist) {
		return Named{}, fmt.Errorf("remove network %s: %w", name, err)
	}
	delete(s.all, k)
	return rec, nil
}

// Named returns the networks of a tenant that have a record, by name.
func (n *Networks) Named(tenant string) []Named {
	s := n.named
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Named
	for k, rec := range s.all {
		if k.tenant == tenant {
			rec.Labels = maps.Clone(rec.Labels)
			all = append(all, rec)
		}
	}
	slices.SortFunc(all, func(a, b Named) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// internal reports whether all networks are internal, and there are some.
func (s *namedStore) internal(tenant string, names []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(names) > 0 && !slices.ContainsFunc(names, func(name string) bool { return !s.all[namedKey{tenant, name}].Internal })
}

// CheckName checks the name of a named network.
func CheckName(name string) error {
	ok := name != "" && len(name) <= maxName
	for i, r := range name {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		ok = ok && (alnum || i > 0 && strings.ContainsRune("_.-", r))
	}
	if !ok {
		return class.Invalidf("network %q: a network's name has up to %d letters, digits and \"_.-\", a letter or digit first", class.Clip(name), maxName)
	}
	return nil
}

// qualifies reports whether sandboxes are found as NAME.NETWORK in a network: its name is a label
// of host names that means nothing else there. One with dots could be the domain of anyone.
func qualifies(network string) bool {
	label, err := policy.ParsePeerName(network)
	return err == nil && label.String() == network && !strings.Contains(network, ".") && network != "internal" && network != "localhost" && !hidesTheInternet(network)
}

// hidesTheInternet reports whether a label is a top-level domain that sandboxes surely use: of a
// country, or an early one. Names of the form NAME.NETWORK are answered before those of the policy.
// Newer domains, such as app and dev, are what people call networks.
func hidesTheInternet(label string) bool {
	switch label {
	case "com", "net", "org", "edu", "gov", "mil", "int", "arpa", "info", "biz":
		return true
	}
	_, listed := publicsuffix.PublicSuffix("example." + label)
	return listed && (len(label) == 2 || strings.HasPrefix(label, "xn--"))
}
