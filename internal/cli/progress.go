package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/api"
)

// progress draws one line for each layer of a pull. On anything but a terminal it stays silent.
type progress struct {
	w      *os.File
	tty    bool
	layers []string // in order of appearance
	last   map[string]api.PullEvent
	drawn  int
}

func newProgress(w *os.File) *progress {
	return &progress{w: w, tty: isTerminal(w), last: map[string]api.PullEvent{}}
}

// maxLines keeps the drawing from scrolling: what has left the screen cannot be drawn over.
const maxLines = 20

func (p *progress) event(e api.PullEvent) {
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
	_, _ = p.w.WriteString(b.String()) // a progress bar that cannot be shown is no reason to stop
}

// end leaves the lines on the screen as they are.
func (p *progress) end() { p.drawn = 0 }

func progressLine(e api.PullEvent) string {
	const width = 30
	line := fmt.Sprintf("%-12s  %-11s", printable(shortDigest(e.Layer)), printable(e.Status))
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

// shortDigest is the beginning of a digest's hash, enough to tell two apart by eye.
func shortDigest(d string) string {
	_, hash, ok := strings.Cut(d, ":")
	if !ok {
		hash = d
	}
	return hash[:min(len(hash), 12)]
}
