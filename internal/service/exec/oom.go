package exec

import (
	"context"
	"errors"

	"github.com/sandboxd/sandboxd/runtime"
)

// oomWatch compares the number of out-of-memory kills before and after an exec.
type oomWatch struct {
	r      *Registry
	id     string
	before int
	err    error
	done   chan struct{} // nil where there is no memory cgroup to ask
}

// watchOOM reads the number before, concurrently with the start of the program, which takes as
// long.
func (r *Registry) watchOOM(ctx context.Context, rec *runtime.Record) *oomWatch {
	w := &oomWatch{r: r, id: rec.ID}
	if rec.Enforced.Memory != "cgroup" {
		return w
	}
	w.done = make(chan struct{})
	go func() {
		defer close(w.done)
		w.before, w.err = r.opts.Supervisor.OOMKills(ctx, w.id)
	}()
	return w
}

func (w *oomWatch) wait() {
	if w.done != nil {
		<-w.done
	}
}

// struck reads the number again. An unknown number is no error of the exec: its exit is known.
func (w *oomWatch) struck(ctx context.Context) bool {
	if w.done == nil || w.err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	after, err := w.r.opts.Supervisor.OOMKills(ctx, w.id)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		w.r.opts.Log.Warn("out-of-memory kills of a sandbox are unknown", "id", w.id, "error", err)
	}
	return err == nil && after > w.before
}
