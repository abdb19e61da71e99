// Package contract validates responses of the daemon against the OpenAPI document,
// docs/reference/openapi.json.
//
// The document lets clients meet new fields. Here a field that the document does not have is a
// violation, so that neither a renamed nor a new field goes unnoticed.
package contract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/docs"
)

// Contract is the compiled document.
type Contract struct {
	routes  []route
	problem *jsonschema.Schema
	frame   *jsonschema.Schema // text frames of WebSockets
}

type route struct {
	method   string
	segments []string
	answers  map[int]map[string]*jsonschema.Schema // by status and media type; nil: any bytes
}

// Load returns the contract of the embedded document, compiled once for a process.
var Load = sync.OnceValues(func() (*Contract, error) {
	return New(docs.OpenAPI)
})

// New compiles an OpenAPI document.
func New(document []byte) (*Contract, error) {
	root, err := jsonschema.UnmarshalJSON(bytes.NewReader(document))
	if err != nil {
		return nil, err
	}
	doc, ok := root.(map[string]any)
	if !ok {
		return nil, errors.New("the document is not an object")
	}
	for _, schema := range get(doc, "components", "schemas") {
		s, _ := schema.(map[string]any)
		if s["properties"] != nil && s["additionalProperties"] == nil {
			s["additionalProperties"] = false
		}
	}
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	const location = "http://sandboxd/openapi.json"
	if err := compiler.AddResource(location, doc); err != nil {
		return nil, err
	}
	c := new(Contract)
	if c.problem, err = compiler.Compile(location + "#/components/schemas/Problem"); err != nil {
		return nil, err
	}
	if c.frame, err = compiler.Compile(location + "#/components/schemas/ExecEvent"); err != nil {
		return nil, err
	}
	for path, item := range get(doc, "paths") {
		operations, _ := item.(map[string]any)
		for method, operation := range operations {
			r := route{method: strings.ToUpper(method), segments: strings.Split(path, "/"), answers: map[int]map[string]*jsonschema.Schema{}}
			op, _ := operation.(map[string]any)
			for status, response := range get(op, "responses") {
				n, err := strconv.Atoi(status)
				if err != nil {
					continue // "default": a problem
				}
				r.answers[n] = map[string]*jsonschema.Schema{}
				res, _ := response.(map[string]any)
				for mediaType, media := range get(res, "content") {
					m, _ := media.(map[string]any)
					if m["schema"] == nil {
						r.answers[n][mediaType] = nil
						continue
					}
					pointer := fmt.Sprintf("%s#/paths/%s/%s/responses/%s/content/%s/schema", location, escape(path), method, status, escape(mediaType))
					if r.answers[n][mediaType], err = compiler.Compile(pointer); err != nil {
						return nil, err
					}
				}
			}
			c.routes = append(c.routes, r)
		}
	}
	return c, nil
}

// escape writes a part of a JSON pointer into a fragment.
func escape(s string) string {
	return strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D", "+", "%2B").Replace(s)
}

func get(v map[string]any, keys ...string) map[string]any {
	for _, k := range keys {
		v, _ = v[k].(map[string]any)
	}
	return v
}

// find returns the route of a request; one without a parameter in the place goes first.
func (c *Contract) find(method, path string) *route {
	var found *route
	segments := strings.Split(path, "/")
next:
	for i, r := range c.routes {
		if (r.method != method && (r.method != http.MethodGet || method != http.MethodHead)) || len(r.segments) != len(segments) {
			continue
		}
		literal := true
		for j, s := range r.segments {
			parameter := strings.HasPrefix(s, "{")
			if !parameter && s != segments[j] || parameter && segments[j] == "" {
				continue next
			}
			literal = literal && !parameter
		}
		if found == nil || literal {
			found = &c.routes[i]
		}
	}
	return found
}

// Check wraps a transport: every response that passes is validated, and report is called for each
// violation. Bodies are validated as they are read; one that is closed before its end is not.
func (c *Contract) Check(next http.RoundTripper, report func(error)) http.RoundTripper {
	return transport{c, next, report}
}

type transport struct {
	contract *Contract
	next     http.RoundTripper
	report   func(error)
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := t.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	violated := func(err error) {
		t.report(fmt.Errorf("%s %s: %s: %w", r.Method, r.URL.RequestURI(), response.Status, err))
	}
	schema, perLine, err := t.contract.answer(r, response)
	switch {
	case err != nil:
		violated(err)
	case schema != nil && r.Method != http.MethodHead:
		response.Body = &body{ReadCloser: response.Body, schema: schema, perLine: perLine, violated: violated}
	}
	return response, nil
}

// CloseIdleConnections lets http.Client reach the transport below.
func (t transport) CloseIdleConnections() {
	if c, ok := t.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// answer checks status and content type, and returns the schema of the body, if it has one, or of
// each of its lines.
func (c *Contract) answer(r *http.Request, response *http.Response) (schema *jsonschema.Schema, perLine bool, err error) {
	mediaType := ""
	if h := response.Header.Get("Content-Type"); h != "" {
		if mediaType, _, err = mime.ParseMediaType(h); err != nil {
			return nil, false, err
		}
	}
	if response.StatusCode >= http.StatusBadRequest {
		if mediaType != api.TypeProblem {
			return nil, false, fmt.Errorf("an error has content type %q", mediaType)
		}
		return c.problem, false, nil
	}
	route := c.find(r.Method, r.URL.EscapedPath())
	if route == nil {
		return nil, false, errors.New("no such route in the document")
	}
	types, ok := route.answers[response.StatusCode]
	switch {
	case !ok:
		return nil, false, errors.New("no such status in the document")
	case len(types) == 0 && mediaType == "":
		return nil, false, nil
	}
	schema, ok = types[mediaType]
	if !ok {
		return nil, false, fmt.Errorf("no content type %q in the document", mediaType)
	}
	return schema, mediaType == api.TypeNDJSON, nil
}

// Frame validates a text frame of a WebSocket.
func (c *Contract) Frame(data []byte) error { return validate(c.frame, data) }

func validate(schema *jsonschema.Schema, data []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err == nil {
		err = schema.Validate(v)
	}
	if err != nil {
		return fmt.Errorf("%w\n%.2000s", err, data)
	}
	return nil
}

// maxHeld bounds the bytes of a body, or of a line, that are kept for the validation.
const maxHeld = 64 << 20

// body validates its bytes as they are read.
type body struct {
	io.ReadCloser

	schema   *jsonschema.Schema
	perLine  bool
	violated func(error)
	held     []byte
	done     bool
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.done {
		return n, err
	}
	b.held = append(b.held, p[:n]...)
	if b.perLine {
		for line, rest, ok := bytes.Cut(b.held, []byte("\n")); ok; line, rest, ok = bytes.Cut(b.held, []byte("\n")) {
			b.check(line)
			b.held = rest
		}
	}
	if errors.Is(err, io.EOF) {
		if len(bytes.TrimSpace(b.held)) > 0 {
			b.check(b.held)
		} else if !b.perLine && !b.done {
			b.violated(errors.New("no body"))
		}
		b.done = true
	}
	if len(b.held) > maxHeld {
		b.done, b.held = true, nil
	}
	return n, err
}

// Close validates a whole document whose reader has not asked for the end of file; decoders stop
// before it.
func (b *body) Close() error {
	if !b.done && !b.perLine && json.Valid(b.held) {
		b.check(b.held)
		b.done = true
	}
	return b.ReadCloser.Close()
}

func (b *body) check(data []byte) {
	if err := validate(b.schema, data); err != nil {
		b.violated(err)
	}
}
