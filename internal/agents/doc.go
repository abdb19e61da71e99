// Package agents hosts runs of the agent for the daemon: each is a process of its own, and what is known of it lies in files.
//
// # Who does what
//
//	daemon   Host: has a worker started, gives it the request on its stdin, and reads small files
//	runner   of errands (package broker): starts workers and signals them, which a confined daemon cannot; was told before what to start, how
//	         many of them, and what they may read
//	worker   `sandboxd agent worker`: the same loop as `sandboxd agent run`, a client of the daemon's socket; confines itself (package confine)
//	         before it reads its stdin
//
//	daemon ── both pipes ──▶ runner ──▶ worker                                which outlives both
//	daemon ── {"start": …}, {"run": …, "resume": …} or {"run": …, "remove": true}, stdin ──▶ worker
//	daemon ◀── {"run": …} or {"problem": …}, one line of stdout ── worker     when the run has its sandbox or is removed, or that cannot be
//	daemon ◀── the end of stdout ── worker                                    it has ended: it starts nothing that could hold the pipe
//	daemon ── a file "cancel" in the run's directory ──▶ worker               "keep": leave the sandbox
//	daemon ◀── status.json, replaced whole after each turn ── worker
//	daemon ◀── record.jsonl, only appended to, locked by who works on it ── worker
//	daemon ◀── the run's directory, locked while a worker works on it ── worker     which who resumes it by hand does not
//
// So nothing that a model says has a meaning in the daemon, no model's SDK has memory there, and a run outlives a daemon that is killed: the next
// one finds the lock held and the files where they were. A request with a key in it is written to the worker's stdin and nowhere else.
//
// A worker that ends without a line has died; so has a run whose record has no end and is not locked.
package agents
