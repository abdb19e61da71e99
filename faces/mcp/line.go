package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// maxMessage bounds a message of a client: a file of [maxWrite] bytes in base64, and the rest of
// its request.
const maxMessage = 8 << 20

// transport is an [mcp.Transport] of one connection that is already made.
type transport struct{ conn mcp.Connection }

// Connect implements [mcp.Transport].
func (t transport) Connect(context.Context) (mcp.Connection, error) { return t.conn, nil }

// lines is a connection of messages in lines. Unlike the SDK's own it answers a line that is no
// message with an error, and goes on: one bad line does not cost the session its sandboxes.
type lines struct {
	in    io.ReadCloser
	out   io.Writer
	write sync.Mutex // of out

	messages chan jsonrpc.Message
	closed   chan struct{}
	close    sync.Once
	mu       sync.Mutex
	err      error // of reading, unless it is io.EOF
}

func newLines(in io.ReadCloser, out io.Writer) *lines {
	l := &lines{in: in, out: out, messages: make(chan jsonrpc.Message), closed: make(chan struct{})}
	go l.receive() // ends with in, which a read may outlive: Close need not end a read of stdin
	return l
}

// receive reads until the input ends.
func (l *lines) receive() {
	defer close(l.messages)
	r := bufio.NewReaderSize(l.in, 64<<10)
	for {
		line, err := readLine(r)
		switch {
		case errors.Is(err, errLong):
			err = l.refuse(jsonrpc.CodeInvalidRequest, fmt.Sprintf("a message has at most %d bytes", maxMessage))
		case err != nil:
		case len(bytes.TrimSpace(line)) == 0:
			continue
		default:
			m, decoded := jsonrpc.DecodeMessage(line)
			if decoded != nil || !json.Valid(line) { // the SDK ignores what stands behind a message
				err = l.refuse(jsonrpc.CodeParseError, "the line is no message of JSON-RPC 2.0")
				break
			}
			select {
			case l.messages <- m:
			case <-l.closed:
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				l.mu.Lock()
				l.err = err
				l.mu.Unlock()
			}
			return
		}
	}
}

var errLong = errors.New("the line is too long")

// readLine reads a line, which it skips if that is longer than a message may be. A last line needs
// no end.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	long := false
	for {
		piece, err := r.ReadSlice('\n')
		if !long {
			line = append(line, piece...)
		}
		if len(line) > maxMessage {
			line, long = nil, true
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case long && (err == nil || errors.Is(err, io.EOF)):
			return nil, errLong
		case errors.Is(err, io.EOF) && len(bytes.TrimSpace(line)) > 0:
			return line, nil
		}
		return line, err
	}
}

// refuse answers a line that has no id to answer.
func (l *lines) refuse(code int, why string) error {
	return l.send(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":null,"error":{"code":%d,"message":%q}}`, code, why))
}

func (l *lines) send(data []byte) error {
	l.write.Lock()
	defer l.write.Unlock()
	_, err := l.out.Write(append(data, '\n'))
	return err
}

// Read implements [mcp.Connection].
func (l *lines) Read(ctx context.Context) (jsonrpc.Message, error) {
	select {
	case m, ok := <-l.messages:
		if !ok {
			return nil, io.EOF
		}
		return m, nil
	case <-l.closed:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Write implements [mcp.Connection].
func (l *lines) Write(_ context.Context, m jsonrpc.Message) error {
	data, err := jsonrpc.EncodeMessage(m)
	if err != nil {
		return err
	}
	return l.send(data)
}

// Close implements [mcp.Connection].
func (l *lines) Close() error {
	l.close.Do(func() {
		close(l.closed)
		_ = l.in.Close() // a read of a file goes on
	})
	return nil
}

// SessionID implements [mcp.Connection].
func (l *lines) SessionID() string { return "" }

// failed returns the error that ended the input, if it was not its end.
func (l *lines) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
