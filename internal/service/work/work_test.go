package work_test

import (
	"context"
	"errors"
	"testing"

	"github.com/sandboxd/sandboxd/internal/service/work"
)

// Stop waits for what runs, which sees the cause, and nothing starts afterwards.
func TestGroupStops(t *testing.T) {
	g := work.New(t.Context())
	stopping := errors.New("stopping")
	var seen error
	if !g.Go(func() {
		<-g.Ctx.Done()
		seen = context.Cause(g.Ctx)
	}) || g.Closed() {
		t.Fatal("it starts nothing")
	}
	g.Stop(stopping)
	if !errors.Is(seen, stopping) {
		t.Errorf("what ran has seen %v", seen)
	}
	if g.Go(func() { t.Error("it runs") }) || !g.Closed() {
		t.Error("it starts something after its end")
	}
}
