package sniff

import (
	"bufio"
	"errors"
	"io"
	"strconv"
	"strings"
)

// maxChunkDigits bounds the size of a chunk, so that all fit into an int64.
const maxChunkDigits = 15

// ReadChunk reads the line before the data of a chunk, and at a size of 0 the trailers, so that the
// body ends there. It returns the bytes that it read.
//
// Extensions of chunks are refused: they mean nothing, and have hidden line ends from one of two
// parsers (CVE-2025-22871 and its kin). Trailers must not be fields that decide anything.
func ReadChunk(r *bufio.Reader) (raw []byte, size int64, err error) {
	var h head
	line, err := h.readLine(r)
	if err != nil {
		return h.raw, 0, unexpected(err)
	}
	if line == "" || len(line) > maxChunkDigits || strings.Trim(line, "0123456789abcdefABCDEF") != "" {
		return h.raw, 0, malformed("the chunk size %q", line)
	}
	if size, err = strconv.ParseInt(line, 16, 64); err != nil || size > 0 {
		return h.raw, size, err
	}
	for fields := 0; ; fields++ {
		line, err := h.readLine(r)
		switch {
		case err != nil || line == "":
			return h.raw, 0, unexpected(err)
		case fields == maxFields:
			return h.raw, 0, malformed("more than %d trailers", maxFields)
		}
		if f, err := parseField(line); err != nil {
			return h.raw, 0, err
		} else if Decisive(f.Name) {
			return h.raw, 0, malformed("the trailer %s", f.Name)
		}
	}
}

// ReadChunkEnd reads the line end behind the data of a chunk and returns it.
func ReadChunkEnd(r *bufio.Reader) ([]byte, error) {
	var h head
	line, err := h.readLine(r)
	if err == nil && line != "" {
		err = malformed("a chunk that is longer than its size")
	}
	return h.raw, unexpected(err)
}

// unexpected turns the end of a connection within a body into an error that is none at its end.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
