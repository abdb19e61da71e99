package agent

import (
	"slices"
	"strings"
)

// maxLastLine exceeds the width of any terminal, in bytes.
const maxLastLine = 1000

// LastLines returns the last n lines of a program's output for a terminal. It removes escape
// sequences, keeps the last form of a line that was overwritten with \r, and makes the rest
// [Printable]. An unfinished line counts.
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
