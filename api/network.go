package api

// NetworkList is the answer to GET /v1/networks, in the order of the names.
type NetworkList struct {
	Networks []NamedNetwork `json:"networks"`
}

// NamedNetwork is a network in which sandboxes reach each other; see [Network].Join.
type NamedNetwork struct {
	Name      string          `json:"name"`
	Sandboxes []NetworkMember `json:"sandboxes"` // oldest first
}

// NetworkMember is a sandbox in a named network.
type NetworkMember struct {
	ID    string       `json:"id"`
	Name  string       `json:"name"`
	State SandboxState `json:"state"`
	// Address is the sandbox's address for the other members; absent while it does not run.
	Address string `json:"address,omitempty"`
}
