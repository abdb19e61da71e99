package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

// ErrEnded is the error of [Resume] for a run that cannot continue.
var ErrEnded = errors.New("the run has ended")

// Resume continues the run in dir from its last recorded state. After a crash of the agent or the
// daemon it uses the existing sandbox. If the sandbox is gone, it makes a new one from the last
// turn's snapshot, if there is one.
//
// Of opts it uses Model, LLMName, ModelName, BaseURL, Price, Create, Open, InputAllowed, Asker,
// Secrets, Message, Now and the callbacks. Policy, and the set parts of Budget, override the
// record. No recorded turn is requested again. No call that had begun runs again unless it is
// read-only: the model is told that the outcome is unknown.
func Resume(ctx context.Context, dir string, opts Options) (*Result, error) {
	r, err := newWork(opts)
	if err != nil {
		return nil, err
	}
	r.dir = filepath.Clean(dir)
	var events []Event
	if r.rec, events, err = openRecord(r.dir, r.Now, r.Secrets); err != nil {
		return nil, err
	}
	res, err := r.resume(ctx, events)
	if res == nil {
		err = errors.Join(err, r.closeRecord())
	}
	return res, err
}

func (r *run) resume(ctx context.Context, events []Event) (*Result, error) {
	var err error
	if r.l, err = readLedger(events); err != nil {
		return nil, err
	}
	if r.l.end != nil && r.l.end.Reason == ExitSubmitted && r.l.end.OutputError == "" {
		// The run is complete, but a crash may have left its sandbox, and no trajectory.
		saveErr := r.l.trajectory().save(r.dir)
		sb, err := r.Open(ctx, r.l.sandbox.ID, deleteTime)
		if err == nil {
			err = sb.Delete(ctx)
		}
		if err != nil && !hasCode(err, api.CodeNotFound) {
			// Not wrapped: the run has ended, whatever the daemon answers.
			//nolint:errorlint // see the comment
			return nil, errors.Join(fmt.Errorf("%w: it was submitted; its sandbox %s may be left: %v", ErrEnded, r.l.sandbox.ID, err), saveErr)
		}
		return nil, errors.Join(fmt.Errorf("%w: it was submitted", ErrEnded), saveErr)
	}
	if r.Message != "" && r.l.open != nil && r.l.open.response != nil {
		return nil, errors.New("the run stopped in the middle of a turn, where nothing can be said to the model: resume it without a message first")
	}
	r.l.spent.Time += r.l.unaccounted()
	resumed, err := r.resumed()
	if err != nil {
		return nil, err
	}
	r.base = r.l.spent
	snapshot, err := r.reopen(ctx, resumed.Budget)
	if err != nil {
		return nil, err
	}
	if err := discardTrajectory(r.dir); err != nil {
		return nil, err
	}
	if err := r.emit(Event{Resumed: resumed}, true); err != nil {
		return nil, err
	}
	if r.sandbox == nil {
		if err := r.makeSandbox(ctx, snapshot, nil); err != nil {
			return nil, errors.Join(err, r.discard(ctx))
		}
	} else {
		used, err := r.checkCPU(ctx)
		if err != nil {
			return nil, err
		}
		// The usage of an interrupted turn is not recorded, but the sandbox has counted it, unless it
		// was restarted since.
		if r.cpuStart = used; used > r.base.CPU {
			r.cpuStart = r.base.CPU
		}
	}
	return r.finish(ctx, nil)
}

// discard deletes the sandbox of a failed attempt.
func (r *run) discard(ctx context.Context) error {
	if r.sandbox == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
	defer cancel()
	return r.sandbox.Delete(ctx)
}

// resumed returns the changes that this process makes. Without another policy it adopts the
// recorded one.
func (r *run) resumed() (*ResumedEvent, error) {
	was := r.l.run
	e := &ResumedEvent{
		Budget: was.Budget, Policy: was.Policy, LLMName: r.LLMName, Model: r.ModelName, ModelSource: r.Model.Describe(), BaseURL: r.BaseURL, Spent: r.l.spent,
	}
	if e.Model == "" {
		e.Model = was.Model
	}
	if e.LLMName == "" {
		e.LLMName = was.LLMName
	}
	given := r.Budget
	override(&e.Budget.Turns, given.Turns)
	override(&e.Budget.Conversation, given.Conversation)
	override(&e.Budget.Tokens, given.Tokens)
	override(&e.Budget.Cost, given.Cost)
	override(&e.Budget.Time, given.Time)
	override(&e.Budget.CPU, given.CPU)
	if e.Budget.Cost > 0 && r.Price == nil {
		return nil, errNoPrice
	}
	if r.Policy != nil {
		e.Policy = r.policy.Source()
	} else if was.Policy != "" {
		var err error
		if r.policy, err = parsePolicy(was.Policy); err != nil {
			return nil, err
		}
	}
	if r.Message != "" {
		e.Message = &r.Message
	}
	return e, nil
}

func override[T comparable](v *T, given T) {
	var zero T
	if given != zero {
		*v = given
	}
}

// reopen opens the run's sandbox, or returns the snapshot for a new one.
func (r *run) reopen(ctx context.Context, b Budget) (snapshot string, err error) {
	sb := r.l.sandbox
	lifetime := max(b.Time-r.elapsed(), 0) + collectTime + deleteTime
	ref := sb.ID
	if !sb.Ready {
		ref = sb.Name
	}
	if ref != "" {
		found, err := r.Open(ctx, ref, lifetime)
		switch {
		case err == nil && sb.Ready:
			r.sandbox = found
			return "", nil
		case err == nil:
			// The agent ended while it created this sandbox, so its state is unknown.
			if err := found.Delete(ctx); err != nil && !hasCode(err, api.CodeNotFound) {
				return "", fmt.Errorf("delete the unfinished sandbox %s: %w", ref, err)
			}
		case !hasCode(err, api.CodeNotFound):
			return "", fmt.Errorf("open the sandbox %s: %w", ref, err)
		}
	}
	if r.l.total == 0 {
		return "", nil // no call has run in it
	}
	if snapshot := r.l.snapshots[len(r.l.steps)]; snapshot != "" {
		return snapshot, nil
	}
	return "", fmt.Errorf("%w: its sandbox is gone, and there is no snapshot of its last turn to go on from (agent run --snapshot_turns takes them; agent fork does the turns again)", ErrEnded)
}

// Fork begins a new run that shares the first turns of the run in dir, up to and including turn at;
// 0 shares the task only. The sandbox is made from that turn's snapshot. Without one it is made
// from the image and the input, and the calls of those turns run again. Opts are as for [Resume].
// OutputDir is the parent of the new run's directory, by default that of dir.
func Fork(ctx context.Context, dir string, at int, opts Options) (*Result, error) {
	events, _, err := ReadRecord(dir)
	if err != nil {
		return nil, err
	}
	if opts.OutputDir == "" {
		opts.OutputDir = filepath.Dir(filepath.Clean(dir))
	}
	shared, err := sharedTurns(events, at)
	if err != nil {
		return nil, err
	}
	r, err := newWork(opts)
	if err != nil {
		return nil, err
	}
	if r.dir, err = MakeDir(r.OutputDir, runDirName(r.began)); err != nil {
		return nil, err
	}
	first := *shared[0].Run
	first.ID = filepath.Base(r.dir)
	first.Fork = &ForkOrigin{Dir: dir, Turn: at}
	shared[0].Run = &first
	res, err := r.fork(ctx, shared, at)
	if res == nil {
		err = errors.Join(err, r.discard(ctx), r.closeRecord(), os.RemoveAll(r.dir))
	}
	return res, err
}

// sharedTurns returns the events that a fork shares with its origin.
func sharedTurns(events []Event, at int) ([]Event, error) {
	var shared []Event
	turns := 0
	for _, e := range events {
		if turns == at && e.Run == nil {
			break
		}
		if e.Sandbox != nil && e.Sandbox.Ready && e.Sandbox.Snapshot != "" {
			// The run went on from the files of the turn before, which undid the open turn's work.
			shared = slices.DeleteFunc(shared, func(s Event) bool {
				return s.Turn == turns+1 && (s.Verdict != nil || s.Began != nil || s.Ended != nil)
			})
		}
		if e.Sandbox != nil || e.Outputs != nil || e.End != nil {
			continue
		}
		shared = append(shared, e)
		if e.TurnEnd != nil {
			turns++
		}
	}
	if at < 0 || turns < at {
		return nil, fmt.Errorf("there is no turn %d to branch from; the run has %d whole turns", at, turns)
	}
	return shared, nil
}

func (r *run) fork(ctx context.Context, shared []Event, at int) (*Result, error) {
	var err error
	if r.rec, err = createRecord(r.dir, r.Now, r.Secrets); err != nil {
		return nil, err
	}
	r.l = newLedger()
	for _, e := range shared {
		if err := r.emit(e, false); err != nil {
			return nil, err
		}
	}
	resumed, err := r.resumed()
	if err != nil {
		return nil, err
	}
	if err := r.emit(Event{Resumed: resumed}, true); err != nil {
		return nil, err
	}
	r.base = r.l.spent
	snapshot, rebuild := r.l.snapshots[at], r.l.steps
	if snapshot != "" {
		rebuild = nil
	}
	err = r.makeSandbox(ctx, snapshot, rebuild)
	if r.sandbox == nil && snapshot != "" && hasCode(err, api.CodeNotFound) {
		r.OnNote("the snapshot of turn " + strconv.Itoa(at) + " is gone: the turns are done again")
		err = r.makeSandbox(ctx, "", r.l.steps)
	}
	if err != nil {
		return nil, err
	}
	return r.finish(ctx, nil)
}
