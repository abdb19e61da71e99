package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
)

// RecordName is the record's file in a run's directory.
const RecordName = "record.jsonl"

// recordVersion is raised when an older reader would misunderstand what is written.
const recordVersion = 1

// maxRecordLine bounds one event. A model's turn is bounded by its provider, an observation by us.
const maxRecordLine = 256 << 20

// Event is one line of record.jsonl, the one source of what is known about a run: trajectory.json, show, list, resume,
// fork and replay are derived from it. Lines are only ever appended. Exactly one of the pointers is set, by which the event's
// kind is known; its json name is the kind's name.
//
// The order within a turn is request, response, then for each call verdict, began, ended, and at the end turn_end. That a call
// with effects has begun, and all before it, is durable before it runs; a turn is durable before the next begins. A call that
// has begun and not ended may have been done, in whole or in part.
type Event struct {
	V    int       `json:"v"`
	N    int       `json:"n"` // counts the lines, from 1
	At   time.Time `json:"at"`
	Turn int       `json:"turn,omitempty"` // from 1
	Call int       `json:"call,omitempty"` // of the turn, from 1

	Run      *RunEvent       `json:"run,omitempty"`
	Sandbox  *SandboxEvent   `json:"sandbox,omitempty"`
	Request  *RequestEvent   `json:"request,omitempty"`
	Response *ResponseEvent  `json:"response,omitempty"`
	Verdict  *policy.Verdict `json:"verdict,omitempty"`
	Began    *BeganEvent     `json:"began,omitempty"`
	Ended    *EndedEvent     `json:"ended,omitempty"`
	TurnEnd  *TurnEvent      `json:"turn_end,omitempty"`
	Outputs  *Outputs        `json:"outputs,omitempty"`
	Resumed  *ResumedEvent   `json:"resumed,omitempty"`
	End      *EndEvent       `json:"end,omitempty"`
}

// kinds counts what is set of an event.
func (e *Event) kinds() int {
	n := 0
	for _, set := range []bool{
		e.Run != nil, e.Sandbox != nil, e.Request != nil, e.Response != nil, e.Verdict != nil, e.Began != nil, e.Ended != nil,
		e.TurnEnd != nil, e.Outputs != nil, e.Resumed != nil, e.End != nil,
	} {
		if set {
			n++
		}
	}
	return n
}

// RunEvent is the first line: all that is needed to go on with the run but the model's key and the hook's address.
type RunEvent struct {
	ID          string         `json:"id"` // the name of the run's directory when it was made
	Query       string         `json:"query"`
	System      string         `json:"system"` // the prompts as the model gets them
	User        string         `json:"user"`
	Prompt      PromptConfig   `json:"prompt"`
	LLMName     string         `json:"llm_name,omitempty"` // as the user named the model, provider and all
	Model       string         `json:"model"`
	ModelSource string         `json:"model_source"`
	BaseURL     string         `json:"base_url,omitempty"`
	Image       string         `json:"image"`
	Limits      api.Limits     `json:"limits,omitzero"`
	InputDir    string         `json:"input_dir,omitempty"` // absolute, on the host
	Budget      Budget         `json:"budget"`
	PerCall     int            `json:"max_tokens_per_call"`
	Temperature *float64       `json:"temperature,omitempty"`
	ExtraBody   map[string]any `json:"extra_body,omitempty"`
	ToolTimeout time.Duration  `json:"tool_timeout_ns"`
	Collect     CollectLimits  `json:"collect"`
	Policy      string         `json:"policy,omitempty"` // its source
	Snapshots   bool           `json:"snapshot_turns,omitempty"`
	SaveCalls   bool           `json:"save_requests,omitempty"`
	Fork        *ForkOrigin    `json:"fork,omitempty"`
}

// ForkOrigin says of which turn of which run this is a branch. The turns up to it follow as they stand there.
type ForkOrigin struct {
	Dir  string `json:"dir"`
	Turn int    `json:"turn"`
}

// SandboxEvent says that the run has a sandbox: first that it is about to be made under a name, then that it is ready.
type SandboxEvent struct {
	Name     string `json:"name"`
	ID       string `json:"id,omitempty"`
	Ready    bool   `json:"ready,omitempty"`
	Snapshot string `json:"snapshot,omitempty"` // that it was made of
	// Rebuilt is how many calls were run in it again, for a branch without a snapshot, and Differences how many of them were
	// answered otherwise than the first time.
	Rebuilt     int `json:"rebuilt,omitempty"`
	Differences int `json:"differences,omitempty"`
}

// RequestEvent says that the model is about to be asked. What it is asked follows from the events before.
type RequestEvent struct {
	Reminder  string `json:"reminder,omitempty"` // put behind the last message
	Messages  int    `json:"messages"`
	Tokens    int    `json:"tokens"` // of the conversation, about
	MaxTokens int    `json:"max_tokens"`
}

// ResponseEvent is the model's turn.
type ResponseEvent struct {
	Content      string          `json:"content"`
	Reasoning    string          `json:"reasoning,omitempty"`
	ToolCalls    []RecordedCall  `json:"tool_calls,omitempty"`
	FinishReason string          `json:"finish_reason,omitempty"`
	Usage        llm.Usage       `json:"usage"`
	Raw          json.RawMessage `json:"raw,omitempty"` // the message as its provider wants it back, and in which wire format
	RawFormat    llm.Format      `json:"raw_format,omitempty"`
	Time         float64         `json:"seconds"`
}

// RecordedCall is an [llm.ToolCall] as the record has it.
type RecordedCall struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"` // the model's own text, valid JSON or not
}

// message is the turn as it stands in later requests.
func (r *ResponseEvent) message() llm.Message {
	m := llm.Message{Role: llm.RoleAssistant, Content: r.Content, Raw: r.Raw, RawFormat: r.RawFormat}
	for _, c := range r.ToolCalls {
		m.ToolCalls = append(m.ToolCalls, llm.ToolCall(c))
	}
	return m
}

// newResponse takes a model's turn into the record.
func newResponse(resp *llm.Response, took time.Duration) *ResponseEvent {
	e := &ResponseEvent{
		Content: resp.Content, Reasoning: resp.Reasoning, FinishReason: resp.FinishReason, Usage: resp.Usage, Raw: resp.Message.Raw, RawFormat: resp.Message.RawFormat, Time: seconds(took),
	}
	for _, c := range resp.ToolCalls {
		e.ToolCalls = append(e.ToolCalls, RecordedCall(c))
	}
	return e
}

// BeganEvent says that a call is about to be run.
type BeganEvent struct {
	Repeatable bool `json:"repeatable,omitempty"` // to run it twice is as good as once
}

// EndedEvent is the answer to a call, whether it was run or not.
type EndedEvent struct {
	Observation string   `json:"observation"`
	Failed      bool     `json:"failed,omitempty"`
	Submit      bool     `json:"submit,omitempty"`
	NotRun      bool     `json:"not_run,omitempty"` // denied, malformed, or too late
	Unknown     bool     `json:"unknown,omitempty"` // it had begun when the agent ended: nobody knows whether it was done
	ToolUse     *ToolUse `json:"use,omitempty"`
	Time        float64  `json:"seconds"`
}

// ToolUse is what a command used, as its sandbox says, and how it ended.
type ToolUse struct {
	CPU    float64  `json:"cpu_time"`              // seconds
	Memory int64    `json:"memory_peak,omitempty"` // bytes
	Exit   api.Exit `json:"exit"`
}

// TurnEvent says that all of a turn is done and answered.
type TurnEvent struct {
	Reminder string `json:"reminder,omitempty"` // said to a model that called no tool
	Spent    Spent  `json:"spent"`
	Snapshot string `json:"snapshot,omitempty"` // id of the one taken after it
}

// ResumedEvent says that another process goes on with the run.
type ResumedEvent struct {
	Budget      Budget  `json:"budget"`
	Policy      string  `json:"policy,omitempty"`
	LLMName     string  `json:"llm_name,omitempty"`
	Model       string  `json:"model"`
	ModelSource string  `json:"model_source"`
	BaseURL     string  `json:"base_url,omitempty"`
	Spent       Spent   `json:"spent"`
	Message     *string `json:"message,omitempty"` // said to the model by the person who resumes
}

// EndEvent is how a run ended.
type EndEvent struct {
	Reason ExitReason `json:"reason"`
	Detail string     `json:"detail,omitempty"`
	Output *Collected `json:"output,omitempty"`
	Spent  Spent      `json:"spent"`
	// OutputError is why the output is not all there. Resume collects it again, if the sandbox is.
	OutputError string `json:"output_error,omitempty"`
}

// record is the open file. One process has it at a time.
type record struct {
	file    *os.File
	n       int
	now     func() time.Time
	secrets [][]byte // as they would stand in JSON
	dirty   bool     // lines are written and not synced
	broken  error    // nothing may follow a line that could not be written
}

// ErrRunning is the error of [Resume] and [RemoveRun] for a run that another process works on.
var ErrRunning = errors.New("another process is working on this run")

// ErrUnreadable is the class of errors for a record that will not be read by this program, whenever it is tried again: it is damaged, of a
// newer version, or no file that can be opened.
var ErrUnreadable = errors.New("the record cannot be read")

// unreadableError is one of that class, without the class's words in its text.
type unreadableError struct{ error }

func (unreadableError) Is(target error) bool { return target == ErrUnreadable }
func (e unreadableError) Unwrap() error      { return e.error }

func unreadablef(format string, args ...any) error {
	return unreadableError{fmt.Errorf(format, args...)}
}

// errNotBegun is the error for what a crash leaves that struck while the first line was written.
var errNotBegun error = unreadableError{errors.New("it has no whole line: the run had not begun")}

// createRecord begins the record of a new run.
func createRecord(dir string, now func() time.Time, secrets []string) (*record, error) {
	f, err := os.OpenFile(filepath.Join(dir, RecordName), os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o644) //nolint:gosec // read by others, as the umask allows
	if err != nil {
		return nil, fmt.Errorf("begin the record: %w", err)
	}
	if err := lock(f); err != nil {
		return nil, errors.Join(fmt.Errorf("begin the record: %w", err), f.Close())
	}
	return &record{file: f, now: now, secrets: inJSON(secrets)}, nil
}

// openFile opens the record of a run that is there. Whoever has left the run may have made a FIFO of it, on which one would wait.
func openFile(dir string, flag int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, RecordName), flag|unix.O_NONBLOCK, 0)
	if err != nil && slices.ContainsFunc(noRecord, func(no error) bool { return errors.Is(err, no) }) {
		err = unreadableError{err}
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = unreadablef("%s is no file", f.Name())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// noRecord are the errors with which the kernel says that a record is none: others it says of itself, or of that moment.
var noRecord = []error{unix.ENOENT, unix.ELOOP, unix.ENXIO, unix.EISDIR, unix.ENODEV, unix.EACCES, unix.EPERM}

// openRecord opens the record of a run to go on with it. What a crash has left of a last line is taken off: nothing
// had been done on the strength of it.
func openRecord(dir string, now func() time.Time, secrets []string) (*record, []Event, error) {
	f, err := openFile(dir, os.O_RDWR|os.O_APPEND)
	if err != nil {
		return nil, nil, fmt.Errorf("open the record: %w", err)
	}
	fail := func(err error) (*record, []Event, error) {
		return nil, nil, errors.Join(fmt.Errorf("open the record: %w", err), f.Close())
	}
	if err := lock(f); err != nil {
		return fail(err)
	}
	events, whole, err := readEvents(f)
	if err != nil {
		return fail(err)
	}
	if err := f.Truncate(whole); err != nil {
		return fail(err)
	}
	return &record{file: f, n: len(events), now: now, secrets: inJSON(secrets)}, events, nil
}

// wholeFile is the lock of who writes a record. It belongs to the open file, so it goes with its process, however that ends;
// and unlike flock(2)'s it can be asked for without being taken.
func wholeFile() unix.Flock_t { return unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart} }

func lock(f *os.File) error {
	l := wholeFile()
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrRunning
	}
	return err
}

// ReadRecord reads the record in a run's directory, of a run that still goes on as well. running says that it does.
func ReadRecord(dir string) (events []Event, running bool, err error) {
	f, err := openFile(dir, os.O_RDONLY)
	if err != nil {
		return nil, false, fmt.Errorf("read the record: %w", err)
	}
	defer f.Close()
	held := wholeFile()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &held); err != nil {
		return nil, false, fmt.Errorf("read the record in %s: ask for its lock: %w", dir, err)
	}
	running = held.Type != unix.F_UNLCK
	events, _, err = readEvents(f)
	if err != nil {
		return nil, running, fmt.Errorf("read the record in %s: %w", dir, err)
	}
	return events, running, nil
}

// readEvents reads the whole lines of a record, and says where they end.
func readEvents(r io.Reader) (events []Event, whole int64, err error) {
	br := bufio.NewReaderSize(r, 1<<16)
	for {
		line, err := readLine(br)
		if errors.Is(err, io.EOF) {
			break // what stands behind the last newline was not finished
		}
		if err != nil {
			return nil, 0, err
		}
		var e Event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, 0, unreadablef("line %d: %w", len(events)+1, err)
		}
		switch {
		case e.V != recordVersion:
			return nil, 0, unreadablef("line %d: it is of version %d; this program knows %d", len(events)+1, e.V, recordVersion)
		case e.N != len(events)+1:
			return nil, 0, unreadablef("line %d: it says that it is number %d", len(events)+1, e.N)
		case e.kinds() != 1:
			return nil, 0, unreadablef("line %d: it is of no kind that this program knows", len(events)+1)
		case e.N == 1 && e.Run == nil:
			return nil, 0, unreadablef("line 1: it does not begin a run")
		}
		events = append(events, e)
		whole += int64(len(line))
	}
	if len(events) == 0 {
		return nil, 0, errNotBegun
	}
	return events, whole, nil
}

// maxLeft is how many lines are kept of what is left of a record. An honest run has a few that name sandboxes.
const maxLeft = 10_000

// readWhatIsLeft reads those lines of a record that name sandboxes and can be read, whatever stands between them. Who has left the record
// may have made it as long as no disk is: no more is read than an honest line may have, which is where one that is too long ends too.
func readWhatIsLeft(r io.Reader) (events []Event, err error) {
	br := bufio.NewReaderSize(io.LimitReader(r, maxRecordLine), 1<<16)
	for len(events) < maxLeft {
		line, err := readLine(br)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		var e Event
		if json.Unmarshal(line, &e) == nil && e.V == recordVersion && e.kinds() == 1 && e.Sandbox != nil {
			events = append(events, Event{Sandbox: e.Sandbox})
		}
	}
	return events, nil
}

func readLine(br *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		if line = append(line, part...); len(line) > maxRecordLine {
			return nil, unreadablef("a line is longer than %d bytes", maxRecordLine)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// append writes one event and gives it back as it stands in the file: without secrets. sync makes it and all before
// it durable before append returns.
func (r *record) append(e Event, sync bool) (Event, error) {
	if r.broken != nil {
		return e, r.broken
	}
	e.V, e.N = recordVersion, r.n+1
	if e.At.IsZero() { // else it is a copy
		e.At = r.now().UTC()
	}
	line, err := marshalLine(e)
	if err != nil {
		return e, fmt.Errorf("record: %w", err)
	}
	if len(line) > maxRecordLine {
		return e, fmt.Errorf("record: a line of %d bytes could not be read again", len(line))
	}
	if clean := redact(line, r.secrets); !bytes.Equal(clean, line) {
		line = clean
		var again Event
		if err := json.Unmarshal(line, &again); err != nil {
			return e, fmt.Errorf("record: take a secret out: %w", err)
		}
		e = again
	}
	if _, err := r.file.Write(line); err != nil {
		r.broken = fmt.Errorf("record: %w", err) // a piece of the line may be there
		return e, r.broken
	}
	r.n, r.dirty = e.N, true
	if sync {
		return e, r.sync()
	}
	return e, nil
}

func (r *record) sync() error {
	if !r.dirty {
		return nil
	}
	if err := unix.Fdatasync(int(r.file.Fd())); err != nil {
		// The kernel may have dropped what it could not write: a second try would say that all is well.
		r.broken = fmt.Errorf("record: sync: %w", err)
		return r.broken
	}
	r.dirty = false
	return nil
}

// close syncs, closes, and so gives the run free.
func (r *record) close() error { return errors.Join(r.sync(), r.file.Close()) }

func marshalLine(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // people read these files
	err := enc.Encode(v)
	return b.Bytes(), err
}

// leastSecret is the shortest text that is taken out: shorter ones would stand in other words.
const leastSecret = 8

// inJSON gives secrets as they stand within JSON text, and within JSON text that is a text in JSON, as a call's arguments are. What
// a secret was made into by somebody who knows it is not found.
func inJSON(secrets []string) [][]byte {
	var out [][]byte
	for _, s := range secrets {
		if len(s) < leastSecret {
			continue
		}
		html, err := json.Marshal(s)
		if err != nil { // a text always marshals
			continue
		}
		once := [][]byte{quoted(s), html[1 : len(html)-1]}
		for _, form := range append(once, quoted(string(once[0])), quoted(string(once[1]))) {
			if !slices.ContainsFunc(out, func(b []byte) bool { return bytes.Equal(b, form) }) {
				out = append(out, form)
			}
		}
	}
	return out
}

// quoted is a text as JSON has it, without the quotes.
func quoted(s string) []byte {
	b, err := marshalLine(s)
	if err != nil { // a text always marshals
		return []byte(s)
	}
	b = bytes.TrimSuffix(b, []byte("\n"))
	return b[1 : len(b)-1]
}

func redact(text []byte, secrets [][]byte) []byte {
	for _, s := range secrets {
		text = bytes.ReplaceAll(text, s, []byte("[secret]"))
	}
	return text
}
