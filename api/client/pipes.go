package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
)

// ErrNoPipes reports that the daemon cannot pass descriptors to this process: a proxy stands
// between them, they are in different PID namespaces, or the daemon is of an earlier version. No
// program was started. [Client.ExecOutput] and [Client.ExecInteractive] work without them.
var ErrNoPipes = errors.New("the daemon passes no descriptors to this process")

// Pipes is a program that has started, and our ends of its pipes. Its output does not go through
// the daemon, which only reports its end.
//
// The files are non-blocking. The other ends are in the sandbox, and may stay open there after the
// program's end: to read everything that the program has written, read until Wait returns, and then
// what FIONREAD counts.
type Pipes struct {
	ID     string   // of the exec
	PID    int      // inside the sandbox
	Stdin  *os.File // nil unless the request has StdinOpen; the program's stdin ends when it is closed
	Stdout *os.File // a closed one is a broken pipe for the program
	Stderr *os.File

	ctx    context.Context //nolint:containedctx // it bounds the program, as the documentation of ExecPipes says
	conn   net.Conn
	frames frames
	stop   func() bool // ends the watch on ctx
	close  sync.Once
}

// ExecPipes starts a program and returns the ends of its pipes. If ctx ends before Wait has
// returned, the program and its descendants are killed; so they are by Close. The request must not
// have TTY or Detach. See [ErrNoPipes].
func (c *Client) ExecPipes(ctx context.Context, id string, req api.ExecRequest) (_ *Pipes, err error) {
	if c.wrapped {
		return nil, ErrNoPipes
	}
	plain, err := dial(ctx, c.socket)
	if err != nil {
		return nil, err
	}
	unix, ok := plain.(*net.UnixConn)
	if !ok {
		_ = plain.Close() // nothing was said
		return nil, ErrNoPipes
	}
	conn := &rightsConn{UnixConn: unix}
	p := &Pipes{ctx: ctx, conn: conn}
	p.stop = context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		conn.closeRights()
		if err != nil {
			p.Close()
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
		}
	}()
	resp, buffered, err := askPipes(conn, id, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		err := problem(resp)
		var refused *api.Problem
		// An earlier version does not know the route. Whatever else is wrong with the request, the
		// next attempt is told.
		if !errors.As(err, &refused) && resp.StatusCode == http.StatusNotFound ||
			refused != nil && (refused.Code == api.CodeInvalid || refused.Code == api.CodeNotFound) {
			return nil, fmt.Errorf("%w: %w", ErrNoPipes, err)
		}
		return nil, err
	}
	p.frames.r = buffered
	frame, err := p.frames.next()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errLost, err)
	}
	if frame[0] != api.ChannelEvent {
		return nil, fmt.Errorf("the daemon began with a frame of channel %d", frame[0])
	}
	e, err := decodeEvent(frame[1:])
	if err != nil {
		return nil, err
	}
	if e.Error != nil {
		return nil, e.Error
	}
	p.ID, p.PID = e.Exec, e.PID
	if err := p.take(conn, req.StdinOpen); err != nil {
		return nil, err
	}
	return p, nil
}

// take makes files of the descriptors that came with the first frame.
func (p *Pipes) take(conn *rightsConn, stdin bool) error {
	to := []**os.File{&p.Stdout, &p.Stderr}
	if stdin {
		to = append(to, &p.Stdin)
	}
	if len(conn.rights) != len(to) {
		return fmt.Errorf("the daemon sent %d descriptors, expected %d", len(conn.rights), len(to))
	}
	for i, name := range []string{"stdout", "stderr", "stdin"}[:len(to)] {
		*to[i] = os.NewFile(uintptr(conn.rights[i]), name)
	}
	conn.rights = nil
	return nil
}

// askPipes sends the request for a program with pipes. It names the processes at both ends of the
// connection: a proxy in between is one of them.
func askPipes(conn *rightsConn, id string, req api.ExecRequest) (*http.Response, *bufio.Reader, error) {
	peer, err := peerPID(conn.UnixConn)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrNoPipes, err)
	}
	target, err := request{
		path:  []string{"v1", "sandboxes", id, "exec", "pipes"},
		query: url.Values{"client": {strconv.Itoa(os.Getpid())}, "daemon": {strconv.Itoa(int(peer))}},
	}.url()
	if err != nil {
		return nil, nil, err
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, nil, fmt.Errorf("encode the request: %w", err)
	}
	r, err := http.NewRequest(http.MethodPost, target, bytes.NewReader(body)) //nolint:noctx // its end closes the connection
	if err != nil {
		return nil, nil, fmt.Errorf("build the request: %w", err)
	}
	r.Header.Set("Content-Type", api.TypeJSON)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", api.UpgradePipes)
	// A daemon may refuse before it has read everything; its answer says why.
	sent := r.Write(conn)
	buffered := bufio.NewReader(conn)
	resp, err := http.ReadResponse(buffered, r)
	if err != nil {
		return nil, nil, fmt.Errorf("ask for a program with pipes: %w", errors.Join(sent, err))
	}
	return resp, buffered, nil
}

// Wait returns when the program has ended, or the daemon has ended it. Call it once.
func (p *Pipes) Wait() (*End, error) {
	end, err := p.frames.follow(Streams{})
	if cause := context.Cause(p.ctx); err != nil && cause != nil {
		return nil, cause
	}
	return end, err
}

// Kill kills the program and its descendants, after which Wait returns an error. It does nothing to
// a program whose end Wait has returned.
func (p *Pipes) Kill() { _ = p.conn.Close() } // nothing is left to be sent

// Close closes the files, and kills the program and its descendants if Wait has not returned its
// end.
func (p *Pipes) Close() {
	p.close.Do(func() {
		p.stop()
		p.Kill()
		for _, f := range []*os.File{p.Stdin, p.Stdout, p.Stderr} {
			if f != nil {
				_ = f.Close() // the caller may have closed it
			}
		}
	})
}

// maxRights is the maximum number of descriptors from a daemon. The kernel closes those beyond.
const maxRights = 3

// rightsConn keeps the descriptors that come with the bytes.
type rightsConn struct {
	*net.UnixConn
	rights []int
}

func (c *rightsConn) Read(p []byte) (int, error) {
	control := make([]byte, syscall.CmsgSpace(4*maxRights))
	n, controls, _, _, err := c.ReadMsgUnix(p, control) // close-on-exec
	if controls > 0 {
		messages, perr := syscall.ParseSocketControlMessage(control[:controls])
		for i := range messages {
			if got, rerr := syscall.ParseUnixRights(&messages[i]); rerr == nil {
				c.rights = append(c.rights, got...)
			}
		}
		if err == nil && perr != nil {
			err = fmt.Errorf("parse control message: %w", perr)
		}
		if len(c.rights) > maxRights {
			c.closeRights()
			err = errors.New("the daemon sent more descriptors than a program has streams")
		}
	}
	return max(n, 0), err
}

func (c *rightsConn) closeRights() {
	for _, fd := range c.rights {
		_ = syscall.Close(fd) // a pipe's end
	}
	c.rights = nil
}

// peerPID returns the process that listens at the other end, in our PID namespace.
func peerPID(c *net.UnixConn) (int32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var got error
	if err := raw.Control(func(fd uintptr) {
		cred, got = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		got = err
	}
	if got != nil {
		return 0, fmt.Errorf("read the peer's pid: %w", got)
	}
	return cred.Pid, nil
}
