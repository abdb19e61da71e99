package sniff

import (
	"bufio"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// Request is the head of a request.
type Request struct {
	// Raw is the head as it was sent, with the empty line at its end; nil if it came over HTTP/2.
	Raw []byte
	// Target is the target of the request line, or the path of HTTP/2.
	Target string
	// Fields are in the order in which they were sent.
	Fields []Field
	// Method has upper-case letters and hyphens only.
	Method string
	// Host is the server that the request names: its Host field, which an absolute target must repeat.
	Host Host
	// Path is the path of the target. It is the zero Path if PathError is set: a path matters only to
	// rules that ask for it, and names such as //debian are in use elsewhere.
	Path      policy.Path
	PathError error
	// Dotted reports that Target has "." as a segment, which Path has not: RemoveDots makes them agree.
	Dotted bool
	// Tunnel reports a target in the form of CONNECT, which has no path.
	Tunnel bool
	// Absolute reports a target with a scheme and a host.
	Absolute bool
	Body     Body
	// Upgrade is the protocol that the client wants to change to; empty if none.
	Upgrade string
	// Continue reports that the client waits for "100 Continue" before it sends the body.
	Continue bool
	// Rewrites is a field that makes some servers read another method or path than those of the
	// request line; empty if there is none.
	Rewrites string
}

// H2C is the upgrade to HTTP/2 without TLS. Java and curl ask for it with the first request of a
// connection, with a body too, and take HTTP/1.1.
const H2C = "h2c"

// Host is a server as a request names it: by a name or by an address.
type Host struct {
	Name policy.Name
	Addr netip.Addr
	Port uint16 // 0 if absent
}

func (h Host) String() string {
	s := h.Name.String()
	if h.Addr.IsValid() {
		s = h.Addr.String()
		if h.Addr.Is6() {
			s = "[" + s + "]"
		}
	}
	if h.Port != 0 {
		s += ":" + strconv.Itoa(int(h.Port))
	}
	return s
}

// rewriting are fields of frameworks: a method in the place of POST, a path in the place of the
// target's.
var rewriting = map[string]bool{
	"x-http-method-override": true, "x-http-method": true, "x-method-override": true,
	"x-original-url": true, "x-original-uri": true, "x-rewrite-url": true,
}

// ReadRequest reads the head of a request. It returns io.EOF if the connection ends before it.
//
// It refuses the forms that proxies and servers are known to read differently: a bare CR or LF,
// folded lines, space before a colon, no Host or two, Transfer-Encoding beside Content-Length,
// codings other than chunked, an absolute target with another host, lower-case methods, and other
// versions than 1.0 and 1.1.
func ReadRequest(r *bufio.Reader) (*Request, error) {
	h, err := readHead(r)
	if err != nil {
		return nil, err
	}
	parts := strings.Split(h.first, " ")
	if len(parts) != 3 {
		return nil, malformed("a request line of %d parts", len(parts))
	}
	q := &Request{Raw: h.raw, Method: parts[0], Target: parts[1], Fields: h.fields}
	version, err := minor(parts[2])
	if err != nil {
		return nil, err
	}
	if !validMethod(q.Method) {
		return nil, malformed("the method %q", q.Method)
	}
	if err := q.readHost(&h, parts[1]); err != nil {
		return nil, err
	}
	if q.Body, err = h.body(0); err != nil {
		return nil, err
	}
	if version == 0 && q.Body.Chunked {
		return nil, malformed("transfer-encoding in HTTP/1.0")
	}
	return q, q.readOptions(&h)
}

func validMethod(s string) bool {
	return s != "" && len(s) <= 32 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") == ""
}

// SetField replaces a field, or adds it, in Fields and in Raw. The name is in lower case.
func (q *Request) SetField(name, value string) {
	set := Field{name, value}
	q.Fields = append(slices.DeleteFunc(slices.Clone(q.Fields), func(f Field) bool { return f.Name == name }), set)
	if q.Raw == nil {
		return
	}
	lines := strings.SplitAfter(strings.TrimSuffix(string(q.Raw), "\r\n"), "\r\n")
	raw := []byte(lines[0])
	for _, line := range lines[1:] {
		if key, _, ok := strings.Cut(line, ":"); ok && lower(key) != name {
			raw = append(raw, line...)
		}
	}
	q.Raw = append(append(raw, name+": "+value+"\r\n"...), "\r\n"...)
}

// DropUpgrade removes the upgrade from Fields and from Raw, as a recipient may that wants none (RFC
// 9110 section 7.8). The request must have come over HTTP/1.
func (q *Request) DropUpgrade() {
	q.Upgrade = ""
	kept := func(f Field) (Field, bool) {
		switch f.Name {
		case "upgrade", "http2-settings":
			return f, false
		case "connection":
			options := slices.DeleteFunc(strings.Split(f.Value, ","), func(option string) bool {
				option = lower(strings.TrimSpace(option))
				return option == "" || option == "upgrade" || option == "http2-settings"
			})
			f.Value = strings.TrimSpace(strings.Join(options, ","))
			return f, f.Value != ""
		}
		return f, true
	}
	lines := strings.SplitAfter(strings.TrimSuffix(string(q.Raw), "\r\n"), "\r\n")
	raw, fields := []byte(lines[0]), q.Fields[:0:0]
	for i, f := range q.Fields { // a line each, behind the request line
		g, ok := kept(f)
		switch {
		case !ok:
			continue
		case g == f:
			raw = append(raw, lines[i+1]...)
		default:
			raw = append(raw, g.Name+": "+g.Value+"\r\n"...)
		}
		fields = append(fields, g)
	}
	raw = append(raw, "\r\n"...)
	q.Raw, q.Fields = raw, fields
}

// readHost reads the Host field and the target.
func (q *Request) readHost(h *head, target string) error {
	field, found, err := h.one("host")
	switch {
	case err != nil:
		return err
	case !found:
		return malformed("no host")
	}
	if q.Host, err = parseHost(field); err != nil {
		return err
	}
	if err := checkTarget(target); err != nil {
		return err
	}
	authority, path := "", target
	switch {
	case q.Method == "CONNECT":
		authority, q.Tunnel = target, true
	case strings.HasPrefix(target, "/"):
		authority = field
	case strings.HasPrefix(target, "http://"):
		authority, path, _ = strings.Cut(target[len("http://"):], "/")
		path, q.Absolute = "/"+path, true
	default:
		return malformed("the target %q", target)
	}
	if named, err := parseHost(authority); err != nil {
		return err
	} else if named != q.Host {
		return malformed("the host %s and a target of %s", q.Host, named)
	}
	if !q.Tunnel {
		q.readPath(path)
	}
	return nil
}

// readPath reads the path of a target. Segments "." are left out, as clients have to before they
// send it (RFC 3986 section 5.2.4): apt does not, for repositories such as "deb URL ./". All other
// forms that are read in several ways are refused, "%2E" too.
func (q *Request) readPath(target string) {
	path, _, _ := strings.Cut(target, "?")
	plain := withoutDots(path)
	q.Path, q.PathError = policy.ParsePath(plain)
	q.Dotted = plain != path
}

// withoutDots returns a path without the segments ".".
func withoutDots(path string) string {
	if !strings.Contains(path, "/.") {
		return path
	}
	segments := strings.Split(path, "/")
	if last := len(segments) - 1; segments[last] == "." {
		segments[last] = "" // a directory
	}
	return strings.Join(slices.DeleteFunc(segments, func(s string) bool { return s == "." }), "/")
}

// RemoveDots removes the segments "." from Target and from Raw, so that the server gets the path
// that rules are asked about.
func (q *Request) RemoveDots() {
	if !q.Dotted {
		return
	}
	before, origin := q.Target, ""
	if q.Absolute {
		authority, _, _ := strings.Cut(q.Target[len("http://"):], "/")
		origin = "http://" + authority
	}
	path, query, asks := strings.Cut(q.Target[len(origin):], "?")
	q.Target = origin + withoutDots(path)
	if asks {
		q.Target += "?" + query
	}
	q.Dotted = false
	if q.Raw != nil { // the request line comes first: method, target, version
		rest := q.Raw[len(q.Method)+len(" ")+len(before):]
		q.Raw = slices.Concat([]byte(q.Method+" "+q.Target), rest)
	}
}

func checkTarget(target string) error {
	for i := range len(target) {
		if c := target[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return malformed("the byte %q in its target", c)
		}
	}
	return nil
}

// parseHost reads a host with an optional port. Addresses have one form each: the one that netip
// prints.
func parseHost(s string) (Host, error) {
	var h Host
	host := s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		host = s[:i]
		port, err := strconv.ParseUint(s[i+1:], 10, 16)
		if err != nil || s[i+1] == '0' || s[i+1] == '+' {
			return Host{}, malformed("the host %q, whose port is no number from 1 to 65535", s)
		}
		h.Port = uint16(port)
	}
	literal, bracketed := strings.CutPrefix(host, "[")
	if bracketed {
		literal, bracketed = strings.CutSuffix(literal, "]")
	}
	if addr, err := netip.ParseAddr(literal); err == nil && addr.Zone() == "" && addr.String() == literal && addr.Is6() == bracketed {
		h.Addr = addr
		return h, nil
	}
	name, err := policy.ParseName(host)
	if err != nil {
		return Host{}, malformed("the host %q: %v", s, err)
	}
	h.Name = name
	return h, nil
}

// readOptions reads the fields that change the connection or the meaning of the request.
func (q *Request) readOptions(h *head) error {
	options, err := h.connection()
	if err != nil {
		return err
	}
	upgrade, upgrades, err := h.one("upgrade")
	switch {
	case err != nil:
		return err
	case upgrades && upgrade == "":
		return malformed("an empty upgrade")
	case upgrades != options["upgrade"]:
		return malformed("upgrade in one of the fields upgrade and connection only")
	case upgrades && lower(upgrade) != H2C && (q.Body.Chunked || q.Body.Length != 0):
		return malformed("an upgrade and a body")
	}
	q.Upgrade = lower(upgrade)
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

func (q *Request) readRewrites() {
	for _, f := range q.Fields {
		if rewriting[strings.ReplaceAll(f.Name, "_", "-")] {
			q.Rewrites = f.Name
		}
	}
}

// Response is the head of an HTTP/1 response.
type Response struct {
	// Raw is the head as it was sent, with the empty line at its end.
	Raw []byte
	// Status is a number from 100 to 599.
	Status int
	Body   Body
	// Close reports that the server announces the end of the connection after this response.
	Close bool
}

// ReadResponse reads the head of a response to a request of a method. It returns io.EOF if the
// connection ends before it. It is as strict as [ReadRequest] about where the body ends, because a
// gateway that loses the place would take a part of one response for the next.
func ReadResponse(r *bufio.Reader, method string) (*Response, error) {
	h, err := readHead(r)
	if err != nil {
		return nil, err
	}
	version, rest, _ := strings.Cut(h.first, " ")
	if _, err := minor(version); err != nil {
		return nil, err
	}
	code, _, _ := strings.Cut(rest, " ")
	status, err := strconv.Atoi(code)
	if err != nil || len(code) != 3 || status < 100 || status > 599 {
		return nil, malformed("the status %q", code)
	}
	p := &Response{Raw: h.raw, Status: status, Close: h.announcesClose()}
	if p.Body, err = h.body(-1); err != nil {
		return nil, err
	}
	if method == "HEAD" || status < 200 || status == 204 || status == 304 {
		p.Body = Body{} // whatever the fields say (RFC 9112 section 6.3)
	}
	return p, nil
}
