package launcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
)

// orphanTimeout is the time after which a launcher without daemon and without sandboxes ends.
const orphanTimeout = time.Minute

// acceptRetry is the wait after a connection could not be accepted for lack of a resource.
const acceptRetry = 50 * time.Millisecond

// perList bounds the sandboxes in one answer of list: each has a pidfd, and a packet has room for
// some 100.
const perList = 64

// engine lists the methods of libct.Engine that the server uses. Only the launcher's binary may
// import libct.
type engine interface {
	runtime.Engine
	Count() int
	Close(ctx context.Context) error
}

// Server answers the daemon's requests.
type Server struct {
	Engine engine
	Layers *Layers
	Ranges *Ranges
	// Networks tells whether sandboxes can have one, for Info; nil if they can.
	Networks *Networks
	Info     Info
	Log      *slog.Logger

	descriptors descriptorStore
	filters     filters
	listener    *net.UnixListener
	stop        chan struct{} // closed by shutdown
	stopOnce    sync.Once
	requests    sync.WaitGroup

	mu       sync.Mutex
	sessions map[*net.UnixConn]struct{}
	starting map[string]chan struct{} // ids of sandboxes that are being started, closed when the outcome is known
	idle     *time.Timer
}

// Serve answers on the socket until a shutdown is requested or the launcher is orphaned. Then it
// ends every sandbox and returns when all requests have been answered.
func (s *Server) Serve(ctx context.Context, listener *os.File) error {
	l, err := net.FileListener(listener)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	_ = listener.Close()
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("listen: %T is no Unix socket", l)
	}
	ul.SetUnlinkOnClose(false) // its path is the daemon's, out of reach from here
	s.listener, s.stop = ul, make(chan struct{})
	s.sessions = make(map[*net.UnixConn]struct{})
	s.idle = time.AfterFunc(orphanTimeout, s.orphaned)

	errs := make(chan error, 1)
	go func() { errs <- s.accept(ctx) }()
	select {
	case err = <-errs:
		s.stopOnce.Do(func() { close(s.stop) }) // or Serve would wait for the sessions
	case <-s.stop:
		err = errors.Join(ul.Close(), <-errs)
	}
	s.idle.Stop()

	// A fresh context: the caller's may have ended.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	err = errors.Join(err, s.Engine.Close(end))
	s.requests.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.sessions {
		_ = c.Close() // the daemon sees by this that the launcher is done
	}
	return err
}

func (s *Server) accept(ctx context.Context) error {
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if temporary(err) {
			// A shortage of descriptors or memory passes. Giving up would end every sandbox.
			s.Log.Warn("accept", "err", err)
			select {
			case <-time.After(acceptRetry):
			case <-s.stop:
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		s.requests.Go(func() { s.serve(ctx, c) })
	}
}

func temporary(err error) bool {
	for _, errno := range []error{unix.ECONNABORTED, unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

func (s *Server) serve(ctx context.Context, c *net.UnixConn) {
	keep := false
	defer func() {
		if !keep {
			_ = c.Close()
		}
	}()
	if err := c.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
		return
	}
	var req request
	files, err := receive(c, &req)
	if err != nil {
		_ = send(c, &response{Error: toWire(err)})
		return
	}
	defer closeAll(files)
	if req.Op == opSession {
		keep = true
		s.attach(c)
		return
	}
	if (req.Op == opCreate || req.Op == opStart) && req.Spec != nil {
		defer s.holdStart(ctx, req.Spec.ID)()
	}
	work, done := ctx, func() {}
	if req.Op == opApply || req.Op == opDiff || req.Op == opSnapshot || req.Op == opStop || req.Op == opRemoveLayer || req.Op == opVolume {
		// These last as long as the daemon, the writer of the layer, or the sandbox likes. A removal of a
		// layer that is being extracted may be unwanted once its client is gone. The others take
		// milliseconds and are completed in any case.
		work, done = s.whileAsked(ctx, c)
	}
	resp, out := s.handle(work, &req, files)
	done()
	defer closeAll(out)
	if err := send(c, resp, out...); err != nil {
		s.Log.Warn("answer not delivered", "op", req.Op, "err", err)
		if req.Op == opCreate && resp.Error == nil {
			// The client never learns of this sandbox. A daemon may have asked for its removal before it
			// existed.
			if err := s.Engine.Delete(ctx, req.Spec.ID); err != nil && !errors.Is(err, runtime.ErrNotFound) {
				s.Log.Warn("sandbox is left", "id", req.Spec.ID, "err", err)
			}
		}
		if req.Op == opStart && resp.Error == nil {
			if err := s.Engine.Kill(ctx, req.Spec.ID); err != nil && !errors.Is(err, runtime.ErrNotFound) {
				s.Log.Warn("sandbox goes on", "id", req.Spec.ID, "err", err)
			}
		}
		if req.Op == opSnapshot && resp.Error == nil {
			// As with a sandbox: its removal may have been requested before it existed.
			if err := s.Layers.Remove(ctx, req.Snap.ChainID); err != nil {
				s.Log.Warn("layer is left", "chain_id", req.Snap.ChainID, "err", err)
			}
		}
	}
	if req.Op == opShutdown {
		s.stopOnce.Do(func() { close(s.stop) })
	}
}

// holdStart keeps other requests from starting a sandbox until release is called: until the answer
// is sent, or the sandbox of a lost client is removed. It waits for a start under way, which takes
// milliseconds; otherwise the next daemon would be told that the sandbox exists.
func (s *Server) holdStart(ctx context.Context, id string) (release func()) {
	for {
		s.mu.Lock()
		busy := s.starting[id]
		if busy == nil {
			break
		}
		s.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return func() {} // the engine reports the error
		}
	}
	defer s.mu.Unlock()
	mine := make(chan struct{})
	if s.starting == nil {
		s.starting = make(map[string]chan struct{})
	}
	s.starting[id] = mine
	return func() {
		s.mu.Lock()
		delete(s.starting, id)
		s.mu.Unlock()
		close(mine)
	}
}

// awaitStarts waits for the starts under way. A list must not report a sandbox whose client is
// lost, and which is about to be removed.
func (s *Server) awaitStarts(ctx context.Context) {
	s.mu.Lock()
	busy := slices.Collect(maps.Values(s.starting))
	s.mu.Unlock()
	for _, b := range busy {
		select {
		case <-b:
		case <-ctx.Done():
			return
		}
	}
}

// whileAsked returns a context that ends when the client of the connection goes away, or the server
// stops. Until done is called, which waits, no other code may read from the connection.
func (s *Server) whileAsked(ctx context.Context, c *net.UnixConn) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	_ = c.SetReadDeadline(time.Time{})
	var watch sync.WaitGroup
	watch.Go(func() {
		var buf [1]byte
		_, _ = c.Read(buf[:]) // the client sends nothing after the request
		cancel(errors.New("who asked for it has gone"))
	})
	watch.Go(func() {
		select {
		case <-s.stop:
			cancel(errors.New("the launcher is shutting down"))
		case <-ctx.Done():
		}
	})
	return ctx, func() {
		cancel(nil)
		_ = c.SetReadDeadline(time.Unix(1, 0))
		watch.Wait()
	}
}

// handle serves a request. The returned files are the response's and closed after it was sent.
func (s *Server) handle(ctx context.Context, req *request, files []*os.File) (*response, []*os.File) {
	want := 0
	switch {
	case req.Op == opCreate, req.Op == opStart, req.Op == opDiff:
		want = 1
	case req.Op == opApply && req.Apply != nil:
		want = len(req.Apply.Layers)
	case req.Op == opRange:
		want = len(rangeDirs)
	case req.Op == opVolume:
		want = req.Volume.files()
	}
	switch starts := req.Op == opCreate || req.Op == opStart; {
	case withMount(req):
		want++
		if req.Spec.Workspace.Hides {
			want++
		}
	case starts && req.Spec != nil && len(files) > 1:
		want += len(req.Spec.Mounts)
	}
	if len(files) != want && req.Op != opDeposit {
		return &response{Error: &wireError{Message: fmt.Sprintf("launcher %s: %d descriptors, not %d", req.Op, len(files), want)}}, nil
	}
	resp := &response{}
	var err error
	var started []*runtime.Started
	switch req.Op {
	case opInfo:
		var fd int
		if fd, err = unix.PidfdOpen(os.Getpid(), 0); err == nil {
			resp.Info = s.info(ctx)
			return resp, []*os.File{os.NewFile(uintptr(fd), "pidfd")}
		}
		err = fmt.Errorf("launcher info: open own pidfd: %w", err)
	case opCreate, opStart:
		run := s.Engine.Create
		if req.Op == opStart {
			run = s.Engine.Start
		}
		var st *runtime.Started
		if req.Spec == nil {
			err = fmt.Errorf("launcher %s: no spec", req.Op)
		} else if err = takeMount(req, files); err != nil {
			err = fmt.Errorf("launcher %s: %w", req.Op, err)
		} else if err = s.filters.fill(req); err != nil {
			err = fmt.Errorf("launcher %s: %w", req.Op, err)
		} else {
			if len(files) > 1 && req.Spec.Workspace == nil {
				req.Spec.Opened = files[1:]
			}
			if st, err = run(ctx, req.Spec, files[0]); err == nil {
				started = append(started, st)
			}
		}
	case opList:
		s.awaitStarts(ctx)
		var all []*runtime.Started
		if all, err = s.Engine.List(ctx); err == nil {
			for _, st := range all {
				switch {
				case st.ID <= req.After: // reported before; the list is sorted
				case len(started) == perList:
					resp.More = true
				default:
					started = append(started, st)
					continue
				}
				_ = st.Pidfd.Close()
			}
		}
	case opLeftovers:
		resp.IDs, err = s.Engine.Leftovers(ctx)
	case opKill:
		err = s.Engine.Kill(ctx, req.ID)
	case opStop:
		err = s.Engine.Stop(ctx, req.ID, runtime.Ask{Grace: req.Grace, Signal: req.Signal, Main: req.Main})
	case opPause:
		err = s.Engine.Pause(ctx, req.ID)
	case opResume:
		err = s.Engine.Resume(ctx, req.ID)
	case opDelete:
		err = s.descriptors.dropped(req.ID, s.Engine.Delete(ctx, req.ID))
	case opDeposit:
		err = s.descriptors.put(req.Set.Sandbox, req.Set.Name, files)
	case opWithdraw:
		var out []*os.File
		if resp.Sets, out, resp.More, err = s.descriptors.page(req.Set); err == nil {
			return resp, out
		}
	case opNetwork, opSocket:
		var out []*os.File
		if out, err = s.sockets(ctx, req); err == nil {
			resp.Sockets = len(out)
			return resp, out
		}
	case opDrop:
		s.descriptors.drop(req.Set.Sandbox, req.Set.Name)
	case opRange:
		err = s.Ranges.Mount(req.Range, files)
	case opUpdate:
		var e api.Enforced
		if req.Change == nil {
			err = errors.New("launcher update: no change")
		} else if e, err = s.Engine.Update(ctx, req.ID, req.Change); err == nil {
			resp.Enforced = &e
		}
	case opStats:
		var st api.Stats
		if st, err = s.Engine.Stats(ctx, req.ID); err == nil {
			resp.Stats = &st
		}
	case opOOMKills:
		resp.Count, err = s.Engine.OOMKills(ctx, req.ID)
	case opApply:
		if req.Apply == nil {
			err = errors.New("launcher apply: no layer")
			break
		}
		for i, f := range files {
			req.Apply.Layers[i].Blob = f
		}
		resp.Layers, err = s.Layers.Apply(ctx, req.Apply)
	case opDiff:
		var r layer.Result
		if req.Diff == nil {
			err = errors.New("launcher diff: no sandbox")
		} else if r, err = s.Layers.Diff(ctx, req.Diff, files[0]); err == nil {
			resp.Layer = &r
		}
	case opSnapshot:
		var r layer.Result
		if req.Snap == nil {
			err = errors.New("launcher snapshot: no sandbox")
		} else if r, resp.Frozen, err = s.Layers.Snapshot(ctx, req.Snap); err == nil {
			resp.Layer = &r
		}
	case opRemoveLayer:
		err = s.Layers.Remove(ctx, req.Layer)
	case opVolume:
		err = s.volume(ctx, req.Volume, files, resp)
	case opShutdown:
	case opSession:
		err = errors.New("launcher session: not a request to handle")
	default:
		err = fmt.Errorf("launcher: %s %q", saysUnknown, req.Op)
	}
	if err != nil {
		if wants, ok := errors.AsType[*wantsRangeError](err); ok {
			resp.Range = wants.number
		}
		if wants, ok := errors.AsType[*wantsMountsError](err); ok {
			resp.Range = wants.number
		}
		if wants, ok := errors.AsType[*wantsWorkspaceError](err); ok {
			resp.Range = wants.number
		}
		return &response{Error: toWire(err), Layers: resp.Layers, Range: resp.Range}, nil
	}
	var out []*os.File
	for _, st := range started {
		resp.Started = append(resp.Started, wireStarted{ID: st.ID, Enforced: st.Enforced, Limits: st.Limits, Deadline: st.Deadline, Paused: st.Paused})
		out = append(out, st.Pidfd)
	}
	return resp, out
}

// info returns the description of the launcher.
func (s *Server) info(ctx context.Context) *Info {
	i := s.Info
	if s.Networks != nil {
		if err := s.Networks.Missing(ctx); err != nil {
			i.Enforced.Missing = append(slices.Clone(i.Enforced.Missing), err.Error())
		}
	}
	return &i
}

// sockets answers a request about the network of a sandbox.
func (s *Server) sockets(ctx context.Context, req *request) ([]*os.File, error) {
	n, ok := runtime.As[runtime.Networker](s.Engine)
	if !ok {
		return nil, fmt.Errorf("launcher %s: this engine has no networks: %w", req.Op, runtime.ErrUnavailable)
	}
	if req.Op == opSocket {
		f, err := n.NetworkSocket(ctx, req.ID, req.Socket)
		return []*os.File{f}, err
	}
	all, err := n.NetworkSockets(ctx, req.ID)
	if err != nil {
		return nil, err
	}
	return []*os.File{all.Stream, all.DNS, all.DNSTCP}, nil
}

// attach keeps a session until its daemon is gone.
func (s *Server) attach(c *net.UnixConn) {
	s.mu.Lock()
	s.sessions[c] = struct{}{}
	s.mu.Unlock()
	_ = c.SetReadDeadline(time.Time{})
	s.requests.Go(func() {
		if send(c, &response{}) == nil {
			var buf [1]byte
			done := make(chan struct{})
			go func() {
				select {
				case <-s.stop:
					_ = c.SetReadDeadline(time.Unix(1, 0))
				case <-done:
				}
			}()
			_, _ = c.Read(buf[:]) // the daemon sends nothing on it
			close(done)
		}
		select {
		case <-s.stop: // Serve closes it when everything has ended
			return
		default:
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sessions, c)
		_ = c.Close()
		s.idle.Reset(orphanTimeout)
	})
}

// orphaned ends a launcher without sessions and sandboxes. Sandboxes without a daemon go on until
// their deadlines.
func (s *Server) orphaned() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sessions) > 0 {
		return // the last session to end sets the timer again
	}
	if s.Engine.Count() > 0 {
		s.idle.Reset(orphanTimeout)
		return
	}
	s.stopOnce.Do(func() { close(s.stop) })
}
