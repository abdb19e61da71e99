package openapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// object is a JSON object whose members keep their order.
type object []member

type member struct {
	key   string
	value any
}

// MarshalJSON writes the members in their order.
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:", m.key)
		data, err := plain(m.value)
		if err != nil {
			return nil, err
		}
		b.Write(data)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// plain is json.Marshal without the escapes for HTML.
func plain(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// set appends the member unless the value is an empty text or list.
func (o *object) set(key string, value any) {
	if _, ok := value.(object); !ok {
		if v := reflect.ValueOf(value); (v.Kind() == reflect.String || v.Kind() == reflect.Slice) && v.Len() == 0 {
			return
		}
	}
	*o = append(*o, member{key, value})
}

// schemas collects the named types of the API.
type schemas struct {
	comments *Comments
	requests map[reflect.Type]bool // types that a client sends: unknown fields are refused
	seen     map[string]reflect.Type
}

var (
	timeType = reflect.TypeFor[time.Time]()
	rawType  = reflect.TypeFor[json.RawMessage]()
)

// of returns the schema of t: a reference if t is a named type of the API.
func (s *schemas) of(t reflect.Type) object {
	switch {
	case t == timeType:
		return object{{"type", "string"}, {"format", "date-time"}}
	case t == rawType:
		return object{{"description", "Any JSON value."}}
	case t.Kind() == reflect.Pointer:
		return s.of(t.Elem())
	case t.PkgPath() != "" && (t.Kind() == reflect.Struct || t.Kind() == reflect.String):
		if known, ok := s.seen[t.Name()]; ok && known != t {
			panic("two types are called " + t.Name())
		}
		s.seen[t.Name()] = t
		return object{{"$ref", "#/components/schemas/" + t.Name()}}
	}
	switch t.Kind() { //nolint:exhaustive // other kinds are no types of the API
	case reflect.String:
		return object{{"type", "string"}}
	case reflect.Bool:
		return object{{"type", "boolean"}}
	case reflect.Interface: // any JSON value; the field's comment says which
		return object{}
	case reflect.Float64:
		return object{{"type", "number"}}
	case reflect.Int, reflect.Int64:
		return object{{"type", "integer"}, {"format", "int64"}}
	case reflect.Uint16:
		return object{{"type", "integer"}, {"minimum", 0}, {"maximum", 65535}}
	case reflect.Uint32, reflect.Uint64:
		return object{{"type", "integer"}, {"minimum", 0}}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return object{{"type", "string"}, {"contentEncoding", "base64"}}
		}
		return object{{"type", "array"}, {"items", s.of(t.Elem())}}
	case reflect.Map:
		if t.Elem().Kind() == reflect.Interface {
			return object{{"type", "object"}}
		}
		value := s.of(t.Elem())
		if t.Elem().Kind() == reflect.Pointer { // null removes the member
			value = object{{"type", []string{"string", "null"}}}
		}
		return object{{"type", "object"}, {"additionalProperties", value}}
	}
	panic("no schema for " + t.String())
}

// define returns the schema of the named type t itself.
func (s *schemas) define(t reflect.Type) object {
	var o object
	o.set("description", s.comments.Types[t.Name()])
	if t.Kind() == reflect.String {
		o.set("type", "string")
		var values []string
		for _, v := range s.comments.Values[t.Name()] {
			values = append(values, v.Value)
		}
		o.set("enum", values)
		return o
	}
	var properties object
	var required []string
	s.fields(t, &properties, &required)
	o.set("type", "object")
	o = append(o, member{"properties", properties})
	o.set("required", required)
	if s.requests[t] {
		o.set("additionalProperties", false)
	}
	return o
}

// fields adds the properties of t; those of an embedded struct are t's own, as encoding/json has
// it.
func (s *schemas) fields(t reflect.Type, properties *object, required *[]string) {
	for f := range t.Fields() {
		if f.Anonymous {
			s.fields(f.Type, properties, required)
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue // in no JSON
		}
		property := s.of(f.Type)
		if text := s.comments.Fields[t.Name()+"."+f.Name]; text != "" {
			property = append(property, member{"description", text})
		}
		properties.set(name, property)
		if !strings.Contains(options, "omit") {
			*required = append(*required, name)
		}
	}
}

// reach marks t and every struct below it as sent by clients.
func (s *schemas) reach(t reflect.Type) {
	switch t.Kind() { //nolint:exhaustive // nothing lies below the rest
	case reflect.Pointer, reflect.Slice, reflect.Map:
		s.reach(t.Elem())
	case reflect.Struct:
		if t == timeType || s.requests[t] {
			return
		}
		s.requests[t] = true
		for f := range t.Fields() {
			s.reach(f.Type)
		}
	}
}

// components returns all schemas that were referred to, and those that they refer to, by name.
func (s *schemas) components() object {
	done := map[string]object{}
	for len(done) < len(s.seen) {
		for name, t := range s.seen {
			if done[name] == nil {
				done[name] = s.define(t)
				break // define may have added to seen
			}
		}
	}
	var names []string
	for name := range done {
		names = append(names, name)
	}
	slices.Sort(names)
	var o object
	for _, name := range names {
		o.set(name, done[name])
	}
	return o
}
