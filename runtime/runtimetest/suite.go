package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// Fixture is an engine under test, and how to ask it for a sandbox.
type Fixture struct {
	Engine runtime.Engine
	// NewSpec returns a complete spec that the engine can start.
	NewSpec func(t *testing.T, id string) *runtime.Spec
}

const patience = time.Minute

// RunEngineSuite checks that an engine keeps the promises of [runtime.Engine]. NewFixture is called
// for each test and may register a cleanup.
func RunEngineSuite(t *testing.T, newFixture func(t *testing.T) Fixture) {
	t.Helper()
	tests := map[string]func(*testing.T, *suite){
		"CreatedSandboxIsListedAndRuns":          testCreatedIsListed,
		"ControlStaysTheCallers":                 testControlStaysTheCallers,
		"SecondCreateWithOneIDFails":             testCreateTwice,
		"CancelledCreateLeavesNothing":           testCreateCancelled,
		"BadIDIsRefused":                         testBadID,
		"DeleteEndsEverything":                   testDelete,
		"DeleteOfUnknownIsNotFound":              testDeleteUnknown,
		"ConcurrentDeletesAgree":                 testDeleteConcurrent,
		"CreateAfterDeleteBesideAnother":         testCreateAfterDelete,
		"KillLeavesTheRestToDelete":              testKill,
		"StatsAndOOMKills":                       testStats,
		"UpdateChangesWhatIsListed":              testUpdate,
		"RefusedUpdateChangesNothing":            testUpdateRefused,
		"UpdatesAndDeleteAtOnce":                 testUpdateConcurrent,
		"EndedSandboxIsStartedAgain":             testStart,
		"StartOfWhatCannotBeStarted":             testStartRefused,
		"NetworkIsSharedWhileItsOwnerRuns":       testJoin,
		"StartsAndDeleteAtOnce":                  testStartConcurrent,
		"StopLeavesTheRestToDelete":              testStop,
		"PausedIsListedAsPaused":                 testPause,
		"PausesAndEndAtOnce":                     testPauseConcurrent,
		"IDMayBeUsedAgainAfterDelete":            testReuse,
		"ManySandboxesAtOnce":                    testMany,
		"QuestionsAboutUnknownSandboxesNotFound": testUnknown,
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test(t, &suite{Fixture: newFixture(t), dir: t.TempDir()})
		})
	}
}

type suite struct {
	Fixture
	dir string
}

// control makes a listening socket as the supervisor does.
func (s *suite) control(t *testing.T, id string) *os.File {
	t.Helper()
	dir, err := os.Open(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	f, err := unixmsg.Listen(dir, id, 16)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // closed by most tests
	return f
}

// connect reports whether a process listens on the socket of id.
func (s *suite) connect(t *testing.T, id string) error {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was sent
	dir, err := os.Open(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	return unix.Connect(fd, &unix.SockaddrUnix{Name: unixmsg.ShortName(dir, id)})
}

func (s *suite) create(t *testing.T, id string) *runtime.Started {
	t.Helper()
	control := s.control(t, id)
	st, err := s.Engine.Create(t.Context(), s.NewSpec(t, id), control)
	if err != nil {
		t.Fatalf("create %s: %v", id, err)
	}
	_ = control.Close() // the engine has its own by now
	t.Cleanup(func() {
		_ = st.Pidfd.Close()                                        // never read
		_ = s.Engine.Delete(context.WithoutCancel(t.Context()), id) // most tests have done it
	})
	return st
}

func (s *suite) list(t *testing.T) []string {
	t.Helper()
	list, err := s.Engine.List(t.Context())
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	var ids []string
	for _, st := range list {
		ids = append(ids, st.ID)
		if hasEnded(t, st.Pidfd, 0) {
			t.Errorf("%s is listed, but its pidfd says that it has ended", st.ID)
		}
		_ = st.Pidfd.Close() // never read
	}
	slices.Sort(ids)
	return ids
}

func hasEnded(t *testing.T, pidfd *os.File, wait time.Duration) bool {
	t.Helper()
	deadline := time.Now().Add(wait)
	for {
		left := max(0, time.Until(deadline))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatalf("poll pidfd: %v", err)
		}
		return n > 0
	}
}

func testCreatedIsListed(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "listed1")
	if st.ID != "listed1" {
		t.Errorf("id = %q", st.ID)
	}
	if !st.Enforced.NoNewPrivs || st.Enforced.Seccomp == "" || st.Enforced.IDs == "" || st.Enforced.Memory == "" || st.Enforced.Pids == "" {
		t.Errorf("enforced leaves something unsaid: %+v", st.Enforced)
	}
	if hasEnded(t, st.Pidfd, 0) {
		t.Error("ended at once")
	}
	if got := s.list(t); !slices.Contains(got, "listed1") {
		t.Errorf("list = %v", got)
	}
}

func testControlStaysTheCallers(t *testing.T, s *suite) {
	t.Helper()
	control := s.control(t, "control1")
	st, err := s.Engine.Create(t.Context(), s.NewSpec(t, "control1"), control)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Pidfd.Close()
	if err := control.Close(); err != nil {
		t.Errorf("control was closed by the engine: %v", err)
	}
	if err := s.connect(t, "control1"); err != nil {
		t.Errorf("no process listens after the caller closed its copy: %v", err)
	}
	if err := s.Engine.Delete(t.Context(), "control1"); err != nil {
		t.Fatal(err)
	}
	// A program that is just being started, by the engine or another test, has a copy of each of our
	// descriptors until it is executed.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for hung := time.Now().Add(patience); ; <-tick.C {
		switch err := s.connect(t, "control1"); {
		case errors.Is(err, unix.ECONNREFUSED):
			return
		case time.Now().After(hung):
			t.Fatalf("connect after delete: %v, want ECONNREFUSED", err)
		}
	}
}

func testCreateTwice(t *testing.T, s *suite) {
	t.Helper()
	s.create(t, "twice1")
	control := s.control(t, "twice1b")
	_, err := s.Engine.Create(t.Context(), s.NewSpec(t, "twice1"), control)
	if !errors.Is(err, runtime.ErrExists) {
		t.Fatalf("second create: %v, want ErrExists", err)
	}
	if got := s.list(t); !slices.Contains(got, "twice1") {
		t.Errorf("the first is gone: list = %v", got)
	}
}

func testCreateCancelled(t *testing.T, s *suite) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Engine.Create(ctx, s.NewSpec(t, "cancel1"), s.control(t, "cancel1")); err == nil {
		t.Fatal("created although cancelled")
	}
	if got := s.list(t); slices.Contains(got, "cancel1") {
		t.Errorf("list = %v", got)
	}
	if err := s.Engine.Delete(t.Context(), "cancel1"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("delete: %v, want ErrNotFound", err)
	}
}

func testBadID(t *testing.T, s *suite) {
	t.Helper()
	for i, id := range []string{"", "a", "UPPER", "../../etc", "a/b/c", "with space", "nul\x00nul", "abcdefghijklmnopqrstuvwxyz0123456"} {
		if _, err := s.Engine.Create(t.Context(), s.NewSpec(t, id), s.control(t, fmt.Sprint("bad", i))); err == nil {
			t.Errorf("id %q was accepted", id)
		}
	}
}

func testDelete(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "delete1")
	if err := s.Engine.Delete(t.Context(), "delete1"); err != nil {
		t.Fatalf("delete: %v", err)
	}
	if !hasEnded(t, st.Pidfd, 0) {
		t.Error("delete returned before the sandbox had ended")
	}
	if got := s.list(t); slices.Contains(got, "delete1") {
		t.Errorf("list = %v", got)
	}
	if err := s.Engine.Delete(t.Context(), "delete1"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("second delete: %v, want ErrNotFound", err)
	}
}

func testDeleteUnknown(t *testing.T, s *suite) {
	t.Helper()
	if err := s.Engine.Delete(t.Context(), "unknown1"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("delete: %v, want ErrNotFound", err)
	}
}

func testDeleteConcurrent(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "race1")
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = s.Engine.Delete(t.Context(), "race1") })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil && !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("delete: %v", err)
		}
	}
	if !hasEnded(t, st.Pidfd, 0) {
		t.Error("not ended")
	}
}

// After its own deletion, a caller may use an id again although another caller's deletion is under
// way.
func testCreateAfterDelete(t *testing.T, s *suite) {
	t.Helper()
	for range 20 {
		s.create(t, "again1")
		var wg sync.WaitGroup
		deleted := make(chan error)
		for range 2 {
			wg.Go(func() { deleted <- s.Engine.Delete(t.Context(), "again1") })
		}
		if err := <-deleted; err != nil && !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("delete: %v", err)
		}
		done := make(chan error)
		go func() { done <- <-deleted }()
		if err := os.Remove(filepath.Join(s.dir, "again1")); err != nil {
			t.Fatal(err)
		}
		s.create(t, "again1")
		if err := <-done; err != nil && !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("delete: %v", err)
		}
		wg.Wait()
		if err := s.Engine.Delete(t.Context(), "again1"); err != nil && !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("delete: %v", err)
		}
		if err := os.Remove(filepath.Join(s.dir, "again1")); err != nil {
			t.Fatal(err)
		}
	}
}

func testKill(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "kill1")
	if err := s.Engine.Kill(t.Context(), "kill1"); err != nil {
		t.Fatalf("kill: %v", err)
	}
	if !hasEnded(t, st.Pidfd, patience) {
		t.Fatal("not ended after kill")
	}
	if got := s.list(t); slices.Contains(got, "kill1") {
		t.Errorf("a killed sandbox is listed as running: %v", got)
	}
	if err := s.Engine.Kill(t.Context(), "kill1"); err != nil && !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("second kill: %v", err)
	}
	if left, err := s.Engine.Leftovers(t.Context()); err != nil || !slices.Equal(left, []string{"kill1"}) {
		t.Errorf("left after kill: %v, %v", left, err)
	}
	if err := s.Engine.Delete(t.Context(), "kill1"); err != nil {
		t.Errorf("delete after kill: %v", err)
	}
	if left, err := s.Engine.Leftovers(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left after delete: %v, %v", left, err)
	}
}

func testStats(t *testing.T, s *suite) {
	t.Helper()
	s.create(t, "stats1")
	first, err := s.Engine.Stats(t.Context(), "stats1")
	if err != nil {
		t.Fatalf("stats: %v", err)
	}
	if first.WallMS <= 0 || first.CPU != nil && first.CPU.UsageMS != nil && *first.CPU.UsageMS < 0 ||
		first.Memory != nil && first.Memory.Peak != nil && *first.Memory.Peak < 0 {
		t.Errorf("stats = %+v", first)
	}
	if n, err := s.Engine.OOMKills(t.Context(), "stats1"); err != nil || n != 0 {
		t.Errorf("oom kills = %d, %v", n, err)
	}
	before := time.Now()
	st, err := s.Engine.Stats(t.Context(), "stats1")
	if err != nil || st.WallMS < first.WallMS || st.At.Before(before.Add(-time.Second)) {
		t.Errorf("stats = %+v, %v", st, err)
	}
}

// find returns the engine's entry of one sandbox.
func (s *suite) find(t *testing.T, id string) *runtime.Started {
	t.Helper()
	list, err := s.Engine.List(t.Context())
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	var found *runtime.Started
	for _, st := range list {
		_ = st.Pidfd.Close() // never read
		if st.ID == id {
			found = st
		}
	}
	if found == nil {
		t.Fatalf("%s is not listed", id)
	}
	return found
}

// The list shows the values in force: the successor of a daemon that was killed during an update
// reads them there. The tests of the real engine show that a deadline ends the sandbox.
func testUpdate(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "update1")
	spec := s.NewSpec(t, "update1")
	if got := s.find(t, "update1"); got.Limits != st.Limits || st.Limits.Pids != spec.Limits.Pids || got.Deadline.IsZero() {
		t.Errorf("listed: %+v, created: %+v", got, st)
	}
	deadline := time.Now().Add(2 * time.Hour).UTC()
	if _, err := s.Engine.Update(t.Context(), "update1", &runtime.Change{Deadline: deadline}); err != nil {
		t.Fatalf("change the deadline: %v", err)
	}
	if got := s.find(t, "update1"); !got.Deadline.Equal(deadline) || got.Limits != st.Limits {
		t.Errorf("after a change of the deadline: %+v", got)
	}
	// A hostname is for the claim of a warm sandbox, and changes nothing else that can be seen from
	// here.
	hostname := &runtime.Change{Hostname: "claimed", Deadline: deadline}
	if _, err := s.Engine.Update(t.Context(), "update1", hostname); err != nil {
		t.Fatalf("change the hostname: %v", err)
	}
	if stats, err := s.Engine.Stats(t.Context(), "update1"); err != nil || stats.WallMS > 60_000 {
		t.Errorf("after a change of the hostname: %+v, %v", stats, err)
	}
	// These are wishes: an engine that cannot hold them says so in enforced.
	limits := st.Limits
	limits.Memory, limits.CPUs = 64<<20, 0.5
	enforced, err := s.Engine.Update(t.Context(), "update1", &runtime.Change{Limits: &limits})
	if err != nil {
		t.Fatalf("change limits: %v", err)
	}
	if enforced.Memory == "" || enforced.CPU == "" || enforced.IO == "" || enforced.CPUSet == "" || !enforced.NoNewPrivs {
		t.Errorf("enforced leaves something unsaid: %+v", enforced)
	}
	if got := s.find(t, "update1"); got.Limits != limits || !got.Deadline.Equal(deadline) {
		t.Errorf("after a change of limits: %+v", got)
	}
}

func testUpdateRefused(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "update2")
	limits := st.Limits
	limits.Memory, limits.Nofile = 64<<20, st.Limits.Nofile+1
	change := &runtime.Change{Limits: &limits, Explicit: limits, Deadline: time.Now().Add(3 * time.Hour)}
	if _, err := s.Engine.Update(t.Context(), "update2", change); !errors.Is(err, runtime.ErrUnenforceable) {
		t.Errorf("update: %v, want ErrUnenforceable", err)
	}
	if got := s.find(t, "update2"); got.Limits != st.Limits || !got.Deadline.Equal(st.Deadline) {
		t.Errorf("after a refused update: %+v, before: %+v", got, st)
	}
	change.Hostname = "refused"
	if _, err := s.Engine.Update(t.Context(), "update2", change); !errors.Is(err, runtime.ErrUnenforceable) {
		t.Errorf("update with a hostname: %v, want ErrUnenforceable", err)
	}
	if _, err := s.Engine.Update(t.Context(), "nobody", &runtime.Change{}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("update of an unknown one: %v, want ErrNotFound", err)
	}
}

func testUpdateConcurrent(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "update3")
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			if i == 4 {
				errs[i] = s.Engine.Delete(t.Context(), "update3")
				return
			}
			limits := st.Limits
			limits.CPUs = float64(i + 1)
			_, errs[i] = s.Engine.Update(t.Context(), "update3", &runtime.Change{Limits: &limits, Deadline: time.Now().Add(time.Hour)})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil && (i == 4 || !errors.Is(err, runtime.ErrNotFound)) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if got := s.list(t); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}

func testUnknown(t *testing.T, s *suite) {
	t.Helper()
	if _, err := s.Engine.Stats(t.Context(), "unknown2"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("stats: %v, want ErrNotFound", err)
	}
	if _, err := s.Engine.OOMKills(t.Context(), "unknown2"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("oom kills: %v, want ErrNotFound", err)
	}
	if err := s.Engine.Kill(t.Context(), "unknown2"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("kill: %v, want ErrNotFound", err)
	}
}

func testReuse(t *testing.T, s *suite) {
	t.Helper()
	for range 3 {
		s.create(t, "reuse1")
		if err := s.Engine.Delete(t.Context(), "reuse1"); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(s.dir, "reuse1")); err != nil {
			t.Fatal(err)
		}
	}
}

func testMany(t *testing.T, s *suite) {
	t.Helper()
	const n = 8
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		id := fmt.Sprintf("many%d", i)
		spec, control := s.NewSpec(t, id), s.control(t, id)
		wg.Go(func() {
			st, err := s.Engine.Create(t.Context(), spec, control)
			if err != nil {
				errs[i] = err
				return
			}
			errs[i] = errors.Join(st.Pidfd.Close(), control.Close(), s.Engine.Delete(t.Context(), id))
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}

// startAgain is create for a sandbox that has ended.
func (s *suite) startAgain(t *testing.T, id string) (*runtime.Started, error) {
	t.Helper()
	if err := os.Remove(filepath.Join(s.dir, id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	control := s.control(t, id)
	st, err := s.Engine.Start(t.Context(), s.NewSpec(t, id), control)
	_ = control.Close() // the engine has its own by now
	if err == nil {
		t.Cleanup(func() { _ = st.Pidfd.Close() }) // never read
	}
	return st, err
}

func testStart(t *testing.T, s *suite) {
	t.Helper()
	first := s.create(t, "again1")
	for i := range 3 {
		if err := s.Engine.Kill(t.Context(), "again1"); err != nil {
			t.Fatalf("kill: %v", err)
		}
		st, err := s.startAgain(t, "again1")
		if err != nil {
			t.Fatalf("start %d: %v", i, err)
		}
		if st.ID != "again1" || st.Limits.Pids != first.Limits.Pids || !st.Enforced.NoNewPrivs || hasEnded(t, st.Pidfd, 0) {
			t.Errorf("started: %+v", st)
		}
		if got := s.list(t); !slices.Equal(got, []string{"again1"}) {
			t.Errorf("list = %v", got)
		}
		if left, err := s.Engine.Leftovers(t.Context()); err != nil || len(left) > 0 {
			t.Errorf("left of one that runs: %v, %v", left, err)
		}
		if err := s.connect(t, "again1"); err != nil {
			t.Errorf("no process listens: %v", err)
		}
	}
	if !hasEnded(t, first.Pidfd, 0) {
		t.Error("the first pidfd says that it runs")
	}
	if err := s.Engine.Delete(t.Context(), "again1"); err != nil {
		t.Fatal(err)
	}
	if got := s.list(t); len(got) != 0 {
		t.Errorf("after delete: %v", got)
	}
}

func testStartRefused(t *testing.T, s *suite) {
	t.Helper()
	if _, err := s.startAgain(t, "never1"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("start of what never was: %v, want ErrNotFound", err)
	}
	if err := s.Engine.Delete(t.Context(), "never1"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("it has left something: %v", err)
	}
	st := s.create(t, "runs1")
	if _, err := s.startAgain(t, "runs1"); !errors.Is(err, runtime.ErrExists) {
		t.Errorf("start of what runs: %v, want ErrExists", err)
	}
	if hasEnded(t, st.Pidfd, 0) {
		t.Error("it has ended of that")
	}
	if err := s.Engine.Kill(t.Context(), "runs1"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Engine.Start(ctx, s.NewSpec(t, "runs1"), s.control(t, "cancelled")); err == nil {
		t.Error("started although cancelled")
	}
	spec := s.NewSpec(t, "runs1")
	spec.Rootfs.Layers = append(slices.Clone(spec.Rootfs.Layers), "sha256:"+strings.Repeat("0", 64))
	if st, err := s.Engine.Start(t.Context(), spec, s.control(t, "nolayer")); err == nil { // an engine without files does not mind
		_ = st.Pidfd.Close() // never read
		if err := s.Engine.Kill(t.Context(), "runs1"); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := s.Engine.Leftovers(t.Context()); err != nil || !slices.Equal(left, []string{"runs1"}) {
		t.Errorf("left after a start that failed: %v, %v", left, err)
	}
	if _, err := s.startAgain(t, "runs1"); err != nil {
		t.Errorf("start after one that failed: %v", err)
	}
}

func testJoin(t *testing.T, s *suite) {
	t.Helper()
	join := func(id, owner string) (*runtime.Started, error) {
		spec, control := s.NewSpec(t, id), s.control(t, id)
		defer control.Close()
		spec.Join = owner
		return s.Engine.Create(t.Context(), spec, control)
	}
	for id, owner := range map[string]string{"join0": "nobody", "join1": "join1"} {
		if _, err := join(id, owner); !errors.Is(err, runtime.ErrNoOwner) {
			t.Errorf("of %s: %v, want ErrNoOwner", owner, err)
		}
	}
	owner := s.create(t, "join2")
	st, err := join("join3", "join2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Pidfd.Close() })
	if err := s.Engine.Kill(t.Context(), "join2"); err != nil {
		t.Fatal(err)
	}
	if !hasEnded(t, owner.Pidfd, patience) || hasEnded(t, st.Pidfd, 0) {
		t.Error("the owner of a network has not ended, or not alone")
	}
	if _, err := join("join4", "join2"); !errors.Is(err, runtime.ErrNoOwner) {
		t.Errorf("of one that has ended: %v, want ErrNoOwner", err)
	}
	if err := s.Engine.Delete(t.Context(), "join3"); err != nil {
		t.Error(err)
	}
}

func testStartConcurrent(t *testing.T, s *suite) {
	t.Helper()
	for range 5 {
		s.create(t, "race2")
		if err := s.Engine.Kill(t.Context(), "race2"); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for i := range errs {
			control, spec := s.control(t, fmt.Sprint("race2-", i)), s.NewSpec(t, "race2")
			wg.Go(func() {
				if i == 3 {
					errs[i] = s.Engine.Delete(t.Context(), "race2")
					return
				}
				st, err := s.Engine.Start(t.Context(), spec, control)
				if errs[i] = err; err == nil {
					_ = st.Pidfd.Close() // never read
				}
			})
		}
		wg.Wait()
		for i, err := range errs {
			if err != nil && (i == 3 || !errors.Is(err, runtime.ErrNotFound) && !errors.Is(err, runtime.ErrExists)) {
				t.Errorf("call %d: %v", i, err)
			}
		}
		if err := s.Engine.Delete(t.Context(), "race2"); err != nil && !errors.Is(err, runtime.ErrNotFound) {
			t.Error(err)
		}
		if got := s.list(t); len(got) != 0 {
			t.Errorf("left: %v", got)
		}
		if left, err := s.Engine.Leftovers(t.Context()); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		for _, name := range []string{"race2", "race2-0", "race2-1", "race2-2", "race2-3"} {
			if err := os.Remove(filepath.Join(s.dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func testStop(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "stop1")
	began := time.Now()
	if err := s.Engine.Stop(t.Context(), "stop1", runtime.Ask{Grace: time.Minute}); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("nothing ran in it, and to stop it took %s", took)
	}
	if !hasEnded(t, st.Pidfd, 0) {
		t.Error("stop returned before the sandbox had ended")
	}
	if left, err := s.Engine.Leftovers(t.Context()); err != nil || !slices.Equal(left, []string{"stop1"}) {
		t.Errorf("left after stop: %v, %v", left, err)
	}
	if err := s.Engine.Stop(t.Context(), "stop1", runtime.Ask{}); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if err := s.Engine.Stop(t.Context(), "never2", runtime.Ask{}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("stop of what never was: %v, want ErrNotFound", err)
	}
	if err := s.Engine.Delete(t.Context(), "stop1"); err != nil {
		t.Error(err)
	}
}

func testPause(t *testing.T, s *suite) {
	t.Helper()
	st := s.create(t, "pause1")
	for range 2 {
		for range 2 { // the second time nothing changes
			if err := s.Engine.Pause(t.Context(), "pause1"); err != nil {
				t.Fatalf("pause: %v", err)
			}
			if !s.find(t, "pause1").Paused {
				t.Error("it is not listed as paused")
			}
		}
		for range 2 {
			if err := s.Engine.Resume(t.Context(), "pause1"); err != nil {
				t.Fatalf("resume: %v", err)
			}
			if s.find(t, "pause1").Paused {
				t.Error("it is listed as paused")
			}
		}
	}
	if hasEnded(t, st.Pidfd, 0) {
		t.Error("it has ended of that")
	}
	// A paused sandbox can be stopped. After a new start it is neither paused nor frozen by the old
	// pause.
	for _, end := range []func(context.Context) error{
		func(ctx context.Context) error { return s.Engine.Stop(ctx, "pause1", runtime.Ask{Grace: time.Minute}) },
		func(ctx context.Context) error { return s.Engine.Kill(ctx, "pause1") },
	} {
		if err := s.Engine.Pause(t.Context(), "pause1"); err != nil {
			t.Fatalf("pause: %v", err)
		}
		if err := end(t.Context()); err != nil {
			t.Fatalf("end what is paused: %v", err)
		}
		if err := s.Engine.Pause(t.Context(), "pause1"); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("pause of what has ended: %v, want ErrNotFound", err)
		}
		if err := s.Engine.Resume(t.Context(), "pause1"); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("resume of what has ended: %v, want ErrNotFound", err)
		}
		if _, err := s.startAgain(t, "pause1"); err != nil {
			t.Fatalf("start: %v", err)
		}
		if s.find(t, "pause1").Paused {
			t.Error("what was started is listed as paused")
		}
	}
	if err := s.Engine.Pause(t.Context(), "pause1"); err != nil {
		t.Fatalf("pause: %v", err)
	}
	if err := s.Engine.Delete(t.Context(), "pause1"); err != nil {
		t.Errorf("delete what is paused: %v", err)
	}
	for _, f := range []func(context.Context, string) error{s.Engine.Pause, s.Engine.Resume} {
		if err := f(t.Context(), "pause1"); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("pause or resume of what was deleted: %v, want ErrNotFound", err)
		}
	}
}

func testPauseConcurrent(t *testing.T, s *suite) {
	t.Helper()
	s.create(t, "pause2")
	var wg sync.WaitGroup
	errs := make([]error, 9)
	for i := range errs {
		wg.Go(func() {
			switch {
			case i == 6:
				errs[i] = s.Engine.Delete(t.Context(), "pause2")
			case i%2 == 0:
				errs[i] = s.Engine.Pause(t.Context(), "pause2")
			default:
				errs[i] = s.Engine.Resume(t.Context(), "pause2")
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil && (i == 6 || !errors.Is(err, runtime.ErrNotFound)) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if got := s.list(t); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}
