package mcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// deleteTimeout limits the deletion of each sandbox at the end of a session.
const deleteTimeout = 30 * time.Second

// Labels of what tools have made. A tool uses only snapshots with [Server.mark]: the others are the
// user's own, or have what other flags gave to their sandboxes, such as variables.
const (
	labelKey     = "sandboxd.mcp"
	labelSession = "session"
	labelFork    = "fork" // a snapshot during a fork, which no tool names
)

// session holds the sandboxes of one client, which end with it.
type session struct {
	s      *Server
	ctx    context.Context //nolint:containedctx // ends with the session, which outlives its calls
	cancel context.CancelFunc
	calls  chan struct{} // one element for each call in progress

	making turn // held while the default sandbox is made

	mu      sync.Mutex
	boxes   map[string]*box // by id
	pending int             // boxes that are being made
	main    *box            // the default sandbox; nil before its first use
	ended   bool
}

// box is a sandbox of a session.
type box struct {
	id, name string
	cwd      string
	request  api.CreateSandbox // as it was made, for forks
	tie      io.Closer
	created  time.Time

	making   turn                  // held while a context is made
	mu       sync.Mutex            // guards contexts
	contexts map[contextKey]string // ids
}

// turn is a semaphore of one, whose waiters honour their context.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t turn) release() { <-t }

func newSession(s *Server) *session {
	se := &session{s: s, calls: make(chan struct{}, maxCalls), making: newTurn(), boxes: make(map[string]*box)}
	se.ctx, se.cancel = context.WithCancel(s.ctx)
	return se
}

// end deletes the session's sandboxes.
func (se *session) end() {
	se.cancel()
	se.mu.Lock()
	se.ended = true
	boxes := slices.Collect(maps.Values(se.boxes))
	clear(se.boxes)
	se.main = nil
	se.mu.Unlock()
	var deleting sync.WaitGroup
	for _, b := range boxes {
		deleting.Go(func() {
			if err := se.s.remove(se.ctx, b); err != nil {
				se.s.log.Warn("a sandbox was left behind", "sandbox", b.id, "error", err)
			}
		})
	}
	deleting.Wait()
}

// remove deletes a sandbox, which may be gone, even if ctx has ended. The tie is closed afterwards:
// then the daemon deletes the sandbox if this request does not reach it.
func (s *Server) remove(ctx context.Context, b *box) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
	defer cancel()
	s.door.forget(b.id)
	err := s.api.DeleteSandbox(ctx, b.id)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		err = nil
	}
	return errors.Join(err, b.tie.Close())
}

// create makes a sandbox of the session. Its image is pulled if it is not here.
func (se *session) create(ctx context.Context, c *call, req api.CreateSandbox) (*box, error) {
	se.mu.Lock()
	if n := len(se.boxes) + se.pending; n >= maxSandboxes {
		se.mu.Unlock()
		return nil, fmt.Errorf("the session has %d sandboxes, and %d at most; sandbox_kill removes one", n, maxSandboxes)
	}
	se.pending++
	se.mu.Unlock()
	defer func() {
		se.mu.Lock()
		se.pending--
		se.mu.Unlock()
	}()
	asked := req
	req.Labels = maps.Clone(req.Labels)
	if req.Labels == nil {
		req.Labels = make(map[string]string)
	}
	req.Labels[labelKey] = labelSession
	// The session's context: the tie outlives the call. A creation takes milliseconds, and after one
	// that was cancelled nothing would know whether there is a sandbox to delete.
	sb, tie, err := se.s.api.CreateTied(se.ctx, req) //nolint:contextcheck // see above
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) && req.Image != "" && req.Image != api.HostImage {
		if _, err := se.s.api.Pull(ctx, api.PullImage{Reference: req.Image}, func(e api.PullEvent) { c.note("pulling " + req.Image) }); err != nil {
			return nil, err
		}
		sb, tie, err = se.s.api.CreateTied(se.ctx, req) //nolint:contextcheck // see above
	}
	if err != nil {
		return nil, err
	}
	b := &box{id: sb.ID, name: sb.Name, cwd: sb.Cwd, request: asked, tie: tie, created: sb.CreatedAt, making: newTurn()}
	se.mu.Lock()
	ended := se.ended
	if !ended {
		se.boxes[b.id] = b
	}
	se.mu.Unlock()
	if ended {
		return nil, errors.Join(errors.New("the session has ended"), se.s.remove(ctx, b))
	}
	return b, nil
}

// defaultName names the session's default sandbox in arguments and resources.
const defaultName = "default"

// sandbox returns the sandbox that an argument names: the default one if it is empty.
func (se *session) sandbox(ctx context.Context, c *call, name string) (*box, error) {
	if name == "" || name == defaultName {
		return se.theDefault(ctx, c)
	}
	if b := se.find(name); b != nil {
		return b, nil
	}
	return nil, noSandbox(name)
}

func noSandbox(name string) error {
	return fmt.Errorf("there is no sandbox %q in this session; sandbox_list shows those that there are", clip(name))
}

func (se *session) find(name string) *box {
	se.mu.Lock()
	defer se.mu.Unlock()
	if b := se.boxes[name]; b != nil {
		return b
	}
	for _, b := range se.boxes {
		if b.name == name {
			return b
		}
	}
	return nil
}

func (se *session) theDefault(ctx context.Context, c *call) (*box, error) {
	if err := se.making.take(ctx); err != nil {
		return nil, err
	}
	defer se.making.release()
	se.mu.Lock()
	b := se.main
	se.mu.Unlock()
	if b != nil {
		return b, nil
	}
	b, err := se.create(ctx, c, se.s.opts.Sandbox)
	if err != nil {
		return nil, fmt.Errorf("make the session's sandbox: %w", err)
	}
	se.mu.Lock()
	se.main = b
	se.mu.Unlock()
	return b, nil
}

// drop forgets a sandbox that is deleted.
func (se *session) drop(b *box) {
	se.mu.Lock()
	defer se.mu.Unlock()
	delete(se.boxes, b.id)
	if se.main == b {
		se.main = nil
	}
}

// list returns the sandboxes of the session, oldest first.
func (se *session) list() []*box {
	se.mu.Lock()
	defer se.mu.Unlock()
	boxes := slices.Collect(maps.Values(se.boxes))
	slices.SortFunc(boxes, func(a, b *box) int {
		if d := a.created.Compare(b.created); d != 0 {
			return d
		}
		return strings.Compare(a.id, b.id)
	})
	return boxes
}

func (se *session) isDefault(b *box) bool {
	se.mu.Lock()
	defer se.mu.Unlock()
	return se.main == b
}

// idleReason begins the reason of a sandbox that was stopped because nothing was asked of it.
const idleReason = "idle for "

// awake calls do, and once more if the sandbox was stopped for being idle, after it was started
// again: people leave a session for lunch. A sandbox that ended for another reason stays ended.
func (se *session) awake(ctx context.Context, b *box, do func() error) (restarted bool, err error) {
	err = do()
	if !errors.Is(err, &api.Problem{Code: api.CodeConflict}) && !errors.Is(err, &api.Problem{Code: api.CodeGone}) {
		return false, err
	}
	sb, gerr := se.s.api.GetSandbox(ctx, b.id)
	if gerr != nil || sb.State != api.StateStopped {
		return false, err
	}
	if !strings.HasPrefix(sb.Reason, idleReason) {
		return false, fmt.Errorf("the sandbox has ended (%s); its files stay for sandbox_snapshot, and sandbox_kill removes it: the next call then makes a new one", sb.Reason)
	}
	if _, serr := se.s.api.StartSandbox(ctx, b.id, api.StartSandbox{}); serr != nil {
		return false, serr
	}
	return true, do()
}

// abs returns the absolute form of a path in the sandbox.
func (b *box) abs(p string) (string, error) {
	switch {
	case p == "":
		return "", errors.New("path is missing")
	case len(p) > maxPath:
		return "", fmt.Errorf("path: longer than %d bytes", maxPath)
	case path.IsAbs(p):
		return path.Clean(p), nil
	}
	return path.Join("/", b.cwd, p), nil
}

const maxPath = 4095 // bytes

// clip shortens an argument for a message.
func clip(s string) string {
	if len(s) > 100 {
		s = s[:100] + "..."
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
