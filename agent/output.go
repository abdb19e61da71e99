package agent

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// defaultOutputLimit is the part of a command's stream, or of a file, that the model sees, in
	// bytes.
	defaultOutputLimit = 16 << 10
	// captureBytes is the size kept of a stream, half from each end. It exceeds the shown size,
	// because escape sequences are removed later.
	captureBytes = 256 << 10
)

var dashes = strings.Repeat("-", 50)

// truncated marks removed text.
var truncated = dashes + "<Observation truncated in middle for saving context>" + dashes

// headTail is a writer that keeps the first and the last bytes in bounded memory. A command may
// write gigabytes, and the important parts are at both ends.
type headTail struct {
	half int
	head []byte
	tail []byte // ring buffer of at most half bytes
	next int    // write position in a full ring
	lost int64  // bytes overwritten in the ring
}

func newHeadTail(limit int) *headTail { return &headTail{half: limit / 2} }

// Write never fails.
func (e *headTail) Write(p []byte) (int, error) {
	n := len(p)
	if room := e.half - len(e.head); room > 0 {
		take := min(room, len(p))
		e.head, p = append(e.head, p[:take]...), p[take:]
	}
	if len(p) > e.half {
		// The rest of p overwrites the whole ring and its own beginning.
		e.lost += int64(len(e.tail) + len(p) - e.half)
		e.tail, e.next = append(e.tail[:0], p[len(p)-e.half:]...), 0
		return n, nil
	}
	if room := e.half - len(e.tail); room > 0 {
		take := min(room, len(p))
		e.tail, p = append(e.tail, p[:take]...), p[take:]
	}
	for len(p) > 0 {
		c := copy(e.tail[e.next:], p)
		e.lost += int64(c)
		e.next = (e.next + c) % e.half
		p = p[c:]
	}
	return n, nil
}

// bytes returns the kept bytes, without a mark between the ends.
func (e *headTail) bytes() []byte {
	b := append([]byte(nil), e.head...)
	b = append(b, e.tail[e.next:]...)
	return append(b, e.tail[:e.next]...)
}

// text returns the text for the model: cleaned, valid UTF-8, about limit bytes from both ends.
func (e *headTail) text(limit int) string {
	if e.lost == 0 {
		return truncate(clean(string(e.bytes())), limit, 0)
	}
	head := clean(string(e.head))
	tail := clean(string(e.tail[e.next:]) + string(e.tail[:e.next]))
	return truncate(head+tail, limit, e.lost)
}

// clean removes terminal control sequences and makes the text valid UTF-8.
func clean(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if !strings.ContainsAny(s, "\x1b\r\x00") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		switch s[i] {
		case '\r', 0:
			i++
		case 0x1b:
			i += escapeLength(s[i:])
		default:
			b.WriteByte(s[i])
			i++
		}
	}
	return b.String()
}

// escapeLength returns the length of the control sequence at the start of s, which begins with ESC:
// CSI up to the final byte, OSC up to BEL or ST, or two bytes. For a sequence of unreasonable
// length it counts the ESC alone.
func escapeLength(s string) int {
	const longest = 256
	if len(s) < 2 {
		return 1
	}
	switch s[1] {
	case '[':
		for i := 2; i < len(s) && i < longest; i++ {
			if s[i] >= 0x40 && s[i] <= 0x7e {
				return i + 1
			}
			if s[i] < 0x20 || s[i] > 0x3f {
				break
			}
		}
		return 1
	case ']':
		for i := 2; i < len(s) && i < longest; i++ {
			if s[i] == 0x07 {
				return i + 1
			}
			if s[i] == 0x1b && i+1 < len(s) && s[i+1] == '\\' {
				return i + 2
			}
		}
		return 1
	}
	if s[1] >= 0x30 && s[1] <= 0x7e {
		return 2
	}
	return 1
}

// truncate shortens s to about limit bytes by cutting out its middle. It cuts between lines if a
// line ends nearby, and never inside a character. dropped counts bytes that the middle of s already
// lacks.
func truncate(s string, limit int, dropped int64) string {
	if len(s) <= limit && dropped == 0 {
		return s
	}
	half := limit / 2
	if len(s) < limit {
		half = len(s) / 2
	}
	head, tail := cutHead(s, half), cutTail(s, half)
	if i := strings.LastIndexByte(head, '\n'); i >= len(head)*3/4 {
		head = head[:i+1]
	}
	if i := strings.IndexByte(tail, '\n'); i >= 0 && i < len(tail)/4 {
		tail = tail[i+1:]
	}
	out := dropped + int64(len(s)-len(head)-len(tail))
	newline := ""
	if !strings.HasSuffix(head, "\n") {
		newline = "\n"
	}
	return fmt.Sprintf("%s%s%s\n(%d bytes left out)\n%s", head, newline, truncated, out, tail)
}

// clipMiddle shortens a line by cutting out its middle.
func clipMiddle(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	head, tail := cutHead(s, limit/2), cutTail(s, limit/2)
	return fmt.Sprintf("%s...<%d bytes left out>...%s", head, len(s)-len(head)-len(tail), tail)
}

// cutHead and cutTail return at most n bytes from one end of s, in complete characters. s is valid
// UTF-8.
func cutHead(s string, n int) string {
	n = min(n, len(s))
	for n > 0 && n < len(s) && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

func cutTail(s string, n int) string {
	start := max(0, len(s)-n)
	for start < len(s) && !utf8.RuneStart(s[start]) {
		start++
	}
	return s[start:]
}

// Printable makes text of a model or a sandbox safe for a terminal. Control characters are shown as
// \x1b and the like, and so are the invisible characters that reorder text. Newline and tab stay.
func Printable(s string) string {
	unsafe := func(r rune) bool {
		return r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == utf8.RuneError)
	}
	if !strings.ContainsFunc(s, unsafe) {
		return s
	}
	var b strings.Builder
	for i, r := range s {
		switch {
		case !unsafe(r):
			b.WriteRune(r)
		case r == utf8.RuneError:
			if _, size := utf8.DecodeRuneInString(s[i:]); size == 1 {
				fmt.Fprintf(&b, `\x%02x`, s[i])
			} else {
				b.WriteRune(r)
			}
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
