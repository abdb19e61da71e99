package mcp

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// call is one call of a tool or read of a resource.
type call struct {
	s  *Server
	se *session

	progress func(elapsed time.Duration, message string) // nil if the client asked for none
	mu       sync.Mutex
	noted    string // the latest message for progress
	unsent   []byte // output since the last notification, its end
}

// maxUnsent bounds the output in a progress notification, in bytes.
const maxUnsent = 4096

// stream adds output to the next progress notification.
func (c *call) stream(data []byte) {
	if c.progress == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unsent = append(c.unsent, data...)
	c.unsent = append(c.unsent[:0], c.unsent[max(0, len(c.unsent)-maxUnsent):]...)
}

// message returns the text of a notification: new output, else the latest note.
func (c *call) message() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.unsent) == 0 {
		return c.noted
	}
	text := strings.ToValidUTF8(string(c.unsent), "\uFFFD")
	c.unsent = c.unsent[:0]
	return text
}

// note sets the message of the next progress notification.
func (c *call) note(message string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noted = message
}

// progressEvery is the interval of progress notifications. Clients give up on a request that says
// nothing for a minute.
const progressEvery = time.Second

// report notifies of progress until stop is called.
func (c *call) report() (stop func()) {
	if c.progress == nil {
		return func() {}
	}
	done := make(chan struct{})
	var reporting sync.WaitGroup
	reporting.Go(func() {
		began := time.Now()
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				c.progress(time.Since(began), c.message())
			case <-done:
				return
			}
		}
	})
	return func() {
		close(done)
		reporting.Wait()
	}
}

// begin starts a call in the client's session. The context ends with the request, and with the
// session.
func (s *Server) begin(ctx context.Context, ss *mcp.ServerSession, token any) (*call, context.Context, func(), error) {
	se, err := s.session(ss)
	if err != nil {
		return nil, nil, nil, err
	}
	select {
	case se.calls <- struct{}{}:
	default:
		return nil, nil, nil, fmt.Errorf("%d calls are in progress, and no more are possible at once", maxCalls)
	}
	c := &call{s: s, se: se}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(se.ctx, cancel)
	if token != nil {
		c.progress = func(elapsed time.Duration, message string) {
			// A client that has gone ends the call by other means.
			_ = ss.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: elapsed.Seconds(), Message: message})
		}
	}
	reported := c.report()
	return c, ctx, func() {
		reported()
		stop()
		cancel()
		<-se.calls
	}, nil
}

// hints are the annotations of a tool.
type hints int

const (
	reads    hints = 1 << iota // changes nothing
	destroys                   // data may be lost
	repeats                    // a repetition changes nothing more
	outside                    // reaches beyond the sandboxes, where their network lets it
)

func (h hints) annotations(title string) *mcp.ToolAnnotations {
	return &mcp.ToolAnnotations{
		Title: title, ReadOnlyHint: h&reads != 0, IdempotentHint: h&(reads|repeats) != 0,
		DestructiveHint: new(h&destroys != 0), OpenWorldHint: new(h&outside != 0),
	}
}

// addTool adds a tool. A nil result becomes the output as JSON.
func addTool[In, Out any](s *Server, name, title string, h hints, description string, do func(context.Context, *call, In) (*mcp.CallToolResult, Out, error)) {
	tool := &mcp.Tool{Name: name, Title: title, Description: description, Annotations: h.annotations(title)}
	mcp.AddTool(s.mcp, tool, func(ctx context.Context, req *mcp.CallToolRequest, in In) (_ *mcp.CallToolResult, out Out, err error) {
		c, ctx, done, err := s.begin(ctx, req.Session, req.Params.GetProgressToken())
		if err != nil {
			return nil, out, err
		}
		defer done()
		res, out, err := do(ctx, c, in)
		if err != nil {
			return nil, out, s.explain(err)
		}
		return res, out, nil
	})
}

// addTools is the table of tools.
func (s *Server) addTools() {
	addTool(s, "sandbox_create", "Create a sandbox", outside,
		"Create a further sandbox, when the session's own does not suffice: from another image, from a snapshot, or for a separate task. It is removed when the session ends.", createSandbox)
	addTool(s, "sandbox_list", "List sandboxes", reads, "List the sandboxes of this session.", listSandboxes)
	addTool(s, "sandbox_kill", "Remove a sandbox", destroys|repeats,
		"Remove a sandbox with its files and processes. The session's own sandbox is made anew at its next use.", killSandbox)
	addTool(s, "sandbox_pause", "Pause a sandbox", repeats, "Freeze all processes of a sandbox. sandbox_resume lets them go on.", pauseSandbox)
	addTool(s, "sandbox_resume", "Resume a sandbox", repeats, "Let the processes of a paused sandbox go on.", resumeSandbox)
	addTool(s, "sandbox_snapshot", "Snapshot a sandbox", 0,
		"Save the files of a sandbox. sandbox_create makes sandboxes from a snapshot. Snapshots outlive the session.", snapshotSandbox)
	addTool(s, "sandbox_fork", "Fork a sandbox", 0,
		"Create a sandbox with the current files of another, without its processes: to try something and keep the original.", forkSandbox)
	addTool(s, "snapshot_list", "List snapshots", reads, "List the snapshots that sandbox_snapshot has made, also in other sessions.", listSnapshots)
	addTool(s, "snapshot_delete", "Delete a snapshot", destroys, "Delete a snapshot. Sandboxes that were made from it stay.", deleteSnapshot)

	addTool(s, "run_command", "Run a command", destroys|outside,
		"Run a command in a sandbox and return its output and exit code. Give a shell line as command, or a program with its arguments as argv. "+
			"Long output is cut in the middle. With background it returns at once, and command_output returns the output.", runCommand)
	addTool(s, "command_output", "Read a command's output", reads, "Return output and state of a command that runs in the background.", commandOutput)
	addTool(s, "command_kill", "Kill a command", destroys|repeats, "End a command that runs in the background, with all its processes.", killCommand)

	addTool(s, "file_read", "Read a file", reads, "Read a file of a sandbox: text as text, an image as an image. offset and length are in bytes.", readFile)
	addTool(s, "file_write", "Write a file", destroys|repeats, "Write a whole file in a sandbox, or append to it. Missing directories are made.", writeFile)
	addTool(s, "file_edit", "Edit a file", destroys,
		"Replace a text in a file of a sandbox by another. old_text must occur exactly once, with its white space; with replace_all at least once.", editFile)
	addTool(s, "file_list", "List files", reads, "List a directory of a sandbox.", listFiles)

	addTool(s, "get_url", "Get a URL", repeats|outside,
		"Return a URL at which the user's machine reaches an HTTP server that listens on a port of a sandbox.", getURL)

	addTool(s, "run_code", "Run code", destroys|outside,
		"Run source text in a sandbox. Variables, imports and functions stay for the next call in languages that keep them; "+
			"others run as a program of their own. Returns what was printed, displayed values and the value of the last expression, figures as images, and errors with their traceback.", runCode)
	addTool(s, "languages", "List languages", reads, "List the languages of run_code. A sandbox has those that its image has.", listLanguages)
}

// done is the output of tools that have nothing to return.
type done struct {
	OK bool `json:"ok"`
}
