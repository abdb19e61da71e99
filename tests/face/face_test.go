package face

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

func TestMain(m *testing.M) { servicetest.Main(m) }

// layers stands in for the unpacker and the Differ: it believes every layer and reads each as an
// empty one.
type layers struct{}

func (layers) Apply(_ context.Context, req layer.ApplyRequest) (results []layer.Result, err error) {
	for _, l := range req.Layers {
		results = append(results, layer.Result{DiffID: l.DiffID})
	}
	return results, nil
}

func (layers) RemoveLayer(context.Context, string) error { return nil }

var emptyLayer = make([]byte, 1024) // the end of a tar stream

const emptyDiffID = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"

func (layers) WriteDiff(_ context.Context, _ runtime.DiffRequest, w io.Writer) (runtime.DiffResult, error) {
	_, err := w.Write(emptyLayer)
	return runtime.DiffResult{DiffID: emptyDiffID}, err
}

func (layers) ListDiff(context.Context, runtime.DiffRequest, func(api.Change) error) (runtime.DiffResult, error) {
	return runtime.DiffResult{}, nil
}

func (layers) StoreDiff(context.Context, runtime.DiffRequest, string) (runtime.DiffResult, bool, error) {
	return runtime.DiffResult{DiffID: emptyDiffID}, true, nil
}

// newService returns a service on the in-memory engine and a real image store.
func newService(t *testing.T) *service.Service {
	t.Helper()
	data := t.TempDir()
	images, err := image.Open(data, layers{}, image.Options{LayersDir: filepath.Join(data, "layers")})
	if err != nil {
		t.Fatal(err)
	}
	engine := runtimetest.NewEngine(servicetest.RealInit(t))
	s, err := service.New(t.Context(), service.Options{
		Version: "test", DataDir: data, RuntimeDir: filepath.Join(t.TempDir(), "run"),
		Engine: servicetest.WithDescriptorStore(servicetest.WithDiffer(engine, layers{}), servicetest.NewDescriptorStore(t)),
		Images: func(tenant string) service.Images { return images.For(tenant) },
		Profile: func(name string) (runtime.Profile, api.Limits, error) {
			return runtime.Profile{Name: name, Seccomp: &specs.LinuxSeccomp{}}, api.Limits{Pids: 512}, nil
		},
		Agents: agents.New(agents.Options{Dir: t.TempDir()}),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(context.WithoutCancel(t.Context()), false), images.Close()); err != nil {
			t.Error(err)
		}
		engine.Close()
	})
	return s
}

// addImage imports an image under this name.
func addImage(t *testing.T, s *service.API, name string) {
	t.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err := w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Typeflag: tar.TypeReg})
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportImages(t.Context(), &archive, service.ImportOptions{Reference: name, Rootfs: true}); err != nil {
		t.Fatal(err)
	}
}

func TestASecondFaceServesSandboxes(t *testing.T) {
	s := newService(t)
	face := New(s)
	ask := func(method, path, body string, status int) string {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		r.Header.Set("Tenant", "blue")
		w := httptest.NewRecorder()
		face.ServeHTTP(w, r)
		if w.Code != status {
			t.Fatalf("%s %s: %d %s, want %d", method, path, w.Code, w.Body, status)
		}
		return w.Body.String()
	}
	addImage(t, s.For(service.Caller{Tenant: "blue"}), "tools/base:1")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}

	ask("PUT", "/box/one?image=nosuch", "", http.StatusNotFound)
	ask("PUT", "/box/one?image=tools/base:1", "", http.StatusOK)
	ask("PUT", "/box/one?image=tools/base:1", "", http.StatusConflict)
	if got := ask("GET", "/box", "", http.StatusOK); got != "one running\n" {
		t.Errorf("list: %q", got)
	}
	if got := ask("POST", "/box/one/run", "echo hi", http.StatusOK); got != "hi\n" {
		t.Errorf("run: %q", got)
	}
	job := strings.TrimSpace(ask("POST", "/box/one/job", "echo out; exit 3", http.StatusOK))
	if got := ask("GET", "/box/one/job/"+job, "", http.StatusOK); got != "out\nexit 3\n" {
		t.Errorf("attach: %q", got)
	}
	if got := ask("GET", "/box/one/file"+file, "", http.StatusOK); got != "content" {
		t.Errorf("file: %q", got)
	}
	ask("DELETE", "/box/one", "", http.StatusOK)
	ask("GET", "/box/one/file"+file, "", http.StatusNotFound)
}

// Nothing of one tenant exists for another, by name or by id, in whichever operation.
func TestCallersSeeNothingOfOtherTenants(t *testing.T) {
	svc := newService(t)
	a, b := svc.For(service.Caller{Tenant: "a", UID: 1}), svc.For(service.Caller{Tenant: "b", UID: 1})
	own := svc.For(service.Caller{UID: 1})
	ctx := t.Context()
	addImage(t, a, "tools/base:1")
	box, err := a.CreateSandbox(ctx, api.CreateSandbox{
		Name: "box", Image: "tools/base:1", Command: []string{"sh", "-c", "echo secret; exec sleep 600"},
	})
	if err != nil {
		t.Fatal(err)
	}
	job, err := a.StartDetached(ctx, "box", api.ExecRequest{Argv: []string{"sleep", "600"}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	snap, err := a.TakeSnapshot(ctx, "box", api.TakeSnapshot{Name: "snap"})
	if err != nil {
		t.Fatal(err)
	}

	secret := api.SetSecret{Kind: api.SecretBearer, Value: "the-secret-of-a", Host: "example.com"}
	if _, err := a.SetSecret(ctx, "key", secret); err != nil {
		t.Fatal(err)
	}

	argv := api.ExecRequest{Argv: []string{"true"}}
	nothing := func(api.ExecEvent) error { return errors.New("an event of another tenant's exec") }
	onBox := map[string]func(s *service.API, ref string) error{
		"get": func(s *service.API, ref string) error { _, err := s.GetSandbox(ref); return err },
		"update": func(s *service.API, ref string) error {
			_, err := s.UpdateSandbox(ctx, ref, api.UpdateSandbox{})
			return err
		},
		"delete": func(s *service.API, ref string) error { return s.DeleteSandbox(ctx, ref) },
		"start": func(s *service.API, ref string) error {
			_, err := s.StartSandbox(ctx, ref, api.StartSandbox{})
			return err
		},
		"stop": func(s *service.API, ref string) error {
			_, err := s.StopSandbox(ctx, ref, api.StopSandbox{})
			return err
		},
		"pause":  func(s *service.API, ref string) error { _, err := s.PauseSandbox(ctx, ref, struct{}{}); return err },
		"resume": func(s *service.API, ref string) error { _, err := s.ResumeSandbox(ctx, ref, struct{}{}); return err },
		"wait":   func(s *service.API, ref string) error { _, err := s.WaitSandbox(ctx, ref); return err },
		"log": func(s *service.API, ref string) error {
			_, err := s.Log(ctx, ref, service.LogOptions{Stdout: true})
			return err
		},
		"stats": func(s *service.API, ref string) error { _, err := s.Stats(ctx, ref); return err },
		"diff":  func(s *service.API, ref string) error { _, err := s.Diff(ctx, ref); return err },
		"commit": func(s *service.API, ref string) error {
			_, err := s.Commit(ctx, ref, api.CommitSandbox{Reference: "x/y:1"})
			return err
		},
		"snapshot": func(s *service.API, ref string) error {
			_, err := s.TakeSnapshot(ctx, ref, api.TakeSnapshot{})
			return err
		},
		"snapshots": func(s *service.API, ref string) error { _, err := s.Snapshots(ref); return err },
		"fork":      func(s *service.API, ref string) error { _, err := s.Fork(ctx, ref, api.ForkSandbox{}); return err },
		"rollback": func(s *service.API, ref string) error {
			_, err := s.Rollback(ctx, ref, api.RollbackSandbox{Snapshot: "snap"})
			return err
		},
		"exec":     func(s *service.API, ref string) error { _, err := s.ExecBuffered(ctx, ref, argv); return err },
		"stream":   func(s *service.API, ref string) error { return s.ExecStream(ctx, ref, argv, nothing) },
		"interact": func(s *service.API, ref string) error { _, err := s.StartInteractive(ctx, ref, argv); return err },
		"detach": func(s *service.API, ref string) error {
			_, err := s.StartDetached(ctx, ref, api.ExecRequest{Argv: []string{"true"}, Detach: true})
			return err
		},
		"execs":       func(s *service.API, ref string) error { _, err := s.Execs(ref); return err },
		"find exec":   func(s *service.API, ref string) error { _, err := s.Exec(ref, job.ID); return err },
		"find main":   func(s *service.API, ref string) error { _, err := s.Exec(ref, api.MainExec); return err },
		"delete exec": func(s *service.API, ref string) error { return s.DeleteExec(ctx, ref, job.ID) },
		"processes":   func(s *service.API, ref string) error { _, err := s.Processes(ctx, ref); return err },
		"read":        func(s *service.API, ref string) error { _, err := s.ReadFile(ctx, ref, "/etc/passwd"); return err },
		"write": func(s *service.API, ref string) error {
			return s.WriteFile(ctx, ref, "/tmp/x", service.WriteOptions{}, strings.NewReader("x"))
		},
		"append": func(s *service.API, ref string) error {
			return s.AppendFile(ctx, ref, "/tmp/x", service.WriteOptions{}, strings.NewReader("x"))
		},
		"archive": func(s *service.API, ref string) error { return s.ArchiveOut(ctx, ref, "/etc", io.Discard) },
		"extract": func(s *service.API, ref string) error {
			return s.ArchiveIn(ctx, ref, "/tmp", service.WriteOptions{}, bytes.NewReader(emptyLayer))
		},
		"stat": func(s *service.API, ref string) error { _, err := s.Stat(ctx, ref, "/", false); return err },
		"list": func(s *service.API, ref string) error {
			_, err := s.List(ctx, ref, "/", service.ListOptions{Depth: 1})
			return err
		},
		"mkdir": func(s *service.API, ref string) error {
			return s.Mkdir(ctx, ref, "/tmp/d", true, service.WriteOptions{})
		},
		"move":   func(s *service.API, ref string) error { return s.Move(ctx, ref, "/tmp/x", "/tmp/y", true) },
		"remove": func(s *service.API, ref string) error { return s.RemoveFile(ctx, ref, "/tmp/x", true) },
		"watch": func(s *service.API, ref string) error {
			return s.Watch(ctx, ref, "/tmp", false, func(api.FileChange) error { t.Error("a change"); return nil })
		},
	}
	for name, ask := range onBox {
		for _, other := range []*service.API{b, own} {
			for _, ref := range []string{box.ID, "box"} {
				if err := ask(other, ref); !errors.Is(err, class.ErrNoSandbox) {
					t.Errorf("%s of %s: %v", name, ref, err)
				}
			}
		}
	}
	others := map[string]struct {
		ask  func(s *service.API) error
		want error
	}{
		"remove secret":    {func(s *service.API) error { return s.RemoveSecret(ctx, "key") }, class.ErrNoSecret},
		"snapshot by name": {func(s *service.API) error { _, err := s.Snapshot("snap"); return err }, class.ErrNoSnapshot},
		"snapshot by id":   {func(s *service.API) error { _, err := s.Snapshot(snap.ID); return err }, class.ErrNoSnapshot},
		"remove snapshot":  {func(s *service.API) error { _, err := s.RemoveSnapshot(ctx, snap.ID); return err }, class.ErrNoSnapshot},
		"export snapshot":  {func(s *service.API) error { return s.ExportSnapshot(ctx, snap.ID, io.Discard) }, class.ErrNoSnapshot},
		"create of it": {func(s *service.API) error {
			_, err := s.CreateSandbox(ctx, api.CreateSandbox{Snapshot: snap.ID})
			return err
		}, class.ErrNoSnapshot},
		"create of the image": {func(s *service.API) error {
			_, err := s.CreateSandbox(ctx, api.CreateSandbox{Image: "tools/base:1"})
			return err
		}, class.ErrNoImage},
		"create by digest": {func(s *service.API) error {
			_, err := s.CreateSandbox(ctx, api.CreateSandbox{Image: "tools/base@" + box.ImageDigest})
			return err
		}, class.ErrNoImage},
		"inspect image": {func(s *service.API) error { _, err := s.InspectImage(ctx, "tools/base:1"); return err }, class.ErrNoImage},
		"export image":  {func(s *service.API) error { return s.ExportImage(ctx, "tools/base:1", "", io.Discard) }, class.ErrNoImage},
		"tag image": {func(s *service.API) error {
			_, err := s.TagImage(ctx, api.TagImage{Source: "tools/base:1", Target: "x/y:1"})
			return err
		}, class.ErrNoImage},
		"remove image": {func(s *service.API) error { _, err := s.RemoveImage(ctx, "tools/base:1", true); return err }, class.ErrNoImage},
		"push image": {func(s *service.API) error {
			_, err := s.Push(ctx, api.PushImage{Reference: "tools/base:1"}, func(api.PullEvent) {})
			return err
		}, class.ErrNoImage},
	}
	for name, op := range others {
		for _, other := range []*service.API{b, own} {
			if err := op.ask(other); !errors.Is(err, op.want) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	// Agent runs belong to the daemon's own tenant.
	run := "20260116_143000"
	for name, ask := range map[string]func() error{
		"get":    func() error { _, err := b.AgentRun(run); return err },
		"events": func() error { return b.AgentEvents(ctx, run, 1, nil) },
		"resume": func() error { _, err := b.ResumeAgentRun(ctx, run, api.ResumeAgentRun{}); return err },
		"cancel": func() error { _, err := b.CancelAgentRun(run, api.CancelAgentRun{}); return err },
		"remove": func() error { return b.RemoveAgentRun(ctx, run) },
	} {
		if err := ask(); !errors.Is(err, class.ErrNoRun) {
			t.Errorf("%s of an agent run: %v", name, err)
		}
	}
	if _, err := b.StartAgentRun(ctx, api.StartAgentRun{}); !errors.Is(err, class.ErrNoAgents) {
		t.Errorf("start of an agent run: %v", err)
	}
	// The host and the daemon are no tenant's.
	if _, err := b.System(ctx); !errors.Is(err, class.ErrForbidden) {
		t.Errorf("system: %v", err)
	}
	if _, err := b.Checks(ctx); !errors.Is(err, class.ErrForbidden) {
		t.Errorf("checks: %v", err)
	}
	if _, err := b.VerifyImages(ctx); !errors.Is(err, class.ErrForbidden) {
		t.Errorf("verify: %v", err)
	}
	// Lists are empty, and clearing up takes nothing.
	zero := 0.0
	for _, other := range []*service.API{b, own} {
		if list, err := other.ListSandboxes(service.SandboxFilter{}); err != nil || len(list.Sandboxes) != 0 {
			t.Errorf("sandboxes: %+v, %v", list, err)
		}
		if list, err := other.Snapshots(""); err != nil || len(list.Snapshots) != 0 {
			t.Errorf("snapshots: %+v, %v", list, err)
		}
		if list, err := other.Secrets(); err != nil || len(list) != 0 {
			t.Errorf("secrets: %+v, %v", list, err)
		}
		list, err := other.Images(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, img := range list.Images {
			if img.Reference != api.HostImage {
				t.Errorf("images: %+v", img)
			}
		}
		if runs, err := other.AgentRuns(); err != nil || len(runs.Runs) != 0 {
			t.Errorf("agent runs: %+v, %v", runs, err)
		}
		if out, err := other.PruneSandboxes(ctx, api.PruneSandboxes{OlderThan: &zero}); err != nil || len(out.Removed) != 0 || out.Recent != 0 {
			t.Errorf("prune sandboxes: %+v, %v", out, err)
		}
		if out, err := other.PruneSnapshots(ctx, api.PruneSnapshots{OlderThan: &zero}); err != nil || len(out.Removed) != 0 {
			t.Errorf("prune snapshots: %+v, %v", out, err)
		}
		if out, err := other.PruneImages(ctx, api.PruneImages{All: true}); err != nil || len(out.Removed) != 0 {
			t.Errorf("prune images: %+v, %v", out, err)
		}
	}

	// The owner still has everything, and each name can be used by both.
	if _, err := a.GetSandbox("box"); err != nil {
		t.Error(err)
	}
	if _, err := a.Snapshot("snap"); err != nil {
		t.Error(err)
	}
	addImage(t, b, "tools/base:1")
	second, err := b.CreateSandbox(ctx, api.CreateSandbox{Name: "box", Image: "tools/base:1"})
	if err != nil || second.ID == box.ID {
		t.Fatalf("%+v, %v", second, err)
	}
	if _, err := b.TakeSnapshot(ctx, "box", api.TakeSnapshot{Name: "snap"}); err != nil {
		t.Error(err)
	}
	if got, err := a.GetSandbox("box"); err != nil || got.ID != box.ID {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := b.Exec("box", job.ID); !errors.Is(err, class.ErrNoExec) {
		t.Errorf("exec of another tenant's sandbox of the same name: %v", err)
	}
	if err := b.DeleteSandbox(ctx, "box"); err != nil {
		t.Error(err)
	}
	if _, err := a.GetSandbox("box"); err != nil {
		t.Error(err)
	}
}
