// Package egress runs the gateway of sandboxes (package gateway) as a process of its own, and is
// the daemon's client of it.
//
// The process, `sandboxd gateway`, parses bytes of sandboxes and of servers. It is this program,
// executed by the broker with one descriptor, and confines itself before it reads anything: no
// capability, a filter of system calls, and Landlock, under which it reads the resolver's files
// only (package confine). It has the sockets of the sandboxes that it serves, and connections.
//
//	daemon                                              gateway
//	  │◄─────────────────────────────── {"hello": …} ── │  it is confined
//	  │ {"number":1,"add":{…}} + three sockets ───────► │  answers when it serves them
//	  │◄──────────────────────────── {"answer": …} ──── │
//	  │ {"number":2,"set_policy":{…}} ────────────────► │  resets the connections that the policy refuses
//	  │ {"number":3,"remove":{…}} ────────────────────► │  resets all connections, then answers
//	  │◄───────────────────────────── {"events": …} ─── │  at any time, in order per network
//	  │◄────────── {"ask":{"number":1,"name":"web"}} ── │  at any time: a name, or an address to connect to
//	  │ {"reply":{"number":1,…}} + the connection ────► │  to each ask, in any order
//	  │ end of file ──────────────────────────────────► │  ends
//
// Neither side trusts the other. Packets have one bounded JSON value without unknown fields. A
// packet of the gateway that breaks a bound ends the connection; events are read at a bounded rate.
//
// The daemon alone knows which sandboxes share a named network. It decides about each ask by what
// the network may do, and connects itself. Bounded numbers of asks of one network are under way; a
// gateway that exceeds them, or asks for a network that it does not serve, is replaced.
//
// A gateway that was taken over sees the connections that pass through it, and can hide or invent
// events of the networks that it serves. It can connect to any address that the host reaches, its
// loopback too, and ask for the size and times of files. It reads no other file, writes none,
// executes nothing, and reaches no other process. It can ask for what the named networks of its
// sandboxes allow, and use a connection that it got for another port of the same sandbox, on its
// loopback too.
//
// # Ends
//
// A gateway that ends, breaks the protocol or does not answer is replaced through the broker, with
// growing delays, and gets all networks again. Their connections are reset. The listening sockets
// live on in daemon and launcher, so that connections wait meanwhile. The new process does not know
// the names that the old one resolved: programs resolve again. Each network's record gets an event
// of the kind [Restarted]. Events tell what was used of a budget, and the new process goes on from
// there: what was used since the last event, as by flows under way, is not counted.
//
// A process also ends itself where another file has taken the name of resolv.conf, which Landlock
// does not let it read. A file that is rewritten in place, or lies in a directory of its service,
// is read anew without that.
//
// A panic in the code of one network ends the process for all networks. Its report goes through a
// pipe to the daemon and names the network. After three of them, each less than an hour after the
// one before, the process is told to refuse everything that comes from that network, unread, until
// the sandbox is started again. A process that was killed, by the kernel for its memory too, has no
// report: the growing delays bound the work of restarts.
package egress
