package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// postExecPipes starts a program and gives the client the ends of its pipes. No byte of the output
// comes through here.
//
//	client                                             server
//	  ── POST …/exec/pipes, Upgrade: sandboxd-pipes ──▶
//	  ◀── 101; frame: ExecEvent {pid, exec}, with the
//	      descriptors of stdout, stderr and perhaps stdin ──
//	  ◀──────── frame: ExecEvent {exit} or {error} ──   the last
//
// The client sends nothing more. One that closes the connection kills everything the exec started.
//
// Descriptors go from the daemon to the client only. The kernel closes those that a client sends:
// no read of ours asks for any.
func (s *Server) postExecPipes(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "client", "daemon")
	if err != nil {
		return err
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), api.UpgradePipes) {
		return class.Invalidf("upgrade %q: this route needs Connection: Upgrade and Upgrade: %s", class.Clip(r.Header.Get("Upgrade")), api.UpgradePipes)
	}
	var req api.ExecRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if err := direct(connOf(r.Context()), q); err != nil {
		return err
	}
	s.piped.Add(1)
	defer s.piped.Done()
	x, err := s.as(r).StartPiped(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	defer x.Close()
	ends, err := x.Ends()
	if err != nil {
		return err
	}
	defer func() { unixmsg.CloseAll(ends) }()
	outside, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("take the connection over: %w", err)
	}
	defer outside.Close()
	if a, ok := w.(*answer); ok {
		a.began = true
	}
	_ = outside.SetDeadline(time.Now().Add(stepTimeout)) // every connection of ours has deadlines
	if err := begin(outside, api.ExecEvent{PID: x.PID, Exec: x.ID()}, ends); err != nil {
		s.log.Debug("the ends of a program's pipes are not sent", "error", err)
		return nil
	}
	// Only the client has them now: when it is gone, the pipes break.
	unixmsg.CloseAll(ends)
	ends = nil
	_ = outside.SetDeadline(time.Time{})

	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	var reader sync.WaitGroup
	defer reader.Wait()
	defer outside.Close() // ends the reader
	reader.Go(func() {
		_, _ = outside.Read(make([]byte, 1)) // returns when the client is gone
		cancel(errClientGone)
	})
	exit, usage, err := x.Await(ctx)
	x.Close()
	last := api.ExecEvent{Exit: &exit, Usage: &usage}
	if errors.Is(err, errClientGone) {
		return nil
	} else if err != nil {
		last = execError(ProblemOf(err))
	}
	frame, err := eventFrame(nil, last)
	if err != nil {
		return nil // the answer has begun
	}
	_ = outside.SetWriteDeadline(time.Now().Add(stepTimeout)) // every connection of ours has deadlines
	_, _ = outside.Write(frame)                               // the client may be gone
	return nil
}

// direct checks that the client and we are the two ends of one socket: each names both processes.
// Through a proxy, or in different PID namespaces, they do not agree, and descriptors would not
// arrive. It is no matter of access: a client that lies gets no pipes.
//
// Tenants get none. They could enlarge the pipes (F_SETPIPE_SZ), which the kernel counts for the
// daemon's user: then the pipes of all tenants are of two pages (pipe(7), pipe-user-pages-soft).
func direct(c *peerConn, q url.Values) error {
	if c == nil {
		return class.Invalidf("descriptors need a Unix socket")
	}
	if c.peer.tenant() != "" {
		return class.Invalidf("pipes: a tenant gets none; output comes as a stream")
	}
	pid, err := unixmsg.PeerPID(c.UnixConn)
	if err != nil {
		return err
	}
	if pid == 0 || q.Get("client") != strconv.Itoa(pid) || q.Get("daemon") != strconv.Itoa(os.Getpid()) {
		return class.Invalidf("client and daemon: other processes are at the ends of this connection, so descriptors cannot pass")
	}
	return nil
}

// begin answers with the first frame and the descriptors that belong to it.
func begin(c net.Conn, e api.ExecEvent, fds []int) error {
	conn, ok := c.(*peerConn)
	if !ok {
		return fmt.Errorf("%T passes no descriptors", c)
	}
	head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradePipes + "\r\n\r\n"
	answer, err := eventFrame([]byte(head), e)
	if err != nil {
		return err
	}
	// The first bytes of a connection's answer fit into its buffer, so they go as one message.
	_, _, err = conn.WriteMsgUnix(answer, unix.UnixRights(fds...), nil)
	return err
}
