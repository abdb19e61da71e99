package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// fakeSandbox answers like a daemon with one sandbox, over a socket. It runs the programs on the
// host, in a temporary directory. It tests how the loop handles answers, not the restrictions of a
// sandbox; tests/functional repeats the runs in real ones.
type fakeSandbox struct {
	dir string // the prompt configs of tests name directories below it

	mu       sync.Mutex
	req      api.CreateSandbox
	execs    []api.ExecRequest
	deleted  int
	stopped  int
	gone     bool                                      // answers like a daemon whose sandbox has ended
	missing  map[string]bool                           // programs that the "image" lacks
	onExec   func(api.ExecRequest)                     // called before each exec
	held     bool                                      // an exec waits until its client hangs up
	exec     func(api.ExecRequest, io.Writer) api.Exit // replaces the programs
	read     func() io.ReadCloser                      // replaces the files
	entries  []api.FileEntry                           // replaces the lists
	refuse   error                                     // answers archives
	write    func(path string)                         // replaces the writing of files
	expire   <-chan struct{}                           // closed when an exec's timeout ends; nil means by the clock
	archive  func() (io.ReadCloser, error)             // replaces the output directory
	onDelete func(ctx context.Context) error           // called by Delete

	cpu       func() time.Duration // nil means not counted
	snapshots [][]byte             // of dir, as tar
	comments  []string             // of the snapshots
}

func problem(code api.Code, detail string) *api.Problem {
	return &api.Problem{Code: code, Title: string(code), Status: code.Status(), Detail: detail}
}

// serve starts a daemon on a Unix socket and returns a client of it.
func serve(t *testing.T, handler http.Handler) *client.Client {
	t.Helper()
	dir, err := os.MkdirTemp("", "ag") //nolint:usetesting // a socket's path has 108 bytes, and a test's name is long
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(handler)
	_ = srv.Listener.Close() // of TCP
	srv.Listener, srv.Config.ErrorLog = listener, log.New(io.Discard, "", 0)
	srv.Start()
	c := client.New(socket)
	t.Cleanup(func() {
		c.Close()
		srv.Close() // waits for requests: one that was hung up on may still have a program in the test's directory
		_ = os.RemoveAll(dir)
	})
	return c
}

// open serves the fake and returns the sandbox behind its socket.
func (s *fakeSandbox) open(t *testing.T) *Sandbox {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any, err error) {
		status := http.StatusOK
		w.Header().Set("Content-Type", api.TypeJSON)
		if err != nil {
			p, ok := errors.AsType[*api.Problem](err)
			if !ok {
				p = problem(api.CodeInternal, err.Error())
			}
			w.Header().Set("Content-Type", api.TypeProblem)
			v, status = p, p.Status
		}
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v)
	}
	content := func(w http.ResponseWriter, typ string, r io.ReadCloser, err error) {
		if err != nil {
			answer(w, nil, err)
			return
		}
		w.Header().Set("Content-Type", typ)
		if _, err := io.Copy(w, r); errors.Join(err, r.Close()) != nil {
			panic(http.ErrAbortHandler) // as the daemon does: the client must not take a part for the whole
		}
	}
	path := func(r *http.Request) string { return r.URL.Query().Get("path") }
	mux.HandleFunc("POST /v1/sandboxes/fake/exec", func(w http.ResponseWriter, r *http.Request) {
		var req api.ExecRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			answer(w, nil, problem(api.CodeInvalid, err.Error()))
			return
		}
		var mu sync.Mutex
		begun := false
		line := func(e api.ExecEvent) error {
			mu.Lock()
			defer mu.Unlock()
			begun = true
			w.Header().Set("Content-Type", api.TypeNDJSON)
			return errors.Join(json.NewEncoder(w).Encode(e), http.NewResponseController(w).Flush())
		}
		output := func(stream string) writer {
			return func(p []byte) (int, error) { return len(p), line(api.ExecEvent{Stream: stream, Data: p}) }
		}
		end, err := s.run(r.Context(), req, output("stdout"), output("stderr"))
		switch {
		case err == nil:
			_ = line(api.ExecEvent{Exit: &end.Exit, Usage: &end.Usage})
		case begun:
			panic(http.ErrAbortHandler)
		default:
			answer(w, nil, err)
		}
	})
	mux.HandleFunc("GET /v1/sandboxes/fake/files", func(w http.ResponseWriter, r *http.Request) {
		f, err := s.readFile(path(r))
		content(w, api.TypeBytes, f, err)
	})
	mux.HandleFunc("PUT /v1/sandboxes/fake/files", func(w http.ResponseWriter, r *http.Request) {
		mode, err := strconv.ParseUint(r.URL.Query().Get("mode"), 8, 32)
		answer(w, nil, errors.Join(err, s.writeFile(path(r), r.Body, fs.FileMode(mode))))
	})
	mux.HandleFunc("GET /v1/sandboxes/fake/archive", func(w http.ResponseWriter, r *http.Request) {
		f, err := s.archiveOut(path(r))
		content(w, api.TypeTar, f, err)
	})
	mux.HandleFunc("PUT /v1/sandboxes/fake/archive", func(w http.ResponseWriter, r *http.Request) {
		answer(w, nil, s.archiveIn(path(r), r.Body))
	})
	mux.HandleFunc("GET /v1/sandboxes/fake/list", func(w http.ResponseWriter, r *http.Request) {
		enc := json.NewEncoder(w)
		w.Header().Set("Content-Type", api.TypeNDJSON)
		err := s.list(path(r), func(e api.FileEntry) error { return enc.Encode(api.ListEvent{Entry: &e}) })
		last := api.ListEvent{Done: err == nil}
		last.Error, _ = errors.AsType[*api.Problem](err)
		_ = enc.Encode(last)
	})
	mux.HandleFunc("GET /v1/sandboxes/fake/stat", func(w http.ResponseWriter, r *http.Request) {
		info, err := os.Stat(path(r))
		if err != nil {
			answer(w, nil, problem(api.CodeNotFound, path(r)))
			return
		}
		e := api.FileEntry{Path: path(r), Type: api.TypeFile}
		if info.IsDir() {
			e.Type = api.TypeDirectory
		}
		answer(w, e, nil)
	})
	mux.HandleFunc("GET /v1/sandboxes/fake/stats", func(w http.ResponseWriter, _ *http.Request) {
		stats := api.Stats{}
		if s.cpu != nil {
			used := float64(s.cpu()) / float64(time.Millisecond)
			stats.CPU = &api.CPUStats{UsageMS: &used}
		}
		answer(w, stats, s.check())
	})
	mux.HandleFunc("POST /v1/sandboxes/fake/snapshots", func(w http.ResponseWriter, r *http.Request) {
		var req api.TakeSnapshot
		err := json.NewDecoder(r.Body).Decode(&req)
		id := ""
		if err == nil {
			id, err = s.snapshot(req.Comment)
		}
		answer(w, api.Snapshot{ID: id}, err)
	})
	mux.HandleFunc("POST /v1/sandboxes/fake/stop", func(w http.ResponseWriter, r *http.Request) {
		answer(w, api.Sandbox{}, s.stop(r.Context()))
	})
	mux.HandleFunc("DELETE /v1/sandboxes/fake", func(w http.ResponseWriter, r *http.Request) {
		answer(w, nil, s.remove(r.Context()))
	})
	return NewSandbox(serve(t, mux), "fake")
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func (s *fakeSandbox) check() error {
	if s.gone {
		return problem(api.CodeGone, "the sandbox fake has ended")
	}
	return nil
}

func (s *fakeSandbox) run(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (*client.End, error) {
	s.mu.Lock()
	s.execs = append(s.execs, req)
	err := s.check()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if s.onExec != nil {
		s.onExec(req)
	}
	if s.held {
		<-ctx.Done()
	}
	if s.exec != nil {
		return &client.End{Exit: s.exec(req, stdout)}, nil
	}
	if s.missing[req.Argv[0]] {
		return nil, problem(api.CodeProgramMissing, req.Argv[0]+": not found in PATH")
	}
	if fi, err := os.Stat(req.Cwd); err != nil || !fi.IsDir() {
		return nil, problem(api.CodeInvalid, "working directory "+req.Cwd+": no such directory")
	}
	timed, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.expire == nil {
		defer time.AfterFunc(time.Duration(req.Timeout*float64(time.Second)), cancel).Stop()
	} else {
		go func() {
			select {
			case <-s.expire:
				cancel()
			case <-timed.Done():
			}
		}()
	}
	cmd := exec.CommandContext(timed, req.Argv[0], req.Argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = req.Cwd, stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Run()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return nil, problem(api.CodeInternal, err.Error())
	}
	out := &client.End{Exit: api.Exit{Code: cmd.ProcessState.ExitCode(), Timeout: timed.Err() != nil}}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		out.Exit.Code, out.Exit.Signal = 128+int(ws.Signal()), "SIGKILL"
	}
	return out, nil
}

func (s *fakeSandbox) readFile(path string) (io.ReadCloser, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.read != nil {
		return s.read(), nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, problem(api.CodeNotFound, err.Error())
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, errors.Join(problem(api.CodeInvalid, path+" is not a regular file"), f.Close())
	}
	return f, nil
}

func (s *fakeSandbox) writeFile(path string, r io.Reader, mode fs.FileMode) error {
	if err := s.check(); err != nil {
		return err
	}
	if s.write != nil {
		s.write(path)
		_, err := io.Copy(io.Discard, r)
		return err
	}
	write := func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.CreateTemp(filepath.Dir(path), "new")
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		return errors.Join(err, f.Chmod(mode), f.Close(), os.Rename(f.Name(), path))
	}
	if err := write(); err != nil {
		return problem(api.CodeInvalid, err.Error())
	}
	return nil
}

func (s *fakeSandbox) archiveIn(path string, r io.Reader) error {
	if s.refuse != nil {
		return s.refuse
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	c, err := extract(root, r, path, CollectLimits{Links: true})
	if err == nil && len(c.Skipped) > 0 {
		err = fmt.Errorf("skipped %v", c.Skipped)
	}
	return errors.Join(err, root.Close())
}

func (s *fakeSandbox) archiveOut(path string) (io.ReadCloser, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.archive != nil {
		return s.archive()
	}
	if fi, err := os.Stat(path); err == nil && fi.Mode().IsRegular() {
		return fileArchive(path)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, problem(api.CodeNotFound, err.Error())
	}
	pr, pw := io.Pipe()
	go func() {
		_, err := packDir(root, pw)
		pw.CloseWithError(errors.Join(err, root.Close()))
	}()
	return pr, nil
}

// fileArchive returns the archive of one file, as the daemon does.
func fileArchive(path string) (io.ReadCloser, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	err = tw.WriteHeader(&tar.Header{Name: filepath.Base(path), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))})
	_, werr := tw.Write(content)
	return io.NopCloser(&b), errors.Join(err, werr, tw.Close())
}

func (s *fakeSandbox) stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped++
	return ctx.Err()
}

func (s *fakeSandbox) remove(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted++
	if s.onDelete != nil {
		return s.onDelete(ctx)
	}
	return ctx.Err()
}

// newToolbox returns tools in a fake sandbox with an empty working directory.
func newToolbox(t *testing.T) (*toolbox, *fakeSandbox, string) {
	t.Helper()
	dir := t.TempDir()
	s := &fakeSandbox{dir: dir}
	return &toolbox{sandbox: s.open(t), workingDir: dir, timeout: DefaultToolTimeout, outputLimit: defaultOutputLimit, shell: "bash", scriptDir: dir}, s, dir
}

func (s *fakeSandbox) list(path string, on func(api.FileEntry) error) error {
	if err := s.check(); err != nil {
		return err
	}
	for _, e := range s.entries {
		if err := on(e); err != nil {
			return err
		}
	}
	if s.entries != nil || path == "/" { // of the host, and no directory of the sandbox
		return nil
	}
	if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
		return problem(api.CodeNotFound, path)
	}
	return filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == path {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		e := api.FileEntry{Path: name, Type: api.TypeFile, Size: info.Size(), MTime: info.ModTime()}
		switch {
		case d.IsDir():
			e.Type = api.TypeDirectory
		case info.Mode()&fs.ModeSymlink != 0:
			e.Type = api.TypeSymlink
		}
		return on(e)
	})
}

func (s *fakeSandbox) snapshot(comment string) (string, error) {
	if err := s.check(); err != nil {
		return "", err
	}
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if _, err := packDir(root, &b); err != nil {
		return "", errors.Join(err, root.Close())
	}
	s.snapshots = append(s.snapshots, b.Bytes())
	s.comments = append(s.comments, comment)
	return fmt.Sprint("snap", len(s.snapshots)), root.Close()
}
