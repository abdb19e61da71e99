package openapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

const generated = "<!-- Generated from api/openapi by `go test ./api/openapi -update`. -->\n\n"

// Reference returns [Operations] as Markdown.
func Reference(comments *Comments) (string, error) {
	var b strings.Builder
	b.WriteString("# API\n\n" + generated)
	b.WriteString("HTTP/1.1 and JSON over the daemon's Unix socket: `$XDG_RUNTIME_DIR/sandboxd/api.sock`, as root `/run/sandboxd/api.sock`.\n" +
		"The same as an OpenAPI 3.1 document: [openapi.json](openapi.json). The Go client is [api/client](../../api/client).\n\n" +
		"- Only the daemon's uid and root are let in, by the socket's peer credentials.\n" +
		"- Requests of web pages of other sites are refused, should a program forward a port to the socket: with an `Origin` other than the host asked, with `Sec-Fetch-Site`, or with a name of the DNS as `Host`. Send a word, such as `sandboxd`, or an address.\n" +
		"- Unknown fields and query parameters are refused.\n" +
		"- JSON bodies have at most 1 MiB, of execs 24 MiB, of agent runs 8 MiB. Files, archives and contexts have any length.\n" +
		"- Errors are `application/problem+json`: [error codes](errors.md).\n" +
		"- Paths are absolute, without `..`, and resolved inside the sandbox. A path that is no UTF-8 has a second field, `path_bytes`, in base64.\n" +
		"- A body marked optional may be left out.\n\n")
	b.WriteString("From a shell:\n\n```sh\n" +
		"curl -s --unix-socket $XDG_RUNTIME_DIR/sandboxd/api.sock http://sandboxd/v1/system\n```\n")
	tag := ""
	for _, o := range Operations {
		if o.Tag != tag {
			tag = o.Tag
			fmt.Fprintf(&b, "\n## %s\n\n| route | |\n|---|---|\n", tag)
			for _, other := range Operations {
				if other.Tag == tag {
					fmt.Fprintf(&b, "| [`%s %s`](#%s) | %s |\n", other.Method, other.Path, anchor(other.ID), other.Summary)
				}
			}
		}
		if err := writeOperation(&b, &o, comments); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

// anchor is the fragment of a heading, as GitHub makes it.
func anchor(heading string) string { return strings.ReplaceAll(strings.ToLower(heading), " ", "-") }

func writeOperation(b *strings.Builder, o *Operation, comments *Comments) error {
	fmt.Fprintf(b, "\n### %s\n\n`%s %s`\n\n%s.\n", o.ID, o.Method, o.Path, o.Summary)
	if o.Detail != "" {
		fmt.Fprintf(b, "\n%s\n", o.Detail)
	}
	if len(o.Query) > 0 {
		b.WriteString("\n| parameter | type | default | |\n|---|---|---|---|\n")
		for _, p := range o.Query {
			kind := p.Type
			if p.JSON != nil {
				kind = "[" + reflect.TypeOf(p.JSON).Name() + "](#" + anchor(o.ID) + ") as JSON"
			}
			if p.Repeated {
				kind += ", repeatable"
			}
			fallback := "`" + p.Default + "`"
			switch {
			case p.Required:
				fallback = "required"
			case p.Default == "":
				fallback = ""
			}
			fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", p.Name, kind, fallback, p.Detail)
		}
	}
	for _, p := range o.Query {
		if p.JSON != nil {
			writeFields(b, reflect.TypeOf(p.JSON), comments)
		}
	}
	if o.Body != nil && o.Body.Type == api.TypeJSON {
		writeFields(b, reflect.TypeOf(o.Body.Value), comments)
	}
	if o.Socket && len(o.Answers) == 0 {
		return nil
	}
	b.WriteString("\n```http\n" + o.Method + " " + o.Target(Names) + "\n")
	if o.Body != nil {
		optional := ""
		if o.Body.Optional {
			optional = " (optional)"
		}
		fmt.Fprintf(b, "Content-Type: %s%s\n\n", o.Body.Type, optional)
		if err := writeValue(b, o.Body.Type, o.Body.Value); err != nil {
			return err
		}
	}
	for _, a := range o.Answers {
		fmt.Fprintf(b, "\nHTTP/1.1 %d %s\n", a.Status, http.StatusText(a.Status))
		if a.Type != "" {
			fmt.Fprintf(b, "Content-Type: %s\n", a.Type)
		}
		if a.Value != nil {
			b.WriteString("\n")
			if err := writeValue(b, a.Type, a.Value); err != nil {
				return err
			}
		}
	}
	b.WriteString("```\n")
	return nil
}

// writeValue writes an example: JSON indented, JSON lines one a line, and bytes as they are
// described.
func writeValue(b *strings.Builder, mediaType string, v any) error {
	switch mediaType {
	case api.TypeJSON:
		data, err := plain(v)
		if err != nil {
			return err
		}
		if len(data) < 100 {
			b.Write(data)
			b.WriteByte('\n')
			return nil
		}
		var indented bytes.Buffer
		if err := json.Indent(&indented, data, "", "  "); err != nil {
			return err
		}
		b.WriteString(indented.String() + "\n")
	case api.TypeNDJSON:
		for _, event := range reflect.ValueOf(v).Seq2() {
			data, err := plain(event.Interface())
			if err != nil {
				return err
			}
			b.Write(append(data, '\n'))
		}
	default:
		fmt.Fprintf(b, "%s\n", strings.TrimSuffix(fmt.Sprint(v), "\n"))
	}
	return nil
}

// writeFields writes the fields of a request, with those of the structs in it.
func writeFields(b *strings.Builder, t reflect.Type, comments *Comments) {
	if t.NumField() == 0 {
		return
	}
	b.WriteString("\n| field | type | |\n|---|---|---|\n")
	writeRows(b, t, "", comments)
}

func writeRows(b *strings.Builder, t reflect.Type, prefix string, comments *Comments) {
	for f := range t.Fields() {
		if f.Anonymous {
			writeRows(b, f.Type, prefix, comments)
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue // in no JSON
		}
		if !strings.Contains(options, "omit") {
			options = ", required"
		} else {
			options = ""
		}
		text := strings.ReplaceAll(strings.ReplaceAll(comments.Fields[t.Name()+"."+f.Name], "\n\n", " "), "|", "\\|")
		fmt.Fprintf(b, "| `%s` | %s%s | %s |\n", prefix+name, jsonType(f.Type), options, text)
		if f.Type.Kind() == reflect.Struct && f.Type != timeType {
			writeRows(b, f.Type, prefix+name+".", comments)
		}
	}
}

// jsonType names a type as readers of JSON know it.
func jsonType(t reflect.Type) string {
	switch t.Kind() { //nolint:exhaustive // the rest are integers
	case reflect.Pointer:
		return jsonType(t.Elem())
	case reflect.Bool:
		return "boolean"
	case reflect.String:
		return "string"
	case reflect.Float64:
		return "number"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return "base64"
		}
		return "list of " + jsonType(t.Elem()) + "s"
	case reflect.Map, reflect.Struct, reflect.Interface:
		return "object"
	default:
		return "integer"
	}
}

// Errors returns the error codes as Markdown.
func Errors(comments *Comments) string {
	var b strings.Builder
	b.WriteString("# Error codes\n\n" + generated)
	b.WriteString("Every error is an `application/problem+json` document (RFC 9457) with one code of this closed list:\n\n" +
		"```json\n{\"code\":\"program_not_found\",\"title\":\"Program not found\",\"status\":422,\"detail\":\"find \\\"pyton3\\\": no such file or directory\"," +
		"\"hint\":\"argv[0] is looked up in the sandbox's PATH; no shell is involved\"}\n```\n\n" +
		"`detail` names what was being done, and to what. `hint` says what to do. A stream that has begun reports its error in its last line.\n\n" +
		"| code | status | |\n|---|---|---|\n")
	for _, v := range comments.Values["Code"] {
		status := fmt.Sprint(api.Code(v.Value).Status())
		if api.Code(v.Value) == api.CodeInvalid {
			status += ", or 405 and 416 where HTTP has them"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.Value, status, strings.ReplaceAll(v.Comment, "|", "\\|"))
	}
	b.WriteString("\nIn Go, compare with `errors.Is(err, &api.Problem{Code: api.CodeNotFound})`.\n")
	return b.String()
}
