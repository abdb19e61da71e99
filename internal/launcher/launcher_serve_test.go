package launcher

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// A request that may take long ends with the one who asks, and with the server.
func TestLongRequestsEndWithTheirDaemon(t *testing.T) {
	chain := "sha256:" + strings.Repeat("0", 64)
	blob, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	apply := &request{Op: opApply, Apply: &layer.ApplyRequest{Layers: []layer.Request{{ChainID: chain}}}}
	daemonEnds := func(_ *Server, daemon io.Closer) error { return daemon.Close() }
	for name, tt := range map[string]struct {
		req   *request
		files []*os.File
		end   func(s *Server, daemon io.Closer) error
	}{
		"daemon":  {apply, []*os.File{blob}, daemonEnds},
		"server":  {apply, []*os.File{blob}, func(s *Server, _ io.Closer) error { close(s.stop); return nil }},
		"removal": {&request{Op: opRemoveLayer, Layer: chain}, nil, daemonEnds}, // the next one may want it
	} {
		t.Run(name, func(t *testing.T) {
			daemon, c := pair(t)
			// Somebody is at that layer for ever.
			working := map[string]chan struct{}{chain: make(chan struct{})}
			s := &Server{Layers: &Layers{slots: make(chan struct{}), working: working}, stop: make(chan struct{}), Log: slog.New(slog.DiscardHandler)}
			if err := send(daemon, tt.req, tt.files...); err != nil {
				t.Fatal(err)
			}
			answered := make(chan struct{})
			go func() {
				defer close(answered)
				s.serve(t.Context(), c)
			}()
			select {
			case <-answered:
				t.Fatal("answered while somebody else is at it")
			case <-time.After(50 * time.Millisecond):
			}
			if err := tt.end(s, daemon); err != nil {
				t.Fatal(err)
			}
			select {
			case <-answered:
			case <-time.After(10 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}

// slowStart is an engine whose starts take until they are let go.
type slowStart struct {
	inMemory

	began chan struct{}
	goOn  chan struct{}
}

func (e slowStart) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	st, err := e.inMemory.Create(ctx, spec, control)
	e.began <- struct{}{}
	<-e.goOn
	return st, err
}

func (e slowStart) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	st, err := e.inMemory.Start(ctx, spec, control)
	e.began <- struct{}{}
	<-e.goOn
	return st, err
}

// Kill ends a sandbox only when the next start of it would have been there.
func (e slowStart) Kill(ctx context.Context, id string) error {
	select {
	case <-e.began:
	case <-time.After(100 * time.Millisecond):
	}
	return e.inMemory.Kill(ctx, id)
}

// A daemon that dies while it has a sandbox started leaves one that nobody knows of. It is ended, and the next daemon, which has
// found the sandbox stopped, starts it.
func TestStartAfterOneThatNobodyKnowsOf(t *testing.T) {
	e := slowStart{inMemory{runtimetest.NewEngine(nil)}, make(chan struct{}, 2), make(chan struct{})}
	null := devNull(t)
	spec := &runtime.Spec{ID: "work", Deadline: time.Unix(1<<33, 0)}
	st, err := e.inMemory.Create(t.Context(), spec, null)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Pidfd.Close()
	if err := e.inMemory.Kill(t.Context(), spec.ID); err != nil {
		t.Fatal(err)
	}
	s := &Server{Engine: e, Log: slog.New(slog.DiscardHandler)}
	var served sync.WaitGroup
	ask := func() *net.UnixConn {
		daemon, c := pair(t)
		if err := send(daemon, &request{Op: opStart, Spec: spec}, null); err != nil {
			t.Fatal(err)
		}
		served.Go(func() { s.serve(t.Context(), c) })
		return daemon
	}
	dead := ask()
	<-e.began
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	next := ask()
	close(e.goOn)
	var resp response
	files, err := receive(next, &resp)
	if err != nil {
		t.Fatal(err)
	}
	closeAll(files)
	if resp.Error != nil {
		t.Errorf("%+v", resp.Error)
	}
	served.Wait()
	if len(s.starting) != 0 {
		t.Errorf("held for ever: %v", s.starting)
	}
}

// A sandbox whose creation nobody got to know of is deleted, and the next daemon's list does not have it.
func TestListWithoutOneThatNobodyKnowsOf(t *testing.T) {
	e := slowStart{inMemory{runtimetest.NewEngine(nil)}, make(chan struct{}, 2), make(chan struct{})}
	s := &Server{Engine: e, Log: slog.New(slog.DiscardHandler)}
	var served sync.WaitGroup
	ask := func(req *request, files ...*os.File) *net.UnixConn {
		daemon, c := pair(t)
		if err := send(daemon, req, files...); err != nil {
			t.Fatal(err)
		}
		served.Go(func() { s.serve(t.Context(), c) })
		return daemon
	}
	dead := ask(&request{Op: opCreate, Spec: &runtime.Spec{ID: "work", Deadline: time.Unix(1<<33, 0)}}, devNull(t))
	<-e.began
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	next := ask(&request{Op: opList})
	time.AfterFunc(50*time.Millisecond, func() { close(e.goOn) }) // a list that does not wait is answered by then
	var resp response
	files, err := receive(next, &resp)
	if err != nil {
		t.Fatal(err)
	}
	closeAll(files)
	if resp.Error != nil || len(resp.Started) != 0 {
		t.Errorf("%+v, %+v", resp.Error, resp.Started)
	}
	served.Wait()
}

// The longest report that a child can make arrives whole, and fits into an answer.
func TestLongestReportFits(t *testing.T) {
	long := strings.Repeat("\x01", 200) + "..."
	var result layer.Result
	for range layer.MaxSkipped {
		result.Skipped = append(result.Skipped, long+": "+long)
	}
	var b limited
	if err := json.NewEncoder(&b).Encode(childReport{Result: result}); err != nil {
		t.Fatal(err)
	}
	var got childReport
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	one, _ := pair(t)
	if err := send(one, &response{Layer: &got.Result}); err != nil {
		t.Error(err)
	}
}
