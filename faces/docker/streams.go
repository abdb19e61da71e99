package docker

import (
	"bufio"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moby/moby/api/types/container"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Channels of the framing that carries several streams on one connection.
const (
	streamStdout = 1
	streamStderr = 2
)

const (
	typeRaw         = "application/vnd.docker.raw-stream"
	typeMultiplexed = "application/vnd.docker.multiplexed-stream"
)

// framed writes output of one stream as frames; several share a writer, and its lock.
type framed struct {
	mu     *sync.Mutex
	w      io.Writer
	stream byte
}

// Write implements io.Writer. An empty piece makes no frame.
func (f *framed) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	frame := make([]byte, 8+len(p))
	frame[0] = f.stream
	binary.BigEndian.PutUint32(frame[4:8], uint32(len(p))) //nolint:gosec // a piece of output has at most 1 MiB
	copy(frame[8:], p)
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.w.Write(frame); err != nil {
		return 0, err
	}
	return len(p), nil
}

// outputs returns writers of both streams: raw for a terminal, else framed.
func outputs(w io.Writer, tty bool) (stdout, stderr io.Writer) {
	if tty {
		return w, w
	}
	mu := new(sync.Mutex)
	return &framed{mu, w, streamStdout}, &framed{mu, w, streamStderr}
}

// hijacked is a connection that has become that of a program.
type hijacked struct {
	net.Conn

	in *bufio.Reader
}

// Read implements io.Reader: first the bytes that the server has read already.
func (h *hijacked) Read(p []byte) (int, error) { return h.in.Read(p) }

// closeWrite ends our direction, so that the client reads all and then the end.
func (h *hijacked) closeWrite() {
	if u, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		_ = u.CloseWrite() // the connection is closed next
	}
}

// hijack takes over the connection and answers: 101 to a client that asks for an upgrade, else 200.
func (c *call) hijack(tty bool) (*hijacked, error) {
	conn, rw, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Time{}) // the server's own
	typ := typeRaw
	if !tty && c.minor >= 42 {
		typ = typeMultiplexed
	}
	head := "HTTP/1.1 200 OK\r\nContent-Type: " + typ + "\r\n"
	if c.r.Header.Get("Upgrade") != "" {
		head = "HTTP/1.1 101 UPGRADED\r\nContent-Type: " + typ + "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
	}
	head += "Api-Version: " + maxVersion + "\r\nDocker-Experimental: false\r\nOstype: linux\r\nServer: Docker/" + engineVersion + " (linux)\r\n\r\n"
	if _, err := io.WriteString(conn, head); err != nil {
		_ = conn.Close() // it is broken already
		return nil, errAnswered
	}
	return &hijacked{conn, rw.Reader}, nil
}

// headTimeout bounds the wait for a client that does not read the head of an answer.
const headTimeout = 2 * time.Second

// awaitHead waits until the client has read what was written: docker-py reads the head through a
// buffer that it then drops, with all output that has come along with the head.
func (h *hijacked) awaitHead() {
	u, ok := h.Conn.(*net.UnixConn)
	if !ok {
		return
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return
	}
	begun := time.Now()
	for pause := 50 * time.Microsecond; time.Since(begun) < headTimeout; pause = min(2*pause, 5*time.Millisecond) {
		unread := 0
		err := raw.Control(func(fd uintptr) {
			if n, err := unix.IoctlGetInt(int(fd), unix.TIOCOUTQ); err == nil {
				unread = n
			}
		})
		if err != nil || unread == 0 {
			return
		}
		<-time.After(pause)
	}
}

// keys are the keys that detach a client from a terminal.
func keysOf(text string) ([]byte, error) {
	if text == "" {
		return []byte{16, 17}, nil // ctrl-p, ctrl-q
	}
	var out []byte
	for key := range strings.SplitSeq(text, ",") {
		name, ctrl := strings.CutPrefix(key, "ctrl-")
		if len(name) != 1 {
			return nil, badf("invalid detach keys (%s)", clip(text))
		}
		b := name[0]
		switch {
		case !ctrl:
		case b >= 'a' && b <= 'z':
			b -= 'a' - 1
		case b >= '@' && b <= '_':
			b -= '@'
		default:
			return nil, badf("invalid detach keys (%s)", clip(text))
		}
		out = append(out, b)
	}
	return out, nil
}

// errDetached ends the stream of a client that has typed the keys.
var errDetached = errors.New("detached")

// escaping passes a terminal's input on until the keys come.
type escaping struct {
	r    io.Reader
	keys []byte
	held int // keys that have come, and are held back
	rest []byte
	err  error
}

// Read implements io.Reader.
func (e *escaping) Read(p []byte) (int, error) {
	for len(e.rest) == 0 && e.err == nil {
		buf := make([]byte, 4096)
		n, err := e.r.Read(buf)
		e.err = err
		for _, b := range buf[:n] {
			if b == e.keys[e.held] {
				if e.held++; e.held == len(e.keys) {
					e.err = errDetached
					break
				}
				continue
			}
			e.rest = append(e.rest, e.keys[:e.held]...)
			e.held = 0
			if b == e.keys[0] && len(e.keys) > 1 {
				e.held = 1
				continue
			}
			e.rest = append(e.rest, b)
		}
		if e.err != nil && !errors.Is(e.err, errDetached) {
			e.rest = append(e.rest, e.keys[:e.held]...)
			e.held = 0
		}
	}
	if len(e.rest) > 0 {
		n := copy(p, e.rest)
		e.rest = e.rest[n:]
		return n, nil
	}
	return 0, e.err
}

// endless hides the end of a reader whose end means nothing to the program.
type endless struct {
	r   io.Reader
	ctx context.Context //nolint:containedctx // of the one stream
}

// Read implements io.Reader.
func (e *endless) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if errors.Is(err, io.EOF) && n == 0 {
		<-e.ctx.Done()
		return 0, context.Cause(e.ctx)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// attachment is the attachment of a client's connection to a program.
type attachment struct {
	sandbox, exec string
	opts          client.AttachOptions
	tty           bool
	stdin         bool // the client's input goes to the program
	keepStdin     bool // and its end does not
	stdout        bool
	stderr        bool
	keys          []byte
	begin         func(ctx context.Context) error // is called when the client is attached; may be nil
}

// attach attaches the client's connection to a program, answers, and returns when the program has
// ended or the client has detached. An error of begin is written to the stream.
func (c *call) attach(a attachment) error {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(c.ctx()))
	defer cancel(nil)
	attached := make(chan struct{})
	a.opts.Attached = func() { close(attached) }
	late := &lateConn{ready: make(chan struct{})}
	s := client.Streams{}
	stdout, stderr := outputs(late, a.tty)
	if a.stdout {
		s.Stdout = stdout
	}
	if a.stderr {
		s.Stderr = stderr
	}
	if a.stdin {
		s.Stdin = late
		if a.tty && len(a.keys) > 0 {
			s.Stdin = &escaping{r: s.Stdin, keys: a.keys}
		}
		if a.keepStdin {
			s.Stdin = &endless{s.Stdin, ctx}
		}
	}
	ended := make(chan error, 1)
	go func() {
		_, err := c.f.api.AttachWith(ctx, a.sandbox, a.exec, a.opts, s)
		ended <- err
	}()
	select {
	case <-attached:
	case err := <-ended:
		return err
	case <-c.ctx().Done():
		cancel(context.Cause(c.ctx()))
		<-ended //nolint:errcheck // the client is gone
		return errAnswered
	}
	// Before the answer, which clients of a terminal take for the moment to set its size.
	var failed error
	if a.begin != nil {
		failed = a.begin(ctx)
	}
	conn, err := c.hijack(a.tty)
	if err != nil {
		cancel(err)
		<-ended //nolint:errcheck // the client is gone
		return err
	}
	defer conn.Close()
	late.conn = conn
	conn.awaitHead()
	close(late.ready)
	if failed != nil {
		_, _ = stdout.Write([]byte(failed.Error() + "\r\n")) // a client that is gone has no use for it
		cancel(failed)
		<-ended //nolint:errcheck // the program has not run
		conn.closeWrite()
		return errAnswered
	}
	<-ended //nolint:errcheck // its error is told by the record of the program, or is the client's own end
	conn.closeWrite()
	return errAnswered
}

// lateConn is the client's connection, which is there when the answer has begun.
type lateConn struct {
	ready chan struct{}
	conn  *hijacked
}

// Read implements io.Reader.
func (l *lateConn) Read(p []byte) (int, error) {
	<-l.ready
	return l.conn.Read(p)
}

// Write implements io.Writer.
func (l *lateConn) Write(p []byte) (int, error) {
	<-l.ready
	return l.conn.Write(p)
}

func (c *call) postAttach() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	keys, err := keysOf(c.q.Get("detachKeys"))
	if err != nil {
		return err
	}
	if err := c.skipBody(); err != nil {
		return err
	}
	if sb.State == api.StatePaused {
		return statusf(http.StatusConflict, "container %s is paused, unpause the container before attach", containerID(sb.ID))
	}
	req := requestOf(sb)
	a := attachment{
		sandbox: sb.ID, exec: api.MainExec, tty: sb.TTY, keys: keys, keepStdin: !req.StdinOnce,
		stdin: c.bool("stdin") && sb.StdinOpen, stdout: c.bool("stdout"), stderr: c.bool("stderr"),
	}
	if !c.bool("stream") && !c.bool("logs") {
		return badf("attach: one of stream and logs is needed")
	}
	if !c.bool("stream") {
		return c.attachLogs(sb, a.stdout, a.stderr)
	}
	if sb.State == api.StateRunning {
		a.opts.End = !c.bool("logs")
	} else {
		a.opts.Next = true
	}
	return c.attach(a)
}

// attachLogs answers an attachment to what has been written so far.
func (c *call) attachLogs(sb *api.Sandbox, stdout, stderr bool) error {
	conn, err := c.hijack(sb.TTY)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.awaitHead()
	out, errs := outputs(conn, sb.TTY)
	err = c.f.api.Logs(context.WithoutCancel(c.ctx()), sb.ID, client.LogOptions{}, func(e api.LogEntry) error {
		to, wanted := out, stdout
		if e.Stream == "stderr" {
			to, wanted = errs, stderr
		}
		if !wanted {
			return nil
		}
		_, err := to.Write(logData(&e))
		return err
	})
	if err != nil {
		c.f.log.Info("logs broke off", "id", sb.ID, "error", err)
	}
	conn.closeWrite()
	return errAnswered
}

func logData(e *api.LogEntry) []byte {
	if e.Data == nil {
		return []byte(e.Text)
	}
	return e.Data
}

func (c *call) postResize() error {
	sb, err := c.running()
	if err != nil {
		return err
	}
	return c.resize(sb.ID, api.MainExec)
}

func (c *call) resize(sandbox, exec string) error {
	var size [2]uint16
	for i, name := range []string{"h", "w"} {
		n, err := strconv.ParseUint(c.q.Get(name), 10, 16)
		if err != nil {
			return badf("invalid resize %s %q: must be a number", name, clip(c.q.Get(name)))
		}
		size[i] = uint16(n)
	}
	if size[0] > 0 && size[1] > 0 {
		err := c.f.api.ResizeExec(c.ctx(), sandbox, exec, api.TerminalSize{Rows: size[0], Cols: size[1]})
		if err != nil {
			return err
		}
	}
	return c.none(http.StatusOK)
}

// postWait answers at once with a head, and with the exit when it is there: clients start the
// container between the two.
func (c *call) postWait() error {
	condition := c.q.Get("condition")
	if condition != "" && condition != "not-running" && condition != "next-exit" && condition != "removed" {
		return badf("invalid condition: %q", clip(condition))
	}
	since := time.Now()
	sb, err := c.container()
	if err != nil {
		return err
	}
	failed, stop := c.f.onFailure(sb.ID)
	defer stop()
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(http.StatusOK)
	c.flush()
	code, err := c.f.await(c.ctx(), sb, condition, since, failed)
	if err != nil {
		if c.ctx().Err() != nil {
			return errAnswered
		}
		c.f.log.Warn("a wait is cut off", "container", sb.ID, "error", err)
		panic(http.ErrAbortHandler) // the client connects again: any code would be taken for the container's
	}
	return c.encode(container.WaitResponse{StatusCode: int64(code)})
}

// errFound ends the reading of events.
var errFound = errors.New("found")

// await waits for the end of a container as condition has it, and returns its exit code.
func (f *Face) await(ctx context.Context, sb *api.Sandbox, condition string, since time.Time, failed <-chan int) (int, error) {
	lives := sb.State == api.StateRunning || sb.State == api.StatePaused
	if condition != "next-exit" && condition != "removed" && !lives {
		return exitCode(sb), nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	code, known := exitCode(sb), false
	result := make(chan error, 1)
	go func() {
		result <- f.api.Events(ctx, client.EventOptions{Since: since, Follow: true, Filters: []string{"type=sandbox", "object=" + sb.ID}}, func(e api.Event) error {
			switch {
			case e.Object != sb.ID, e.Idle: // its files are used
			case e.Action == api.ActionStopped:
				code, known = 137, true
				if e.Code != nil {
					code = *e.Code
				} else if end, err := f.api.WaitSandbox(ctx, sb.ID); err == nil {
					code = exitCode(end)
				} else if !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
					return err
				}
				if condition != "removed" {
					return errFound
				}
			case e.Action == api.ActionDeleted:
				if !known && condition != "removed" {
					code = 137
				}
				return errFound
			}
			return nil
		})
	}()
	// It may have ended or gone before the events that are read.
	now, err := f.api.GetSandbox(ctx, sb.ID)
	switch {
	case errors.Is(err, &api.Problem{Code: api.CodeNotFound}) && condition == "removed" && !lives:
		cancel(errFound)
		<-result //nolint:errcheck // errFound
		return code, nil
	case err == nil && lives && condition != "removed" && now.State != api.StateRunning && now.State != api.StatePaused:
		cancel(errFound)
		<-result //nolint:errcheck // errFound
		return exitCode(now), nil
	}
	select {
	case err := <-result:
		if errors.Is(err, errFound) {
			return code, nil
		}
		if err == nil {
			err = errors.New("the events of the daemon have ended")
		}
		return 0, err
	case code := <-failed:
		cancel(errFound)
		<-result //nolint:errcheck // errFound
		return code, nil
	}
}

// getLogs sends the output of the main process.
func (c *call) getLogs() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	stdout, stderr := c.bool("stdout"), c.bool("stderr")
	if !stdout && !stderr {
		return badf("Bad parameters: you must choose at least one stream")
	}
	opts := client.LogOptions{Follow: c.bool("follow")}
	switch tail := c.q.Get("tail"); tail {
	case "", "all":
	default:
		if n, err := strconv.Atoi(tail); err == nil && n >= 0 {
			opts.Last = &n
		}
	}
	if s := c.q.Get("since"); s != "" && s != "0" {
		if opts.Since, err = parseTime(s); err != nil {
			return err
		}
	}
	var until time.Time
	if s := c.q.Get("until"); s != "" && s != "0" {
		if until, err = parseTime(s); err != nil {
			return err
		}
	}
	switch {
	case !stderr:
		opts.Stream = "stdout"
	case !stdout:
		opts.Stream = "stderr"
	}
	typ := typeRaw
	if !sb.TTY && c.minor >= 42 {
		typ = typeMultiplexed
	}
	c.w.Header().Set("Content-Type", typ)
	c.w.WriteHeader(http.StatusOK)
	c.flush()
	out, errs := outputs(c.w, sb.TTY)
	if c.bool("timestamps") {
		out, errs = &stamped{w: out}, &stamped{w: errs}
	}
	err = c.f.api.Logs(c.ctx(), sb.ID, opts, func(e api.LogEntry) error {
		if !until.IsZero() && e.Time.After(until) {
			return errFound
		}
		to := out
		if e.Stream == "stderr" {
			to = errs
		}
		if s, ok := to.(*stamped); ok {
			s.at = e.Time
		}
		if _, err := to.Write(logData(&e)); err != nil {
			return err
		}
		c.flush()
		return nil
	})
	if err != nil && !errors.Is(err, errFound) && c.ctx().Err() == nil {
		c.f.log.Info("logs broke off", "id", sb.ID, "error", err)
		panic(http.ErrAbortHandler) // half an answer must not look like a whole one
	}
	return errAnswered
}

// stamped begins each line with the time at which it came.
type stamped struct {
	w      io.Writer
	at     time.Time
	middle bool // of a line
}

// Write implements io.Writer.
func (s *stamped) Write(p []byte) (int, error) {
	var b []byte
	for line := range slices.Values(strings.SplitAfter(string(p), "\n")) {
		if line == "" {
			continue
		}
		if !s.middle {
			b = append(b, s.at.UTC().Format("2006-01-02T15:04:05.000000000Z")+" "...)
		}
		b = append(b, line...)
		s.middle = !strings.HasSuffix(line, "\n")
	}
	if _, err := s.w.Write(b); err != nil {
		return 0, err
	}
	return len(p), nil
}

// execCreate is the body of a request for an exec, with the names that clients use.
type execCreate struct {
	User, DetachKeys, WorkingDir            string
	Privileged, Tty                         bool
	AttachStdin, AttachStdout, AttachStderr bool
	Detach                                  bool
	ConsoleSize                             *[2]uint
	Env, Cmd                                []string
}

func (c *call) postExec() error {
	var req execCreate
	if err := c.read(&req, false); err != nil {
		return err
	}
	if len(req.Cmd) == 0 {
		return badf("No exec command specified")
	}
	if req.Privileged {
		return statusf(http.StatusForbidden, "Privileged: no program has more power than its container; User root runs it as root of the container")
	}
	keys, err := keysOf(req.DetachKeys)
	if err != nil {
		return err
	}
	sb, err := c.container()
	if err != nil {
		return err
	}
	switch sb.State {
	case api.StateRunning:
	case api.StatePaused:
		return statusf(http.StatusConflict, "container %s is paused, unpause the container before exec", containerID(sb.ID))
	case api.StateCreating, api.StateStopped, api.StateLost:
		return statusf(http.StatusConflict, "container %s is not running", containerID(sb.ID))
	}
	x := api.ExecRequest{
		Argv: req.Cmd, Env: req.Env, Cwd: req.WorkingDir, User: req.User, TTY: req.Tty, StdinOpen: req.AttachStdin, OutputLimit: execOutput,
	}
	if s := req.ConsoleSize; s != nil && s[0] > 0 && s[1] > 0 && s[0] < 1<<16 && s[1] < 1<<16 {
		x.Rows, x.Cols = uint16(s[0]), uint16(s[1]) //nolint:gosec // compared before
	}
	asked := execAsked{
		User: cmp.Or(req.User, requestOf(sb).User), Stdin: req.AttachStdin, Stdout: req.AttachStdout, Stderr: req.AttachStderr,
	}
	if req.DetachKeys != "" {
		asked.DetachKeys = keys
	}
	note, err := json.Marshal(asked)
	if err != nil {
		return err
	}
	x.Annotations = map[string]string{annotationExec: string(note)}
	made, err := c.f.api.PrepareExec(c.ctx(), sb.ID, x)
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, map[string]string{"Id": execID(made.Sandbox, made.ID)})
}

// annotationExec is the annotation that has what the request for an exec has asked for.
const annotationExec = "docker.exec"

// execAsked holds the parts of a request for an exec that our execs lack.
type execAsked struct {
	User                  string
	Stdin, Stdout, Stderr bool   // to be attached
	DetachKeys            []byte // none if the client named none
}

// askedOf returns what the request for an exec has asked for.
func askedOf(x *api.Exec) execAsked {
	asked := execAsked{User: x.User, Stdin: x.StdinOpen, Stdout: true, Stderr: true}
	_ = json.Unmarshal([]byte(x.Annotations[annotationExec]), &asked) // of an exec of our API there is none
	return asked
}

// execOutput is the output of an exec that is in memory at a time. Clients that attach miss
// nothing: the program waits for them.
const execOutput = 256 << 10

// exec returns the exec that the path names.
func (c *call) exec() (*api.Exec, error) {
	missing := statusf(http.StatusNotFound, "No such exec instance: %s", clip(c.args[0]))
	sandbox, id, ok := execOf(c.args[0])
	if !ok {
		return nil, missing
	}
	x, err := c.f.api.GetExec(c.ctx(), sandbox, id)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return nil, missing
	}
	return x, err
}

func (c *call) postExecStart() error {
	var req container.ExecStartRequest
	if err := c.read(&req, true); err != nil {
		return err
	}
	x, err := c.exec()
	if err != nil {
		return err
	}
	if x.State != api.ExecPrepared {
		return statusf(http.StatusConflict, "exec %s has been started already", clip(c.args[0]))
	}
	var size api.TerminalSize
	if s := req.ConsoleSize; s != nil && s[0] > 0 && s[1] > 0 && s[0] < 1<<16 && s[1] < 1<<16 {
		size = api.TerminalSize{Rows: uint16(s[0]), Cols: uint16(s[1])} //nolint:gosec // compared before
	}
	start := func(ctx context.Context) error {
		_, err := c.f.api.StartExec(ctx, x.Sandbox, x.ID, size)
		return err
	}
	if req.Detach {
		if err := start(c.ctx()); err != nil {
			return startError(err, execPrefix, x.Argv)
		}
		return c.none(http.StatusOK)
	}
	asked := askedOf(x)
	keys := asked.DetachKeys
	if len(keys) == 0 {
		if keys, err = keysOf(""); err != nil {
			return err
		}
	}
	return c.attach(attachment{
		sandbox: x.Sandbox, exec: x.ID, opts: client.AttachOptions{Next: true}, tty: x.TTY, stdin: asked.Stdin, stdout: asked.Stdout,
		stderr: asked.Stderr, keys: keys,
		begin: func(ctx context.Context) error {
			if err := start(ctx); err != nil {
				return startError(err, execPrefix, x.Argv)
			}
			return nil
		},
	})
}

const execPrefix = "OCI runtime exec failed: exec failed: unable to start container process: "

func (c *call) getExec() error {
	x, err := c.exec()
	if err != nil {
		return err
	}
	var code *int
	switch {
	case x.Exit != nil:
		code = &x.Exit.Code
	case x.State == api.ExecLost:
		n := 137
		if x.Error != nil && (x.Error.Code == api.CodeProgramMissing || x.Error.Code == api.CodeProgramDenied || x.Error.Code == api.CodeInvalid || x.PID == 0) {
			n = 126
			if x.Error.Code == api.CodeProgramMissing {
				n = 127
			}
		}
		code = &n
	}
	entry, args := "", []string{}
	if len(x.Argv) > 0 {
		entry, args = x.Argv[0], x.Argv[1:]
	}
	asked := askedOf(x)
	return c.json(http.StatusOK, map[string]any{
		"ID": execID(x.Sandbox, x.ID), "Running": x.State == api.ExecRunning, "ExitCode": code, "Pid": x.PID, "ContainerID": containerID(x.Sandbox),
		"ProcessConfig": map[string]any{"tty": x.TTY, "entrypoint": entry, "arguments": args, "privileged": false, "user": asked.User},
		"OpenStdin":     asked.Stdin, "OpenStdout": asked.Stdout, "OpenStderr": asked.Stderr, "CanRemove": false,
		"DetachKeys": base64.StdEncoding.EncodeToString(asked.DetachKeys),
	})
}

func (c *call) postExecResize() error {
	x, err := c.exec()
	if err != nil {
		return err
	}
	if x.State != api.ExecRunning {
		return badf("exec %s is not running", clip(c.args[0]))
	}
	return c.resize(x.Sandbox, x.ID)
}
