package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// park puts n sandboxes into the pool "host" and returns their ids.
func park(t *testing.T, b *bench, s *runtime.Supervisor, n int) []string {
	t.Helper()
	before := b.engine.IDs()
	for range n {
		req := request("")
		req.ImageDigest = "sha256:11"
		req.Defaults = api.Limits{Pids: 512, Nofile: 1024}
		if err := s.Park(t.Context(), "host", req); err != nil {
			t.Fatal(err)
		}
	}
	return slices.DeleteFunc(b.engine.IDs(), func(id string) bool { return slices.Contains(before, id) })
}

// fitting returns a request that fits the sandboxes of park.
func fitting(name string) runtime.Request {
	req := request(name)
	req.ImageDigest = "sha256:11"
	req.Defaults = api.Limits{Pids: 512, Nofile: 1024}
	return req
}

func poolState(t *testing.T, s *runtime.Supervisor, ready int, hits, misses int64) {
	t.Helper()
	if got, want := s.PoolState("host"), (runtime.PoolState{Ready: ready, Hits: hits, Misses: misses}); got != want {
		t.Errorf("pool: %+v, want %+v", got, want)
	}
}

func TestParkedSandboxBecomesTheOneAskedFor(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	parked := park(t, b, s, 1)[0]
	if list := s.List(runtime.Filter{}); len(list) != 0 || s.Count() != 0 {
		t.Errorf("a warm sandbox is listed: %v", list)
	}
	if _, err := s.Get(parked); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("get a warm sandbox: %v", err)
	}
	if err := s.Delete(t.Context(), parked); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("delete a warm sandbox: %v", err)
	}

	began := b.clock.Now()
	req := fitting("mine")
	req.Env, req.Labels, req.User = []string{"A=1"}, map[string]string{"k": "v"}, "nobody"
	req.Limits = api.Limits{Memory: 64 << 20}
	req.Timeout = 5 * time.Minute
	rec := create(t, s, req)
	if rec.ID != parked {
		t.Fatalf("it is %s, parked was %s", rec.ID, parked)
	}
	if rec.State != api.StateRunning || !rec.CreatedAt.Equal(began) || rec.Name != "mine" || rec.User != "nobody" ||
		!slices.Equal(rec.Env, req.Env) || rec.Labels["k"] != "v" || rec.Limits.Memory != 64<<20 || rec.Limits.Pids != 512 ||
		rec.Enforced.Seccomp != "default" {
		t.Errorf("record: %+v", rec)
	}
	spec := b.engine.Spec(parked)
	if spec.Hostname != "mine" || spec.Limits.Memory != 64<<20 || !spec.Deadline.Equal(rec.Deadline) {
		t.Errorf("the engine holds hostname %q, limits %+v, deadline %s; the record says %+v, %s", spec.Hostname, spec.Limits, spec.Deadline, rec.Limits, rec.Deadline)
	}
	poolState(t, s, 0, 1, 0)
	if got, err := s.Get("mine"); err != nil || got.ID != parked {
		t.Errorf("get: %+v, %v", got, err)
	}
	lease, err := s.Begin("mine")
	if err != nil {
		t.Fatal(err)
	}
	lease.End()

	// Its record is as good as any: the next daemon adopts it.
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if got, err := s.Get("mine"); err != nil || got.ID != parked || got.State != api.StateRunning {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
	if err := s.Delete(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	if ids := b.engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
}

// No two creations get one sandbox, in any order, and whether or not there is one for each.
func TestParkedSandboxIsClaimedOnce(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	park(t, b, s, 10)
	var mu sync.Mutex
	seen := make(map[string]int)
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			rec, err := s.Create(t.Context(), fitting(fmt.Sprintf("s%d", i)))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			seen[rec.ID]++
			mu.Unlock()
			if spec := b.engine.Spec(rec.ID); spec.Hostname != rec.Name {
				t.Errorf("%s calls itself %s", rec.Name, spec.Hostname)
			}
		})
	}
	wg.Wait()
	if len(seen) != 30 || len(b.engine.IDs()) != 30 {
		t.Errorf("%d sandboxes for 30 creations, %d in the engine", len(seen), len(b.engine.IDs()))
	}
	poolState(t, s, 0, 10, 20)
}

func TestOnlyWhatFitsIsClaimed(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	parked := park(t, b, s, 1)[0]
	for name, change := range map[string]func(*runtime.Request){
		"nofile":  func(r *runtime.Request) { r.Limits.Nofile = 64 },
		"profile": func(r *runtime.Request) { r.Profile.Name = "hardened" },
		"rootfs":  func(r *runtime.Request) { r.Rootfs = rootfs.Source{Layers: []string{"sha256:01"}} },
		"digest":  func(r *runtime.Request) { r.ImageDigest = "sha256:12" },

		"read-only":   func(r *runtime.Request) { r.ReadOnly = true },
		"tmpfs":       func(r *runtime.Request) { r.Tmpfs = []api.Scratch{{Path: "/t", Size: 4096}} },
		"shm-size":    func(r *runtime.Request) { r.ShmSize = 4096 },
		"hosts":       func(r *runtime.Request) { r.Hosts = []api.HostAddress{{Name: "db", Address: "10.0.0.2"}} },
		"cap-drop":    func(r *runtime.Request) { r.CapDrop = []string{"ALL"} },
		"stop-signal": func(r *runtime.Request) { r.StopSignal = "SIGQUIT" },
	} {
		req := fitting(name)
		change(&req)
		if rec := create(t, s, req); rec.ID == parked {
			t.Errorf("another %s was ignored", name)
		}
	}
	ephemeral := fitting("ephemeral")
	ephemeral.Ephemeral = true
	if rec := create(t, s, ephemeral); rec.ID == parked {
		t.Error("a build took a warm sandbox")
	}
	poolState(t, s, 1, 0, 8) // of the same image and profile
	if rec := create(t, s, fitting("last")); rec.ID != parked {
		t.Error("what fits was not claimed")
	}
}

// A change that the warm sandbox refuses fails, or succeeds, as it does without a pool.
func TestRefusedClaimIsMadeAnew(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	parked := park(t, b, s, 1)[0]
	b.engine.UpdateError = func(*runtime.Change) error { return fmt.Errorf("memory: %w", runtime.ErrUnenforceable) }
	rec := create(t, s, fitting("mine"))
	if rec.ID == parked || !slices.Equal(b.engine.IDs(), []string{rec.ID}) {
		t.Errorf("created %s, parked was %s, the engine has %v", rec.ID, parked, b.engine.IDs())
	}
	poolState(t, s, 0, 0, 1)

	park(t, b, s, 1)
	b.engine.CreateError = func(*runtime.Spec) error { return fmt.Errorf("memory: %w", runtime.ErrUnenforceable) }
	if _, err := s.Create(t.Context(), fitting("other")); !errors.Is(err, runtime.ErrUnenforceable) {
		t.Errorf("create: %v, want ErrUnenforceable", err)
	}
	if _, err := s.Get("other"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("after a refused creation: %v", err)
	}
	if ids := b.engine.IDs(); !slices.Equal(ids, []string{rec.ID}) {
		t.Errorf("left: %v", ids)
	}
}

func TestEndedParkedSandboxIsRemoved(t *testing.T) {
	b := newBench(t)
	changed := make(chan struct{}, 10)
	b.options.PoolChanged = func() { changed <- struct{}{} }
	s := b.open(t)
	id := park(t, b, s, 1)[0]
	if err := b.engine.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(patience):
		t.Fatal("nobody was told")
	}
	poolState(t, s, 0, 0, 0)
	if rec := create(t, s, fitting("mine")); rec.ID == id {
		t.Error("an ended sandbox was claimed")
	}
}

func TestParkedSandboxesEndWithTheirDaemonAndImage(t *testing.T) {
	b := newBench(t)
	b.options.MaxSandboxes = 3
	s := b.open(t)
	park(t, b, s, 3)
	if err := s.Park(t.Context(), "host", fitting("")); !errors.Is(err, runtime.ErrPoolFull) {
		t.Errorf("park beyond the limit: %v", err)
	}
	err := s.Unpark(t.Context(), func(pool, digest string, layers []string) bool {
		return pool == "host" && digest == "sha256:11" && slices.Contains(layers, "sha256:00")
	})
	if err != nil {
		t.Fatal(err)
	}
	if ids := b.engine.IDs(); len(ids) != 0 {
		t.Errorf("left of the image: %v", ids)
	}
	park(t, b, s, 2)
	// They are not in the way of those that are asked for.
	other := request("other")
	for i := range 3 {
		other.Name = fmt.Sprintf("other%d", i)
		create(t, s, other)
	}
	other.Name = "toomany"
	if _, err := s.Create(t.Context(), other); !errors.Is(err, runtime.ErrTooMany) {
		t.Errorf("create beyond the limit: %v", err)
	}
	if err := s.Close(context.WithoutCancel(t.Context()), true); err != nil {
		t.Fatal(err)
	}
	if ids := b.engine.IDs(); len(ids) != 3 {
		t.Errorf("of the daemon are left: %v, want the three that are kept", ids)
	}
}

// A sandbox that could not be deleted is still on record, although the record goes first.
func TestFailedDeletionIsOnRecord(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("mine"))
	b.engine.Crash()
	if err := s.Delete(t.Context(), "mine"); !errors.Is(err, runtime.ErrUnavailable) {
		t.Fatalf("delete: %v, want ErrUnavailable", err)
	}
	b.engine.Restart()
	if err := s.Close(context.WithoutCancel(t.Context()), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if got, err := s.Get(rec.ID); err != nil || got.State != api.StateStopped && got.State != api.StateLost || got.Reason == "" {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
	if err := s.Delete(t.Context(), rec.ID); err != nil {
		t.Error(err)
	}
}

// reluctant is an engine that fails to remove the sandboxes that it ends.
type reluctant struct {
	*runtimetest.Engine

	kills *sync.WaitGroup
	after *time.Duration // so that some ends are seen while the failure is dealt with
}

func (e reluctant) Delete(ctx context.Context, id string) error {
	*e.after += 50 * time.Microsecond
	late := time.After(*e.after)
	e.kills.Go(func() {
		<-late
		_ = e.Kill(context.WithoutCancel(ctx), id)
	})
	return errDisk
}

var errDisk = errors.New("disk is broken")

// The record says how the sandbox has ended, in every order of events. A sandbox that cannot be
// removed keeps no daemon from starting.
func TestFailedDeletionEndsTheSandbox(t *testing.T) {
	b := newBench(t)
	e := reluctant{b.engine, new(sync.WaitGroup), new(time.Duration)}
	s, err := runtime.Open(t.Context(), b.dir, e, b.options)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for range 60 {
		rec := create(t, s, request(""))
		ids = append(ids, rec.ID)
		if err := s.Delete(t.Context(), rec.ID); !errors.Is(err, errDisk) {
			t.Fatalf("delete: %v", err)
		}
		e.kills.Wait()
		waitEnded(t, s, rec.ID)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	for _, id := range ids {
		rec, err := s.Get(id)
		if err != nil || rec.State != api.StateStopped || !slices.Contains([]string{"its deletion had begun", "its init ended"}, rec.Reason) {
			t.Errorf("after a restart: %s %q, %v", rec.State, rec.Reason, err)
		}
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	// No supervisor knows these.
	for _, id := range []string{"unknown", "served"} {
		orphan, err := b.engine.Create(t.Context(), &runtime.Spec{ID: id}, openNull(t))
		if err != nil {
			t.Fatal(err)
		}
		defer orphan.Pidfd.Close()
	}
	for _, rec := range []runtime.Record{
		{Sandbox: api.Sandbox{ID: "served", State: api.StateRunning}, Ephemeral: true},
		{Sandbox: api.Sandbox{ID: "half", State: api.StateCreating}},
	} {
		if err := runtime.PutRecord(b.dir, &rec); err != nil {
			t.Fatal(err)
		}
	}
	if s, err = runtime.Open(t.Context(), b.dir, e, b.options); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
	e.kills.Wait()
}

// A pool that learns counts exactly the creations that it could have served, whether or not a
// sandbox was ready. Each ready sandbox still goes to one of them.
func TestPoolLearnsFromWhatIsAskedFor(t *testing.T) {
	b := newBench(t)
	var told atomic.Int64
	b.options.PoolChanged = func() { told.Add(1) }
	s := b.open(t)
	s.Learn("host", fitting(""))
	if st := s.PoolState("host"); st != (runtime.PoolState{}) {
		t.Errorf("before anything was asked for: %+v", st)
	}
	park(t, b, s, 2)
	s.Learn("host", fitting("")) // once more changes nothing
	seen := make(map[string]bool)
	for i := range 5 {
		req := fitting(fmt.Sprintf("s%d", i))
		req.Env, req.Command, req.Limits = []string{"A=1"}, []string{"true"}, api.Limits{Memory: 64 << 20}
		rec := create(t, s, req)
		if seen[rec.ID] {
			t.Errorf("%s was given twice", rec.ID)
		}
		seen[rec.ID] = true
	}
	if st := s.PoolState("host"); st.Wanted != 5 {
		t.Errorf("after a burst of five: %+v", st)
	}
	if told.Load() < 5 {
		t.Errorf("told of %d changes", told.Load())
	}
	for name, change := range map[string]func(*runtime.Request){
		"nofile":  func(r *runtime.Request) { r.Limits.Nofile = 64 },
		"profile": func(r *runtime.Request) { r.Profile.Name = "hardened" },
		"fork":    func(r *runtime.Request) { r.Rootfs = rootfs.Source{Layers: []string{"sha256:00", "sha256:01"}} },
		"image":   func(r *runtime.Request) { r.ImageDigest = "sha256:22" },
	} {
		req := fitting(name)
		change(&req)
		create(t, s, req)
	}
	if st := s.PoolState("host"); st.Hits != 2 || st.Ready != 0 || st.Wanted > 5 {
		t.Errorf("%+v, want two hits and no more than five wanted", st)
	}
}

// A claim tells whether programs that ran in the sandbox before it could tell the difference. The
// oldest sandbox is claimed first.
func TestClaimTellsOfDifferences(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*runtime.Request)
		equal  bool
	}{
		"nothing":     {func(*runtime.Request) {}, true},
		"labels":      {func(r *runtime.Request) { r.Labels = map[string]string{"a": "b"} }, true},
		"times":       {func(r *runtime.Request) { r.Timeout, r.IdleTimeout = time.Minute, time.Minute }, true},
		"command":     {func(r *runtime.Request) { r.Command = []string{"true"} }, true}, // which runs after the claim
		"name":        {func(r *runtime.Request) { r.Name = "mine" }, false},
		"hostname":    {func(r *runtime.Request) { r.Hostname = "mine" }, false},
		"environment": {func(r *runtime.Request) { r.Env = []string{"A=1"} }, false},
		"image's":     {func(r *runtime.Request) { r.ImageEnv = []string{"A=1"} }, false},
		"directory":   {func(r *runtime.Request) { r.Cwd = "/usr" }, false},
		"user":        {func(r *runtime.Request) { r.User = "nobody" }, false},
		"memory":      {func(r *runtime.Request) { r.Limits.Memory = 1 << 30 }, false},
		"defaults":    {func(r *runtime.Request) { r.Defaults.CPUs = 1 }, false},
		"rlimits":     {func(r *runtime.Request) { r.Rlimits = map[string]api.Rlimit{"core": {}} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			var told []string
			var atClaim runtime.Spec
			b.options.Claiming = func(id string, equal bool) {
				told, atClaim = append(told, fmt.Sprint(id, equal)), *b.engine.Spec(id)
			}
			s := b.open(t)
			first := park(t, b, s, 1)[0]
			warm, before := s.Warm("host"), *b.engine.Spec(first)
			park(t, b, s, 2)
			if all := s.Warm("host"); len(all) != 3 || all[0].Record.ID != first || !s.Exists(first) {
				t.Errorf("warm: %+v", all)
			}
			req := fitting("")
			tc.change(&req)
			rec := create(t, s, req)
			if want := []string{fmt.Sprint(first, tc.equal)}; rec.ID != first || !slices.Equal(told, want) {
				t.Errorf("claimed %s, told %q, want %q", rec.ID, told, want)
			}
			if !reflect.DeepEqual(atClaim, before) {
				t.Errorf("the engine has changed the sandbox before Claiming: %+v, before %+v", atClaim, before)
			}
			if parked := warm[0].Record; tc.equal && (rec.Name != parked.Name || b.engine.Spec(rec.ID).Hostname != parked.Name || rec.Limits != parked.Limits) {
				t.Errorf("the record is %+v, and was %+v", rec, parked)
			}
			if err := s.Delete(t.Context(), rec.ID); err != nil || s.Exists(rec.ID) {
				t.Errorf("deleted: %v", err)
			}
		})
	}
}

// The name of a parked sandbox is not reserved.
func TestNameOfParkedSandboxIsFree(t *testing.T) {
	b := newBench(t)
	told := true
	b.options.Claiming = func(_ string, equal bool) { told = equal }
	s := b.open(t)
	park(t, b, s, 1)
	name := s.Warm("host")[0].Record.Name
	other := request(name)
	other.ImageDigest = "sha256:22"
	create(t, s, other)
	rec := create(t, s, fitting(""))
	if rec.Name == name || b.engine.Spec(rec.ID).Hostname != rec.Name || told {
		t.Errorf("two sandboxes are %s: %+v, %t", name, rec, told)
	}
}
