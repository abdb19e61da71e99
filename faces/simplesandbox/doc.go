// Package simplesandbox is the simple_sandbox face: it serves the HTTP routes of the small E2B-like
// server of that name, for its clients.
//
// A face is a client of the daemon, with the rights of the daemon's own user, in a process of its
// own:
//
//	program ── HTTP on loopback ──▶ face ── api/client ──▶ the daemon's socket
//
// It keeps no state: labels of a sandbox say that a face has made it, and which context its code
// runs in. A face that is killed is replaced, and sandboxes, variables and files stay. A face
// reaches no sandbox without its label.
//
// Requests are those of models that read hostile text. So the operator's request of a sandbox
// ([Options.Sandbox]) is what all sandboxes have, and bodies are bounded in size and time.
package simplesandbox
