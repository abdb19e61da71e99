package api

import "time"

// FlowKind is the kind of event that a flow records.
type FlowKind string

// Kinds of flows.
const (
	FlowConnection FlowKind = "connection" // a TCP connection, at its end or refusal
	FlowRequest    FlowKind = "request"    // an HTTP request on one, at the end of its response or at its refusal
	FlowRestart    FlowKind = "restart"    // the gateway was started again; connections before it were reset
	FlowQuery      FlowKind = "query"      // a name that the host's resolver was asked for, or that was refused
	FlowPeer       FlowKind = "peer"       // a connection from another sandbox in a named network, at its begin; its end is in that one's record
)

// Flow is one entry of the record of a sandbox's network: a line of JSON each.
type Flow struct {
	Time time.Time `json:"time"` // of its begin
	Kind FlowKind  `json:"kind"`
	// Protocol is tcp, tls, http, websocket or dns: the innermost that the gateway has read. It is http
	// for requests within TLS that it has read, and tls where it has not.
	Protocol string `json:"protocol"`
	// Name is the host name that decided; empty if a rule for the address did. In a refusal it is the
	// name that the program sent, which may be malformed. Of a peer it is the name of that sandbox.
	Name    string `json:"name,omitempty"`
	Address string `json:"address,omitempty"` // of the destination, or of the peer; none of a query
	Port    uint16 `json:"port,omitempty"`
	// Method and Path are those of a request, without its query; a malformed path is left out. Method
	// of a query is its type, such as AAAA.
	Method string `json:"method,omitempty"`
	Path   string `json:"path,omitempty"`
	Status int    `json:"status,omitempty"` // of the response; none came if it is absent
	// Allow is false if the flow was refused, at its begin or later.
	Allow      bool    `json:"allow"`
	Rule       string  `json:"rule,omitempty"`   // that decided
	Secret     string  `json:"secret,omitempty"` // name of the one that was put into a request, or whose placeholder was refused
	Reason     string  `json:"reason,omitempty"` // of a refusal, or of an end that was not orderly
	Out        int64   `json:"out,omitempty"`    // bytes from the sandbox
	In         int64   `json:"in,omitempty"`     // bytes to the sandbox
	DurationMS float64 `json:"duration_ms"`
	// Process is the program's process, where it was found out. Of a peer there is none.
	Process *FlowProcess `json:"process,omitempty"`
	// Lost is the number of entries before this one that were dropped because too many came at once.
	Lost uint64 `json:"lost,omitempty"`

	Error *Problem `json:"error,omitempty"` // of a last line: the daemon stops
}

// FlowProcess is the process that had the socket of a flow when it began, or was refused. The
// sandbox is the source: a hostile program can have another one appear here. It is looked for at
// most some times a second, and after a short connection it may be gone.
type FlowProcess struct {
	PID  int    `json:"pid"`  // in its sandbox
	Name string `json:"name"` // the kernel's name for it
	// Exec is the id of the exec that has started it; empty if the exec had ended.
	Exec string `json:"exec,omitempty"`
	// Sandbox is the id of the sandbox that it is in, where that shares the network of another one.
	Sandbox string `json:"sandbox,omitempty"`
}
