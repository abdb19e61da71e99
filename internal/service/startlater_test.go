package service_test

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

// A prepared exec is started once, for the client that waits for it too, and says so if it could
// not be. It is its own sandbox's and tenant's alone, and ends with the daemon.
func TestPreparedExec(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb, other := r.Create(api.CreateSandbox{}), r.Create(api.CreateSandbox{})
	mine, theirs := r.API(), r.D.Service().For(service.Caller{Tenant: "other"})
	prepare := func(argv ...string) service.ExecRecord {
		t.Helper()
		rec, err := mine.PrepareExec(sb.ID, api.ExecRequest{Argv: argv})
		if err != nil || rec.State != api.ExecPrepared || rec.PID != 0 {
			t.Fatalf("%+v, %v", rec, err)
		}
		return rec
	}
	is := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}
	}
	ctx := t.Context()
	x := prepare("sh", "-c", "echo one; echo two >&2; exit 3")
	for what, as := range map[string]*service.API{"another sandbox's": mine, "another tenant's": theirs} {
		ref, want := other.ID, class.ErrNoExec
		if as == theirs {
			ref, want = sb.ID, runtime.ErrNotFound
		}
		_, err := as.ExecRecordOf(ref, x.ID)
		is(what, err, want)
		_, err = as.StartPrepared(ctx, ref, x.ID, api.TerminalSize{})
		is(what, err, want)
		_, err = as.Upcoming(ref, x.ID)
		is(what, err, want)
		is(what, as.DeleteExec(ctx, ref, x.ID), want)
	}
	_, err := theirs.PrepareExec(sb.ID, api.ExecRequest{Argv: []string{"true"}})
	is("another tenant's", err, runtime.ErrNotFound)
	_, err = mine.Upcoming(sb.ID, api.MainExec)
	is("a main process that will not be", err, runtime.ErrState)

	u, err := mine.Upcoming(sb.ID, x.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if _, err := mine.StartPrepared(ctx, sb.ID, x.ID, api.TerminalSize{}); err != nil {
		t.Fatal(err)
	}
	got, err := u.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]string
	var exit *api.Exit
	if err := got.AttachHeld(ctx, 0, u, true, func(e api.ExecEvent) error {
		out[len(e.Stream)%6%2] += e.Text // both have six letters, and no stream none
		if e.Exit != nil {
			exit = e.Exit
		}
		return nil
	}); err != nil || exit == nil || exit.Code != 3 || len(out[0]) != 8 {
		t.Errorf("%q, %+v, %v", out, exit, err)
	}
	_, err = mine.StartPrepared(ctx, sb.ID, x.ID, api.TerminalSize{})
	is("started again", err, runtime.ErrState)

	bad := prepare("/no/such")
	lost, err := mine.Upcoming(sb.ID, bad.ID)
	if err != nil {
		t.Fatal(err)
	}
	_, err = mine.StartPrepared(ctx, sb.ID, bad.ID, api.TerminalSize{})
	is("no program", err, class.ErrProgramMissing)
	_, err = lost.Wait(ctx)
	is("no program", err, class.ErrGone)
	if rec, err := mine.ExecRecordOf(sb.ID, bad.ID); err != nil || rec.State != api.ExecLost || !errors.Is(rec.Failure, class.ErrProgramMissing) {
		t.Errorf("%+v, %v", rec, err)
	}
	_, err = mine.StartPrepared(ctx, sb.ID, bad.ID, api.TerminalSize{})
	is("started again", err, runtime.ErrState)
	for _, rec := range []service.ExecRecord{bad, prepare("true")} {
		is("deletion", mine.DeleteExec(ctx, sb.ID, rec.ID), nil)
		is("deletion", mine.DeleteExec(ctx, sb.ID, rec.ID), class.ErrNoExec)
	}
	if all := r.D.Service().Execs().Counts(); all.Prepared != 0 || all.Upcoming != 0 {
		t.Errorf("%+v", all)
	}

	// A sandbox takes them along, also one that is prepared as it is deleted.
	prepare("true")
	is("deletion", mine.DeleteSandbox(ctx, sb.ID), nil)
	_, err = r.D.Service().Execs().Prepare(&runtime.Record{Sandbox: api.Sandbox{ID: sb.ID}}, api.ExecRequest{})
	is("prepared late", err, runtime.ErrNotFound)
	if all := r.D.Service().Execs().Counts(); all.Prepared != 0 {
		t.Errorf("%+v", all)
	}
	sb = other
	x = prepare("true")
	r.Cancel()
	r.Wait()
	r = b.Start()
	path := "/v1/sandboxes/" + sb.ID + "/execs/" + x.ID
	daemontest.Problem(t, r.Do("GET", path, nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("POST", path+"/start", nil), api.CodeNotFound)
}

// A client that holds the output and does not read it stops its program, and neither the end of
// its sandbox nor anything of another one.
func TestReaderThatStopsHoldsUpItsProgramOnly(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", "while :; do echo text; done"}})
	x, err := r.API().Detached(sb.ID, api.MainExec)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	reading, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- x.AttachHeld(ctx, 0, nil, false, func(e api.ExecEvent) error {
			if e.Data == nil {
				close(reading)
				<-ctx.Done()
			}
			return ctx.Err()
		})
	}()
	<-reading
	r.Until(x.Record().Exec, func(x api.Exec) bool { return x.StdoutBytes > exec.MainRing-64<<10 }) // no more is taken
	other := r.Create(api.CreateSandbox{})
	if res := r.Exec(other.ID, api.ExecRequest{Argv: []string{"sh", "-c", "seq 1 100000 | tail -n 1"}}); res.Stdout != "100000\n" {
		t.Errorf("%+v", res)
	}
	stopped := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/stop", api.StopSandbox{Grace: new(0.0)}), http.StatusOK)
	if stopped.State != api.StateStopped || stopped.Exit == nil || stopped.Exit.Signal != "SIGKILL" {
		t.Errorf("%+v", stopped)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A sandbox that is created stopped is started by nothing but a start, ends by no time, and goes
// like any other that has ended.
func TestCreatedStoppedSandboxStaysSo(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	make := func(name string, s api.Settings) api.Sandbox {
		t.Helper()
		sb := r.Create(api.CreateSandbox{Name: name, Stopped: true, Command: []string{"sh", "-c", "exit 4"}, Settings: s})
		if sb.State != api.StateStopped || !sb.StartedAt.IsZero() || sb.Exit != nil {
			t.Errorf("%+v", sb)
		}
		return sb
	}
	make("always", api.Settings{Restart: "always"})
	auto := make("auto", api.Settings{AutoRemove: true})
	r.Cancel()
	r.Wait()
	r = b.Start()
	for _, name := range []string{"always", "auto"} {
		if sb := r.WaitEnded(name); sb.State != api.StateStopped || sb.Reason != runtime.ReasonCreated || !sb.StartedAt.IsZero() {
			t.Errorf("%+v", sb)
		}
	}
	if due := r.D.Service().Due(); due != 0 || len(b.Engine.IDs()) != 0 {
		t.Errorf("%d restarts are due, %v run", due, b.Engine.IDs())
	}
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/auto/start", nil), http.StatusOK)
	if sb := r.WaitEnded(auto.ID); sb.Exit == nil || sb.Exit.Code != 4 || sb.StartedAt.IsZero() {
		t.Errorf("%+v", sb)
	}
	bad := r.Create(api.CreateSandbox{Name: "bad", Stopped: true, Command: []string{"/no/such/program"}, Settings: api.Settings{AutoRemove: true}})
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/bad/start", nil), api.CodeProgramMissing)
	for r.Do("GET", "/v1/sandboxes/"+bad.ID, nil).Status != http.StatusNotFound {
		if t.Context().Err() != nil {
			t.Fatal("a sandbox whose first start failed stays")
		}
	}
	pruned := daemontest.Decode[api.SandboxesRemoved](t, r.Do("POST", "/v1/sandboxes/prune", api.PruneSandboxes{OlderThan: new(0.0)}), http.StatusOK)
	found := false
	for _, sb := range pruned.Removed {
		found = found || sb.Name == "always"
	}
	if !found {
		t.Errorf("%+v", pruned)
	}
}
