package llm

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// jsonText is a string that arrives in pieces, each of them a JSON string. The pieces are joined
// before they are decoded: servers cut at token boundaries, which can split a character's UTF-8
// bytes or a surrogate pair. Decoding half a character would lose it.
type jsonText struct {
	raw   []byte // literals without their quotes
	shown int    // bytes of raw that add has returned
}

// add appends the next piece and returns the complete characters that were not returned before. A
// piece that is no JSON string is skipped.
func (t *jsonText) add(piece json.RawMessage) string {
	if len(piece) < 2 || piece[0] != '"' {
		return ""
	}
	t.raw = append(t.raw, piece[1:len(piece)-1]...)
	end := len(t.raw) - unfinished(t.raw[t.shown:])
	text := decodeText(t.raw[t.shown:end])
	t.shown = end
	return text
}

// String returns the whole text.
func (t *jsonText) String() string { return decodeText(t.raw) }

func decodeText(inner []byte) string {
	literal := make([]byte, 0, len(inner)+2)
	literal = append(append(append(literal, '"'), inner...), '"')
	var s string
	if json.Unmarshal(literal, &s) != nil {
		return "" // unreachable: every piece was valid, and so is the joined literal
	}
	return s
}

// unfinished returns the number of bytes at the end of raw that begin an incomplete character.
func unfinished(raw []byte) int {
	// A high surrogate, \ud800 to \udbff, whose backslash is not itself escaped.
	if i := len(raw) - 6; i >= 0 && raw[i] == '\\' && raw[i+1] == 'u' && raw[i+2]|0x20 == 'd' && bytes.IndexByte([]byte("89abAB"), raw[i+3]) >= 0 {
		slashes := 0
		for j := i - 1; j >= 0 && raw[j] == '\\'; j-- {
			slashes++
		}
		if slashes%2 == 0 {
			return 6
		}
	}
	for n := 1; n < utf8.UTFMax && n <= len(raw); n++ {
		if tail := raw[len(raw)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// present reports whether a field was sent and is not null.
func present(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// quoted returns text as a JSON string.
func quoted(text string) json.RawMessage {
	b, err := json.Marshal(text)
	if err != nil { // a string always marshals
		return json.RawMessage(`""`)
	}
	return b
}
