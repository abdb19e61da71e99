// Package resident has the kernels of contexts: programs that stay in a sandbox, run one piece of
// code after another and keep its variables. A kernel is source text for the interpreter in the
// sandbox's image, and this package also speaks its protocol.
//
// # The exchange
//
//	daemon                                      kernel, a detached exec of the sandbox
//	   ── argv: the interpreter, a bootstrap ──▶
//	   ── stdin: the kernel's source ──────────▶  moves its descriptors, compiles it
//	   ◀───────────────── stdout: hello ────────
//	   ── "\n" {"run":7,"code":"1+1"} "\n" ────▶
//	   ◀──── output, results, error, done ──────  each with the number 7
//	   ── SIGINT ──────────────────────────────▶  the code is interrupted; done follows
//
// A request is a line. A daemon that ends in the middle of one leaves a line that is no JSON, which
// the kernel ignores; the next daemon begins with a newline. A frame is a length, a type and the
// number of the run, then the payload:
//
//	0         4      5        9
//	| length  | type | number | payload, at most 48 KiB |
//
// All kernels but python's leave their streams to programs. Their messages stand in the output of
// those: NUL, the process's key and ":", then type, number and length as text, a newline and the
// payload. A message of type "s" on stderr says that the run's output there is complete. Node keeps
// whether a SIGINT has come, and not how many: its kernel says with type "b" that those of earlier
// runs are counted, and the next is one of this run. R cannot
// write a NUL, and begins its messages with \001. Requests of bash and R are words with escapes of
// printf's %b.
//
// Longer messages than a frame come in pieces of type "+", of which the last one has the message's
// own type. Output is bytes, other payloads are JSON. Between runs a kernel writes nothing.
//
// # Trust
//
// The user's code and the kernel are one process: it can write anything to the kernel's stdout. A
// [Decoder] therefore holds one frame, and a [Reader] one message of at most [MaxMessage] bytes. It
// refuses unknown types and fields, and numbers of other runs. A forged result is one that the code
// could have displayed. The usage that a kernel reports is shown within bounds.
package resident
