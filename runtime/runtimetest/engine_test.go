package runtimetest_test

import (
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

func TestEngineInMemoryPassesTheSuite(t *testing.T) {
	runtimetest.RunEngineSuite(t, func(t *testing.T) runtimetest.Fixture {
		e := runtimetest.NewEngine(nil)
		t.Cleanup(e.Close)
		return runtimetest.Fixture{Engine: e, NewSpec: func(_ *testing.T, id string) *runtime.Spec {
			return &runtime.Spec{
				ID:       id,
				Profile:  runtime.Profile{Name: "default", Seccomp: &specs.LinuxSeccomp{}},
				Deadline: time.Now().Add(time.Hour),
			}
		}}
	})
}
