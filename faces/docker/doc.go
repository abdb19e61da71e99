// Package docker is the Docker face: it translates the Docker Engine API to the API of sandboxd and
// nothing more.
//
// A face is a client of the daemon, with the rights of the daemon's own user, in a process of its
// own:
//
//	program ── Docker's socket ──▶ face ── api/client ──▶ the daemon's socket
//
// It keeps no state. An ID of Docker is computed from ours and back (id.go). What Docker's objects
// need beyond ours is an annotation of the sandbox: the request that created the container. A face
// that is killed is replaced, and containers go on.
package docker
