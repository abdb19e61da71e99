package resident

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
)

// Bounds of messages.
const (
	MaxFrame   = 48 << 10  // bytes of a payload
	MaxMessage = 16 << 20  // bytes of a message in pieces
	maxFailure = 340 << 10 // bytes of each text of an error
	headerSize = 9
)

// ErrProtocol is the class of errors of a kernel that does not keep to the protocol.
var ErrProtocol = errors.New("the process of the context does not keep to the protocol")

func violated(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// Kind is the type of a frame.
type Kind byte

// Types of frames.
const (
	KindHello  Kind = 'h' // [Hello], with number 0
	KindStdout Kind = 'o'
	KindStderr Kind = 'e'
	KindResult Kind = 'r' // [api.CodeValue]
	KindError  Kind = 'x' // [api.CodeFailure]
	KindDone   Kind = 'd' // [Done]; the last of a run
	KindBegan  Kind = 'b' // without payload: see [Kernel.Begins]
	KindPiece  Kind = '+' // part of the message that follows
)

// A Frame is one frame, whose payload is the decoder's until the next call.
type Frame struct {
	Kind    Kind
	Run     uint32
	Payload []byte
}

// A Decoder splits a kernel's output into frames. Its memory is bounded by a frame and what one
// call of Write brings.
type Decoder struct {
	buf   []byte
	taken int   // bytes of buf that were returned
	at    int64 // offset at or before the first byte that was not returned
	last  int64 // offset behind the last write
	piece int   // length of the last write
}

// Write implements [Splitter]. Output on stderr is not the kernel's.
func (d *Decoder) Write(stream string, at int64, p []byte) {
	if stream == "stderr" {
		return
	}
	if d.Rest() == 0 {
		d.at = at
	}
	d.buf = append(d.buf[:copy(d.buf, d.buf[d.taken:])], p...)
	d.taken, d.last, d.piece = 0, at+int64(len(p)), len(p)
}

// Begin implements [Splitter]: frames have the number of their run.
func (d *Decoder) Begin(uint32) {}

// Place implements [Splitter].
func (d *Decoder) Place(end int64) int64 {
	rest := d.Rest()
	switch {
	case rest == 0:
		return end
	case rest <= d.piece:
		d.at = max(d.at, d.last-int64(rest))
	}
	return min(end, d.at)
}

// Next returns the next frame; false if it is not there as a whole.
func (d *Decoder) Next() (Frame, bool, error) {
	left := d.buf[d.taken:]
	if len(left) < headerSize {
		return Frame{}, false, nil
	}
	f := Frame{Kind: Kind(left[4]), Run: binary.BigEndian.Uint32(left[5:])}
	size := binary.BigEndian.Uint32(left)
	switch f.Kind {
	case KindHello, KindStdout, KindStderr, KindResult, KindError, KindDone, KindPiece:
	case KindBegan, kindSync:
		fallthrough
	default:
		return Frame{}, false, violated("a frame of type %q", rune(f.Kind))
	}
	if size > MaxFrame {
		return Frame{}, false, violated("a frame of %d bytes", size)
	}
	whole := headerSize + int(size)
	if len(left) < whole {
		return Frame{}, false, nil
	}
	f.Payload = left[headerSize:whole]
	d.taken += whole
	return f, true, nil
}

// Rest returns the number of bytes of a frame that is not there as a whole.
func (d *Decoder) Rest() int { return len(d.buf) - d.taken }

// Hello is the first message of a kernel.
type Hello struct {
	Protocol int    `json:"protocol"`
	Language string `json:"language"`
	Version  string `json:"version"` // of the interpreter
}

// Protocol is the version of the exchange.
const Protocol = 1

// ParseHello reads the first message.
func ParseHello(f Frame) (Hello, error) {
	var h Hello
	if f.Kind != KindHello || f.Run != 0 {
		return h, violated("its first frame is of type %q", rune(f.Kind))
	}
	if err := strict(f.Payload, &h); err != nil {
		return h, err
	}
	if h.Protocol != Protocol || len(h.Language) > 32 || len(h.Version) > 64 {
		return h, violated("hello of protocol %d", h.Protocol)
	}
	return h, nil
}

// Done is the last message of a run.
type Done struct {
	OK         bool    `json:"ok"`
	Count      int     `json:"count"` // of runs of this process
	Code       int     `json:"code"`  // exit code, of languages that have one
	CPUMS      float64 `json:"cpu_ms"`
	MemoryPeak int64   `json:"memory_peak"`
}

// A Message is one of the messages of a run: exactly one field is set.
type Message struct {
	Stdout, Stderr []byte // valid until the next call
	Result         *api.CodeValue
	Failure        *api.CodeFailure
	Done           *Done
}

// A Reader makes messages of the frames of one run.
type Reader struct {
	Run  uint32
	Skip bool // only the end of the run is of interest
	// Take asks for memory of n bytes of a message in pieces, before it is taken. If it returns false,
	// the message is omitted. Nil means that there is memory.
	Take func(n int) bool

	pieces  []byte
	omitted int // bytes of pieces for which there was no memory, and of those before them
}

// Read takes a frame; a nil message means that more frames follow.
func (r *Reader) Read(f Frame) (*Message, error) {
	if r.Skip && f.Run < r.Run {
		return nil, nil
	}
	if f.Run != r.Run {
		return nil, violated("a frame of run %d during run %d", f.Run, r.Run)
	}
	if f.Kind == KindPiece {
		switch {
		case r.Skip:
			return nil, nil
		case len(f.Payload) == 0:
			return nil, violated("an empty piece")
		case r.omitted+len(r.pieces)+len(f.Payload) > MaxMessage:
			return nil, violated("a message of more than %d bytes", MaxMessage)
		}
		r.append(f.Payload)
		return nil, nil
	}
	payload := f.Payload
	if len(r.pieces) > 0 || r.omitted > 0 {
		if f.Kind != KindResult && f.Kind != KindError {
			return nil, violated("pieces of a frame of type %q", rune(f.Kind))
		}
		r.append(f.Payload) // in place: it is large
		omitted := r.omitted
		payload, r.pieces, r.omitted = r.pieces, nil, 0
		if omitted > 0 {
			return omission(f.Kind, omitted), nil
		}
	}
	if r.Skip && f.Kind != KindDone {
		return nil, nil
	}
	m := &Message{}
	switch f.Kind {
	case KindStdout, KindStderr:
		if len(payload) == 0 {
			return nil, nil
		}
		if m.Stdout = payload; f.Kind == KindStderr {
			m.Stdout, m.Stderr = nil, payload
		}
	case KindResult:
		var v wireValue
		if err := strict(payload, &v); err != nil {
			return nil, err
		}
		m.Result = v.value()
	case KindError:
		m.Failure = new(api.CodeFailure)
		if err := strict(payload, m.Failure); err != nil {
			return nil, err
		}
		// Kernels count characters, and not all of them bound names.
		for _, text := range []*string{&m.Failure.Name, &m.Failure.Value, &m.Failure.Traceback} {
			*text = clip(*text)
		}
	case KindDone:
		m.Done = new(Done)
		if err := strict(payload, m.Done); err != nil {
			return nil, err
		}
		m.Done.bound()
	case KindBegan:
		return nil, nil
	case KindHello, KindPiece, kindSync:
		fallthrough
	default:
		return nil, violated("a frame of type %q in a run", rune(f.Kind))
	}
	return m, nil
}

// clip takes the middle out of a text of more than maxFailure bytes.
func clip(text string) string {
	if len(text) <= maxFailure {
		return text
	}
	const half = maxFailure / 2
	first, last := text[:half], text[len(text)-half:]
	gone := fmt.Sprintf("\n... [%d bytes]\n", len(text)-maxFailure)
	return strings.ToValidUTF8(first, "") + gone + strings.ToValidUTF8(last, "")
}

// append adds a piece to the message, or drops both if there is no memory for it.
func (r *Reader) append(piece []byte) {
	if r.omitted > 0 || r.Take != nil && !r.Take(len(piece)) {
		r.omitted += len(r.pieces) + len(piece)
		r.pieces = nil
		return
	}
	r.pieces = append(r.pieces, piece...)
}

// omission stands for a message for which there was no memory.
func omission(kind Kind, size int) *Message {
	text := fmt.Sprintf("[%d bytes, for which the daemon had no memory: results that are read or sent have all of it]", size)
	if kind == KindError {
		return &Message{Failure: &api.CodeFailure{Name: "Omitted", Value: text}}
	}
	return &Message{Result: &api.CodeValue{Text: text}}
}

// wireValue is an [api.CodeValue] whose free forms stay text: decoded, they could take twenty times
// the memory.
type wireValue struct {
	api.CodeValue
	JSON  json.RawMessage `json:"json"`
	Data  json.RawMessage `json:"data"`
	Chart json.RawMessage `json:"chart"`
	Extra json.RawMessage `json:"extra"`
}

func (w *wireValue) value() *api.CodeValue {
	v := &w.CodeValue
	for _, form := range []struct {
		from json.RawMessage
		to   *any
	}{{w.JSON, &v.JSON}, {w.Data, &v.Data}, {w.Chart, &v.Chart}, {w.Extra, &v.Extra}} {
		if len(form.from) > 0 {
			*form.to = form.from
		}
	}
	return v
}

// bound makes values possible that a kernel may have made up.
func (d *Done) bound() {
	const most = 1 << 50
	d.Count = min(max(d.Count, 0), math.MaxInt32)
	d.Code = min(max(d.Code, 0), 255)
	d.CPUMS = min(max(d.CPUMS, 0), most)
	d.MemoryPeak = min(max(d.MemoryPeak, 0), most)
}

// strict decodes one JSON value, which must be valid UTF-8 and have known fields only.
func strict(data []byte, v any) error {
	if !utf8.Valid(data) {
		return violated("a message that is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return violated("%v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return violated("more than one value in a message")
	}
	return nil
}

// Request is a run.
type Request struct {
	Run  uint32            `json:"run"`
	Code string            `json:"code"`
	Env  map[string]string `json:"env,omitempty"`
	// Interrupts is the number of SIGINTs that the process was sent: the last may still be on its way,
	// and is not for this run.
	Interrupts int `json:"interrupts,omitempty"`
	// Installed makes the kernel look again for libraries: some were just installed.
	Installed bool `json:"installed,omitempty"`
}

// Encode returns a request as a kernel reads it.
func (k *Kernel) Encode(r *Request) ([]byte, error) {
	if k.words {
		return r.words(), nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode run: %w", err)
	}
	return append(append([]byte("\n"), line...), '\n'), nil
}
