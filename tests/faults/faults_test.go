package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// parts is how many daemons there are, each with its share of the rounds.
const parts = 4

// setting reads a number from the environment.
func setting(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// kill -9 of the daemon, of its launcher or of a sandbox's init at any instant of a mixed load.
// After each round nothing is left of sandboxes that are gone. Survivors answer, with every file
// and label that was acknowledged. Lost sandboxes say why, and deleted ones stay deleted.
// SANDBOXD_FAULT_SEED repeats the choices of a run, not its instants; SANDBOXD_FAULT_ROUNDS is the
// number of rounds.
func TestKilledAtAnyInstantNothingIsLostOrLeft(t *testing.T) {
	testenv.RequireUserNS(t)
	rounds, seed := setting(t, "SANDBOXD_FAULT_ROUNDS", uint64(testenv.Rounds(16, 208))), setting(t, "SANDBOXD_FAULT_SEED", rand.Uint64())
	t.Logf("SANDBOXD_FAULT_SEED=%d SANDBOXD_FAULT_ROUNDS=%d", seed, rounds)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "team/base:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	var mu sync.Mutex
	done, lived := map[string]int64{}, map[fault]int{}
	t.Run("parts", func(t *testing.T) {
		for part := range uint64(parts) {
			t.Run(fmt.Sprint(part), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(seed, part))
				w := begin(t, reference)
				var kinds []fault
				for round := range (rounds + parts - 1 - part) / parts {
					if len(kinds) == 0 { // each of them as often as the others
						for f := theDaemon; f < faults; f++ {
							kinds = append(kinds, f)
						}
						r.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
					}
					w.round(r, round, kinds[0])
					mu.Lock()
					lived[kinds[0]]++
					mu.Unlock()
					if kinds = kinds[1:]; t.Failed() {
						t.Fatalf("SANDBOXD_FAULT_SEED=%d: part %d failed in round %d", seed, part, round)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				for i := range operations {
					done[operations[i].name] += w.done[i].Load()
				}
			})
		}
	})
	t.Logf("rounds: %v; operations that were answered: %v", lived, done)
	if !testenv.Soaking() || t.Failed() {
		return
	}
	for _, o := range operations {
		if done[o.name] == 0 {
			t.Errorf("the load has never done %q", o.name)
		}
	}
}

// round sets users to work, kills something and checks the outcome.
func (w *world) round(r *rand.Rand, number uint64, f fault) {
	w.t.Helper()
	moment, after := time.Duration(r.Int64N(int64(400*time.Millisecond))), time.Duration(r.Int64N(int64(150*time.Millisecond)))
	w.struck.Store(int64(nothing))
	launcher := w.d.System(w.t).Launcher
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for n := range users {
		u := &user{w: w, n: n, r: rand.New(rand.NewPCG(r.Uint64(), uint64(n))), c: w.c}
		busy.Go(func() { u.work(stop) })
	}
	w.pause(moment)
	w.t.Logf("round %d: %s killed after %s", number, f, moment)
	w.d.Mark(w.t)
	w.strike(r, f, launcher)
	w.pause(after)
	close(stop)
	busy.Wait()
	if w.t.Failed() {
		return
	}
	if f.hitsDaemon() {
		w.d.Launch(w.t)
	}
	w.settle()
	ctx, cancel := context.WithTimeout(w.t.Context(), testenv.HungAfter)
	defer cancel()
	w.agree(f)
	if w.t.Failed() {
		return
	}
	w.trySnapshots()
	w.tryImages()
	w.clear()
	w.replenish(ctx)
	w.dropImages(ctx)
	for _, b := range w.all() {
		now, err := w.c.GetSandbox(ctx, b.id)
		if err != nil {
			w.t.Fatal(err)
		}
		s := &harness.Sandbox{Sandbox: *now}
		harness.Eventually(w.t, func() error {
			if pids := s.Processes(w.t); len(pids) != 1 {
				return fmt.Errorf("%s has processes %v after all of its execs have ended", b.name, pids)
			}
			return nil
		})
	}
	w.nothingLeft()
}

// pause waits for an instant to come, which is no event.
func (w *world) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-w.t.Context().Done():
	}
}

// strike kills.
func (w *world) strike(r *rand.Rand, f fault, launcher int) {
	w.t.Helper()
	victim, init := w.victim(r, f)
	if victim != nil {
		defer unix.Close(init)
	}
	for _, b := range w.all() {
		b.mu.Lock()
		b.held = f.hitsLauncher() && b.id != ""
		b.victim = b == victim
		b.mu.Unlock()
	}
	w.struck.Store(int64(f))
	if f.hitsDaemon() {
		w.d.Kill9(w.t)
	}
	if f.hitsLauncher() {
		if err := unix.Kill(launcher, unix.SIGKILL); err != nil {
			w.t.Fatalf("kill the launcher: %v", err)
		}
	}
	if victim != nil {
		// It may have been deleted meanwhile, and then the descriptor refers to no process.
		if err := unix.PidfdSendSignal(init, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			w.t.Fatalf("kill an init: %v", err)
		}
	}
}

// victim chooses a sandbox, and returns a pidfd of its init.
func (w *world) victim(r *rand.Rand, f fault) (*box, int) {
	w.t.Helper()
	for f.hitsInit() {
		b := w.some(r, true)
		s, err := w.c.GetSandbox(w.t.Context(), b.id)
		if err != nil && b.isDoomed() {
			continue
		}
		if err != nil {
			w.t.Fatal(err)
		}
		fd, err := unix.PidfdOpen(s.PID, 0)
		if err != nil {
			continue // it is being deleted
		}
		// Still of the same, or its pid may be another's.
		if again, err := w.c.GetSandbox(w.t.Context(), b.id); err == nil && again.PID == s.PID && !b.isDoomed() {
			return b, fd
		}
		_ = unix.Close(fd)
	}
	return nil, 0
}

// work does one operation after the other until it is told to stop or the daemon is gone.
func (u *user) work(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		i := choose(u.r)
		o := &operations[i]
		var b *box
		if !o.own {
			if b = u.w.some(u.r, !o.alone); b == nil {
				continue
			}
		}
		all, end := context.WithTimeout(u.w.t.Context(), testenv.HungAfter)
		ctx, cancel := u.dropped(all)
		err := o.do(ctx, u, b)
		hung, left := all.Err() != nil, context.Cause(ctx) == errDropped //nolint:errorlint // it is that very one
		cancel()
		end()
		if err == nil {
			u.w.done[i].Add(1)
			continue
		}
		if left && b != nil {
			b.mu.Lock()
			b.late = true
			b.mu.Unlock()
		}
		_, untrue := errors.AsType[wrong](err)
		if hung || untrue || !left && !u.w.excused(b, err) {
			what := "by no sandbox in particular"
			if b != nil {
				what = "in sandbox " + b.name
			}
			u.w.t.Errorf("%s %s, with %s killed: %v", o.name, what, fault(u.w.struck.Load()), describe(err))
			return
		}
		if p, ok := errors.AsType[*api.Problem](err); !ok || p.Code == api.CodeUnavailable {
			if !left {
				return // there is no daemon to ask
			}
		}
	}
}

func describe(err error) string {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return fmt.Sprintf("%s: %s", p.Code, p.Error())
	}
	return err.Error()
}

// excused reports whether an operation may have failed so.
func (w *world) excused(b *box, err error) bool {
	f := fault(w.struck.Load())
	if p, answered := errors.AsType[*api.Problem](err); answered && p.Code == api.CodeUnavailable {
		return f.hitsLauncher()
	}
	if !ended(err) {
		return f.hitsDaemon() && !errors.As(err, new(*api.Problem))
	}
	if b != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.doomed || b.victim {
			return true
		}
	}
	return f.hitsLauncher() || f.hitsDaemon() && !errors.As(err, new(*api.Problem))
}

// ended reports whether an error says that a sandbox has ended, before the request or during it.
// An answer of bytes breaks off.
func ended(err error) bool {
	p, ok := errors.AsType[*api.Problem](err)
	return ok && (p.Code == api.CodeGone || p.Code == api.CodeConflict || p.Code == api.CodeNotFound) || errors.Is(err, io.ErrUnexpectedEOF)
}

// agree waits until the daemon tells the truth about every sandbox, and asks those that run.
func (w *world) agree(f fault) {
	w.t.Helper()
	var said map[*box]api.Sandbox
	harness.Eventually(w.t, func() error {
		listed := map[string]api.Sandbox{}
		said = map[*box]api.Sandbox{}
		for _, s := range w.d.List(w.t) {
			listed[s.Name] = s
		}
		for _, b := range w.all() {
			s, there := listed[b.name]
			delete(listed, b.name)
			if err := b.agree(f, s, there); err != nil {
				return err
			}
			said[b] = s
		}
		for name := range listed {
			return fmt.Errorf("sandbox %s is listed, and nobody has asked for it", name)
		}
		return nil
	})
	var all sync.WaitGroup
	for b, s := range said {
		b.mu.Lock()
		answered := b.made
		b.id, b.deleted = s.ID, s.ID == ""
		b.mu.Unlock()
		if s.State == api.StateRunning {
			all.Go(func() {
				// An unanswered deletion may still go on in the launcher, and an unanswered creation is
				// undone. A client that came during the kill may have reached the old daemon.
				err := w.answers(b)
				if err != nil && ended(err) && (b.isDoomed() || !answered || f.hitsLauncher()) {
					return
				}
				if err != nil {
					w.t.Errorf("sandbox %s, which has survived: %v", b.name, err)
				}
			})
		}
	}
	all.Wait()
	for _, b := range w.all() {
		b.mu.Lock()
		id, dead := b.id, (b.victim || b.held) && !b.doomed
		b.mu.Unlock()
		if dead {
			_, _, _, err := execute(w.t.Context(), w.c, id, buffered, api.ExecRequest{Argv: []string{"true"}}, nil)
			if !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
				w.t.Errorf("an exec in sandbox %s, which has ended, is answered %v", b.name, err)
			}
		}
	}
}

// agree compares the daemon's answer about a sandbox with the facts that are known.
func (b *box) agree(f fault, s api.Sandbox, there bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	lives := s.State == api.StateRunning || s.State == api.StatePaused
	told := fmt.Sprintf("sandbox %s is told to be %s (%q)", b.name, s.State, s.Reason)
	if !there {
		if b.made && !b.doomed {
			return fmt.Errorf("sandbox %s was created, and is lost", b.name)
		}
		return nil
	}
	if b.deleted {
		return fmt.Errorf("%s after its deletion was answered", told)
	}
	if b.made && b.id != s.ID {
		return fmt.Errorf("sandbox %s was %s and is %s", b.name, b.id, s.ID)
	}
	switch {
	case s.State == api.StateCreating, lives != (s.PID > 0), lives != (s.Reason == ""):
		return errors.New(told)
	case b.doomed, !b.made:
		return nil // half unmade or half made: whatever it has come to
	case b.victim && f.hitsDaemon() && s.State == api.StateLost && strings.Contains(s.Reason, "while no daemon was running"):
	case b.victim: // without a daemon too: it may have taken so long to end that the next one saw it
		if s.State != api.StateStopped || s.Reason != "its init ended" {
			return fmt.Errorf("%s, and its init was killed", told)
		}
	case b.held:
		if s.State != api.StateLost || !strings.Contains(s.Reason, "the launcher that held it died") && !strings.Contains(s.Reason, "while no daemon was running") {
			return fmt.Errorf("%s, and its launcher was killed", told)
		}
	case f.hitsLauncher(): // created at that time, in the old one or the new one
	case s.State != api.StateRunning:
		return fmt.Errorf("%s, and nothing has happened to it", told)
	}
	return nil
}

// answers asks a sandbox that runs for all that it should have.
func (w *world) answers(b *box) error {
	ctx, cancel := context.WithTimeout(w.t.Context(), testenv.HungAfter)
	defer cancel()
	if err := echo(ctx, w.c, b.id, buffered, []byte(b.name), 7); err != nil {
		return err
	}
	if err := w.reattach(ctx, b); err != nil {
		return err
	}
	s, err := w.c.GetSandbox(ctx, b.id)
	if err != nil {
		return err
	}
	b.mu.Lock()
	for key, may := range b.may {
		if !strings.HasPrefix(key, "/") && !slices.Contains(may, s.Labels[key]) {
			err = fmt.Errorf("label %s is %q, not one of %q", key, s.Labels[key], may)
		}
	}
	b.mu.Unlock()
	if err != nil {
		return err
	}
	// Init may still be about to see that a daemon has gone, and to undo its unfinished requests.
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for patient := time.Now().Add(testenv.HungAfter); ; <-tick.C {
		files, err := w.filesOf(ctx, b.id)
		if _, partly := errors.AsType[unread](err); err != nil && !partly {
			return err
		}
		if err == nil {
			err = b.compare(files)
		}
		if err == nil {
			b.know(files, s.Labels)
			return nil
		}
		if time.Now().After(patient) {
			return err
		}
	}
}

// know notes the state of an idle sandbox: the next round relies on it.
func (b *box) know(files, labels map[string]string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key := range b.may {
		if strings.HasPrefix(key, "/") {
			b.may[key] = []string{files[key]}
		} else {
			b.may[key] = []string{labels[key]}
		}
	}
	b.late = false
}

// compare says what of a sandbox's files cannot be.
func (b *box) compare(files map[string]string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, s := range files {
		if may, asked := b.may[name]; !asked && !b.loose || asked && !slices.Contains(may, s) && !slices.Contains(may, anything) {
			return fmt.Errorf("file %s is %q, not one of %q", name, s, may)
		}
	}
	for name, may := range b.may {
		if strings.HasPrefix(name, "/") && files[name] == absent && !slices.Contains(may, absent) && !slices.Contains(may, anything) {
			return fmt.Errorf("file %s is lost: it was one of %q", name, may)
		}
	}
	return nil
}

// unread is the error of a reading that missed files: init may take a file back after its name was
// read.
type unread struct{ error }

// filesOf returns all files that users have in a sandbox, hidden ones too, with the hashes of
// their contents.
func (w *world) filesOf(ctx context.Context, id string) (map[string]string, error) {
	out, errs, exit, err := execute(ctx, w.c, id, buffered, api.ExecRequest{
		Argv: []string{"sh", "-c", "for d in /u*; do test -d $d && find $d -type f -exec /bin/busybox md5sum {} +; done; true"},
	}, nil)
	if err != nil {
		return nil, err
	}
	if exit.Code != 0 || len(errs) > 0 {
		return nil, unread{fmt.Errorf("md5sum ended with %+v and said %q", exit, errs)}
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		hash, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		files[name] = hash
	}
	return files, nil
}

// tryImages makes sandboxes of a few images whose commit was acknowledged: they have the files of
// that time.
func (w *world) tryImages() {
	w.t.Helper()
	tried := 0
	for reference, m := range w.images {
		if !m.answered || len(m.files) == 0 || tried == 2 {
			continue
		}
		tried++
		s := w.d.Create(w.t, api.CreateSandbox{Image: reference})
		got, err := w.filesOf(w.t.Context(), s.ID)
		if err != nil {
			w.t.Errorf("image %s: %v", reference, err)
		}
		for name, hash := range m.files {
			if got[name] != hash {
				w.t.Errorf("image %s has %s as %q, not %q", reference, name, got[name], hash)
			}
		}
		s.Delete(w.t)
	}
}

// clear deletes all but the residents that live.
func (w *world) clear() {
	w.t.Helper()
	var all sync.WaitGroup
	for _, b := range w.all() {
		b.mu.Lock()
		stays := b.resident && !b.victim && !b.held
		id, gone, settled := b.id, b.deleted, b.made && !b.doomed
		b.mu.Unlock()
		if stays {
			continue
		}
		w.mu.Lock()
		delete(w.boxes, b.name)
		w.mu.Unlock()
		if gone || id == "" {
			continue
		}
		all.Go(func() {
			err := w.c.DeleteSandbox(w.t.Context(), id)
			if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) && !settled {
				return // a deletion, or an undone creation, without a waiting client has come to its end
			}
			if err != nil {
				w.t.Errorf("delete %s: %v", b.name, describe(err))
			}
		})
	}
	all.Wait()
	if n := len(w.d.List(w.t)); n != len(w.all()) && !w.t.Failed() {
		w.t.Errorf("%d sandboxes are listed after all others were deleted, not %d", n, len(w.all()))
	}
}
