package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// emulator is a terminal that understands the sequences of a view, and reports all others.
type emulator struct {
	rows, cols int
	lines      [][]rune
	row, col   int
	colours    int
	pending    string // an incomplete escape sequence or character
	wrong      []string
}

func newEmulator(rows, cols int) *emulator {
	e := &emulator{}
	e.resize(rows, cols)
	return e
}

// resize cuts off the part that does not fit, as some terminals do.
func (e *emulator) resize(rows, cols int) {
	lines := make([][]rune, rows)
	for i := range lines {
		lines[i] = make([]rune, cols)
		if i < len(e.lines) {
			copy(lines[i], e.lines[i])
		}
	}
	e.rows, e.cols, e.lines = rows, cols, lines
	e.row, e.col = min(e.row, rows-1), min(e.col, cols-1)
}

func (e *emulator) newline() {
	e.col = 0
	if e.row++; e.row == e.rows {
		e.lines = append(e.lines[1:], make([]rune, e.cols))
		e.row--
	}
}

func (e *emulator) clear(row, col int) {
	for ; row < e.rows; row, col = row+1, 0 {
		clear(e.lines[row][col:])
	}
}

var sequence = regexp.MustCompile(`^\x1b\[([0-9;]*)([A-Za-z])`)

func (e *emulator) Write(p []byte) (int, error) {
	text := e.pending + string(p)
	e.pending = ""
	for text != "" {
		if text[0] == 0x1b {
			m := sequence.FindStringSubmatch(text)
			if m == nil {
				if len(text) < 12 {
					e.pending = text
					return len(p), nil
				}
				e.wrong = append(e.wrong, text[:12])
				text = text[1:]
				continue
			}
			text = text[len(m[0]):]
			n, _ := strconv.Atoi(m[1])
			switch {
			case m[2] == "A":
				e.row = max(0, e.row-max(n, 1))
			case m[2] == "J" && m[1] == "":
				e.clear(e.row, min(e.col, e.cols-1))
			case m[2] == "J" && n == 2:
				e.clear(0, 0)
			case m[2] == "H" && m[1] == "":
				e.row, e.col = 0, 0
			case m[2] == "m":
				e.colours++
			default:
				e.wrong = append(e.wrong, m[0])
			}
			continue
		}
		if !utf8.FullRuneInString(text) { // the rest comes with the next write
			e.pending = text
			break
		}
		r, size := utf8.DecodeRuneInString(text)
		text = text[size:]
		switch {
		case r == '\r':
			e.col = 0
		case r == '\n':
			e.newline()
		case r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0:
			e.wrong = append(e.wrong, fmt.Sprintf("%q", r))
		default:
			n := wide(r)
			if e.col+n > e.cols {
				e.newline()
			}
			e.lines[e.row][e.col] = r
			for i := 1; i < n && e.col+i < e.cols; i++ {
				e.lines[e.row][e.col+i] = -1
			}
			e.col += n
		}
	}
	return len(p), nil
}

// String returns the screen, with a frame that shows its size, and a mark at the cursor.
func (e *emulator) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "+%s+ cursor %d,%d\n", strings.Repeat("-", e.cols), e.row+1, e.col+1)
	for _, line := range e.lines {
		b.WriteByte('|')
		for _, r := range line {
			switch r {
			case 0:
				b.WriteByte(' ')
			case -1:
			default:
				b.WriteRune(r)
			}
		}
		b.WriteString("|\n")
	}
	return b.String()
}

// golden compares a screen with testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "view", name+".txt")
	if *cmdtest.Update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// stage is a view on an emulated terminal, with a clock that stands still.
type stage struct {
	*view
	screen *emulator
	at     time.Time
}

func newStage(rows, cols int, colour bool) *stage {
	s := &stage{screen: newEmulator(rows, cols), at: time.Date(2026, 1, 16, 14, 30, 0, 0, time.UTC)}
	s.view = &view{out: s.screen, colour: colour, now: func() time.Time { return s.at }, size: func() (int, int) { return s.screen.rows, s.screen.cols }}
	return s
}

// play shows a run up to the middle of its second turn.
func (s *stage) play(t *testing.T) {
	t.Helper()
	s.event(agent.Event{Run: &agent.RunEvent{Budget: agent.Budget{Turns: 10, Tokens: 10_000, Cost: 2, Time: time.Hour, CPU: time.Minute}}})
	s.begun, s.since, s.view.at = true, s.at, s.at // like begin, without its goroutine
	s.draw()
	s.event(agent.Event{Turn: 1, Request: &agent.RequestEvent{}})
	s.delta(llm.Delta{Kind: llm.DeltaContent, Text: "Let me \x1b[2Jlook."})
	call := func(command string) agent.RecordedCall {
		args, err := json.Marshal(map[string]string{"command": command})
		if err != nil {
			t.Fatal(err)
		}
		return agent.RecordedCall{Name: "execute_bash", Arguments: string(args)}
	}
	s.event(agent.Event{Turn: 1, Response: &agent.ResponseEvent{Usage: llm.Usage{PromptTokens: 900, CompletionTokens: 100, CostUSD: 1.5}}})
	s.event(agent.Event{Turn: 1, TurnEnd: &agent.TurnEvent{Spent: agent.Spent{Turns: 1, Tokens: 1000, Cost: 1.5, Time: 65 * time.Second, CPU: 57 * time.Second}}})
	step := agent.Step{Thought: "Let me \x1b[2Jlook.", ToolCalls: []agent.ToolRecord{{Function: "execute_bash", Arguments: call("ls -l").Arguments, Observation: "total 0\nended: submitted"}}}
	step.Metadata.Step = 1
	if err := agent.PrintStep(s, step); err != nil {
		t.Fatal(err)
	}
	s.event(agent.Event{Turn: 2, Request: &agent.RequestEvent{}})
	s.event(agent.Event{Turn: 2, Response: &agent.ResponseEvent{ToolCalls: []agent.RecordedCall{call("make \u202eall\n  && echo a command that goes on and on and on, longer than any line of a terminal should be")}}})
	s.event(agent.Event{Turn: 2, Call: 1, Began: &agent.BeganEvent{}})
	for _, piece := range []string{
		"first\n", "compiling 10%\rcompiling 50%\rcompiling 99%\n", "\x1b[31mred\x1b[0m and \x1b]0;title\x07plain\n", "\x1b[", "2J\x1b[Hcleared?\n",
		"日本語のとても長い行がここにありますが端末には入りきらないのではないかと思いますがどうでしょうか\n", "tab\there \x07\x08 \u009b2J \xff\n", "unfinished",
	} {
		s.output([]byte(piece))
	}
	s.at = s.at.Add(7 * time.Second)
	s.draw()
}

func (s *stage) check(t *testing.T) {
	t.Helper()
	if len(s.screen.wrong) > 0 {
		t.Errorf("written to the terminal: %q", s.screen.wrong)
	}
}

func TestViewScreens(t *testing.T) {
	for name, size := range map[string][2]int{"80x24": {24, 80}, "40x12": {12, 40}, "20x6": {6, 20}, "9x3": {3, 9}, "1x1": {1, 1}} {
		t.Run(name, func(t *testing.T) {
			s := newStage(size[0], size[1], false)
			s.play(t)
			golden(t, name, s.screen.String())
			if s.screen.colours > 0 {
				t.Error("colours were not wanted")
			}
			s.check(t)
		})
	}
	// Colours change nothing but colours.
	plain, coloured := newStage(24, 80, false), newStage(24, 80, true)
	plain.play(t)
	coloured.play(t)
	if diff := cmp.Diff(plain.screen.String(), coloured.screen.String()); diff != "" || coloured.screen.colours == 0 {
		t.Errorf("%d colours, (-without +with):\n%s", coloured.screen.colours, diff)
	}
	coloured.check(t)
}

// After a resize the screen looks as if it had always had that size, as far as the history reaches,
// however the terminal has wrapped the old lines.
func TestViewAfterAResize(t *testing.T) {
	s := newStage(24, 80, false)
	s.play(t)
	for _, size := range [][2]int{{12, 40}, {30, 100}, {4, 10}, {24, 80}} {
		s.screen.resize(size[0], size[1])
		s.draw()
		golden(t, fmt.Sprintf("resized-%dx%d", size[1], size[0]), s.screen.String())
		s.check(t)
	}
	// The panel is drawn in place again.
	before := s.screen.String()
	s.draw()
	if diff := cmp.Diff(before, s.screen.String()); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// A turn, a question or the end between a resize and the next drawing removes a panel that has
// moved.
func TestViewMeetsAResize(t *testing.T) {
	for _, size := range [][2]int{{12, 40}, {10, 24}, {30, 100}} {
		for name, next := range map[string]struct {
			do     func(*stage)
			panels int
			says   string
		}{
			"a turn":     {func(s *stage) { _, _ = fmt.Fprint(s, "more\n") }, 1, "more"},
			"a question": {func(s *stage) { s.pause() }, 0, "ended: submitted"},
			"the end":    {func(s *stage) { s.stop = make(chan struct{}); s.close() }, 0, "ended: submitted"},
		} {
			s := newStage(24, 80, false)
			s.play(t)
			// The terminal wraps the lines anew and pushes the upper ones out, so that none is where it was.
			s.screen.resize(size[0], size[1])
			s.screen.row, s.screen.col = size[0]-1, 0
			for range 3 {
				_, _ = s.screen.Write([]byte("turn 2: torn\n"))
			}
			next.do(s)
			if got := s.screen.String(); strings.Contains(got, "torn") || strings.Count(got, "turn 2:") != next.panels || !strings.Contains(got, next.says) {
				t.Errorf("%s at %v:\n%s", name, size, got)
			}
			s.check(t)
		}
	}
}

// A closed view leaves no part of the panel, and later output begins in its place. While a question
// is asked there is no panel.
func TestViewLeavesNothing(t *testing.T) {
	s := newStage(24, 80, true)
	s.play(t)
	s.pause()
	if strings.Contains(s.screen.String(), "turns") {
		t.Errorf("there is a panel under a question:\n%s", s.screen)
	}
	s.draw()
	if _, err := fmt.Fprint(s.screen, "allow it? y\n"); err != nil {
		t.Fatal(err)
	}
	s.goOn()
	s.stop = make(chan struct{})
	s.close()
	if _, err := fmt.Fprint(s.screen, "ended\n"); err != nil {
		t.Fatal(err)
	}
	golden(t, "closed", s.screen.String())
	s.check(t)
}

// A panic during a run removes the panel.
func TestViewAfterAPanic(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	cmdtest.Resize(t, master, 24, 80)
	t.Setenv("TERM", "xterm")
	s := cmdtest.Watch(master)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		run := agent.Options{}
		_, _ = show(&run, true, cmdline.Deps{Stderr: slave}.WithSocket(""), func() (*agent.Result, error) {
			run.OnStart(agent.Started{})
			s.WaitFor(t, "beginning")
			panic("a defect")
		})
	}()
	if _, err := slave.WriteString("after\n"); err != nil {
		t.Fatal(err)
	}
	s.WaitFor(t, "after")
	e := newEmulator(24, 80)
	_, _ = e.Write([]byte(s.Output()))
	if screen := e.String(); strings.Contains(screen, "turns") || !strings.Contains(screen, "|after ") {
		t.Errorf("left behind:\n%s", screen)
	}
}

func TestClock(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0s", 1900 * time.Millisecond: "1s", time.Minute: "1m00s", 185 * time.Second: "3m05s", 8 * time.Hour: "8h00m", 26*time.Hour + 61*time.Second: "26h01m"} {
		if got := clock(d); got != want {
			t.Errorf("%v is %s, want %s", d, got, want)
		}
	}
}

// masked replaces the parts of a screen that differ from run to run, whatever their width.
func masked(screen string) string {
	const span = `(?:[0-9]+m)?[0-9]+s`
	screen = regexp.MustCompile(`, `+span+` `).ReplaceAllString(screen, ", Ns ")
	screen = regexp.MustCompile(`(time (?:\[[.#]*\] )?)`+span+`/`).ReplaceAllString(screen, "${1}Ns/")
	screen = regexp.MustCompile(` cursor [0-9,]+`).ReplaceAllString(screen, "")
	screen = regexp.MustCompile(`model [0-9.]+ s · tools [0-9.]+ s`).ReplaceAllString(screen, "model N s · tools N s")
	screen = regexp.MustCompile(`127\.0\.0\.1:[0-9]+/v1 *`).ReplaceAllString(screen, "SERVER ")
	screen = regexp.MustCompile(`[0-9]{8}_[0-9]{6}`).ReplaceAllString(screen, "20260116_143000")
	lines := strings.Split(screen, "\n")
	width := len(lines[0]) // of the frame
	for i, line := range lines {
		if line, ok := strings.CutSuffix(line, "|"); ok {
			line = strings.TrimRight(line, " ")
			lines[i] = line + strings.Repeat(" ", width-1-utf8.RuneCountInString(line)) + "|"
		}
	}
	return strings.Join(lines, "\n")
}

// A run in a real terminal, whose model hangs in the second turn: the screen, the screen after the
// terminal became smaller, and the screen after Ctrl-C and kill -9.
func TestAgentRunInATerminal(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, master *os.File, process *os.Process){
		"ctrl-c": func(t *testing.T, master *os.File, _ *os.Process) {
			t.Helper()
			if _, err := master.WriteString("\x03"); err != nil {
				t.Fatal(err)
			}
		},
		"kill": func(t *testing.T, _ *os.File, process *os.Process) {
			t.Helper()
			if err := process.Kill(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			master, slave := cmdtest.OpenPTY(t)
			cmdtest.Resize(t, master, 24, 90)
			before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			f := agentFake("42\n")
			srv := llmtest.Start(t,
				llmtest.Turn{Content: "A \x1b[2J look", Calls: []llmtest.Call{llmtest.Bash("true")}},
				// Its first letter differs from the first turn's, which the panel may have shown too.
				llmtest.Turn{Content: "But now I think", HangAfter: true, Pieces: llmtest.PiecesBytes},
			)
			cmd := cmdtest.Command(t, f.Start(t), "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", srv.URL, "--llm_retries", "0")
			cmd.Env = append(cmd.Env, "TERM=xterm", "NO_COLOR=1")
			cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			s := cmdtest.Watch(master)
			s.WaitFor(t, "turn 2: asking the model")
			s.WaitFor(t, "| B") // the first byte of the answer
			e := newEmulator(24, 90)
			shown := func() string {
				_, _ = e.Write([]byte(s.Output()))
				return masked(e.String())
			}
			// whole waits for the end of the panel, because output arrives in pieces.
			whole := func() string {
				screen := shown()
				for !strings.Contains(screen, "/8h00m") {
					s.WaitFor(t, "/8h00m")
					screen = shown()
				}
				return screen
			}
			golden(t, "terminal", whole())
			e.resize(10, 44) // the budget fits on one line, even after some minutes
			cmdtest.Resize(t, master, 10, 44)
			s.WaitFor(t, "\x1b[2J")
			golden(t, "terminal-smaller", whole())
			end(t, master, cmd.Process)
			err = cmd.Wait()
			if name == "ctrl-c" {
				s.WaitFor(t, "hint: ")
				screen := shown()
				if !strings.Contains(screen, "kept: sandbox sb1") || strings.Contains(screen, "asking the model") {
					t.Errorf("%v; left behind:\n%s", err, screen)
				}
			}
			if err == nil {
				t.Error("it ended well")
			}
			if len(e.wrong) > 0 {
				t.Errorf("written to the terminal: %q", e.wrong)
			}
			after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("terminal (-before +after):\n%s", diff)
			}
		})
	}
}

// A terminal that cannot be drawn on gets plain lines.
func TestAgentRunWhereNothingIsDrawn(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	cmdtest.Resize(t, master, 24, 90)
	f := agentFake("42\n")
	srv := llmtest.Start(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	cmd := cmdtest.Command(t, f.Start(t), "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", srv.URL)
	cmd.Env = append(cmd.Env, "TERM=dumb")
	cmd.Stderr = slave
	s := cmdtest.Watch(master)
	if err := cmd.Run(); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Fatal(err)
	}
	s.WaitFor(t, "ended: submitted")
	if said := s.Output(); strings.Contains(said, "\x1b") {
		t.Errorf("%q", said)
	}
}

func TestAgentSaysWhatWasUsed(t *testing.T) {
	for want, u := range map[string]llm.Usage{
		"0 tokens in, 0 out":                                          {},
		"3000 tokens in (1400 cached), 150 out, $0.0035":              {PromptTokens: 3000, CachedTokens: 1400, CompletionTokens: 150, CostUSD: 0.003465},
		"10 tokens in, 5 out; 2 calls without a known price":          {PromptTokens: 10, CompletionTokens: 5, UnpricedCalls: 2},
		"10 tokens in, 5 out, $1.0000; 1 calls without a known price": {PromptTokens: 10, CompletionTokens: 5, CostUSD: 1, UnpricedCalls: 1},
	} {
		if got := used(u); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
