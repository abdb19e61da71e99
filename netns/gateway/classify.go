package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"syscall"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
)

// kind is a protocol as its first bytes show it.
type kind int

const (
	kindOther kind = iota
	kindTLS
	kindHTTP // also what only looks like it, so that the strict reader refuses it
)

// classify looks at the first bytes of a client and consumes none. It waits for as many as it
// needs, at most a line.
//
// A lenient server takes more for HTTP than the standard does. A first word that could be a method,
// with HTTP/ in the same line, therefore counts as HTTP. So do line ends in front, which servers
// skip.
func classify(r *bufio.Reader) (kind, error) {
	first, err := r.Peek(1)
	switch {
	case err != nil:
		return 0, err
	case first[0] == sniff.RecordHandshake:
		return kindTLS, nil
	case first[0] == '\r' || first[0] == '\n':
		return kindHTTP, nil
	}
	for n := 1; ; {
		b, err := r.Peek(n)
		if errors.Is(err, bufio.ErrBufferFull) {
			return kindHTTP, nil // a line of 4 KB that begins with a word
		}
		line := bytes.TrimLeft(b, " \t")
		end := bytes.IndexByte(line, '\n')
		word, _, spaced := bytes.Cut(line, []byte(" "))
		switch {
		case !wordBytes(word):
			return kindOther, nil
		case spaced && string(word) == "PROXY": // whose header is followed by anything
			return kindHTTP, nil
		case end >= 0 && bytes.Contains(bytes.ToUpper(line[:end]), []byte("HTTP/")):
			return kindHTTP, nil
		case end >= 0:
			return kindOther, nil
		case err != nil:
			return 0, err
		}
		n = max(n+1, r.Buffered())
	}
}

// wordBytes reports whether a server could take the bytes for the beginning of a method. A tab may
// stand for the space behind it, and CR and LF end a line without a target.
func wordBytes(word []byte) bool {
	for _, c := range word {
		if (c <= ' ' || c >= 0x7f) && c != '\t' && c != '\r' && c != '\n' {
			return false
		}
	}
	return true
}

// transient reports errors of accept that end by themselves.
func transient(err error) bool {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPERM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
