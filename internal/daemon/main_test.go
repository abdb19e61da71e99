package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// The init of a test's sandbox is the product's own, in namespaces of its own but on the host's files: this binary
// starts again, mounts what init needs, and becomes it.
const envInit = "SANDBOXD_DAEMON_TEST_INIT"

var patience = testenv.HungAfter

func TestMain(m *testing.M) {
	if path := os.Getenv(envInit); path != "" {
		fmt.Fprintln(os.Stderr, "test init:", becomeInit(path))
		os.Exit(1)
	}
	code := m.Run()
	if built := initPath.dir; built != "" {
		_ = os.RemoveAll(built) // a temporary directory
	}
	os.Exit(code)
}

func becomeInit(path string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666"); err != nil {
		return fmt.Errorf("mount devpts: %w", err)
	}
	if err := unix.Mount("/dev/pts/ptmx", "/dev/ptmx", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind ptmx: %w", err)
	}
	return unix.Exec(path, []string{"sandboxd-init"}, nil)
}

// initPath builds cmd/sandboxd-init once, without cgo, which it cannot have, unless SANDBOXD_BIN has it.
var initPath struct {
	once sync.Once
	dir  string
	err  error
}

func buildInit(tb testing.TB) string {
	tb.Helper()
	if bin := os.Getenv("SANDBOXD_BIN"); bin != "" {
		return filepath.Join(bin, "sandboxd-init")
	}
	initPath.once.Do(func() {
		if initPath.dir, initPath.err = os.MkdirTemp("", "sandboxd-init"); initPath.err != nil { //nolint:usetesting // outlives the test: all share it
			return
		}
		cmd := exec.Command("go", "build", "-o", filepath.Join(initPath.dir, "sandboxd-init"), "github.com/sandboxd/sandboxd/cmd/sandboxd-init")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			initPath.err = fmt.Errorf("%w: %s", err, out)
		}
		// Found and executed from inside, also by a user without rights on a private temporary directory.
		initPath.err = errors.Join(initPath.err, os.Chmod(initPath.dir, 0o755))
	})
	if initPath.err != nil {
		tb.Fatal(initPath.err)
	}
	return filepath.Join(initPath.dir, "sandboxd-init")
}

// realInit runs sandboxd-init for each sandbox.
func realInit(tb testing.TB) runtimetest.Init {
	tb.Helper()
	if os.Getuid() != 0 {
		testenv.RequireUserNS(tb) // for the namespaces of the init
	}
	path := buildInit(tb)
	return func(_ *runtime.Spec, control *os.File, stop <-chan struct{}) {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{envInit + "=" + path}
		cmd.Stderr = os.Stderr
		cmd.ExtraFiles = []*os.File{control}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
			Pdeathsig:  unix.SIGKILL,
		}
		if os.Getuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		// Pdeathsig counts from the thread that forked.
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		err := cmd.Start()
		_ = control.Close() // init has its own
		if err != nil {
			tb.Errorf("start init: %v", err)
			<-stop
			return
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait() // it is killed
			close(ended)
		}()
		select {
		case <-stop:
			_ = cmd.Process.Kill() // it may have ended
		case <-ended:
		}
		<-ended
	}
}

// fakeImages is a store of two images.
type fakeImages struct {
	Images // what is not overridden here, no test may call

	pull func(image.PullOptions) (*image.Image, error)
}

func (f *fakeImages) Commit(ctx context.Context, opts image.CommitOptions) (*image.Image, layer.Result, error) {
	for _, l := range opts.Below {
		if _, err := l.Write(ctx, io.Discard); err != nil {
			return nil, layer.Result{}, err
		}
	}
	result, err := opts.Layer(ctx, io.Discard)
	return &image.Image{Image: api.Image{Reference: opts.Reference}}, result, err
}

func (f *fakeImages) SetHolders(func() map[string][]string) {}

func (f *fakeImages) OnRemoval(func(context.Context, []string)) {}

func (f *fakeImages) Limits() layer.Limits { return layer.DefaultLimits() }

func (f *fakeImages) Enforce(context.Context) error { return nil }

func (f *fakeImages) EnforceSnapshots(context.Context) error { return nil }

func (f *fakeImages) PruneSnapshots(_ context.Context, before time.Time, labels map[string]string) (api.SnapshotsRemoved, error) {
	return api.SnapshotsRemoved{Removed: []string{before.UTC().Format(time.RFC3339), labels["k"]}}, nil
}

func (f *fakeImages) CollectSnapshotLayers(context.Context) error { return nil }

func (f *fakeImages) Acquire(_ context.Context, ref string) (*image.Image, func(), error) {
	img, err := f.get(ref)
	return img, func() {}, err
}

func (f *fakeImages) get(ref string) (*image.Image, error) {
	img := &image.Image{Image: api.Image{Reference: ref}, Rootfs: rootfs.Source{Layers: []string{"sha256:00"}}}
	switch ref {
	case api.HostImage:
	case "example.org/app:1":
		img.Digest = "sha256:11"
		img.Config = image.Config{Env: []string{"FROM=image", "LANG=C"}, WorkingDir: "/tmp", Entrypoint: []string{"sh", "-c"}, Cmd: []string{"echo $FROM; exit 5"}}
	case "example.org/snapshot:1":
		img.Rootfs = rootfs.Source{Layers: []string{"sha256:00", "sha256:01"}, Snapshots: []string{"sha256:d"}}
	case "example.org/hostile:1":
		img.Config.WorkingDir = "../../etc"
	case "example.org/hostile:2":
		img.Config.User = "-1"
	default:
		return nil, classify(image.ErrNotFound, fmt.Errorf("%s is not here", ref))
	}
	return img, nil
}

func (f *fakeImages) List(context.Context) ([]api.Image, error) {
	return []api.Image{{Reference: "example.org/app:1"}}, nil
}

func (f *fakeImages) Pull(_ context.Context, _ string, opts image.PullOptions) (*image.Image, error) {
	return f.pull(opts)
}

// bench is a daemon with everything that outlives it.
type bench struct {
	t       testing.TB
	engine  *runtimetest.Engine
	images  *fakeImages
	options Options
	log     *lockedBuffer
	prepare func(*Daemon) // before it serves; nil: nothing
}

// lockedBuffer collects the log.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func newBench(tb testing.TB, init runtimetest.Init) *bench {
	tb.Helper()
	checkGoroutines(tb)
	b := &bench{t: tb, engine: runtimetest.NewEngine(init), images: &fakeImages{}, log: &lockedBuffer{}}
	tb.Cleanup(b.engine.Close)
	b.options = Options{
		Version:    "test",
		DataDir:    tb.TempDir(),
		RuntimeDir: filepath.Join(tb.TempDir(), "run"),
		Engine:     b.engine,
		Images:     b.images,
		Profile: func(name string) (runtime.Profile, api.Limits, error) {
			if name != "default" && name != "hardened" && name != "build" {
				return runtime.Profile{}, api.Limits{}, errors.New("no such profile")
			}
			return runtime.Profile{Name: name, Seccomp: &specs.LinuxSeccomp{}}, api.Limits{Pids: 512}, nil
		},
		Checks: func(context.Context) []api.Check { return []api.Check{{Name: "tests", OK: true}} },
		Log:    slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("log of the daemon:\n%s", b.log)
		}
	})
	return b
}

func checkGoroutines(tb testing.TB) {
	tb.Helper()
	before := goruntime.NumGoroutine()
	tb.Cleanup(func() {
		deadline := time.After(patience)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for goruntime.NumGoroutine() > before {
			select {
			case <-tick.C:
			case <-deadline:
				buf := make([]byte, 1<<18)
				tb.Errorf("goroutines are left:\n%s", buf[:goruntime.Stack(buf, true)])
				return
			}
		}
	})
}

// running is a daemon that serves, and a client of it.
type running struct {
	*bench
	t      testing.TB // whose failure it is; a subtest may put its own
	d      *Daemon
	http   *http.Client
	cancel context.CancelFunc
	done   chan error
}

func (b *bench) start() *running {
	b.t.Helper()
	d, err := New(b.t.Context(), b.options)
	if err != nil {
		b.t.Fatal(err)
	}
	if b.prepare != nil {
		b.prepare(d)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	r := &running{bench: b, t: b.t, d: d, cancel: cancel, done: make(chan error, 1)}
	r.http = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, d.Socket()) },
	}}
	go func() { r.done <- d.Serve(ctx) }()
	b.t.Cleanup(func() {
		d.Shutdown(api.Shutdown{})
		r.wait()
	})
	return r
}

// of is the same for a subtest.
func (r *running) of(t *testing.T) *running {
	t.Helper()
	sub := *r
	sub.t = t
	return &sub
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	// A test's temporary directory may have a path that is too long for an address.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return new(net.Dialer).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}

// wait returns when Serve has. It may be called again.
func (r *running) wait() {
	r.t.Helper()
	r.http.CloseIdleConnections()
	select {
	case err := <-r.done:
		if err != nil {
			r.t.Errorf("serve: %v", err)
		}
		r.done <- nil
	case <-time.After(patience):
		buf := make([]byte, 1<<18)
		r.t.Fatalf("the daemon does not end:\n%s", buf[:goruntime.Stack(buf, true)])
	}
	r.cancel()
}

type reply struct {
	status int
	header http.Header
	body   []byte
}

// do sends body, which is JSON unless it is a reader or a string, and reads the whole answer.
func (r *running) do(method, path string, body any, headers ...string) reply {
	r.t.Helper()
	rep, err := r.try(method, path, body, headers...)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return rep
}

func (r *running) try(method, path string, body any, headers ...string) (reply, error) {
	var rd io.Reader
	switch v := body.(type) {
	case nil:
	case io.Reader:
		rd = v
	case string:
		rd = strings.NewReader(v)
	default:
		data, err := json.Marshal(v)
		if err != nil {
			return reply{}, err
		}
		rd = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://sandboxd"+path, rd)
	if err != nil {
		return reply{}, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, data}, err
}

func decode[T any](tb testing.TB, rep reply, status int) T {
	tb.Helper()
	var v T
	if rep.status != status {
		tb.Fatalf("status %d, want %d: %s", rep.status, status, rep.body)
	}
	if err := json.Unmarshal(rep.body, &v); err != nil {
		tb.Fatalf("%v: %s", err, rep.body)
	}
	return v
}

// problem checks that an answer is a problem with this code.
func problem(tb testing.TB, rep reply, code api.Code) api.Problem {
	tb.Helper()
	var p api.Problem
	if err := json.Unmarshal(rep.body, &p); err != nil {
		tb.Fatalf("status %d, not a problem: %q", rep.status, rep.body)
	}
	if got := rep.header.Get("Content-Type"); got != api.TypeProblem {
		tb.Errorf("content type %q", got)
	}
	if p.Code != code || p.Status != rep.status || p.Title == "" || p.Detail == "" {
		tb.Errorf("status %d, problem %+v, want %s", rep.status, p, code)
	}
	return p
}

func (r *running) create(req api.CreateSandbox) api.Sandbox {
	r.t.Helper()
	return decode[api.Sandbox](r.t, r.do("POST", "/v1/sandboxes", req), http.StatusCreated)
}

func (r *running) exec(id string, req api.ExecRequest) api.ExecResult {
	r.t.Helper()
	return decode[api.ExecResult](r.t, r.do("POST", "/v1/sandboxes/"+id+"/exec", req), http.StatusOK)
}
