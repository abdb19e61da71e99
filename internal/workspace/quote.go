package workspace

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Quote returns a name for a terminal or a patch. Like git, it quotes one with control characters,
// quotes or bytes that are no text, in the form of C; and one with characters that change the order
// or the look of others, so that no name passes for another.
func Quote(name string) string {
	plain := utf8.ValidString(name) && !strings.ContainsFunc(name, func(r rune) bool {
		return r == '"' || r == '\\' || !unicode.IsPrint(r)
	})
	if plain {
		return name
	}
	var b strings.Builder
	b.WriteByte('"')
	for i := 0; i < len(name); {
		r, size := utf8.DecodeRuneInString(name[i:])
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == utf8.RuneError && size < 2 || !unicode.IsPrint(r):
			for _, c := range []byte(name[i : i+size]) {
				fmt.Fprintf(&b, `\%03o`, c)
			}
		default:
			b.WriteRune(r)
		}
		i += size
	}
	b.WriteByte('"')
	return b.String()
}
