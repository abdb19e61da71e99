package policy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/sandboxd/sandboxd/api"
)

const maxLine = 64 << 10 // of a record; a path has 8 KiB at most

// ReadFlows reads a record of flows, one JSON value a line. Unknown keys are ignored: they are of a
// newer version. Names and paths of flows that were refused may be malformed, no others.
func ReadFlows(r io.Reader) ([]api.Flow, error) {
	var flows []api.Flow
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var f api.Flow
		if err := json.Unmarshal(line, &f); err != nil {
			return nil, fmt.Errorf("read flows: line %d: %w", n, err)
		}
		if f.Kind == api.FlowRestart || f.Kind == api.FlowPeer { // nothing that a program of the sandbox did
			continue
		}
		if _, err := readFlow(f); errors.Is(err, errKind) || err != nil && f.Allow {
			return nil, fmt.Errorf("read flows: line %d: %w", n, err)
		}
		flows = append(flows, f)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read flows: %w", err)
	}
	return flows, nil
}

// An act is a recorded flow in the forms that policies compare.
type act struct {
	kind api.FlowKind
	Flow
	method string
	path   Path
	// opaque reports that bytes passed which were not read as HTTP, so that the gateway would have
	// refused them where requests have to be read.
	opaque bool
}

// errKind is the error of a value that is no flow.
var errKind = errors.New("which is neither connection, request nor query")

// readFlow parses a flow. The kind is checked first.
func readFlow(f api.Flow) (act, error) {
	a := act{kind: f.Kind}
	if f.Kind != api.FlowConnection && f.Kind != api.FlowRequest && f.Kind != api.FlowQuery {
		return a, fmt.Errorf("flow of kind %q, %w", f.Kind, errKind)
	}
	var err error
	if f.Name != "" {
		if a.Name, err = ParseName(f.Name); err != nil {
			return a, err
		}
	}
	switch f.Kind {
	case api.FlowQuery:
		if f.Name == "" {
			return a, errors.New("a query without a name")
		}
		return a, nil
	case api.FlowRestart, api.FlowPeer: // refused above
	case api.FlowConnection:
		a.opaque = f.Protocol == "tls" || f.Protocol != "http" && f.Out > 0
	case api.FlowRequest:
		if a.method = f.Method; f.Method == "" {
			return a, errors.New("a request without a method")
		}
		if f.Path != "" {
			if a.path, err = ParsePath(f.Path); err != nil {
				return a, err
			}
		}
	}
	if a.Protocol = TCP; f.Protocol == string(UDP) {
		a.Protocol = UDP
	}
	if a.Addr, err = netip.ParseAddr(f.Address); err != nil {
		return a, fmt.Errorf("address of a %s: %w", f.Kind, err)
	}
	if a.Port = f.Port; f.Port == 0 {
		return a, fmt.Errorf("a %s without a port", f.Kind)
	}
	return a, nil
}

// Recorded decides about a flow of a record as the gateway would with this policy. A connection in
// which the gateway has not read requests is refused where they have to be read: whether the
// policy allows them cannot be told from the record. Connections to the gateway's own DNS, and to
// sandboxes in named networks, keep their verdict.
func (p *Policy) Recorded(f api.Flow) Verdict {
	if f.Kind == api.FlowConnection && (f.Protocol == "dns" || toPeer(f)) {
		return Verdict{Allow: f.Allow, Reason: f.Reason}
	}
	a, err := readFlow(f)
	if err != nil {
		return Verdict{Reason: err.Error()}
	}
	return p.recorded(a)
}

func (p *Policy) recorded(a act) Verdict {
	if !a.Name.IsZero() {
		if v := p.Resolve(a.Name); !v.Allow || a.kind == api.FlowQuery {
			return v
		}
	}
	v := p.Connect(a.Flow)
	switch {
	case !v.Allow || !v.Inspect:
		return v
	case a.kind == api.FlowRequest:
		return p.Request(a.Flow, a.method, a.path)
	case a.opaque:
		return Verdict{Rule: v.Rule, Reason: "requests on this connection have to be read, and the record has none"}
	default:
		return v
	}
}
