package sniff

import (
	"bufio"
	"errors"
	"io"
	"strconv"
	"strings"
)

const (
	maxHead   = 64 << 10
	maxFields = 256
	// maxLengthDigits bounds a Content-Length, so that all fit into an int64.
	maxLengthDigits = 18
)

// Body is the framing of a message body.
type Body struct {
	// Length is the number of bytes, or -1 if Chunked is set or the body ends with the connection.
	Length int64
	// Chunked reports the chunked coding, which [ReadChunk] follows.
	Chunked bool
}

// A head is the lines of a message up to the empty one.
type head struct {
	raw    []byte
	first  string
	fields []Field
}

// Field is a field of a head.
type Field struct {
	Name  string // in lower case
	Value string // without white space around it
}

// readHead reads a head whose lines end in CR LF. It returns io.EOF if the connection ends before
// the first byte.
func readHead(r *bufio.Reader) (head, error) {
	var h head
	for {
		start := len(h.raw)
		line, err := h.readLine(r)
		switch {
		case err != nil:
			return h, err
		case start == 0 && line == "":
			return h, malformed("an empty line in the place of its first")
		case start == 0:
			h.first = line
			continue
		case line == "":
			return h, nil
		case len(h.fields) == maxFields:
			return h, malformed("more than %d fields", maxFields)
		}
		f, err := parseField(line)
		if err != nil {
			return h, err
		}
		h.fields = append(h.fields, f)
	}
}

// readLine appends a line to raw and returns it without its end.
func (h *head) readLine(r *bufio.Reader) (string, error) {
	start := len(h.raw)
	for {
		part, err := r.ReadSlice('\n')
		h.raw = append(h.raw, part...)
		switch {
		case len(h.raw) > maxHead:
			return "", malformed("a head of more than %d bytes", maxHead)
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF) && len(h.raw) > 0:
			return "", io.ErrUnexpectedEOF
		case err != nil:
			return "", err
		}
		line, ok := strings.CutSuffix(string(h.raw[start:]), "\r\n")
		if !ok {
			return "", malformed("a line that ends in LF without CR")
		}
		for i := range len(line) {
			if c := line[i]; c < ' ' && c != '\t' || c == 0x7f {
				return "", malformed("the byte %q in its head", c)
			}
		}
		return line, nil
	}
}

func parseField(line string) (Field, error) {
	name, value, ok := strings.Cut(line, ":")
	switch {
	case line[0] == ' ' || line[0] == '\t':
		return Field{}, malformed("a field that goes on in a second line")
	case !ok:
		return Field{}, malformed("a line without a colon in its head")
	case !token(name):
		return Field{}, malformed("the field name %q", name)
	}
	f := Field{lower(name), strings.Trim(value, " \t")}
	return f, f.check()
}

// check refuses what other programs read as one of the decisive fields, or as another value of one.
func (f Field) check() error {
	if strings.Contains(f.Name, "_") && decisive[strings.ReplaceAll(f.Name, "_", "-")] {
		// Gateways of CGI and WSGI read an underscore as a hyphen.
		return malformed("the field name %q", f.Name)
	}
	if decisive[f.Name] {
		for i := range len(f.Value) {
			if c := f.Value[i]; c == '\t' || c >= 0x80 {
				return malformed("the byte %q in the field %s", c, f.Name)
			}
		}
	}
	return nil
}

// decisive are the fields that say where a message goes, where it ends and what becomes of its
// connection.
var decisive = map[string]bool{
	"host": true, "content-length": true, "transfer-encoding": true, "connection": true, "upgrade": true, "expect": true,
	"te": true, "trailer": true, "keep-alive": true, "proxy-connection": true, "http2-settings": true,
}

// one returns the value of a field that occurs at most once.
func (h *head) one(name string) (value string, found bool, err error) {
	for _, f := range h.fields {
		if f.Name != name {
			continue
		}
		if found {
			return "", false, malformed("the field %s twice", name)
		}
		value, found = f.Value, true
	}
	return value, found, nil
}

// body reads the framing. absent is the length of a body that no field announces.
func (h *head) body(absent int64) (Body, error) {
	coding, coded, err1 := h.one("transfer-encoding")
	length, counted, err2 := h.one("content-length")
	switch {
	case err1 != nil || err2 != nil:
		return Body{}, errors.Join(err1, err2)
	case coded && counted:
		return Body{}, malformed("both transfer-encoding and content-length")
	case coded && lower(coding) != "chunked":
		return Body{}, malformed("the transfer-encoding %q", coding)
	case coded:
		return Body{Length: -1, Chunked: true}, nil
	case !counted:
		return Body{Length: absent}, nil
	}
	n, err := parseLength(length)
	return Body{Length: n}, err
}

func parseLength(s string) (int64, error) {
	if s == "" || len(s) > maxLengthDigits || strings.Trim(s, "0123456789") != "" || s[0] == '0' && s != "0" {
		return 0, malformed("the content-length %q", s)
	}
	return strconv.ParseInt(s, 10, 64)
}

// connection returns the options of the Connection fields, in lower case.
func (h *head) connection() (options map[string]bool, err error) {
	options = make(map[string]bool)
	for _, f := range h.fields {
		if f.Name != "connection" {
			continue
		}
		for option := range strings.SplitSeq(f.Value, ",") {
			option = lower(strings.TrimSpace(option))
			switch {
			case option == "": // a list may have empty elements (RFC 9110 section 5.6.1.2)
			case !token(option):
				return nil, malformed("the connection option %q", option)
			case option == "host" || option == "content-length" || option == "transfer-encoding":
				// A proxy behind us would remove the field.
				return nil, malformed("the connection option %q", option)
			default:
				options[option] = true
			}
		}
	}
	return options, nil
}

// announcesClose reports whether a Connection field has the option close.
func (h *head) announcesClose() bool {
	for _, f := range h.fields {
		if f.Name != "connection" {
			continue
		}
		for option := range strings.SplitSeq(f.Value, ",") {
			if lower(strings.TrimSpace(option)) == "close" {
				return true
			}
		}
	}
	return false
}

// minor returns the x of HTTP/1.x.
func minor(version string) (int, error) {
	switch version {
	case "HTTP/1.1":
		return 1, nil
	case "HTTP/1.0":
		return 0, nil
	}
	return 0, malformed("the version %q", version)
}

// token reports whether s is a token of RFC 9110 section 5.6.2.
func token(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return s != ""
}

func tokenByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// lower folds ASCII only: strings.ToLower also folds the Kelvin sign to k.
func lower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// Decisive reports whether a field, in lower case, says where a message goes, where it ends, what
// becomes of its connection, or that it is another request than it looks like. Trailers and secrets
// must not be such fields.
func Decisive(name string) bool {
	return decisive[name] || connectional[name] || rewriting[strings.ReplaceAll(name, "_", "-")]
}
