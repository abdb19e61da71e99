package policy

import (
	"errors"
	"fmt"
	"strings"
)

// Name is a host name in the one form that policies compare: lower-case labels of letters, digits
// and inner hyphens, without a trailing dot. The zero Name stands for a connection to an address
// that was not resolved for the client.
type Name struct{ s string }

const (
	maxName  = 253 // bytes, RFC 1035 section 2.3.4 less the root's byte
	maxLabel = 63
)

// ParseName reads a host name as it comes from a DNS question, a TLS server name or a Host header
// without its port. It refuses what resolvers, libraries and servers read differently: empty or
// long labels, a trailing dot, bytes outside of letters, digits and hyphens (so NUL, underscores,
// spaces and Unicode), and names whose last label is a number, which some take for an IPv4 address
// in decimal, octal or hexadecimal.
func ParseName(s string) (Name, error) { return parseName(s, false) }

// ParsePeerName is [ParseName] for names of other sandboxes, which may have underscores. No policy
// is asked about such a name.
func ParsePeerName(s string) (Name, error) { return parseName(s, true) }

func parseName(s string, underscores bool) (Name, error) {
	switch {
	case s == "":
		return Name{}, errors.New("empty host name")
	case len(s) > maxName:
		return Name{}, fmt.Errorf("host name of %d bytes, more than %d", len(s), maxName)
	}
	labels := strings.Split(lower(s), ".")
	for _, l := range labels {
		if underscores {
			l = strings.ReplaceAll(l, "_", "x")
		}
		if err := checkLabel(l); err != nil {
			return Name{}, fmt.Errorf("host name %q: %w", s, err)
		}
	}
	if numeric(labels[len(labels)-1]) {
		return Name{}, fmt.Errorf("host name %q ends in a number and may be read as an address", s)
	}
	return Name{strings.Join(labels, ".")}, nil
}

func checkLabel(l string) error {
	switch {
	case l == "":
		return errors.New("empty label")
	case len(l) > maxLabel:
		return fmt.Errorf("label of %d bytes, more than %d", len(l), maxLabel)
	case l[0] == '-' || l[len(l)-1] == '-':
		return fmt.Errorf("label %q begins or ends with a hyphen", l)
	}
	for i := range len(l) {
		switch c := l[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-':
		case c >= 0x80:
			return errors.New("byte outside of ASCII; write an international name in its xn-- form")
		default:
			return fmt.Errorf("byte %q is no letter, digit or hyphen", c)
		}
	}
	return nil
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

// numeric reports whether a host parser takes the last label for a part of an IPv4 address: decimal
// and octal digits, or 0x with hexadecimal digits or none (WHATWG URL, "ends in a number").
func numeric(label string) bool {
	if hex, ok := strings.CutPrefix(label, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(label, "0123456789") == ""
}

// String returns the name, or "" for the zero Name.
func (n Name) String() string { return n.s }

// IsZero reports whether the name is absent.
func (n Name) IsZero() bool { return n.s == "" }

// A pattern is an exact name, "*." with a suffix, or "*" alone.
type pattern struct {
	name     string // exact, or the suffix
	wildcard bool   // with an empty name: every name
}

func parsePattern(s string) (pattern, error) {
	if s == "*" {
		return pattern{wildcard: true}, nil
	}
	rest, wildcard := strings.CutPrefix(s, "*.")
	if strings.Contains(rest, "*") {
		return pattern{}, fmt.Errorf("host %q: a * stands for whole labels at the beginning only, as in *.example.com", s)
	}
	n, err := ParseName(rest)
	if err != nil {
		return pattern{}, err
	}
	if n.s == "localhost" || strings.HasSuffix(n.s, ".localhost") {
		return pattern{}, fmt.Errorf("host %q is the sandbox itself (RFC 6761) and needs no rule", s)
	}
	return pattern{n.s, wildcard}, nil
}

// matches reports whether the pattern covers a name. A suffix covers the names below it, at any
// depth, and not itself.
func (p pattern) matches(n Name) bool {
	switch {
	case n.IsZero():
		return false
	case !p.wildcard:
		return n.s == p.name
	case p.name == "":
		return true
	default:
		return len(n.s) > len(p.name)+1 && strings.HasSuffix(n.s, p.name) && n.s[len(n.s)-len(p.name)-1] == '.'
	}
}

func (p pattern) String() string {
	switch {
	case !p.wildcard:
		return p.name
	case p.name == "":
		return "*"
	default:
		return "*." + p.name
	}
}
