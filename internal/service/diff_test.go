package service_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

// reading is a Differ whose readings take as long as a test wants.
type reading struct {
	during func(ctx context.Context)
}

func (d *reading) WriteDiff(ctx context.Context, _ runtime.DiffRequest, _ io.Writer) (runtime.DiffResult, error) {
	d.during(ctx)
	return runtime.DiffResult{}, nil
}

func (d *reading) ListDiff(ctx context.Context, _ runtime.DiffRequest, found func(api.Change) error) (runtime.DiffResult, error) {
	d.during(ctx)
	return runtime.DiffResult{}, found(api.Change{Path: "half/of/it", Kind: "added"})
}

func (d *reading) StoreDiff(ctx context.Context, _ runtime.DiffRequest, _ string) (runtime.DiffResult, bool, error) {
	d.during(ctx)
	return runtime.DiffResult{}, false, nil
}

func TestDiffAndCommitOfASandboxThatIsDeletedMeanwhile(t *testing.T) {
	b := daemontest.New(t, nil)
	differ := &reading{}
	b.Options.Engine = servicetest.WithDiffer(b.Options.Engine, differ)
	r := b.Start()
	diff := func(id string) daemontest.Reply { return r.Do("GET", "/v1/sandboxes/"+id+"/diff", nil) }
	commit := func(id string) daemontest.Reply {
		return r.Do("POST", "/v1/sandboxes/"+id+"/commit", api.CommitSandbox{Reference: "a/b:1"})
	}
	for _, test := range []struct {
		of  string
		ask func(id string) daemontest.Reply
	}{
		{"example.org/app:1", diff},
		{"example.org/app:1", commit},
		{"example.org/snapshot:1", commit}, // the layers of snapshots that it stands on go with it
	} {
		ask := test.ask
		id := r.Create(api.CreateSandbox{Image: test.of}).ID
		differ.during = func(context.Context) {}
		if rep := ask(id); rep.Status >= 300 {
			t.Fatalf("before: %d %s", rep.Status, rep.Body)
		}
		differ.during = func(ctx context.Context) {
			if err := r.API().DeleteSandbox(context.WithoutCancel(ctx), id); err != nil {
				t.Error(err)
			}
			differ.during = func(context.Context) { t.Error("read on") }
			<-ctx.Done() // whoever reads is told, and what comes of it does not matter
		}
		if p := daemontest.Problem(t, ask(id), api.CodeConflict); !strings.Contains(p.Detail, "deleted meanwhile") || strings.Contains(p.Hint, "only be deleted") {
			t.Errorf("%+v", p)
		}
	}
}

// Init cannot answer while its sandbox is read. It must not be taken for one that does not want to.
func TestCommitHoldsTheSandbox(t *testing.T) {
	b := daemontest.New(t, nil)
	differ := &reading{}
	b.Options.Engine = servicetest.WithDiffer(b.Options.Engine, differ)
	r := b.Start()
	id := r.Create(api.CreateSandbox{Image: "example.org/app:1"}).ID
	lease, err := r.D.Service().Supervisor().Begin(id)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	held := service.GuestOf(lease).Held
	if at := held(); !at.IsZero() {
		t.Errorf("held at %v before anyone holds it", at)
	}
	var during time.Time
	differ.during = func(context.Context) {
		if during = time.Now(); held().Before(during) {
			t.Errorf("not held while it is read")
		}
	}
	if rep := r.Do("POST", "/v1/sandboxes/"+id+"/commit", api.CommitSandbox{Reference: "a/b:1"}); rep.Status != http.StatusCreated {
		t.Fatalf("%d %s", rep.Status, rep.Body)
	}
	if at := held(); at.Before(during) || at != held() {
		t.Errorf("held until %v after a reading at %v", at, during)
	}
	// One that has ended can be committed too.
	if err := r.D.Service().Supervisor().Kill(t.Context(), id, "by the test"); err != nil {
		t.Fatal(err)
	}
	differ.during = func(context.Context) {}
	if rep := r.Do("POST", "/v1/sandboxes/"+id+"/commit", api.CommitSandbox{Reference: "a/b:1"}); rep.Status != http.StatusCreated {
		t.Errorf("ended: %d %s", rep.Status, rep.Body)
	}
}

func TestDiffCommitAndPushRefuse(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Options.Engine = servicetest.WithDiffer(b.Options.Engine, &reading{during: func(ctx context.Context) { t.Error(errors.New("read all the same"), ctx.Err()) }})
	r := b.Start()
	id := r.Create(api.CreateSandbox{Image: "example.org/app:1"}).ID
	commit := "/v1/sandboxes/" + id + "/commit"
	for _, test := range []struct {
		method, path, body string
		code               api.Code
		says               string
	}{
		{"GET", "/v1/sandboxes/" + id + "/diff?all=1", "", api.CodeInvalid, "all"},
		{"GET", "/v1/sandboxes/nobody/diff", "", api.CodeNotFound, "nobody"},
		{"POST", commit, "", api.CodeInvalid, "body"},
		{"POST", commit, "[]", api.CodeInvalid, ""},
		{"POST", commit, "{}", api.CodeInvalid, "reference"},
		{"POST", commit, `{"reference":"a/b:1","tag":"x"}`, api.CodeInvalid, "tag"},
		{"POST", commit, `{"reference":"a/b:1","comment":"a\u0007b"}`, api.CodeInvalid, "comment"},
		{"POST", commit, `{"reference":"a/b:1","config":{"cmd":["a\u0000b"]}}`, api.CodeInvalid, "config.cmd"},
		{"POST", commit, `{"reference":"a/b:1","config":{"entrypoint":["a\u0000b"]}}`, api.CodeInvalid, "config.entrypoint"},
		{"POST", commit, `{"reference":"a/b:1","config":{"labels":{"":"x"}}}`, api.CodeInvalid, "label"},
		{"POST", "/v1/images/push", "{}", api.CodeInvalid, "reference"},
		{"POST", "/v1/images/push", `{"reference":"a\nb"}`, api.CodeInvalid, "reference"},
		{"POST", "/v1/images/push", `{"reference":"a/b:1","force":true}`, api.CodeInvalid, "force"},
	} {
		var body any
		if test.body != "" {
			body = test.body
		}
		rep := r.Do(test.method, test.path, body, "Content-Type", "application/json")
		if p := daemontest.Problem(t, rep, test.code); !strings.Contains(p.Detail, test.says) {
			t.Errorf("%s %s %s: %+v", test.method, test.path, test.body, p)
		}
	}
}

// Changes of a build's program are not kept if a concurrent delete removes its sandbox: half of
// them would be the step's result for ever.
func TestChangesOfABuildWhoseSandboxIsDeleted(t *testing.T) {
	b := daemontest.New(t, nil)
	differ := &reading{}
	b.Options.Engine = servicetest.WithDiffer(b.Options.Engine, differ)
	r := b.Start()
	id := r.Create(api.CreateSandbox{Image: "example.org/app:1"}).ID
	differ.during = func(ctx context.Context) {
		if err := r.API().DeleteSandbox(context.WithoutCancel(ctx), id); err != nil {
			t.Error(err)
		}
	}
	if err := r.D.Service().WriteChanges(t.Context(), id); !errors.Is(err, class.ErrUnreadable) {
		t.Errorf("%v", err)
	}
}
