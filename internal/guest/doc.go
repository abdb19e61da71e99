// Package guest is the protocol between the daemon and the init of a sandbox, both sides of it.
//
// host_*.go runs in the daemon, init_*.go in the sandbox (cmd/sandboxd-init), protocol.go is what both agree on.
//
// # Theory of operation
//
// The launcher gives init one inherited descriptor: a listening SOCK_SEQPACKET socket whose path exists on the host
// only. Every request of the daemon is a connection of its own: connect, one request packet (JSON, with descriptors by
// SCM_RIGHTS), one or more answer packets, close. A connection that is closed by the daemon ends what it asked for.
//
//	daemon                                   init
//	  ── exec {argv…} + stdin,stdout,stderr ──▶   starts the process
//	  ◀───────────── started {pid} ───────────    (or: error {stage, errno})
//	  ── signal {n} | resize | kill ──────────▶   while it runs
//	  ◀──────── exited {code, signal, usage} ──    the last packet
//
//	  ── open {path} ─────────────────────────▶   resolves the path in the sandbox
//	  ◀──────────── opened {} + descriptor ────    a regular file; anything else is refused
//
// Descriptors travel, bytes do not: init never reads what a process writes, and never copies a file.
//
// What init says is untrusted: the daemon bounds, validates and times out every answer, and checks every descriptor.
package guest
