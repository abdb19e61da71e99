package cmdline

import (
	"fmt"
	"os"
	"strings"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/api"
)

// Progress draws one line for each layer of a pull. It is silent unless w is a terminal.
type Progress struct {
	w      *os.File
	tty    bool
	layers []string // in order of appearance
	last   map[string]api.PullEvent
	drawn  int
}

// NewProgress returns a Progress that draws on w, below the cursor.
func NewProgress(w *os.File) *Progress {
	return &Progress{w: w, tty: IsTerminal(w), last: map[string]api.PullEvent{}}
}

// maxLines prevents scrolling: lines that have left the screen cannot be drawn over.
const maxLines = 20

// Event records the state of one layer and redraws the last lines. Events without a layer draw
// nothing.
func (p *Progress) Event(e api.PullEvent) {
	if !p.tty || e.Layer == "" {
		return
	}
	if _, known := p.last[e.Layer]; !known {
		p.layers = append(p.layers, e.Layer)
	}
	p.last[e.Layer] = e
	var b strings.Builder
	if p.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", p.drawn)
	}
	shown := p.layers[max(0, len(p.layers)-maxLines):]
	for _, l := range shown {
		b.WriteString(progressLine(p.last[l]))
		b.WriteString("\x1b[K\n")
	}
	p.drawn = len(shown)
	_, _ = p.w.WriteString(b.String()) // a failed progress bar must not stop the pull
}

// End leaves the lines on the screen as they are.
func (p *Progress) End() { p.drawn = 0 }

func progressLine(e api.PullEvent) string {
	const width = 30
	line := fmt.Sprintf("%-12s  %-11s", Printable(ShortDigest(e.Layer)), Printable(e.Status))
	if e.Total <= 0 {
		return line
	}
	done := min(max(e.Bytes, 0), e.Total)
	if e.Status == "done" || e.Status == "exists" {
		done = e.Total
	}
	n := int(width * float64(done) / float64(e.Total))
	return fmt.Sprintf("%s  [%s%s]  %s / %s", line, strings.Repeat("#", n), strings.Repeat(".", width-n),
		units.HumanSize(float64(done)), units.HumanSize(float64(e.Total)))
}

// ShortDigest returns the beginning of a digest's hash, enough to tell two apart by eye.
func ShortDigest(d string) string {
	_, hash, ok := strings.Cut(d, ":")
	if !ok {
		hash = d
	}
	return hash[:min(len(hash), 12)]
}
