package agents

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// The error classes of this package.
var (
	ErrNotFound = errors.New("no such agent run")
	ErrTooMany  = errors.New("too many agent runs")
	ErrRunning  = errors.New("the agent run is in progress")
	ErrByHand   = errors.New("the agent run was resumed by hand")
	ErrTooLarge = errors.New("the request to the agent process is too large")
	ErrWorker   = errors.New("the agent process ended without a reply")
)

// The files of a run that the daemon reads or writes.
const (
	RecordName = "record.jsonl" // the agent's; locked by the process that works on the run
	StatusName = "status.json"  // an [api.AgentRun] without its state
	CancelName = "cancel"       // asks the worker to end
	CancelKeep = "keep"         // content of CancelName that keeps the sandbox
)

// MaxRequest limits a worker's request, in bytes.
const MaxRequest = 32 << 20

const (
	// maxReply and maxStatus limit a worker's line and its status file, in bytes.
	maxReply  = 1 << 20
	maxStatus = 1 << 20
	// maxEventLine is the longest line of a record that is sent, in bytes: clients limit theirs.
	maxEventLine = 3 << 20
	// lookEvery is the polling interval of event streams.
	lookEvery = 100 * time.Millisecond
	// killAfter limits the time in which a worker whose client is gone may undo its work, before it is
	// killed.
	killAfter = 30 * time.Second
	// endAfterKill limits the end of a killed worker.
	endAfterKill = 5 * time.Second
	// removeIn limits a removal by retention, while others wait. A large run gets further with each
	// try.
	removeIn = 10 * time.Minute
)

// Request is a worker's request. Either Start is set, or Run and one of the others.
type Request struct {
	Start  *api.StartAgentRun  `json:"start,omitempty"`
	Run    string              `json:"run,omitempty"` // id of the run
	Resume *api.ResumeAgentRun `json:"resume,omitempty"`
	Remove bool                `json:"remove,omitempty"`
}

// Reply is a worker's line. One of its fields is set.
type Reply struct {
	Run     *api.AgentRun `json:"run,omitempty"`
	Problem *api.Problem  `json:"problem,omitempty"`
}

// Options configure a host. Start and Signal are the broker's, because a confined daemon can
// neither execute nor signal.
type Options struct {
	Dir string // directory of all runs; must exist
	Max int    // maximum number of runs in progress
	Log *slog.Logger
	// Start starts a worker and returns its pid without waiting. The worker has ended when its stdout
	// does.
	Start func(ctx context.Context, stdin, stdout *os.File) (pid int, err error)
	// Signal terminates or kills a worker. It may fail for a worker that has ended.
	Signal func(ctx context.Context, pid int, kill bool) error
}

// MaxRemovals limits the removals in progress; more wait. Each is a worker beyond Options.Max.
const MaxRemovals = 4

// Host starts and watches runs. Its methods may be called concurrently.
type Host struct {
	opts         Options
	removing     chan struct{} // semaphore of removals
	endAfterKill time.Duration
	removeIn     time.Duration

	// The fields of Retain, which must not be called concurrently.
	sizes map[string]idleRun   // as last measured
	kept  map[string]time.Time // time of the last failed removal
	// denied holds the runs that the daemon has no permission to read, each of which is logged once.
	denied map[string]bool

	mu        sync.Mutex
	going     map[string]bool // runs in progress at the last look; nil before the first look, which includes runs of earlier daemons
	beginning int             // number of runs whose worker has not replied
	resuming  map[string]bool // those of them that are resumed, by id
	workers   map[*worker]struct{}
	closed    bool
	done      sync.WaitGroup // goroutines that start workers or wait for them
}

// worker is a started worker.
type worker struct {
	pid     int
	replied chan Reply    // receives its line
	ended   chan struct{} // closed when it has ended
}

// New returns a host. It does not touch the directory.
func New(opts Options) *Host {
	return &Host{
		opts: opts, removing: make(chan struct{}, MaxRemovals), endAfterKill: endAfterKill, removeIn: removeIn,
		resuming: map[string]bool{}, workers: map[*worker]struct{}{}, kept: map[string]time.Time{},
	}
}

// Start begins a run. It returns when the run has its sandbox; from then on the run outlives the
// request.
func (h *Host) Start(ctx context.Context, req api.StartAgentRun) (*api.AgentRun, error) {
	return h.begin(ctx, Request{Start: &req})
}

// Resume continues an idle run.
func (h *Host) Resume(ctx context.Context, id string, req api.ResumeAgentRun) (*api.AgentRun, error) {
	return h.begin(ctx, Request{Run: id, Resume: &req})
}

// refresh updates the runs in progress. A run that cannot be examined counts as running, and
// unknown is the reason. The caller holds the lock.
func (h *Host) refresh() (unknown, err error) {
	if h.going == nil {
		entries, err := os.ReadDir(h.opts.Dir)
		if err != nil {
			return nil, fmt.Errorf("list the agent runs: %w", err)
		}
		h.going = make(map[string]bool, len(entries))
		for _, e := range entries {
			if IsID(e.Name()) {
				h.going[e.Name()] = true
			}
		}
	}
	maps.DeleteFunc(h.going, func(id string, _ bool) bool {
		on, err := h.hosted(id)
		unknown = cmp.Or(unknown, err)
		return err == nil && !on
	})
	return unknown, nil
}

// reserve counts a run that begins, or resumes if id is given, against the limit. Runs of earlier
// daemons count too.
func (h *Host) reserve(id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return context.Canceled
	}
	if id != "" {
		// A second resume would fail, but only after it has removed the cancel file meant for the first.
		run, err := h.Get(id)
		if err != nil {
			return err
		}
		if h.resuming[id] || run.State == api.AgentRunning {
			return fmt.Errorf("resume %s: %w", id, ErrRunning)
		}
	}
	unknown, err := h.refresh()
	if err != nil {
		return err
	}
	if len(h.going)+h.beginning >= h.opts.Max {
		if unknown != nil {
			return fmt.Errorf("count the agent runs in progress: %w", unknown)
		}
		return fmt.Errorf("%w: this daemon hosts at most %d at a time", ErrTooMany, h.opts.Max)
	}
	h.beginning++
	if id != "" {
		h.resuming[id] = true
	}
	return nil
}

// hosted reports whether a worker, of this daemon or an earlier one, works on a run. With an error
// that is unknown.
func (h *Host) hosted(id string) (bool, error) {
	on, err := h.locked(id, RecordName)
	if on {
		on, err = h.locked(id, ".") // held by a worker, see [Hold], but not by a manual resume
	}
	if err != nil && !isTransient(err) {
		return false, nil // gone, or no run any more; the broker limits the number of workers too
	}
	if err != nil {
		return false, fmt.Errorf("examine the agent run %s: %w", id, err)
	}
	return on, nil
}

// isTransient reports whether an error is the system's, and says nothing about a run.
func isTransient(err error) bool {
	errno, ok := errors.AsType[unix.Errno](err)
	return ok && slices.Contains([]unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOLCK, unix.EINTR, unix.EIO}, errno)
}

// begin has a worker begin or resume a run.
func (h *Host) begin(ctx context.Context, req Request) (_ *api.AgentRun, err error) {
	if err := h.reserve(req.Run); err != nil {
		return nil, err
	}
	id := ""
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.beginning--
		delete(h.resuming, req.Run)
		if id != "" {
			h.going[id] = true
		}
	}()
	if id, err = h.runWorker(ctx, req); err != nil {
		return nil, err
	}
	run, err := h.Get(id)
	if err != nil && isTransient(err) { // the run has begun, and the client must learn its id
		return &api.AgentRun{ID: id, Dir: filepath.Join(h.opts.Dir, id), State: api.AgentRunning, Error: err.Error()}, nil
	}
	return run, err
}

// runWorker starts a worker and waits for its line, which has the id of the run.
func (h *Host) runWorker(ctx context.Context, req Request) (id string, err error) {
	w, err := h.start(ctx, req)
	if err != nil {
		return "", fmt.Errorf("start the agent: %w", err)
	}
	select {
	case reply := <-w.replied:
		switch {
		case reply.Problem != nil:
			return "", reply.Problem
		case reply.Run != nil && IsID(reply.Run.ID):
			return reply.Run.ID, nil
		}
		return "", ErrWorker
	case <-ctx.Done():
		// No client would learn of the run. The worker undoes its work.
		h.endWorker(context.WithoutCancel(ctx), w)
		return "", context.Cause(ctx)
	}
}

// endWorker terminates a worker, and kills it if it does not end.
func (h *Host) endWorker(ctx context.Context, w *worker) {
	if h.signalAndWait(ctx, w, false, killAfter) || h.signalAndWait(ctx, w, true, h.endAfterKill) {
		return
	}
	h.warn("an agent run does not end", context.DeadlineExceeded)
}

// signalAndWait terminates or kills a worker, and reports whether it has ended in time.
func (h *Host) signalAndWait(ctx context.Context, w *worker, kill bool, in time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, in)
	defer cancel()
	err := h.opts.Signal(ctx, w.pid, kill)
	select {
	case <-w.ended: // perhaps the reason why it could not be signalled
		return true
	case <-ctx.Done():
		if err != nil {
			h.warn("signal an agent run", err)
		}
		return false
	}
}

func (h *Host) warn(what string, err error) {
	if h.opts.Log != nil {
		h.opts.Log.Warn(what, "error", err)
	}
}

// start starts a worker and writes its request.
func (h *Host) start(ctx context.Context, req Request) (_ *worker, err error) {
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false) // escaping would make it up to six times as long
	if err := enc.Encode(req); err != nil {
		return nil, err
	}
	if body.Len() > MaxRequest {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, body.Len(), MaxRequest)
	}
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, context.Canceled
	}
	h.done.Add(1)
	h.mu.Unlock()
	defer h.done.Done()
	stdin, request, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	line, stdout, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, stdin.Close(), request.Close())
	}
	w := &worker{replied: make(chan Reply, 1), ended: make(chan struct{})}
	w.pid, err = h.opts.Start(ctx, stdin, stdout)
	err = errors.Join(err, stdin.Close(), stdout.Close()) // the worker has its own copies
	if err != nil {
		// A worker that was started nevertheless gets no request, and ends.
		return nil, errors.Join(err, request.Close(), line.Close())
	}
	h.mu.Lock()
	h.workers[w] = struct{}{}
	closed := h.closed
	h.mu.Unlock()
	h.done.Go(func() {
		_, _ = request.Write(body.Bytes()) // a worker that does not read does not reply
		_ = request.Close()
	})
	h.done.Go(func() { h.follow(w, line) })
	if closed {
		_ = h.opts.Signal(ctx, w.pid, false) // Close kills it if necessary
	}
	return w, nil
}

// follow reads a worker's line and waits for its end.
func (h *Host) follow(w *worker, stdout *os.File) {
	defer close(w.ended)
	defer stdout.Close()
	line, err := bufio.NewReader(io.LimitReader(stdout, maxReply)).ReadBytes('\n')
	var reply Reply
	if err == nil {
		err = json.Unmarshal(line, &reply)
	}
	if err != nil {
		reply = Reply{}
	}
	w.replied <- reply
	_, _ = io.Copy(io.Discard, stdout) // only the end of file follows
	h.mu.Lock()
	delete(h.workers, w)
	h.mu.Unlock()
}

// names matches the ids of runs that the agent makes. Any other text must not be used as a path.
var names = regexp.MustCompile(`^[0-9]{8}_[0-9]{6}(_[0-9]{1,5})?$`)

// IsID reports whether text can be the id of a run.
func IsID(id string) bool { return names.MatchString(id) }

// Get returns the state of a run.
func (h *Host) Get(id string) (*api.AgentRun, error) {
	if !IsID(id) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	dir := filepath.Join(h.opts.Dir, id)
	// Look at the lock before the status: a worker releases the lock after it has written its last
	// status.
	working, err := h.locked(id, RecordName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	if err != nil {
		return nil, fmt.Errorf("examine the agent run %s: %w", id, err)
	}
	run, err := h.readStatus(id)
	if err != nil {
		run = &api.AgentRun{Error: err.Error()}
		if errors.Is(err, fs.ErrNotExist) {
			run.Error = "nothing is known of it: it has not begun, or was killed before it had"
		}
	}
	run.ID, run.Dir, run.State = id, dir, api.AgentStopped
	switch {
	case working:
		run.State, run.ExitReason, run.ExitDetail = api.AgentRunning, "", ""
	case run.ExitReason != "":
		run.State = api.AgentEnded
	}
	return run, nil
}

// open opens a file of a run, or "." for its directory. A worker that was taken over by the data it
// reads may have put there a link that leads out, or a FIFO without a writer.
func (h *Host) open(id, name string) (_ *os.File, err error) {
	root, err := os.OpenRoot(h.opts.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	path := filepath.Join(id, name)
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EACCES) && restoreAccess(root, id) {
		f, err = root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() && (name != "." || !info.IsDir()) {
		err = fmt.Errorf("%s is no file", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// restoreAccess gives the owner access to the directory of a run, which a worker may have removed,
// and reports whether that has changed anything.
func restoreAccess(root *os.Root, id string) bool {
	runs, err := root.Open(".")
	if err != nil {
		return false
	}
	defer runs.Close()
	return restoreMode(runs, id)
}

// restoreMode gives the owner access to a directory of ours, and reports whether that has changed
// anything. It must not change the mode without need, because ctime is the time of the last change,
// see [Host.lastChange].
func restoreMode(parent *os.File, name string) bool {
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || int(st.Uid) != os.Geteuid() || st.Mode&0o700 == 0o700 {
		return false
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), st.Mode&0o7777|0o700) == nil // fchmod refuses O_PATH descriptors, and fchmodat2 needs Linux 6.6
}

// Hold locks a run's directory for the calling worker, until the process ends or the result is
// closed. A manual resume holds only the record's lock, so that the daemon neither counts nor ends
// it.
func Hold(dir string) (io.Closer, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the run: %w", err)
	}
	// The lock is shared, because a directory cannot be opened for writing.
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Whence: io.SeekStart}); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the run: %w", err), f.Close())
	}
	return f, nil
}

func (h *Host) readStatus(id string) (*api.AgentRun, error) {
	f, err := h.open(id, StatusName)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxStatus))
	if err != nil {
		return nil, err
	}
	run := new(api.AgentRun)
	if err := json.Unmarshal(data, run); err != nil {
		return nil, fmt.Errorf("%s: %w", StatusName, err)
	}
	return run, nil
}

// locked reports whether a process holds a lock on a file of the run, or on its directory.
func (h *Host) locked(id, name string) (bool, error) {
	f, err := h.open(id, name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return false, fmt.Errorf("query the lock of %s: %w", name, err)
	}
	return lock.Type != unix.F_UNLCK, nil
}

// List returns all runs, oldest first. An unreadable run is listed with the reason.
func (h *Host) List() ([]api.AgentRun, error) {
	runs := []api.AgentRun{}
	entries, err := os.ReadDir(h.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("list the agent runs: %w", err)
	}
	for _, e := range entries {
		run, err := h.Get(e.Name())
		if errors.Is(err, ErrNotFound) || !e.IsDir() {
			continue
		}
		if err != nil && isTransient(err) {
			return nil, err // the run may be in progress or ended
		}
		if err != nil {
			run = &api.AgentRun{ID: e.Name(), Dir: filepath.Join(h.opts.Dir, e.Name()), State: api.AgentStopped, Error: err.Error()}
		}
		runs = append(runs, *run)
	}
	slices.SortFunc(runs, func(a, b api.AgentRun) int {
		return cmp.Or(a.StartedAt.Compare(b.StartedAt), strings.Compare(a.ID, b.ID))
	})
	return runs, nil
}

// Cancel asks a run in progress to end. It does nothing to an idle run, and refuses one that was
// resumed by hand.
func (h *Host) Cancel(id string, req api.CancelAgentRun) (*api.AgentRun, error) {
	run, err := h.Get(id)
	if err != nil || run.State != api.AgentRunning {
		return run, err
	}
	switch on, err := h.hosted(id); {
	case err != nil:
		return nil, err
	case !on:
		if run, err = h.Get(id); err != nil || run.State != api.AgentRunning { // it has ended meanwhile
			return run, err
		}
		return nil, fmt.Errorf("cancel %s: %w", id, ErrByHand)
	}
	how := "delete"
	if req.Keep {
		how = CancelKeep
	}
	if err := h.requestCancel(id, how); err != nil {
		return nil, fmt.Errorf("cancel %s: %w", id, err)
	}
	return run, nil
}

// requestCancel writes the file that asks a worker to end.
func (h *Host) requestCancel(id, how string) (err error) {
	root, err := os.OpenRoot(h.opts.Dir) // see open
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	// Write a temporary file and rename it, so that the worker reads all of it. Its name is unique:
	// several clients may cancel at the same time.
	path := filepath.Join(id, CancelName)
	beside := path + "." + rand.Text()
	f, err := root.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(how)
	if err = errors.Join(err, f.Close()); err == nil {
		err = root.Rename(beside, path)
	}
	if err != nil {
		err = errors.Join(err, root.Remove(beside))
	}
	return err
}

// Remove removes an idle run with its sandboxes and snapshots.
func (h *Host) Remove(ctx context.Context, id string) error {
	run, err := h.Get(id)
	switch {
	case err == nil && run.State == api.AgentRunning:
		return fmt.Errorf("remove %s: %w", id, ErrRunning)
	case errors.Is(err, ErrNotFound):
		return err
	case err != nil: // its record is unreadable, perhaps only now
		if _, ok, nowErr := h.lastWork(id); nowErr != nil || !ok {
			return cmp.Or(nowErr, err)
		}
	}
	return h.remove(ctx, id)
}

// remove removes a run that is known to be idle.
func (h *Host) remove(ctx context.Context, id string) error {
	select {
	case h.removing <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-h.removing }()
	if _, err := h.runWorker(ctx, Request{Run: id, Remove: true}); err != nil {
		return fmt.Errorf("remove the agent run %s: %w", id, err)
	}
	return nil
}

// Events calls on for each line of a run's record, from the given number on. It follows a run in
// progress, and reports the final state last.
func (h *Host) Events(ctx context.Context, id string, from int, on func(api.AgentRunEvent) error) error {
	run, err := h.Get(id)
	if err != nil {
		return err
	}
	f, err := h.open(run.ID, RecordName)
	if err != nil {
		return fmt.Errorf("read the record of %s: %w", id, err)
	}
	defer f.Close()
	t := tail{r: bufio.NewReaderSize(f, 64<<10), n: 1}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		// Get the state before the lines: lines written after that are read by the next round.
		run, err := h.Get(id)
		if err != nil {
			return err
		}
		for {
			e, whole, err := t.next()
			if err != nil {
				return fmt.Errorf("read the record of %s: %w", id, err)
			}
			if !whole {
				break
			}
			if e.N < from {
				continue
			}
			if err := on(e); err != nil {
				return err
			}
		}
		if run.State != api.AgentRunning {
			return on(api.AgentRunEvent{Run: run})
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// tail reads complete lines of a growing file.
type tail struct {
	r    *bufio.Reader
	n    int // number of the next line
	line []byte
	size int64 // length of the line so far, which may exceed the kept part
}

// next returns the next line if it is complete.
func (t *tail) next() (e api.AgentRunEvent, whole bool, err error) {
	for {
		part, err := t.r.ReadSlice('\n')
		t.size += int64(len(part))
		if t.size <= maxEventLine {
			t.line = append(t.line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			return e, false, nil
		case err != nil:
			return e, false, err
		}
		e = api.AgentRunEvent{N: t.n}
		if t.size > maxEventLine {
			e.Omitted = t.size
		} else {
			e.Event = json.RawMessage(bytes.TrimSpace(t.line))
		}
		t.n, t.line, t.size = t.n+1, nil, 0
		return e, true, nil
	}
}

// Close ends the runs as an interrupt does, and waits for them until ctx ends. Then it kills those
// that this host has started. All keep their sandboxes, and can be resumed.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.done.Wait()
	}()
	_, err := h.signalAll(ctx, false)
	left := h.cancelAll(ctx) // for runs of earlier daemons, and for all if the broker is gone
	select {
	case <-ended:
		return left()
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.endAfterKill)
	defer cancel()
	n, killErr := h.signalAll(ctx, true)
	select {
	case <-ended:
		if n == 0 { // they ended at the deadline
			return left()
		}
		return errors.Join(fmt.Errorf("%d agent runs did not end in time and were killed; they can be resumed", n), left())
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%d agent runs do not end", n), err, killErr, left())
	}
}

// cancelAll asks all runs in progress to end through their cancel files, and waits until ctx ends.
// left reports those that have not ended.
func (h *Host) cancelAll(ctx context.Context) (left func() error) {
	h.mu.Lock()
	_, err := h.refresh() // runs of unknown state are waited for too
	ids := slices.Collect(maps.Keys(h.going))
	h.mu.Unlock()
	if err != nil {
		return func() error { return err }
	}
	for _, id := range ids {
		_, cancelErr := h.Cancel(id, api.CancelAgentRun{Keep: true})
		err = errors.Join(err, cancelErr)
	}
	ended := func(id string) bool {
		on, err := h.hosted(id)
		return err == nil && !on
	}
	left = func() error {
		if ids = slices.DeleteFunc(ids, ended); len(ids) > 0 {
			return errors.Join(fmt.Errorf("%d agent runs go on without a daemon", len(ids)), err)
		}
		return nil
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for left() != nil {
		select {
		case <-ctx.Done():
			return left
		case <-tick.C:
		}
	}
	return left
}

// signalAll terminates or kills all workers, and returns their number.
func (h *Host) signalAll(ctx context.Context, kill bool) (n int, err error) {
	h.mu.Lock()
	all := slices.Collect(maps.Keys(h.workers))
	h.mu.Unlock()
	for _, w := range all {
		err = errors.Join(err, h.opts.Signal(ctx, w.pid, kill))
	}
	return len(all), err
}
