package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// fakeSandbox runs programs on the host, in a temporary directory. It tests how the loop handles
// answers, not the restrictions of a sandbox; tests/functional repeats the runs in real ones.
type fakeSandbox struct {
	dir string // the prompt configs of tests name directories below it

	mu       sync.Mutex
	req      api.CreateSandbox
	execs    []api.ExecRequest
	deleted  int
	stopped  int
	gone     bool                            // answers like a daemon whose sandbox has ended
	missing  map[string]bool                 // programs that the "image" lacks
	onExec   func(api.ExecRequest)           // called before each exec
	expire   <-chan struct{}                 // closed when an exec's timeout ends; nil means by the clock
	archive  func() (io.ReadCloser, error)   // replaces the output directory
	onDelete func(ctx context.Context) error // called by Delete

	cpu       func() time.Duration // nil means not counted
	snapshots [][]byte             // of dir, as tar
	comments  []string             // of the snapshots
}

func problem(code api.Code, detail string) error {
	return &api.Problem{Code: code, Title: string(code), Status: code.Status(), Detail: detail}
}

func (s *fakeSandbox) ID() string { return "fake" }

func (s *fakeSandbox) check() error {
	if s.gone {
		return problem(api.CodeGone, "the sandbox fake has ended")
	}
	return nil
}

func (s *fakeSandbox) Exec(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (Outcome, error) {
	s.mu.Lock()
	s.execs = append(s.execs, req)
	err := s.check()
	s.mu.Unlock()
	if err != nil {
		return Outcome{}, err
	}
	if s.onExec != nil {
		s.onExec(req)
	}
	if s.missing[req.Argv[0]] {
		return Outcome{}, problem(api.CodeProgramMissing, req.Argv[0]+": not found in PATH")
	}
	if fi, err := os.Stat(req.Cwd); err != nil || !fi.IsDir() {
		return Outcome{}, problem(api.CodeInvalid, "working directory "+req.Cwd+": no such directory")
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
		return Outcome{}, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return Outcome{}, problem(api.CodeInternal, err.Error())
	}
	out := Outcome{Exit: api.Exit{Code: cmd.ProcessState.ExitCode(), Timeout: timed.Err() != nil}}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		out.Exit.Code, out.Exit.Signal = 128+int(ws.Signal()), "SIGKILL"
	}
	return out, nil
}

func (s *fakeSandbox) ReadFile(_ context.Context, path string) (io.ReadCloser, error) {
	if err := s.check(); err != nil {
		return nil, err
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

func (s *fakeSandbox) WriteFile(_ context.Context, path string, r io.Reader, mode fs.FileMode, _ string) error {
	if err := s.check(); err != nil {
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

func (s *fakeSandbox) ArchiveIn(_ context.Context, path string, r io.Reader) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	c, err := extract(root, r, CollectLimits{})
	if err == nil && len(c.Skipped) > 0 {
		err = fmt.Errorf("skipped %v", c.Skipped)
	}
	return errors.Join(err, root.Close())
}

func (s *fakeSandbox) ArchiveOut(_ context.Context, path string) (io.ReadCloser, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.archive != nil {
		return s.archive()
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

func (s *fakeSandbox) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped++
	return ctx.Err()
}

func (s *fakeSandbox) Delete(ctx context.Context) error {
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
	return &toolbox{sandbox: s, workingDir: dir, timeout: DefaultToolTimeout, outputLimit: defaultOutputLimit, shell: "bash", scriptDir: dir}, s, dir
}

func (s *fakeSandbox) List(_ context.Context, path string, on func(api.FileEntry) error) (bool, error) {
	if err := s.check(); err != nil {
		return false, err
	}
	if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
		return false, problem(api.CodeNotFound, path)
	}
	return false, filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == path {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		e := api.FileEntry{Path: name, Type: api.TypeFile, Size: info.Size()}
		switch {
		case d.IsDir():
			e.Type = api.TypeDirectory
		case info.Mode()&fs.ModeSymlink != 0:
			e.Type = api.TypeSymlink
		}
		return on(e)
	})
}

func (s *fakeSandbox) CPU(context.Context) (time.Duration, bool, error) {
	if s.cpu == nil {
		return 0, false, s.check()
	}
	return s.cpu(), true, s.check()
}

func (s *fakeSandbox) Snapshot(_ context.Context, comment string) (string, error) {
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
