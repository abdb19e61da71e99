// Package sniff reads the first bytes of a connection: a TLS ClientHello, or the heads of HTTP/1
// requests and responses.
//
// The bytes come from a program that may want them to be read differently here and at the server.
// The readers therefore accept one form only of each thing that decides where a request goes or
// where it ends, and refuse the rest, also where an RFC asks for tolerance. All bytes that were
// read are returned, so that the server gets exactly those that were judged.
package sniff

import "fmt"

// MalformedError is the error of bytes that are complete enough to be refused. An error of another
// type is one of the connection.
type MalformedError struct {
	// Reason completes the sentence "the request has …", for the record and for the client.
	Reason string
}

func (e *MalformedError) Error() string { return e.Reason }

func malformed(format string, args ...any) error {
	return &MalformedError{fmt.Sprintf(format, args...)}
}
