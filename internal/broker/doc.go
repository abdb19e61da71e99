// Package broker is a helper process that does for a confined daemon the few things that
// confinement forbids, and its client.
//
// The daemon starts its own program a second time before it confines itself ([Start]). That
// process ([Main]) keeps the privileges of the daemon's user. It starts launchers, the gateway and
// processes of agent runs, removes the daemon's cgroups, probes the host, reads registry
// credentials and config files, resolves host names, connects to the Unix sockets that the operator
// named, opens the host's directories that sandboxes may have, writes the layer of the host image,
// and as root maps mounts of the launcher's directories.
//
//	daemon                                       broker
//	  │ {"request":"NAME","args":{…}}              │
//	  │ + answer socket, + files of the request ──►│  one packet on the socket that is the broker's descriptor 3
//	  │                                            │  handles it, in parallel with others
//	  │◄───────────────────── {"error":"…"} or {"result":{…}}, then end of file, on the answer socket
//
// Closing the answer socket cancels the request. When the daemon has ended, all requests are
// cancelled and the broker ends. A broker that has ended is not replaced, because a confined daemon
// can only start confined processes: every later request is [ErrGone].
//
// The broker does not trust the daemon, which parses hostile input. Requests are bounded, unknown
// fields are refused, programs and paths are fixed by the first request, and each request must be
// harmless whoever sends it.
package broker
