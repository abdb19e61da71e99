package api

import "time"

// FlowKind is the kind of a [Flow].
type FlowKind string

// The kinds of flows.
const (
	FlowConnection FlowKind = "connection" // a TCP connection, at its end or when it is refused
	FlowRequest    FlowKind = "request"    // an HTTP request, when its response has ended or when it is refused
	FlowQuery      FlowKind = "query"      // a DNS question that the host's resolver was asked, or that was refused
)

// Flow is an entry of the record of a sandbox's network.
type Flow struct {
	Time time.Time `json:"time"` // of the begin
	Kind FlowKind  `json:"kind"`
	// Protocol is tcp, tls, http, websocket or dns, as far as it was understood.
	Protocol string `json:"protocol,omitempty"`
	// Name is the host name that decided; in a refusal the one that the client sent. Empty if a rule for
	// the address decided.
	Name    string `json:"name,omitempty"`
	Address string `json:"address,omitempty"` // of the destination
	Port    uint16 `json:"port,omitempty"`
	// Method and Path are those of a request, without its query. Method of a query is its type.
	Method string `json:"method,omitempty"`
	Path   string `json:"path,omitempty"`
	Status int    `json:"status,omitempty"` // of the HTTP response
	Allow  bool   `json:"allow"`            // false if it was refused, at its begin or later
	Rule   string `json:"rule,omitempty"`   // name of the rule that decided
	// Reason explains a refusal, or an end that was not orderly.
	Reason     string  `json:"reason,omitempty"`
	Out        int64   `json:"out,omitempty"` // bytes from the sandbox
	In         int64   `json:"in,omitempty"`  // bytes to the sandbox
	DurationMS float64 `json:"duration_ms,omitempty"`
	// Lost is the number of flows before this one that are not kept, because they came too fast or the
	// disk was full.
	Lost uint64 `json:"lost,omitempty"`

	Error *Problem `json:"error,omitempty"` // of a last line: the daemon stops
}
