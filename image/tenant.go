package image

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/registry"
	"github.com/sandboxd/sandboxd/image/store"
)

// For returns the images as tenant sees them. A tenant has its own names, snapshots and build
// steps, and finds no others by name, digest or id. The empty tenant is the daemon's own, and
// [Open] returns its view. All tenants have the image "host".
//
// Blobs and layers are kept once for all tenants. A tenant gets those of another only after its
// registry or archive has sent their whole content: a digest alone proves nothing. The limits of
// [Options] are common to all tenants; [Service.Enforce], [Service.EnforceSnapshots] and
// [Service.CollectSnapshotLayers] work on the objects of all of them.
func (s *Service) For(tenant string) *Service { return &Service{state: s.state, tenant: tenant} }

// registries returns the client for the tenant's pulls and pushes. Credentials of the daemon's user
// serve the daemon's own tenant alone: no other one reads or writes what they open.
func (s *Service) registries() *registry.Client {
	if s.tenant == "" {
		return s.registry
	}
	c := *s.registry
	c.Keychain = nil
	return &c
}

// registriesAs is registries for a caller that may have credentials of its own.
func (s *Service) registriesAs(auth *api.RegistryAuth, address string) *registry.Client {
	if auth == nil {
		return s.registries()
	}
	c := *s.registry
	c.Keychain = callersKeychain{auth, address}
	return &c
}

// callersKeychain has the credentials of one request, for one registry and not for its mirrors.
type callersKeychain struct {
	auth     *api.RegistryAuth
	registry string
}

// Resolve implements authn.Keychain.
func (k callersKeychain) Resolve(at authn.Resource) (authn.Authenticator, error) {
	if at.RegistryStr() != k.registry {
		return authn.Anonymous, nil
	}
	return authn.FromConfig(authn.AuthConfig{Username: k.auth.Username, Password: k.auth.Password, IdentityToken: k.auth.IdentityToken}), nil
}

// Tenants returns the tenants that have images, build steps or snapshots, sorted.
func (s *Service) Tenants() ([]string, error) {
	records, err1 := s.store.List()
	steps, err2 := s.store.Steps()
	snapshots, err3 := s.store.Snapshots()
	seen := make(map[string]bool)
	for _, r := range records {
		seen[r.Tenant] = true
	}
	for _, step := range steps {
		seen[step.Tenant] = true
	}
	for _, snap := range snapshots {
		seen[snap.Tenant] = true
	}
	return slices.Sorted(maps.Keys(seen)), errors.Join(err1, err2, err3)
}

// Holder returns the name of a tenant's sandbox for [Service.SetHolders].
func Holder(tenant, name string) string { return store.Key(tenant, name) }

// splitKey undoes [store.Key].
func splitKey(key string) (tenant, name string) {
	if i := strings.LastIndexByte(key, 0); i >= 0 {
		return key[:i], key[i+1:]
	}
	return "", key
}

// ownHolders returns those of the holders that are the tenant's, by their plain names.
func (s *Service) ownHolders(holders []string) []string {
	var out []string
	for _, h := range holders {
		if tenant, name := splitKey(h); tenant == s.tenant {
			out = append(out, name)
		}
	}
	return out
}

// records returns the tenant's images, sorted by name.
func (s *Service) records() ([]*store.Record, error) {
	all, err := s.store.List()
	return s.ownRecords(all), err
}

func (s *Service) ownRecords(all []*store.Record) []*store.Record {
	return slices.DeleteFunc(slices.Clone(all), func(r *store.Record) bool { return r.Tenant != s.tenant })
}

// snapshots returns the tenant's snapshots, oldest first.
func (s *Service) snapshots() ([]*Snapshot, error) {
	all, err := s.store.Snapshots()
	return slices.DeleteFunc(all, func(snap *Snapshot) bool { return snap.Tenant != s.tenant }), err
}

// prove records that the tenant has presented the content of a blob, by blobKey, until forget is
// called. Without a record of the tenant that has the content, the tenant is not entitled to it
// after that.
func (s *Service) prove(key string) (forget func()) {
	key = store.Key(s.tenant, key)
	s.mu.Lock()
	s.proven[key]++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.proven[key]--; s.proven[key] == 0 {
			delete(s.proven, key)
		}
	}
}

// entitled reports whether the tenant may use a stored blob or layer, by blobKey or treeKey: one of
// its images or build steps has it, or a request of the tenant under way has presented it.
func (s *Service) entitled(key string) (bool, error) {
	s.mu.Lock()
	proven := s.proven[store.Key(s.tenant, key)] > 0
	s.mu.Unlock()
	if proven {
		return true, nil
	}
	owned, err := s.ownedContent()
	return owned[store.Key(s.tenant, key)], err
}

// ownedContent returns the blobs and layers of the images and build steps of all tenants, as
// [store.Key] of blobKey or treeKey. It reads the records again only after a change, because a pull
// asks for each layer.
func (s *Service) ownedContent() (map[string]bool, error) {
	s.ownedMu.Lock()
	defer s.ownedMu.Unlock()
	revision, err := s.store.Revision() // before the records: these may only be newer
	if err != nil || s.owned != nil && revision == s.ownedAt {
		return s.owned, err
	}
	records, err1 := s.store.List()
	steps, err2 := s.store.Steps()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	owned := make(map[string]bool)
	for _, r := range records {
		for _, b := range r.Blobs() {
			owned[store.Key(r.Tenant, blobKey(b.Digest))] = true
		}
		for _, l := range r.Layers {
			owned[store.Key(r.Tenant, treeKey(l.ChainID))] = true
		}
	}
	for _, step := range steps {
		if l := step.Layer; l != nil {
			owned[store.Key(step.Tenant, blobKey(l.Blob.Digest))] = true
			owned[store.Key(step.Tenant, treeKey(l.ChainID))] = true
		}
	}
	s.owned, s.ownedAt = owned, revision
	return owned, nil
}

// checkExisting checks that the blob of a layer unpacks to the diff id of the tree that was there
// before, unless the tenant has that tree already. Otherwise an image could name the diff ids of
// another tenant's layers over blobs of its own, and get their trees.
func (s *Service) checkExisting(ctx context.Context, l store.Layer, limits layer.Limits) error {
	if ok, err := s.entitled(treeKey(l.ChainID)); ok || err != nil {
		return err
	}
	f, err := s.store.OpenBlob(l.Blob.Digest)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	plain, err := layer.Uncompress(store.WithContext(ctx, f), l.Blob.MediaType, limits)
	if err != nil {
		return err
	}
	defer plain.Close()
	got, err := plain.DiffID()
	if err != nil {
		return err
	}
	if got != l.DiffID {
		return errdefs.Classf(layer.ErrInvalid, "content is %s, the image's configuration promises %s", got, l.DiffID)
	}
	return nil
}
