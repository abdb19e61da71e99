package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/runtime"
)

// openFiles counts our descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Stored descriptors outlive their owner, go to every client that asks, and are closed when they
// are dropped.
func TestDescriptorStore(t *testing.T) {
	before := openFiles(t)
	s := &Server{Log: slog.New(slog.DiscardHandler)}
	ask := func(req *request, files ...*os.File) (*response, []*os.File, error) {
		t.Helper()
		daemon, c := pair(t)
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.serve(t.Context(), c)
		}()
		resp, got, err := exchange(t.Context(), daemon, req, files...)
		<-done
		_ = daemon.Close()
		return resp, got, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	in := func(sandbox, name string) wireSet { return wireSet{Sandbox: sandbox, Name: name} }
	if _, _, err := ask(&request{Op: opDeposit, Set: in("aaa", "one")}, r, w); err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	if _, err := w.WriteString("kept"); err != nil { // there is a reader
		t.Error(err)
	}
	_ = w.Close()
	for range 2 { // every client gets it
		resp, files, err := ask(&request{Op: opWithdraw})
		if err != nil || len(resp.Sets) != 1 || resp.Sets[0] != (wireSet{"aaa", "one", 2}) || len(files) != 2 || resp.More {
			t.Fatalf("%+v, %v", resp, err)
		}
		closeAll(files)
	}
	_, files, err := ask(&request{Op: opWithdraw})
	if err != nil {
		t.Fatal(err)
	}
	// Replaced by one descriptor: the writing end is gone with the others'.
	if _, _, err := ask(&request{Op: opDeposit, Set: in("aaa", "one")}, files[0]); err != nil {
		t.Fatal(err)
	}
	_ = files[1].Close()
	if got, err := io.ReadAll(files[0]); err != nil || string(got) != "kept" {
		t.Errorf("%q, %v", got, err)
	}
	for name, bad := range map[string]struct {
		set   wireSet
		files int
	}{"nothing": {in("aaa", "x"), 0}, "too many": {in("aaa", "x"), maxSetFiles + 1}, "no name": {in("aaa", ""), 1}, "no sandbox": {in("", "x"), 1}} {
		var give []*os.File
		for range bad.files {
			give = append(give, files[0])
		}
		if _, _, err := ask(&request{Op: opDeposit, Set: bad.set}, give...); err == nil {
			t.Errorf("%s is stored", name)
		}
	}
	// As many as fit, of one sandbox and of all, in pages. Whatever the others have, each has room for
	// one.
	const most = maxSets + 13
	full := 0
	for i := range 12 {
		for j := range maxOfOne + 1 {
			err := s.descriptors.put(fmt.Sprintf("s%02d", i), fmt.Sprintf("e%02d", j), files[:1])
			switch {
			case err == nil:
				full++
			case !errors.Is(err, runtime.ErrInUse):
				t.Fatal(err)
			case j == 0 || j != maxOfOne && full+1-(i+2) != maxSets:
				t.Errorf("refused after %d of one and %d of all", j, full)
			}
		}
	}
	_ = files[0].Close()
	if full+1 != most {
		t.Errorf("%d are kept", full)
	}
	seen := map[wireSet]bool{}
	req := &request{Op: opWithdraw}
	for more := true; more; {
		resp, files, err := ask(req)
		if err != nil {
			t.Fatal(err)
		}
		closeAll(files)
		for _, d := range resp.Sets {
			seen[d] = true
			req.Set = in(d.Sandbox, d.Name)
		}
		more = resp.More
	}
	if len(seen) != most {
		t.Errorf("%d of %d are told of", len(seen), most)
	}
	if _, _, err := ask(&request{Op: opDrop, Set: in("s00", "e00")}); err != nil {
		t.Error(err)
	}
	if _, err := s.descriptors.held[setKey{"s00", "e00"}], s.descriptors.put("s00", "e00", []*os.File{os.Stdin}); err != nil {
		t.Error("no room after one was dropped")
	}
	// A sandbox that is deleted takes its own along.
	s.Engine = &deleting{}
	if _, _, err := ask(&request{Op: opDelete, ID: "s01"}); !errors.Is(err, runtime.ErrNotFound) {
		t.Error(err)
	}
	for k := range s.descriptors.held {
		if k.sandbox == "s01" {
			t.Fatal("sets of a deleted sandbox are kept")
		}
		s.descriptors.drop(k.sandbox, "")
	}
	if after := openFiles(t); after > before+1 { // the runtime's poller
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// deleting is an engine that knows no sandbox.
type deleting struct{ engine }

func (*deleting) Delete(context.Context, string) error { return runtime.ErrNotFound }
