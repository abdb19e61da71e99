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

// RecordName is the name of the record in a run's directory.
const RecordName = "record.jsonl"

// recordVersion changes when an older reader would misread new lines.
const recordVersion = 1

// maxRecordLine bounds the size of one event in bytes. Providers bound a model's turn, and we bound
// observations.
const maxRecordLine = 256 << 20

// Event is one line of record.jsonl, the only source about a run: trajectory.json, show, list,
// resume, fork and replay are derived from it. Lines are only appended. Exactly one of the pointers
// is set; its JSON name is the kind of the event.
//
// The order within a turn is request and response; then verdict, began and ended for each call;
// then turn_end. The began event of a call with effects, and all earlier events, are durable before
// the call runs. A turn is durable before the next begins. A call that has begun and not ended may
// have been done, in whole or in part.
type Event struct {
	V    int       `json:"v"`
	N    int       `json:"n"` // number of the line, from 1
	At   time.Time `json:"at"`
	Turn int       `json:"turn,omitempty"` // from 1
	Call int       `json:"call,omitempty"` // number within the turn, from 1

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

// kinds returns the number of pointers that are set.
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

// RunEvent is the first line. With the model's key and the hook's address, it is sufficient to
// resume the run.
type RunEvent struct {
	ID          string         `json:"id"` // original name of the run's directory
	Query       string         `json:"query"`
	System      string         `json:"system"` // rendered prompts
	User        string         `json:"user"`
	Prompt      PromptConfig   `json:"prompt"`
	LLMName     string         `json:"llm_name,omitempty"` // as the user named the model, with its provider
	Model       string         `json:"model"`
	ModelSource string         `json:"model_source"`
	BaseURL     string         `json:"base_url,omitempty"`
	Image       string         `json:"image"`
	Limits      api.Limits     `json:"limits,omitzero"`
	Network     api.Network    `json:"network,omitzero"`    // of each sandbox of the run
	InputDir    string         `json:"input_dir,omitempty"` // absolute, on the host
	RepoDir     string         `json:"repo_dir,omitempty"`  // as above
	GitIgnore   bool           `json:"gitignore,omitempty"`
	Budget      Budget         `json:"budget"`
	PerCall     int            `json:"max_tokens_per_call"`
	Temperature *float64       `json:"temperature,omitempty"`
	ExtraBody   map[string]any `json:"extra_body,omitempty"`
	ToolTimeout time.Duration  `json:"tool_timeout_ns"`
	Collect     CollectLimits  `json:"collect"`
	Policy      string         `json:"policy,omitempty"` // source text
	Snapshots   bool           `json:"snapshot_turns,omitempty"`
	SaveCalls   bool           `json:"save_requests,omitempty"`
	Fork        *ForkOrigin    `json:"fork,omitempty"`
}

// ForkOrigin names the run and the turn from which a run was forked. The record repeats the turns
// up to that one.
type ForkOrigin struct {
	Dir  string `json:"dir"`
	Turn int    `json:"turn"`
}

// SandboxEvent records a sandbox of the run: first its name before its creation, then that it is
// ready.
type SandboxEvent struct {
	Name     string `json:"name"`
	ID       string `json:"id,omitempty"`
	Ready    bool   `json:"ready,omitempty"`
	Snapshot string `json:"snapshot,omitempty"` // origin of its files
	// Rebuilt is the number of calls that a fork without a snapshot ran again. Differences is the
	// number of those whose observation differed.
	Rebuilt     int `json:"rebuilt,omitempty"`
	Differences int `json:"differences,omitempty"`
}

// RequestEvent records that the model is about to be called. The request follows from earlier
// events.
type RequestEvent struct {
	Reminder  string `json:"reminder,omitempty"` // text appended to the last message
	Messages  int    `json:"messages"`
	Tokens    int    `json:"tokens"` // estimated size of the conversation
	MaxTokens int    `json:"max_tokens"`
}

// ResponseEvent is the model's turn.
type ResponseEvent struct {
	Content      string          `json:"content"`
	Reasoning    string          `json:"reasoning,omitempty"`
	ToolCalls    []RecordedCall  `json:"tool_calls,omitempty"`
	FinishReason string          `json:"finish_reason,omitempty"`
	Usage        llm.Usage       `json:"usage"`
	Raw          json.RawMessage `json:"raw,omitempty"` // message as its provider expects it back; RawFormat is its format
	RawFormat    llm.Format      `json:"raw_format,omitempty"`
	Time         float64         `json:"seconds"`
}

// RecordedCall is the recorded form of an [llm.ToolCall].
type RecordedCall struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"` // the model's own text, valid JSON or not
}

// message returns the turn in the form for later requests.
func (r *ResponseEvent) message() llm.Message {
	m := llm.Message{Role: llm.RoleAssistant, Content: r.Content, Raw: r.Raw, RawFormat: r.RawFormat}
	for _, c := range r.ToolCalls {
		m.ToolCalls = append(m.ToolCalls, llm.ToolCall(c))
	}
	return m
}

// newResponse converts a model's turn for the record.
func newResponse(resp *llm.Response, took time.Duration) *ResponseEvent {
	e := &ResponseEvent{
		Content: resp.Content, Reasoning: resp.Reasoning, FinishReason: resp.FinishReason, Usage: resp.Usage, Raw: resp.Message.Raw, RawFormat: resp.Message.RawFormat, Time: seconds(took),
	}
	for _, c := range resp.ToolCalls {
		e.ToolCalls = append(e.ToolCalls, RecordedCall(c))
	}
	return e
}

// BeganEvent records that a call is about to run.
type BeganEvent struct {
	Repeatable bool `json:"repeatable,omitempty"` // running it twice has the effect of running it once
}

// EndedEvent is the answer to a call, whether it ran or not.
type EndedEvent struct {
	Observation string   `json:"observation"`
	Failed      bool     `json:"failed,omitempty"`
	Submit      bool     `json:"submit,omitempty"`
	NotRun      bool     `json:"not_run,omitempty"` // denied, malformed or too late
	Unknown     bool     `json:"unknown,omitempty"` // begun when the agent ended; its outcome is unknown
	ToolUse     *ToolUse `json:"use,omitempty"`
	Time        float64  `json:"seconds"`
}

// ToolUse holds the sandbox's figures for a command, and its exit.
type ToolUse struct {
	CPU    float64  `json:"cpu_time"`              // seconds
	Memory int64    `json:"memory_peak,omitempty"` // bytes
	Exit   api.Exit `json:"exit"`
}

// TurnEvent records that a turn is complete and answered.
type TurnEvent struct {
	Reminder string `json:"reminder,omitempty"` // sent to a model that called no tool
	Spent    Spent  `json:"spent"`
	Snapshot string `json:"snapshot,omitempty"` // ID of the snapshot taken after it
}

// ResumedEvent records that another process continues the run.
type ResumedEvent struct {
	Budget      Budget  `json:"budget"`
	Policy      string  `json:"policy,omitempty"`
	LLMName     string  `json:"llm_name,omitempty"`
	Model       string  `json:"model"`
	ModelSource string  `json:"model_source"`
	BaseURL     string  `json:"base_url,omitempty"`
	Spent       Spent   `json:"spent"`
	Message     *string `json:"message,omitempty"` // message of the user to the model
}

// EndEvent records the end of a run.
type EndEvent struct {
	Reason ExitReason `json:"reason"`
	Detail string     `json:"detail,omitempty"`
	Output *Collected `json:"output,omitempty"`
	Patch  *Patch     `json:"patch,omitempty"`
	Spent  Spent      `json:"spent"`
	// OutputError is the reason why the output is incomplete. Resume collects it again if the
	// sandbox exists.
	OutputError string `json:"output_error,omitempty"`
}

// record is an open record. One process at a time holds its lock.
type record struct {
	file    *os.File
	n       int
	now     func() time.Time
	secrets [][]byte // in their JSON forms
	dirty   bool     // lines were written since the last sync
	broken  error    // first write error; no line may follow a broken one
}

// ErrRunning is the error of [Resume] and [RemoveRun] for a run that another process works on.
var ErrRunning = errors.New("another process is working on this run")

// ErrUnreadable is the class of permanent errors of a record: it is damaged, has a newer version,
// or is no file that can be opened.
var ErrUnreadable = errors.New("the record cannot be read")

// unreadableError belongs to ErrUnreadable without repeating its text.
type unreadableError struct{ error }

func (unreadableError) Is(target error) bool { return target == ErrUnreadable }
func (e unreadableError) Unwrap() error      { return e.error }

func unreadablef(format string, args ...any) error {
	return unreadableError{fmt.Errorf(format, args...)}
}

// errNotBegun is the error for a record whose first line was cut off by a crash.
var errNotBegun error = unreadableError{errors.New("it has no whole line: the run had not begun")}

// createRecord creates the record of a new run.
func createRecord(dir string, now func() time.Time, secrets []string) (*record, error) {
	f, err := os.OpenFile(filepath.Join(dir, RecordName), os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o644) //nolint:gosec // readable by others, as the umask allows
	if err != nil {
		return nil, fmt.Errorf("begin the record: %w", err)
	}
	if err := lock(f); err != nil {
		return nil, errors.Join(fmt.Errorf("begin the record: %w", err), f.Close())
	}
	return &record{file: f, now: now, secrets: secretForms(secrets)}, nil
}

// openFile opens an existing record without blocking: an untrusted process may have replaced it by
// a FIFO.
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

// noRecord lists the errors that describe the record itself. Other errors describe the kernel or
// the moment.
var noRecord = []error{unix.ENOENT, unix.ELOOP, unix.ENXIO, unix.EISDIR, unix.ENODEV, unix.EACCES, unix.EPERM}

// openRecord opens the record of a run to continue it. It removes an incomplete last line: no
// action can have followed one.
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
	return &record{file: f, n: len(events), now: now, secrets: secretForms(secrets)}, events, nil
}

// wholeFile is the lock of a record's writer. As an open file description lock it ends with its
// process. Unlike a lock of flock(2) it can be queried without being taken.
func wholeFile() unix.Flock_t { return unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart} }

func lock(f *os.File) error {
	l := wholeFile()
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrRunning
	}
	return err
}

// ReadRecord reads the record in a run's directory; running reports whether a process works on the
// run.
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

// readEvents reads the complete lines of a record and returns their total size.
func readEvents(r io.Reader) (events []Event, whole int64, err error) {
	br := bufio.NewReaderSize(r, 1<<16)
	for {
		line, err := readLine(br)
		if errors.Is(err, io.EOF) {
			break // text behind the last newline is incomplete
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

// maxSalvaged is the maximum number of lines taken from an unreadable record. An honest run has a
// few that name sandboxes.
const maxSalvaged = 10_000

// maxSalvagedLine bounds such a line in bytes: it has two names and some numbers.
const maxSalvagedLine = 1 << 16

// salvageEvents returns the readable lines of a damaged record that name sandboxes. The record may
// be hostile and of any size, so it reads no more than one honest line may have, and keeps one
// short line at a time.
func salvageEvents(r io.Reader) (events []Event, err error) {
	br := bufio.NewReaderSize(io.LimitReader(r, maxRecordLine), maxSalvagedLine)
	for long := false; len(events) < maxSalvaged; {
		line, err := br.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		end := long // of a line that was too long
		if long = errors.Is(err, bufio.ErrBufferFull); long {
			continue
		}
		if err != nil {
			return nil, err
		}
		var e Event
		if !end && json.Unmarshal(line, &e) == nil && e.V == recordVersion && e.kinds() == 1 && e.Sandbox != nil {
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

// append writes an event and returns it as recorded, without secrets. With sync the event and all
// earlier ones are durable when append returns.
func (r *record) append(e Event, sync bool) (Event, error) {
	if r.broken != nil {
		return e, r.broken
	}
	e.V, e.N = recordVersion, r.n+1
	if e.At.IsZero() { // otherwise it is a copy
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
		r.broken = fmt.Errorf("record: %w", err) // a part of the line may have been written
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
		// The kernel may have dropped the pages that it could not write: a second fdatasync would
		// report success.
		r.broken = fmt.Errorf("record: sync: %w", err)
		return r.broken
	}
	r.dirty = false
	return nil
}

// close syncs and closes the record, which releases the run.
func (r *record) close() error { return errors.Join(r.sync(), r.file.Close()) }

func marshalLine(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // these files are for people
	err := enc.Encode(v)
	return b.Bytes(), err
}

// minSecret is the length of the shortest text that is redacted; shorter ones would match parts of
// words.
const minSecret = 8

// secretForms returns secrets as they appear within JSON text, and within JSON text that is itself
// a JSON string, such as a call's arguments. Other encodings of a secret are not found.
func secretForms(secrets []string) [][]byte {
	var out [][]byte
	for _, s := range secrets {
		if len(s) < minSecret {
			continue
		}
		html, err := json.Marshal(s)
		if err != nil { // a string always marshals
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

// quoted returns a text as a JSON string, without the quotes.
func quoted(s string) []byte {
	b, err := marshalLine(s)
	if err != nil { // a string always marshals
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
