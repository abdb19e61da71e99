package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// shelf is what the launcher is to a daemon's execs.
type shelf struct {
	mu   sync.Mutex
	held map[[2]string][]*os.File
	fail error
	busy int // withdrawals that fail

	deposited func() // called after the next deposit
	dropped   func() // called after the next drop
}

func newShelf(t *testing.T) *shelf {
	t.Helper()
	s := &shelf{held: map[[2]string][]*os.File{}}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, files := range s.held {
			closeFiles(files)
		}
	})
	return s
}

func again(files []*os.File) ([]*os.File, error) {
	var out []*os.File
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		out = append(out, os.NewFile(uintptr(fd), f.Name()))
	}
	return out, nil
}

func (s *shelf) Deposit(_ context.Context, d launcher.Deposit) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	files, err := again(d.Files)
	if err != nil {
		return err
	}
	closeFiles(s.held[[2]string{d.Sandbox, d.Name}])
	s.held[[2]string{d.Sandbox, d.Name}] = files
	if f := s.deposited; f != nil {
		s.deposited = nil
		s.mu.Unlock()
		defer s.mu.Lock()
		f()
	}
	return nil
}

func (s *shelf) Withdraw(context.Context) ([]launcher.Deposit, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy > 0 {
		s.busy--
		return nil, fmt.Errorf("busy: %w", runtime.ErrUnavailable)
	}
	var all []launcher.Deposit
	for k, files := range s.held {
		files, err := again(files)
		if err != nil {
			return nil, err
		}
		all = append(all, launcher.Deposit{Sandbox: k[0], Name: k[1], Files: files})
	}
	return all, nil
}

func (s *shelf) Drop(_ context.Context, sandbox, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	closeFiles(s.held[[2]string{sandbox, name}])
	delete(s.held, [2]string{sandbox, name})
	if f := s.dropped; f != nil {
		s.dropped = nil
		s.mu.Unlock()
		defer s.mu.Lock()
		f()
	}
	return nil
}

func (s *shelf) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held)
}

func (r *running) detach(id string, req api.ExecRequest) api.Exec {
	r.t.Helper()
	req.Detach = true
	return decode[api.Exec](r.t, r.do("POST", "/v1/sandboxes/"+id+"/exec", req), http.StatusCreated)
}

// until asks for an exec until its record is as wanted.
func (r *running) until(x api.Exec, ok func(api.Exec) bool) api.Exec {
	r.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		now := decode[api.Exec](r.t, r.do("GET", "/v1/sandboxes/"+x.Sandbox+"/execs/"+x.ID, nil), http.StatusOK)
		if ok(now) {
			return now
		}
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatalf("it stays %+v", now)
		}
	}
}

func exited(x api.Exec) bool { return x.State == api.ExecExited }

// A daemon that stops in order leaves its execs to the next one; stopped, started and ended ones alike.
func TestExecsAreHandedOn(t *testing.T) {
	b := newBench(t, realInit(t))
	shelf := newShelf(t)
	b.options.Deposits = shelf
	first := b.start()
	sb := first.create(api.CreateSandbox{Name: "one", IdleTimeout: 3600})
	ended := first.detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "cat; exit 4"}, Stdin: []byte("from a file\n")})
	runs := first.detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo begin; cat; exit 6"}, StdinOpen: true, Stdin: []byte("la")})
	first.until(ended, exited)
	first.until(runs, func(x api.Exec) bool { return x.StdoutBytes == 8 })
	first.cancel()
	first.wait()

	// Somebody's rubbish does not keep the next one from starting.
	junk, err := memfile("junk")
	if err != nil {
		t.Fatal(err)
	}
	defer junk.Close()
	for i, files := range [][]*os.File{{junk}, {junk, junk}, {junk, junk, junk, junk, junk, junk, junk}} {
		if err := shelf.Deposit(t.Context(), launcher.Deposit{Sandbox: sb.ID, Name: fmt.Sprint("junk", i), Files: files}); err != nil {
			t.Fatal(err)
		}
	}
	if err := shelf.Deposit(t.Context(), launcher.Deposit{Sandbox: "nosuch", Name: "x", Files: []*os.File{junk}}); err != nil {
		t.Fatal(err)
	}
	second := b.start()
	second.t = t
	list := decode[api.ExecList](t, second.do("GET", "/v1/sandboxes/one/execs", nil), http.StatusOK)
	if len(list.Execs) != 2 || list.Execs[0].ID != ended.ID || list.Execs[0].Exit.Code != 4 || list.Execs[0].StdoutBytes != 12 ||
		list.Execs[1].State != api.ExecRunning || shelf.count() != 2 {
		t.Errorf("%+v, %d are deposited", list, shelf.count())
	}
	// Of one that has ended there is nothing to write to, whether the frame comes before its end is told or behind.
	for range 20 {
		c, resp, err := websocket.Dial(t.Context(), "ws://sandboxd/v1/sandboxes/one/execs/"+ended.ID+"/attach", &websocket.DialOptions{HTTPClient: second.http})
		if err != nil {
			t.Fatalf("%v, %v", err, resp)
		}
		// Where it is later than a daemon waits for who has heard the end, it does not arrive. All that was said does.
		_ = c.Write(t.Context(), websocket.MessageText, []byte(`{"stdin_close":true}`))
		if out, last := second.converse(c, nil); out[api.ChannelStdout] != "from a file\n" || last.Exit == nil || last.Exit.Code != 4 {
			t.Errorf("%q %+v", out, last)
		}
	}
	path := "/v1/sandboxes/one/execs/" + runs.ID
	if rep := second.do("POST", path+"/stdin?close=true", "st\n"); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	got := second.until(runs, exited)
	if got.Exit.Code != 6 || got.Usage == nil || got.StartedAt != runs.StartedAt {
		t.Errorf("%+v", got)
	}
	var text strings.Builder
	lines := events[api.ExecEvent](t, second.do("GET", path+"/attach?from=6", nil))
	for _, e := range lines {
		text.WriteString(e.Text)
	}
	if text.String() != "last\n" || lines[0].Exec != runs.ID || lines[0].Offset != 6 || lines[len(lines)-1].Exit.Code != 6 {
		t.Errorf("%+v", lines)
	}
	if rep := second.do("DELETE", path, nil); rep.status != http.StatusNoContent || shelf.count() != 1 {
		t.Errorf("%s, %d are deposited", rep.body, shelf.count())
	}
	problem(t, second.do("GET", path, nil), api.CodeNotFound)
	if rep := second.do("DELETE", "/v1/sandboxes/one", nil); rep.status != http.StatusNoContent || shelf.count() != 0 {
		t.Errorf("%s, %d are deposited", rep.body, shelf.count())
	}
}

// A sandbox that is paused while the daemon changes is kept from idling by its execs afterwards, as before.
func TestExecsOfAPausedSandboxAreHandedOn(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	first := b.start()
	sb := first.create(api.CreateSandbox{})
	x := first.detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true})
	first.idlesAfter(sb.ID, 0.3)
	if rep := first.do("POST", "/v1/sandboxes/"+sb.ID+"/pause", nil); rep.status != http.StatusOK {
		t.Fatalf("%s", rep.body)
	}
	first.cancel()
	first.wait()
	second := b.start()
	second.t = t
	if rep := second.do("POST", "/v1/sandboxes/"+sb.ID+"/resume", nil); rep.status != http.StatusOK {
		t.Fatalf("%s", rep.body)
	}
	<-time.After(time.Second) // no event tells that a sandbox has not been ended
	if rep := second.do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID+"/stdin", "\n"); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	if now := second.until(x, func(x api.Exec) bool { return x.State != api.ExecRunning }); now.Exit == nil || now.Exit.Code != 3 {
		t.Errorf("%+v", now)
	}
}

// A launcher that does not give the execs at once is asked again, also by who wants to start one more.
func TestExecsAreAdoptedLater(t *testing.T) {
	b := newBench(t, realInit(t))
	shelf := newShelf(t)
	b.options.Deposits = shelf
	first := b.start()
	sb := first.create(api.CreateSandbox{})
	x := first.detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true})
	first.cancel()
	first.wait()
	shelf.busy = 2
	second := b.start()
	second.t = t
	deadline := time.Now().Add(patience)
	for second.do("GET", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID, nil).status != http.StatusOK {
		if time.Now().After(deadline) {
			t.Fatal("it is not adopted")
		}
	}
	if rep := second.do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID+"/stdin", "\n"); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	second.until(x, func(x api.Exec) bool { return x.State == api.ExecExited && x.Exit.Code == 3 })
	second.cancel()
	second.wait()
	shelf.mu.Lock()
	shelf.busy = 1 << 20
	shelf.mu.Unlock()
	third := b.start()
	third.t = t
	problem(t, third.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}, Detach: true}), api.CodeUnavailable)
	shelf.mu.Lock()
	shelf.busy = 0
	shelf.mu.Unlock()
	y := third.detach(sb.ID, api.ExecRequest{Argv: []string{"true"}})
	third.until(y, func(y api.Exec) bool { return y.State == api.ExecExited })
	third.until(x, func(x api.Exec) bool { return x.State == api.ExecExited })
}

// A daemon may be killed right after a sandbox was stopped and started, before it has noted what became of its execs. The next
// one does not hold that against the new init.
func TestExecsOfAnEarlierLifeAreLost(t *testing.T) {
	b := newBench(t, realInit(t))
	shelf := newShelf(t)
	b.options.Deposits = shelf
	first := b.start()
	sb := first.create(api.CreateSandbox{})
	x := first.detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	before, err := shelf.Withdraw(t.Context())
	if err != nil || len(before) != 1 {
		t.Fatalf("%v, %v", before, err)
	}
	defer closeFiles(before[0].Files)
	for _, route := range []string{"/stop", "/start"} {
		if rep := first.do("POST", "/v1/sandboxes/"+sb.ID+route, nil); rep.status != http.StatusOK {
			t.Fatalf("%s: %s", route, rep.body)
		}
	}
	first.until(x, func(x api.Exec) bool { return x.State == api.ExecLost })
	first.cancel()
	first.wait()
	// In memory no init has a pid.
	state := before[0].Files[1]
	var rest left
	if ok, err := noted(state, recordAt, &rest); err != nil || !ok {
		t.Fatal(ok, err)
	}
	rest.Init = 1 << 22
	_, err = state.WriteAt(make([]byte, 8), endAt)
	if err := errors.Join(err, (&execLog{state: state}).note(recordAt, rest)); err != nil {
		t.Fatal(err)
	}
	if err := shelf.Deposit(t.Context(), before[0]); err != nil {
		t.Fatal(err)
	}
	second := b.start()
	second.t = t
	if now := second.until(x, func(x api.Exec) bool { return x.State != api.ExecRunning }); now.State != api.ExecLost {
		t.Errorf("%+v", now)
	}
	if res := second.exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

// An exec that cannot be kept for the next daemon does not run.
func TestDetachedExecThatCannotBeKept(t *testing.T) {
	b := newBench(t, realInit(t))
	shelf := newShelf(t)
	shelf.fail = fmt.Errorf("full: %w", runtime.ErrInUse)
	b.options.Deposits = shelf
	r := b.start()
	sb := r.create(api.CreateSandbox{})
	problem(t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sleep", "600"}, Detach: true}), api.CodeConflict)
	deadline := time.Now().Add(patience)
	for {
		list := decode[api.ProcessList](t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/processes", nil), http.StatusOK)
		if len(list.Processes) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", list)
		}
	}
	if e := r.d.service.execs; e.count != 0 || e.kept != 0 || len(e.of) != 0 {
		t.Errorf("%d, %d, %v", e.count, e.kept, e.of)
	}
}

// A detached exec keeps its sandbox from idling, and ended ones make room for new ones.
func TestDetachedExecsAreBounded(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	sb := r.create(api.CreateSandbox{})
	long := r.detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	r.idlesAfter(sb.ID, 0.3)
	var last api.Exec
	for range maxFinished + 3 {
		last = r.detach(sb.ID, api.ExecRequest{Argv: []string{"true"}})
		r.until(last, exited)
	}
	<-time.After(time.Second) // no event tells that a sandbox has not been ended
	list := decode[api.ExecList](t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
	if len(list.Execs) != maxFinished+1 || list.Execs[0].ID != long.ID || list.Execs[maxFinished].ID != last.ID {
		t.Errorf("%d execs", len(list.Execs))
	}
	for range maxDetached - maxFinished - 1 {
		r.detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	}
	req := api.ExecRequest{Argv: []string{"true"}, Detach: true}
	problem(t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", req), api.CodeConflict)
	if rep := r.do("DELETE", "/v1/sandboxes/"+sb.ID+"/execs/"+long.ID, nil); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	r.detach(sb.ID, req)
}

// What has ended in one sandbox is in nobody's way in another.
func TestEndedExecsMakeRoomForThoseOfOthers(t *testing.T) {
	b := newBench(t, realInit(t))
	shelf := newShelf(t)
	b.options.Deposits = shelf
	r := b.start()
	const each = maxKept / maxOutputLimit / 4
	var oldest api.Exec
	for i := range 5 {
		sb := r.create(api.CreateSandbox{})
		for j := range each {
			x := r.detach(sb.ID, api.ExecRequest{Argv: []string{"true"}, OutputLimit: maxOutputLimit - 4, Stdin: []byte("text")})
			if i == 0 && j == 0 {
				oldest = x
			}
			r.until(x, exited)
		}
	}
	problem(t, r.do("GET", "/v1/sandboxes/"+oldest.Sandbox+"/execs/"+oldest.ID, nil), api.CodeNotFound)
	if e := r.d.service.execs; e.count != 4*each || e.kept != maxKept || shelf.count() != 4*each {
		t.Errorf("%d execs with %d bytes, %d are deposited", e.count, e.kept, shelf.count())
	}
}

// An exec with a client is listed while it runs, and takes signals; it is nobody's to attach to.
func TestExecWithItsClientIsListed(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	done := make(chan reply, 1)
	go func() {
		rep, _ := r.try("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sh", "-c", "echo x; exec sleep 600"}})
		done <- rep
	}()
	var x api.Exec
	deadline := time.Now().Add(patience)
	for x.StdoutBytes != 2 {
		list := decode[api.ExecList](t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
		if len(list.Execs) == 1 {
			x = list.Execs[0]
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", list)
		}
	}
	if x.Detached || x.State != api.ExecRunning || x.PID < 2 || !slices.Equal(x.Argv, []string{"sh", "-c", "echo x; exec sleep 600"}) {
		t.Errorf("%+v", x)
	}
	path := "/v1/sandboxes/" + sb.ID + "/execs/" + x.ID
	problem(t, r.do("GET", path+"/attach", nil), api.CodeConflict)
	problem(t, r.do("POST", path+"/stdin", "x"), api.CodeConflict)
	problem(t, r.do("POST", path+"/resize", api.TerminalSize{Rows: 1, Cols: 1}), api.CodeInvalid)
	if rep := r.do("POST", path+"/signal", api.ExecSignal{Signal: "TERM"}); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	res := decode[api.ExecResult](t, <-done, http.StatusOK)
	if res.Exit.Signal != "SIGTERM" || res.Stdout != "x\n" {
		t.Errorf("%+v", res)
	}
	problem(t, r.do("GET", path, nil), api.CodeNotFound)
}

// What other sandboxes have of execs keeps none from its first one, which is its main process where it has one.
func TestEverySandboxHasRoomForOneExec(t *testing.T) {
	e := newExecs(t.Context())
	enter := func(sandbox string, i int, size int64, ended bool) {
		t.Helper()
		room, err := e.reserve(sandbox, size)
		if err != nil || len(room) > 0 {
			t.Fatalf("exec %d of %s: room %v, %v", i, sandbox, room, err)
		}
		x := &Execution{log: new(execLog), kept: size, done: make(chan struct{}), record: api.Exec{ID: fmt.Sprint(i), Sandbox: sandbox, StartedAt: time.Unix(int64(i), 0)}}
		if ended {
			close(x.done)
		}
		e.enter(x)
	}
	// Sixteen sandboxes have thirty-two, so that 496 are shared, and a seventeenth the rest of them.
	for s := range 16 {
		for i := range 32 {
			enter(fmt.Sprint("many", s), i, 1<<10, false)
		}
	}
	for i := range 17 {
		enter("rest", 1000+i, 1<<10, i == 16)
	}
	// An exec that ended makes room, the first one of another sandbox never.
	enter("lone", 1, 1<<10, true)
	room, err := e.reserve("many16", 1<<10)
	if err != nil || len(room) != 0 {
		t.Errorf("a first exec: %v, %v", room, err)
	}
	room, err = e.reserve("many16", 1<<10)
	if err != nil || len(room) != 1 || room[0].record.Sandbox != "rest" {
		t.Errorf("a second exec: %v, %v", room, err)
	}
	e.release("many16", 1<<10)
	if !e.leave(room[0]) || e.leave(room[0]) {
		t.Error("what makes room is not listed once")
	}
	enter("rest", 2000, 1<<10, false)
	if _, err := e.reserve("many16", 1<<10); !errors.Is(err, runtime.ErrInUse) {
		t.Errorf("a second exec where nothing makes room: %v", err)
	}
	for i := range 900 {
		enter(fmt.Sprint("single", i), 1, mainRing, false)
	}
	// Of memory too: one that needs little is let in.
	e.mu.Lock()
	e.kept = maxKept
	e.mu.Unlock()
	if _, err := e.reserve("large", mainRing+1); !errors.Is(err, runtime.ErrInUse) {
		t.Error("there is no end of memory")
	}
	if _, err := e.reserve("small", mainRing); err != nil {
		t.Errorf("a main process has no room: %v", err)
	}
}

// ending is an exec of a sandbox called box that is listed, and about to end.
func (s *Service) ending(t *testing.T) *Execution {
	t.Helper()
	log, err := newExecLog(1<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(log.close)
	x := &Execution{s: s, log: log, kept: log.limit, done: make(chan struct{}), record: api.Exec{ID: newExecID(), Sandbox: "box", State: api.ExecRunning}}
	s.list(x)
	return x
}

// Whoever is told that an exec has ended can start the next one: it makes room.
func TestExecThatIsToldToHaveEndedMakesRoom(t *testing.T) {
	s := &Service{execs: newExecs(t.Context())}
	for range 300 {
		x := s.ending(t)
		early := make(chan bool)
		go func() {
			for !exited(x.Record()) {
				goruntime.Gosched()
			}
			early <- !x.ended()
		}()
		x.conclude(api.Exec{State: api.ExecExited})
		if <-early {
			t.Fatal("it is told to have ended, and counts as one that runs")
		}
		s.forget(t.Context(), x)
	}
}

// What becomes of an exec is deposited while somebody forgets it. Nothing of it is left when that is answered.
func TestExecThatIsForgottenWhileItIsDeposited(t *testing.T) {
	held := newShelf(t)
	s := &Service{opts: Options{Deposits: held}, execs: newExecs(t.Context())}
	x := s.ending(t)
	x.conclude(api.Exec{State: api.ExecExited})
	held.dropped = func() {
		if err := x.deposit(t.Context()); err != nil {
			t.Error(err)
		}
	}
	s.forget(t.Context(), x)
	if n := held.count(); n != 0 || held.dropped != nil {
		t.Errorf("%d are deposited", n)
	}
}

// Who starts an exec waits for an adoption that takes its time no longer than the client does.
func TestAdoptionIsWaitedForNoLongerThanTheClient(t *testing.T) {
	s := &Service{opts: Options{Deposits: newShelf(t)}, execs: newExecs(t.Context())}
	s.execs.adopting <- struct{}{} // somebody does, and the launcher does not answer
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.adoption(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	<-s.execs.adopting
	if err := s.adoption(t.Context()); err != nil || !s.execs.adopted.Load() {
		t.Errorf("%v", err)
	}
}
