package runtime

import (
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// A sandbox of the mode [api.NetworkSandbox] shares the network of its owner: from each start of
// its own until its end, it is in the namespace that the owner had at that start. If the owner ends
// meanwhile, the namespace stays for the sandbox, without a way out. If the owner is started again,
// the owner gets another namespace.

// join completes the spec of a sandbox of a tenant by the owner of its network, if it shares one.
// The owner may end after this check; the engine looks again.
func (s *Supervisor) join(spec *Spec, tenant string, n *api.Network) error {
	if n.Mode != api.NetworkSandbox {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.byID[n.Sandbox]
	switch {
	case owner == nil || owner.rec.Tenant != tenant || owner.phase == phaseDeleting:
		return fmt.Errorf("%w: its owner, sandbox %s, was deleted; a snapshot has the files of this one, for another with a network of its own",
			ErrNoOwner, n.Sandbox)
	case !owner.phase.live():
		return fmt.Errorf("%w: its owner, sandbox %s (%s), does not run; start that one first", ErrNoOwner, owner.rec.Name, owner.rec.ID)
	}
	spec.Join, spec.Network = owner.rec.ID, owner.rec.HasGateway()
	return nil
}

// isShared reports whether a sandbox that shares the network of this one runs. It needs mu.
func (s *Supervisor) isShared(owner *sandbox) bool {
	for _, sb := range s.byID {
		if sb.rec.Network.Mode == api.NetworkSandbox && sb.rec.Network.Sandbox == owner.rec.ID && (sb.phase == phaseCreating || sb.phase.live()) {
			return true
		}
	}
	return false
}

// Sharing returns the ids of the running sandboxes that share the network of another one.
func (s *Supervisor) Sharing(id string) (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sb := range s.byID {
		if sb.rec.Network.Mode == api.NetworkSandbox && sb.rec.Network.Sandbox == id && sb.phase.live() {
			ids = append(ids, sb.rec.ID)
		}
	}
	return ids
}
