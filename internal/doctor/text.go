package doctor

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/sandboxd/sandboxd/api"
)

// Text prints checks for a person: one line for what is there, and for what is not, what it means and what to do. It ends
// with the sum in one sentence.
func Text(checks []api.Check) string {
	width := 0
	for _, c := range checks {
		width = max(width, len(c.Name))
	}
	var b strings.Builder
	fatal, missing := 0, 0
	for _, c := range checks {
		mark := "ok  "
		switch {
		case c.OK:
		case c.Fatal:
			mark = "FAIL"
			fatal++
		default:
			mark = "miss"
			missing++
		}
		fmt.Fprintf(&b, "%s  %-*s  %s\n", mark, width, printable(c.Name), printable(c.Found))
		if !c.OK {
			fmt.Fprintf(&b, "      %-*s  means: %s\n", width, "", printable(c.Means))
			fmt.Fprintf(&b, "      %-*s  to do: %s\n", width, "", printable(c.Remedy))
		}
	}
	switch {
	case fatal > 0:
		fmt.Fprintf(&b, "\nNo sandbox can start here: %s.\n", count(fatal, "need is", "needs are")+" not met")
	case missing > 0:
		fmt.Fprintf(&b, "\nSandboxes can start here; %s missing.\n", count(missing, "protection or service is", "protections or services are"))
	default:
		b.WriteString("\nSandboxes can start here, with everything that holds them.\n")
	}
	return b.String()
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// printable keeps what comes from outside (paths, messages, an answer of another daemon) from driving the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}
