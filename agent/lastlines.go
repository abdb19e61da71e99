package agent

import (
	"slices"
	"strings"
)

// maxLastLine is more of a line than any terminal shows.
const maxLastLine = 1000

// LastLines is the end of what a program writes, at most n lines of it, for a terminal: escape sequences are taken out, of a line that was
// written over itself the last form stands, and the rest is [Printable]. A line that is not finished counts.
func LastLines(written []byte, n int) []string {
	var lines []string
	for text := strings.TrimRight(string(written), "\r\n"); text != "" && len(lines) < n; {
		var line string
		if i := strings.LastIndexByte(text, '\n'); i >= 0 {
			text, line = text[:i], text[i+1:]
		} else {
			text, line = "", text
		}
		line = strings.TrimRight(line, "\r")
		line = line[strings.LastIndexByte(line, '\r')+1:]
		lines = append(lines, Printable(clean(clipMiddle(line, maxLastLine))))
	}
	slices.Reverse(lines)
	return lines
}
