package openapi

import (
	"net/http"
	"reflect"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// Operation is one route with one method.
type Operation struct {
	ID      string // operationId
	Method  string
	Path    string // as the daemon's router spells it
	Tag     string
	Summary string // one line
	Detail  string // Markdown; limits and special cases
	Query   []Parameter
	Body    *Body // nil: none
	Answers []Answer
	// Socket marks routes that answer a WebSocket handshake with 101; Detail then has the frames.
	Socket bool
}

// Parameter is one query parameter.
type Parameter struct {
	Name, Detail string
	Type         string // a JSON type; "boolean" means true or false
	Enum         []string
	Default      string
	Required     bool
	Repeated     bool
	JSON         any    // value of the type that the parameter holds as JSON; nil if it is plain
	Example      string // a value that [Operation.Target] uses; "" leaves the parameter out
}

// Body is a request's body.
type Body struct {
	Type     string // media type
	Value    any    // example of the Go type; for a type other than JSON a description of the bytes
	Optional bool
}

// Answer is a successful response.
type Answer struct {
	Status int
	Type   string // media type; "" means no body
	Value  any    // example of the Go type; of NDJSON a slice with one value a line
	Detail string
}

// Names are the values of path parameters in examples.
var Names = map[string]string{"id": "work", "exec": "main", "snapshot": "base", "profile": "hardened", "run": "run-1", "port": "8000", "secret": "github", "volume": "cache", "network": "back", "context": "k3v9ap"}

// parameters describes path parameters.
var parameters = map[string]string{
	"id":       "Id or name of a sandbox.",
	"exec":     "Id of an exec, or `main` for the sandbox's main process.",
	"context":  "Id of a context.",
	"snapshot": "Id or name of a snapshot.",
	"volume":   "Name of a volume.",
	"network":  "Name of a named network.",
	"profile":  "Name of a profile.",
	"run":      "Id of a hosted agent run.",
	"port":     "Number of a TCP port.",
	"secret":   "Name of a secret: 1 to 64 letters, digits, `_` and `-`.",
}

// wildcards returns the names of the path's parameters.
func wildcards(path string) []string {
	var names []string
	for segment := range strings.SplitSeq(path, "/") {
		if name, ok := strings.CutPrefix(segment, "{"); ok {
			names = append(names, strings.TrimSuffix(name, "}"))
		}
	}
	return names
}

// Target returns the path and query of the example request, with names for the path's parameters.
func (o *Operation) Target(names map[string]string) string {
	target := o.Path
	for _, name := range wildcards(o.Path) {
		target = strings.ReplaceAll(target, "{"+name+"}", names[name])
	}
	sep := "?"
	for _, p := range o.Query {
		if p.Example != "" {
			target += sep + p.Name + "=" + escape(p.Example)
			sep = "&"
		}
	}
	return target
}

// escape encodes the reserved characters of a query, and leaves slashes and colons readable.
func escape(s string) string {
	return strings.NewReplacer("%", "%25", " ", "%20", `"`, "%22", "{", "%7B", "}", "%7D", "&", "%26", "+", "%2B", "#", "%23").Replace(s)
}

func jsonBody(v any) *Body          { return &Body{Type: api.TypeJSON, Value: v} }
func optionalBody(v any) *Body      { return &Body{Type: api.TypeJSON, Value: v, Optional: true} }
func bytesBody(detail string) *Body { return &Body{Type: api.TypeBytes, Value: detail} }
func tarBody(detail string) *Body   { return &Body{Type: api.TypeTar, Value: detail} }

func ok(v any) Answer      { return Answer{Status: http.StatusOK, Type: api.TypeJSON, Value: v} }
func created(v any) Answer { return Answer{Status: http.StatusCreated, Type: api.TypeJSON, Value: v} }

var noContent = Answer{Status: http.StatusNoContent}

// lines is a response of JSON lines, of which events are an example.
func lines[T any](events ...T) Answer {
	return Answer{Status: http.StatusOK, Type: api.TypeNDJSON, Value: events}
}

func path(name string) Parameter {
	return Parameter{Name: "path", Type: "string", Required: true, Example: name, Detail: "Absolute path in the sandbox, without `..`; percent-encoded."}
}

func toggle(name, detail string) Parameter {
	return Parameter{Name: name, Type: "boolean", Default: "false", Detail: detail}
}

// element returns the type of one JSON value of the answer: of a line for NDJSON.
func (a *Answer) element() reflect.Type {
	t := reflect.TypeOf(a.Value)
	if a.Type == api.TypeNDJSON {
		return t.Elem()
	}
	return t
}
