package api

import "time"

// SecretKind is the way in which a request carries a secret.
type SecretKind string

// Kinds of secrets.
const (
	SecretBearer SecretKind = "bearer" // a token in Authorization: Bearer
	SecretBasic  SecretKind = "basic"  // a password in Authorization: Basic
	SecretHeader SecretKind = "header" // a header of any name
	SecretAWS    SecretKind = "aws"    // a key that signs requests, AWS Signature Version 4
)

// SetSecret is the body of PUT /v1/secrets/{secret}.
type SetSecret struct {
	Kind SecretKind `json:"kind"`
	// Value is the token, the password, the header's value or the secret key: 8 to 16,384 bytes of
	// visible ASCII.
	Value        string `json:"value"`
	User         string `json:"user,omitempty"`          // of basic; empty for the one that the client sends
	Header       string `json:"header,omitempty"`        // name of the header; for kind header
	AccessKeyID  string `json:"access_key_id,omitempty"` // of aws
	SessionToken string `json:"session_token,omitempty"` // of aws, if the key has one
	Host         string `json:"host"`                    // the one host that gets the secret
	Port         uint16 `json:"port,omitempty"`          // default 443
	// Methods and Paths select requests as in rules of a policy. Empty means all.
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
	// Always puts the secret also into requests that lack the header; not for aws.
	Always bool `json:"always,omitempty"`
	// Variable is the environment variable of new sandboxes that has the placeholder. Default: none.
	Variable string `json:"variable,omitempty"`
}

// Secret describes a secret. No answer has its value.
type Secret struct {
	Name      string     `json:"name"`
	Kind      SecretKind `json:"kind"`
	Header    string     `json:"header,omitempty"` // name of the header, of kind header
	Host      string     `json:"host"`
	Port      uint16     `json:"port"`
	Methods   []string   `json:"methods,omitempty"`
	Paths     []string   `json:"paths,omitempty"`
	Always    bool       `json:"always,omitempty"`
	Variable  string     `json:"variable,omitempty"`
	File      bool       `json:"file,omitempty"`      // it is of the daemon's file (--secrets), which alone changes it
	CreatedAt time.Time  `json:"created_at,omitzero"` // absent for secrets of the file
	ChangedAt time.Time  `json:"changed_at,omitzero"` // of the last PUT; absent for secrets of the file
	// Error is the reason for which a stored secret cannot be read; only its name is known then. No
	// sandbox gets it. To set it again or to remove it helps.
	Error string `json:"error,omitempty"`
}

// SecretList is the answer to GET /v1/secrets, in the order of the names.
type SecretList struct {
	Secrets []Secret `json:"secrets"`
}
