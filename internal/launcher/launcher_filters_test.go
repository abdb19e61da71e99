package launcher

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

func allows(name string) *specs.LinuxSeccomp {
	return &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{{Names: []string{name}, Action: specs.ActAllow}}}
}

func TestFiltersAreReadOnceAndNeverMistaken(t *testing.T) {
	var f filters
	ask := func(filter *specs.LinuxSeccomp) *specs.LinuxSeccomp {
		t.Helper()
		text, err := json.Marshal(filter)
		if err != nil {
			t.Fatal(err)
		}
		got, err := f.decode(text)
		if d := cmp.Diff(filter, got); d != "" || err != nil {
			t.Fatalf("%v, -want +got:\n%s", err, d)
		}
		return got
	}
	first := ask(allows("read"))
	if ask(allows("read")) != first {
		t.Error("an equal filter was read again")
	}
	if ask(allows("reae")) == first {
		t.Error("another filter of the same length is taken for it")
	}
	for i := range 2 * maxFilters {
		if ask(allows(fmt.Sprint(i))); len(f.known) > maxFilters {
			t.Fatalf("after %d, %d are kept", i, len(f.known))
		}
		if ask(allows("read")) != first {
			t.Fatalf("after %d others, the one in use is read again", i)
		}
	}
	for name, text := range map[string]string{
		"half":          `{"defaultAction":"SCMP`,
		"unknown field": `{"defaultAction":"SCMP_ACT_ALLOW","novelty":1}`,
		"two":           `{"defaultAction":"SCMP_ACT_ERRNO"}{"defaultAction":"SCMP_ACT_ALLOW"}`,
	} {
		if got, err := f.decode([]byte(text)); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A sandbox has the filter that its client gave, and no other, whichever way it came.
func TestFilterFollowsItsRequest(t *testing.T) {
	engine := runtimetest.NewEngine(nil)
	defer engine.Close()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "launcher.sock"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Engine: inMemory{engine}, Log: slog.New(slog.DiscardHandler), listener: l, stop: make(chan struct{})}
	done := make(chan error)
	go func() { done <- s.accept(t.Context()) }()
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		s.requests.Wait()
	}()
	c := &Client{path: l.Addr().String()}
	control := devNull(t)
	spec := func(id, call string) *runtime.Spec {
		return &runtime.Spec{ID: id, Profile: runtime.Profile{Name: "p", Seccomp: allows(call)}}
	}
	for _, v := range []struct{ id, call string }{{"aaa", "read"}, {"bbb", "read"}, {"ccc", "write"}} {
		given := spec(v.id, v.call)
		st, err := c.Create(t.Context(), given, control)
		if err != nil {
			t.Fatal(err)
		}
		_ = st.Pidfd.Close() // only a handle
		if d := cmp.Diff(allows(v.call), given.Profile.Seccomp); d != "" {
			t.Errorf("the caller's spec has changed: -want +got:\n%s", d)
		}
		if d := cmp.Diff(given, engine.Spec(v.id)); d != "" {
			t.Errorf("%s: -want +got:\n%s", v.id, d)
		}
	}
	if engine.Spec("aaa").Profile.Seccomp != engine.Spec("bbb").Profile.Seccomp {
		t.Error("two sandboxes of one profile have two copies of its filter")
	}
	// An older daemon has it within the spec.
	if _, files, err := c.call(t.Context(), &request{Op: opCreate, Spec: spec("ddd", "close")}, control); err != nil {
		t.Error(err)
	} else {
		closeAll(files)
	}
	if d := cmp.Diff(allows("close"), engine.Spec("ddd").Profile.Seccomp); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	for name, req := range map[string]*request{
		"two filters": {Op: opCreate, Spec: spec("eee", "read"), filter: []byte(`{"defaultAction":"SCMP_ACT_ALLOW"}`)},
		"no filter":   {Op: opCreate, Spec: &runtime.Spec{ID: "eee"}, filter: []byte(`x`)},
	} {
		if _, _, err := c.call(t.Context(), req, control); err == nil || engine.Spec("eee") != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Nothing follows a request that has no spec.
func TestNothingFollowsOtherRequests(t *testing.T) {
	data, err := json.Marshal(&request{Op: opKill, ID: "abc"})
	if err != nil {
		t.Fatal(err)
	}
	for _, rest := range []string{"{}", "x", "\x00"} {
		var req request
		if err := decode(append(bytes.Clone(data), rest...), &req); err == nil {
			t.Errorf("%q: %+v", rest, req)
		}
	}
	var req request
	if err := decode(append(data, " \n"...), &req); err != nil || req.filter != nil {
		t.Errorf("%v, %q", err, req.filter)
	}
}
