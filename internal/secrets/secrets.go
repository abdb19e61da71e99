// Package secrets reads the operator's secrets from a file, which names them, where their values
// come from, and the requests that get them. It also keeps the secrets that tenants set, sealed
// ([Store]). A sandbox has a placeholder; the gateway puts the value into its requests (package
// gateway).
package secrets

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

const (
	// MaxSecrets is the maximum number of secrets of a file.
	MaxSecrets = 100

	maxFile  = 1 << 20
	maxValue = 16 << 10
	maxName  = 64

	maxVariable = 128
)

// Kind is the way in which a request carries a secret.
type Kind string

// The kinds of secrets, each with the fields of [Secret] that it uses.
const (
	Bearer Kind = "bearer" // Value: a token in Authorization
	Basic  Kind = "basic"  // Field: the user, or empty for the client's; Value: the password
	Header Kind = "header" // Field: its name; Value
	AWS    Kind = "aws"    // Field: the access key id; Value: the secret key; Token: a session token or empty
)

// Secret is a credential with the requests that get it. Printing it shows no value.
type Secret struct {
	Name     string
	Variable string // environment variable of the sandbox that has the placeholder; empty: none
	Binding  gateway.Binding
	Kind     Kind
	Field    string
	Value    string
	Token    string
}

// String returns the name and the host.
func (s Secret) String() string {
	return fmt.Sprintf("secret %q for %s", s.Name, s.Binding.Host)
}

// GoString is String for %#v.
func (s Secret) GoString() string { return s.String() }

// Placed returns the secret with a new placeholder, for one sandbox.
func (s Secret) Placed() Secret {
	s.Binding.Placeholder = "sandboxd-" + strings.ToLower(rand.Text())
	return s
}

// Gateway returns the secret as the gateway uses it. It needs a placeholder unless it is put into
// requests always.
func (s Secret) Gateway() (gateway.Secret, error) {
	b := s.Binding
	b.Name = s.Name
	var c gateway.Credential
	switch s.Kind {
	case Bearer:
		c = gateway.Bearer(s.Value)
	case Basic:
		c = gateway.Basic(s.Field, s.Value)
	case Header:
		c = gateway.Field(s.Field, s.Value)
	case AWS:
		c = gateway.AWS(s.Field, s.Value, s.Token)
	default:
		return gateway.Secret{}, fmt.Errorf("secret %q: kind %q is unknown", s.Name, s.Kind)
	}
	return gateway.NewSecret(b, c)
}

// document is the file.
type document struct {
	Version int     `yaml:"version"`
	Secrets []entry `yaml:"secrets"`
}

type entry struct {
	Name     string   `yaml:"name"`
	Variable string   `yaml:"variable"`
	Host     string   `yaml:"host"`
	Port     uint16   `yaml:"port"`
	Methods  []string `yaml:"methods"`
	Paths    []string `yaml:"paths"`
	Always   bool     `yaml:"always"`

	// One of these.
	Bearer *source  `yaml:"bearer"`
	Basic  *account `yaml:"basic"`
	Header *header  `yaml:"header"`
	AWS    *key     `yaml:"aws"`
}

type account struct {
	User     string `yaml:"user"`
	Password source `yaml:"password"`
}

type header struct {
	Name  string `yaml:"name"`
	Value source `yaml:"value"`
}

type key struct {
	ID     string  `yaml:"access_key_id"`
	Secret source  `yaml:"secret_key"`
	Token  *source `yaml:"session_token"`
}

// source says where a value comes from: a file, whose last line end is left out, or a variable of
// the daemon's environment.
type source struct {
	File string `yaml:"file"`
	Env  string `yaml:"env"`
}

// Read reads a file of secrets and their values. Errors tell no value.
func Read(path string) (map[string]Secret, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read secrets: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read secrets: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("read secrets: %s is larger than %d bytes", path, maxFile)
	}
	all, err := parse(data, os.LookupEnv, readValue)
	if err != nil {
		return nil, fmt.Errorf("read secrets: %s: %w", path, err)
	}
	return all, nil
}

// readValue reads a file with one value.
func readValue(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxValue+2))
	if err != nil {
		return "", err
	}
	value := strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r")
	if len(value) > maxValue {
		return "", fmt.Errorf("%s is longer than %d bytes", path, maxValue)
	}
	return value, nil
}

// parse reads a document, with functions that read values.
func parse(data []byte, env func(string) (string, bool), file func(string) (string, error)) (map[string]Secret, error) {
	var doc document
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(&doc); err != nil {
		// It quotes what it cannot read, which may be a value that was written into the file.
		return nil, errors.New(quoted.ReplaceAllString(err.Error(), "a value"))
	}
	if err := d.Decode(new(document)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one document")
	}
	switch {
	case doc.Version != 1:
		return nil, errors.New("the version is missing or unknown; write version: 1")
	case len(doc.Secrets) > MaxSecrets:
		return nil, fmt.Errorf("%d secrets, at most %d are possible", len(doc.Secrets), MaxSecrets)
	}
	all := make(map[string]Secret)
	for i := range doc.Secrets {
		e := &doc.Secrets[i]
		if !isName(e.Name) {
			return nil, fmt.Errorf("secrets[%d]: name %q: 1 to %d letters, digits, \"_\" and \"-\"", i, e.Name, maxName)
		}
		if _, ok := all[e.Name]; ok {
			return nil, fmt.Errorf("secret %q: there are two of this name", e.Name)
		}
		s, err := e.secret(func(s source) (string, error) { return s.value(env, file) })
		if err != nil {
			return nil, fmt.Errorf("secret %q: %w", e.Name, err)
		}
		if err := s.Check(); err != nil {
			return nil, fmt.Errorf("secret %q: %w", e.Name, err)
		}
		all[e.Name] = s
	}
	return all, nil
}

// quoted matches what a YAML error quotes.
var quoted = regexp.MustCompile("`[^`]*`")

func isName(s string) bool {
	return s != "" && len(s) <= maxName && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") == ""
}

// secret returns the secret of an entry.
func (e *entry) secret(value func(source) (string, error)) (s Secret, err error) {
	s = Secret{
		Name: e.Name, Variable: e.Variable,
		Binding: gateway.Binding{Name: e.Name, Host: e.Host, Port: e.Port, Methods: e.Methods, Paths: e.Paths, Always: e.Always},
	}
	kinds := 0
	if e.Bearer != nil {
		kinds++
		s.Kind = Bearer
		s.Value, err = value(*e.Bearer)
	}
	if e.Basic != nil {
		kinds++
		s.Kind, s.Field = Basic, e.Basic.User
		s.Value, err = value(e.Basic.Password)
	}
	if e.Header != nil {
		kinds++
		s.Kind, s.Field = Header, e.Header.Name
		s.Value, err = value(e.Header.Value)
	}
	if e.AWS != nil {
		kinds++
		s.Kind, s.Field = AWS, e.AWS.ID
		if s.Value, err = value(e.AWS.Secret); err == nil && e.AWS.Token != nil {
			s.Token, err = value(*e.AWS.Token)
		}
	}
	if kinds != 1 {
		return s, errors.New("it needs one of bearer, basic, header and aws")
	}
	return s, err
}

func (s source) value(env func(string) (string, bool), file func(string) (string, error)) (string, error) {
	switch {
	case (s.File == "") == (s.Env == ""):
		return "", errors.New("its value needs either file or env")
	case s.Env != "":
		v, ok := env(s.Env)
		if !ok {
			return "", fmt.Errorf("the daemon's environment has no %s", s.Env)
		}
		return v, nil
	}
	return file(s.File)
}
