package launcher

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
)

// Client sends requests to a launcher. It implements runtime.Engine; its methods may be called from
// several goroutines.
//
// A launcher that has died is replaced by a new one at the next request. Its sandboxes ended with
// it, but their directories are still to be deleted, and new sandboxes wanted.
type Client struct {
	path string
	opts Options
	lock *os.File // lock of the runtime directory

	ranges  chan struct{} // semaphore of one that serializes the mounts of ranges
	mu      sync.Mutex
	start   chan struct{} // semaphore of one that serializes the starts of a launcher; nil before the first one
	session *net.UnixConn
	ended   bool   // by Shutdown or Close: no launcher is to be started any more
	version string // version of the launcher from Describe; empty for one that this daemon has started
	// launchers counts the launchers that this client has started anew. LastRange is the highest range
	// that it has given to the last one.
	launchers, lastRange int
}

// Client is an engine with every ability.
var (
	_ runtime.Engine          = (*Client)(nil)
	_ runtime.Differ          = (*Client)(nil)
	_ runtime.DescriptorStore = (*Client)(nil)
	_ runtime.Networker       = (*Client)(nil)
	_ runtime.Describer       = (*Client)(nil)
	_ runtime.Shutdowner      = (*Client)(nil)
)

// openSession opens the connection by which the launcher knows that a daemon runs.
func (c *Client) openSession(ctx context.Context) error {
	conn, err := dial(ctx, c.path)
	if err != nil {
		return err
	}
	if _, _, err := exchange(ctx, conn, &request{Op: opSession}); err != nil {
		return errors.Join(err, conn.Close())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session != nil {
		_ = c.session.Close() // of a launcher that has died
	}
	c.session = conn
	return nil
}

// Close ends the session. The launcher and its sandboxes stay.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	var err error
	if c.session != nil {
		err = c.session.Close()
		c.session = nil
	}
	if c.lock != nil {
		err = errors.Join(err, c.lock.Close())
		c.lock = nil
	}
	return err
}

// Died returns when the launcher has ended, or with the context's error. Only one goroutine may
// wait.
func (c *Client) Died(ctx context.Context) error {
	c.mu.Lock()
	conn := c.session
	c.mu.Unlock()
	if conn == nil {
		return net.ErrClosed
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var buf [1]byte
	_, err := conn.Read(buf[:]) // the launcher never sends anything: Read returns when it is gone
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func (c *Client) call(ctx context.Context, req *request, files ...*os.File) (*response, []*os.File, error) {
	conn, err := dial(ctx, c.path)
	if nobodyListens(err) && ctx.Err() == nil {
		conn, err = c.revive(ctx)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, nil, err
		}
		return nil, nil, fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	resp, got, err := exchange(ctx, conn, req, files...)
	_ = conn.Close() // the answer is here
	for range 2 {
		if !errors.Is(err, errUnread) || ctx.Err() != nil {
			break
		}
		if conn, err = c.revive(ctx); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
		}
		resp, got, err = exchange(ctx, conn, req, files...)
		_ = conn.Close() // as above
	}
	return resp, got, c.explain(err)
}

// errUnread is a failure of a request that the launcher did not read before it ended. One that
// is being killed still accepts connections. The kernel resets those with a packet that was not
// read; where the request was read, the other end is closed, without an error.
var errUnread = errors.New("the launcher ended before it read the request")

// unread marks an error of a connection to the launcher.
func unread(err error) error {
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("%w: %w", errUnread, err)
	}
	return err
}

// ask is call for requests whose answer brings no descriptor.
func (c *Client) ask(ctx context.Context, req *request, files ...*os.File) (*response, error) {
	resp, got, err := c.call(ctx, req, files...)
	if len(got) > 0 {
		closeAll(got)
		return nil, fmt.Errorf("launcher %s: %d descriptors that nobody asked for", req.Op, len(got))
	}
	return resp, err
}

// explain adds to a misunderstanding that the launcher has another version, if it has. Both sides
// are strict, so that a restriction which one of them does not know is never left out.
func (c *Client) explain(err error) error {
	c.mu.Lock()
	version := c.version
	c.mu.Unlock()
	if err == nil || version == "" || version == c.opts.Version ||
		!strings.Contains(err.Error(), saysUndecoded) && !strings.Contains(err.Error(), saysUnknown) {
		return err
	}
	return fmt.Errorf("%w: the launcher that runs is of version %s and the daemon of %s: end it, and its sandboxes, with sandboxd shutdown, and start the daemon anew",
		err, version, c.opts.Version)
}

// revive starts a new launcher, unless another request has done so meanwhile, and connects to it.
func (c *Client) revive(ctx context.Context) (*net.UnixConn, error) {
	c.mu.Lock()
	if c.start == nil {
		c.start = make(chan struct{}, 1)
	}
	start := c.start
	c.mu.Unlock()
	// A start may take long on a busy host, and a request waits for that of another no longer than for
	// its own.
	select {
	case start <- struct{}{}:
		defer func() { <-start }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	conn, err := dial(ctx, c.path)
	if !nobodyListens(err) {
		return conn, err
	}
	c.mu.Lock()
	ended := c.ended
	c.mu.Unlock()
	if ended {
		return nil, err
	}
	if err := c.opts.Start(ctx); err != nil {
		return nil, fmt.Errorf("start launcher anew: %w", err)
	}
	c.mu.Lock()
	c.version = ""
	c.launchers++
	c.lastRange = 0
	c.mu.Unlock()
	if err := c.openSession(ctx); err != nil {
		return nil, err
	}
	return dial(ctx, c.path)
}

// exchange sends the request and waits for the answer, until the context ends. An error from the
// launcher comes with its answer, without descriptors.
func exchange(ctx context.Context, conn *net.UnixConn, req *request, files ...*os.File) (*response, []*os.File, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(conn, req, files...); err != nil {
		if ctx.Err() != nil {
			return nil, nil, fmt.Errorf("launcher %s: %w", req.Op, ctx.Err())
		}
		if err = unread(err); errors.Is(err, errUnread) {
			err = fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
		}
		return nil, nil, fmt.Errorf("launcher %s: %w", req.Op, err)
	}
	var resp response
	got, err := receive(conn, &resp)
	if err != nil {
		if ctx.Err() != nil {
			return nil, nil, fmt.Errorf("launcher %s: %w", req.Op, ctx.Err())
		}
		return nil, nil, fmt.Errorf("launcher %s: %w: %w", req.Op, runtime.ErrUnavailable, unread(err))
	}
	if err := resp.Error.toError(); err != nil {
		closeAll(got)
		return &resp, nil, err
	}
	want := len(resp.Started) + max(resp.Sockets, 0)
	if resp.Info != nil {
		want++ // the launcher's own pidfd
	}
	for _, d := range resp.Sets {
		want += max(d.Files, 0)
	}
	if len(got) != want {
		closeAll(got)
		return nil, nil, fmt.Errorf("launcher %s: %d descriptors, not %d", req.Op, len(got), want)
	}
	return &resp, got, nil
}

// Create implements runtime.Engine.
func (c *Client) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return c.run(ctx, opCreate, spec, control)
}

// Start implements runtime.Engine.
func (c *Client) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return c.run(ctx, opStart, spec, control)
}

func (c *Client) run(ctx context.Context, what op, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	filter, err := json.Marshal(spec.Profile.Seccomp)
	if err != nil {
		return nil, fmt.Errorf("launcher %s: encode seccomp filter: %w", what, err)
	}
	rest := *spec
	rest.Profile.Seccomp = nil
	if len(spec.Mounts) > 0 {
		rest.MountIDs = c.opts.mountIDs()
	}
	req := &request{Op: what, Spec: &rest, filter: filter}
	launcher := c.started()
	if spec.Workspace != nil {
		return c.runWorkspace(ctx, req, launcher, control)
	}
	resp, files, err := c.call(ctx, req, control)
	// Another request may take the range that this one has added. There is one more each time around,
	// so that the launcher's number of ranges is the bound.
	pass, opened := []*os.File{control}, 0
	for ctx.Err() == nil && (errors.Is(err, errWantsRange) || errors.Is(err, errWantsMounts) && opened < maxOpened) {
		if errors.Is(err, errWantsRange) {
			if err := c.addRange(ctx, launcher, resp.Range); err != nil {
				return nil, err
			}
		} else {
			mounts, err := c.openMounts(ctx, spec, resp.Range)
			if err != nil {
				return nil, err
			}
			defer closeAll(mounts) // the launcher has copies
			pass = append([]*os.File{control}, mounts...)
			opened++
		}
		launcher = c.started()
		resp, files, err = c.call(ctx, req, pass...)
	}
	return theStarted(req, resp, files, err)
}

// theStarted returns the sandbox in the answer to a creation or a start.
func theStarted(req *request, resp *response, files []*os.File, err error) (*runtime.Started, error) {
	if err != nil {
		return nil, err
	}
	if len(resp.Started) != 1 || len(files) != 1 || resp.Started[0].ID != req.Spec.ID {
		closeAll(files)
		return nil, fmt.Errorf("launcher %s: answer is not about sandbox %s", req.Op, req.Spec.ID)
	}
	return resp.Started[0].started(files[0]), nil
}

// started returns the number of launchers that this client has started anew.
func (c *Client) started() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.launchers
}

// List implements runtime.Engine.
func (c *Client) List(ctx context.Context) ([]*runtime.Started, error) {
	var all []*runtime.Started
	req := &request{Op: opList}
	for {
		resp, files, err := c.call(ctx, req)
		switch {
		case err != nil:
		case len(files) != len(resp.Started):
			closeAll(files)
			err = fmt.Errorf("launcher list: %d descriptors, not %d", len(files), len(resp.Started))
		default:
			for i, s := range resp.Started {
				all = append(all, s.started(files[i]))
				if s.ID <= req.After { // or the loop might not end
					err = errors.New("launcher list: answer is not sorted")
				}
				req.After = s.ID
			}
		}
		if err != nil {
			for _, s := range all {
				_ = s.Pidfd.Close()
			}
			return nil, err
		}
		if !resp.More || len(resp.Started) == 0 {
			return slices.Clip(all), nil
		}
	}
}

// Leftovers implements runtime.Engine.
func (c *Client) Leftovers(ctx context.Context) ([]string, error) {
	resp, err := c.ask(ctx, &request{Op: opLeftovers})
	if err != nil {
		return nil, err
	}
	return resp.IDs, nil
}

// Delete implements runtime.Engine.
func (c *Client) Delete(ctx context.Context, id string) error {
	return c.remove(ctx, &request{Op: opDelete, ID: id})
}

// remove asks for a removal that must happen. A launcher that is being killed still accepts
// connections, and then sends no answer. Asking its successor is harmless; not asking would leave a
// directory without a record until the next start of the daemon.
func (c *Client) remove(ctx context.Context, req *request) error {
	var err error
	for range 3 {
		_, err = c.ask(ctx, req)
		if !errors.Is(err, runtime.ErrUnavailable) || ctx.Err() != nil {
			break
		}
	}
	return err
}

// Kill implements runtime.Engine.
func (c *Client) Kill(ctx context.Context, id string) error {
	_, err := c.ask(ctx, &request{Op: opKill, ID: id})
	return err
}

// Stop implements runtime.Engine.
func (c *Client) Stop(ctx context.Context, id string, ask runtime.Ask) error {
	_, err := c.ask(ctx, &request{Op: opStop, ID: id, Grace: ask.Grace, Signal: ask.Signal, Main: ask.Main})
	if err != nil && ask != (runtime.Ask{Grace: ask.Grace}) && strings.Contains(err.Error(), saysUndecoded) {
		// A launcher of an earlier version asks all processes by the sandbox's own signal.
		_, err = c.ask(ctx, &request{Op: opStop, ID: id, Grace: ask.Grace})
	}
	return err
}

// Pause implements runtime.Engine.
func (c *Client) Pause(ctx context.Context, id string) error {
	_, err := c.ask(ctx, &request{Op: opPause, ID: id})
	return err
}

// Resume implements runtime.Engine.
func (c *Client) Resume(ctx context.Context, id string) error {
	_, err := c.ask(ctx, &request{Op: opResume, ID: id})
	return err
}

// Update implements runtime.Engine.
func (c *Client) Update(ctx context.Context, id string, change *runtime.Change) (api.Enforced, error) {
	resp, err := c.ask(ctx, &request{Op: opUpdate, ID: id, Change: change})
	if err != nil {
		return api.Enforced{}, err
	}
	if resp.Enforced == nil {
		return api.Enforced{}, errors.New("launcher update: empty answer")
	}
	return *resp.Enforced, nil
}

// Stats implements runtime.Engine.
func (c *Client) Stats(ctx context.Context, id string) (api.Stats, error) {
	resp, err := c.ask(ctx, &request{Op: opStats, ID: id})
	if err != nil {
		return api.Stats{}, err
	}
	if resp.Stats == nil {
		return api.Stats{}, errors.New("launcher stats: empty answer")
	}
	return *resp.Stats, nil
}

// OOMKills implements runtime.Engine.
func (c *Client) OOMKills(ctx context.Context, id string) (int, error) {
	resp, err := c.ask(ctx, &request{Op: opOOMKills, ID: id})
	if err != nil {
		return 0, err
	}
	return resp.Count, nil
}

// StoreDescriptors implements [runtime.DescriptorStore].
func (c *Client) StoreDescriptors(ctx context.Context, set runtime.DescriptorSet) error {
	_, err := c.ask(ctx, &request{Op: opDeposit, Set: wireSet{Sandbox: set.Sandbox, Name: set.Name}}, set.Files...)
	return err
}

// StoredDescriptors implements [runtime.DescriptorStore].
func (c *Client) StoredDescriptors(ctx context.Context) ([]runtime.DescriptorSet, error) {
	var all []runtime.DescriptorSet
	req := &request{Op: opWithdraw}
	for {
		resp, files, err := c.call(ctx, req)
		if err == nil {
			for _, d := range resp.Sets {
				n, last := max(d.Files, 0), setKey{req.Set.Sandbox, req.Set.Name}
				all = append(all, runtime.DescriptorSet{Sandbox: d.Sandbox, Name: d.Name, Files: files[:n:n]})
				files = files[n:]
				if (setKey{d.Sandbox, d.Name}).compare(last) <= 0 { // or the loop might not end
					err = errors.New("launcher withdraw: answer is not sorted")
				}
				req.Set = wireSet{Sandbox: d.Sandbox, Name: d.Name}
			}
			closeAll(files) // descriptors that the answer does not name
		}
		if err != nil {
			for _, d := range all {
				closeAll(d.Files)
			}
			return nil, err
		}
		if !resp.More || len(resp.Sets) == 0 {
			return all, nil
		}
	}
}

// DropDescriptors implements [runtime.DescriptorStore].
func (c *Client) DropDescriptors(ctx context.Context, sandbox, name string) error {
	_, err := c.ask(ctx, &request{Op: opDrop, Set: wireSet{Sandbox: sandbox, Name: name}})
	return err
}

// NetworkSockets implements [runtime.Networker].
func (c *Client) NetworkSockets(ctx context.Context, id string) (*runtime.NetworkSockets, error) {
	files, err := c.sockets(ctx, &request{Op: opNetwork, ID: id}, 3)
	if err != nil {
		return nil, err
	}
	return &runtime.NetworkSockets{Stream: files[0], DNS: files[1], DNSTCP: files[2]}, nil
}

// NetworkSocket implements [runtime.Networker].
func (c *Client) NetworkSocket(ctx context.Context, id, network string) (*os.File, error) {
	files, err := c.sockets(ctx, &request{Op: opSocket, ID: id, Socket: network}, 1)
	if err != nil {
		return nil, err
	}
	return files[0], nil
}

func (c *Client) sockets(ctx context.Context, req *request, want int) ([]*os.File, error) {
	resp, files, err := c.call(ctx, req)
	if err == nil && (resp.Sockets != want || len(files) != want) {
		closeAll(files)
		err = fmt.Errorf("launcher %s: %d descriptors, not %d", req.Op, len(files), want)
	}
	return files, err
}

// Describe implements [runtime.Describer].
func (c *Client) Describe(ctx context.Context) (runtime.Description, error) {
	resp, files, err := c.call(ctx, &request{Op: opInfo})
	if err != nil {
		return runtime.Description{}, err
	}
	defer closeAll(files)
	if resp.Info == nil || len(files) != 1 {
		return runtime.Description{}, errors.New("launcher info: answer without info or pidfd")
	}
	c.mu.Lock()
	c.version = resp.Info.Version
	c.mu.Unlock()
	return runtime.Description{PID: runtime.PIDOf(files[0]), Version: resp.Info.Version, Enforced: resp.Info.Enforced}, nil
}

// Apply unpacks blobs whose digests the caller has verified, each in a confined child of the
// launcher, and returns when all layers are complete and synced. An existing layer is left alone,
// with a zero result. On error no new layer is kept. The error comes with results for the layers
// below the failed one, or for all if none failed by itself.
func (c *Client) Apply(ctx context.Context, req layer.ApplyRequest) ([]layer.Result, error) {
	var blobs []*os.File
	for _, l := range req.Layers {
		blobs = append(blobs, l.Blob)
	}
	resp, err := c.ask(ctx, &request{Op: opApply, Apply: &req}, blobs...)
	switch {
	case err != nil && resp == nil:
		return nil, err
	case len(resp.Layers) > len(req.Layers) || err == nil && len(resp.Layers) < len(req.Layers):
		return nil, errors.Join(err, fmt.Errorf("launcher apply: answer about %d layers, not %d", len(resp.Layers), len(req.Layers)))
	}
	return resp.Layers, err
}

// RemoveLayer deletes an unpacked layer. A missing one is no error.
func (c *Client) RemoveLayer(ctx context.Context, chainID string) error {
	return c.remove(ctx, &request{Op: opRemoveLayer, Layer: chainID})
}

// StoreDiff implements [runtime.Differ].
func (c *Client) StoreDiff(ctx context.Context, req runtime.DiffRequest, chainID string) (runtime.DiffResult, bool, error) {
	resp, err := c.ask(ctx, &request{Op: opSnapshot, Snap: &snapshotRequest{Diff: wireDiffRequest(&req), ChainID: chainID}})
	if err != nil {
		return runtime.DiffResult{}, false, err
	}
	if resp.Layer == nil {
		return runtime.DiffResult{}, false, errors.New("launcher snapshot: empty answer")
	}
	return runtime.DiffResult(*resp.Layer), resp.Frozen, nil
}

// WriteDiff implements [runtime.Differ].
func (c *Client) WriteDiff(ctx context.Context, req runtime.DiffRequest, w io.Writer) (runtime.DiffResult, error) {
	hash, ask := sha256.New(), wireDiffRequest(&req)
	result, err := c.diff(ctx, &ask, func(r io.Reader) error {
		_, err := io.Copy(io.MultiWriter(hash, w), r)
		return err
	})
	if err != nil {
		return runtime.DiffResult{}, err
	}
	result.DiffID = "sha256:" + hex.EncodeToString(hash.Sum(nil))
	return result, nil
}

// ListDiff implements [runtime.Differ].
func (c *Client) ListDiff(ctx context.Context, req runtime.DiffRequest, found func(api.Change) error) (runtime.DiffResult, error) {
	ask := wireDiffRequest(&req)
	ask.List = true
	return c.diff(ctx, &ask, func(r io.Reader) error {
		lines := json.NewDecoder(r)
		for {
			var change api.Change
			if err := lines.Decode(&change); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return fmt.Errorf("read changes: %w", err)
			}
			if err := found(change); err != nil {
				return err
			}
		}
	})
}

// diff asks for the changes of a sandbox, see stream.
func (c *Client) diff(ctx context.Context, req *diffRequest, receive func(io.Reader) error) (runtime.DiffResult, error) {
	return c.stream(ctx, &request{Op: opDiff, Diff: req}, receive)
}

// stream sends a request with a pipe and lets receive take what comes from it, which is complete
// only if stream returns no error.
func (c *Client) stream(ctx context.Context, req *request, receive func(io.Reader) error) (runtime.DiffResult, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return runtime.DiffResult{}, fmt.Errorf("launcher %s: %w", req.Op, err)
	}
	received := make(chan error, 1)
	go func() {
		err := receive(r)
		// Close the pipe at once when no more is wanted: the writer then ends with an error.
		received <- errors.Join(err, r.Close())
	}()
	resp, err := c.ask(ctx, req, w)
	_ = w.Close() // the launcher has its own copy
	if err != nil {
		_ = r.SetReadDeadline(time.Unix(1, 0)) // after a cancellation the child may write on for a while
	}
	switch rerr := <-received; {
	case err == nil && rerr != nil:
		return runtime.DiffResult{}, rerr
	case err != nil && rerr != nil && !errors.Is(rerr, os.ErrDeadlineExceeded) && !errors.Is(rerr, io.ErrUnexpectedEOF):
		return runtime.DiffResult{}, rerr // the launcher's error is about a broken pipe
	case err != nil:
		return runtime.DiffResult{}, err
	case resp.Layer == nil:
		return runtime.DiffResult{}, fmt.Errorf("launcher %s: empty answer", req.Op)
	}
	return runtime.DiffResult(*resp.Layer), nil
}

// Shutdown ends the launcher and every sandbox with it, and returns when it is gone.
func (c *Client) Shutdown(ctx context.Context) error {
	// A launcher that has died is started once more: it removes the cgroups that sandboxes of the dead
	// one left.
	if _, err := c.ask(ctx, &request{Op: opShutdown}); err != nil {
		return err
	}
	if err := c.Died(ctx); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("launcher shutdown: %w", err)
	}
	if err := os.Remove(c.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(fmt.Errorf("launcher shutdown: %w", err), c.Close())
	}
	return c.Close()
}
