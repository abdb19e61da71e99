package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// applyTimeout bounds the time in which the gateway takes a changed secret for all sandboxes.
const applyTimeout = 30 * time.Second

// secret returns a secret that the sandboxes of a tenant may have. Secrets of the file belong to
// the operator.
func (n *Networks) secret(tenant, name string) (secrets.Secret, error) {
	if s, ok := n.opts.Secrets[name]; ok && tenant == "" {
		return s, nil
	}
	s, err := n.opts.Store.Get(tenant, name)
	if errors.Is(err, secrets.ErrNotFound) {
		return secrets.Secret{}, class.Invalidf("network secret %q: there is none of this name (sandboxd secret set, or sandboxd serve --secrets)", class.Clip(name))
	}
	return s.Secret, err
}

// checkSecrets checks the secrets that a tenant asks for.
func (n *Networks) checkSecrets(tenant string, names []string, p *policy.Policy) error {
	if len(names) == 0 {
		return nil
	}
	if !p.Inspects() {
		return class.Invalidf("network secrets: no rule of the policy inspects requests, so none could get one; add inspect: true")
	}
	var all []secrets.Secret
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			return class.Invalidf("network secret %q: it is named twice", class.Clip(name))
		}
		s, err := n.secret(tenant, name)
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	if err := egress.CheckSecrets(all); err != nil {
		return class.Invalidf("network secrets: %w", err)
	}
	return nil
}

// SetSecret stores a secret of a tenant, in the place of one that has its name. Running sandboxes
// that have the secret get the new one.
func (n *Networks) SetSecret(ctx context.Context, tenant, name string, req api.SetSecret) (api.Secret, error) {
	if err := n.ownedByFile(tenant, name); err != nil {
		return api.Secret{}, err
	}
	s := secrets.Secret{
		Name: name, Variable: req.Variable, Kind: secrets.Kind(req.Kind), Field: cmp.Or(req.User, req.Header, req.AccessKeyID), Value: req.Value, Token: req.SessionToken,
		Binding: gateway.Binding{Name: name, Host: req.Host, Port: req.Port, Methods: req.Methods, Paths: req.Paths, Always: req.Always},
	}
	if err := checkFields(&req); err != nil {
		return api.Secret{}, err
	}
	if err := s.Check(); err != nil {
		return api.Secret{}, class.Invalidf("set secret %q: %w", class.Clip(name), err)
	}
	if err := n.fits(tenant, s); err != nil {
		return api.Secret{}, err
	}
	stored, err := n.opts.Store.Set(tenant, s)
	if err != nil {
		return api.Secret{}, err
	}
	return describe(&stored.Secret, stored.Created, stored.Changed), n.apply(ctx, tenant, name)
}

// checkFields reports a field of another kind.
func checkFields(req *api.SetSecret) error {
	for _, f := range []struct {
		name, value string
		kind        api.SecretKind
	}{
		{"user", req.User, api.SecretBasic},
		{"header", req.Header, api.SecretHeader},
		{"access_key_id", req.AccessKeyID, api.SecretAWS},
		{"session_token", req.SessionToken, api.SecretAWS},
	} {
		if f.value != "" && req.Kind != f.kind {
			return class.Invalidf("%s: it is for secrets of kind %q", f.name, f.kind)
		}
	}
	return nil
}

// ownedByFile refuses to change a secret of the operator's file.
func (n *Networks) ownedByFile(tenant, name string) error {
	if _, ok := n.opts.Secrets[name]; ok && tenant == "" {
		err := fmt.Errorf("secret %q is of the daemon's file (sandboxd serve --secrets), which alone changes it", name)
		if _, serr := n.opts.Store.Get(tenant, name); !errors.Is(serr, secrets.ErrNotFound) {
			err = fmt.Errorf("%w; the one that was set under this name is kept unused, and can be removed when the file has it no more", err)
		}
		return class.Mark(class.ErrSecretOfFile, err)
	}
	return nil
}

// Secrets describes the secrets of a tenant, in the order of their names.
func (n *Networks) Secrets(tenant string) ([]api.Secret, error) {
	all := []api.Secret{}
	if tenant == "" {
		for _, s := range n.opts.Secrets {
			d := describe(&s, time.Time{}, time.Time{})
			d.File = true
			all = append(all, d)
		}
	}
	kept, err := n.opts.Store.List(tenant)
	if err != nil {
		return nil, err
	}
	for i := range kept {
		switch s := &kept[i]; {
		case n.ownedByFile(tenant, s.Name) != nil: // the file's is used
		case s.Unreadable != nil:
			reason := s.Unreadable.Error()
			if tenant != "" { // it may have paths of the daemon's data
				n.opts.Log.Warn("a secret of a tenant cannot be read", "tenant", tenant, "name", s.Name, "error", s.Unreadable)
				reason = "it cannot be read; the daemon's log has the reason. Set it again, or remove it"
			}
			all = append(all, api.Secret{Name: s.Name, Error: reason})
		default:
			all = append(all, describe(&s.Secret, s.Created, s.Changed))
		}
	}
	slices.SortFunc(all, func(a, b api.Secret) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// describe leaves out values, and what some servers take in their place: users and ids of keys.
func describe(s *secrets.Secret, created, changed time.Time) api.Secret {
	d := api.Secret{
		Name: s.Name, Kind: api.SecretKind(s.Kind), Host: s.Binding.Host, Port: cmp.Or(s.Binding.Port, 443), Methods: s.Binding.Methods, Paths: s.Binding.Paths,
		Always: s.Binding.Always, Variable: s.Variable, CreatedAt: created, ChangedAt: changed,
	}
	if s.Kind == secrets.Header {
		d.Header = s.Field
	}
	return d
}

// RemoveSecret removes a secret of a tenant. Running sandboxes that have it are left with a
// placeholder that stands for nothing.
func (n *Networks) RemoveSecret(ctx context.Context, tenant, name string) error {
	if err := n.ownedByFile(tenant, name); err != nil {
		return err
	}
	err := n.opts.Store.Remove(tenant, name)
	// One that was removed without reaching every sandbox can be removed again.
	if err != nil && (!errors.Is(err, secrets.ErrNotFound) || !n.behind(tenant, name)) {
		return err
	}
	return n.apply(ctx, tenant, name)
}

// behind reports whether a running sandbox has not got the last change of a secret of a tenant.
func (n *Networks) behind(tenant, name string) bool {
	for _, l := range n.using(tenant, name) {
		if l.behind.Load() {
			return true
		}
	}
	return false
}

// using returns the running sandboxes that have a secret of a tenant.
func (n *Networks) using(tenant, name string) map[string]*life {
	n.mu.Lock()
	defer n.mu.Unlock()
	using := make(map[string]*life)
	for id, l := range n.lives {
		if !l.over && l.tenant == tenant && slices.Contains(l.secrets, name) {
			using[id] = l
		}
	}
	return using
}

// fits reports a changed secret that is too large beside the others of a running sandbox.
func (n *Networks) fits(tenant string, changed secrets.Secret) error {
	for id, l := range n.using(tenant, changed.Name) {
		all := []secrets.Secret{changed}
		for _, name := range l.secrets {
			if other, err := n.secret(tenant, name); err == nil && name != changed.Name {
				all = append(all, other)
			}
		}
		if err := egress.CheckSecrets(all); err != nil {
			return class.Invalidf("set secret %q: sandbox %s has it beside others: %w", changed.Name, id, err)
		}
	}
	return nil
}

// apply gives the gateway a changed secret for the sandboxes that have it. It goes on if the caller
// leaves.
func (n *Networks) apply(ctx context.Context, tenant, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	var errs []error
	for id, l := range n.using(tenant, name) {
		err := n.applyTo(ctx, id, l)
		l.behind.Store(err != nil)
		if err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s has the secret %q as it was; repeat the request, or stop the sandbox: %w", id, name, err))
		}
	}
	return errors.Join(errs...)
}

// applyTo reads the secrets again in the turn of the sandbox, so that the last change wins. A life
// that begins meanwhile reads them later than this change.
func (n *Networks) applyTo(ctx context.Context, id string, l *life) error {
	l.changing.Lock()
	defer l.changing.Unlock()
	n.mu.Lock()
	over, g := l.over, n.gateway
	n.mu.Unlock()
	if over || g == nil {
		return nil
	}
	_, placed, err := n.load(l.tenant, id)
	if err != nil {
		return err
	}
	err = g.SetSecrets(ctx, id, placed)
	if errors.Is(err, egress.ErrInvalid) {
		return class.Mark(class.ErrInvalid, err)
	}
	return err
}
