package launcher

import (
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/image/layer"
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
