package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Sandbox is a sandbox behind the daemon's socket.
type Sandbox struct {
	api *client.Client
	id  string
}

// NewSandbox returns the existing sandbox with this ID.
func NewSandbox(c *client.Client, id string) *Sandbox { return &Sandbox{api: c, id: id} }

// OpenSandbox returns the running sandbox with this ID or name. It starts a stopped sandbox and
// resumes a paused one, and sets its remaining lifetime. If the sandbox does not exist, the error
// is an [*api.Problem] of [api.CodeNotFound].
func OpenSandbox(ctx context.Context, c *client.Client, ref string, lifetime time.Duration) (*Sandbox, error) {
	sb, err := waitCreated(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	switch sb.State {
	case api.StateStopped, api.StateLost:
		sb, err = c.StartSandbox(ctx, sb.ID, api.StartSandbox{Timeout: lifetime.Seconds()})
	case api.StatePaused:
		sb, err = c.ResumeSandbox(ctx, sb.ID)
	case api.StateCreating, api.StateRunning:
	}
	if err != nil {
		return nil, err
	}
	if _, err := c.UpdateSandbox(ctx, sb.ID, api.UpdateSandbox{Timeout: lifetime.Seconds()}); err != nil {
		return nil, err
	}
	return NewSandbox(c, sb.ID), nil
}

// createTimeout bounds the wait for a sandbox that a killed process has requested; createPoll is
// the polling interval.
const (
	createTimeout = time.Minute
	createPoll    = 50 * time.Millisecond
)

// waitCreated returns a sandbox once its creation is over. Until then the daemon refuses all
// operations on it, deletion included.
func waitCreated(ctx context.Context, c *client.Client, ref string) (*api.Sandbox, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, createTimeout, fmt.Errorf("it is still being created after %v", createTimeout))
	defer cancel()
	tick := time.NewTicker(createPoll)
	defer tick.Stop()
	for {
		sb, err := c.GetSandbox(ctx, ref)
		if err != nil || sb.State != api.StateCreating {
			return sb, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the sandbox %s: %w", ref, context.Cause(ctx))
		}
	}
}

// RemoveLabelled deletes the sandboxes that have all of these labels.
func RemoveLabelled(ctx context.Context, c *client.Client, labels map[string]string) error {
	var opts client.ListOptions
	for key, value := range labels {
		opts.Labels = append(opts.Labels, key+"="+value)
	}
	list, err := c.ListSandboxes(ctx, opts)
	if err != nil {
		return err
	}
	for i := range list {
		if err := RemoveSandbox(ctx, c, list[i].ID); err != nil {
			return err
		}
	}
	return nil
}

// RemoveSandbox deletes the sandbox with this ID in any state. A missing one is no error.
func RemoveSandbox(ctx context.Context, c *client.Client, id string) error {
	_, err := waitCreated(ctx, c, id)
	if err == nil {
		err = c.DeleteSandbox(ctx, id)
	}
	if hasCode(err, api.CodeNotFound) {
		err = nil
	}
	return err
}

// ID returns the sandbox's ID, which identifies it in the record.
func (s *Sandbox) ID() string { return s.id }

// Exec runs a program to its end and copies its output to stdout and stderr as it arrives: a
// buffered answer would keep the beginning only, and both ends matter. Any exit code, and a kill at
// the timeout, is a result and not an error.
func (s *Sandbox) Exec(ctx context.Context, req api.ExecRequest, stdout, stderr io.Writer) (*client.End, error) {
	return s.api.ExecStream(ctx, s.id, req, func(e api.ExecEvent) error {
		w := stdout
		if e.Stream == "stderr" {
			w = stderr
		}
		if out := client.Output(e); len(out) > 0 {
			if _, err := w.Write(out); err != nil {
				return fmt.Errorf("keep the output: %w", err)
			}
		}
		return nil
	})
}

// ReadFile opens a regular file. The error for a missing one is an [*api.Problem] of
// [api.CodeNotFound].
func (s *Sandbox) ReadFile(ctx context.Context, path string) (io.ReadCloser, error) {
	return s.api.ReadFile(ctx, s.id, path)
}

// WriteFile writes a file as a whole or not at all, and makes its parent directories. An empty user
// means the sandbox's.
func (s *Sandbox) WriteFile(ctx context.Context, path string, r io.Reader, mode fs.FileMode, user string) error {
	return s.api.WriteFile(ctx, s.id, path, r, mode, user)
}

// ArchiveIn extracts a tar stream below path, and makes path.
func (s *Sandbox) ArchiveIn(ctx context.Context, path string, r io.Reader) error {
	return s.api.ArchiveIn(ctx, s.id, path, r)
}

// ArchiveOut returns the tree at path as a tar stream with relative names.
func (s *Sandbox) ArchiveOut(ctx context.Context, path string) (io.ReadCloser, error) {
	return s.api.ArchiveOut(ctx, s.id, path)
}

// listDepth exceeds the depth of any likely output. Deeper files are collected and checked all the
// same.
const listDepth = 64

// List calls on for every file below a directory, and reports omissions.
func (s *Sandbox) List(ctx context.Context, path string, on func(api.FileEntry) error) (more bool, err error) {
	return s.list(ctx, path, listDepth, on)
}

func (s *Sandbox) list(ctx context.Context, path string, depth int, on func(api.FileEntry) error) (more bool, err error) {
	return s.api.ListEachFile(ctx, s.id, path, depth, on)
}

// CPU returns the processor time of all processes since the sandbox's start; known is false if the
// kernel does not count it.
func (s *Sandbox) CPU(ctx context.Context) (used time.Duration, known bool, err error) {
	stats, err := s.api.Stats(ctx, s.id)
	if err != nil || stats.CPU == nil || stats.CPU.UsageMS == nil {
		return 0, false, err
	}
	return time.Duration(*stats.CPU.UsageMS * float64(time.Millisecond)), true, nil
}

// turnLabel with the value turnValue marks snapshots of turns.
const turnLabel, turnValue = "sandboxd.agent", "turn"

// Snapshot keeps the current file system and returns the snapshot's ID.
func (s *Sandbox) Snapshot(ctx context.Context, comment string) (string, error) {
	taken, err := s.api.TakeSnapshot(ctx, s.id, api.TakeSnapshot{Comment: comment, Labels: map[string]string{turnLabel: turnValue}})
	if err != nil {
		return "", err
	}
	return taken.ID, nil
}

// stopGrace is the time in seconds for background programs of a run to end.
const stopGrace = 2

// Stop ends all processes of the sandbox and keeps its files.
func (s *Sandbox) Stop(ctx context.Context) error {
	grace := float64(stopGrace)
	_, err := s.api.StopSandbox(ctx, s.id, api.StopSandbox{Grace: &grace})
	return err
}

// Delete ends all processes of the sandbox and removes it.
func (s *Sandbox) Delete(ctx context.Context) error { return s.api.DeleteSandbox(ctx, s.id) }

// hasCode reports whether err is a problem of that code.
func hasCode(err error, code api.Code) bool {
	return errors.Is(err, &api.Problem{Code: code})
}

// lost reports whether err of an exec means that the sandbox is gone, and not that the call was
// refused.
func lost(err error) bool {
	var p *api.Problem
	if !errors.As(err, &p) {
		return true // not from the daemon: the connection or the daemon is gone
	}
	switch p.Code {
	case api.CodeGone, api.CodeNotFound, api.CodeConflict, api.CodeUnavailable:
		return true
	case api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeExists, api.CodeProgramMissing, api.CodeProgramDenied,
		api.CodeUnenforceable, api.CodeRegistry, api.CodeImage, api.CodeBuild, api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused, api.CodeInternal:
	}
	return false
}
