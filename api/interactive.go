package api

// An interactive exec is a WebSocket on POST's path (GET with an upgrade). The client's first frame is text and holds
// the [ExecRequest]. After that, binary frames carry a stream each, named by their first byte; the client's text frames
// are [ExecControl], and the server's last frame is text: an [ExecEvent] with exit or error.

// Channel is the first byte of a binary frame of an interactive exec.
type Channel byte

// The channels of an interactive exec.
const (
	ChannelStdin  Channel = 0 // client to server
	ChannelStdout Channel = 1 // server to client; with a terminal everything the program writes
	ChannelStderr Channel = 2
)

// ExecControl is a text frame of the client. One of its fields is set.
type ExecControl struct {
	Resize     *TerminalSize `json:"resize,omitempty"`
	Signal     string        `json:"signal,omitempty"`      // "SIGINT", ...: sent to the program
	StdinClose bool          `json:"stdin_close,omitempty"` // end of file on stdin
}

// TerminalSize is how many characters a terminal shows.
type TerminalSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}
