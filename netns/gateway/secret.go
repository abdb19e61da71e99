package gateway

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	minSecret      = 8 // shorter ones occur in other words, which would be taken for them in responses
	maxSecret      = 16 << 10
	minPlaceholder = 16
	maxPlaceholder = 128
)

// Binding says which requests get a secret.
type Binding struct {
	// Name is the name of the secret in events and refusals.
	Name string
	// Host is the one host that gets the secret, and Port the one port; zero stands for 443.
	Host string
	Port uint16
	// Methods and Paths are as in rules of a policy. Empty stands for all.
	Methods, Paths []string
	// Placeholder is the word that the sandbox has in the place of the secret: 16 to 128 letters,
	// digits, hyphens and underscores. It is no secret itself.
	Placeholder string
	// Always puts the secret also into requests that lack the field. Placeholder may be empty then.
	Always bool
}

// A Secret is a credential that the gateway puts into requests, so that the sandbox does not have
// it. Printed or marshalled it shows no value. The zero Secret goes into no request.
//
// It is put into a request that comes within TLS on a connection whose requests are read, when its
// policy allows the request, the certificate of the server is valid for the host, and method and
// path are those of the binding. Requests that have the placeholder in any other place of their
// head are refused. Bodies are not searched: a placeholder there reaches the server as it is.
//
// No secret goes into a TRACE request, which is answered with its own head. A response that repeats
// the secret, as it is or in base64, has its name in its place in fields and trailers. It is not
// removed from bodies, which may be compressed or cut anywhere: do not bind a secret to a path that
// answers with it.
type Secret struct{ b *bound }

// A bound secret has its values in functions only, which neither fmt nor reflection looks into.
type bound struct {
	binding    Binding
	requests   *policy.Policy
	host       policy.Name
	credential Credential
}

// A Credential is the kind of a secret: [Bearer], [Basic], [Field] or [AWS].
type Credential struct {
	field string // in lower case
	// replace returns the value of the field with the secret in it, and false if the placeholder does
	// not stand where the secret belongs.
	replace func(value, placeholder string) (string, bool)
	// whole returns the value of a field that the client did not send; nil if that cannot be made.
	whole func() string
	// sign returns fields that a signature changes; none if the placeholder does not stand where the
	// secret belongs.
	sign func(q *sniff.Request, placeholder string) ([]sniff.Field, error)
	// values returns the texts that responses must not show.
	values func() []string
	err    error
}

// Bearer is a token in "Authorization: Bearer", or "token", as GitHub's clients write it.
func Bearer(token string) Credential {
	return Credential{
		field: "authorization", err: checkSecret(token, "a token"),
		replace: func(value, placeholder string) (string, bool) {
			scheme, rest, _ := strings.Cut(value, " ")
			ok := rest == placeholder && (strings.EqualFold(scheme, "bearer") || strings.EqualFold(scheme, "token"))
			return scheme + " " + token, ok
		},
		whole:  func() string { return "Bearer " + token },
		values: func() []string { return []string{token} },
	}
}

// Basic is a password in "Authorization: Basic", as git, pip and curl send it for a URL with a
// user. The placeholder stands for the password, or for the user where a token is given as one. The
// user may be empty; then the client's is kept.
func Basic(user, password string) Credential {
	err := checkSecret(password, "a password")
	if strings.ContainsFunc(user, func(r rune) bool { return r <= ' ' || r == ':' || r >= 0x7f }) {
		err = errors.New("the user is no word of ASCII without a colon")
	}
	encode := func(user, password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	}
	return Credential{
		field: "authorization", err: err,
		replace: func(value, placeholder string) (string, bool) {
			sentUser, sentPassword, ok := decodeBasic(value)
			switch {
			case !ok:
				return "", false
			case sentPassword == placeholder && user != "":
				return encode(user, password), true
			case sentPassword == placeholder:
				return encode(sentUser, password), true
			case sentUser == placeholder:
				return encode(password, sentPassword), true
			}
			return "", false
		},
		whole:  func() string { return encode(user, password) },
		values: func() []string { return append(encodedForms(password), password) },
	}
}

// encodedForms returns what base64 makes of a value within a longer text: the digits that depend on
// the value alone, for each of the three places where it may begin.
func encodedForms(value string) (forms []string) {
	for before, first := range []int{0, 2, 3} {
		digits := base64.RawStdEncoding.EncodeToString(append(make([]byte, before), value...))
		forms = append(forms, digits[first:(before+len(value))*8/6])
	}
	return forms
}

// decodeBasic reads the value of an Authorization field.
func decodeBasic(value string) (user, password string, ok bool) {
	scheme, rest, _ := strings.Cut(value, " ")
	if !strings.EqualFold(scheme, "basic") {
		return "", "", false
	}
	rest = strings.TrimRight(strings.TrimSpace(rest), "=")
	b, err := base64.RawStdEncoding.DecodeString(rest)
	if err != nil {
		return "", "", false
	}
	user, password, _ = strings.Cut(string(b), ":")
	return user, password, true
}

// Field is the value of a field of any name, such as x-api-key.
func Field(name, value string) Credential {
	name = strings.ToLower(name)
	err := checkSecret(value, "a value")
	if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || sniff.Decisive(name) {
		err = fmt.Errorf("the field %q can hold no secret", name)
	}
	return Credential{
		field: name, err: err,
		replace: func(sent, placeholder string) (string, bool) { return value, sent == placeholder },
		whole:   func() string { return value },
		values:  func() []string { return []string{value} },
	}
}

// checkSecret refuses a value that cannot stand in a field. The error does not contain it.
func checkSecret(value, what string) error {
	switch {
	case len(value) < minSecret || len(value) > maxSecret:
		return fmt.Errorf("%s of %d bytes is not between %d and %d", what, len(value), minSecret, maxSecret)
	case strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return fmt.Errorf("%s has a byte that is no visible ASCII", what)
	}
	return nil
}

// NewSecret binds a credential to requests.
func NewSecret(b Binding, c Credential) (Secret, error) {
	s, err := newSecret(b, c)
	if err != nil {
		return Secret{}, fmt.Errorf("bind the secret %q: %w", b.Name, err)
	}
	return Secret{s}, nil
}

func newSecret(b Binding, c Credential) (*bound, error) {
	if c.err != nil {
		return nil, c.err
	}
	if b.Port == 0 {
		b.Port = 443
	}
	b.Methods, b.Paths = slices.Clone(b.Methods), slices.Clone(b.Paths)
	s := &bound{binding: b, credential: c}
	word := strings.Trim(b.Placeholder, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") == ""
	var err error
	switch s.host, err = policy.ParseName(b.Host); {
	case err != nil:
		return nil, err
	case b.Name == "" || len(b.Name) > 100 || strings.ContainsFunc(b.Name, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return nil, errors.New("the name is no line of 1 to 100 bytes")
	case c.values == nil:
		return nil, errors.New("it has no credential")
	case b.Always && c.whole == nil:
		return nil, errors.New("a signature is made of what the client sends and cannot be added always")
	case b.Placeholder == "" && b.Always: // nothing stands for it
	case !word || len(b.Placeholder) < minPlaceholder || len(b.Placeholder) > maxPlaceholder:
		return nil, fmt.Errorf("the placeholder is no word of %d to %d letters, digits, hyphens and underscores", minPlaceholder, maxPlaceholder)
	}
	if slices.ContainsFunc(c.values(), func(v string) bool { return strings.Contains(v, b.Placeholder) && b.Placeholder != "" }) {
		return nil, errors.New("the placeholder is a part of the secret")
	}
	s.requests, err = requestsOf(b)
	return s, err
}

// requestsOf returns a policy that allows exactly the requests of a binding, so that methods and
// paths are matched as in rules.
func requestsOf(b Binding) (*policy.Policy, error) {
	type rule struct {
		Allow   string   `json:"allow"`
		Ports   uint16   `json:"ports"`
		Inspect bool     `json:"inspect"`
		Methods []string `json:"methods,omitempty"`
		Paths   []string `json:"paths,omitempty"`
	}
	doc, err := json.Marshal(map[string]any{"version": policy.Version, "rules": []rule{{b.Host, b.Port, true, b.Methods, b.Paths}}})
	if err != nil {
		return nil, err
	}
	return policy.Parse(doc)
}

// String returns the name and the host.
func (s Secret) String() string {
	if s.b == nil {
		return "no secret"
	}
	return fmt.Sprintf("secret %q for %s", s.b.binding.Name, s.b.binding.Host)
}

// GoString is String for %#v.
func (s Secret) GoString() string { return s.String() }

// anyPublic is an address that no rule for a name refuses. A secret is bound to a name: the address
// was decided about before.
var anyPublic = netip.AddrFrom4([4]byte{1, 1, 1, 1})

// covers reports whether a request, of which the host and its certificate were checked, gets the
// secret.
func (s *bound) covers(of *peer, port uint16, q *sniff.Request) bool {
	f := policy.Flow{Protocol: policy.TCP, Name: s.host, Addr: anyPublic, Port: port}
	echoed := q.Method == "TRACE" || q.Method == "TRACK" // servers answer these with the request itself
	return of != nil && of.name == s.host && !echoed && q.PathError == nil && !q.Dotted && q.Rewrites == "" && s.requests.Request(f, q.Method, q.Path).Allow
}

// mentioned reports whether the placeholder stands anywhere in the head of a request.
func (s *bound) mentioned(q *sniff.Request) bool {
	p := s.binding.Placeholder
	return p != "" && (strings.Contains(q.Target, p) || slices.ContainsFunc(q.Fields, func(f sniff.Field) bool {
		if strings.Contains(f.Value, p) || strings.Contains(f.Name, strings.ToLower(p)) {
			return true
		}
		user, password, ok := decodeBasic(f.Value)
		return ok && (strings.Contains(user, p) || strings.Contains(password, p))
	}))
}

// put puts the secret into a request that it covers. It reports whether it did.
func (s *bound) put(q *sniff.Request) (bool, error) {
	c := s.credential
	var sent []string
	for _, f := range q.Fields {
		if f.Name == c.field {
			sent = append(sent, f.Value)
		}
	}
	switch {
	case len(sent) == 0 && s.binding.Always:
		q.SetField(c.field, c.whole())
		return true, nil
	case len(sent) != 1 || s.binding.Placeholder == "":
		return false, nil
	case c.sign != nil:
		fields, err := c.sign(q, s.binding.Placeholder)
		for _, f := range fields {
			q.SetField(f.Name, f.Value)
		}
		return len(fields) > 0, err
	}
	value, ok := c.replace(sent[0], s.binding.Placeholder)
	if ok {
		q.SetField(c.field, value)
	}
	return ok, nil
}

// putSecrets puts secrets into a request that the policy allows. It returns their names. A
// placeholder that stands where no secret belongs is refused: the program that sent it there was
// made to, or will not work.
func (n *Network) putSecrets(dst netip.AddrPort, of *peer, q *sniff.Request) (names string, err error) {
	var put []string
	secrets := n.secrets.Load().current
	for _, secret := range secrets {
		s := secret.b
		if s == nil || !s.covers(of, dst.Port(), q) {
			continue
		}
		done, err := s.put(q)
		if err != nil {
			return "", s.refuse("%v", err)
		}
		if done {
			put = append(put, s.binding.Name)
		}
	}
	for _, secret := range secrets {
		switch s := secret.b; {
		case s == nil || !s.mentioned(q):
		case of == nil:
			return "", s.refuse("the placeholder of the secret %s in a request without TLS", s.binding.Name)
		case !s.covers(of, dst.Port(), q):
			return "", s.refuse("the placeholder of the secret %s, which is not for this request", s.binding.Name)
		default:
			return "", s.refuse("the placeholder of the secret %s where the secret does not belong", s.binding.Name)
		}
	}
	return strings.Join(put, ", "), nil
}

func (s *bound) refuse(format string, args ...any) error {
	return &refusal{Verdict: policy.Verdict{Reason: fmt.Sprintf(format, args...)}, secret: s.binding.Name}
}

// secretSet is the secrets of a network at one time.
type secretSet struct {
	current []Secret
	before  []Secret // of earlier sets, the latest first: responses under way may still repeat them
}

// maxBefore bounds the secrets of earlier sets.
const maxBefore = 64

// SetSecrets replaces the secrets. Requests that were sent on keep the values that they got;
// responses show neither the latest of these nor the new ones.
func (n *Network) SetSecrets(secrets []Secret) {
	for {
		old := n.secrets.Load()
		before := slices.Concat(old.current, old.before)
		if n.secrets.CompareAndSwap(old, &secretSet{current: slices.Clone(secrets), before: before[:min(len(before), maxBefore)]}) {
			return
		}
	}
}

// redact replaces the values of all secrets in a text of the server's.
func (n *Network) redact(text string) string {
	set := n.secrets.Load()
	for _, secrets := range [][]Secret{set.current, set.before} {
		for _, secret := range secrets {
			if secret.b == nil {
				continue
			}
			for _, v := range secret.b.credential.values() {
				if strings.Contains(text, v) {
					text = strings.ReplaceAll(text, v, "[secret "+secret.b.binding.Name+"]")
				}
			}
		}
	}
	return text
}
