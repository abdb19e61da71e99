package execlog

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// A Document is an offset in the state of a log, at which a value lies as JSON, or nothing.
type Document int64

// The documents of an exec.
const (
	Record  Document = 1 << 20 // written before the launcher gets copies of the files
	End     Document = 2 << 20 // the record of an exec that has ended
	Context Document = 3 << 20 // of the context whose process the exec is
)

const (
	placeAt     = 4 << 20
	maxDocument = 512 << 10 // bytes
)

// Write writes a document. Its length is written last: a killed daemon leaves a new document
// whole or not at all.
func (l *Log) Write(d Document, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the exec's record: %w", err)
	}
	if len(data) > maxDocument {
		return fmt.Errorf("the exec's record has %d bytes, more than %d", len(data), maxDocument)
	}
	if _, err := l.state.WriteAt(data, int64(d)+8); err != nil {
		return fmt.Errorf("write the exec's record: %w", err)
	}
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(len(data)))
	if _, err := l.state.WriteAt(b[:], int64(d)); err != nil {
		return fmt.Errorf("write the exec's record: %w", err)
	}
	return nil
}

// Document reads a document; false if it was not written.
func (l *Log) Document(d Document, v any) (bool, error) { return ReadDocument(l.state, d, v) }

// ReadDocument is [Log.Document] of a log that is not adopted yet.
func ReadDocument(state *os.File, d Document, v any) (bool, error) {
	var b [8]byte
	if n, err := state.ReadAt(b[:], int64(d)); n < len(b) {
		if fi, serr := state.Stat(); serr == nil && fi.Size() <= int64(d) {
			return false, nil
		}
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	size := binary.NativeEndian.Uint64(b[:])
	switch {
	case size == 0:
		return false, nil
	case size > maxDocument:
		return false, errors.New("read the exec's record: it is damaged")
	}
	data := make([]byte, size)
	if _, err := state.ReadAt(data, int64(d)+8); err != nil {
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	return true, nil
}

// WritePlace writes a value of fixed size (see [binary.Write]), which may change often. It has less
// than a page, so that a killed daemon leaves the old one or the new one.
func (l *Log) WritePlace(v any) error {
	data, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		return fmt.Errorf("encode the exec's place: %w", err)
	}
	if _, err := l.state.WriteAt(data, placeAt); err != nil {
		return fmt.Errorf("write the exec's place: %w", err)
	}
	return nil
}

// ReadPlace reads the value that the last daemon left; v is a pointer.
func (l *Log) ReadPlace(v any) error {
	data := make([]byte, binary.Size(v))
	if _, err := l.state.ReadAt(data, placeAt); err != nil {
		return fmt.Errorf("read the exec's place: %w", err)
	}
	if _, err := binary.Decode(data, binary.NativeEndian, v); err != nil {
		return fmt.Errorf("decode the exec's place: %w", err)
	}
	return nil
}
