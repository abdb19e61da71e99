// Package agents hosts agent runs for the daemon. Each run is a process, and its state is in files.
//
// # Processes
//
//	daemon   Host: asks for a worker, writes the request to its stdin, and reads small files
//	broker   starts and signals workers, which a confined daemon cannot (package broker). Program, arguments and number of
//	         workers are fixed before the daemon reads anything hostile
//	worker   `sandboxd agent worker`: the loop of `sandboxd agent run`, a client of the daemon's socket. It confines itself
//	         (package confine) before it reads its stdin
//
//	daemon ── both pipes ──▶ broker ──▶ worker                 the worker outlives both
//	daemon ── {"start": …}, {"run": …, "resume": …} or {"run": …, "remove": true}, stdin ──▶ worker
//	daemon ◀── {"run": …} or {"problem": …}, one line of stdout ── worker     the run has its sandbox, is removed, or failed
//	daemon ◀── end of file on stdout ── worker                 the worker has ended: its children do not inherit the pipe
//	daemon ── a file "cancel" in the run's directory ──▶ worker               "keep": leave the sandbox
//	daemon ◀── status.json, replaced after each turn ── worker
//	daemon ◀── record.jsonl, append-only, locked by the process that works on the run ── worker
//	daemon ◀── the run's directory, locked by a worker, but not by a manual `sandboxd agent resume` ── worker
//
// So the daemon does not interpret the answers of models, holds no memory of a model SDK, and may
// be killed: the next daemon finds the locks and the files. A request's key is written to the
// worker's stdin and nowhere else.
//
// A worker that ends without a line has died. So has a run whose record has no end and is not
// locked.
package agents
