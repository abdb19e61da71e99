// Package daemon is the one place where images, profiles and the runtime meet: the services behind the API, and the HTTP
// server in front of them.
//
// [Service] knows nothing of HTTP: it takes the request types of package api, validates them, translates them, calls the
// packages below, and returns answers of package api or errors of a known class. Other faces (a Docker-compatible
// socket, MCP) are adapters over it. server.go holds the table of routes; a handler decodes, calls and answers.
//
// # The life of a request
//
//	accept      the peer's uid is read from the socket (SO_PEERCRED)
//	route       one table: method, pattern, who may call
//	decode      strict JSON, bounded
//	Service     validate, take a lease on the sandbox, ask its init, end the lease
//	answer      JSON, NDJSON, bytes; or a problem whose code comes from the one table in errors.go
package daemon
