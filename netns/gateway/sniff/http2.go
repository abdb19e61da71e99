package sniff

import (
	"strings"
)

// connectional are the fields that say something about a connection of HTTP/1. In HTTP/2 they mean
// nothing, and a server that passes them on as HTTP/1 is split by them (RFC 9113 section 8.2.2).
var connectional = map[string]bool{
	"connection": true, "keep-alive": true, "proxy-connection": true, "transfer-encoding": true, "upgrade": true, "http2-settings": true,
}

// HTTP2Request checks the head of a request that came over HTTP/2, whose bytes a library has read.
// It is as strict as [ReadRequest], because the server may pass the request on over HTTP/1. It
// always returns the parts of the request that it understood.
//
// The fields have names in lower case, and none of them is a pseudo-header. absent is the length of
// a body that no field announces: 0 if the stream has ended, else -1.
func HTTP2Request(method, scheme, authority, target string, fields []Field, absent int64) (*Request, error) {
	q := &Request{Target: target, Fields: fields}
	if !validMethod(method) {
		return q, malformed("the method %q", method)
	}
	q.Method = method
	if method == "CONNECT" {
		q.Tunnel = true
	} else if scheme != "https" {
		return q, malformed("the scheme %q", scheme)
	}
	var err error
	if q.Host, err = parseHost(authority); err != nil {
		return q, err
	}
	if q.Tunnel {
		return q, nil
	}
	if err := checkTarget(target); err != nil {
		return q, err
	}
	if !strings.HasPrefix(target, "/") {
		return q, malformed("the target %q", target)
	}
	q.readPath(target)
	return q, q.readFields(authority, absent)
}

// readFields checks the fields of a request over HTTP/2.
func (q *Request) readFields(authority string, absent int64) error {
	size := 0
	for _, f := range q.Fields {
		if size += len(f.Name) + len(f.Value) + 4; size > maxHead {
			return malformed("a head of more than %d bytes", maxHead)
		}
		if err := f.check(); err != nil {
			return err
		}
		switch {
		case !token(f.Name) || lower(f.Name) != f.Name:
			return malformed("the field name %q", f.Name)
		case connectional[f.Name]:
			return malformed("the field %s, which HTTP/2 does not have", f.Name)
		case f.Name == "te" && f.Value != "trailers":
			return malformed("the field te with %q", f.Value)
		case f.Name == "host" && f.Value != authority:
			return malformed("the host %q and the authority %q", f.Value, authority)
		}
		for i := range len(f.Value) {
			if c := f.Value[i]; c < ' ' && c != '\t' || c == 0x7f {
				return malformed("the byte %q in its head", c)
			}
		}
	}
	if len(q.Fields) > maxFields {
		return malformed("more than %d fields", maxFields)
	}
	h := head{fields: q.Fields}
	var err error
	if q.Body, err = h.body(absent); err != nil {
		return err
	}
	expect, expects, err := h.one("expect")
	switch {
	case err != nil:
		return err
	case expects && lower(expect) != "100-continue":
		return malformed("the expectation %q", expect)
	}
	q.Continue = expects
	q.readRewrites()
	return nil
}
