package openapi

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/contract"
)

var update = flag.Bool("update", false, "rewrite the generated documents")

const reference = "../../docs/reference"

func comments(t *testing.T) *Comments {
	t.Helper()
	c, err := ReadComments("..", ".")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func build(t *testing.T) []byte {
	t.Helper()
	data, err := Build(comments(t))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// The generated documents follow from the table and the types.
func TestDocumentsAreCurrent(t *testing.T) {
	routes, err := Reference(comments(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{"openapi.json": build(t), "api.md": []byte(routes), "errors.md": []byte(Errors(comments(t)))} {
		path := filepath.Join(reference, name)
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s is not current (go test ./api/openapi -update):\n%s", path, diff)
		}
	}
}

func parse(t *testing.T, data []byte) any {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// The schema is the OpenAPI Initiative's (https://spec.openapis.org/oas/3.1/schema/2022-10-07,
// Apache-2.0).
func TestDocumentIsOpenAPI(t *testing.T) {
	data, err := os.ReadFile("testdata/openapi-3.1.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	const location = "https://spec.openapis.org/oas/3.1/schema/2022-10-07"
	if err := compiler.AddResource(location, parse(t, data)); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile(location)
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(parse(t, build(t))); err != nil {
		t.Error(err)
	}
	broken := bytes.Replace(build(t), []byte(`"in": "query"`), []byte(`"in": "body"`), 1)
	if err := schema.Validate(parse(t, broken)); err == nil {
		t.Error("a parameter in the body passes")
	}
}

func TestOperationsAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range Operations {
		if seen[o.ID] || seen[o.Method+" "+o.Path] {
			t.Errorf("%s, %s %s: twice", o.ID, o.Method, o.Path)
		}
		seen[o.ID], seen[o.Method+" "+o.Path] = true, true
		for _, name := range wildcards(o.Path) {
			if parameters[name] == "" || Names[name] == "" {
				t.Errorf("%s: parameter %s has no description or no example", o.ID, name)
			}
		}
	}
}

// roundTrip answers every request with one response.
type roundTrip func() *http.Response

func (f roundTrip) RoundTrip(*http.Request) (*http.Response, error) { return f(), nil }

// checked sends a response through the contract and returns the violations.
func checked(t *testing.T, c *contract.Contract, method, target string, status int, mediaType string, body []byte) []error {
	t.Helper()
	var violations []error
	transport := c.Check(roundTrip(func() *http.Response {
		h := http.Header{}
		if mediaType != "" {
			h.Set("Content-Type", mediaType)
		}
		return &http.Response{StatusCode: status, Status: http.StatusText(status), Header: h, Body: readCloser{bytes.NewReader(body)}}
	}), func(err error) { violations = append(violations, err) })
	r, err := http.NewRequestWithContext(t.Context(), method, "http://sandboxd"+target, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := new(bytes.Buffer).ReadFrom(response.Body); err != nil {
		t.Fatal(err)
	}
	return violations
}

type readCloser struct{ *bytes.Reader }

func (readCloser) Close() error { return nil }

func encode(t *testing.T, a *Answer) []byte {
	t.Helper()
	if a.Value == nil {
		return nil
	}
	var b strings.Builder
	if err := writeValue(&b, a.Type, a.Value); err != nil {
		t.Fatal(err)
	}
	return []byte(b.String())
}

// Every example conforms, and one with a field that is called otherwise does not.
func TestExamplesConform(t *testing.T) {
	c, err := contract.New(build(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range Operations {
		for _, a := range o.Answers {
			body := encode(t, &a)
			if v := checked(t, c, o.Method, o.Target(Names), a.Status, a.Type, body); len(v) > 0 {
				t.Errorf("%s: %v", o.ID, v)
			}
			if a.Value == nil {
				continue
			}
			renamed := bytes.Replace(body, []byte(`":`), []byte(`x":`), 1)
			if v := checked(t, c, o.Method, o.Target(Names), a.Status, a.Type, renamed); len(v) == 0 {
				t.Errorf("%s: a renamed field passes: %.100s", o.ID, renamed)
			}
		}
		if v := checked(t, c, o.Method, o.Target(Names), http.StatusTeapot, api.TypeJSON, []byte("{}")); len(v) == 0 {
			t.Errorf("%s: an error that is no problem passes", o.ID)
		}
		if v := checked(t, c, o.Method, o.Target(Names), 299, api.TypeJSON, []byte("{}")); len(v) == 0 {
			t.Errorf("%s: an unknown status passes", o.ID)
		}
	}
}

// Examples of requests decode as the daemon decodes them.
func TestRequestsDecode(t *testing.T) {
	for _, o := range Operations {
		if o.Body == nil || o.Body.Type != api.TypeJSON {
			continue
		}
		data, err := json.Marshal(o.Body.Value)
		if err != nil {
			t.Fatal(err)
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		if err := dec.Decode(reflect.New(reflect.TypeOf(o.Body.Value)).Interface()); err != nil {
			t.Errorf("%s: %v", o.ID, err)
		}
	}
}
