package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

const (
	// viewEvery is the interval of looking for something new to draw; the view's clock goes by the
	// second.
	viewEvery = 200 * time.Millisecond
	// viewTail is the number of bytes of output kept for its last lines. viewHistory is the number of
	// lines that are kept after they scrolled away, to be drawn again after a resize.
	viewTail    = 8 << 10
	viewHistory = 300
	// maxTailLines is the maximum number of output lines in the panel.
	maxTailLines = 8
)

// view shows a run on a terminal: complete turns as plain lines, which scroll away like any output,
// and below them a panel that is redrawn in place. The panel shows the current step, the end of its
// output, and the budget.
//
// The view sets no terminal mode: no alternate screen, hidden cursor or raw input. So nothing has
// to be restored, and a process that is killed or panics leaves a terminal that works. It writes:
// text; carriage return and newline; CSI n A (up), CSI J (erase below); after a resize CSI H and
// CSI 2J; and CSI m for colours, unless disabled. Texts of models and sandboxes reach it only
// without control characters.
type view struct {
	out    io.Writer
	size   func() (rows, cols int)
	now    func() time.Time
	colour bool

	mu         sync.Mutex
	begun      bool // the panel is shown
	paused     bool // a question is being asked
	dirty      bool
	drawn      int // number of panel lines on the screen
	rows, cols int // size of the terminal at the last drawing
	history    []string

	budget agent.Budget
	spent  agent.Spent
	at     time.Time // time of spent
	turn   int
	doing  string
	since  time.Time
	calls  []agent.RecordedCall
	call   string // the running call
	tail   []byte

	stop chan struct{}
	done sync.WaitGroup
}

// newView returns a view of the terminal, or nil if out is not one that can be drawn on.
func newView(out *os.File) *view {
	if kind := os.Getenv("TERM"); out == nil || !cmdline.IsTerminal(out) || kind == "" || kind == "dumb" {
		return nil
	}
	return &view{
		out: out, now: time.Now, colour: os.Getenv("NO_COLOR") == "", // no-color.org: set and not empty
		size: func() (rows, cols int) {
			cols, rows, err := term.GetSize(int(out.Fd()))
			if err != nil || rows < 1 || cols < 1 {
				return 24, 80
			}
			return rows, cols
		},
	}
}

// begin shows the panel until close.
func (v *view) begin() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.begun, v.since, v.at = true, v.now(), v.now()
	v.draw()
	v.stop = make(chan struct{})
	v.done.Go(v.keep)
}

// keep redraws the panel when something is new.
func (v *view) keep() {
	tick := time.NewTicker(viewEvery)
	defer tick.Stop()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	second := v.now().Unix()
	for {
		select {
		case <-v.stop:
			return
		case <-resized:
			v.mu.Lock()
			v.draw()
			v.mu.Unlock()
		case <-tick.C:
			v.mu.Lock()
			if now := v.now().Unix(); v.dirty || now != second {
				second = now
				v.draw()
			}
			v.mu.Unlock()
		}
	}
}

// close removes the panel. Later output looks as if there had been none.
func (v *view) close() {
	v.mu.Lock()
	if !v.begun {
		v.mu.Unlock()
		return
	}
	v.write(v.takeAway(1))
	v.begun = false
	close(v.stop)
	v.mu.Unlock()
	v.done.Wait()
}

// pause removes the panel while a question is asked, and goOn shows it again.
func (v *view) pause() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.begun {
		v.write(v.takeAway(1))
	}
	v.paused = true
}

func (v *view) goOn() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.paused = false
	v.draw()
}

// write writes to the terminal. A closed stderr must not end the run.
func (v *view) write(text string) { _, _ = io.WriteString(v.out, text) }

// Write prints text above the panel: complete lines, safe for a terminal.
func (v *view) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	text := string(p)
	gone := v.takeAway(1) // while the history is still the text above the panel
	v.history = append(v.history, strings.Split(strings.TrimSuffix(text, "\n"), "\n")...)
	v.history = v.history[max(0, len(v.history)-viewHistory):]
	v.write(gone + text)
	v.draw()
	return len(p), nil
}

// event updates the view.
func (v *view) event(e agent.Event) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dirty = true
	switch {
	case e.Run != nil:
		v.budget = e.Run.Budget
	case e.Resumed != nil:
		v.budget = e.Resumed.Budget
		v.account(e.Resumed.Spent)
	case e.Request != nil:
		v.turn = e.Turn
		v.begins("asking the model", "")
	case e.Response != nil:
		v.turn, v.calls = e.Turn, e.Response.ToolCalls
		v.spent.Tokens += e.Response.Usage.PromptTokens + e.Response.Usage.CompletionTokens
		v.spent.Cost += e.Response.Usage.CostUSD
	case e.Began != nil && e.Call >= 1 && e.Call <= len(v.calls): // another process may have received the answer
		c := v.calls[e.Call-1]
		v.begins("running "+agent.OneLine(c.Name, 60), agent.OneLine(agent.CallText(c.Name, c.Arguments), maxShownCall))
	case e.TurnEnd != nil:
		v.account(e.TurnEnd.Spent)
	case e.Outputs != nil:
		v.begins("collecting the output", "")
	}
}

// maxShownCall is the maximum length of a shown command, longer than any line.
const maxShownCall = 1000

func (v *view) begins(doing, call string) {
	v.doing, v.call, v.since, v.tail = doing, call, v.now(), nil
}

func (v *view) account(s agent.Spent) { v.spent, v.at = s, v.now() }

// delta shows a model's output, and output a program's.
func (v *view) delta(d llm.Delta) {
	switch d.Kind {
	case llm.DeltaContent, llm.DeltaReasoning:
		v.output([]byte(d.Text))
	case llm.DeltaCall:
		v.output([]byte("\n(calling " + d.Text + ")\n"))
	case llm.DeltaRestart:
		v.output([]byte("\n(the answer broke off and is asked for again)\n"))
	case llm.DeltaArguments:
	}
}

func (v *view) output(p []byte) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tail = append(v.tail, p[max(0, len(p)-viewTail):]...)
	v.tail = v.tail[max(0, len(v.tail)-viewTail):]
	v.dirty = true
}

// takeAway returns the sequence that removes the panel, and leaves so many lines of the terminal
// free. After a resize it redraws everything but the panel, because terminals differ in how they
// wrap lines that no longer fit.
func (v *view) takeAway(leave int) string {
	if v.drawn == 0 {
		return ""
	}
	up := v.drawn - 1
	v.drawn = 0
	if rows, cols := v.size(); rows != v.rows || cols != v.cols {
		var b strings.Builder
		b.WriteString("\x1b[H\x1b[2J")
		for _, line := range v.fitting(rows-leave, cols) {
			b.WriteString(line + "\n")
		}
		return b.String()
	}
	text := "\r"
	if up > 0 {
		text += fmt.Sprintf("\x1b[%dA", up)
	}
	return text + "\x1b[J"
}

// draw replaces the panel in one write.
func (v *view) draw() {
	if !v.begun || v.paused {
		return
	}
	v.dirty = false
	rows, cols := v.size()
	lines := v.panel(rows, cols)
	text := v.takeAway(len(lines)) + strings.Join(lines, "\n")
	v.drawn, v.rows, v.cols = len(lines), rows, cols
	v.write(text)
}

// fitting returns the end of the history that fits.
func (v *view) fitting(rows, cols int) []string {
	from := len(v.history)
	for from > 0 {
		rows -= 1 + max(0, cells(v.history[from-1])-1)/cols
		if rows < 0 {
			break
		}
		from--
	}
	return v.history[from:]
}

// panel returns the lines of the panel: fewer than the terminal's, each narrower than the terminal.
func (v *view) panel(rows, cols int) []string {
	width := max(cols-1, 1) // after a full line terminals differ in where the cursor is
	most := max(rows-1, 1)
	title := v.doing
	if v.turn > 0 {
		title = fmt.Sprintf("turn %d: %s", v.turn, v.doing)
	}
	if title == "" {
		title = "beginning"
	}
	title = fmt.Sprintf("%s, %s", title, clock(v.now().Sub(v.since)))
	budget := v.bars(width)
	lines := []string{v.paint("1", clip(title, width))}
	room := most - 1 - len(budget)
	if v.call != "" && room > 0 {
		lines = append(lines, clip("> "+v.call, width))
		room--
	}
	for _, line := range agent.LastLines(v.tail, max(0, min(room, maxTailLines, rows/3))) {
		lines = append(lines, v.paint("2", clip("| "+line, width)))
	}
	lines = append(lines, budget...)
	return lines[:min(len(lines), most)]
}

// bars returns the budget: as many parts in a line as fit, with bars if there is room.
func (v *view) bars(width int) []string {
	time := v.spent.Time + v.now().Sub(v.at)
	parts := []string{
		v.bar("turns", float64(v.spent.Turns), float64(v.budget.Turns), fmt.Sprint(v.spent.Turns), fmt.Sprint(v.budget.Turns), width),
		v.bar("tokens", float64(v.spent.Tokens), float64(v.budget.Tokens), fmt.Sprint(v.spent.Tokens), fmt.Sprint(v.budget.Tokens), width),
		v.bar("time", float64(time), float64(v.budget.Time), clock(time), clock(v.budget.Time), width),
	}
	if v.spent.Cost > 0 || v.budget.Cost > 0 {
		parts = append(parts, v.bar("cost", v.spent.Cost, v.budget.Cost, fmt.Sprintf("$%.4f", v.spent.Cost), fmt.Sprintf("$%.2f", v.budget.Cost), width))
	}
	if v.budget.CPU > 0 {
		parts = append(parts, v.bar("cpu", float64(v.spent.CPU), float64(v.budget.CPU), clock(v.spent.CPU), clock(v.budget.CPU), width))
	}
	var lines []string
	var widths []int
	for _, p := range parts {
		n := cells(uncoloured(p))
		if last := len(lines) - 1; last >= 0 && widths[last]+2+n <= width {
			lines[last] += "  " + p
			widths[last] += 2 + n
			continue
		}
		if n > width {
			p = clip(uncoloured(p), width)
			n = width
		}
		lines, widths = append(lines, p), append(widths, n)
	}
	return lines
}

// barCells is the width of a bar, and barFrom the least width of a terminal with bars.
const (
	barCells = 10
	barFrom  = 60
)

func (v *view) bar(name string, spent, ceiling float64, spentText, ceilingText string, width int) string {
	if ceiling <= 0 {
		return name + " " + spentText
	}
	text := name + " "
	part := min(spent/ceiling, 1)
	if width >= barFrom {
		full := int(part * barCells)
		colour := "32"
		switch {
		case part >= 0.9:
			colour = "31"
		case part >= 0.7:
			colour = "33"
		}
		text += "[" + v.paint(colour, strings.Repeat("#", full)) + strings.Repeat(".", barCells-full) + "] "
	}
	return text + spentText + "/" + ceilingText
}

// paint colours text, unless colours are disabled.
func (v *view) paint(code, text string) string {
	if !v.colour || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[m"
}

// uncoloured removes the colours of paint.
func uncoloured(text string) string {
	for {
		i := strings.Index(text, "\x1b[")
		if i < 0 {
			return text
		}
		j := strings.IndexByte(text[i:], 'm')
		if j < 0 {
			return text[:i]
		}
		text = text[:i] + text[i+j+1:]
	}
}

// clock formats a duration: 7s, 3m05s, 8h00m.
func clock(d time.Duration) string {
	s := int(d / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	}
	return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
}

// cells returns the maximum width of a line in columns: characters that may be wide count as wide.
func cells(line string) int {
	n := 0
	for _, r := range line {
		n += wide(r)
	}
	return n
}

func wide(r rune) int {
	switch {
	case r == '\t':
		return 8
	case r < 0x1100: // the first wide character
		return 1
	}
	return 2
}

// clip returns the beginning of a line that fits into that many columns.
func clip(line string, width int) string {
	line = strings.ReplaceAll(line, "\t", " ")
	n := 0
	for i, r := range line {
		if n += wide(r); n > width {
			return line[:i]
		}
	}
	return line
}

// used describes the tokens of the model calls, and their cost as far as it is known.
func used(u llm.Usage) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d tokens in", u.PromptTokens)
	if u.CachedTokens > 0 {
		fmt.Fprintf(&b, " (%d cached)", u.CachedTokens)
	}
	fmt.Fprintf(&b, ", %d out", u.CompletionTokens)
	if u.CostUSD > 0 {
		fmt.Fprintf(&b, ", $%.4f", u.CostUSD)
	}
	if u.UnpricedCalls > 0 {
		fmt.Fprintf(&b, "; %d calls without a known price", u.UnpricedCalls)
	}
	return b.String()
}
