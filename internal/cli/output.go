package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/docker/go-units"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/api"
)

// printJSON writes v for machines: indented, one document.
//
// What a terminal would obey of a text that is not ours is escaped, as JSON can, and means the same to a program.
func printJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	var out strings.Builder
	for _, r := range b.String() {
		if r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
			fmt.Fprintf(&out, `\u%04x`, r)
		} else {
			out.WriteRune(r)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// printImage writes what an image is called and what it is.
func printImage(w io.Writer, image *api.Image) error {
	_, err := fmt.Fprintf(w, "%s %s\n", printable(image.Reference), printable(image.Digest))
	return err
}

// table writes rows in columns; the first row is the head.
func table(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	for _, row := range rows {
		for i := range row {
			row[i] = printable(row[i])
		}
		if _, err := fmt.Fprintln(t, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// since says how long ago t was, in words.
func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return units.HumanDuration(time.Since(t)) + " ago"
}

// until says how long it is to t, in words.
func until(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := time.Until(t)
	if d < 0 {
		return "over"
	}
	return "in " + units.HumanDuration(d)
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
