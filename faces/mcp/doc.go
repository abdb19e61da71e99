// Package mcp is the MCP face: it offers sandboxes to language models as tools of the Model Context
// Protocol, over stdin and stdout or over HTTP.
//
// A face is a client of the daemon, with the rights of the daemon's own user:
//
//	model ── MCP client ── stdio or HTTP ──▶ face ── api/client ──▶ the daemon's socket
//
// It keeps no state beyond a session. A session has sandboxes of its own, and reaches no others.
// Each is tied to the session: the daemon deletes it when the session ends, and when this process
// dies. The first tool that names no sandbox makes the session's default one.
//
// Arguments come from a model that reads hostile text. So the operator's request of a sandbox
// ([Options.Sandbox]) is the most that a tool can have, every size is bounded, and errors name no
// path of the host.
package mcp
