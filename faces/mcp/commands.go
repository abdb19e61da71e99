package mcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Bounds of commands, in bytes unless they say otherwise.
const (
	maxOutput  = 64 << 10 // of each stream in a result: half from its beginning, half from its end
	maxStdin   = 4 << 20
	maxLine    = 128 << 10 // a shell line, or all arguments together
	maxNote    = 200       // characters of output in a progress message
	maxWait    = 50        // seconds of command_output; clients wait for a minute
	background = 4 << 20   // output of a command in the background that is kept
)

// place says where a command runs.
type place struct {
	which

	Cwd string            `json:"cwd,omitempty" jsonschema:"working directory; default: the sandbox's"`
	Env map[string]string `json:"env,omitempty" jsonschema:"environment variables"`
}

type commandIn struct {
	place

	Command    string   `json:"command,omitempty" jsonschema:"shell line, for /bin/sh; either this or argv"`
	Argv       []string `json:"argv,omitempty" jsonschema:"program and arguments, without a shell"`
	Stdin      string   `json:"stdin,omitempty" jsonschema:"whole input of the command"`
	Timeout    float64  `json:"timeout,omitempty" jsonschema:"seconds after which the command is killed with all its processes"`
	Background bool     `json:"background,omitempty" jsonschema:"return at once, with an id for command_output and command_kill; without timeout it may run as long as the sandbox"`
}

// commandOut is the result of a command. One that has ended has an exit code.
type commandOut struct {
	Stdout    string `json:"stdout"`
	Stderr    string `json:"stderr"`
	ExitCode  *int   `json:"exit_code,omitempty" jsonschema:"absent while it runs; 128+n after signal n"`
	Signal    string `json:"signal,omitempty" jsonschema:"signal that ended it"`
	TimedOut  bool   `json:"timed_out,omitempty"`
	OOM       bool   `json:"out_of_memory,omitempty"`
	Truncated bool   `json:"truncated,omitempty" jsonschema:"output is missing where the text says so"`
	WallMS    int64  `json:"duration_ms,omitempty"`
	// Of a command in the background:
	ID      string `json:"id,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
	Running bool   `json:"running,omitempty"`
	Offset  *int64 `json:"offset,omitempty" jsonschema:"offset for the next command_output"`
	// Restarted is set if the sandbox had to be started again.
	Restarted bool `json:"sandbox_restarted,omitempty" jsonschema:"the sandbox had been stopped for being idle: its files are there, its processes are not"`
}

// text is the result as a model reads it.
func (o *commandOut) text() string {
	var b strings.Builder
	part := func(title, text string) {
		if text == "" {
			return
		}
		if title != "" {
			b.WriteString("[" + title + "]\n")
		}
		b.WriteString(text)
		if !strings.HasSuffix(text, "\n") {
			b.WriteByte('\n')
		}
	}
	part("", o.Stdout)
	part("stderr", o.Stderr)
	switch {
	case o.ExitCode == nil:
		fmt.Fprintf(&b, "[running in the background as %s]", o.ID)
	case o.TimedOut:
		b.WriteString("[killed at its timeout]")
	case o.OOM:
		fmt.Fprintf(&b, "[out of memory, exit code %d]", *o.ExitCode)
	default:
		fmt.Fprintf(&b, "[exit code %d]", *o.ExitCode)
	}
	if o.Restarted {
		b.WriteString("\n[the sandbox had been stopped for being idle, and was started again: its files are there, its processes are not]")
	}
	return b.String()
}

func (o *commandOut) ended(e *client.End) {
	o.ExitCode, o.Signal, o.TimedOut, o.OOM = &e.Exit.Code, e.Exit.Signal, e.Exit.Timeout, e.Exit.OOM
	o.WallMS = int64(e.Usage.WallMS)
}

// result returns the output with its text.
func (o commandOut) result() (*mcp.CallToolResult, commandOut, error) {
	o.Stdout, o.Stderr = strings.ToValidUTF8(o.Stdout, "\uFFFD"), strings.ToValidUTF8(o.Stderr, "\uFFFD")
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: o.text()}}}, o, nil
}

// request returns the request of a command in a sandbox.
func (in *commandIn) request(b *box, most time.Duration) (api.ExecRequest, error) {
	req := api.ExecRequest{Argv: in.Argv, Stdin: []byte(in.Stdin), Timeout: in.Timeout}
	size := len(in.Command)
	for _, a := range in.Argv {
		size += len(a) + 1
	}
	var err error
	switch {
	case (in.Command == "") == (len(in.Argv) == 0):
		return req, errors.New("give either command, a shell line, or argv, a program with its arguments")
	case size > maxLine:
		return req, fmt.Errorf("the command has more than %d bytes; write it to a file", maxLine)
	case len(in.Stdin) > maxStdin:
		return req, fmt.Errorf("stdin has more than %d bytes; write it to a file", maxStdin)
	case !(in.Timeout >= 0): // NaN too
		return req, fmt.Errorf("timeout %v: no time", in.Timeout)
	case in.Timeout > most.Seconds() && !in.Background:
		return req, fmt.Errorf("timeout %v: at most %v seconds are allowed; run it in the background", in.Timeout, most.Seconds())
	case in.Timeout == 0 && !in.Background:
		req.Timeout = most.Seconds()
	}
	if in.Command != "" {
		req.Argv = []string{"/bin/sh", "-c", in.Command}
	}
	if in.Cwd != "" {
		if req.Cwd, err = b.abs(in.Cwd); err != nil {
			return req, fmt.Errorf("cwd: %w", err)
		}
	}
	req.Env, err = environment(in.Env)
	return req, err
}

func runCommand(ctx context.Context, c *call, in commandIn) (*mcp.CallToolResult, commandOut, error) {
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, commandOut{}, err
	}
	req, err := in.request(b, c.s.opts.Timeout)
	if err != nil {
		return nil, commandOut{}, err
	}
	var out commandOut
	if in.Background {
		req.OutputLimit = background
		out.Restarted, err = c.se.awake(ctx, b, func() error {
			e, err := c.s.api.Detach(ctx, b.id, req)
			if err == nil {
				out.ID, out.Sandbox, out.Running, out.Offset = e.ID, b.id, true, new(int64)
			}
			return err
		})
		if err != nil {
			return nil, out, err
		}
		return out.result()
	}
	var stdout, stderr middle
	out.Restarted, err = c.se.awake(ctx, b, func() error {
		end, err := c.s.api.ExecStream(ctx, b.id, req, func(e api.ExecEvent) error {
			data := client.Output(e)
			if e.Stream == "stderr" {
				stderr.add(data)
			} else {
				stdout.add(data)
			}
			c.noteOutput(data)
			return nil
		})
		if err == nil {
			out.ended(end)
		}
		return err
	})
	if err != nil {
		return nil, out, err
	}
	out.Stdout, out.Stderr = stdout.String(), stderr.String()
	out.Truncated = stdout.omitted() > 0 || stderr.omitted() > 0
	return out.result()
}

// noteOutput makes the last line of output the message of the next progress notification.
func (c *call) noteOutput(data []byte) {
	if c.progress == nil || len(data) == 0 {
		return
	}
	if len(data) > 4*maxNote {
		data = data[len(data)-4*maxNote:]
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(data), ""))
	if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, text)
	if n := utf8.RuneCountInString(text); n > maxNote {
		text = string([]rune(text)[n-maxNote:])
	}
	if text != "" {
		c.note(text)
	}
}

// middle keeps the beginning and the end of a stream: models look for the cause at the end, and for
// the steps at the beginning.
type middle struct {
	head, tail []byte // the tail is twice as long while it is written
	total      int64
}

const half = maxOutput / 2

func (m *middle) add(data []byte) {
	m.total += int64(len(data))
	if n := min(half-len(m.head), len(data)); n > 0 {
		m.head, data = append(m.head, data[:n]...), data[n:]
	}
	if len(data) > half {
		data = data[len(data)-half:]
	}
	if m.tail = append(m.tail, data...); len(m.tail) > 2*half {
		m.tail = append(m.tail[:0], m.tail[len(m.tail)-half:]...)
	}
}

// end returns the tail that is kept.
func (m *middle) end() []byte { return m.tail[max(0, len(m.tail)-half):] }

func (m *middle) omitted() int64 { return m.total - int64(len(m.head)) - int64(len(m.end())) }

func (m *middle) String() string {
	if n := m.omitted(); n > 0 {
		return string(m.head) + fmt.Sprintf("\n[... %d bytes are left out ...]\n", n) + string(m.end())
	}
	return string(m.head) + string(m.end())
}

// commandRef names a command in the background.
type commandRef struct {
	which

	ID string `json:"id" jsonschema:"id that run_command returned"`
}

type outputIn struct {
	commandRef

	Offset int64   `json:"offset,omitempty" jsonschema:"where the output begins: 0, or the offset of the last answer"`
	Wait   float64 `json:"wait,omitempty" jsonschema:"seconds to wait for the command's end, at most 50"`
}

// command returns a command in the background and its sandbox.
func (c *call) command(ctx context.Context, ref commandRef) (*box, *api.Exec, error) {
	b, err := c.existing(ref.which)
	if err != nil {
		return nil, nil, err
	}
	if ref.ID == "" {
		return nil, nil, errors.New("id is missing")
	}
	e, err := c.s.api.GetExec(ctx, b.id, ref.ID)
	return b, e, err
}

// errFull ends the reading of output that an answer has no room for, or that is read so far.
var errFull = errors.New("read so far")

func commandOutput(ctx context.Context, c *call, in outputIn) (*mcp.CallToolResult, commandOut, error) {
	if in.Offset < 0 || !(in.Wait >= 0 && in.Wait <= maxWait) {
		return nil, commandOut{}, fmt.Errorf("offset is at least 0, and wait from 0 to %d", maxWait)
	}
	b, e, err := c.command(ctx, in.commandRef)
	if err != nil {
		return nil, commandOut{}, err
	}
	out := commandOut{ID: e.ID, Sandbox: b.id, Running: e.State == api.ExecRunning}
	at := in.Offset
	var stdout, stderr []byte
	written := e.StdoutBytes + e.StderrBytes
	// The stream of a command that runs does not end where its output does: the context ends it.
	rctx, cancel := context.WithTimeout(ctx, time.Duration(in.Wait*float64(time.Second)))
	if !out.Running || in.Wait == 0 {
		cancel()
		rctx, cancel = context.WithCancel(ctx)
	}
	defer cancel()
	var end *client.End
	if out.Running && in.Wait == 0 && at >= written {
		out.Offset = &at
		return out.result()
	}
	end, err = c.s.api.AttachStream(rctx, b.id, e.ID, at, func(ev api.ExecEvent) error {
		data := client.Output(ev)
		if ev.Dropped > 0 {
			out.Truncated = true
		}
		if len(data) == 0 {
			return nil
		}
		room := max(0, maxOutput-len(stdout)-len(stderr))
		at = ev.Offset + int64(min(room, len(data)))
		full := len(data) > room
		data = data[:min(room, len(data))]
		if ev.Stream == "stderr" {
			stderr = append(stderr, data...)
		} else {
			stdout = append(stdout, data...)
		}
		c.noteOutput(data)
		if full || out.Running && in.Wait == 0 && at >= written {
			return errFull
		}
		return nil
	})
	switch {
	case err == nil:
		out.Running = false
		out.ended(end)
	case errors.Is(err, errFull), errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		if errors.Is(err, errFull) && e.Exit != nil && len(stdout)+len(stderr) >= maxOutput {
			out.Truncated = true
		}
	default:
		return nil, out, err
	}
	out.Stdout, out.Stderr, out.Offset = string(stdout), string(stderr), &at
	if !out.Running && out.ExitCode == nil && e.Exit != nil {
		out.ended(&client.End{Exit: *e.Exit})
	}
	return out.result()
}

type killIn struct {
	commandRef

	Signal string `json:"signal,omitempty" jsonschema:"signal such as SIGINT or SIGTERM; default: SIGKILL"`
}

func killCommand(ctx context.Context, c *call, in killIn) (*mcp.CallToolResult, done, error) {
	b, e, err := c.command(ctx, in.commandRef)
	if err != nil {
		return nil, done{}, err
	}
	if in.Signal == "" {
		in.Signal = "SIGKILL"
	}
	if err := c.s.api.SignalExec(ctx, b.id, e.ID, api.ExecSignal{Signal: in.Signal, All: true}); err != nil {
		return nil, done{}, err
	}
	return nil, done{true}, nil
}
