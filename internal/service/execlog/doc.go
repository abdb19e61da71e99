// Package execlog keeps the output of detached execs in memory that outlives the daemon, and beside
// it the documents from which the next daemon goes on.
//
// # Files
//
// A log is two memfds, of which the launcher holds copies. The first has the output: byte n lies at
// offset n, whatever the stream, and the file's own offset, which the kernel keeps, is the total.
// Output is spliced from the exec's pipe, so that pipe and offset agree whenever the daemon is
// killed. Output older than the limit is punched out: the file is sparse and never wraps.
//
// The second file, the state, has at
//
//	0       the number of pieces
//	4 KiB   the latest pieces, as a ring
//	1 MiB…  a [Document] each, with its length before it
//	4 MiB   one value of fixed size, see [Log.WritePlace]
//
// A piece is output of one stream up to the next of the other; it is noted before its first byte is
// moved. Offsets stay as they are: a daemon of another version reads them.
//
// # Waiting
//
// The writer is not held up by readers, with two exceptions. Output to be saved elsewhere is not
// dropped before that is done ([Log.Save]), nor is output before a reader that holds it has it
// ([Log.Hold]). Both end when the daemon does: the rest stays in the pipe.
//
// The package knows neither sandboxes nor the launcher, and does not interpret the documents.
package execlog
