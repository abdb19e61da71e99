// Package gateway decides which connections of a sandbox leave it, and relays those.
//
// A [Network] is the outside of one sandbox's network. It is given sockets that were made inside:
// a listener that gets every TCP connection, whose local address is the one that the program
// connected to, and a UDP socket that gets every DNS message. It asks a [policy.Policy] about each,
// opens connections of its own from the host, and records an [Event] for each connection, request
// and refusal. The kernel ends TCP on both sides, so no packet is read here.
//
// # Names
//
// A name is resolved only if the policy allows it, through the host's resolver. Special-purpose
// addresses are left out of the answer. The gateway remembers for an hour which names it gave an
// address for. A connection to the address is then allowed by one of these names. A server name in
// TLS or a Host of HTTP must be one of them as well, and the policy is asked about that one. A
// name that the address was not resolved for counts only where rules allow the address itself.
//
// Public addresses of the host itself are refused, whatever the rules say: a server there may be
// open to the host only. Services of the policy, and private addresses that a CIDR names, are not.
//
// # Peers
//
// A sandbox in a named network reaches the others there by name. The gateway knows none of them:
// it asks [Peers], which its user answers, about each name that could be theirs and for each
// connection to an address of [policy.PeerAddresses]. Their bytes are relayed unread, and no
// policy is asked.
//
// # First bytes
//
// Where rules allow an address itself without inspection, bytes are relayed unread. Elsewhere the
// first bytes of the client decide:
//
//   - On ports 80 and 443 the client has to begin, with TLS or HTTP/1, within the time for a head.
//     The server is dialled only when the name has been checked.
//   - On other ports the server is dialled at once and may speak first, as those of SSH, SMTP and
//     MySQL do. Nothing of the client is passed on before its first bytes are understood: TLS and
//     HTTP are checked as on the ports of the web. Other protocols name no host and pass. The first
//     byte of the client may be as long in coming as on an idle connection, the rest of the head
//     may not. A protocol whose clients begin with a word of text and no line end does not work.
//
// Each request of a plain HTTP connection is checked. Requests and responses follow each other one
// at a time, so that a refusal stands in its place. The only upgrade is that to WebSocket. One to
// h2c is left out, and the request is passed on.
//
// # Inspection
//
// Where a rule asks to read requests within TLS, and the network has an authority, TLS ends here.
// The client gets a certificate of the authority for the name that it sent, or for the address if
// it sent none. The server must have one that the host trusts, for the same name; else every
// request is answered 502 with the reason. Versions before 1.2, client certificates, renegotiation,
// session tickets for clients and early data are not supported. Requests must name the host of the
// connection: a connection for one name carries no request for another, also where one certificate
// of the server covers both.
//
// Both sides speak the same version of HTTP, which the server chooses of those that the client
// offers. HTTP/1 is read by the readers of plain HTTP. HTTP/2 is read, and written anew, by
// golang.org/x/net/http2, with checks on top that are as strict as those of HTTP/1. A client that
// takes that library over has the gateway's process: the requests of this sandbox, and its secrets.
// Interim responses of HTTP/2, WebSocket over HTTP/2 and server push do not pass.
//
// A [Secret] is put into requests here, in the place of a placeholder that the sandbox has.
//
// # Refusals
//
// DNS answers NXDOMAIN to a name that is refused, with an extended error (RFC 8914) that has the
// reason: REFUSED would be more exact, but musl waits for its timeout then and glibc asks again. A
// name without an allowed address has an empty answer. HTTP is answered 403 with the reason and the
// rule, or 400 if the head is malformed; so is what is read within TLS. Malformed HTTP/2 resets its
// stream, or ends the connection. Every other connection is reset.
//
// # Bounds
//
// All counts are per network, so that one cannot take what another needs. Descriptors are shared by
// the networks of a process: each one has a minimum, see [Pool]. A connection holds no
// buffer while it is idle; one of TLS that ends here holds some, and may hold 1.5 MB while one side
// is slow. Frames of HTTP/2 that carry nothing are bounded in their rate, those of one head in
// number. Connections reset when the process dies, because both sides have
// SO_LINGER {1, 0} until their orderly end: a clean end would look like a complete download.
package gateway
