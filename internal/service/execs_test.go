package service_test

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

// A daemon that stops in order leaves its execs to the next one; stopped, started and ended ones
// alike.
func TestExecsAreHandedOn(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	descriptors := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	first := b.Start()
	sb := first.Create(api.CreateSandbox{Name: "one", IdleTimeout: 3600})
	ended := first.Detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "cat; exit 4"}, Stdin: []byte("from a file\n")})
	runs := first.Detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo begin; cat; exit 6"}, StdinOpen: true, Stdin: []byte("la")})
	first.Until(ended, daemontest.Exited)
	first.Until(runs, func(x api.Exec) bool { return x.StdoutBytes == 8 })
	first.Cancel()
	first.Wait()

	// Damaged sets do not keep the next daemon from starting.
	junk, err := os.CreateTemp(t.TempDir(), "junk")
	if err != nil {
		t.Fatal(err)
	}
	defer junk.Close()
	for i, files := range [][]*os.File{{junk}, {junk, junk}, {junk, junk, junk, junk, junk, junk, junk}} {
		if err := descriptors.StoreDescriptors(t.Context(), runtime.DescriptorSet{Sandbox: sb.ID, Name: fmt.Sprint("junk", i), Files: files}); err != nil {
			t.Fatal(err)
		}
	}
	if err := descriptors.StoreDescriptors(t.Context(), runtime.DescriptorSet{Sandbox: "nosuch", Name: "x", Files: []*os.File{junk}}); err != nil {
		t.Fatal(err)
	}
	second := b.Start()
	second.T = t
	list := daemontest.Decode[api.ExecList](t, second.Do("GET", "/v1/sandboxes/one/execs", nil), http.StatusOK)
	if len(list.Execs) != 2 || list.Execs[0].ID != ended.ID || list.Execs[0].Exit.Code != 4 || list.Execs[0].StdoutBytes != 12 ||
		list.Execs[1].State != api.ExecRunning || descriptors.Count() != 2 {
		t.Errorf("%+v, %d are stored", list, descriptors.Count())
	}
	// Of one that has ended there is nothing to write to, whether the frame comes before its end is
	// told or behind.
	for range 20 {
		c, resp, err := websocket.Dial(t.Context(), "ws://sandboxd/v1/sandboxes/one/execs/"+ended.ID+"/attach", &websocket.DialOptions{HTTPClient: second.HTTP})
		if err != nil {
			t.Fatalf("%v, %v", err, resp)
		}
		// A later frame does not arrive after the end. All output before it does.
		_ = c.Write(t.Context(), websocket.MessageText, []byte(`{"stdin_close":true}`))
		if out, last := second.Converse(c, nil); out[api.ChannelStdout] != "from a file\n" || last.Exit == nil || last.Exit.Code != 4 {
			t.Errorf("%q %+v", out, last)
		}
	}
	path := "/v1/sandboxes/one/execs/" + runs.ID
	if rep := second.Do("POST", path+"/stdin?close=true", "st\n"); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	got := second.Until(runs, daemontest.Exited)
	if got.Exit.Code != 6 || got.Usage == nil || got.StartedAt != runs.StartedAt {
		t.Errorf("%+v", got)
	}
	var text strings.Builder
	lines := daemontest.Events[api.ExecEvent](t, second.Do("GET", path+"/attach?from=6", nil))
	for _, e := range lines {
		text.WriteString(e.Text)
	}
	if text.String() != "last\n" || lines[0].Exec != runs.ID || lines[0].Offset != 6 || lines[len(lines)-1].Exit.Code != 6 {
		t.Errorf("%+v", lines)
	}
	if rep := second.Do("DELETE", path, nil); rep.Status != http.StatusNoContent || descriptors.Count() != 1 {
		t.Errorf("%s, %d are stored", rep.Body, descriptors.Count())
	}
	daemontest.Problem(t, second.Do("GET", path, nil), api.CodeNotFound)
	if rep := second.Do("DELETE", "/v1/sandboxes/one", nil); rep.Status != http.StatusNoContent || descriptors.Count() != 0 {
		t.Errorf("%s, %d are stored", rep.Body, descriptors.Count())
	}
}

// A sandbox that is paused while the daemon changes is kept from idling by its execs afterwards, as
// before.
func TestExecsOfAPausedSandboxAreHandedOn(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	first := b.Start()
	sb := first.Create(api.CreateSandbox{})
	x := first.Detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true})
	first.IdlesAfter(sb.ID, 0.3)
	if rep := first.Do("POST", "/v1/sandboxes/"+sb.ID+"/pause", nil); rep.Status != http.StatusOK {
		t.Fatalf("%s", rep.Body)
	}
	first.Cancel()
	first.Wait()
	second := b.Start()
	second.T = t
	if rep := second.Do("POST", "/v1/sandboxes/"+sb.ID+"/resume", nil); rep.Status != http.StatusOK {
		t.Fatalf("%s", rep.Body)
	}
	<-time.After(time.Second) // no event tells that a sandbox has not been ended
	if rep := second.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID+"/stdin", "\n"); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	if now := second.Until(x, func(x api.Exec) bool { return x.State != api.ExecRunning }); now.Exit == nil || now.Exit.Code != 3 {
		t.Errorf("%+v", now)
	}
}

// A launcher that does not return the execs at once is asked again, also by a request that starts
// another.
func TestExecsAreAdoptedLater(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	descriptors := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	first := b.Start()
	sb := first.Create(api.CreateSandbox{})
	x := first.Detach(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true})
	first.Cancel()
	first.Wait()
	descriptors.Busy = 2
	second := b.Start()
	second.T = t
	deadline := time.Now().Add(servicetest.Patience)
	for second.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID, nil).Status != http.StatusOK {
		if time.Now().After(deadline) {
			t.Fatal("it is not adopted")
		}
	}
	if rep := second.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+x.ID+"/stdin", "\n"); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	second.Until(x, func(x api.Exec) bool { return x.State == api.ExecExited && x.Exit.Code == 3 })
	second.Cancel()
	second.Wait()
	descriptors.SetBusy(1 << 20)
	third := b.Start()
	third.T = t
	daemontest.Problem(t, third.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}, Detach: true}), api.CodeUnavailable)
	descriptors.SetBusy(0)
	y := third.Detach(sb.ID, api.ExecRequest{Argv: []string{"true"}})
	third.Until(y, func(y api.Exec) bool { return y.State == api.ExecExited })
	third.Until(x, func(x api.Exec) bool { return x.State == api.ExecExited })
}

// A daemon may be killed right after a sandbox was stopped and started, before it has noted what
// became of its execs. The next one does not hold that against the new init.
func TestExecsOfAnEarlierLifeAreLost(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	descriptors := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	first := b.Start()
	sb := first.Create(api.CreateSandbox{})
	x := first.Detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	before, err := descriptors.StoredDescriptors(t.Context())
	if err != nil || len(before) != 1 {
		t.Fatalf("%v, %v", before, err)
	}
	defer servicetest.CloseFiles(before[0].Files)
	for _, route := range []string{"/stop", "/start"} {
		if rep := first.Do("POST", "/v1/sandboxes/"+sb.ID+route, nil); rep.Status != http.StatusOK {
			t.Fatalf("%s: %s", route, rep.Body)
		}
	}
	first.Until(x, func(x api.Exec) bool { return x.State == api.ExecLost })
	first.Cancel()
	first.Wait()
	// In memory no init has a pid.
	if err := service.RewriteInit(before[0].Files, 1<<22); err != nil {
		t.Fatal(err)
	}
	if err := descriptors.StoreDescriptors(t.Context(), before[0]); err != nil {
		t.Fatal(err)
	}
	second := b.Start()
	second.T = t
	if now := second.Until(x, func(x api.Exec) bool { return x.State != api.ExecRunning }); now.State != api.ExecLost {
		t.Errorf("%+v", now)
	}
	if res := second.Exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

// An exec that cannot be kept for the next daemon does not run.
func TestDetachedExecThatCannotBeKept(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	descriptors := servicetest.NewDescriptorStore(t)
	descriptors.Fail = fmt.Errorf("full: %w", runtime.ErrInUse)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	r := b.Start()
	sb := r.Create(api.CreateSandbox{})
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sleep", "600"}, Detach: true}), api.CodeConflict)
	deadline := time.Now().Add(servicetest.Patience)
	for {
		list := daemontest.Decode[api.ProcessList](t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/processes", nil), http.StatusOK)
		if len(list.Processes) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", list)
		}
	}
	if all := r.D.Service().Execs().Counts(); all != (exec.Counts{}) {
		t.Errorf("%+v", all)
	}
}

// A detached exec keeps its sandbox from idling, and ended ones make room for new ones.
func TestDetachedExecsAreBounded(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{})
	long := r.Detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	r.IdlesAfter(sb.ID, 0.3)
	var last api.Exec
	for range exec.MaxFinished + 3 {
		last = r.Detach(sb.ID, api.ExecRequest{Argv: []string{"true"}})
		r.Until(last, daemontest.Exited)
	}
	<-time.After(time.Second) // no event tells that a sandbox has not been ended
	list := daemontest.Decode[api.ExecList](t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
	if len(list.Execs) != exec.MaxFinished+1 || list.Execs[0].ID != long.ID || list.Execs[exec.MaxFinished].ID != last.ID {
		t.Errorf("%d execs", len(list.Execs))
	}
	for range exec.MaxDetached - exec.MaxFinished - 1 {
		r.Detach(sb.ID, api.ExecRequest{Argv: []string{"sleep", "600"}})
	}
	req := api.ExecRequest{Argv: []string{"true"}, Detach: true}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", req), api.CodeConflict)
	if rep := r.Do("DELETE", "/v1/sandboxes/"+sb.ID+"/execs/"+long.ID, nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	r.Detach(sb.ID, req)
}

// Ended execs of one sandbox do not block those of another.
func TestEndedExecsMakeRoomForThoseOfOthers(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	descriptors := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, descriptors)
	r := b.Start()
	const each = exec.MaxKept / service.MaxOutputLimit / 4
	var oldest api.Exec
	for i := range 5 {
		sb := r.Create(api.CreateSandbox{})
		for j := range each {
			x := r.Detach(sb.ID, api.ExecRequest{Argv: []string{"true"}, OutputLimit: service.MaxOutputLimit - 4, Stdin: []byte("text")})
			if i == 0 && j == 0 {
				oldest = x
			}
			r.Until(x, daemontest.Exited)
		}
	}
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+oldest.Sandbox+"/execs/"+oldest.ID, nil), api.CodeNotFound)
	if all := r.D.Service().Execs().Counts(); all.Detached != 4*each || all.Kept != exec.MaxKept || descriptors.Count() != 4*each {
		t.Errorf("%+v, %d are stored", all, descriptors.Count())
	}
}

// An exec with a client is listed while it runs, and takes signals; other clients cannot attach to
// it.
func TestExecWithItsClientIsListed(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	done := make(chan daemontest.Reply, 1)
	go func() {
		rep, _ := r.Try("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"sh", "-c", "echo x; exec sleep 600"}})
		done <- rep
	}()
	var x api.Exec
	deadline := time.Now().Add(servicetest.Patience)
	for x.StdoutBytes != 2 {
		list := daemontest.Decode[api.ExecList](t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
		if len(list.Execs) == 1 {
			x = list.Execs[0]
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", list)
		}
	}
	if x.Detached || x.State != api.ExecRunning || x.PID < 2 || !slices.Equal(x.Argv, []string{"sh", "-c", "echo x; exec sleep 600"}) {
		t.Errorf("%+v", x)
	}
	path := "/v1/sandboxes/" + sb.ID + "/execs/" + x.ID
	daemontest.Problem(t, r.Do("GET", path+"/attach", nil), api.CodeConflict)
	daemontest.Problem(t, r.Do("POST", path+"/stdin", "x"), api.CodeConflict)
	daemontest.Problem(t, r.Do("POST", path+"/resize", api.TerminalSize{Rows: 1, Cols: 1}), api.CodeInvalid)
	if rep := r.Do("POST", path+"/signal", api.ExecSignal{Signal: "TERM"}); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	res := daemontest.Decode[api.ExecResult](t, <-done, http.StatusOK)
	if res.Exit.Signal != "SIGTERM" || res.Stdout != "x\n" {
		t.Errorf("%+v", res)
	}
	daemontest.Problem(t, r.Do("GET", path, nil), api.CodeNotFound)
}
