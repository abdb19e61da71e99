package errand

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxRequest and maxAnswer bound what travels, in bytes.
	maxRequest = 64 << 10
	maxAnswer  = 1 << 20
	maxFiles   = 2 // beside the answer socket
	// maxErrands is how many are run at once; more are refused.
	maxErrands = 64
	// fdRequests is the runner's end of the socket.
	fdRequests = 3
	// giveUp is how long a runner waits for errands that have been given up: some run programs that nobody can end.
	giveUp = 5 * time.Second
	// endTimeout is how long a runner may take to end.
	endTimeout = 2 * giveUp
)

// ErrGone is the error of every errand when the process that runs them has gone.
var ErrGone = errors.New("the process that runs errands is gone; the daemon has to be started anew")

// gone are the errors of writing to a socket that nobody reads from any more, or that we have closed. Others pass, as a lack of memory.
var gone = []error{unix.EPIPE, unix.ECONNRESET, unix.ECONNREFUSED, unix.ENOTCONN, net.ErrClosed}

type request struct {
	Errand string          `json:"errand"`
	Args   json.RawMessage `json:"args,omitempty"`
}

type answer struct {
	Error  string          `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
}

// Runner is a runner, as the one sees it who has it run errands.
type Runner struct {
	conn  *net.UnixConn
	cmd   *exec.Cmd
	ended chan struct{}

	mu     sync.Mutex
	closed bool
}

// Start starts the calling program once more, with the arguments, to call [Serve]. It is closed by Close.
func Start(args ...string) (*Runner, error) {
	ours, theirs, err := socketpair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, fmt.Errorf("start runner of errands: %w", err)
	}
	defer theirs.Close()
	conn, err := unixConn(ours)
	if err != nil {
		return nil, fmt.Errorf("start runner of errands: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", args...) //nolint:noctx,gosec // our own program; it ends when its socket does
	cmd.Args[0] = os.Args[0]
	cmd.ExtraFiles = []*os.File{theirs} // fdRequests
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start runner of errands: %w", err), conn.Close())
	}
	r := &Runner{conn: conn, cmd: cmd, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // whoever wants something of it is told
		close(r.ended)
	}()
	return r, nil
}

// Close gives up what is being done and returns when the runner has ended. A second call does nothing. It is not killed: who is
// confined may not be able to.
func (r *Runner) Close() error {
	r.mu.Lock()
	closed := r.closed
	r.closed = true
	r.mu.Unlock()
	if closed {
		return nil
	}
	err := r.conn.Close()
	timer := time.NewTimer(endTimeout)
	defer timer.Stop()
	select {
	case <-r.ended:
		return err
	case <-timer.C:
		return errors.Join(err, fmt.Errorf("the runner of errands does not end within %v", endTimeout))
	}
}

// Gone is closed when the runner has ended.
func (r *Runner) Gone() <-chan struct{} { return r.ended }

// Run has an errand done, with the files, and decodes its result into result, unless that is nil. An error of the errand itself is
// an error with its text.
func (r *Runner) Run(ctx context.Context, errand string, args, result any, files ...*os.File) error {
	if err := r.run(ctx, errand, args, result, files); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", errand, ctx.Err())
		}
		return err
	}
	return nil
}

func (r *Runner) run(ctx context.Context, errand string, args, result any, files []*os.File) error {
	encoded, err := json.Marshal(args)
	if err != nil {
		return fmt.Errorf("encode errand %s: %w", errand, err)
	}
	packet, err := json.Marshal(request{errand, encoded})
	if err != nil {
		return fmt.Errorf("encode errand %s: %w", errand, err)
	}
	if len(packet) > maxRequest || len(files) > maxFiles {
		return fmt.Errorf("errand %s is too large: %d bytes and %d files", errand, len(packet), len(files))
	}
	ours, theirs, err := socketpair(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	conn, err := unixConn(ours)
	if err != nil {
		return errors.Join(err, theirs.Close())
	}
	defer conn.Close()
	fds := []int{int(theirs.Fd())}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	_, _, err = r.conn.WriteMsgUnix(packet, unix.UnixRights(fds...), nil)
	_ = theirs.Close() // the runner has its own
	if err != nil {
		if slices.ContainsFunc(gone, func(is error) bool { return errors.Is(err, is) }) {
			err = fmt.Errorf("%w (%w)", ErrGone, err)
		}
		return fmt.Errorf("ask for errand %s: %w", errand, err)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	data, err := io.ReadAll(io.LimitReader(conn, maxAnswer+1))
	if err != nil {
		return fmt.Errorf("wait for errand %s: %w", errand, err)
	}
	var a answer
	switch {
	case len(data) == 0:
		return fmt.Errorf("wait for errand %s: %w", errand, ErrGone)
	case len(data) > maxAnswer:
		return fmt.Errorf("errand %s has an answer of more than %d bytes", errand, maxAnswer)
	}
	if err := strictly(data, &a); err != nil {
		return fmt.Errorf("decode the answer of errand %s: %w", errand, err)
	}
	if a.Error != "" {
		return errors.New(a.Error)
	}
	if result == nil {
		return nil
	}
	if err := strictly(a.Result, result); err != nil {
		return fmt.Errorf("decode the result of errand %s: %w", errand, err)
	}
	return nil
}

// Handler does an errand. The files are closed after it.
type Handler func(ctx context.Context, args json.RawMessage, files []*os.File) (result any, err error)

// Handle makes a handler of a function that takes and gives values, and no files.
func Handle[A, R any](do func(ctx context.Context, args A) (R, error)) Handler {
	return func(ctx context.Context, args json.RawMessage, files []*os.File) (any, error) {
		var a A
		if err := strictly(args, &a); err != nil {
			return nil, fmt.Errorf("decode: %w", err)
		}
		if len(files) > 0 {
			return nil, fmt.Errorf("%d files that nobody asked for", len(files))
		}
		return do(ctx, a)
	}
}

// Serve runs errands in a program that [Start] has started, until the one who started it has gone. It returns when what was
// under way has been given up, or, with an error, does not care; the program has to end then.
func Serve(ctx context.Context, handlers map[string]Handler) error {
	return serve(ctx, handlers, giveUp)
}

// serve is Serve that waits so long for errands that have been given up.
func serve(ctx context.Context, handlers map[string]Handler, giveUp time.Duration) (err error) {
	unix.CloseOnExec(fdRequests)
	conn, err := unixConn(os.NewFile(fdRequests, "errands"))
	if err != nil {
		return fmt.Errorf("run errands: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer func() {
		_ = conn.Close()
		cancel()
		err = errors.Join(err, waitFor(&running, giveUp))
	}()
	slots := make(chan struct{}, maxErrands)
	for {
		req, to, files, err := receive(conn)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("run errands: %w", err)
		}
		select {
		case slots <- struct{}{}:
		default:
			refuse(to)
			closeAll(files)
			continue
		}
		running.Go(func() {
			defer func() { <-slots }()
			defer closeAll(files)
			defer to.Close()
			do(ctx, req, to, files, handlers)
		})
	}
}

// refuse answers a request for which there is no place. All others wait meanwhile, so that nothing is waited for: there is room for
// it in the socket of who listens. A deadline would not do, for where it has passed before the write has begun, on a machine that
// stops for a moment, nothing is written, and who asked takes the runner for gone.
func refuse(to *net.UnixConn) {
	defer to.Close()
	said, err := json.Marshal(&answer{Error: fmt.Sprintf("%d errands are being run already", maxErrands)})
	if err != nil {
		return
	}
	rc, err := to.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		_ = unix.Sendmsg(int(fd), said, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) // who does not read does not hear of it
	})
}

// waitFor waits for what has been given up, for a while.
func waitFor(running *sync.WaitGroup, giveUp time.Duration) error {
	ended := make(chan struct{})
	go func() {
		running.Wait()
		close(ended)
	}()
	timer := time.NewTimer(giveUp)
	defer timer.Stop()
	select {
	case <-ended:
		return nil
	case <-timer.C:
		return fmt.Errorf("errands that were given up go on after %v", giveUp)
	}
}

// do answers one request. Who asked may be gone by then.
func do(ctx context.Context, req *request, to *net.UnixConn, files []*os.File, handlers map[string]Handler) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	given := make(chan struct{})
	go func() {
		defer close(given)
		_, _ = to.Read(make([]byte, 1)) // nothing is sent on it: it ends when nobody waits any more, or with the deadline below
		cancel()
	}()
	var a answer
	handle := handlers[req.Errand]
	if handle == nil {
		a.Error = fmt.Sprintf("no errand is called %q", req.Errand)
	} else if result, err := handle(ctx, req.Args, files); err != nil {
		a.Error = err.Error()
	} else if a.Result, err = json.Marshal(result); err != nil {
		a.Error = fmt.Sprintf("encode the result of errand %s: %v", req.Errand, err)
	}
	_ = to.SetReadDeadline(time.Unix(1, 0))
	<-given
	_ = to.SetWriteDeadline(time.Now().Add(endTimeout)) // who does not read does not keep us
	_ = json.NewEncoder(to).Encode(&a)
}

// receive reads one request, strictly. What cannot be read is answered by closing its answer socket.
func receive(conn *net.UnixConn) (*request, *net.UnixConn, []*os.File, error) {
	for {
		data := make([]byte, maxRequest+1)
		oob := make([]byte, unix.CmsgSpace((1+maxFiles)*4))
		n, oobn, flags, _, err := conn.ReadMsgUnix(data, oob)
		if err != nil {
			return nil, nil, nil, err
		}
		files := rights(oob[:oobn])
		if n == 0 && len(files) == 0 {
			return nil, nil, nil, io.EOF
		}
		req := new(request)
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || n > maxRequest || len(files) == 0 || strictly(data[:n], req) != nil {
			closeAll(files)
			continue
		}
		to, err := unixConn(files[0])
		if err != nil {
			closeAll(files[1:])
			continue
		}
		return req, to, files[1:], nil
	}
}

func rights(oob []byte) (files []*os.File) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // it is about something else
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "errand"))
		}
	}
	return files
}

// strictly decodes data that is one value and has no field that we do not know.
func strictly(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if d.More() {
		return errors.New("data after the value")
	}
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func socketpair(kind int) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "errands"), os.NewFile(uintptr(fds[1]), "errands"), nil
}

// unixConn takes a socket's file over.
func unixConn(f *os.File) (*net.UnixConn, error) {
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T is no Unix socket", conn), conn.Close(), syscall.ENOTSOCK)
	}
	return c, nil
}
