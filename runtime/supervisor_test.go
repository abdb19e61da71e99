package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// patience ends what waits for an event that does not come.
var patience = testenv.HungAfter

// clock is a clock that stands still but for advance.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// bench is one daemon's worth of state, which survives its supervisor.
type bench struct {
	clock   *clock
	engine  *runtimetest.Engine
	dir     string
	options runtime.Options
}

func newBench(t *testing.T) *bench {
	t.Helper()
	checkGoroutines(t)
	e := runtimetest.NewEngine(nil)
	t.Cleanup(e.Close)
	c := &clock{now: time.Now()}
	return &bench{clock: c, engine: e, dir: t.TempDir(), options: runtime.Options{
		RuntimeDir: t.TempDir(), MaxSandboxes: 100, Log: slog.New(legalPhases{slog.DiscardHandler, t}), Now: c.Now,
	}}
}

// advance moves the clock, and has the supervisor look at it.
func (b *bench) advance(s *runtime.Supervisor, d time.Duration) {
	b.clock.mu.Lock()
	b.clock.now = b.clock.now.Add(d)
	b.clock.mu.Unlock()
	runtime.Rearm(s)
}

// legalPhases is a log that fails the test if a sandbox took a transition that the table of phases
// does not have.
type legalPhases struct {
	slog.Handler
	t *testing.T
}

func (h legalPhases) Enabled(context.Context, slog.Level) bool { return true }

func (h legalPhases) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "illegal phase") {
		r.Attrs(func(a slog.Attr) bool { h.t.Errorf("%s: %s", r.Message, a); return true })
	}
	return nil
}

// checkGoroutines fails the test if more goroutines run at its end than at its start.
func checkGoroutines(t *testing.T) {
	t.Helper()
	before := goruntime.NumGoroutine()
	t.Cleanup(func() {
		deadline := time.After(patience)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for goruntime.NumGoroutine() > before {
			select {
			case <-tick.C:
			case <-deadline:
				buf := make([]byte, 1<<16)
				t.Errorf("goroutines are left:\n%s", buf[:goruntime.Stack(buf, true)])
				return
			}
		}
	})
}

func (b *bench) open(t *testing.T) *runtime.Supervisor {
	t.Helper()
	s, err := runtime.Open(t.Context(), b.dir, b.engine, b.options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.WithoutCancel(t.Context()), false); err != nil && !errors.Is(err, runtime.ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

func request(name string) runtime.Request {
	return runtime.Request{
		Name:    name,
		Image:   "host",
		Rootfs:  rootfs.Source{Layers: []string{"sha256:00"}},
		Cwd:     "/",
		Profile: runtime.Profile{Name: "default", Seccomp: &specs.LinuxSeccomp{}},
	}
}

func create(t *testing.T, s *runtime.Supervisor, req runtime.Request) runtime.Record {
	t.Helper()
	rec, err := s.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// waitEnded waits until the sandbox does not run any more.
func waitEnded(t *testing.T, s *runtime.Supervisor, id string) runtime.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	rec, err := s.WaitEnded(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func sockets(t *testing.T, b *bench) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(b.options.RuntimeDir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestCreateGetListDelete(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	one := create(t, s, request("one"))
	b.advance(s, time.Second)
	two := create(t, s, request(""))
	if one.State != api.StateRunning || one.Name != "one" || two.Name == "" {
		t.Errorf("records: %+v, %+v", one, two)
	}
	if one.IdleTimeout != 600 || one.Deadline.Sub(one.CreatedAt) != time.Hour {
		t.Errorf("defaults: idle %v, deadline after %v", one.IdleTimeout, one.Deadline.Sub(one.CreatedAt))
	}
	for _, ref := range []string{one.ID, "one"} {
		got, err := s.Get(ref)
		if err != nil || got.ID != one.ID {
			t.Errorf("get %q: %v, %v", ref, got.ID, err)
		}
	}
	var ids []string
	for _, rec := range s.List(runtime.Filter{}) {
		ids = append(ids, rec.ID)
	}
	if !slices.Equal(ids, []string{one.ID, two.ID}) {
		t.Errorf("list = %v, want oldest first: %v", ids, []string{one.ID, two.ID})
	}
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get("one"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("get after delete: %v", err)
	}
	if err := s.Delete(t.Context(), "one"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}
	if got := sockets(t, b); len(got) != 1 || got[0] != two.ID+".sock" {
		t.Errorf("sockets = %v", got)
	}
	if got := b.engine.IDs(); len(got) != 1 {
		t.Errorf("engine has %v", got)
	}
}

func TestListFilters(t *testing.T) {
	s := newBench(t).open(t)
	for i := range 4 {
		req := request(fmt.Sprint("n", i))
		req.Labels = map[string]string{"parity": fmt.Sprint(i % 2), "all": ""}
		create(t, s, req)
	}
	for name, tc := range map[string]struct {
		filter runtime.Filter
		want   int
	}{
		"all":         {runtime.Filter{}, 4},
		"label":       {runtime.Filter{Labels: map[string]string{"parity": "1"}}, 2},
		"empty value": {runtime.Filter{Labels: map[string]string{"all": ""}}, 4},
		"absent key":  {runtime.Filter{Labels: map[string]string{"none": ""}}, 0},
		"two labels":  {runtime.Filter{Labels: map[string]string{"parity": "0", "all": ""}}, 2},
		"state":       {runtime.Filter{State: api.StateRunning}, 4},
		"other state": {runtime.Filter{State: api.StateLost}, 0},
	} {
		if got := len(s.List(tc.filter)); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

func TestNamesAndIdsShareOneSpace(t *testing.T) {
	s := newBench(t).open(t)
	one := create(t, s, request("one"))
	for _, name := range []string{"one", one.ID} {
		if _, err := s.Create(t.Context(), request(name)); !errors.Is(err, runtime.ErrExists) {
			t.Errorf("create %q: %v, want ErrExists", name, err)
		}
	}
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	create(t, s, request("one"))
}

func TestNumberOfSandboxesIsBounded(t *testing.T) {
	b := newBench(t)
	b.options.MaxSandboxes = 2
	s := b.open(t)
	create(t, s, request("a"))
	create(t, s, request("b"))
	_, err := s.Create(t.Context(), request("c"))
	if !errors.Is(err, runtime.ErrTooMany) {
		t.Fatalf("third create: %v", err)
	}
	if err := s.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	create(t, s, request("c"))
}

func TestLimitsAreMergedAndExplicitOnesKept(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	swap := int64(0)
	req := request("limits")
	req.Limits = api.Limits{Memory: 1 << 20}
	req.Defaults = api.Limits{Memory: 1 << 30, Pids: 10, CPUs: 2, Nofile: 99, Swap: &swap}
	rec := create(t, s, req)
	spec := b.engine.Spec(rec.ID)
	if spec.Limits.Memory != 1<<20 || spec.Limits.Pids != 10 || spec.Limits.CPUs != 2 || spec.Limits.Nofile != 99 || spec.Limits.Swap == nil {
		t.Errorf("limits = %+v", spec.Limits)
	}
	if spec.Explicit != (api.Limits{Memory: 1 << 20}) {
		t.Errorf("explicit = %+v", spec.Explicit)
	}
	if !spec.Deadline.Equal(rec.Deadline) || spec.Hostname != "limits" {
		t.Errorf("spec = %+v", spec)
	}
}

// A socket path beyond the 108 bytes of sockaddr_un is ordinary in a test's temporary directory,
// and in a deep home.
func TestControlSocketWithALongPath(t *testing.T) {
	b := newBench(t)
	b.options.RuntimeDir = filepath.Join(t.TempDir(), strings.Repeat("long/", 30))
	if err := os.MkdirAll(b.options.RuntimeDir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := b.open(t)
	rec := create(t, s, request(""))
	lease, err := s.Begin(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	st, err := os.Stat(lease.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode = %v", st.Mode())
	}
	dir, err := os.Open(filepath.Dir(lease.Socket))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	conn, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(lease.Socket)))
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close() // nothing was sent
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	b := newBench(t)
	refuse := fmt.Errorf("memory: %w", runtime.ErrUnenforceable)
	b.engine.CreateError = func(*runtime.Spec) error { return refuse }
	s := b.open(t)
	_, err := s.Create(t.Context(), request("x"))
	if !errors.Is(err, runtime.ErrUnenforceable) {
		t.Fatalf("create: %v", err)
	}
	if s.Count() != 0 || len(sockets(t, b)) != 0 || len(b.engine.IDs()) != 0 {
		t.Errorf("left: %d sandboxes, sockets %v, engine %v", s.Count(), sockets(t, b), b.engine.IDs())
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	b.engine.CreateError = nil
	s = b.open(t)
	if s.Count() != 0 {
		t.Error("the record is left")
	}
	create(t, s, request("x"))
}

func TestDeadlineStopsTheSandbox(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("")
	req.Timeout = 30 * time.Second
	rec := create(t, s, req)
	b.advance(s, 29*time.Second)
	if now, err := s.Get(rec.ID); err != nil || now.State != api.StateRunning {
		t.Errorf("before its deadline: %+v, %v", now, err)
	}
	b.advance(s, time.Second)
	rec = waitEnded(t, s, rec.ID)
	if rec.State != api.StateStopped || rec.Reason != "deadline reached" {
		t.Errorf("%s: %s", rec.State, rec.Reason)
	}
	if _, err := s.Begin(rec.ID); !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "deadline reached") {
		t.Errorf("begin: %v", err)
	}
	if err := s.Delete(t.Context(), rec.ID); err != nil {
		t.Error(err)
	}
}

func TestIdleTimeoutWaitsForTheLastLease(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	lease, err := s.Begin(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	const idle = 40 * time.Second
	idlesAfter(t, s, rec.ID, idle)
	b.advance(s, 4*idle)
	lease.End()
	lease.End() // counts once
	b.advance(s, idle-1)
	if now, err := s.Get(rec.ID); err != nil || now.State != api.StateRunning {
		t.Errorf("while it was used, or before its idle timeout: %+v, %v", now, err)
	}
	b.advance(s, 1)
	select {
	case <-lease.Gone:
	case <-time.After(patience):
		t.Fatal("the idle sandbox does not end")
	}
	got, err := s.Get(rec.ID)
	if err != nil || got.State != api.StateStopped || got.Reason != "idle for 40s" {
		t.Errorf("%s: %s (%v)", got.State, got.Reason, err)
	}
}

// A look at a sandbox is no use of it: it neither keeps the sandbox from being idle, nor begins the
// idle time anew.
func TestPeekIsNoUse(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	const idle = 40 * time.Second
	idlesAfter(t, s, rec.ID, idle)
	b.advance(s, idle-1)
	ended, err := s.Probe(rec.ID)
	if err != nil || ended.Socket == "" {
		t.Fatalf("%+v, %v", ended, err)
	}
	ended.End()
	open, err := s.Probe(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer open.End()
	b.advance(s, 1)
	if got := waitEnded(t, s, rec.ID); got.Reason != "idle for 40s" {
		t.Errorf("it has ended: %s", got.Reason)
	}
	if _, err := s.Probe(rec.ID); !errors.Is(err, runtime.ErrState) {
		t.Errorf("of one that has ended: %v", err)
	}
}

// idlesAfter changes a sandbox's idle timeout.
func idlesAfter(t *testing.T, s *runtime.Supervisor, id string, idle time.Duration) {
	t.Helper()
	if _, err := s.Update(t.Context(), id, func(rec *runtime.Record) (api.Limits, error) {
		rec.IdleTimeout = idle.Seconds()
		return api.Limits{}, nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestEndOfInitStopsTheSandbox(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	b.engine.OOM(rec.ID)
	if err := b.engine.Kill(t.Context(), rec.ID); err != nil {
		t.Fatal(err)
	}
	rec = waitEnded(t, s, rec.ID)
	if rec.State != api.StateStopped || !strings.Contains(rec.Reason, "want of memory") || rec.PID != 0 {
		t.Errorf("%s: %s", rec.State, rec.Reason)
	}
}

func TestDeathOfTheEngineLosesSandboxes(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	b.engine.Crash()
	rec = waitEnded(t, s, rec.ID)
	if rec.State != api.StateLost || rec.Reason == "" {
		t.Errorf("%s: %q", rec.State, rec.Reason)
	}
	if err := s.Delete(t.Context(), rec.ID); !errors.Is(err, runtime.ErrUnavailable) {
		t.Errorf("delete without an engine: %v", err)
	}
	b.engine.Restart()
	if err := s.Delete(t.Context(), rec.ID); err != nil {
		t.Errorf("delete: %v", err)
	}
}

func TestKillKeepsTheRecord(t *testing.T) {
	s := newBench(t).open(t)
	rec := create(t, s, request(""))
	if err := s.Kill(t.Context(), rec.ID, "its init does not answer"); err != nil {
		t.Fatal(err)
	}
	got, err := s.Get(rec.ID)
	if err != nil || got.State != api.StateStopped || got.Reason != "its init does not answer" {
		t.Errorf("%s: %s (%v)", got.State, got.Reason, err)
	}
}

func TestConcurrentDeletesAgree(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	for range 20 {
		rec := create(t, s, request("raced"))
		errs := make([]error, 6)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				if i%2 == 0 {
					if lease, err := s.Begin(rec.ID); err == nil {
						lease.End()
					}
				}
				errs[i] = s.Delete(t.Context(), rec.ID)
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil && !errors.Is(err, runtime.ErrNotFound) {
				t.Fatal(err)
			}
		}
		if len(b.engine.IDs()) != 0 || len(sockets(t, b)) != 0 {
			t.Fatalf("left: %v, %v", b.engine.IDs(), sockets(t, b))
		}
	}
}

// A sandbox that served one request goes with the daemon that was to answer it, in whatever state
// it is found.
func TestRestartDeletesWhatServedOneRequest(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	for _, name := range []string{"running", "ended"} {
		req := request(name)
		req.Ephemeral = true
		rec := create(t, s, req)
		if name == "ended" {
			if err := s.Kill(t.Context(), rec.ID, "test"); err != nil {
				t.Fatal(err)
			}
		}
	}
	create(t, s, request("kept"))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	list := s.List(runtime.Filter{})
	if len(list) != 1 || list[0].Name != "kept" {
		t.Errorf("left are %+v", list)
	}
	if got := b.engine.IDs(); len(got) != 1 {
		t.Errorf("the engine has %v", got)
	}
	if got := sockets(t, b); len(got) != 1 {
		t.Errorf("sockets = %v", got)
	}
	if err := s.Delete(t.Context(), "kept"); err != nil {
		t.Error(err)
	}
}

func TestRestartAdoptsWhatRuns(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("kept")
	req.ImageEnv = []string{"FROM=image"}
	kept := create(t, s, req)
	dead := create(t, s, request("dead"))
	create(t, s, request("timed"))
	lease, err := s.Begin("timed") // the first daemon's timer does not run
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	idlesAfter(t, s, "timed", time.Minute)
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if got := b.engine.IDs(); len(got) != 3 {
		t.Fatalf("close with keep ended sandboxes: %v", got)
	}
	if err := b.engine.Kill(t.Context(), dead.ID); err != nil {
		t.Fatal(err)
	}

	s = b.open(t)
	rec, err := s.Get("dead")
	if err != nil || rec.State != api.StateLost || rec.Reason == "" {
		t.Errorf("dead: %s %q %v", rec.State, rec.Reason, err)
	}
	rec, err = s.Get(kept.ID)
	if err != nil || rec.State != api.StateRunning || !slices.Equal(rec.ImageEnv, req.ImageEnv) || rec.Enforced.IDs == "" {
		t.Errorf("kept: %+v %v", rec, err)
	}
	if got := sockets(t, b); !slices.Contains(got, kept.ID+".sock") || slices.Contains(got, dead.ID+".sock") {
		t.Errorf("sockets = %v", got)
	}
	// The timers are armed again.
	b.advance(s, time.Minute)
	rec = waitEnded(t, s, "timed")
	if rec.State != api.StateStopped {
		t.Errorf("timed: %s", rec.State)
	}
	for _, ref := range []string{"dead", "kept", "timed"} {
		if err := s.Delete(t.Context(), ref); err != nil {
			t.Error(err)
		}
	}
	if got := b.engine.IDs(); len(got) != 0 {
		t.Errorf("engine has %v", got)
	}
}

// ending is a log that holds up the watcher that reports an end, and an engine whose deletions wait
// for that. They meet by a directory: any other way would order their memory accesses, and hide a
// race from the detector.
type ending struct {
	slog.Handler
	*runtimetest.Engine

	met  string
	goOn chan struct{}
}

func (e *ending) Enabled(context.Context, slog.Level) bool { return true }

func (e *ending) Handle(_ context.Context, r slog.Record) error {
	if r.Message != "sandbox ended" {
		return nil
	}
	err := os.Mkdir(e.met, 0o700)
	<-e.goOn
	return err
}

func (e *ending) Delete(ctx context.Context, id string) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); goruntime.Gosched() {
		if _, err := os.Lstat(e.met); err == nil {
			break
		}
	}
	return e.Engine.Delete(ctx, id)
}

// An adopted sandbox may end at once, while the supervisor still repairs the rest.
func TestRestartAdoptsWhatIsToEnd(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if _, err := b.engine.Update(t.Context(), rec.ID, &runtime.Change{Deadline: b.clock.Now().Add(-time.Minute)}); err != nil {
		t.Fatal(err)
	}
	orphan, err := b.engine.Create(t.Context(), &runtime.Spec{ID: "orphan1"}, openNull(t))
	if err != nil {
		t.Fatal(err)
	}
	defer orphan.Pidfd.Close()
	e := &ending{slog.DiscardHandler, b.engine, filepath.Join(t.TempDir(), "met"), make(chan struct{})}
	b.options.Log = slog.New(e)
	s, err = runtime.Open(t.Context(), b.dir, e, b.options)
	close(e.goOn)
	if err != nil {
		t.Fatal(err)
	}
	if got := waitEnded(t, s, rec.ID); got.State != api.StateStopped || got.Reason != "deadline reached" {
		t.Errorf("%s: %s", got.State, got.Reason)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
}

func TestRestartRemovesWhatNobodyKnows(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	create(t, s, request("known"))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	// An orphan of the engine, a stale socket, and a file that is not ours.
	orphan, err := b.engine.Create(t.Context(), &runtime.Spec{ID: "orphan1"}, openNull(t))
	if err != nil {
		t.Fatal(err)
	}
	defer orphan.Pidfd.Close()
	dir := filepath.Join(b.options.RuntimeDir, "s")
	for _, name := range []string{"stale.sock", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = b.open(t)
	if got := b.engine.IDs(); len(got) != 1 || got[0] == "orphan1" {
		t.Errorf("engine has %v", got)
	}
	if got := sockets(t, b); slices.Contains(got, "stale.sock") || !slices.Contains(got, "notes.txt") {
		t.Errorf("sockets = %v", got)
	}
	if rec, err := s.Get("known"); err != nil || rec.State != api.StateRunning {
		t.Errorf("known: %v %v", rec.State, err)
	}
}

// The daemon died while it created. The launcher, whose answer was not read, is still removing the
// sandbox or died too. No later daemon may take it for one that is being created: it could never be
// deleted.
func TestRestartEndsACreationThatLeftSomething(t *testing.T) {
	b := newBench(t)
	rec := runtime.Record{Sandbox: api.Sandbox{ID: "halfmade1", Name: "half", State: api.StateCreating, Deadline: time.Now().Add(time.Hour)}}
	if err := runtime.PutRecord(b.dir, &rec); err != nil {
		t.Fatal(err)
	}
	started, err := b.engine.Create(t.Context(), &runtime.Spec{ID: rec.ID}, openNull(t))
	if err != nil {
		t.Fatal(err)
	}
	defer started.Pidfd.Close()
	if err := b.engine.Kill(t.Context(), rec.ID); err != nil {
		t.Fatal(err)
	}
	s := b.open(t)
	got, err := s.Get("half")
	if err != nil || got.State != api.StateLost || got.Reason == "" {
		t.Errorf("%s %q %v", got.State, got.Reason, err)
	}
	if err := s.Delete(t.Context(), rec.ID); err != nil {
		t.Error(err)
	}
	if left, err := b.engine.Leftovers(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestRestartWithoutTheSocketLosesTheSandbox(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(b.options.RuntimeDir, "s", rec.ID+".sock")); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	got, err := s.Get(rec.ID)
	if err != nil || got.State != api.StateLost || !strings.Contains(got.Reason, "socket") {
		t.Errorf("%s %q %v", got.State, got.Reason, err)
	}
}

func TestSecondSupervisorIsRefused(t *testing.T) {
	b := newBench(t)
	b.open(t)
	if _, err := runtime.Open(t.Context(), b.dir, b.engine, b.options); err == nil || !strings.Contains(err.Error(), "another daemon") {
		t.Errorf("open: %v", err)
	}
}

func TestClosedSupervisorRefuses(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := b.engine.IDs(); len(got) != 0 {
		t.Errorf("engine has %v", got)
	}
	_, cerr := s.Create(t.Context(), request(""))
	_, berr := s.Begin(rec.ID)
	for what, err := range map[string]error{"create": cerr, "begin": berr, "delete": s.Delete(t.Context(), rec.ID), "close": s.Close(t.Context(), false)} {
		if !errors.Is(err, runtime.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func openNull(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // nothing was written
	return f
}

// vanishing is an engine whose answer is lost: the launcher has made the sandbox, and the client is
// gone.
type vanishing struct{ *runtimetest.Engine }

func (e vanishing) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	st, err := e.Engine.Create(ctx, spec, control)
	if err != nil {
		return nil, err
	}
	return nil, errors.Join(context.Canceled, st.Pidfd.Close())
}

// A client that asks for a sandbox and hangs up must not leave one that is neither counted nor
// deleted.
// Prepare is called for a sandbox that has an id and does not run yet, and can prevent it.
func TestCreateIsPrepared(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("one")
	prepared := ""
	req.Prepare = func(id string) error {
		prepared = id
		rec, err := s.Get(id)
		list, lerr := b.engine.List(t.Context())
		if err != nil || lerr != nil || rec.State != api.StateCreating || len(list) > 0 {
			t.Errorf("meanwhile: %+v, %v, %v, %v", rec, err, list, lerr)
		}
		return nil
	}
	if rec := create(t, s, req); rec.ID != prepared {
		t.Errorf("%s was prepared, and %s created", prepared, rec.ID)
	}
	full := errors.New("the disk is full")
	req = request("two")
	req.Prepare = func(string) error { return full }
	if _, err := s.Create(t.Context(), req); !errors.Is(err, full) {
		t.Errorf("Create = %v, want %v", err, full)
	}
	create(t, s, request("two")) // the name is free
}

func TestCreateWhoseAnswerIsLostLeavesNothing(t *testing.T) {
	b := newBench(t)
	s, err := runtime.Open(t.Context(), b.dir, vanishing{b.engine}, b.options)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Create(t.Context(), request("lost")); !errors.Is(err, context.Canceled) {
		t.Errorf("Create = %v, want canceled", err)
	}
	if list, err := b.engine.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("the engine still runs %d sandboxes, %v", len(list), err)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
}

// slow is an engine that gets a deletion before it has begun the creation, whose context has ended.
type slow struct {
	*runtimetest.Engine

	asked chan struct{} // closed when it is asked to create
	begin chan struct{} // closed by the test: it begins
	made  chan struct{} // closed when it has created
}

func (e *slow) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return e.late(ctx, spec, control, e.Engine.Create)
}

func (e *slow) late(ctx context.Context, spec *runtime.Spec, control *os.File,
	run func(context.Context, *runtime.Spec, *os.File) (*runtime.Started, error),
) (*runtime.Started, error) {
	fd, err := unix.FcntlInt(control.Fd(), unix.F_DUPFD_CLOEXEC, 3) // as it travels
	if err != nil {
		return nil, err
	}
	own := os.NewFile(uintptr(fd), "control")
	close(e.asked)
	made := make(chan *runtime.Started, 1)
	go func() {
		defer close(e.made)
		defer own.Close()
		<-e.begin
		if st, err := run(context.WithoutCancel(ctx), spec, own); err == nil {
			made <- st
		}
		close(made)
	}()
	select {
	case st := <-made:
		return st, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// A client that hangs up before the engine has begun must not get a sandbox either.
func TestCreateThatBeginsLateLeavesNothing(t *testing.T) {
	b := newBench(t)
	e := &slow{Engine: b.engine, asked: make(chan struct{}), begin: make(chan struct{}), made: make(chan struct{})}
	s, err := runtime.Open(t.Context(), b.dir, e, b.options)
	if err != nil {
		t.Fatal(err)
	}
	ctx, hangUp := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() {
		_, err := s.Create(ctx, request("late"))
		answer <- err
	}()
	<-e.asked
	hangUp()
	select {
	case err := <-answer:
		answer <- err
	case <-time.After(50 * time.Millisecond): // it waits, as it should
	}
	close(e.begin)
	<-e.made
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Errorf("Create = %v, want canceled", err)
	}
	if list, err := b.engine.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("the engine still runs %d sandboxes, %v", len(list), err)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
}

// A reader of a sandbox's directories learns when their removal begins, in every state.
func TestReadersLearnOfADeletion(t *testing.T) {
	s := newBench(t).open(t)
	rec := create(t, s, request(""))
	_, doomed, err := s.Read(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Kill(t.Context(), rec.ID, "by the test"); err != nil {
		t.Fatal(err)
	}
	got, ended, err := s.Read(rec.Name)
	if err != nil || got.State != api.StateStopped {
		t.Fatalf("ended: %v, %v", got.State, err)
	}
	select {
	case <-doomed:
		t.Error("an end is taken for a deletion")
	default:
	}
	if err := s.Delete(t.Context(), rec.ID); err != nil {
		t.Fatal(err)
	}
	<-doomed
	<-ended
	if _, _, err := s.Read(rec.ID); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("deleted: %v", err)
	}
}
