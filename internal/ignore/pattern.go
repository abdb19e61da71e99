package ignore

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// pattern is one line of a file of patterns.
type pattern struct {
	negated bool // takes back what earlier lines ignore
	dir     bool // is about directories only
	base    bool // is compared with the last name of a path, at any depth; otherwise with the path
	literal string
	glob    glob   // compared with what follows literal; nil if nothing may follow
	tail    string // ends whatever the glob matches
}

var (
	errClimbs  = errors.New(`"." and ".." are no names of files, so it would match nothing; paths begin at the directory of the file`)
	errBroken  = errors.New("a bracket or a backslash is not closed, so it would match nothing")
	errNothing = errors.New("it names nothing")
)

// parse reads patterns as git does. A strict reader refuses a line that could never match: its
// author would believe that it hides something. Git passes over such lines.
func parse(data []byte, strict bool) ([]pattern, error) {
	var out []pattern
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	n := 0
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		n++
		text := string(line)
		if at := strings.IndexByte(text, 0); at >= 0 {
			if strict {
				return nil, fmt.Errorf("line %d: a NUL: not a file of patterns", n)
			}
			text = text[:at]
		}
		if strings.HasPrefix(text, "#") {
			continue
		}
		text = trimSpaces(strings.TrimSuffix(text, "\r"))
		if text == "" {
			continue
		}
		p, err := parseLine(text)
		if err != nil && strict {
			return nil, fmt.Errorf("line %d: %q: %w", n, text, err)
		}
		if !errors.Is(err, errBroken) {
			out = append(out, p)
		}
		if len(out) > maxPatterns {
			return nil, fmt.Errorf("more than %d patterns", maxPatterns)
		}
	}
	return out, nil
}

// trimSpaces cuts spaces off the end, except one behind a backslash.
func trimSpaces(text string) string {
	end := len(text)
	for end > 0 && text[end-1] == ' ' {
		end--
	}
	escapes := 0
	for escapes < end && text[end-1-escapes] == '\\' {
		escapes++
	}
	if escapes%2 == 1 && end < len(text) {
		end++
	}
	return text[:end]
}

func parseLine(text string) (pattern, error) {
	var p pattern
	text, p.negated = strings.CutPrefix(text, "!")
	text, p.dir = strings.CutSuffix(text, "/")
	p.base = !strings.Contains(text, "/")
	if !p.base {
		text = strings.TrimPrefix(text, "/")
	}
	p.literal = text
	if special := strings.IndexAny(text, `*?[\`); special >= 0 {
		// What stands before the first wildcard is compared on its own. For git the rest is a
		// pattern of its own then: the stars of a**/b are at its beginning.
		p.literal = text[:special]
		var err error
		if p.glob, err = compile(text[special:], p.base); err != nil {
			return p, err
		}
		p.tail = text[strings.LastIndexAny(text, `*?[]\/`)+1:]
	}
	for name := range strings.SplitSeq(text, "/") {
		switch name {
		case ".", "..":
			return p, errClimbs
		case "": // nothing at all, or two slashes in a row
			return p, errNothing
		}
	}
	return p, nil
}

// matches reports whether the pattern matches a path, whose last name is base.
func (p *pattern) matches(path, base string, dir bool) bool {
	if p.dir && !dir {
		return false
	}
	if p.base {
		path = base
	}
	if p.glob == nil {
		return path == p.literal
	}
	if !strings.HasSuffix(path, p.tail) { // the most common case, and cheaper than the glob
		return false
	}
	rest, ok := strings.CutPrefix(path, p.literal)
	return ok && p.glob.matches(rest)
}

// kind is the kind of an element of a glob.
type kind uint8

const (
	one     kind = iota // a byte of a set
	star                // any number of bytes but slashes
	deep                // any number of bytes
	parents             // nothing, or any number of bytes and a slash
)

type element struct {
	kind kind
	set  *[4]uint64
}

func (e *element) has(b byte) bool { return e.set[b/64]&(1<<(b%64)) != 0 }

// glob is a pattern with wildcards. Like git it compares bytes, not characters.
type glob []element

func compile(text string, base bool) (glob, error) {
	g := glob{}
	for i := 0; i < len(text); {
		switch c := text[i]; c {
		case '*':
			end := i
			for end < len(text) && text[end] == '*' {
				end++
			}
			wide := end-i > 1 && (i == 0 || text[i-1] == '/') && !base
			switch rest := text[end:]; {
			case wide && rest == "", base:
				g = append(g, element{kind: deep})
			case wide && rest[0] == '/':
				g = append(g, element{kind: parents})
				end++
			case wide && strings.HasPrefix(rest, `\/`):
				g = append(g, element{kind: deep})
			default:
				g = append(g, element{kind: star})
			}
			i = end
		case '?':
			set := &[4]uint64{}
			invert(set)
			g, i = append(g, element{one, set}), i+1
		case '[':
			set, n := class(text[i:])
			if set == nil {
				return nil, errBroken
			}
			g, i = append(g, element{one, set}), i+n
		default:
			if c == '\\' {
				if i++; i == len(text) {
					return nil, errBroken
				}
				c = text[i]
			}
			set := &[4]uint64{}
			set[c/64] |= 1 << (c % 64)
			g, i = append(g, element{one, set}), i+1
		}
	}
	return g, nil
}

// invert makes a set that of the other bytes. A slash is in none of those that are made so.
func invert(set *[4]uint64) {
	for i := range set {
		set[i] = ^set[i]
	}
	set['/'/64] &^= 1 << ('/' % 64)
}

// class reads the bracket that text begins with, and returns its set and length; nil if it has no
// end, or names an unknown class.
func class(text string) (set *[4]uint64, n int) {
	set = &[4]uint64{}
	i := 1
	at := func(i int) byte {
		if i < len(text) {
			return text[i]
		}
		return 0
	}
	negated := at(i) == '!' || at(i) == '^'
	if negated {
		i++
	}
	var before byte // the byte that a range may begin with; zero for none
	for first := true; first || at(i) != ']'; first, i = false, i+1 {
		c := at(i)
		low := c
		switch {
		case i >= len(text):
			return nil, 0
		case c == '\\':
			i++
			if i >= len(text) {
				return nil, 0
			}
			c = at(i)
			low, before = c, c
		case c == '-' && before != 0 && at(i+1) != 0 && at(i+1) != ']':
			i++
			if c = at(i); c == '\\' {
				i++
				if c = at(i); i >= len(text) {
					return nil, 0
				}
			}
			low, before = before, 0
		case c == '[' && at(i+1) == ':':
			end := strings.IndexByte(text[i+2:], ']')
			if end < 0 {
				return nil, 0
			}
			name, ok := strings.CutSuffix(text[i+2:i+2+end], ":")
			if !ok { // a bracket like another byte
				before = c
				break
			}
			has := classes[name]
			if has == nil {
				return nil, 0
			}
			for b := range 256 {
				if has(byte(b)) {
					set[b/64] |= 1 << (b % 64)
				}
			}
			i += 2 + end
			before = 0
			continue
		default:
			before = c
		}
		for b := int(low); b <= int(c); b++ {
			set[b/64] |= 1 << (b % 64)
		}
	}
	if negated {
		invert(set)
	}
	set['/'/64] &^= 1 << ('/' % 64)
	return set, i + 1
}

func between(b, low, high byte) bool { return low <= b && b <= high }

func isAlpha(b byte) bool { return between(b|0x20, 'a', 'z') }
func isDigit(b byte) bool { return between(b, '0', '9') }
func isGraph(b byte) bool { return between(b, 0x21, 0x7e) }

// classes are the classes of bytes that brackets may name.
var classes = map[string]func(byte) bool{
	"alnum":  func(b byte) bool { return isAlpha(b) || isDigit(b) },
	"alpha":  isAlpha,
	"blank":  func(b byte) bool { return b == ' ' || b == '\t' },
	"cntrl":  func(b byte) bool { return b < 0x20 || b == 0x7f },
	"digit":  isDigit,
	"graph":  isGraph,
	"lower":  func(b byte) bool { return between(b, 'a', 'z') },
	"print":  func(b byte) bool { return isGraph(b) || b == ' ' },
	"punct":  func(b byte) bool { return isGraph(b) && !isAlpha(b) && !isDigit(b) },
	"space":  func(b byte) bool { return b == ' ' || between(b, '\t', '\r') },
	"upper":  func(b byte) bool { return between(b, 'A', 'Z') },
	"xdigit": func(b byte) bool { return isDigit(b) || between(b|0x20, 'a', 'f') },
}

// matches reports whether the glob matches the whole text. It keeps the set of elements that
// could come next, so that its time is bounded by the product of both lengths: a hostile pattern
// such as *a*a*a*a*b costs no more.
func (g glob) matches(text string) bool {
	next, after := make([]bool, len(g)+1), make([]bool, len(g)+1)
	g.reach(next, 0)
	for i := range len(text) {
		b := text[i]
		clear(after)
		for at := range g {
			if !next[at] {
				continue
			}
			switch e := &g[at]; e.kind {
			case one:
				if e.has(b) {
					g.reach(after, at+1)
				}
			case star:
				if b != '/' {
					g.reach(after, at)
				}
			case deep:
				g.reach(after, at)
			case parents:
				after[at] = true // without what follows: that begins behind a slash
				if b == '/' {
					g.reach(after, at+1)
				}
			}
		}
		if !slices.Contains(after, true) {
			return false
		}
		next, after = after, next
	}
	return next[len(g)]
}

// reach marks an element, and those after it that can be reached without a byte.
func (g glob) reach(set []bool, at int) {
	for ; ; at++ {
		set[at] = true
		if at == len(g) || g[at].kind == one {
			return
		}
	}
}
