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
//	  │ {"report":true} + a pipe ─────────────────────► │  writes the report of its crash there; no answer
//	  │ {"asks":true} + a socket ─────────────────────► │  asks there; no answer
//	  │ {"number":1,"add":{…,"spent":{…}}} + sockets ─► │  answers when it serves the three
//	  │◄──────────────────────────── {"answer": …} ──── │
//	  │ {"number":2,"add":{…,"quarantined":true}} … ──► │  after crashes: refuses all that comes from it
//	  │ {"number":3,"set_policy":{…}} ────────────────► │  resets the connections that the policy refuses
//	  │ {"number":4,"set_secrets":{…}} ───────────────► │  connections go on
//	  │ {"number":5,"set_networks":{…}} ──────────────► │  connections go on
//	  │ {"number":6,"reset_peers":{…}} ───────────────► │  resets the connections to these peers, then answers
//	  │ {"number":7,"remove":{…}} ────────────────────► │  resets all connections, then answers
//	  │◄──────────── {"events":[{…,"spent":{…}},…]} ─── │  at any time, in order per network
//	  │ end of file ──────────────────────────────────► │  ends
//
// and through the socket for asks
//
//	│◄────────────────── {"number":1,"name":"web"} ── │  at any time: a name, an address or a socket to connect to, or the
//	│                                                 │  ends of a flow whose process is wanted
//	│ {"number":1,"peer":{…}} + the connection ─────► │  to each ask, in any order
//
// Neither side trusts the other. Packets have one bounded JSON value without unknown fields. A
// packet of the gateway that breaks a bound ends the connection. Events are read at a bounded rate,
// and asks at one of their own: a network that floods its record delays no other network's asks.
//
// The daemon alone knows which sandboxes share a named network. It decides about each ask by what
// the network may do, and connects itself. Bounded numbers of asks of one network are under way; a
// gateway that exceeds them is replaced. An ask for a network that it does not serve gets nothing.
// [Peers].Dial bounds those of a tenant and of all, and refuses the rest at once. Where two
// sandboxes share no network any more, the daemon refuses first, and then has the gateway reset the
// connections between them: the gateway has the flow of each ask that was answered before.
//
// Nor does the gateway know the paths of the host's Unix sockets. It asks for the service of a
// port. The daemon looks the socket's name up in its own copy of the policy, and has the broker
// connect, which knows the sockets that the operator named.
//
// A gateway that was taken over sees the connections that pass through it, and can hide or invent
// events of the networks that it serves. It can connect to any address that the host reaches, its
// loopback too, and ask for the size and times of files. It reads no other file, writes none,
// executes nothing, and reaches no other process. It can ask for what the named networks of its
// sandboxes allow, and use a connection that it got for another port of the same sandbox, on its
// loopback too, also after the two sandboxes share no network any more. It can ask for connections
// to the sockets that the policies of its sandboxes name.
//
// # Ends
//
// A gateway that ends, breaks the protocol or does not answer is replaced through the broker, with
// growing delays, and gets all networks again. Their connections are reset. The listening sockets
// live on in daemon and launcher, so that connections wait meanwhile. The new process does not know
// the names that the old one resolved: programs resolve again. Each network's record gets an event
// of the kind [Restarted]. Events tell the use of a budget, and changes in those of
// a few rules, by name. The new process goes on from there: the use since the last event, as by
// flows under way, is not counted. The daemon keeps the use of rules that its own copy of the
// policy has, and writes it beside the flows, for the gateway of the next daemon.
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
