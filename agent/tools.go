package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
)

// Names of the tools for the model.
const (
	ToolEditor = "str_replace_editor"
	ToolBash   = "execute_bash"
	ToolSubmit = "submit"
)

// finished is the observation of submit.
const finished = "<<< Finished >>>"

// Tools returns the tools as described to the model.
func Tools() []llm.Tool {
	return []llm.Tool{
		{
			Name: ToolEditor,
			Description: `View, create and edit files in the sandbox. What you write is written exactly: no newline is added, no tab changed.
* view: a text file with line numbers (all of it, or the lines of view_range), or a directory two levels deep without hidden entries. Long output is shortened in the middle; use view_range to see the rest.
* create: write file_text to path, with the directories above it; a file that is there already is replaced.
* str_replace: replace old_str, which must stand exactly once in the file (include lines around it until it does), by new_str; without new_str it is deleted.
* insert: put new_str after line insert_line (0: before the first line).`,
			Parameters: json.RawMessage(`{
  "type": "object",
  "properties": {
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"], "description": "What to do."},
    "path": {"type": "string", "description": "Absolute path of the file or directory; a relative one starts at the working directory."},
    "file_text": {"type": "string", "description": "For create: the content of the file."},
    "old_str": {"type": "string", "description": "For str_replace: the text to replace."},
    "new_str": {"type": "string", "description": "For str_replace: the text in its place. For insert: the text to insert."},
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes, 0 for the start of the file."},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "For view of a file: [first, last] line, counted from 1; -1 as last means the end."}
  },
  "required": ["command", "path"],
  "additionalProperties": false
}`),
		},
		{
			Name: ToolBash,
			Description: `Run a bash command in the sandbox and get its exit code and output.
* Every call is a new shell in the working directory: variables and cd do not last, files do.
* Standard input is empty, so do not start programs that ask. After 120 seconds the command and everything it started is ended; you get what it wrote until then.
* Very long output is shortened in the middle: write it to a file and look at parts of it.`,
			Parameters: json.RawMessage(`{
  "type": "object",
  "properties": {"command": {"type": "string", "description": "The command, which may have several lines."}},
  "required": ["command"],
  "additionalProperties": false
}`),
		},
		{
			Name:        ToolSubmit,
			Description: "End the task when the work is done and the results are in the output directory.",
			Parameters:  json.RawMessage(`{"type": "object", "properties": {}, "required": [], "additionalProperties": false}`),
		},
	}
}

// toolbox runs tool calls in one sandbox.
type toolbox struct {
	sandbox     *Sandbox
	workingDir  string
	timeout     time.Duration
	outputLimit int    // bytes of each stream that the model sees
	shell       string // "bash", or "sh" if the image lacks bash
	scriptDir   string // directory for commands that are too long for argv
	scripts     int    // number of such commands
	ruled       bool   // a policy has read the commands as bash does
	onOutput    func([]byte)
}

func newTools(sandbox *Sandbox, workingDir string, timeout time.Duration) *toolbox {
	return &toolbox{sandbox: sandbox, workingDir: workingDir, timeout: timeout, outputLimit: defaultOutputLimit, shell: "bash", scriptDir: "/tmp"}
}

// observation is the answer to one tool call.
type observation struct {
	text   string
	failed bool // the call was defective or could not run; a non-zero exit is no failure
	use    *ToolUse
}

// toolError is a defect of a call. The model receives it and the run continues.
type toolError struct{ text string }

func (e *toolError) Error() string { return e.text }

func toolErrorf(format string, args ...any) error {
	return &toolError{fmt.Sprintf(format, args...)}
}

// action is a parsed tool call. The policy decides on this value, and this value runs: a second
// parse of the model's text might differ.
type action struct {
	tool    string
	command string     // of execute_bash
	isNew   bool       // the command is not the model's: the one that was asked about it has changed it
	edit    editorArgs // of str_replace_editor
}

// replaced returns the action with another command.
func (a action) replaced(command string) action {
	a.command, a.isNew = command, true
	return a
}

// readOnly reports whether the call can run twice, and concurrently with others like it.
func (a action) readOnly() bool { return a.tool == ToolEditor && a.edit.Command == "view" }

// parse parses a call. Its error is for the model.
func parse(call llm.ToolCall) (action, error) {
	a := action{tool: call.Name}
	switch call.Name {
	case ToolBash:
		var args struct {
			Command *string `json:"command"`
		}
		if err := decodeArguments(call.Arguments, &args, "command"); err != nil {
			return a, err
		}
		if args.Command == nil || strings.TrimSpace(*args.Command) == "" {
			return a, toolErrorf("Error: No command provided.")
		}
		if strings.ContainsRune(*args.Command, 0) {
			return a, toolErrorf("Error: the command holds a NUL character, which no program can be given.")
		}
		a.command = *args.Command
	case ToolEditor:
		if err := decodeArguments(call.Arguments, &a.edit, "command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"); err != nil {
			return a, err
		}
		return a, a.edit.check()
	case ToolSubmit:
		return a, decodeArguments(call.Arguments, &struct{}{})
	default:
		return a, toolErrorf("Unknown action: %s. The tools are %s, %s and %s.", clipMiddle(call.Name, 200), ToolEditor, ToolBash, ToolSubmit)
	}
	return a, nil
}

// run performs one action, and tells the model if it is not the model's own. An error means that
// the run cannot continue: the context ended or the sandbox is lost.
func (t *toolbox) run(ctx context.Context, a action) (observation, error) {
	obs, err := t.perform(ctx, a)
	if err == nil && a.isNew {
		obs.text = "Note: the command was changed before it ran. What ran is:\n" + a.command + "\n\n" + obs.text
	}
	return obs, err
}

func (t *toolbox) perform(ctx context.Context, a action) (observation, error) {
	var obs observation
	var err error
	switch a.tool {
	case ToolBash:
		obs, err = t.bash(ctx, a.command)
	case ToolEditor:
		if obs.text, err = t.edit(ctx, a.edit); err == nil {
			obs.text = "Execution output of [" + ToolEditor + "]:\n" + obs.text
		}
	case ToolSubmit:
		obs.text = finished
	}
	switch {
	case err == nil:
		return obs, nil
	case ctx.Err() != nil:
		return observation{}, context.Cause(ctx)
	}
	return refusal(a.tool, err)
}

// refusal returns the answer to a defective call; other errors are returned unchanged.
func refusal(tool string, err error) (observation, error) {
	m, ok := errors.AsType[*toolError](err)
	if !ok {
		return observation{}, err
	}
	text := m.text
	if !strings.HasPrefix(text, "Unknown action") {
		text = "Execution output of [" + tool + "]:\n" + text
	}
	return observation{text: text, failed: true}, nil
}

// decodeArguments decodes a call's arguments into dst, strictly: the model would believe that an
// ignored argument had effect. Names must match exactly and occur once; encoding/json would accept
// the last of "command" and "COMMAND". Empty text counts as no arguments, and null as an argument
// not given, since models send both.
func decodeArguments(raw string, dst any, names ...string) error {
	const want = "The arguments must be one JSON object."
	trimmed := strings.TrimSpace(raw)
	if trimmed == "" || trimmed == "null" {
		trimmed = "{}"
	}
	if !strings.HasPrefix(trimmed, "{") {
		return toolErrorf("Error: cannot read the arguments %s. %s", quoteBrief(raw), want)
	}
	keys, err := topKeys(trimmed)
	if err != nil {
		return toolErrorf("Error: cannot read the arguments %s: %v. %s", quoteBrief(raw), err, want)
	}
	seen := map[string]bool{}
	for _, key := range keys {
		if !slices.Contains(names, key) {
			return toolErrorf("Error: unknown argument %q.", clipMiddle(key, 200))
		}
		if seen[key] {
			return toolErrorf("Error: the argument `%s` stands twice.", key)
		}
		seen[key] = true
	}
	dec := json.NewDecoder(strings.NewReader(trimmed))
	err = dec.Decode(dst)
	var typeErr *json.UnmarshalTypeError
	switch {
	case err == nil:
	case errors.As(err, &typeErr) && typeErr.Field != "":
		return toolErrorf("Error: argument `%s` has the wrong type: got %s.", typeErr.Field, typeErr.Value)
	default:
		return toolErrorf("Error: cannot read the arguments %s: %v. %s", quoteBrief(raw), err, want)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return toolErrorf("Error: there is more text after the arguments %s. %s", quoteBrief(raw), want)
	}
	return nil
}

// topKeys returns the keys of a JSON object, repetitions included.
func topKeys(text string) ([]string, error) {
	dec := json.NewDecoder(strings.NewReader(text))
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	var keys []string
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, err
		}
		name, ok := key.(string)
		if !ok {
			return nil, fmt.Errorf("%v is no name", key)
		}
		keys = append(keys, name)
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

func quoteBrief(s string) string { return "`" + clipMiddle(s, 300) + "`" }

// integer accepts 5 and 5.0: JSON has one kind of number, and some models always write a fraction.
type integer int

func (i *integer) UnmarshalJSON(b []byte) error {
	var f float64
	if err := json.Unmarshal(b, &f); err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return &json.UnmarshalTypeError{Value: clipMiddle(string(b), 60) + ", want an integer", Field: "insert_line or view_range"}
	}
	*i = integer(f)
	return nil
}

// commandArgMax is the longest command in argv, in bytes: Linux allows 128 KiB for one argument.
const commandArgMax = 120 << 10

// readsOtherwise answers a command that the policy has read as bash does, in an image without it.
const readsOtherwise = "Error: not run: this sandbox has no bash, and its sh reads this command otherwise. Write it for a POSIX shell: [ ] for [[ ]], and no arrays, (( )) or <( )."

// bash runs the model's command line in a new shell.
func (t *toolbox) bash(ctx context.Context, command string) (observation, error) {
	argv := []string{t.shell, "-c", command}
	if len(command) > commandArgMax {
		t.scripts++
		script := fmt.Sprintf("%s/.command-%d.sh", t.scriptDir, t.scripts)
		if err := t.sandbox.WriteFile(ctx, script, strings.NewReader(command), 0o700, ""); err != nil {
			return observation{}, t.refused("store the command in "+script, err)
		}
		argv = []string{t.shell, script}
	}
	stdout, stderr := newHeadTail(captureBytes), newHeadTail(captureBytes)
	req := api.ExecRequest{Argv: argv, Cwd: t.workingDir, Timeout: t.timeout.Seconds()}
	if t.shell == "sh" && t.ruled && !policy.SameInSh(command) {
		return observation{}, toolErrorf(readsOtherwise)
	}
	outcome, err := t.sandbox.Exec(ctx, req, t.tee(stdout), t.tee(stderr))
	if hasCode(err, api.CodeProgramMissing) && t.shell == "bash" {
		t.shell = "sh" // Alpine, for example
		if t.ruled && !policy.SameInSh(command) {
			return observation{}, toolErrorf(readsOtherwise)
		}
		req.Argv = append([]string{t.shell}, argv[1:]...)
		outcome, err = t.sandbox.Exec(ctx, req, t.tee(stdout), t.tee(stderr))
	}
	if err != nil {
		return observation{}, t.refused("run the command", err)
	}

	var b strings.Builder
	switch exit := outcome.Exit; {
	case exit.Timeout:
		b.WriteString("Exit code: -1\n")
	case exit.Code == 0:
		b.WriteString("Exit code: 0\n")
	default:
		fmt.Fprintf(&b, "Exit code: Error: Exit code %d", exit.Code)
		if exit.Signal != "" {
			fmt.Fprintf(&b, " (killed by %s)", exit.Signal)
		}
		if exit.OOM {
			b.WriteString(" (the memory limit was reached)")
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "Execution output of [%s]:\n[STDOUT]\n%s", ToolBash, stdout.text(t.outputLimit))
	if text := stderr.text(t.outputLimit); strings.TrimSpace(text) != "" {
		endLine(&b)
		b.WriteString("[STDERR]\n" + text)
	}
	if outcome.Exit.Timeout {
		endLine(&b)
		fmt.Fprintf(&b, "The command took too long to execute (>%gs) and was ended, with everything it had started. What it wrote until then stands above.", t.timeout.Seconds())
	}
	return observation{text: b.String(), use: &ToolUse{
		CPU: seconds(time.Duration(outcome.Usage.CPUMS * float64(time.Millisecond))), Memory: outcome.Usage.MemoryPeak, Exit: outcome.Exit,
	}}, nil
}

func endLine(b *strings.Builder) {
	if s := b.String(); !strings.HasSuffix(s, "\n") {
		b.WriteByte('\n')
	}
}

// tee returns a writer to w that also calls onOutput.
func (t *toolbox) tee(w io.Writer) io.Writer {
	if t.onOutput == nil {
		return w
	}
	return io.MultiWriter(w, writerFunc(t.onOutput))
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

// refused converts an error of the sandbox to one for the model, unless the sandbox is lost.
func (t *toolbox) refused(doing string, err error) error {
	if lost(err) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return toolErrorf("Error: cannot %s: %v", doing, err)
}

// runProgram runs a common program without a shell and returns its output. ok is false if the
// program is missing or fails.
func (t *toolbox) runProgram(ctx context.Context, argv ...string) (out []byte, ok bool, err error) {
	stdout := newHeadTail(captureBytes)
	outcome, err := t.sandbox.Exec(ctx, api.ExecRequest{Argv: argv, Cwd: "/", Timeout: 30}, stdout, io.Discard)
	switch {
	case err != nil && lost(err):
		return nil, false, fmt.Errorf("run %s: %w", argv[0], err)
	case err != nil:
		return nil, false, nil //nolint:nilerr // an image may lack the program; the run continues
	case outcome.Exit.Timeout || outcome.Exit.Code != 0:
		return nil, false, nil
	}
	return stdout.bytes(), true, nil
}

// lines splits text after its newlines. An unfinished last line counts.
func lines(text []byte) [][]byte {
	if len(text) == 0 {
		return nil
	}
	l := bytes.SplitAfter(text, []byte("\n"))
	if len(l[len(l)-1]) == 0 {
		l = l[:len(l)-1]
	}
	return l
}
