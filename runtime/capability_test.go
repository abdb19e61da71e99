package runtime_test

import (
	"context"
	"testing"

	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

type describing struct{ *runtimetest.Engine }

func (describing) Describe(context.Context) (runtime.Description, error) {
	return runtime.Description{PID: 7}, nil
}

// wrapping is an engine that adds something to another one, and passes its abilities on.
type wrapping struct{ runtime.Engine }

func (w wrapping) Unwrap() runtime.Engine { return w.Engine }

func TestAbilitiesAreFound(t *testing.T) {
	plain := runtimetest.NewEngine(nil)
	t.Cleanup(plain.Close)
	if _, ok := runtime.As[runtime.Describer](plain); ok {
		t.Error("the engine in memory describes itself")
	}
	for name, e := range map[string]runtime.Engine{"own": describing{plain}, "wrapped": wrapping{wrapping{describing{plain}}}} {
		d, ok := runtime.As[runtime.Describer](e)
		if !ok {
			t.Errorf("%s: not found", name)
			continue
		}
		if got, err := d.Describe(t.Context()); err != nil || got.PID != 7 {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if _, ok := runtime.As[runtime.Differ](e); ok {
			t.Errorf("%s: an ability that it does not have", name)
		}
	}
}
