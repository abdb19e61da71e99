package api

import "time"

// NetworkList is the answer to GET /v1/networks, in the order of the names.
type NetworkList struct {
	Networks []NamedNetwork `json:"networks"`
}

// NamedNetwork is a network in which sandboxes reach each other; see [Network].Join. It was made by
// itself, or exists while a sandbox names it. Its name has up to 63 letters, digits and "_.-", and
// begins with a letter or digit. In one whose name has capitals or dots, or is a top-level domain
// such as com or de, sandboxes are found as NAME, and not as NAME.NETWORK.
type NamedNetwork struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
	// CreatedAt is absent of a network that was not made by itself.
	CreatedAt time.Time `json:"created_at,omitzero"`
	// Internal means that the network is no way out: sandboxes that are in internal networks only
	// reach each other and nothing else, whatever their mode.
	Internal  bool            `json:"internal,omitempty"`
	Sandboxes []NetworkMember `json:"sandboxes"` // oldest first
}

// NetworkMember is a sandbox in a named network.
type NetworkMember struct {
	ID    string       `json:"id"`
	Name  string       `json:"name"`
	State SandboxState `json:"state"`
	// Address is the sandbox's address for the other members; absent while it does not run.
	Address string   `json:"address,omitempty"`
	Aliases []string `json:"aliases,omitempty"` // in this network
}

// CreateNetwork is the body of POST /v1/networks.
type CreateNetwork struct {
	Name   string            `json:"name"`             // see [NamedNetwork]
	Labels map[string]string `json:"labels,omitempty"` // as a sandbox's
	// Internal makes it no way out; see [NamedNetwork]. No sandbox may be in the network yet.
	Internal bool `json:"internal,omitempty"`
}

// ConnectNetwork is the body of POST /v1/networks/{network}/connect.
type ConnectNetwork struct {
	// Sandbox is the ID or name of a sandbox that does not run, or runs with a network of its own that
	// is not none alone.
	Sandbox string `json:"sandbox"`
	// Aliases replace those that the sandbox has in the network.
	Aliases []string `json:"aliases,omitempty"`
}

// DisconnectNetwork is the body of POST /v1/networks/{network}/disconnect.
type DisconnectNetwork struct {
	Sandbox string `json:"sandbox"` // ID or name
}

// PruneNetworks is the optional body of POST /v1/networks/prune. It removes networks that no
// sandbox is in.
type PruneNetworks struct {
	// Labels are the labels that they must have. Networks with [LabelKeep] always stay.
	Labels map[string]string `json:"labels,omitempty"`
}

// NetworksRemoved is the answer to POST /v1/networks/prune.
type NetworksRemoved struct {
	Removed []string `json:"removed"` // names
}
