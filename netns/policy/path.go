package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Path is the path of an HTTP request in the form that rules compare.
type Path struct {
	s string
	// slashed is s with each %2F read as a separator. Servers differ in this, and npm's clients send
	// it, so a rule that allows must cover both readings, and one that denies either.
	slashed string
}

const maxPath = 8192

// ParsePath reads the path of a request target, without its query. Encodings of characters that
// have a plain form are undone, as most servers undo them (RFC 3986 section 6.2.2). It refuses what
// servers read as another path: "." and ".." as segments, empty segments but the last, semicolons,
// backslashes, control bytes, and encoded percent signs, which some decode twice.
func ParsePath(s string) (Path, error) {
	switch {
	case s == "" || s[0] != '/':
		return Path{}, errors.New("path does not begin with /")
	case len(s) > maxPath:
		return Path{}, fmt.Errorf("path of %d bytes, more than %d", len(s), maxPath)
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		c, encoded := s[i], false
		if c == '%' {
			if i+2 >= len(s) {
				return Path{}, errors.New("path with a cut percent encoding")
			}
			high, low := hexDigit(s[i+1]), hexDigit(s[i+2])
			if high < 0 || low < 0 {
				return Path{}, fmt.Errorf("path with the percent encoding %q", s[i:i+3])
			}
			c, encoded = byte(high<<4|low), true //nolint:gosec // G115: two digits
			i += 2
		}
		switch {
		case c < ' ', c == 0x7f, c == '\\', c == ';', c == '%':
			return Path{}, fmt.Errorf("path with the byte %q", c)
		case plain(c), c == '/' && !encoded:
			b.WriteByte(c)
		case encoded:
			fmt.Fprintf(&b, "%%%02X", c)
		default:
			return Path{}, fmt.Errorf("path with the unencoded byte %q", c)
		}
	}
	p := Path{s: b.String()}
	p.slashed = strings.ReplaceAll(p.s, "%2F", "/")
	segments := strings.Split(p.slashed[1:], "/")
	for i, seg := range segments {
		if seg == "." || seg == ".." || seg == "" && i != len(segments)-1 {
			return Path{}, fmt.Errorf("path with the segment %q", seg)
		}
	}
	return p, nil
}

// hexDigit returns the value of a hexadecimal digit, or -1.
func hexDigit(c byte) int {
	if 'A' <= c && c <= 'F' {
		c += 'a' - 'A'
	}
	return strings.IndexByte("0123456789abcdef", c)
}

// plain reports whether a segment may hold the byte as it is: pchar of RFC 3986 without the
// semicolon.
func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~!$&'()*+,=:@", c) >= 0
}

// String returns the path as rules compare it.
func (p Path) String() string { return p.s }

// A pathPattern matches whole segments. "*" in the place of one stands for any one; at the end it
// stands for all that may follow.
type pathPattern struct {
	segments []string
	prefix   bool // segments are only the first of a path
}

func parsePathPattern(s string) (pathPattern, error) {
	p, err := ParsePath(s)
	switch {
	case err != nil:
		return pathPattern{}, fmt.Errorf("path %q: %w", s, err)
	case p.s != p.slashed:
		return pathPattern{}, fmt.Errorf("path %q: write / in the place of %%2F; rules cover both", s)
	}
	pattern := pathPattern{segments: strings.Split(p.s[1:], "/")}
	for _, seg := range pattern.segments {
		if seg != "*" && strings.Contains(seg, "*") {
			return pathPattern{}, fmt.Errorf("path %q: a * stands for whole segments, as in /simple/*", s)
		}
	}
	if last := len(pattern.segments) - 1; pattern.segments[last] == "*" {
		pattern.segments, pattern.prefix = pattern.segments[:last], true
	}
	return pattern, nil
}

// String returns the pattern as documents have it.
func (p pathPattern) String() string {
	segments := p.segments
	if p.prefix {
		segments = append(slices.Clone(segments), "*")
	}
	return "/" + strings.Join(segments, "/")
}

// covers reports whether both readings of a path match.
func (p pathPattern) covers(path Path) bool { return p.matches(path.s) && p.matches(path.slashed) }

// touches reports whether either reading matches.
func (p pathPattern) touches(path Path) bool { return p.matches(path.s) || p.matches(path.slashed) }

func (p pathPattern) matches(s string) bool {
	segments := strings.Split(s[1:], "/")
	if len(segments) < len(p.segments) || p.prefix == (len(segments) == len(p.segments)) {
		return false
	}
	for i, want := range p.segments {
		if want != "*" && want != segments[i] {
			return false
		}
	}
	return true
}

// example returns a path that the pattern matches, with fresh in the place of each "*".
func (p pathPattern) example(fresh string) Path {
	segments := strings.Split(strings.ReplaceAll(strings.Join(p.segments, "/"), "*", fresh), "/")
	if p.prefix {
		segments = append(segments, fresh)
	}
	s := "/" + strings.TrimPrefix(strings.Join(segments, "/"), "/")
	return Path{s, s}
}

// unify returns the pattern of the paths that both match, and false if there is none.
func (p pathPattern) unify(q pathPattern) (pathPattern, bool) {
	if len(p.segments) > len(q.segments) {
		p, q = q, p
	}
	if !p.prefix && (q.prefix || len(p.segments) != len(q.segments)) || p.prefix && !q.prefix && len(p.segments) == len(q.segments) {
		return pathPattern{}, false
	}
	both := pathPattern{segments: slices.Clone(q.segments), prefix: p.prefix && q.prefix}
	for i, want := range p.segments {
		switch both.segments[i] {
		case "*":
			both.segments[i] = want
		case want:
		default:
			if want != "*" {
				return pathPattern{}, false
			}
		}
	}
	return both, true
}

// key identifies a pattern among others.
func (p pathPattern) key() string { return fmt.Sprint(p.prefix, p.segments) }
