// Package errand is how a process that has confined itself has done by another what it can not do any more.
//
// The confined one starts its own program once more before ([Start]); that one ([Serve]) knows a short list of errands and does
// those only. What they are is the program's matter.
//
//	confined process                             runner
//	  │ {"errand":"NAME","args":{…}}                │
//	  │ + answer socket, + the files that belong ──►│  one packet of the socket that is the runner's descriptor 3
//	  │                                             │  does it, beside others
//	  │◄────────────────────── {"error":"…"} or {"result":{…}}, then end of file, on the answer socket
//
// To close the answer socket is to give the errand up: its context ends. When the confined process has gone, all errands are
// given up and the runner ends. A runner that has gone is not replaced: what it would be asked is then an error.
//
// The runner does not trust who asks: requests are bounded, unknown fields refused, and an errand must be one that does no harm
// whoever asks for it.
package errand
