package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/netns/gateway/ca"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

// Inspection holds an authority and placeholders of secrets, for a sandbox whose policy reads
// requests within TLS. Other sandboxes have a nil Inspection.
type Inspection struct {
	authority    *ca.Authority
	placeholders map[string]string // by the secret's name
	variables    map[string]string // of the environment, with placeholders
}

// trusting are the variables that name a bundle of certificates, for programs that do not read
// [runtime.TrustFile] by themselves: OpenSSL and Go, curl, Python's requests and pip, Node.js and
// npm, Deno, git, cargo, the clients of AWS, and gRPC but for Go and Java.
var trusting = []string{
	"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "npm_config_cafile",
	"DENO_CERT", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
}

// Inspect returns the inspection of a new sandbox of a tenant; nil if its policy reads nothing
// within TLS. A sandbox that shares the network of another one trusts the authority of that one,
// and has no secrets.
func (n *Networks) Inspect(tenant string, net api.Network) (*Inspection, error) {
	if net.Mode == api.NetworkSandbox {
		authority, err := n.authority(net.Sandbox)
		if err != nil || authority == nil {
			return nil, err
		}
		return &Inspection{authority: authority}, nil
	}
	if !net.HasGateway() {
		return nil, nil
	}
	p, err := policy.Parse(document(net))
	if err != nil {
		return nil, fmt.Errorf("read the network policy: %w", err)
	}
	if !p.Inspects() {
		return nil, nil
	}
	i := &Inspection{placeholders: make(map[string]string), variables: make(map[string]string)}
	if i.authority, err = ca.New(time.Now(), 0); err != nil {
		return nil, err
	}
	for _, name := range net.Secrets {
		s, err := n.secret(tenant, name)
		if err != nil {
			return nil, err
		}
		s = s.Placed()
		i.placeholders[name] = s.Binding.Placeholder
		if s.Variable != "" {
			i.variables[s.Variable] = s.Binding.Placeholder
		}
	}
	return i, nil
}

// PlainEnv returns the environment of a sandbox without the variables that its inspection has put
// there: snapshots and forks have another authority and other placeholders, or none. A value of the
// user's that is the inspection's too is left out.
func (n *Networks) PlainEnv(rec *runtime.Record) ([]string, error) {
	s, err := n.readInspection(rec.ID)
	if err != nil {
		return nil, err
	}
	if s == nil {
		if rec.Network.Mode != api.NetworkSandbox { // which may have its owner's
			return rec.Env, nil
		}
		s = new(stored)
	}
	placeholders := slices.Collect(maps.Values(s.Placeholders))
	return slices.DeleteFunc(slices.Clone(rec.Env), func(e string) bool {
		name, value, _ := strings.Cut(e, "=")
		return value == runtime.TrustFile && slices.Contains(trusting, name) || slices.Contains(placeholders, value)
	}), nil
}

// Trust is for [runtime.Spec].
func (i *Inspection) Trust() []byte {
	if i == nil {
		return nil
	}
	return i.authority.Certificate()
}

// Env returns the variables that name the sandbox's bundle, over which its own take precedence, and
// those that hold placeholders of its secrets, which take precedence over all.
func (i *Inspection) Env() (bundle, secrets []string) {
	if i == nil {
		return nil, nil
	}
	for _, name := range trusting {
		bundle = append(bundle, name+"="+runtime.TrustFile)
	}
	for _, name := range slices.Sorted(maps.Keys(i.variables)) {
		secrets = append(secrets, name+"="+i.variables[name])
	}
	return bundle, secrets
}

// stored is an Inspection on disk, in ID.inspection.json. It has no secret but the authority's key.
type stored struct {
	Certificate  []byte            `json:"certificate"`
	Key          []byte            `json:"key"`
	Placeholders map[string]string `json:"placeholders,omitempty"`
}

func (n *Networks) inspectionFile(id string) string {
	return newFlowLog(n.opts.Dir, id).inspection()
}

// Store keeps the inspection of a sandbox, for daemons after this one.
func (n *Networks) Store(id string, i *Inspection) error {
	if i == nil {
		return nil
	}
	key, err := i.authority.Key()
	if err != nil {
		return fmt.Errorf("keep the authority of a sandbox: %w", err)
	}
	data, err := json.Marshal(stored{i.authority.Certificate(), key, i.placeholders})
	if err != nil {
		return fmt.Errorf("keep the authority of a sandbox: %w", err)
	}
	n.keeps(id)
	file := n.inspectionFile(id)
	if err := errors.Join(os.WriteFile(file+".new", data, 0o600), os.Rename(file+".new", file)); err != nil {
		return fmt.Errorf("keep the authority of a sandbox: %w", err)
	}
	return nil
}

// Inspects reports whether a sandbox has an inspection.
func (n *Networks) Inspects(id string) bool {
	_, err := os.Stat(n.inspectionFile(id))
	return err == nil
}

// Restore returns the certificate of the authority that a sandbox trusts, for another start; nil if
// there is none.
func (n *Networks) Restore(rec *runtime.Record) ([]byte, error) {
	id := rec.ID
	if rec.Network.Mode == api.NetworkSandbox {
		id = rec.Network.Sandbox
	}
	authority, err := n.authority(id)
	if err != nil || authority == nil {
		return nil, err
	}
	return authority.Certificate(), nil
}

// authority returns the authority that a sandbox trusts, nil if it has no inspection.
func (n *Networks) authority(id string) (*ca.Authority, error) {
	s, err := n.readInspection(id)
	if err != nil || s == nil {
		return nil, err
	}
	return ca.Load(s.Certificate, s.Key)
}

// readInspection returns nil for a sandbox without an inspection.
func (n *Networks) readInspection(id string) (*stored, error) {
	data, err := os.ReadFile(n.inspectionFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	s := new(stored)
	if err == nil {
		err = json.Unmarshal(data, s)
	}
	if err != nil {
		return nil, fmt.Errorf("read the authority of a sandbox: %w", err)
	}
	return s, nil
}

// load returns the authority of a sandbox and its secrets. A secret that its tenant has removed is
// left out: its placeholder then goes out as it is, and is worth nothing.
func (n *Networks) load(tenant, id string) (*ca.Authority, []secrets.Secret, error) {
	s, err := n.readInspection(id)
	if err != nil || s == nil {
		return nil, nil, err
	}
	authority, err := ca.Load(s.Certificate, s.Key)
	if err != nil {
		return nil, nil, err
	}
	var placed []secrets.Secret
	for _, name := range slices.Sorted(maps.Keys(s.Placeholders)) {
		secret, err := n.secret(tenant, name)
		if err != nil {
			n.opts.Log.Warn("a sandbox is without one of its secrets", "id", id, "secret", name, "error", err)
			continue
		}
		secret.Binding.Placeholder = s.Placeholders[name]
		// The secret was set to a larger value while the sandbox was stopped. It is left out: a sandbox
		// that could not start would be of no use.
		if err := egress.CheckSecrets(append(slices.Clone(placed), secret)); err != nil {
			n.opts.Log.Warn("a sandbox is without one of its secrets", "id", id, "secret", name, "error", err)
			continue
		}
		placed = append(placed, secret)
	}
	return authority, placed, nil
}
