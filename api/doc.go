// Package api holds the wire types, media types and error codes of version 1 of the sandboxd API.
//
// The API is HTTP/1.1 with JSON bodies over a Unix socket. Requests with unknown fields are
// refused, and bodies are bounded. Every error is an application/problem+json document ([Problem])
// whose code comes from a closed list. The package imports the standard library only, so that a
// client does not depend on the daemon.
package api
