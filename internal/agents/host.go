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

// The classes of errors of this package.
var (
	ErrNotFound = errors.New("no such agent run")
	ErrTooMany  = errors.New("too many agent runs")
	ErrRunning  = errors.New("the agent run goes on")
	ErrByHand   = errors.New("a process that is not the daemon's works on the agent run")
	ErrTooLarge = errors.New("too much to be told to the agent's process")
	ErrWorker   = errors.New("the agent's process has ended without an answer")
)

// The files of a run, beside what the agent itself writes.
const (
	RecordName = "record.jsonl" // the agent's; locked by who works on the run
	StatusName = "status.json"  // an [api.AgentRun], but for its state
	CancelName = "cancel"       // there: the worker shall end
	CancelKeep = "keep"         // its content, when the sandbox shall stay
)

// MaxRequest bounds what a worker is given to do, in bytes.
const MaxRequest = 32 << 20

const (
	// maxReply bounds a worker's line, and maxStatus what it says of a run.
	maxReply  = 1 << 20
	maxStatus = 1 << 20
	// maxEventLine is the longest line of a record that is sent: clients bound theirs.
	maxEventLine = 3 << 20
	// lookEvery is how often a stream looks for more.
	lookEvery = 100 * time.Millisecond
	// killAfter is how long a worker whose client is gone may take to undo what it began.
	killAfter = 30 * time.Second
	// endAfterKill is how long one may take to end that was killed.
	endAfterKill = 5 * time.Second
	// removeIn is how long a removal may take that nobody has asked for and others wait behind. One that has much to remove gets further at each try.
	removeIn = 10 * time.Minute
)

// Request is what a worker is given on its stdin. Start, or Run and one of the others, are set.
type Request struct {
	Start  *api.StartAgentRun  `json:"start,omitempty"`
	Run    string              `json:"run,omitempty"` // its id
	Resume *api.ResumeAgentRun `json:"resume,omitempty"`
	Remove bool                `json:"remove,omitempty"`
}

// Reply is a worker's one line. One of the two is set.
type Reply struct {
	Run     *api.AgentRun `json:"run,omitempty"`
	Problem *api.Problem  `json:"problem,omitempty"`
}

// Options are what a host is made of. The daemon can neither execute nor signal anything once it has confined itself: somebody else
// does it for the host.
type Options struct {
	Dir string // where the runs are; it is there
	Max int    // runs at a time
	Log *slog.Logger
	// Start starts a worker and returns its pid at once. Its end is the end of what it writes.
	Start func(ctx context.Context, stdin, stdout *os.File) (pid int, err error)
	// Signal has a worker end, or be killed. For one that has ended it may be an error.
	Signal func(ctx context.Context, pid int, kill bool) error
}

// MaxRemovals is how many runs a host has removed at once; others wait. Each is a worker beside those that [Options] allow.
const MaxRemovals = 4

// Host starts and watches runs. Its methods may be called by several goroutines.
type Host struct {
	opts         Options
	removing     chan struct{} // a place for each that is being removed
	endAfterKill time.Duration
	removeIn     time.Duration

	// Of Retain, which is called by one at a time.
	sizes map[string]idleRun   // as they were at the last look
	kept  map[string]time.Time // when those were tried that could not be removed
	// denied are those that the daemon may not look at, which has been said.
	denied map[string]bool

	mu        sync.Mutex
	going     map[string]bool // runs that went on at the last look; nil: nobody has looked for those of a daemon before
	beginning int             // runs whose worker has not answered
	resuming  map[string]bool // which of them have a name already
	workers   map[*worker]struct{}
	closed    bool
	done      sync.WaitGroup // what starts workers, and the goroutines that wait for them
}

// worker is one that was started.
type worker struct {
	pid     int
	replied chan Reply    // takes its line
	ended   chan struct{} // closed at its end
}

// New makes a host. It touches nothing.
func New(opts Options) *Host {
	return &Host{
		opts: opts, removing: make(chan struct{}, MaxRemovals), endAfterKill: endAfterKill, removeIn: removeIn,
		resuming: map[string]bool{}, workers: map[*worker]struct{}{}, kept: map[string]time.Time{},
	}
}

// Start begins a run. It returns when the run has its sandbox; from then on the run outlives whoever asked for it.
func (h *Host) Start(ctx context.Context, req api.StartAgentRun) (*api.AgentRun, error) {
	return h.begin(ctx, Request{Start: &req})
}

// Resume goes on with a run that nobody works on.
func (h *Host) Resume(ctx context.Context, id string, req api.ResumeAgentRun) (*api.AgentRun, error) {
	return h.begin(ctx, Request{Run: id, Resume: &req})
}

// look finds out which runs go on. One of which that cannot be told is among them, and unknown says why. The caller holds the lock.
func (h *Host) look() (unknown, err error) {
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
		on, err := h.goesOn(id)
		unknown = cmp.Or(unknown, err)
		return err == nil && !on
	})
	return unknown, nil
}

// reserve counts a run that is about to begin, or the one of that name to go on. Those of a daemon before this one count too.
func (h *Host) reserve(id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return context.Canceled
	}
	if id != "" {
		// Two at once would not both go on, but the second takes away what the first was told to heed: that it is cancelled.
		run, err := h.Get(id)
		if err != nil {
			return err
		}
		if h.resuming[id] || run.State == api.AgentRunning {
			return fmt.Errorf("resume %s: %w", id, ErrRunning)
		}
	}
	unknown, err := h.look()
	if err != nil {
		return err
	}
	if len(h.going)+h.beginning >= h.opts.Max {
		if unknown != nil {
			return fmt.Errorf("find out how many agent runs go on: %w", unknown)
		}
		return fmt.Errorf("%w: %d at a time are the most this daemon hosts", ErrTooMany, h.opts.Max)
	}
	h.beginning++
	if id != "" {
		h.resuming[id] = true
	}
	return nil
}

// goesOn reports whether a worker works on a run, of this daemon or of one before it. After an error that is not known.
func (h *Host) goesOn(id string) (bool, error) {
	on, err := h.locked(id, RecordName)
	if on {
		on, err = h.locked(id, ".") // by a worker, see [Hold], and not by somebody who has resumed it by hand
	}
	if err != nil && !passing(err) {
		return false, nil // it is gone, or no run any more; how many workers there may be somebody else bounds too
	}
	if err != nil {
		return false, fmt.Errorf("look at the agent run %s: %w", id, err)
	}
	return on, nil
}

// passing reports whether an error says nothing of a run, but that it cannot be looked at now.
func passing(err error) bool {
	errno, ok := errors.AsType[unix.Errno](err)
	return ok && slices.Contains([]unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOLCK, unix.EINTR, unix.EIO}, errno)
}

// begin has a worker begin with a run.
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
	if id, err = h.work(ctx, req); err != nil {
		return nil, err
	}
	run, err := h.Get(id)
	if err != nil && passing(err) { // it has begun all the same, and who asked for it must know it
		return &api.AgentRun{ID: id, Dir: filepath.Join(h.opts.Dir, id), State: api.AgentRunning, Error: err.Error()}, nil
	}
	return run, err
}

// work starts a worker and waits for its line, which has the id of the run.
func (h *Host) work(ctx context.Context, req Request) (id string, err error) {
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
		// Nobody would know of the run. The worker undoes what it has begun.
		h.end(context.WithoutCancel(ctx), w)
		return "", context.Cause(ctx)
	}
}

// end has a worker end, or else killed.
func (h *Host) end(ctx context.Context, w *worker) {
	if h.ends(ctx, w, false, killAfter) || h.ends(ctx, w, true, h.endAfterKill) {
		return
	}
	h.warn("an agent run does not end", context.DeadlineExceeded)
}

// ends has a worker end, or be killed, and reports whether that comes true in time.
func (h *Host) ends(ctx context.Context, w *worker, kill bool, in time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, in)
	defer cancel()
	err := h.opts.Signal(ctx, w.pid, kill)
	select {
	case <-w.ended: // which may be why it could not be signalled
		return true
	case <-ctx.Done():
		if err != nil {
			h.warn("an agent run could not be told to end", err)
		}
		return false
	}
}

func (h *Host) warn(what string, err error) {
	if h.opts.Log != nil {
		h.opts.Log.Warn(what, "error", err)
	}
}

// start has a worker started and gives it the request.
func (h *Host) start(ctx context.Context, req Request) (_ *worker, err error) {
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false) // it would be up to six times as long
	if err := enc.Encode(req); err != nil {
		return nil, err
	}
	if body.Len() > MaxRequest {
		return nil, fmt.Errorf("%w: %d bytes, and %d are the most", ErrTooLarge, body.Len(), MaxRequest)
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
	err = errors.Join(err, stdin.Close(), stdout.Close()) // the worker has its own
	if err != nil {
		// If it has been started after all, it is asked for nothing, and ends.
		return nil, errors.Join(err, request.Close(), line.Close())
	}
	h.mu.Lock()
	h.workers[w] = struct{}{}
	closed := h.closed
	h.mu.Unlock()
	h.done.Go(func() {
		_, _ = request.Write(body.Bytes()) // who does not read it does not answer
		_ = request.Close()
	})
	h.done.Go(func() { h.attend(w, line) })
	if closed {
		_ = h.opts.Signal(ctx, w.pid, false) // Close kills it if it must
	}
	return w, nil
}

// attend reads a worker's line and waits for its end.
func (h *Host) attend(w *worker, stdout *os.File) {
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
	_, _ = io.Copy(io.Discard, stdout) // there is nothing more but its end
	h.mu.Lock()
	delete(h.workers, w)
	h.mu.Unlock()
}

// names of runs, as the agent makes them: nothing else is a path below the directory.
var names = regexp.MustCompile(`^[0-9]{8}_[0-9]{6}(_[0-9]{1,5})?$`)

// IsID reports whether a run can be called so.
func IsID(id string) bool { return names.MatchString(id) }

// Get is what is known of a run.
func (h *Host) Get(id string) (*api.AgentRun, error) {
	if !IsID(id) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	dir := filepath.Join(h.opts.Dir, id)
	// The lock first: who writes the last status lets go of it afterwards.
	working, err := h.locked(id, RecordName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	if err != nil {
		return nil, fmt.Errorf("look at the agent run %s: %w", id, err)
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

// open opens a file of a run, or "." for its directory. A worker may have been taken over by what it reads, and may have made a link of
// it that leads out, or a FIFO that nobody writes to.
func (h *Host) open(id, name string) (_ *os.File, err error) {
	root, err := os.OpenRoot(h.opts.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	path := filepath.Join(id, name)
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EACCES) && givenBack(root, id) {
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

// givenBack opens the directory of a run to its owner, to whom its worker may have closed it, and reports whether that has changed anything.
func givenBack(root *os.Root, id string) bool {
	runs, err := root.Open(".")
	if err != nil {
		return false
	}
	defer runs.Close()
	return giveBack(runs, id)
}

// giveBack opens a directory that is ours to us, and reports whether that has changed anything: its ctime says when it was last
// changed, see [Host.lastChange].
func giveBack(parent *os.File, name string) bool {
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || int(st.Uid) != os.Geteuid() || st.Mode&0o700 == 0o700 {
		return false
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), st.Mode&0o7777|0o700) == nil // fchmod wants one that was opened, and fchmodat2 Linux 6.6
}

// Hold marks a run as one that a worker works on, in its process, until that ends or what it gives is closed: a lock on the run's
// directory. Who resumes a run by hand has the record's lock only, and is not the daemon's to count or to end.
func Hold(dir string) (io.Closer, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("hold the run: %w", err)
	}
	// A shared one: the directory cannot be opened for writing.
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Whence: io.SeekStart}); err != nil {
		return nil, errors.Join(fmt.Errorf("hold the run: %w", err), f.Close())
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

// locked reports whether a process has a lock on a file of the run, or on its directory.
func (h *Host) locked(id, name string) (bool, error) {
	f, err := h.open(id, name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return false, fmt.Errorf("ask for the lock of %s: %w", name, err)
	}
	return lock.Type != unix.F_UNLCK, nil
}

// List is all runs, oldest first. One that cannot be read, now or later, is in the list with the reason.
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
		if err != nil && passing(err) {
			return nil, err // it may go on, or have ended
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

// Cancel asks a run to end. One that nobody works on is left as it is; who works on one by hand is not asked.
func (h *Host) Cancel(id string, req api.CancelAgentRun) (*api.AgentRun, error) {
	run, err := h.Get(id)
	if err != nil || run.State != api.AgentRunning {
		return run, err
	}
	switch on, err := h.goesOn(id); {
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
	if err := h.ask(id, how); err != nil {
		return nil, fmt.Errorf("cancel %s: %w", id, err)
	}
	return run, nil
}

// ask makes the file that tells a worker to end.
func (h *Host) ask(id, how string) (err error) {
	root, err := os.OpenRoot(h.opts.Dir) // see open
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	// Beside it and then renamed: the worker finds it whole. With a name of its own: others may ask at the same time.
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

// Remove removes a run that nobody works on, with all that is left of it.
func (h *Host) Remove(ctx context.Context, id string) error {
	run, err := h.Get(id)
	switch {
	case err == nil && run.State == api.AgentRunning:
		return fmt.Errorf("remove %s: %w", id, ErrRunning)
	case errors.Is(err, ErrNotFound):
		return err
	case err != nil: // nobody can read its record, or not now
		if _, ok, nowErr := h.lastWork(id); nowErr != nil || !ok {
			return cmp.Or(nowErr, err)
		}
	}
	return h.remove(ctx, id)
}

// remove has a run removed, of which it is known that nobody works on it.
func (h *Host) remove(ctx context.Context, id string) error {
	select {
	case h.removing <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-h.removing }()
	if _, err := h.work(ctx, Request{Run: id, Remove: true}); err != nil {
		return fmt.Errorf("remove the agent run %s: %w", id, err)
	}
	return nil
}

// Events calls on for each line of a run's record from the number on, waits for more while somebody works on the run, and last says how it
// stands.
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
		// The state before the lines: what is written after it was asked for is read by the next look.
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

// tail reads the whole lines of a file that grows.
type tail struct {
	r    *bufio.Reader
	n    int // number of the line that is next
	line []byte
	size int64 // of the line so far, which may be more than is kept
}

// next is the next line, if it is all there.
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

// Close ends the runs, as an interrupt does, and waits for them until ctx ends; then those that this host has started are killed. Each
// leaves its sandbox, and can be resumed.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.done.Wait()
	}()
	_, err := h.signal(ctx, false)
	left := h.tell(ctx) // those whose processes nobody here can signal: of a daemon before this one, or because the runner is gone
	select {
	case <-ended:
		return left()
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.endAfterKill)
	defer cancel()
	n, killErr := h.signal(ctx, true)
	select {
	case <-ended:
		if n == 0 { // they have ended just when the time was over
			return left()
		}
		return errors.Join(fmt.Errorf("%d agent runs did not end in time and were killed; they can be resumed", n), left())
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%d agent runs do not end", n), err, killErr, left())
	}
}

// tell has all runs that have begun end by the file that their workers look for, and waits for them until ctx ends. Left says which do not.
func (h *Host) tell(ctx context.Context) (left func() error) {
	h.mu.Lock()
	_, err := h.look() // of those of which it cannot be told it is waited for
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
		on, err := h.goesOn(id)
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

// signal has all workers end, or be killed, and says how many there are.
func (h *Host) signal(ctx context.Context, kill bool) (n int, err error) {
	h.mu.Lock()
	all := slices.Collect(maps.Keys(h.workers))
	h.mu.Unlock()
	for _, w := range all {
		err = errors.Join(err, h.opts.Signal(ctx, w.pid, kill))
	}
	return len(all), err
}
