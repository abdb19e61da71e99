package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/landlock"
)

// A worker reaches its daemon even if Landlock governs socket paths, and reads the existing inputs
// of runs.
func TestAgentWorkersConfinement(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("LLM_IN_SANDBOX_CONFIG", "")
	t.Chdir(dir)
	socket, inputs, runs := filepath.Join(dir, "run", "api.sock"), t.TempDir(), t.TempDir()
	w, err := workerFlags{Runs: runs, Inputs: []string{inputs, filepath.Join(dir, "gone")}}.confinement(cmdline.Deps{}.WithSocket(socket))
	if err != nil {
		t.Fatal(err)
	}
	w.ABI = landlock.Sockets
	rules := w.Plan().Rules
	for path, want := range map[string]uint64{
		filepath.Dir(socket): unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX,
		inputs:               unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR,
	} {
		if !slices.Contains(rules, confine.Rule{Path: path, Access: want}) {
			t.Errorf("%s is not allowed %#x:\n%s", path, want, w.Plan())
		}
	}
	toRuns := slices.ContainsFunc(rules, func(r confine.Rule) bool { return r.Path == runs })
	if !toRuns || slices.Contains(w.Dirs, filepath.Join(dir, "gone")) {
		t.Errorf("the plan is\n%s", w.Plan())
	}
}

// A run that cannot begin reports the reason with the right class, and no secret.
func TestAgentProblems(t *testing.T) {
	const key = "sk-planted-key"
	full := &fs.PathError{Op: "write", Path: "r", Err: syscall.ENOSPC}
	given := &api.Problem{Code: api.CodeNotFound, Detail: "no such image"}
	for _, tc := range []struct {
		err  error
		code api.Code
		text string
	}{
		{errors.New("the server at http://h/?key=" + key + " is none"), api.CodeInvalid, "the server at http://h/?key=[secret] is none"},
		{fmt.Errorf("resume: %w", agent.ErrRunning), api.CodeConflict, "resume: " + agent.ErrRunning.Error()},
		{fmt.Errorf("begin: %w", full), api.CodeInternal, "begin: write r: no space left on device"},
		{fmt.Errorf("create: %w", given), api.CodeNotFound, "no such image"},
	} {
		// A key of one letter, common with servers without keys, is part of every word.
		if p := agentProblem(tc.err, []string{"e", "", key}); p.Code != tc.code || p.Detail != tc.text {
			t.Errorf("%v: %s %q", tc.err, p.Code, p.Detail)
		}
	}
}
