package daemon_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

// listed is an engine that says when it is first asked what runs.
type listed struct {
	runtime.Engine
	asked func()
}

func (l listed) List(ctx context.Context) ([]*runtime.Started, error) {
	l.asked()
	return l.Engine.List(ctx)
}

// A daemon is confined before it speaks with what runs, and one that cannot be does not start.
func TestConfinedFirst(t *testing.T) {
	b := daemontest.New(t, nil)
	var confined, asked bool
	b.Options.Engine = listed{b.Engine, func() {
		if asked = true; !confined {
			t.Error("the engine is asked before the daemon is confined")
		}
	}}
	b.Options.Confine = func() (int, error) { return 0, errors.New("no fence") }
	if _, err := daemon.New(t.Context(), b.Options); err == nil || !strings.Contains(err.Error(), "no fence") {
		t.Errorf("not confined: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(b.Options.RuntimeDir, daemon.SocketName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	b.Options.Confine = func() (int, error) {
		if _, err := os.Lstat(filepath.Join(b.Options.RuntimeDir, daemon.SocketName)); err != nil {
			t.Errorf("there is no socket yet: %v", err)
		}
		confined = true
		return 7, nil
	}
	r := b.Start()
	if info := daemontest.Decode[api.SystemInfo](t, r.Do("GET", "/v1/system", nil), 200); info.Confined != 7 || !asked {
		t.Errorf("confined by %d, the engine was asked: %v", info.Confined, asked)
	}
}

func TestSocketIsPrivate(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	for path, want := range map[string]os.FileMode{
		r.Options.RuntimeDir: os.ModeDir | 0o700,
		r.D.Socket():         os.ModeSocket | 0o600,
	} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode() != want {
			t.Errorf("%s: %v, want %v", path, st.Mode(), want)
		}
	}
}

func TestSecondDaemonIsRefusedAndAStaleSocketReplaced(t *testing.T) {
	b := daemontest.New(t, nil)
	if err := os.MkdirAll(b.Options.RuntimeDir, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := servicetest.ListenStale(b.Options.RuntimeDir, "api.sock")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close() // the path stays
	r := b.Start()
	if _, err := daemon.New(t.Context(), b.Options); err == nil || !strings.Contains(err.Error(), "another sandboxd") {
		t.Errorf("second daemon: %v", err)
	}
	// Another data directory, but the same socket.
	options := b.Options
	options.DataDir = t.TempDir()
	if _, err := daemon.New(t.Context(), options); err == nil || !strings.Contains(err.Error(), "another sandboxd") {
		t.Errorf("second daemon on one socket: %v", err)
	}
	// Another runtime directory too, as a command has that starts a daemon: nothing but the socket
	// itself is common to them.
	options.RuntimeDir, options.Socket = t.TempDir(), r.D.Socket()
	if _, err := daemon.New(t.Context(), options); err == nil || !strings.Contains(err.Error(), "another sandboxd serves it, or is about to") {
		t.Errorf("second daemon with a runtime directory of its own: %v", err)
	}
	if rep := r.Do("GET", "/healthz", nil); rep.Status != 200 {
		t.Errorf("the first does not answer any more: %d", rep.Status)
	}
}

// ending is an engine that counts its ends.
type ending struct {
	runtime.Engine
	ended *int
}

func (e ending) Shutdown(context.Context) error {
	*e.ended++
	return nil
}

func TestShutdownDeletesOrKeeps(t *testing.T) {
	b := daemontest.New(t, nil)
	ended := 0
	b.Options.Engine = ending{b.Engine, &ended}
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Name: "kept"})
	if rep := r.Do("POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true}); rep.Status != http.StatusAccepted {
		t.Fatalf("shutdown: %d %s", rep.Status, rep.Body)
	}
	r.Wait()
	if _, err := os.Stat(r.D.Socket()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if ids := b.Engine.IDs(); !slices.Equal(ids, []string{sb.ID}) || ended != 0 {
		t.Fatalf("engine has %v, ended %d times", ids, ended)
	}
	r = b.Start()
	if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/kept", nil), 200); got.State != api.StateRunning {
		t.Errorf("%+v", got)
	}
	if rep := r.Do("POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true, StopSandboxes: true}); rep.Status != http.StatusBadRequest {
		t.Errorf("kept and stopped: %d %s", rep.Status, rep.Body)
	}
	// Stopped ones keep their records, and their files are the engine's to keep.
	if rep := r.Do("POST", "/v1/system/shutdown", api.Shutdown{StopSandboxes: true}); rep.Status != http.StatusAccepted {
		t.Fatalf("shutdown: %d %s", rep.Status, rep.Body)
	}
	r.Wait()
	if ended != 1 {
		t.Errorf("engine has ended %d times", ended)
	}
	r = b.Start()
	if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/kept", nil), 200); got.State != api.StateStopped || got.Reason == "" {
		t.Errorf("%+v", got)
	}
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/kept/start", nil), 200)
	if rep := r.Do("POST", "/v1/system/shutdown", nil); rep.Status != http.StatusAccepted {
		t.Fatalf("shutdown: %d %s", rep.Status, rep.Body)
	}
	r.Wait()
	if ids := b.Engine.IDs(); len(ids) != 0 || ended != 2 {
		t.Errorf("engine has %v, ended %d times", ids, ended)
	}
	// A signal, too, leaves sandboxes to the next daemon.
	r = b.Start()
	r.Create(api.CreateSandbox{})
	r.Cancel()
	r.Wait()
	if ids := b.Engine.IDs(); len(ids) != 1 {
		t.Errorf("engine has %v", ids)
	}
}

// A client that announces a request and stays silent holds a connection only.
func TestHalfOpenRequestsDoNotHoldUpTheEnd(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	sb := r.Create(api.CreateSandbox{})
	for _, send := range []string{
		"", "POST /v1/sand", "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"PUT /v1/sandboxes/" + sb.ID + "/files?path=/tmp/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
	} {
		c, err := servicetest.Dial(t.Context(), r.D.Socket())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, send); err != nil {
			t.Fatal(err)
		}
	}
	r.Do("GET", "/healthz", nil)
	r.D.SetDrain(0) // it is in vain, and not what this is about
	begun := time.Now()
	r.D.Shutdown(api.Shutdown{})
	r.Wait()
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("the end took %s", d)
	}
}

// The end of the daemon does not wait for a watch, which has no end of its own.
func TestShutdownEndsWatches(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	dir := t.TempDir()
	c, err := servicetest.Dial(t.Context(), r.D.Socket())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	fmt.Fprintf(c, "GET /v1/sandboxes/%s/watch?path=%s HTTP/1.1\r\nHost: x\r\n\r\n", sb.ID, url.QueryEscape(dir))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	var e api.FileChange
	if err := dec.Decode(&e); err != nil || e.Kind != api.WatchReady || e.Path != dir {
		t.Fatalf("%+v, %v", e, err)
	}
	r.D.SetDrain(time.Hour) // what ends with the requests that are cut off does not end
	r.D.Shutdown(api.Shutdown{})
	if err := c.SetReadDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		t.Fatal(err)
	}
	e = api.FileChange{}
	if err := dec.Decode(&e); err != nil || e.Error == nil || e.Error.Code != api.CodeUnavailable {
		t.Errorf("%+v, %v", e, err)
	}
}
