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
//
// # The life of a main process
//
//	create, start    the launcher starts the sandbox; the record has the command and no exit
//	detach           init starts it; its descriptors are left with the launcher; then the request is answered
//	process ── pipe ── splice ──▶ memfd ──▶ logs/<sandbox>/n.log    the log's last line says how much of the output it has
//	exit             noted in the memfd; the log is written to its end; the record gets the exit, and the sandbox is killed;
//	                 then the launcher keeps no more of it than the memory
//
// A daemon that comes after a crash finds one of these: nothing was left with the launcher, and it starts the process; it
// runs, and the log goes on where it ends; it has ended, and the rest is done once more.
package daemon
