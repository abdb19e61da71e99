package openapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// introduction describes the API as a whole.
const introduction = "HTTP/1.1 and JSON over a Unix socket. Unknown fields and query parameters are refused. " +
	"JSON bodies have at most 1 MiB, of execs 24 MiB, of agent runs 8 MiB; files, archives and contexts have any length. " +
	"The caller is known by the socket's peer credentials: the daemon's uid and root may use every route, others only `/healthz`. " +
	"Every error is an `application/problem+json` document."

// Build returns the OpenAPI document of [Operations], indented.
func Build(comments *Comments) ([]byte, error) {
	s := &schemas{comments: comments, requests: map[reflect.Type]bool{}, seen: map[string]reflect.Type{}}
	for _, o := range Operations {
		if o.Body != nil && o.Body.Type == api.TypeJSON {
			s.reach(reflect.TypeOf(o.Body.Value))
		}
		for _, p := range o.Query {
			if p.JSON != nil {
				s.reach(reflect.TypeOf(p.JSON))
			}
		}
	}
	s.reach(reflect.TypeFor[api.ExecControl]())
	s.of(reflect.TypeFor[api.ExecControl]()) // frames of WebSockets, which no response refers to
	s.of(reflect.TypeFor[api.ExecEvent]())
	s.of(reflect.TypeFor[api.Flow]()) // lines of records, which `sandboxd policy` reads

	var paths object
	for _, o := range Operations {
		i := slices.IndexFunc(paths, func(m member) bool { return m.key == o.Path })
		if i < 0 {
			i = len(paths)
			paths = append(paths, member{o.Path, object{}})
		}
		item, _ := paths[i].value.(object)
		operation := s.operation(&o)
		item.set(strings.ToLower(o.Method), operation)
		paths[i].value = item
	}
	problem := s.of(reflect.TypeFor[api.Problem]())
	document := object{
		{"openapi", "3.1.0"},
		{"info", object{
			{"title", "sandboxd"},
			{"version", "1"},
			{"description", introduction},
			{"license", object{{"name", "Apache-2.0"}, {"identifier", "Apache-2.0"}}},
		}},
		{"servers", []object{{{"url", "http://sandboxd"}, {"description", "The daemon's Unix socket; the host name is not looked up."}}}},
		{"paths", paths},
		{"components", object{
			{"schemas", s.components()},
			{"responses", object{{"Problem", object{
				{"description", "An error."},
				{"content", object{{api.TypeProblem, object{{"schema", problem}}}}},
			}}}},
		}},
	}
	data, err := plain(document)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, data, "", "  "); err != nil {
		return nil, err
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

func (s *schemas) operation(o *Operation) object {
	out := object{{"operationId", o.ID}, {"tags", []string{o.Tag}}, {"summary", o.Summary}}
	out.set("description", o.Detail)
	var params []object
	for _, name := range wildcards(o.Path) {
		params = append(params, object{
			{"name", name},
			{"in", "path"},
			{"required", true},
			{"description", parameters[name]},
			{"schema", object{{"type", "string"}}},
		})
	}
	for _, p := range o.Query {
		params = append(params, s.parameter(&p))
	}
	out.set("parameters", params)
	if o.Body != nil {
		out.set("requestBody", s.body(o.Body))
	}
	var responses object
	for _, a := range o.Answers {
		status := strconv.Itoa(a.Status)
		i := slices.IndexFunc(responses, func(m member) bool { return m.key == status })
		if i < 0 {
			i = len(responses)
			detail := a.Detail
			if detail == "" {
				detail = http.StatusText(a.Status)
			}
			responses = append(responses, member{status, object{{"description", detail}}})
		}
		if a.Type != "" {
			response, _ := responses[i].value.(object)
			if len(response) == 1 {
				response.set("content", object{})
			}
			content, _ := response[1].value.(object)
			content.set(a.Type, s.media(&a))
			response[1].value = content
			responses[i].value = response
		}
	}
	if o.Socket {
		responses.set("101", object{{"description", "A WebSocket; its frames are described in docs/reference/websocket.md."}})
	}
	responses.set("default", object{{"$ref", "#/components/responses/Problem"}})
	out.set("responses", responses)
	return out
}

func (s *schemas) parameter(p *Parameter) object {
	schema := object{{"type", p.Type}}
	if p.JSON != nil {
		schema = s.of(reflect.TypeOf(p.JSON))
	}
	schema.set("enum", p.Enum)
	if p.Default != "" {
		schema.set("default", typed(p.Type, p.Default))
	}
	if p.Repeated {
		schema = object{{"type", "array"}, {"items", schema}}
	}
	out := object{{"name", p.Name}, {"in", "query"}, {"description", p.Detail}}
	if p.Required {
		out.set("required", true)
	}
	if p.JSON != nil {
		out.set("content", object{{api.TypeJSON, object{{"schema", schema}}}})
	} else {
		out.set("schema", schema)
	}
	return out
}

// typed turns a parameter's text into the JSON value of its type.
func typed(kind, text string) any {
	switch kind {
	case "boolean":
		return text == "true"
	case "integer":
		n, err := strconv.Atoi(text)
		if err != nil {
			panic(err)
		}
		return n
	}
	return text
}

func (s *schemas) body(b *Body) object {
	media := object{}
	if b.Type == api.TypeJSON {
		media = object{{"schema", s.of(reflect.TypeOf(b.Value))}, {"example", b.Value}}
	}
	out := object{{"content", object{{b.Type, media}}}}
	if b.Type != api.TypeJSON {
		text, _ := b.Value.(string)
		out = append(object{{"description", text}}, out...)
	}
	if !b.Optional {
		out.set("required", true)
	}
	return out
}

// media describes a response's content. OpenAPI 3.1 has no keyword for a stream of values, so the
// schema of JSON lines is that of one line.
func (s *schemas) media(a *Answer) object {
	if a.Value == nil {
		return object{}
	}
	schema := s.of(a.element())
	if a.Type != api.TypeNDJSON {
		return object{{"schema", schema}, {"example", a.Value}}
	}
	return object{{"schema", schema}, {"x-lines", true}, {"example", reflect.ValueOf(a.Value).Index(0).Interface()}}
}
