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

// A request that may take long ends with its client, and with the server.
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
			// That layer is being extracted for ever.
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
			case <-time.After(30 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}

// slowStart is an engine whose starts last until they are released.
type slowStart struct {
	inMemory

	began chan struct{}
	goOn  chan struct{}
}

func (e slowStart) wait() {
	e.began <- struct{}{}
	<-e.goOn
}

func (e slowStart) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	defer e.wait()
	return e.inMemory.Create(ctx, spec, control)
}

func (e slowStart) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	defer e.wait()
	return e.inMemory.Start(ctx, spec, control)
}

// Kill ends a sandbox only when the next start of it would have been there.
func (e slowStart) Kill(ctx context.Context, id string) error {
	select {
	case <-e.began:
	case <-time.After(100 * time.Millisecond):
	}
	return e.inMemory.Kill(ctx, id)
}

// asked is a server that is asked by daemons, each on a connection of its own.
type asked struct {
	*Server

	served sync.WaitGroup
}

func (s *asked) ask(t *testing.T, req *request, files ...*os.File) (daemon *net.UnixConn) {
	t.Helper()
	daemon, c := pair(t)
	if err := send(daemon, req, files...); err != nil {
		t.Fatal(err)
	}
	s.served.Go(func() { s.serve(t.Context(), c) })
	return daemon
}

// answer waits for the daemon's answer.
func answer(t *testing.T, daemon *net.UnixConn) (resp response) {
	t.Helper()
	files, err := receive(daemon, &resp)
	if err != nil {
		t.Fatal(err)
	}
	closeAll(files)
	return resp
}

// A daemon that dies while it starts a sandbox leaves one without a client. It is ended, and the
// next daemon, which has found the sandbox stopped, starts it.
func TestStartAfterALostStart(t *testing.T) {
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
	s := &asked{Server: &Server{Engine: e, Log: slog.New(slog.DiscardHandler)}}
	start := &request{Op: opStart, Spec: spec}
	dead := s.ask(t, start, null)
	<-e.began
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	next := s.ask(t, start, null)
	close(e.goOn)
	if resp := answer(t, next); resp.Error != nil {
		t.Errorf("%+v", resp.Error)
	}
	s.served.Wait()
	if len(s.starting) != 0 {
		t.Errorf("held for ever: %v", s.starting)
	}
}

// A sandbox whose client has died during its creation is deleted, and the next daemon's list does
// not have it.
func TestListOmitsALostStart(t *testing.T) {
	e := slowStart{inMemory{runtimetest.NewEngine(nil)}, make(chan struct{}, 2), make(chan struct{})}
	s := &asked{Server: &Server{Engine: e, Log: slog.New(slog.DiscardHandler)}}
	dead := s.ask(t, &request{Op: opCreate, Spec: &runtime.Spec{ID: "work", Deadline: time.Unix(1<<33, 0)}}, devNull(t))
	<-e.began
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	next := s.ask(t, &request{Op: opList})
	time.AfterFunc(50*time.Millisecond, func() { close(e.goOn) }) // a list that does not wait is answered by then
	if resp := answer(t, next); resp.Error != nil || len(resp.Started) != 0 {
		t.Errorf("%+v, %+v", resp.Error, resp.Started)
	}
	s.served.Wait()
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
