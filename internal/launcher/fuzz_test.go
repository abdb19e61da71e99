package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// inMemory has the methods that a server uses of an engine.
type inMemory struct{ *runtimetest.Engine }

func (e inMemory) Count() int { return len(e.IDs()) }

func (e inMemory) Close(context.Context) error {
	e.Engine.Close()
	return nil
}

// sendRaw sends bytes with n descriptors.
func sendRaw(c *net.UnixConn, data []byte, null *os.File, n int) error {
	var oob []byte
	if n > 0 {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = int(null.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(data, oob, nil)
	return err
}

func devNull(t testing.TB) *os.File {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = null.Close() }) // nothing was written
	return null
}

// fewDescriptors fails the test where more descriptors stay open than there were.
func fewDescriptors(t *testing.T, before int) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for descriptors(t) > before {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors are left", descriptors(t)-before)
		}
		<-tick.C
	}
}

// seed is a message of either side.
func seed(f *testing.F, v any) []byte {
	f.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		f.Fatal(err)
	}
	return data
}

// Whatever comes to the launcher, with whatever descriptors, is answered once and in a form that
// the daemon reads; nothing of it stays open, and no sandbox is there but one that the answer
// names.
func FuzzLauncherServe(f *testing.F) {
	chain := "sha256:" + strings.Repeat("0", 64)
	for _, v := range []struct {
		r   request
		fds int
	}{
		{request{Op: opInfo}, 0},
		{request{Op: opSession}, 0},
		{request{Op: opCreate, Spec: &runtime.Spec{ID: "abc", Deadline: time.Unix(1<<33, 0)}}, 1},
		{request{Op: opCreate, Spec: &runtime.Spec{ID: "../abc"}}, 1},
		{request{Op: opCreate, Spec: &runtime.Spec{ID: "abc"}}, 2},
		{request{Op: opCreate}, 1},
		{request{Op: opList, After: "abc"}, 0},
		{request{Op: opLeftovers}, 0},
		{request{Op: opKill, ID: "old"}, 0},
		{request{Op: opDelete, ID: "old"}, 0},
		{request{Op: opStart, Spec: &runtime.Spec{ID: "abc"}}, 1},
		{request{Op: opStop, ID: "old"}, 0},
		{request{Op: opPause, ID: "old"}, 0},
		{request{Op: opResume, ID: "old"}, 0},
		{request{Op: opDeposit, Set: wireSet{Sandbox: "old", Name: "x"}}, 3},
		{request{Op: opDeposit}, 1},
		{request{Op: opWithdraw, Set: wireSet{Sandbox: "old"}}, 0},
		{request{Op: opDrop, Set: wireSet{Sandbox: "old"}}, 0},
		{request{Op: opSnapshot, Snap: &snapshotRequest{Diff: diffRequest{ID: "old"}, ChainID: chain}}, 0},
		{request{Op: opSnapshot}, 0},
		{request{Op: opUpdate, ID: "old", Change: &runtime.Change{Deadline: time.Unix(1<<33, 0)}}, 0},
		{request{Op: opUpdate, ID: "old"}, 0},
		{request{Op: opStats, ID: "old"}, 0},
		{request{Op: opOOMKills, ID: "old"}, 0},
		{request{Op: opApply, Apply: &layer.ApplyRequest{Layers: []layer.Request{{ChainID: chain, DiffID: chain}}}}, 1},
		{request{Op: opApply}, 1},
		{request{Op: opDiff, Diff: &diffRequest{ID: "old"}}, 1},
		{request{Op: opDiff}, 1},
		{request{Op: opRemoveLayer, Layer: chain}, 0},
		{request{Op: opVolume, Volume: &volumeRequest{Action: volumeRemove, ID: "old"}}, 0},
		{request{Op: opVolume, Volume: &volumeRequest{Action: volumeRead, ID: "../old"}}, 1},
		{request{Op: opVolume, Volume: &volumeRequest{Action: "other"}}, 0},
		{request{Op: opVolume}, 0},
		{request{Op: opNetwork, ID: "old"}, 0},
		{request{Op: opSocket, ID: "old", Socket: "tcp"}, 0},
		{request{Op: opShutdown}, 3},
		{request{Op: "x"}, 0},
	} {
		f.Add(seed(f, &v.r), uint8(v.fds))
	}
	f.Add([]byte("x"), uint8(maxFiles))
	create := seed(f, &request{Op: opCreate, Spec: &runtime.Spec{ID: "abc"}})
	for _, filter := range []string{`{"defaultAction":"SCMP_ACT_ALLOW"}`, "null", "{", "{}{}"} {
		f.Add(append(bytes.Clone(create), filter...), uint8(1))
	}
	null := devNull(f)
	f.Fuzz(func(t *testing.T, data []byte, fds uint8) {
		if len(data) == 0 || len(data) > maxPacket || fds > maxFiles {
			return // an empty packet looks like the end: the server waits until it is sure
		}
		// A file that is forgotten is closed by the garbage collector.
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
		before := descriptors(t)
		e := runtimetest.NewEngine(nil)
		if st, err := e.Create(t.Context(), &runtime.Spec{ID: "old", Deadline: time.Unix(1<<33, 0)}, null); err != nil {
			t.Fatal(err)
		} else if err := st.Pidfd.Close(); err != nil {
			t.Fatal(err)
		}
		s := &Server{
			Engine: inMemory{e}, Log: slog.New(slog.DiscardHandler), stop: make(chan struct{}), sessions: map[*net.UnixConn]struct{}{},
			// Its slots are never released, and it is ending: requests that would start a child are refused
			// just before.
			Layers: &Layers{slots: make(chan struct{}), diffs: make(chan struct{}), working: make(map[string]chan struct{})},
		}
		close(s.stop)
		s.stopOnce.Do(func() {})
		daemon, c := pair(t)
		if err := sendRaw(daemon, data, null, int(fds)); err != nil {
			t.Skip(err) // nothing that a daemon could send
		}
		s.serve(t.Context(), c)
		if err := daemon.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		var resp response
		got, err := receive(daemon, &resp)
		if err != nil {
			t.Fatalf("the answer: %v", err)
		}
		want := len(resp.Started)
		if resp.Info != nil {
			want++
		}
		if len(got) != want || resp.Error != nil && (len(got) > 0 || resp.Error.Message == "") {
			t.Errorf("%d descriptors with %+v", len(got), resp)
		}
		closeAll(got)
		var req request
		if derr := decode(data, &req); derr != nil && resp.Error == nil {
			t.Errorf("%q is not read (%v), and answered with %+v", data, derr, resp)
		}
		known := map[string]bool{"old": true}
		for _, st := range resp.Started {
			known[st.ID] = true
		}
		for _, id := range e.IDs() {
			if !known[id] {
				t.Errorf("sandbox %q is there, and the answer is %+v", id, resp)
			}
		}
		_ = daemon.Close()
		s.requests.Wait()
		_ = c.Close() // of a session; the other ones are
		e.Close()
		for _, id := range e.IDs() {
			if err := e.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		for k := range s.descriptors.held { // they are to stay
			s.descriptors.drop(k.sandbox, k.name)
		}
		fewDescriptors(t, before)
	})
}

// Whatever a launcher answers to any request: an answer that the daemon accepts is complete, and
// nothing stays open.
func FuzzLauncherAnswers(f *testing.F) {
	for _, v := range []struct {
		r   response
		fds int
	}{
		{response{}, 0},
		{response{Error: &wireError{Class: "exists", Message: "x"}}, 0},
		{response{Error: &wireError{Message: "x"}, Started: []wireStarted{{ID: "abc"}}}, 1},
		{response{Started: []wireStarted{{ID: "abc"}}}, 1},
		{response{Started: []wireStarted{{ID: "abc"}}}, 0},
		{response{Started: []wireStarted{{ID: "abc"}, {ID: "abd"}}, More: true}, 2},
		{response{More: true}, 0},
		{response{IDs: []string{"abc"}}, 0},
		{response{Info: &Info{Version: "1"}}, 1},
		{response{Info: &Info{}, Started: []wireStarted{{ID: "abc"}}}, 2},
		{response{Enforced: &api.Enforced{Caps: 3}}, 0},
		{response{Stats: &api.Stats{}}, 0},
		{response{Count: 3}, 0},
		{response{Layer: &layer.Result{}}, 0},
		{response{Sockets: 3}, 3},
		{response{Sockets: 1}, 1},
		{response{Sockets: 4}, 3},
		{response{Sockets: -1, Started: []wireStarted{{}, {}, {}}}, 3},
		{response{Sets: []wireSet{{Sandbox: "abc", Name: "x", Files: 2}}}, 2},
		{response{Sets: []wireSet{{Sandbox: "abc", Name: "x", Files: 3}}}, 2},
		{response{Sets: []wireSet{{Sandbox: "abc", Name: "x", Files: -1}}, More: true}, 1},
		{response{Sets: []wireSet{{Sandbox: "abc", Name: "x", Files: 1}}, More: true}, 1},
	} {
		f.Add(seed(f, &v.r), uint8(v.fds))
	}
	f.Add([]byte{}, uint8(0))
	null := devNull(f)
	path := filepath.Join(f.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		f.Fatal(err)
	}
	type answer struct {
		data []byte
		fds  int
	}
	answers := make(chan answer, 1)
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			var req request
			files, err := receive(c, &req)
			closeAll(files)
			if err == nil {
				a := <-answers
				answers <- a
				_ = sendRaw(c, a.data, null, a.fds)
			}
			_ = c.Close()
		}
	})
	f.Cleanup(func() {
		_ = l.Close()
		served.Wait()
	})
	f.Fuzz(func(t *testing.T, data []byte, fds uint8) {
		if len(data) > maxPacket || fds > maxFiles {
			return
		}
		answers <- answer{data, int(fds)}
		defer func() { <-answers }()
		// A file that is forgotten is closed by the garbage collector.
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
		before := descriptors(t)
		// An answer of which this host's kernel makes no packet is none.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c := &Client{path: path}
		var said response
		if decode(data, &said) == nil {
			again, err := json.Marshal(said)
			var twice response
			if err != nil || decode(again, &twice) != nil {
				t.Errorf("%q became %q (%v)", data, again, err)
			}
			// Not compared directly: an empty list is not encoded.
			if third, err := json.Marshal(twice); err != nil || !bytes.Equal(again, third) {
				t.Errorf("%q became %q and %q (%v)", data, again, third, err)
			}
		}
		if st, err := c.Create(ctx, &runtime.Spec{ID: "abc"}, null); err == nil {
			if st.ID != "abc" || st.Pidfd == nil || said.Error != nil {
				t.Errorf("created: %+v", st)
			}
			_ = st.Pidfd.Close()
		}
		if list, err := c.List(ctx); err == nil {
			for i, st := range list {
				if st.Pidfd == nil || i > 0 && st.ID <= list[i-1].ID {
					t.Errorf("listed: %+v after %+v", st, list[max(i, 1)-1])
				}
				_ = st.Pidfd.Close()
			}
		}
		if info, err := c.Describe(ctx); err == nil && (said.Info == nil || info.PID != 0) { // /dev/null is no process
			t.Errorf("info: %+v", info)
		}
		if list, err := c.StoredDescriptors(ctx); err == nil {
			for _, set := range list {
				if said.Error != nil || len(list) > len(said.Sets) { // the second answer repeats the first
					t.Errorf("stored: %+v", set)
				}
				closeAll(set.Files)
			}
		}
		if all, err := c.NetworkSockets(ctx, "abc"); err == nil {
			if said.Error != nil || said.Sockets != 3 || all.Stream == nil || all.DNS == nil || all.DNSTCP == nil {
				t.Errorf("sockets: %+v", all)
			}
			_ = all.Close()
		}
		if s, err := c.NetworkSocket(ctx, "abc", "tcp"); err == nil {
			if said.Error != nil || said.Sockets != 1 || s == nil {
				t.Errorf("socket: %+v", s)
			}
			_ = s.Close()
		}
		_, lerr := c.Leftovers(ctx)
		_, uerr := c.Update(ctx, "abc", &runtime.Change{})
		_, serr := c.Stats(ctx, "abc")
		_, oerr := c.OOMKills(ctx, "abc")
		_, aerr := c.Apply(ctx, layer.ApplyRequest{Layers: []layer.Request{{Blob: null}}})
		_, derr := c.WriteDiff(ctx, runtime.DiffRequest{ID: "abc"}, io.Discard)
		kerr, rerr, xerr := c.Kill(ctx, "abc"), c.RemoveLayer(ctx, "x"), c.Delete(ctx, "abc")
		for what, err := range map[string]error{
			"leftovers": lerr, "update": uerr, "stats": serr, "oom kills": oerr, "apply": aerr, "diff": derr, "kill": kerr, "remove": rerr, "delete": xerr,
		} {
			if err == nil && (said.Error != nil || len(data) == 0) {
				t.Errorf("%s succeeded with %q", what, data)
			}
			if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s hangs", what)
			}
		}
		if uerr == nil && said.Enforced == nil || serr == nil && said.Stats == nil || aerr == nil && len(said.Layers) != 1 {
			t.Errorf("an empty answer is taken for a full one: %q", data)
		}
		fewDescriptors(t, before)
	})
}

// Whatever the maker answers: without a namespace there is an error of one printable line, and
// nothing stays open. A maker that is not understood is not asked again.
func FuzzMakerAnswers(f *testing.F) {
	for _, v := range []struct {
		a   makerAnswer
		fds int
	}{
		{makerAnswer{}, 4},
		{makerAnswer{}, 3},
		{makerAnswer{}, 0},
		{makerAnswer{Error: "no\nspace"}, 0},
		{makerAnswer{Error: strings.Repeat("\x00", 5000)}, 4},
	} {
		f.Add(seed(f, &v.a), uint8(v.fds))
	}
	f.Add([]byte("x"), uint8(maxFiles))
	null := devNull(f)
	f.Fuzz(func(t *testing.T, data []byte, fds uint8) {
		if len(data) == 0 || len(data) > maxPacket || fds > maxFiles {
			return
		}
		defer debug.SetGCPercent(debug.SetGCPercent(-1)) // as above
		before := descriptors(t)
		ours, maker := pair(t)
		n := &Networks{log: slog.New(slog.DiscardHandler), ready: make(chan *Network, 1), turn: make(chan struct{}, 1), probed: make(chan struct{}), conn: ours}
		close(n.probed)
		if err := sendRaw(maker, data, null, int(fds)); err != nil {
			t.Skip(err)
		}
		_, err := n.make()
		if err == nil || len(err.Error()) > 4*maxSaid || strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("error %q", err)
		}
		var a makerAnswer
		understood := decode(data, &a) == nil && a.Error != ""
		if missing := n.Missing(t.Context()); (missing == nil) != understood {
			t.Errorf("%q: the maker is asked again: %v", data, missing)
		}
		_, _ = ours.Close(), maker.Close()
		fewDescriptors(t, before)
	})
}
