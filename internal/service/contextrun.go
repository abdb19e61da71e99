package service

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/interpreter"
	"github.com/sandboxd/sandboxd/interpreter/resident"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxSaid bounds the last words of an interpreter in an error, in bytes.
const maxSaid = 2048

// maxResults bounds the bytes of the results of a buffered answer.
const maxResults = 32 << 20

// resultsQuota bounds the bytes of results that the daemon holds, as the kernels send them: while a
// message comes in pieces, and until its client has it. Decoding and encoding take up to five times
// that.
func resultsQuota() *share.Quota {
	return &share.Quota{What: "bytes of results", Sandbox: 32 << 20, Tenant: 64 << 20, All: 128 << 20}
}

// A resultHold is the part of the quota of results that a run has taken. A run never waits for its
// part: others may hold theirs for as long as their clients do not read.
type resultHold struct {
	quota   *share.Quota
	of      share.Owner
	message int  // bytes of the message that is read or sent
	kept    int  // bytes of results for an answer that has not left
	refused bool // a part of that message, or all of it, is dropped
}

// take takes memory for a piece of a message. If there is none, the pieces before it are dropped.
func (h *resultHold) take(n int) bool {
	if h.quota.Take(h.of, n) != nil {
		h.refuse()
		return false
	}
	h.message += n
	return true
}

// keep makes the message, of n bytes when it is decoded, one that stays for the answer.
func (h *resultHold) keep(n int) bool {
	if more := n - h.message; more > 0 && !h.take(more) {
		return false
	}
	h.kept += h.message
	h.message = 0
	return true
}

// refuse gives back the memory of a message of which the client gets a part at most.
func (h *resultHold) refuse() {
	h.next()
	h.refused = true
}

// next gives back the memory of a message that has been sent.
func (h *resultHold) next() {
	h.quota.Give(h.of, h.message)
	h.message, h.refused = 0, false
}

// free gives back all.
func (h *resultHold) free() {
	h.next()
	h.quota.Give(h.of, h.kept)
	h.kept = 0
}

// Names of failures of a context itself.
const (
	contextDied      = "ContextDied"      // the process ended by itself
	contextRestarted = "ContextRestarted" // the daemon has killed the process, and started another
)

var (
	errDied = errors.New("the process of the context has ended")
	errEmit = errors.New("the client takes no more")
)

// frameUse is the use of a frame, by which its read is paced.
type frameUse int

const (
	frameDropped frameUse = iota // its client gets nothing of it, or a text in its place
	framePiece                   // part of a message that follows
	frameSent                    // its client has it
	frameLast                    // the last that is read
)

// A kernelPace slows the reader of a kernel that floods with frames which reach no client: results
// without memory, more than a buffered answer takes, output of a run whose client has left. A
// client paces the other frames by reading them. The zero value is ready.
type kernelPace struct {
	pace host.Pace

	reads int // to be charged
	work  int // bytes of dropped messages that were not charged as reads yet

	// Of the message that comes in pieces: charged once it is dropped.
	heldReads, heldWork int

	partial int // reads in a row without a whole frame

	// Since the last read:
	dropped, sent, pieces bool
}

const (
	// messagesPerRead is the number of bytes of messages whose decoding takes as long as a read with
	// all that follows it.
	messagesPerRead = 16 << 10
	// messageWork is the work of a message beside its bytes, as bytes.
	messageWork = 256
	// shortPiece bounds the pieces of a message that are charged even if a client gets it: a message of
	// short ones takes more work than its client.
	shortPiece = resident.MaxFrame / 2
	// readsPerFrame is the number of reads in which a frame may come, a page or more in each. Further
	// ones are charged.
	readsPerFrame = resident.MaxFrame / (4 << 10)
)

// took records a frame and its use. Dropped output costs its read only.
func (p *kernelPace) took(f resident.Frame, use frameUse) {
	switch use {
	case framePiece:
		p.pieces = true
		p.heldWork += messageWork + len(f.Payload)
		if len(f.Payload) < shortPiece {
			p.work += messageWork
		}
	case frameSent:
		p.sent = true
		p.heldWork = 0
	case frameDropped:
		p.dropped = true
		p.work += p.heldWork
		p.heldWork = 0
		if f.Kind != resident.KindStdout && f.Kind != resident.KindStderr {
			p.work += messageWork + len(f.Payload)
		}
	case frameLast:
	}
}

// count records a read whose whole frames were taken.
func (p *kernelPace) count() {
	switch {
	case p.dropped:
		p.reads += 1 + p.heldReads
		p.heldReads, p.partial = 0, 0
	case p.sent:
		p.heldReads, p.partial = 0, 0
	case p.pieces:
		p.heldReads++
		p.partial = 0
	case p.partial == readsPerFrame:
		p.reads++
	default:
		p.heldReads++
		p.partial++
	}
	p.dropped, p.sent, p.pieces = false, false, false
}

// wait waits until the reads that are charged would have been due.
func (p *kernelPace) wait(over <-chan struct{}) {
	reads := p.reads + p.work/messagesPerRead
	if p.reads, p.work = 0, p.work%messagesPerRead; reads > 0 {
		p.pace.Wait(over, reads)
	}
}

// read passes the frames of the process to handle until its last one. It returns errDied at the
// process's end, and the end of its stderr. A flood that reaches no client is read slowly.
func (c *codeContext) read(ctx context.Context, handle func(resident.Frame) (frameUse, error)) (said string, err error) {
	return c.readUntil(ctx, c.process().Over(), handle)
}

// readUntil is read of a process that has ended when over is closed.
func (c *codeContext) readUntil(ctx context.Context, over <-chan struct{}, handle func(resident.Frame) (frameUse, error)) (said string, err error) {
	c.mu.Lock()
	x, output, run := c.x, c.output, c.place.Run
	if !c.place.Ready {
		run = 0
	}
	c.mu.Unlock()
	c.split.Begin(run)
	var (
		tail []byte
		buf  = make([]byte, 64<<10)
		got  bool // something, by the last read
	)
	for done := false; ; {
		for !done { // also output that the last run has left
			f, ok, err := c.split.Next()
			if err != nil {
				return string(tail), err
			}
			if !ok {
				break
			}
			if f.Kind == resident.KindBegan {
				c.kernelBegan(f.Run)
			}
			use, err := handle(f)
			if err != nil {
				return string(tail), err
			}
			c.pace.took(f, use)
			done = use == frameLast
		}
		if got {
			c.pace.count()
		}
		c.advance(x, c.split.Place(c.from), done)
		if done {
			return string(tail), nil
		}
		if ctx.Err() != nil { // also while the kernel floods
			return string(tail), context.Cause(ctx)
		}
		c.pace.wait(over)
		ch, err := output.Read(c.from, buf)
		switch {
		case errors.Is(err, os.ErrClosed):
			return string(tail), c.missing()
		case err != nil:
			return string(tail), err
		case ch.At > c.from:
			return string(tail), fmt.Errorf("%w: output is lost", resident.ErrProtocol)
		case ch.Over:
			return string(tail), errDied
		}
		if ch.Stream == "stderr" && !c.kernel.SharesStderr() {
			c.pace.dropped = true // no frames are made of it
		}
		if ch.Stream == "stderr" && (run == 0 || !c.kernel.SharesStderr()) {
			if tail = append(tail, ch.Data...); len(tail) > maxSaid {
				tail = tail[:copy(tail, tail[len(tail)-maxSaid:])]
			}
		}
		c.split.Write(ch.Stream, ch.At, ch.Data)
		c.from += int64(len(ch.Data))
		got = len(ch.Data) > 0
		if got || ch.More == nil {
			continue
		}
		select {
		case <-ch.More:
		case <-ctx.Done():
			return string(tail), context.Cause(ctx)
		}
	}
}

// advance notes that all frames before an offset are read; with done the last of the run too, for
// which no later daemon waits.
func (c *codeContext) advance(x *Detached, at int64, done bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at == c.place.At || c.x != x {
		return
	}
	c.place.At = at
	c.place.Busy = c.place.Busy && !done
	c.writePlace()
	c.hold.Taken(at) // after that: the next daemon reads from the place on
}

// begin notes that a run is under way. It needs mu.
func (c *codeContext) begin(timeout time.Duration) *contextRun {
	c.run = &contextRun{began: time.Now(), ready: !c.kernel.Begins}
	if timeout > 0 {
		c.bound(c.run, timeout)
	}
	return c.run
}

// bound interrupts a run after this time. It needs mu.
func (c *codeContext) bound(run *contextRun, timeout time.Duration) {
	run.timer = time.AfterFunc(timeout, func() {
		c.mu.Lock()
		run.timeout = c.run == run
		c.mu.Unlock()
		c.interrupt(run, "it did not end after its timeout and an interrupt")
	})
}

// interrupt sends SIGINT for a run, to some interpreters until it ends, and kills the process if
// that does not end it. A daemon that stops leaves both to the next one.
func (c *codeContext) interrupt(run *contextRun, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.run == run && !run.interrupted {
		c.place.Interrupt = true
		c.send(run, why)
	}
}

// kernelBegan notes that the kernel takes interrupts as those of a run, and sends one that waits.
func (c *codeContext) kernelBegan(number uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if run := c.run; run != nil && !run.ready && number == c.place.Run {
		if run.ready = true; run.interrupted {
			c.signal(run)
		}
	}
}

// signal sends SIGINT for a run. It needs mu.
func (c *codeContext) signal(run *contextRun) {
	if !c.place.Sent {
		c.raise(run)
	}
}

// raise sends SIGINT for a run and counts it. It needs mu.
func (c *codeContext) raise(run *contextRun) {
	x := c.x
	c.place.Interrupts++
	// Without the lock: init of a sandbox that is paused does not read. A signal that comes late is
	// counted, and the kernel passes over it.
	if !c.s.work.Go(func() {
		err := x.Signal(api.ExecSignal{Signal: "SIGINT"}) // fails if init is lost, which ends the sandbox, or the daemon stops
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.run == run && err == nil {
			c.place.Sent = true
			c.writePlace()
		}
	}) {
		c.place.Interrupts--
	}
	c.writePlace()
}

// send is interrupt with mu held.
func (c *codeContext) send(run *contextRun, why string) {
	run.interrupted = true
	x := c.x
	if run.ready {
		c.signal(run)
	} else {
		c.writePlace() // kernelBegan sends it, or the next daemon
	}
	if c.kernel.Deaf {
		run.again = time.AfterFunc(interruptAgain, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			// Nothing is queued behind the kill, which a sandbox that is paused reads when it goes on.
			if c.run == run && c.x == x && run.killed == "" && c.s.work.Ctx.Err() == nil {
				c.raise(run)
				run.again.Reset(interruptAgain)
			}
		})
	}
	run.grace = time.AfterFunc(cmp.Or(c.s.opts.InterruptGrace, defaultInterruptGrace), func() {
		c.mu.Lock()
		due := c.run == run && c.x == x && c.s.work.Ctx.Err() == nil // else the next daemon's
		if due {
			run.killed = cmp.Or(run.killed, why)
		}
		c.mu.Unlock()
		if due {
			_ = x.Kill() // as above
		}
	})
}

// over makes sure that a run is not interrupted any more. It needs mu.
func (c *codeContext) over(run *contextRun) {
	for _, t := range []*time.Timer{run.timer, run.grace, run.again} {
		if t != nil {
			t.Stop()
		}
	}
	c.run = nil
}

// finish notes the end of a run.
func (c *codeContext) finish(run *contextRun) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over(run)
	c.place.Busy, c.place.Deadline = false, 0
	c.used()
}

// used notes the time from which the context is idle. It needs mu. The caller has the turn, whose
// release starts the idle time.
func (c *codeContext) used() {
	c.place.Used = time.Now().UnixNano()
	c.writePlace()
}

// drain reads to the end of a run whose client has left, and gives the turn back. It does not stop
// reading: a run that waits for ever for room never ends. The caller has the turn.
func (c *codeContext) drain(run *contextRun) {
	defer c.release()
	ctx := c.s.work.Ctx
	said, err := c.read(ctx, skipRun(c.number()))
	if err != nil && ctx.Err() != nil {
		return // the next daemon goes on
	}
	if err != nil { // else the end was read, which the next daemon would wait for
		c.recover(ctx, run, err, said)
	}
	c.finish(run)
}

// skipRun returns a handler of frames that drops all until the end of a run.
func skipRun(number uint32) func(resident.Frame) (frameUse, error) {
	r := resident.Reader{Run: number, Skip: true}
	return func(f resident.Frame) (frameUse, error) {
		m, err := r.Read(f)
		if m != nil && m.Done != nil {
			return frameLast, err
		}
		return frameDropped, err
	}
}

func (c *codeContext) number() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.place.Run
}

// recover deals with the end of the process in a run, and returns what to tell of it. A process
// that the daemon has killed is replaced at once; one that died is when it is needed.
func (c *codeContext) recover(ctx context.Context, run *contextRun, err error, said string) *api.CodeFailure {
	x := c.process()
	died := errors.Is(err, errDied)
	c.end(ctx)
	c.mu.Lock()
	c.over(run) // its signals are not for the next process
	killed := run.killed
	if !died {
		killed = cmp.Or(killed, err.Error())
	}
	c.place.Told = true
	c.writePlace()
	deleted := c.deleted
	c.mu.Unlock()
	switch {
	case deleted:
		return &api.CodeFailure{Name: contextDied, Value: "the context has ended: " + cmp.Or(killed, "it was deleted")}
	case killed == "":
		return &api.CodeFailure{Name: contextDied, Value: "the context has lost its state, and is started anew by the next run: its process ended: " + endOf(x, said)}
	}
	text := "the context was restarted, without its state: " + killed
	if err := c.restart(ctx); err != nil {
		text = "the context has lost its state: " + killed
		c.s.log.Warn("context is not restarted", "id", c.Sandbox, "context", c.ID, "error", err)
	}
	return &api.CodeFailure{Name: contextRestarted, Value: text}
}

// endOf says how a process has ended.
func endOf(x *Detached, said string) string {
	rec := x.Record()
	text := "it is not known how"
	switch {
	case rec.Failure != nil:
		text = rec.Failure.Message
	case rec.Exit == nil:
	case rec.Exit.OOM:
		text = "killed for want of memory"
	case rec.Exit.Signal != "":
		text = "killed by " + rec.Exit.Signal
	default:
		text = fmt.Sprintf("exit code %d", rec.Exit.Code)
	}
	if said = strings.TrimSpace(strings.ToValidUTF8(said, "\uFFFD")); said != "" {
		text += ": " + said
	}
	return text
}

func validateContextRun(req *api.CodeRequest) error {
	switch {
	case len(req.Code) > maxCode:
		return class.Invalidf("code: %d bytes, more than %d", len(req.Code), maxCode)
	case req.Language != "":
		return class.Invalidf("language: the context has one")
	case len(req.Args) > 0, len(req.Stdin) > 0, req.Cwd != "", req.User != "":
		return class.Invalidf("args, stdin, cwd and user: of a program of its own, not of a run in a context")
	case req.OutputLimit < 0 || req.OutputLimit > maxOutputLimit:
		return class.Invalidf("output_limit %d: must be between 0 and %d", req.OutputLimit, maxOutputLimit)
	}
	if err := validateEnv(req.Env); err != nil {
		return err
	}
	_, err := seconds("timeout", req.Timeout)
	return err
}

// runInContext runs code in a context and emits events as they happen. Runs of a context take
// turns.
// If ctx ends or emit fails, the run is interrupted, and the context restarted if that does not end
// it. The caller frees hold.
func (s *API) runInContext(ctx context.Context, ref string, req *api.CodeRequest, hold *resultHold, emit func(api.CodeEvent) error) error {
	if err := validateContextRun(req); err != nil {
		return err
	}
	c, err := s.findContext(ctx, ref, req.Context)
	if err != nil {
		return err
	}
	lang := interpreter.Find(c.Request.Language)
	if err := validateLibraries(req, lang); err != nil {
		return err
	}
	if err := c.take(ctx); err != nil {
		return err
	}
	handed := false
	defer func() {
		if !handed {
			c.release()
		}
	}()
	lease, err := s.begin(c.Sandbox)
	if err != nil {
		return err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	hold.of = share.Owner{Tenant: lease.Record.Tenant, ID: c.Sandbox}
	judged := judgedRun{sandbox: c.Sandbox, lang: lang, context: c.ID, user: c.Request.User}
	v, err := s.judge(ctx, &judged, req)
	switch {
	case err != nil:
	case req.Check:
		err = checked(&v, emit)
	default:
		if err = s.installInContext(ctx, lease, c, req); err != nil {
			break
		}
		var written func() artifacts
		if written, err = s.outputs(ctx, ref, req.OutputDir); err != nil {
			return err
		}
		handed, err = c.answer(ctx, req, &v, hold, func(e api.CodeEvent) error {
			if e.Type == api.CodeEnded {
				made := written()
				e.Artifacts, e.ArtifactsMissed = made.found, made.missed
			}
			return emit(e)
		})
	}
	if err != nil && errors.Is(context.Cause(ctx), guests.ErrEnded) {
		return s.guests.Ended(lease)
	}
	return err
}

// installInContext installs the libraries of a run for the process of its context, and takes the
// time for that off the run's. The caller has the turn.
func (s *API) installInContext(ctx context.Context, lease *runtime.Lease, c *codeContext, req *api.CodeRequest) error {
	if len(req.Libraries) == 0 {
		return nil
	}
	defer func() { // a failed run does not end a context that was idle before
		c.mu.Lock()
		defer c.mu.Unlock()
		c.used()
	}()
	if err := s.spareDisk(ctx); err != nil {
		return err
	}
	as := *req
	as.Cwd, as.User = c.process().Record().Cwd, c.Request.User
	r := codeRun{s: s, lang: interpreter.Find(c.Request.Language), req: &as, sandbox: c.Sandbox, env: slices.Concat(c.Request.Env, req.Env)}
	if req.Timeout > 0 {
		r.due = time.Now().Add(time.Duration(req.Timeout * float64(time.Second)))
	}
	if err := r.install(ctx, guests.Of(lease), lease); err != nil {
		return err
	}
	if req.Timeout > 0 {
		req.Timeout = max(time.Until(r.due).Seconds(), 0.001) // 0 is no timeout
	}
	return nil
}

// answer is runInContext for a caller that has the turn. With handed another goroutine gives the
// turn back.
func (c *codeContext) answer(ctx context.Context, req *api.CodeRequest, v *verdict, hold *resultHold, emit func(api.CodeEvent) error) (handed bool, err error) {
	if x := c.process(); x.Ended() {
		c.mu.Lock()
		told := c.place.Told
		c.mu.Unlock()
		why := endOf(x, "")
		if err := c.restart(ctx); err != nil {
			return false, err
		}
		if !told {
			return false, c.tellDeath(why, emit)
		}
	}
	timeout, err := seconds("timeout", req.Timeout)
	if err != nil {
		return false, err
	}
	env := make(map[string]string, len(req.Env))
	for _, kv := range req.Env {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	c.mu.Lock()
	run := c.begin(timeout)
	c.place.Run++
	c.place.Count++
	c.place.Busy, c.place.Sending, c.place.Interrupt, c.place.Sent = true, true, false, false
	if timeout > 0 {
		c.place.Deadline = run.began.Add(timeout).UnixNano()
	}
	c.writePlace()
	request := resident.Request{Run: c.place.Run, Code: v.code, Env: env, Interrupts: int(c.place.Interrupts), Installed: len(req.Libraries) > 0}
	count := int(c.place.Count)
	x := c.x
	c.mu.Unlock()

	out := &runEvents{emit: emit, count: count, hold: hold, reader: resident.Reader{Run: request.Run, Take: hold.take}}
	out.timedOut = func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return run.timeout
	}
	line, err := c.kernel.Encode(&request)
	if err == nil {
		started := startedEvent(v)
		started.ExecutionCount = count
		err = out.send(started)
	}
	if err == nil {
		err = x.Input(ctx, bytes.NewReader(line), false)
		if errors.Is(err, runtime.ErrState) {
			err = nil // the process has ended, as reading shows
		}
	}
	if err != nil {
		c.notSent(run)
		return false, err
	}
	c.isSent()
	said, err := c.read(ctx, out.take)
	var failure *api.CodeFailure
	switch {
	case err == nil:
	case errors.Is(err, errDied), errors.Is(err, resident.ErrProtocol):
		failure = c.recover(context.WithoutCancel(ctx), run, err, said)
	case errors.Is(err, class.ErrNoContext):
		c.finish(run)
		return false, err
	default: // the client has left
		return c.leave(run), err
	}
	usage := api.Usage{WallMS: float64(time.Since(run.began).Microseconds()) / 1000}
	c.finish(run)
	return false, out.end(failure, usage, out.timedOut())
}

// isSent notes that the process has the code of the run.
func (c *codeContext) isSent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.place.Sending = false
	c.writePlace()
}

// notSent ends a run whose code the process does not have as a whole: it passes over such a
// request.
func (c *codeContext) notSent(run *contextRun) {
	c.mu.Lock()
	c.place.Count--
	c.place.Sending = false
	c.mu.Unlock()
	c.finish(run)
}

// resend makes sure that the end of a run follows, if the last daemon may not have sent the code as
// a whole: it sends a run without code, whose end is that of both. False means that the daemon
// stops.
func (c *codeContext) resend() bool {
	c.mu.Lock()
	if !c.place.Sending {
		c.mu.Unlock()
		return true
	}
	c.place.Run++
	c.writePlace()
	x, request := c.x, resident.Request{Run: c.place.Run, Interrupts: int(c.place.Interrupts)}
	c.mu.Unlock()
	ctx := c.s.work.Ctx
	line, err := c.kernel.Encode(&request)
	if err == nil {
		err = x.Input(ctx, bytes.NewReader(line), false)
	}
	if ctx.Err() != nil {
		return false
	}
	if err == nil { // else reading shows that the process has ended
		c.isSent()
	}
	return true
}

// leave lets the run of a client that has left end in another goroutine. It reports whether that
// gives the turn back.
func (c *codeContext) leave(run *contextRun) bool {
	if c.s.work.Ctx.Err() == nil { // else the client has left because the daemon stops
		c.interrupt(run, "it did not end after its client had left and an interrupt")
	}
	return c.s.work.Go(func() { // else the next daemon goes on with the run
		// A lease: a sandbox in which code runs is used.
		if lease, err := c.s.supervisor.Rejoin(c.Sandbox); err == nil {
			defer lease.End()
		}
		c.drain(run)
	})
}

// tellDeath answers a run that found the process of its context dead. The code does not run: it
// would miss its variables.
func (c *codeContext) tellDeath(why string, emit func(api.CodeEvent) error) error {
	out := &runEvents{emit: emit}
	if err := out.send(api.CodeEvent{Type: api.CodeStarted}); err != nil {
		return err
	}
	return out.end(&api.CodeFailure{
		Name:  contextDied,
		Value: "the context has lost its state, and was started anew; this code did not run: its process had ended: " + why,
	}, api.Usage{}, false)
}

// runEvents makes events of the messages of a run.
type runEvents struct {
	emit   func(api.CodeEvent) error
	reader resident.Reader
	hold   *resultHold // of the reader's memory; nil without reader
	count  int
	held   [2][]byte // beginnings of characters, of stdout and stderr
	failed bool
	done   resident.Done

	timedOut func() bool
}

func (o *runEvents) send(e api.CodeEvent) error {
	e.Time = time.Now().UTC()
	if err := o.emit(e); err != nil {
		return fmt.Errorf("%w: %w", errEmit, err)
	}
	return nil
}

// take is a handler of frames.
func (o *runEvents) take(f resident.Frame) (frameUse, error) {
	m, err := o.reader.Read(f)
	switch {
	case err != nil:
		return frameDropped, err
	case m == nil && f.Kind == resident.KindPiece && !o.hold.refused:
		return framePiece, nil
	case m == nil:
		return frameDropped, nil
	case m.Stdout != nil:
		return frameSent, o.output(0, m.Stdout)
	case m.Stderr != nil:
		return frameSent, o.output(1, m.Stderr)
	case m.Result != nil:
		return o.message(api.CodeEvent{Type: api.CodeValued, Result: m.Result})
	case m.Failure != nil:
		o.failed = true
		if m.Failure.Name == "KeyboardInterrupt" && m.Failure.Value == "" && o.timedOut() {
			m.Failure.Value = "the run's timeout has ended"
		}
		return o.message(api.CodeEvent{Type: api.CodeFailed, Failure: m.Failure})
	}
	o.done = *m.Done
	return frameLast, nil
}

// message emits a message, and gives back its memory.
func (o *runEvents) message(e api.CodeEvent) (frameUse, error) {
	defer o.hold.next()
	err := o.send(e)
	if o.hold.refused {
		return frameDropped, err
	}
	return frameSent, err
}

func (o *runEvents) output(stream int, p []byte) error {
	if h := o.held[stream]; len(h) > 0 {
		p = append(h, p...)
	}
	whole := len(p) - output.Tail(p)
	o.held[stream] = bytes.Clone(p[whole:])
	return o.text(stream, p[:whole])
}

func (o *runEvents) text(stream int, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	as := output.Event("", p)
	return o.send(api.CodeEvent{Type: [...]api.CodeEventType{api.CodeStdout, api.CodeStderr}[stream], Text: as.Text, Data: as.Data})
}

// end emits the last events.
func (o *runEvents) end(failure *api.CodeFailure, usage api.Usage, timeout bool) error {
	for stream, h := range o.held {
		if err := o.text(stream, h); err != nil { // no more of it will come
			return err
		}
	}
	if failure != nil {
		o.failed = true
		if err := o.send(api.CodeEvent{Type: api.CodeFailed, Failure: failure}); err != nil {
			return err
		}
	}
	exit := api.Exit{Timeout: timeout}
	if exit.Code = o.done.Code; exit.Code == 0 && (o.failed || !o.done.OK) {
		exit.Code = 1
	}
	usage.CPUMS, usage.MemoryPeak = o.done.CPUMS, o.done.MemoryPeak
	return o.send(api.CodeEvent{Type: api.CodeEnded, ExecutionCount: o.count, Exit: &exit, Usage: &usage})
}

// sizeOfValue returns about how many bytes a value has.
func sizeOfValue(v *api.CodeValue) int {
	n := 1<<10 + len(v.Text) + len(v.HTML) + len(v.Markdown) + len(v.SVG) + len(v.PNG) + len(v.JPEG) + len(v.PDF) + len(v.LaTeX) + len(v.JavaScript)
	for _, form := range []any{v.JSON, v.Data, v.Chart, v.Extra} {
		if text, ok := form.(json.RawMessage); ok { // as the reader of frames leaves it
			n += len(text)
		}
	}
	return n
}
